"""What attention layers of one kind share in one forward: row plans, masks, rotations and position biases.

The stack computes it once per forward; layers read it, and a decoding step advances it in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, is_

import torch
from torch import Tensor, nn

from triptych import ops
from triptych.attention import (
    DOT_PRODUCT,
    AttendPlan,
    ContentBias,
    CrossKeys,
    Heads,
    KeyStep,
    RowPlan,
    Rows,
    kernel_dense,
)
from triptych.attention.cache_steps import FullStep
from triptych.attention.rows import CacheKeys, KeysAndValues
from triptych.spec import parts
from triptych.spec.masks import Causal, Full
from triptych.spec.part import Part
from .attention import Attention, KindState
from .part import Module, Taps
from .positions import UNPOSITIONED, Position

#: What a state is decided by, of a block whose attention has it and of its kind.
_of_block, _of_kind = attrgetter("attn", "attn.spec", "attn.mechanism"), attrgetter("spec", "position")


@dataclass(eq=False)
class SelfState:
    """A row attends to itself: what the cache holds of it, then its own tokens."""

    rows: Rows
    plan: AttendPlan
    step: KeyStep
    position: Position[Part] | None
    rotation: ops.Rotation | None
    content: Callable[[Attention], ContentBias] | None

    def keys(self, attn: Attention, x: Tensor, layer: int, taps: Taps) -> KeysAndValues:
        k, v = attn.project(x, self.rows, taps)
        return self.step.extend(layer, taps("k_rot", ops.rotate(k, self.rotation), self.rows), v)


@dataclass(frozen=True, eq=False)
class CrossState:
    """A row attends to an encoder's output, which each layer projects once."""

    rows: Rows
    plan: AttendPlan
    source: CrossKeys
    rotation: None = None
    content: None = None

    def keys(self, attn: Attention, x: Tensor, layer: int, taps: Taps) -> KeysAndValues:
        return self.source.keys(layer, partial(_projected, attn, taps))


def _projected(attn: Attention, taps: Taps, memory: Tensor, rows: Rows) -> KeysAndValues:
    k, v = attn.project(memory, rows, taps)
    return taps("k_rot", k, rows), v


def _moving(state: KindState) -> tuple[SelfState, FullStep, CacheKeys] | None:
    """What the next token of each row changes, where that is nothing but the ends of the rows: every token is kept in
    neighbouring places, no mask will hide one of them, nothing is added to the scores, and the kernel takes any number
    of keys.  None elsewhere."""
    if not isinstance(state, SelfState) or not isinstance(state.step, FullStep) or state.step.at is None:
        return None
    plan = state.plan
    if not isinstance(plan, RowPlan) or len(plan.pieces) != 1:
        return None
    request, keys = plan.pieces[0].request, plan.pieces[0].keys
    if not isinstance(keys, CacheKeys) or not isinstance(plan.mask, Causal | Full):
        return None
    plain = request.queries == 1 and not request.biased and request.visible is None and state.content is None
    if not plain or plan.mechanism is not DOT_PRODUCT or kernel_dense.flash_cannot(request):
        return None
    return state, state.step, keys


