"""The values of a program that `explain` prints, each with the operations that compute it from earlier ones, and its
formula: the equation of each operation in the table, with the symbols of what it reads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from triptych import ops
from triptych.program import Entry, Instruction
from .reference_ops import run
from .steps import PrintedTensors

NORMS = ("layer_norm", "rms_norm")
BENDS = ("relu", "gelu", "silu", "tanh")
TOGETHER = {
    *product(("linear", "add", "experts"), (*NORMS, "scale")), *product(NORMS, ("rotate",)), ("add", "add"),
    *product(BENDS, ("multiply",)), *product(("conv1d",), BENDS),
    ("disentangled_bias", "attend"),
}  # fmt: skip
"""(operation, the one that reads its result): a step shows both, where the result has no name of its own."""
FUNCTIONS = {
    "layer_norm": "norm", "rms_norm": "norm", "rotate": "rotate", "gelu": "gelu", "silu": "silu",
    "l2_normalize": "normalize",
}  # fmt: skip
"""Operations shown as a function, with their equation after it."""
LETTERS = {
    "out": "o", "project": "e", "widen": "e", "tokens": "head", "proj": "head", "classes": "c", "ends": "c", "conv": "c"
}  # fmt: skip
TABLES = {"tokens": "E", "token_types": "S", "position": "P"}
OF_PLACES = ("positions", "row_ends", "q_pos", "k_pos")


@dataclass(frozen=True, eq=False)
class AppliedOp:
    """An operation and what it is applied to: the name of a printed value, or an operation of the same step."""

    step: Instruction
    inputs: dict[str, AppliedOp | str]
    constant: bool = False  # depends on positions and parameters alone

    @property
    def op(self) -> str:
        return self.step.op

    def chain(self) -> Iterator[AppliedOp]:
        """This operation, then those inside it."""
        yield self
        for argument in self.inputs.values():
            if isinstance(argument, AppliedOp):
                yield from argument.chain()

    def reads(self) -> Iterator[str]:
        """The printed values that it is made from."""
        for argument in self.inputs.values():
            if isinstance(argument, AppliedOp):
                yield from argument.reads()
            else:
                yield argument


@dataclass(frozen=True, eq=False)
class ComputedValue:
    """A value that is printed under `name`, and `label` in the program."""

    name: str
    label: str
    entry: str
    value: AppliedOp


def computed(
    entries: Mapping[str, Entry], entry: str, steps: Sequence[Instruction], names: dict[str, str],
    together: bool = False,
) -> list[ComputedValue]:  # fmt: skip
    """The values that `steps` of an entry make, in order.

    names      value of the program -> name under which it was printed; grows by those made here.
    together   show all operations up to the next site in one step, not only those of TOGETHER.

    A value is printed where it passes a site, where two operations read it, or where its reader is not shown in one
    step with it.  A site that only passes on what another has printed is the same value.
    """
    values: list[ComputedValue] = []
    dataflow = _Dataflow(entries[entry], names, together)
    for step in steps:
        label = step.out[0]
        if step.op in ("site", "extend"):
            (source,) = step.inputs.values()
            names[label] = names[source]
        elif step.op == "module":
            names[label] = f"{step.attributes['module']} as a module"
        elif not dataflow.inside(label):
            name = dataflow.name(label) or f"{entry} {label}"
            values.append(ComputedValue(name, label, entry, dataflow.applied(label)))
            names[label] = values[-1].name
    return values


class _Dataflow:
    """The maker and the readers of each value of an entry; `names` and `together` as in `computed`."""

    def __init__(self, entry: Entry, names: Mapping[str, str], together: bool) -> None:
        self.names, self.together = names, together
        self.maker = {step.out[0]: step for step in entry.instructions}
        self.readers = defaultdict[str, list[Instruction]](list)
        for step in entry.instructions:
            for label in step.inputs.values():
                self.readers[label].append(step)

    def applied(self, label: str) -> AppliedOp:
        """The operation that makes a value, with those inside it."""
        step = self.maker[label]
        inputs = {key: self._argument(one) for key, one in step.inputs.items()}
        return AppliedOp(step, inputs, self._constant(label))

    def _argument(self, label: str) -> AppliedOp | str:
        if label in self.names:
            return self.names[label]
        return self.applied(label) if label in self.maker else label

    def _constant(self, label: str) -> bool:
        """Whether a value depends on positions and parameters alone."""
        if label not in self.maker:
            return label in OF_PLACES
        step = self.maker[label]
        return step.op != "module" and all(map(self._constant, step.inputs.values()))

    def inside(self, label: str) -> bool:
        """Whether a value is shown only as a part of what is made from it."""
        if self._constant(label):
            return True
        readers = [reader.op for reader in self.readers[label]]
        if len(readers) != 1 or readers == ["site"]:
            return False
        return self.together or (self.maker[label].op, readers[0]) in TOGETHER

    def _site(self, label: str) -> str | None:
        """The site that a value passes."""
        return next((reader.out[0] for reader in self.readers[label] if reader.op == "site"), None)

    def name(self, label: str) -> str | None:
        """Under which a value is printed: its site, or what it is of one, if it has one."""
        step, own = self.maker[label], self._site(label)
        if step.op == "split_heads" and own is not None:
            return f"{own} by head"
        if step.op == "merge_heads":
            return f"{self.names[step.inputs['x']]} side by side"
        split = (self._site(reader.out[0]) for reader in self.readers[label] if reader.op == "split_heads")
        return own or next(split, None)


def evaluate(value: AppliedOp | str, printed: PrintedTensors, results: Mapping[str, Tensor] | None = None) -> Tensor:
    """A value once more, from what was printed: by `again`, not by the operation that made it.  `results` stand for
    printed values, and for the results of operations."""
    known = {} if results is None else results
    name = value if isinstance(value, str) else value.step.out[0]
    if name in known:
        return known[name]
    if isinstance(value, str):
        return printed[value]
    if value.constant or value.op == "embedding":
        return printed[constant_name(value)]
    weights = {key: printed[name] for key, name in value.step.weights.items()}
    inputs = {key: evaluate(one, printed, known) for key, one in value.inputs.items()}
    return run(value.op, inputs | weights, value.step.attributes)


def constant_name(value: AppliedOp) -> str:
    """Under which a table's rows, cosines and other values of positions are printed."""
    if value.op == "embedding":
        return f"{value.step.weights['weight']}[{next(value.reads())}]"
    return f"{value.op} {value.step.out[0]}"


