"""Runs a program on tensors: the oracle of every other executor.

Each instruction calls the function of its operation.  Attention's own - `extend` and `attend` - go through the same
cache steps and row plans as the modules; a position bias is kept as a function of positions until `attend` asks.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from triptych import ops
from triptych.attention import (
    DOT_PRODUCT,
    LINEAR,
    NULL_CACHE,
    AdditiveOver,
    AttendPlan,
    ContentBias,
    FlatKeys,
    Heads,
    KVCache,
    Mechanism,
    Rows,
    ScoreBias,
)
from triptych.attention.position_biases import disentangled_bias
from triptych.attention.rows import FlatBatch
from triptych.errors import ConfigError
from .program import Entry, Instruction, Program, weights_of

Weights = Mapping[str, Tensor]
Edits = Mapping[str, Callable[[Tensor], Tensor]]


def named(names: Mapping[str, str], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of an instruction's arguments, or its weights, by argument."""
    return {argument: values[name] for argument, name in names.items()}


def run_operation(
    step: Instruction, inputs: Mapping[str, Tensor], weights: Weights, rows: Rows | None = None
) -> Tensor:
    """The result of an instruction's operation by its function in the table; `rows` for the operations that read
    them."""
    arguments: dict[str, object] = {**step.attributes, **inputs, **weights, "rows": rows}
    if rows is not None:
        arguments["longest"] = _longest(rows)
        if step.op == "conv1d":  # of which each token of a row may have several frames
            arguments["lengths"] = [len(inputs["x"]) // rows.total * n for n in rows.lengths]
    if step.op != "cast" and isinstance(dtype := arguments.get("dtype"), str):
        arguments["dtype"] = ops.dtype_of(dtype)
    names = list(ops.OPERATIONS[step.op].arguments)
    while names[-1] not in arguments:  # left out in the forward as well
        names.pop()
    result: Tensor = ops.RUN[step.op](*(arguments.get(name) for name in names))
    return result


def _longest(rows: Rows) -> int:
    """The largest distance in a row."""
    return max(rows.ends, default=1) - 1


@dataclass(frozen=True, eq=False)
class _Bias:
    """A position bias: of positions alone, or what a content bias is made from."""

    placed: ScoreBias
    content: ContentBias | None = None


@dataclass(eq=False)
class _Run:
    """One entry on some rows.

    values   what was computed, by name; an input that nothing reads the numbers of has none.
    biases   position biases, which are functions until `attend` asks.
    keys     layer -> the value of its new keys, until its values come.
    """

    program: Program
    weights: Weights
    rows: Rows
    values: dict[str, Tensor]
    source: Rows | None = None
    cache: KVCache = NULL_CACHE
    edits: Edits = field(default_factory=dict)
    biases: dict[str, _Bias] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    plans: dict[Hashable, AttendPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.step = self.cache.begin(self.rows, "")

    def run(self, entry: Entry) -> list[Tensor]:
        for instruction in entry.instructions:
            self.run_step(instruction)
        self.step.finish()
        return [self.values[name] for name in entry.outputs]

    def run_step(self, step: Instruction) -> None:
        if step.op in SPECIAL:
            SPECIAL[step.op](self, step)
        else:
            weights = named(step.weights, self.weights)
            self.values[step.result] = run_operation(step, named(step.inputs, self.values), weights, self.rows)

    def site(self, step: Instruction) -> None:
        edit, value = self.edits.get(step.result), self.values[step.inputs["x"]]
        self.values[step.result] = value if edit is None else edit(value)

    def module(self, step: Instruction) -> None:
        name = step.attributes["module"]
        raise ConfigError(f"{name} runs as a module: {self.program.unlowered[name]}; the interpreter cannot run it")

    def experts(self, step: Instruction) -> None:
        how, entry, inputs = step.attributes, step.attributes["expert"], named(step.inputs, self.values)

        def expert(number: int, x: Tensor) -> Tensor:
            own = {name: self.weights[name.replace(".experts.0.", f".experts.{number}.")] for name in weights_of(entry)}
            return _Run(self.program, own, self.rows, {entry.inputs[0]: x}).run(entry)[0]

        parts = [partial(expert, number) for number in range(how["count"])]
        self.values[step.result] = ops.experts(inputs["x"], inputs["scores"], parts, how["top_k"], how["normalize"])

    def placed_bias(self, step: Instruction) -> None:
        run, arguments = ops.RUN[step.op], dict(step.attributes) | named(step.weights, self.weights)
        if step.op == "reached_row":
            arguments["longest"] = _longest(self.rows)
        self.biases[step.result] = _Bias(lambda q_pos, k_pos: run(q_pos=q_pos, k_pos=k_pos, **arguments))

    def content_bias(self, step: Instruction) -> None:
        vectors = {key: self.values[step.inputs[key]] for key in ("pos_q", "pos_k") if key in step.inputs}
        placed = self.biases[step.inputs["row"]].placed
        self.biases[step.result] = _Bias(placed, lambda q, k, row: disentangled_bias(q, k, row, **vectors))

    def extend(self, step: Instruction) -> None:
        """Keys and values are taken in together, when the values come; until then the keys stand for themselves."""
        layer, leaf = step.attributes["layer"], step.attributes["leaf"]
        new = self.values[step.inputs[leaf]]
        if leaf == "k":
            self.keys[layer], self.values[step.result] = step.result, new
            return
        name = self.keys[layer]
        self.values[name], self.values[step.result] = self.step.of(layer).extend(layer, self.values[name], new)

    def attend(self, step: Instruction) -> None:
        q, k, v = (self.values[step.inputs[key]] for key in "qkv")
        bias = self.biases[step.inputs["bias"]] if "bias" in step.inputs else None
        weights = named(step.weights, self.weights)
        plan = self.plan(step, q, k, v, bias, weights)
        content = None if bias is None else bias.content
        self.values[step.result] = plan.run(q, k, v, weights.get("sinks"), content)

    def plan(
        self, step: Instruction, q: Tensor, k: Tensor, v: Tensor, bias: _Bias | None, weights: Weights
    ) -> AttendPlan:
        how = step.attributes
        key = (how["mask"], how["keys"], how["scale"], how["softcap"], how["mechanism"], step.inputs.get("bias"),
               step.weights.get("weight"), q.shape[1:], v.shape[-1])  # fmt: skip
        if key not in self.plans:
            heads = Heads.of(
                q, k, v, scale=how["scale"], softcap=how["softcap"], sinks="sinks" in weights,
                learns=torch.is_grad_enabled(),
            )  # fmt: skip
            placed, mechanism = None if bias is None else bias.placed, _mechanism(step, weights)
            if how["keys"] == "cross":
                assert self.source is not None
                self.plans[key] = FlatKeys(self.source).plan(self.rows, how["mask"], heads, placed, mechanism)
            else:
                layout = self.step.of(self.layers[step.inputs["k"]]).layout
                self.plans[key] = layout.plan(self.rows, how["mask"], heads, placed, mechanism)
        return self.plans[key]

    @property
    def layers(self) -> dict[str, int]:
        """The layer whose keys a value holds, by the `extend` that gave them."""
        steps = self.program.instructions()
        return {step.result: step.attributes["layer"] for step in steps if step.op == "extend"}


def _mechanism(step: Instruction, weights: Weights) -> Mechanism:
    name = step.attributes["mechanism"]
    if name == "additive":
        return AdditiveOver(weights["weight"])
    return LINEAR if name == "linear" else DOT_PRODUCT


SPECIAL: dict[str, Callable[[_Run, Instruction], None]] = {
    "site": _Run.site, "module": _Run.module, "experts": _Run.experts, "reached_row": _Run.placed_bias,
    "alibi_bias": _Run.placed_bias, "t5_bias": _Run.placed_bias, "disentangled_bias": _Run.content_bias,
    "extend": _Run.extend, "attend": _Run.attend,
}  # fmt: skip
"""Operations that are more in a program than their function of tensors, by name."""


def interpret(
    program: Program,
    weights: Weights,
    inputs: Tensor,
    rows: Rows,
    *,
    source: FlatBatch | None = None,
    cache: KVCache = NULL_CACHE,
    edits: Edits | None = None,
) -> Tensor:
    """The final vectors [N, D], as `Transformer.forward` gives them.

    weights   every parameter by name (`dict(module.named_parameters())`).
    inputs    what the input slot reads: [N] ids of `rows`, or frames or patches.
    edits     site -> a function of the value there, whose result the program goes on with.

    Raises ConfigError for a part that was not lowered.
    """
    entries, edits, values, sources = program.entries, edits or {}, _inputs(inputs, rows), None
    if "decode" not in entries:
        return _Run(program, weights, rows, values, edits=edits).run(entries["encode"])[0]
    if source is not None:
        sources, cross = source[1], entries["cross_kv"]
        (memory,) = _Run(program, weights, sources, _inputs(*source), edits=edits).run(entries["encode"])
        projected = _Run(program, weights, sources, {"memory": memory}, edits=edits).run(cross)
        values.update(zip(cross.outputs, projected, strict=True))
    return _Run(program, weights, rows, values, sources, cache, edits).run(entries["decode"])[0]


def interpret_logits(program: Program, weights: Weights, hidden: Tensor, rows: Rows) -> Tensor:
    """The output of the head for the final vectors [N, D], as `Transformer.unembed`."""
    return _Run(program, weights, rows, {"hidden": hidden}).run(program.entries["unembed"])[0]


def interpret_value(
    program: Program, entry: str, name: str, weights: Weights, rows: Rows, values: Mapping[str, Tensor]
) -> Tensor:
    """One value of an entry from others of it: only the instructions between `values` and `name` run."""
    run = _Run(program, weights, rows, dict(values))
    steps = {step.result: step for step in program.entries[entry].instructions}

    def compute(label: str) -> None:
        if label in steps and label not in run.values and label not in run.biases:
            for argument in steps[label].inputs.values():
                compute(argument)
            run.run_step(steps[label])

    compute(name)
    return run.values[name]


def _inputs(inputs: Tensor, rows: Rows) -> dict[str, Tensor]:
    """The values that an entry starts from; all tokens are of type 0."""
    positions, ends = rows.positions(inputs.device), rows.ends_of_tokens(inputs.device)
    read = dict.fromkeys(("ids", "frames", "patches"), inputs)
    return {**read, "positions": positions, "row_ends": ends, "token_types": torch.zeros_like(inputs)}
