"""Runs a program on tensors: the oracle of every other executor.

Each instruction calls the function of its operation.  Attention's own - `extend` and `attend` - go through the same
cache steps and row plans as the modules; a position bias is kept as a function of positions until `attend` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych import ops
from triptych.attention import (
    DOT_PRODUCT,
    LINEAR,
    NULL_CACHE,
    AdditiveOver,
    AttendPlan,
    CacheStep,
    ContentBias,
    FlatKeys,
    Heads,
    KVCache,
    Mechanism,
    Rows,
    ScoreBias,
)
from triptych.attention.position_biases import disentangled_bias
from triptych.errors import ConfigError
from triptych.program.program import Entry, Instruction, Program

Weights = Mapping[str, Tensor]
Edits = Mapping[str, Callable[[Tensor], Tensor]]


def run_operation(step: Instruction, inputs: dict[str, Any], weights: Weights, rows: Rows | None = None) -> Any:
    """The result of an instruction's operation by its function in the table; `rows` for the operations that read
    them."""
    operation = ops.OPERATIONS[step.op]
    arguments = dict(step.attributes) | inputs | dict(weights)
    if "rows" in operation.arguments:
        arguments["rows"] = rows
    if "dtype" in arguments and step.op != "cast":
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    names = list(operation.arguments)
    while names[-1] not in arguments:  # left out in the forward as well
        names.pop()
    return ops.RUN[step.op](*(arguments.get(name) for name in names))


@dataclass(frozen=True, eq=False)
class _Bias:
    """A position bias: of positions alone, or what a content bias is made from."""

    placed: ScoreBias
    content: ContentBias | None = None


@dataclass(eq=False)
class _Run:
    """One entry on some rows."""

    program: Program
    weights: Weights
    rows: Rows
    source: Rows | None
    step: CacheStep
    edits: Edits
    values: dict[str, Any] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], AttendPlan] = field(default_factory=dict)

    def run(self, entry: Entry) -> list[Tensor]:
        for instruction in entry.instructions:
            self.values[instruction.out[0]] = self.result(instruction)
        return [self.values[name] for name in entry.outputs]

    def result(self, step: Instruction) -> Any:
        inputs = {key: self.values[name] for key, name in step.inputs.items()}
        weights = {key: self.weights[name] for key, name in step.weights.items()}
        special = SPECIAL.get(step.op)
        if special is not None:
            return special(self, step, inputs, weights)
        return run_operation(step, inputs, weights, self.rows)

    def site(self, step: Instruction, inputs: dict[str, Any], weights: Weights) -> Tensor:
        edit = self.edits.get(step.out[0])
        value: Tensor = inputs["x"]
        return value if edit is None else edit(value)

    def module(self, step: Instruction, inputs: dict[str, Any], weights: Weights) -> Tensor:
        name = step.attributes["module"]
        raise ConfigError(f"{name} runs as a module: {self.program.unlowered[name]}; the interpreter cannot run it")

    def conv1d(self, step: Instruction, inputs: dict[str, Any], weights: Weights) -> Tensor:
        x, stride = inputs["x"], step.attributes["stride"]
        times = len(x) // self.rows.total
        lengths = [times * n for n in self.rows.lengths]
        return ops.conv1d(x, weights["weight"], weights.get("bias"), stride, lengths)

    def experts(self, step: Instruction, inputs: dict[str, Any], weights: Weights) -> Tensor:
        how, entry = step.attributes, step.attributes["expert"]

        def expert(number: int, x: Tensor) -> Tensor:
            inner = _Run(self.program, _Numbered(self.weights, number), self.rows, None, self.step, {})
            inner.values[entry.inputs[0]] = x
            return inner.run(entry)[0]

        parts = [partial(expert, number) for number in range(how["count"])]
        return ops.experts(inputs["x"], inputs["scores"], parts, how["top_k"], how["normalize"])

    def reached_table(self, step: Instruction, inputs: dict[str, Any], weights: Weights) -> Tensor:
        arguments = inputs | dict(step.attributes) | dict(weights)
        table: Tensor = ops.RUN[step.op](**arguments | {"longest": max(self.rows.ends, default=1) - 1})
        return table

    def placed_bias(self, step: Instruction, inputs: dict[str, Any], weights: Weights) -> _Bias:
        run, arguments = ops.RUN[step.op], dict(step.attributes) | dict(weights)
        if step.op == "reached_row":
            arguments["longest"] = max(self.rows.ends, default=1) - 1
        return _Bias(lambda q_pos, k_pos: run(q_pos=q_pos, k_pos=k_pos, **arguments))

    def content_bias(self, step: Instruction, inputs: dict[str, Any], weights: Weights) -> _Bias:
        vectors = {key: inputs[key] for key in ("pos_q", "pos_k") if key in inputs}
        return _Bias(inputs["row"].placed, lambda q, k, row: disentangled_bias(q, k, row, **vectors))

    def extend(self, step: Instruction, inputs: dict[str, Any], weights: Weights) -> Tensor:
        """Keys and values are taken in together, when the values come; until then the keys stand for themselves."""
        layer, leaf = step.attributes["layer"], step.attributes["leaf"]
        if leaf == "k":
            self.values[f"{layer} keys"] = step.out[0]
            value: Tensor = inputs["k"]
            return value
        name = self.values[f"{layer} keys"]
        k, v = self.step.of(layer).extend(layer, self.values[name], inputs["v"])
        self.values[name] = k
        return v

    def attend(self, step: Instruction, inputs: dict[str, Any], weights: Weights) -> Tensor:
        q, k, v, bias = inputs["q"], inputs["k"], inputs["v"], inputs.get("bias")
        plan = self.plan(step, q, k, v, bias, weights)
        return plan.run(q, k, v, weights.get("sinks"), None if bias is None else bias.content)

    def plan(
        self, step: Instruction, q: Tensor, k: Tensor, v: Tensor, bias: _Bias | None, weights: Weights
    ) -> AttendPlan:
        how = step.attributes
        key = (how["mask"], how["keys"], how["scale"], how["softcap"], how["mechanism"], step.inputs.get("bias"),
               step.weights.get("weight"), q.shape[1:], v.shape[-1])  # fmt: skip
        if key not in self.plans:
            heads = Heads(
                heads=q.shape[1], groups=k.shape[1], width=q.shape[2], value_width=v.shape[-1], dtype=q.dtype,
                device=q.device, scale=how["scale"], softcap=how["softcap"], sinks="sinks" in weights,
                learns=torch.is_grad_enabled(),
            )  # fmt: skip
            placed = None if bias is None else bias.placed
            if how["keys"] == "cross":
                assert self.source is not None
                layout: Any = FlatKeys(self.source)
            else:
                layout = self.step.of(self.layer_of(step)).layout
            self.plans[key] = layout.plan(self.rows, how["mask"], heads, placed, _mechanism(step, weights))
        return self.plans[key]

    def layer_of(self, step: Instruction) -> int:
        """The layer whose keys an `attend` reads, from the `extend` that gave them."""
        return self.layers[step.inputs["k"]]

    @property
    def layers(self) -> dict[str, int]:
        steps = self.program.instructions()
        return {step.out[0]: step.attributes["layer"] for step in steps if step.op == "extend"}


def _mechanism(step: Instruction, weights: Weights) -> Mechanism:
    name = step.attributes["mechanism"]
    if name == "additive":
        return AdditiveOver(weights["weight"])
    return LINEAR if name == "linear" else DOT_PRODUCT


class _Numbered(Mapping[str, Tensor]):
    """The weights of expert `number` under the names of the first."""

    def __init__(self, weights: Weights, number: int) -> None:
        self.weights, self.number = weights, number

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name.replace(".experts.0.", f".experts.{self.number}.")]

    def __iter__(self) -> Any:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


SPECIAL: dict[str, Callable[[_Run, Instruction, dict[str, Any], Weights], Any]] = {
    "site": _Run.site, "module": _Run.module, "conv1d": _Run.conv1d, "experts": _Run.experts,
    "reached_table": _Run.reached_table, "reached_row": _Run.placed_bias, "alibi_bias": _Run.placed_bias,
    "t5_bias": _Run.placed_bias, "disentangled_bias": _Run.content_bias, "extend": _Run.extend, "attend": _Run.attend,
}  # fmt: skip
"""Operations that are more in a program than their function of tensors, by name."""


def interpret(
    program: Program,
    weights: Weights,
    inputs: Tensor,
    rows: Rows,
    *,
    source: tuple[Tensor, Rows] | None = None,
    token_types: Tensor | None = None,
    cache: KVCache = NULL_CACHE,
    edits: Edits | None = None,
) -> Tensor:
    """The final vectors [N, D], as `Transformer.forward` gives them.

    weights   every parameter by name (`dict(module.named_parameters())`).
    inputs    what the input slot reads: [N] ids of `rows`, or frames or patches.
    edits     site -> a function of the value there, whose result the program goes on with.

    Raises ConfigError for a part that was not lowered.
    """
    edits = edits or {}
    if "decode" not in program.entries:
        return _entry(program, "encode", weights, inputs, rows, None, NULL_CACHE, token_types, edits, {})[0]
    known: dict[str, Any] = {}
    if source is not None:
        (memory,) = _entry(program, "encode", weights, *source, None, NULL_CACHE, None, edits, {})
        run = _Run(program, weights, source[1], None, NULL_CACHE.begin(source[1], ""), edits, {"memory": memory})
        entry = program.entries["cross_kv"]
        known = dict(zip(entry.outputs, run.run(entry), strict=True))
    sources = None if source is None else source[1]
    return _entry(program, "decode", weights, inputs, rows, sources, cache, token_types, edits, known)[0]


def interpret_logits(program: Program, weights: Weights, hidden: Tensor, rows: Rows) -> Tensor:
    """What the head gives for the final vectors [N, D], as `Transformer.unembed`."""
    run = _Run(program, weights, rows, None, NULL_CACHE.begin(rows, ""), {}, {"hidden": hidden})
    return run.run(program.entries["unembed"])[0]


def interpret_value(
    program: Program, entry: str, name: str, weights: Weights, rows: Rows, values: Mapping[str, Tensor]
) -> Tensor:
    """One value of an entry from others of it: only the instructions between `values` and `name` run."""
    run = _Run(program, weights, rows, None, NULL_CACHE.begin(rows, ""), {}, dict(values))
    steps = {step.out[0]: step for step in program.entries[entry].instructions}

    def compute(label: str) -> None:
        if label not in run.values:
            for argument in steps[label].inputs.values():
                compute(argument)
            run.values[label] = run.result(steps[label])

    compute(name)
    value: Tensor = run.values[name]
    return value


def _entry(
    program: Program, name: str, weights: Weights, inputs: Tensor, rows: Rows, source: Rows | None, cache: KVCache,
    token_types: Tensor | None, edits: Edits, known: dict[str, Any],
) -> list[Tensor]:  # fmt: skip
    device, step = inputs.device, cache.begin(rows, "")
    values: dict[str, Any] = {
        **dict.fromkeys(("ids", "frames", "patches"), inputs), "positions": rows.positions(device),
        "row_ends": rows.ends_of_tokens(device), "q_pos": None, "k_pos": None,
        "token_types": torch.zeros_like(inputs) if token_types is None else token_types,
    }  # fmt: skip
    outputs = _Run(program, weights, rows, source, step, edits, values | known).run(program.entries[name])
    step.finish()
    return outputs
