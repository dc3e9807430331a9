"""One token of each row of a cache, in tensors whose shapes stay the same from step to step.

A function of this form is what a CUDA graph replays and what `torch.compile` compiles once: it reads no number on the
host, and its work does not depend on how long the rows are, up to a `bucket` of positions.  It runs the instructions of
the program; the operations that depend on positions alone become tables, and attention reads the cache's own stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych import ops
from triptych.attention import Cache, CrossCache
from triptych.attention.store import Store
from triptych.errors import ConfigError
from triptych.nn import Transformer
from triptych.nn.weights import PackedWeight
from triptych.program.changes import Numbers
from triptych.program.interpreter import run_operation
from triptych.program.program import Entry, Instruction, Program
from triptych.spec.masks import And, BlockSparse, Causal, Full, Mask, Or, Points, Window
from triptych.spec.positions import LongRope

FAR = 1 << 30  # a length beyond every switch of LongRoPE
_ROTATIONS = ("rotation_cos", "rotation_sin")
_OF_POSITIONS = (*_ROTATIONS, "sinusoids")
_BIASES = ("alibi_bias", "t5_bias")
_MASKS = (Causal, Window, Full, BlockSparse)


class NotStatic(ConfigError):
    """A program does something whose shapes change from step to step; the message says what."""


def check_static(program: Program, module: Transformer) -> None:
    """Raises NotStatic, naming what has no fixed shape."""
    if program.unlowered:
        name, reason = next(iter(program.unlowered.items()))
        raise NotStatic(f"{name} runs as a module: {reason}")
    if any(isinstance(weight, PackedWeight) for weight in module.parameters()):
        raise NotStatic("weights are packed; load with dequantize=True")
    for entry in ("decode", "unembed"):
        for step in program.entries[entry].instructions:
            _check_instruction(step)


def _check_instruction(step: Instruction) -> None:
    if step.op == "experts":
        raise NotStatic("experts run on the tokens that chose them, a number that changes")
    if step.op in ("disentangled_bias", "reached_row", "reached_table"):
        raise NotStatic("a bias that depends on the content of keys")
    if step.op in _OF_POSITIONS and step.inputs["positions"] != "positions":
        raise NotStatic(f"{step.op} of {step.inputs['positions']}")
    if step.op == "attend":
        if step.attributes["mechanism"] != "dot_product":
            raise NotStatic(f"attention by {step.attributes['mechanism']} scores")
        if not _is_static(step.attributes["mask"]):
            raise NotStatic(f"the mask {step.attributes['mask']} depends on more than positions")


def _is_static(mask: Mask) -> bool:
    if isinstance(mask, And | Or):
        return all(map(_is_static, mask.parts))
    return isinstance(mask, _MASKS)


@dataclass(frozen=True, eq=False)
class _Keys:
    """Keys or values in a store: those of the rows themselves, or of their sources."""

    store: Store
    leaf: str
    cross: bool


@dataclass(frozen=True, eq=False)
class _BiasTable:
    """The bias of each head by distance, [H, positions]."""

    table: Tensor


@dataclass(eq=False)
class StaticPlan:
    """The program of a module, bound to its weights and to the stores of a cache.

    numbers  where the weights lie, and the versions of those that tables are made of.
    tables   by the name of the value: what depends on positions alone, by position or by distance; for LongRoPE two,
             the second for rows that are longer than its switch.
    """

    program: Program
    module: Transformer
    cache: Cache
    cross: CrossCache | None
    weights: Mapping[str, Tensor] = field(init=False)
    tables: dict[str, tuple[Tensor, ...]] = field(init=False)
    numbers: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self.weights = dict(self.module.named_parameters(remove_duplicate=False))
        self.tables = {}
        with torch.no_grad():
            in_tables = self._make_tables(max(self.cache.capacity, 1))
        if any(weight.is_inference() for weight in in_tables):
            raise NotStatic("a weight was made in inference mode, where changes are not counted")
        self.numbers = Numbers(list(self.weights.values()), in_tables, [])

    def _make_tables(self, positions: int) -> list[Tensor]:
        """Run the instructions that read positions alone, on all positions that the cache has room for; -> the weights
        that they read too."""
        read: list[Tensor] = []
        device = self.module.device
        every = torch.arange(positions, device=device)
        for step in self.program.entries["decode"].instructions:
            weights = {key: self.weights[name] for key, name in step.weights.items()}
            if step.op in _OF_POSITIONS:
                ends = [1, FAR] if _switches(step) else [1]
                self.tables[step.out[0]] = tuple(
                    run_operation(step, _positions(step, every, end), weights) for end in ends
                )
            elif step.op in _BIASES:
                zero = torch.zeros(1, dtype=torch.long, device=device)
                bias = ops.OPERATIONS[step.op].run(q_pos=every, k_pos=zero, **weights, **step.attributes)
                self.tables[step.out[0]] = (bias[..., 0].float(),)
                read.extend(weights.values())
        return read

    # -- one step -------------------------------------------------------------------------------------------------

    def run(self, inputs: Tensor, bucket: int) -> Tensor:
        """inputs [5, slots]: the id of each slot's next token, its position, whether the slot is in use in this step,
        the length of its source and the place of that in the stores of sources.  -> logits [slots, V]; those of slots
        that are not in use mean nothing, and their stores stay as they are.  `bucket` positions hold all keys of the
        rows."""
        return _StaticRun(self, inputs, bucket).run()


def _switches(step: Instruction) -> bool:
    spec = step.attributes.get("spec")
    return isinstance(getattr(spec, "scaling", None), LongRope)


def _positions(step: Instruction, positions: Tensor, end: int) -> dict[str, Any]:
    inputs = {"positions": positions}
    return inputs | {"length": torch.full_like(positions, end)} if "length" in step.inputs else inputs


@dataclass(eq=False)
class _StaticRun:
    plan: StaticPlan
    inputs: Tensor
    bucket: int
    values: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Tensor:
        plan, program = self.plan, self.plan.program
        self.ids, self.positions, used, self.sources, self.source_places = self.inputs.unbind(0)
        self.used, self.slots = used.bool(), torch.arange(len(used), device=used.device)
        self.values = {"ids": self.ids, "positions": self.positions, "row_ends": self.positions + 1}
        if plan.cross is not None:
            for i, name in enumerate(program.entries["cross_kv"].outputs):
                self.values[name] = _Keys(plan.cross.stores[i // 2], "kv"[i % 2], True)
        hidden = self.entry(program.entries["decode"])
        head = program.entries["unembed"]
        self.values[head.inputs[0]] = hidden
        return self.entry(head)

    def entry(self, entry: Entry) -> Tensor:
        for step in entry.instructions:
            self.values[step.out[0]] = self.result(step)
        result: Tensor = self.values[entry.outputs[0]]
        return result

    def result(self, step: Instruction) -> Any:
        if step.op == "site":
            return self.values[step.inputs["x"]]
        if step.op in _OF_POSITIONS:
            return self.of_positions(step)
        if step.op in _BIASES:
            return _BiasTable(self.plan.tables[step.out[0]][0])
        if step.op == "extend":
            return self.extend(step)
        if step.op == "attend":
            return self.attend(step)
        inputs = {key: self.values[name] for key, name in step.inputs.items()}
        return run_operation(step, inputs, {key: self.plan.weights[name] for key, name in step.weights.items()})

    def of_positions(self, step: Instruction) -> Tensor:
        """The row of each token in a table by position."""
        near, *far = (table[self.positions] for table in self.plan.tables[step.out[0]])
        if not far:
            return near
        beyond = self.positions + 1 > step.attributes["spec"].scaling.original_length
        return torch.where(beyond.view(-1, *[1] * (near.dim() - 1)), far[0], near)

    def extend(self, step: Instruction) -> _Keys:
        """Write the new keys or values of the slots in use to their places."""
        layer, leaf = step.attributes["layer"], step.attributes["leaf"]
        store, new = self.plan.cache.stores[layer], self.values[step.inputs[leaf]]
        target = store.k if leaf == "k" else store.v
        place = self.positions if store.window is None else self.positions % store.window
        old = target[self.slots, :, place]
        target[self.slots, :, place] = torch.where(self.used[:, None, None], store.form.encode(new), old)
        return _Keys(store, leaf, False)

    def attend(self, step: Instruction) -> Tensor:
        """Attention of one query per slot [slots, H, K] to the keys of the slot, by the definition's order: scale,
        softcap, bias, mask, sinks, softmax in fp32 or better."""
        how, q, keys = step.attributes, self.values[step.inputs["q"]], self.values[step.inputs["k"]]
        k, v = self.numbers(keys, q.dtype), self.numbers(self.values[step.inputs["v"]], q.dtype)
        k_pos = self.places(keys, k.shape[2])
        visible = self.visible(how["mask"], keys, k_pos)
        bias = None
        if "bias" in step.inputs:
            table = self.values[step.inputs["bias"]].table
            distance = (self.positions[:, None] - k_pos).clamp(min=0)
            bias = table[:, distance].transpose(0, 1)[:, :, None]  # [slots, H, 1, S]
        query = q[:, :, None]
        if how["softcap"] is None and "sinks" not in step.weights:
            mask = visible if bias is None else bias.masked_fill(~visible, -torch.inf).to(q.dtype)
            grouped = k.shape[1] != q.shape[1]
            out = F.scaled_dot_product_attention(query, k, v, mask, scale=how["scale"], enable_gqa=grouped)
            return out[:, :, 0]
        wide = torch.promote_types(q.dtype, torch.float32)
        heads = q.shape[1] // k.shape[1]
        k, v = (x.to(wide).repeat_interleave(heads, dim=1) for x in (k, v))
        scores = query.to(wide) @ k.mT * how["scale"]
        if how["softcap"] is not None:
            scores = ops.softcap(scores, how["softcap"])
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~visible, -torch.inf)
        if "sinks" in step.weights:
            sinks = self.plan.weights[step.weights["sinks"]].to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
            pattern = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            pattern = scores.softmax(-1)
        return (pattern @ v).to(q.dtype)[:, :, 0]

    def numbers(self, keys: _Keys, dtype: torch.dtype) -> Tensor:
        """[slots, G, S, K]: what the slots hold, up to the bucket where places are positions."""
        store, layer = keys.store, keys.store.layer
        x, width = (store.k, layer.width) if keys.leaf == "k" else (store.v, layer.value_width)
        if keys.cross:
            x = x[self.source_places]
        elif store.window is None:
            x = x[:, :, : self.bucket]
        return store.form.decode(x, width).to(dtype)

    def places(self, keys: _Keys, count: int) -> Tensor:
        """The position of the key at each place, [slots or 1, S]; negative where a ring has none yet."""
        place = torch.arange(count, device=self.positions.device)
        window = keys.store.window
        if keys.cross or window is None:
            return place[None]
        position = self.positions[:, None]
        return position - (position - place) % window

    def visible(self, mask: Mask, keys: _Keys, k_pos: Tensor) -> Tensor:
        """[slots, 1, 1, S]; a slot that is not in use sees its first place at least, so that nothing is divided by
        zero."""
        if keys.cross:
            shown = k_pos < self.sources[:, None]
        else:
            q, k = Points(self.positions[:, None, None]), Points(k_pos[:, None])
            shown = mask.visible(q, k)[:, 0] & (k_pos >= 0) & (k_pos <= self.positions[:, None])
        first = torch.arange(shown.shape[-1], device=shown.device) == 0
        return (shown | (first & ~self.used[:, None]))[:, None, None]


def bucket_of(end: int, capacity: int, shortest: int = 64) -> int:
    """The power of two that holds `end` positions, at least `shortest` and at most the capacity."""
    return min(max(shortest, 1 << (end - 1).bit_length()), capacity)
