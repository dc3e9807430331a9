"""Part of a program as the values that a walk prints, each with the operations that make it from those before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from triptych.explain.reference_ops import run
from triptych.explain.steps import Printed
from triptych.program import Entry, Instruction

NORMS = ("layer_norm", "rms_norm")
BENDS = ("relu", "gelu", "silu", "tanh")
TOGETHER = {
    *product(("linear", "add", "experts"), (*NORMS, "scale")), *product(NORMS, ("rotate",)), ("add", "add"),
    *product(BENDS, ("multiply",)), *product(("conv1d",), BENDS),
    ("disentangled_bias", "attend"),
}  # fmt: skip
"""(operation, the one that reads its result): a step shows both, where the result has no name of its own."""
OF_PLACES = ("positions", "row_ends", "q_pos", "k_pos")


@dataclass(frozen=True, eq=False)
class Applied:
    """An operation and what it is applied to: the name of a printed value, or an operation of the same step."""

    step: Instruction
    inputs: dict[str, Applied | str]
    constant: bool = False  # depends on positions and parameters alone

    @property
    def op(self) -> str:
        return self.step.op

    def chain(self) -> Iterator[Applied]:
        """This operation, then those inside it."""
        yield self
        for argument in self.inputs.values():
            if isinstance(argument, Applied):
                yield from argument.chain()

    def reads(self) -> Iterator[str]:
        """The printed values that it is made from."""
        for argument in self.inputs.values():
            if isinstance(argument, Applied):
                yield from argument.reads()
            else:
                yield argument


@dataclass(frozen=True, eq=False)
class Computed:
    """A value that is printed under `name`, and `label` in the program."""

    name: str
    label: str
    entry: str
    value: Applied


def computed(
    entries: Mapping[str, Entry], entry: str, steps: Sequence[Instruction], names: dict[str, str],
    together: bool = False,
) -> list[Computed]:  # fmt: skip
    """The values that `steps` of an entry make, in order.

    names      value of the program -> name under which it was printed; grows by those made here.
    together   show all operations up to the next site in one step, not only those of TOGETHER.

    A value is printed where it passes a site, where two operations read it, or where its reader is not shown in one
    step with it.  A site that only passes on what another has printed is the same value.
    """
    values: list[Computed] = []
    dataflow = _Dataflow.of(entries[entry].instructions, entry, names, together)
    for step in steps:
        label = step.out[0]
        if step.op in ("site", "extend"):
            (source,) = step.inputs.values()
            names[label] = names[source]
        elif step.op == "module":
            names[label] = f"{step.attributes['module']} as a module"
        elif not dataflow.inside(label):
            values.append(Computed(dataflow.name(label), label, entry, dataflow.applied(label)))
            names[label] = values[-1].name
    return values


@dataclass(frozen=True, eq=False)
class _Dataflow:
    """What makes and what reads each value of an entry; `names` and `together` as in `computed`."""

    entry: str
    maker: Mapping[str, Instruction]
    readers: Mapping[str, Sequence[Instruction]]
    names: Mapping[str, str]
    together: bool

    @staticmethod
    def of(instructions: Sequence[Instruction], entry: str, names: Mapping[str, str], together: bool) -> _Dataflow:
        readers: dict[str, list[Instruction]] = {}
        for step in instructions:
            for label in step.inputs.values():
                readers.setdefault(label, []).append(step)
        return _Dataflow(entry, {step.out[0]: step for step in instructions}, readers, names, together)

    def applied(self, label: str) -> Applied:
        """The operation that makes a value, with those inside it."""
        step = self.maker[label]
        inputs = {key: self._argument(one) for key, one in step.inputs.items()}
        return Applied(step, inputs, self._constant(label))

    def _argument(self, label: str) -> Applied | str:
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
        first, *others = self.readers.get(label, [None])
        if first is None or others or first.op == "site":
            return False
        return self.together or (self.maker[label].op, first.op) in TOGETHER

    def _site(self, label: str) -> str | None:
        """The site that a value passes."""
        return next((reader.out[0] for reader in self.readers.get(label, []) if reader.op == "site"), None)

    def name(self, label: str) -> str:
        """Under which a value is printed: its site, or what it is of one."""
        step, own = self.maker[label], self._site(label)
        if step.op == "split_heads" and own is not None:
            return f"{own} by head"
        if step.op == "merge_heads":
            return f"{self.names[step.inputs['x']]} side by side"
        split = [self._site(reader.out[0]) for reader in self.readers.get(label, []) if reader.op == "split_heads"]
        return own or (split[0] if split else None) or f"{self.entry} {label}"


def evaluate(value: Applied | str, printed: Printed, results: Mapping[str, Tensor] | None = None) -> Tensor:
    """A value once more, from what was printed: by `again`, not by the operation that made it.  `results` stand for
    printed values, and for the results of operations."""
    known = {} if results is None else results
    if isinstance(value, str):
        return known[value] if value in known else printed[value]
    if value.step.out[0] in known:
        return known[value.step.out[0]]
    if value.constant or value.op == "embedding":
        return printed[constant_name(value)]
    weights = {key: printed[name] for key, name in value.step.weights.items()}
    inputs = {key: evaluate(one, printed, known) for key, one in value.inputs.items()}
    return run(value.op, inputs | weights, value.step.attributes)


def constant_name(value: Applied) -> str:
    """Under which a table's rows, cosines and other values of positions are printed."""
    if value.op == "embedding":
        return f"{value.step.weights['weight']}[{next(value.reads())}]"
    return f"{value.op} {value.step.out[0]}"