# ---------------------------------------------------------------- formulas


def parameter_symbol(name: str, op: str) -> str:
    """`W_q` for `decoder.blocks.0.attn.q.weight`."""
    module, _, leaf = name.rpartition(".")
    module = module.rpartition(".")[2]
    if op == "embedding":
        return TABLES.get(module, "E")
    if op.endswith("_norm"):
        return "w" if leaf == "weight" else "b"
    return f"{'W' if leaf == 'weight' else 'b'}_{LETTERS.get(module, module[0])}"


def formula(value: AppliedOp, symbols: Mapping[str, str]) -> tuple[str, list[str]]:
    """The expression, and the definitions of the functions it uses.  `symbols` are those of printed values, and may
    hold another text for an operation, by its result."""
    definitions: dict[str, None] = {}

    def text(one: AppliedOp | str) -> str:
        name = one if isinstance(one, str) else one.step.out[0]
        if name in symbols or isinstance(one, str):
            return symbols.get(name, name)
        if one.op == "cast":
            return text(one.inputs["x"])
        if one.op == "sinusoids":
            definitions[f"P = {equation(one, {})}"] = None
            return "P"
        if one.op in FUNCTIONS:
            function, sign = FUNCTIONS[one.op], "="
            if one.step.attributes.get("approximate") == "tanh":
                function, sign = f"{function}_tanh", "≈"
            definitions[f"{function}(x) {sign} {equation(one, {'x': 'x'})}"] = None
            return f"{function}({text(one.inputs['x'])})"
        return equation(one, {key: text(argument) for key, argument in one.inputs.items()})

    return text(value), list(definitions)


def equation(value: AppliedOp, inputs: Mapping[str, str]) -> str:
    """The equation of an operation, with what its arguments are here.  Terms of absent or zero arguments are left out,
    and factors of one."""
    operation, step = ops.OPERATIONS[value.op], value.step
    out = operation.equation
    arguments: dict[str, object] = dict(step.attributes) | dict(inputs)
    arguments |= {key: parameter_symbol(name, value.op) for key, name in step.weights.items()}
    for key in operation.arguments:
        if key in value.inputs and key not in inputs:
            continue
        if (argument := arguments.get(key)) is None or argument == 0:
            out = _without_term(out, key)
        elif argument == 1:
            out = re.sub(rf"{_word(key)} ?· ?", "", out)
    bare = value.op in ("add", "embedding")

    def replaced(match: re.Match[str]) -> str:
        argument = arguments.get(match[0])
        if isinstance(argument, str):
            return f"({argument})" if " " in _outside(argument) and not bare else argument
        return f"{argument:g}" if isinstance(argument, int | float) else match[0]

    return re.sub("|".join(map(_word, operation.arguments)), replaced, out)


def _word(name: str) -> str:
    return rf"(?<![A-Za-z_]){name}(?![A-Za-z_])"


def _without_term(text: str, name: str) -> str:
    word = _word(name)
    out = re.sub(rf" \+ [^+(]*{word}[^+)]*|[^+(]*{word}[^+)]* \+ ", "", text)
    return out if out == text else re.sub(r"· \((\w+)\)$", r"· \1", out)


def _outside(text: str) -> str:
    """The text without what stands in parentheses."""
    while text != (shorter := re.sub(r"\([^()]*\)", "", text)):
        text = shorter
    return text
