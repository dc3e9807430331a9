"""A decoding step as a function of tensors with fixed shapes: one token of each row of a cache.

A function of this form is what a CUDA graph replays and what `torch.compile` compiles once: it reads no number on the
host, and its work does not depend on how long the rows are, up to a `bucket` of positions.  It runs the instructions of
the program; the operations that depend on positions alone become tables, and attention reads the cache's own stores.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych import ops
from triptych.attention import DOT_PRODUCT, Cache, CrossCache, kernel_dense
from triptych.attention.layer_cache import Store
from triptych.attention.request import AttentionRequest, Runner
from triptych.nn import Transformer
from triptych.spec.masks import And, BlockSparse, Causal, Full, Mask, Or, Points, Window
from triptych.spec.positions import LongRope, RopeSpec
from .interpreter import named, run_operation
from .module_changes import WeightVersions
from .not_served import NotServed, check_lowered
from .program import Instruction, Program
from .static_groups import Group, grouped, join

FAR = 1 << 30  # a length beyond every switch of LongRoPE
_ROTATIONS = ("rotation_cos", "rotation_sin")
_OF_POSITIONS = (*_ROTATIONS, "sinusoids")
_BIASES = ("alibi_bias", "t5_bias")
_HIDDEN_BY_PLACE = Full()  # keys that a slot does not see stand at negative positions
_MASKS = (Causal, Window, Full, BlockSparse)


NOT_STATIC = {
    "experts": "experts run on the tokens that chose them, a number that changes",
    **dict.fromkeys(
        ("disentangled_bias", "reached_row", "reached_table"), "a bias that depends on the content of keys"
    ),
    **dict.fromkeys(("conv1d", "patches", "pool"), "it reads whole rows, and a step has one token of each"),
}
"""Why an operation has no fixed shape, by its name."""


def check_static(program: Program, module: Transformer) -> None:
    """Raises NotServed, naming what has no fixed shape."""
    check_lowered(program)
    if module.has_packed_weights:
        raise NotServed("weights are packed; load with dequantize=True")
    for entry in ("decode", "unembed"):
        for step in program.entries[entry].instructions:
            if step.op in NOT_STATIC:
                raise NotServed(NOT_STATIC[step.op])
            if step.op in _OF_POSITIONS and step.inputs["positions"] != "positions":
                raise NotServed(f"{step.op} of {step.inputs['positions']}")
            if step.op == "attend" and step.attributes["mechanism"] != "dot_product":
                raise NotServed(f"attention by {step.attributes['mechanism']} scores")
            if step.op == "attend" and not _is_static(step.attributes["mask"]):
                raise NotServed(f"the mask {step.attributes['mask']} depends on more than positions")


def _is_static(mask: Mask) -> bool:
    if isinstance(mask, And | Or):
        return all(map(_is_static, mask.parts))
    return isinstance(mask, _MASKS)


@dataclass(frozen=True, eq=False)
class _StoreKeys:
    """Keys or values in a store: those of the rows themselves, or of their sources."""

    store: Store
    leaf: str
    cross: bool


class StaticPlan:
    """The program of a module, bound to its weights and to the stores of a cache.

    numbers  where the weights lie, and the versions of those that tables are made of.
    tables   by the name of the value: what depends on positions alone, by position or by distance; for LongRoPE two,
             the second for rows that are longer than its switch.
    masks    by the name of what an attention gives: equal numbers for equal masks.
    groups   the instructions of a step, those together that run as one (`static_groups`).
    matrices by the name of what the first product of a group gives: the weights, the biases and the rows of each.
    joined   whether weights of products of one input become one matrix; None: on a GPU.
    """

    def __init__(
        self, program: Program, module: Transformer, cache: Cache, cross: CrossCache | None, joined: bool | None = None
    ) -> None:
        self.program, self.module, self.cache, self.cross = program, module, cache, cross
        self.weights: Mapping[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        joined = module.device.type == "cuda" if joined is None else joined
        instructions = program.entries["decode"].instructions
        self.groups: list[Group] = grouped(instructions, self.weights, joined=joined)
        products = [group for group in self.groups if len(group) > 1 and group[0].op == "linear"]
        with torch.inference_mode(False), torch.no_grad():
            self.matrices = {group[0].result: self._join(group) for group in products}
        self.tables: dict[str, tuple[Tensor, ...]] = {}
        kinds: dict[Mask, int] = {}
        attends = [step for step in instructions if step.op == "attend"]
        self.masks = {step.result: kinds.setdefault(step.attributes["mask"], len(kinds)) for step in attends}
        with torch.no_grad():
            in_tables = self._make_tables(max(self.cache.capacity, 1))
        if any(weight.is_inference() for weight in in_tables):
            raise NotServed("a weight was made in inference mode, where changes are not counted")
        self.versions = WeightVersions(list(self.weights.values()), in_tables, [])
        # What a graph reads stays allocated as long as the plan, though another thread gives a parameter other numbers.
        self.kept_alive = [weight.detach() for weight in self.weights.values()]

    def _join(self, group: Group) -> tuple[Tensor, Tensor | None, list[int]]:
        """The matrix of a group of products, their biases and how many rows each has."""
        parts = {key: [self.weights[step.weights[key]] for step in group] for key in group[0].weights}
        bias = join(parts["bias"]) if "bias" in parts else None
        return join(parts["weight"]), bias, [len(x) for x in parts["weight"]]

    def _make_tables(self, positions: int) -> list[Tensor]:
        """Run the instructions that read positions alone, on all positions that the cache has room for; -> the weights
        that they read too."""
        read: list[Tensor] = []
        device = self.module.device
        every = torch.arange(positions, device=device)
        for step in self.program.entries["decode"].instructions:
            weights = named(step.weights, self.weights)
            if step.op in _OF_POSITIONS:
                spec = step.attributes.get("spec")
                switches = isinstance(spec, RopeSpec) and isinstance(spec.scaling, LongRope)
                for end in (1, FAR) if switches else (1,):
                    length = {"length": torch.full_like(every, end)} if "length" in step.inputs else {}
                    table = run_operation(step, {"positions": every, **length}, weights)
                    self.tables[step.result] = (*self.tables.get(step.result, ()), table)
            elif step.op in _BIASES:
                zero = torch.zeros(1, dtype=torch.long, device=device)
                bias = ops.RUN[step.op](q_pos=every, k_pos=zero, **weights, **step.attributes)
                self.tables[step.result] = (bias[..., 0].float(),)
                read.extend(weights.values())
        return read

    # -- one step -------------------------------------------------------------------------------------------------

    def run(self, inputs: Tensor, bucket: int, all_slots_used: bool = False) -> Tensor:
        """inputs [5, slots]: the id of each slot's next token, its position, whether the slot is in use in this step,
        the length of its source and the place of that in the stores of sources.  -> logits [slots, V]; those of slots
        that are not in use mean nothing, and their stores stay as they are.  `bucket` positions hold all keys of the
        rows.  `all_slots_used` says that all slots are in use."""
        return _StaticRun(self, inputs, bucket, all_slots_used).run()


@dataclass(eq=False)
class _StaticRun:
    plan: StaticPlan
    inputs: Tensor
    bucket: int
    all_slots_used: bool
    values: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, _StoreKeys] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)  # of each head by distance, [H, positions]
    attentions: dict[Hashable, tuple[Runner, Tensor | None]] = field(default_factory=dict)

    def run(self) -> Tensor:
        plan, program = self.plan, self.plan.program
        self.ids, self.positions, used, self.sources, self.source_places = self.inputs.unbind(0)
        self.used, self.slots = used.bool(), torch.arange(len(used), device=used.device)
        self.values = {"ids": self.ids, "positions": self.positions, "row_ends": self.positions + 1}
        self.ends = (self.positions + 1).to(torch.int32)
        if plan.cross is not None:
            for i, name in enumerate(program.entries["cross_kv"].outputs):
                self.keys[name] = _StoreKeys(plan.cross.stores[i // 2], "kv"[i % 2], True)
        for group in plan.groups:
            self.step(group)
        head = program.entries["unembed"]
        self.values[head.inputs[0]] = self.values[program.entries["decode"].outputs[0]]
        for step in head.instructions:
            self.step((step,))
        return self.values[head.outputs[0]]

    def step(self, group: Group) -> None:
        """Run the instructions of a group, and keep what they give by name."""
        first = group[0]
        if len(group) == 1:
            special = STATIC.get(first.op)
            if special is not None:
                special(self, first)
            else:
                weights = named(first.weights, self.plan.weights)
                self.values[first.result] = run_operation(first, named(first.inputs, self.values), weights)
            return
        if first.op == "linear":
            weight, bias, sizes = self.plan.matrices[first.result]
            parts = F.linear(self.values[first.inputs["x"]], weight, bias).split(sizes, -1)
        else:  # rotations
            heads = [self.values[step.inputs["x"]] for step in group]
            turned = run_operation(first, named(first.inputs, self.values) | {"x": torch.cat(heads, 1)}, {})
            parts = turned.split([x.shape[1] for x in heads], 1)
        self.values.update(zip((step.result for step in group), parts, strict=True))

    def site(self, step: Instruction) -> None:
        self.values[step.result] = self.values[step.inputs["x"]]

    def bias(self, step: Instruction) -> None:
        (self.biases[step.result],) = self.plan.tables[step.result]

    def of_positions(self, step: Instruction) -> None:
        """The row of each token in a table by position."""
        near, *far = (table[self.positions] for table in self.plan.tables[step.result])
        if far:
            beyond = self.positions + 1 > step.attributes["spec"].scaling.original_length
            near = torch.where(beyond.view(-1, *[1] * (near.dim() - 1)), far[0], near)
        self.values[step.result] = near

    def extend(self, step: Instruction) -> None:
        """Write the new keys or values of the slots in use to their places."""
        layer, leaf = step.attributes["layer"], step.attributes["leaf"]
        store, new = self.plan.cache.stores[layer], self.values[step.inputs[leaf]]
        target = store.k if leaf == "k" else store.v
        place = self.positions if store.window is None else self.positions % store.window
        new = store.form.encode(new)
        if not self.all_slots_used:
            new = torch.where(self.used[:, None, None], new, target[self.slots, :, place])
        target[self.slots, :, place] = new
        self.keys[step.result] = _StoreKeys(store, leaf, False)

    def attend(self, step: Instruction) -> None:
        """Attention of one query per slot [slots, H, K] to the slot's keys, by a kernel of `triptych.attention`."""
        how, q, keys = step.attributes, self.values[step.inputs["q"]], self.keys[step.inputs["k"]]
        if self.reads_all(step, keys) and kernel_dense.slots_serve(keys.store, q.dtype, q.device):
            self.values[step.result] = kernel_dense.attend_slots(q, keys.store, self.ends, self.bucket, how["scale"])
            return
        k, v = self.numbers(keys, q.dtype), self.numbers(self.keys[step.inputs["v"]], q.dtype)
        runner, bias = self.attention(step, keys, q, k, v)
        sinks = self.plan.weights[step.weights["sinks"]] if "sinks" in step.weights else None
        self.values[step.result] = runner(q[:, :, None], k, v, bias, sinks)[:, :, 0]

    def reads_all(self, step: Instruction, keys: _StoreKeys) -> bool:
        """Whether a slot's query sees all keys up to its own, by plain scores."""
        sees_all = isinstance(step.attributes["mask"], Causal | Full) and not keys.cross
        return sees_all and step.attributes["softcap"] is None and not step.weights and "bias" not in step.inputs

    def attention(
        self, step: Instruction, keys: _StoreKeys, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Runner, Tensor | None]:
        """A kernel prepared for the slots, and the bias of their positions; once for layers that ask for the same."""
        how, bias = step.attributes, step.inputs.get("bias", "")
        sizes = (*q.shape, *k.shape, v.shape[3], how["scale"], how["softcap"], "sinks" in step.weights)
        kind = self.plan.masks[step.result], keys.cross, keys.store.window, bias, *sizes
        if kind not in self.attentions:
            k_pos = self.places(keys, k.shape[2])
            visible, placed = self.visible(how["mask"], keys, k_pos), None
            if bias:
                distance = (self.positions[:, None] - k_pos).clamp(min=0)
                placed = self.biases[bias][:, distance].transpose(0, 1)[:, :, None]  # [slots, H, 1, S]
            request = AttentionRequest.of(
                q, k, v, rows=q.shape[0], queries=1, keys=k.shape[2], scale=how["scale"], softcap=how["softcap"],
                mask=_HIDDEN_BY_PLACE, biased=bool(bias), sinks="sinks" in step.weights,
                k_pos=torch.where(visible, k_pos, -1),
            )  # fmt: skip
            self.attentions[kind] = DOT_PRODUCT.plan(request), placed
        return self.attentions[kind]

    def numbers(self, keys: _StoreKeys, dtype: torch.dtype) -> Tensor:
        """[slots, G, S, K]: what the slots hold, up to the bucket where places are positions."""
        store, layer = keys.store, keys.store.layer
        x, width = (store.k, layer.width) if keys.leaf == "k" else (store.v, layer.value_width)
        if keys.cross:
            x = x[self.source_places]
        elif store.window is None:
            x = x[:, :, : self.bucket]
        return store.form.decode(x, width).to(dtype)

    def places(self, keys: _StoreKeys, count: int) -> Tensor:
        """The position of the key at each place, [slots or 1, S]; negative where a ring has none yet."""
        place = torch.arange(count, device=self.positions.device)
        window = keys.store.window
        if keys.cross or window is None:
            return place[None]
        position = self.positions[:, None]
        return position - (position - place) % window

    def visible(self, mask: Mask, keys: _StoreKeys, k_pos: Tensor) -> Tensor:
        """[slots, S]; a slot that is not in use sees its first place at least, so that its result is finite."""
        if keys.cross:
            shown = k_pos < self.sources[:, None]
        else:
            q, k = Points(self.positions[:, None, None]), Points(k_pos[:, None])
            shown = mask.visible(q, k)[:, 0] & (k_pos >= 0) & (k_pos <= self.positions[:, None])
        first = torch.arange(shown.shape[-1], device=shown.device) == 0
        return shown | (first & ~self.used[:, None])


STATIC: dict[str, Callable[[_StaticRun, Instruction], None]] = {
    **dict.fromkeys(_OF_POSITIONS, _StaticRun.of_positions), **dict.fromkeys(_BIASES, _StaticRun.bias),
    "site": _StaticRun.site, "extend": _StaticRun.extend, "attend": _StaticRun.attend,
}  # fmt: skip
"""Operations that are more here than their function of the table, by name."""


def bucket_of(end: int, capacity: int) -> int:
    """The power of two that holds `end` positions, at least 64 and at most the capacity."""
    return min(max(64, 1 << (end - 1).bit_length()), capacity)
