"""What the layers of one kind share in one forward, decided once by the stack and only read by its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych import ops
from triptych.attention import (
    AttendPlan,
    ContentBias,
    CrossKeys,
    Heads,
    KeyStep,
    Rows,
)
from triptych.nn.part import Module
from triptych.nn.positions import UNPOSITIONED, Position
from triptych.nn.taps import Taps
from triptych.spec import parts
from triptych.spec.masks import Full
from triptych.spec.part import Part

if TYPE_CHECKING:
    from triptych.nn.attention import Attention


@runtime_checkable
class KindState(Protocol):
    """Mask, kernel, rotation and bias of some layers: the rows they run on, how their queries turn, where their keys
    come from, and the plan by which queries meet keys."""

    @property
    def rows(self) -> Rows: ...
    @property
    def plan(self) -> AttendPlan: ...
    @property
    def rotation(self) -> ops.Rotation | None: ...
    @property
    def content(self) -> Callable[[Attention], ContentBias] | None: ...

    def keys(self, attn: Attention, x: Tensor, layer: int, taps: Taps) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class SelfState:
    """A row attends to itself: what the cache holds of it, then its own tokens."""

    rows: Rows
    plan: AttendPlan
    step: KeyStep
    rotation: ops.Rotation | None
    content: Callable[[Attention], ContentBias] | None

    def keys(self, attn: Attention, x: Tensor, layer: int, taps: Taps) -> tuple[Tensor, Tensor]:
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

    def keys(self, attn: Attention, x: Tensor, layer: int, taps: Taps) -> tuple[Tensor, Tensor]:
        return self.source.keys(layer, partial(_projected, attn, taps))


def _projected(attn: Attention, taps: Taps, memory: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    k, v = attn.project(memory, rows, taps)
    return taps("k_rot", k, rows), v


@dataclass(frozen=True, eq=False)
class Context:
    """What a forward knows beside its vectors: the rows, and for each block the state of its attentions."""

    rows: Rows
    own: Sequence[KindState]
    cross: Sequence[KindState]
    random: torch.Generator | None = None


class Kind(Module[parts.Kind], of=parts.Kind):
    """What the layers of one kind share."""

    position: Position[Part] | None

    def state(self, attn: Attention, rows: Rows, x: Tensor, step: KeyStep, random: torch.Generator | None) -> SelfState:
        """The state of the layers that are like `attn`."""
        at = UNPOSITIONED if self.position is None else self.position.prepare(rows, x, random)
        plan = step.layout.plan(rows, self.spec.mask, heads_of(attn, x, random), at.bias, attn.scoring)
        return SelfState(rows, plan, step, at.rotation, at.content)


def cross_state(
    attn: Attention, rows: Rows, x: Tensor, source: CrossKeys, random: torch.Generator | None
) -> CrossState:
    """The state of the cross-attention layers that are like `attn`: every query sees the whole source of its row."""
    plan = source.layout(rows).plan(rows, Full(), heads_of(attn, x, random), None, attn.scoring)
    return CrossState(rows, plan, source)


def heads_of(attn: Attention, x: Tensor, random: torch.Generator | None) -> Heads:
    spec = attn.spec
    return Heads(
        heads=spec.heads, groups=spec.kv_heads, width=spec.head_width, value_width=spec.value_width, dtype=x.dtype,
        device=x.device, scale=spec.scale, softcap=spec.softcap, sinks=spec.sinks,
        dropout=spec.dropout if attn.training else 0.0, learns=torch.is_grad_enabled(), random=random,
    )  # fmt: skip


def alike(attn: parts.Attention, layer: int) -> tuple[object, ...]:
    """Equal for layers that may share a state; those with additive scores have weights of their own and share none."""
    own = None if attn.mechanism is None else layer
    return (
        attn.kind, attn.heads, attn.kv_heads, attn.head_width, attn.value_width, attn.scale, attn.softcap, attn.sinks,
        attn.dropout, own,
    )  # fmt: skip


def shared_states(
    groups: dict[tuple[object, ...], list[int]], state: Callable[[int], KindState], count: int
) -> list[KindState]:
    """One state per group of layers, at the place of each of its layers; `state` makes that of a group's first."""
    if len(groups) == 1:
        return [state(0)] * count
    states: list[KindState | None] = [None] * count
    for layers in groups.values():
        one = state(layers[0])
        for layer in layers:
            states[layer] = one
    return [one for one in states if one is not None]