class Context:
    """The state of a forward beside its vectors: the rows, and for each block the state of its attentions.

    stack           what decided it, in `dtype`.
    blocks, kinds   its blocks, one for each state, and its kinds: while these are as they were, so are the states.

    It is no dataclass: FSDP looks for tensors in the fields of every dataclass that it meets among the arguments of a
    block, and the plans here refer to one another.
    """

    def __init__(
        self,
        rows: Rows,
        own: Sequence[KindState],
        cross: Sequence[KindState],
        random: ops.RowNoise | None = None,
        dtype: torch.dtype = torch.float32,
        stack: nn.Module | None = None,
        blocks: Sequence[nn.Module] = (),
        kinds: Sequence[nn.Module] = (),
    ) -> None:
        self.rows, self.own, self.cross, self.random = rows, own, cross, random
        self.dtype, self.stack, self.blocks, self.kinds = dtype, stack, blocks, kinds
        self.moving: list[tuple[SelfState, FullStep, CacheKeys]] = []
        if self.stack is None or self.stack.training or torch.is_grad_enabled() or self.cross:
            return
        moving = [_moving(state) for state in dict.fromkeys(self.own)]
        self.moving = [one for one in moving if one is not None]
        if len(self.moving) < len(moving):
            self.moving = []
        self.decided_by = [*chain(chain.from_iterable(map(_of_block, self.blocks)), *map(_of_kind, self.kinds))]

    def try_advance(self, rows: Rows, x: Tensor) -> bool:
        """Advance by one token of each of the same rows in place: the places that keys are written to and read up to,
        and the rotation.  False, with nothing changed, where more than the ends of the rows differs."""
        if not self.moving or not rows.even or x.dtype != self.dtype:
            return False
        if self.stack is None or self.stack.training or torch.is_grad_enabled():
            return False
        deciding = chain(chain.from_iterable(map(_of_block, self.blocks)), *map(_of_kind, self.kinds))
        if not all(map(is_, deciding, self.decided_by)):
            return False
        past, end = rows.past[0], rows.ends[0]
        self.rows = rows
        for state, step, keys in self.moving:
            state.rows = step.rows = rows
            step.at = slice(past, end)
            keys.end = end
            if state.position is not None:
                state.rotation = state.position.prepare(rows, x).rotation
        return True


class Kind(Module[parts.KindSpec], of=parts.KindSpec):
    """The state that the layers of one kind share."""

    position: Position[Part] | None

    def state(self, attn: Attention, rows: Rows, x: Tensor, step: KeyStep, random: ops.RowNoise | None) -> SelfState:
        """The state of the layers that are like `attn`."""
        at = UNPOSITIONED if self.position is None else self.position.prepare(rows, x, random)
        plan = step.layout.plan(rows, self.spec.mask, heads_of(attn, x, random), at.bias, attn.scoring)
        return SelfState(rows, plan, step, self.position, at.rotation, at.content)


def cross_state(attn: Attention, rows: Rows, x: Tensor, source: CrossKeys, random: ops.RowNoise | None) -> CrossState:
    """The state of the cross-attention layers that are like `attn`: every query sees the whole source of its row."""
    plan = source.layout(rows).plan(rows, Full(), heads_of(attn, x, random, crosses=True), None, attn.scoring)
    return CrossState(rows, plan, source)


def heads_of(attn: Attention, x: Tensor, random: ops.RowNoise | None, *, crosses: bool = False) -> Heads:
    spec, device = attn.spec, x.device.type
    dtype = x.dtype
    if device != "meta" and torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)  # what the projections give
    return Heads(
        heads=spec.heads, groups=spec.kv_heads, width=spec.head_width, value_width=spec.value_width, dtype=dtype,
        device=x.device, scale=spec.scale, softcap=spec.softcap, sinks=spec.sinks,
        dropout=spec.dropout if attn.training else 0.0, learns=torch.is_grad_enabled(),
        crosses=crosses, random=random,
    )  # fmt: skip


def sharing_key(attn: parts.AttentionSpec, layer: int) -> tuple[object, ...]:
    """Equal for layers that may share a state; those with additive scores have weights of their own and share none."""
    own = None if attn.mechanism is None else layer
    return (
        attn.kind, attn.heads, attn.kv_heads, attn.head_width, attn.value_width, attn.scale, attn.softcap, attn.sinks,
        attn.dropout, own,
    )  # fmt: skip


def shared_states(groups: dict[tuple[object, ...], list[int]], state: Callable[[int], KindState]) -> list[KindState]:
    """The state of each layer, one for each group of layers; `state` makes that of a group's first."""
    states: dict[int, KindState] = {}
    for layers in groups.values():
        states.update(dict.fromkeys(layers, state(layers[0])))
    return [states[layer] for layer in sorted(states)]
