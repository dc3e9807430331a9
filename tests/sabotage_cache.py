"""Sabotages of caches, measured by cached against uncached."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from sabotage import cached
from triptych import ops
from triptych.attention import Cache, CachedLayer, CrossCache, Rows, SlotKeys
from triptych.attention.cache_steps import FullStep, NullStep, RingStep, ring_positions
from triptych.attention.layer_cache import Store
from triptych.attention.pages import Pages
from triptych.attention.row_places import RowPlaces
from triptych.model import Model
from triptych.nn import positions, stack
from triptych.nn.attention_states import SelfState


@cached("llama", "FullStep")
def keys_written_one_place_late(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullStep, "__init__", written_late(FullStep.__init__))


def written_late(init: Callable[..., None]) -> Callable[..., None]:
    """A step whose keys go one place further than where its layout, and the next steps, look for them."""

    def late(
        self: FullStep, stores: Sequence[Store], like: Store, rows: Rows, places: RowPlaces, *, fresh: bool
    ) -> None:
        init(self, stores, like, rows, places, fresh=fresh)
        if not fresh and self.at is not None:
            self.at = slice(self.at.start + 1, self.at.stop + 1)
        elif not fresh:
            places._of_tokens = [one._replace(place=one.place + 1) for one in places._of_tokens]

    return late


@cached("llama", "FullStep")
def stale_lengths(model: Model, patch: pytest.MonkeyPatch) -> None:
    """The new tokens are written and not counted."""
    init = FullStep.__init__

    def stale(
        self: FullStep, stores: Sequence[Store], like: Store, rows: Rows, places: RowPlaces, *, fresh: bool
    ) -> None:
        init(self, stores, like, rows, places, fresh=fresh)
        if not fresh:
            self.layout = SlotKeys(rows.past, self.layout.slots)

    patch.setattr(FullStep, "__init__", stale)


@cached("llama", "SelfState")
def keys_cached_before_they_turn(model: Model, patch: pytest.MonkeyPatch) -> None:
    def unturned(self: SelfState, attn: Any, x: Tensor, layer: int, taps: Any) -> Any:
        k, v = attn.project(x, self.rows, taps)
        turned = ops.rotate(k, self.rotation) if isinstance(self.step, NullStep) else k
        return self.step.extend(layer, turned, v)

    patch.setattr(SelfState, "keys", unturned)


@cached("gpt2", "Learned")
def positions_restart_at_every_step(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = stack.Embed.forward
    patch.setattr(stack.Embed, "forward", lambda self, ids, rows, *rest: forward(self, ids, Rows(rows.lengths), *rest))


@cached("gpt2", "Learned")
def cached_positions_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = stack.Embed.forward

    def late(self: Any, ids: Tensor, rows: Rows, *rest: Any) -> Tensor:
        return forward(self, ids, Rows(rows.lengths, tuple(past + 1 if past else 0 for past in rows.past)), *rest)

    patch.setattr(stack.Embed, "forward", late)


@cached("mistral", "RingStep")
@cached("qwen2-window", "RingStep")
@cached("gemma3", "RingStep")
def ring_one_too_short(model: Model, patch: pytest.MonkeyPatch) -> None:
    init = Store.__init__

    def short(self: Store, layer: CachedLayer, *on: Any, **how: Any) -> None:
        init(self, layer if layer.window is None else replace(layer, window=layer.window - 1), *on, **how)

    patch.setattr(Store, "__init__", short)


@cached("mistral", "RingStep")
def ring_overwritten_under_a_chunk(model: Model, patch: pytest.MonkeyPatch) -> None:
    init, extend = RingStep.__init__, RingStep.extend

    def hasty(self: RingStep, stores: Sequence[Store], like: Store, window: int, rows: Rows, *, fresh: bool) -> None:
        init(self, stores, like, window, rows, fresh=fresh)
        if not fresh:
            self.layout = SlotKeys(rows.ends, rows.slots, ring_positions(rows.ends, window, stores[0].k.device))

    def overwritten(self: RingStep, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys = extend(self, layer, k, v)
        return keys if self.fresh else (self.stores[layer].k, self.stores[layer].v)

    patch.setattr(RingStep, "__init__", hasty)
    patch.setattr(RingStep, "extend", overwritten)


@cached("llama", "Store.copy")
@cached("mistral", "Store.copy")
def keys_stay_when_rows_change_their_slots(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cache, "copy", lambda self, sources, targets: None)


@cached("t5", "CrossCache.share")
def sources_stay_when_rows_change_their_slots(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CrossCache, "share", lambda self, sources, targets: None)


@cached("mistral", "Store.copy")
def slots_copied_one_after_another(model: Model, patch: pytest.MonkeyPatch) -> None:
    """Two slots that are exchanged then hold the same."""

    def one_by_one(self: Store, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.k[target, :, :length], self.v[target, :, :length] = (x[source, :, :length] for x in (self.k, self.v))

    patch.setattr(Store, "copy", one_by_one)


@cached("llama", "Pages.share")
def pages_shared_one_after_another(model: Model, patch: pytest.MonkeyPatch) -> None:
    share = Pages.share

    def one_by_one(self: Pages, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        for one in zip(sources, targets, lengths, strict=True):
            share(self, *([x] for x in one))

    patch.setattr(Pages, "share", one_by_one)


@cached("t5", "T5Buckets")
def cached_distances_from_the_step_s_own_beginning(model: Model, patch: pytest.MonkeyPatch) -> None:
    bias = positions.t5_bias

    def own(weight: Tensor, q_pos: Tensor, k_pos: Tensor, **how: Any) -> Tensor:
        return bias(weight, q_pos - q_pos[..., :1], k_pos, **how)

    patch.setattr(positions, "t5_bias", own)
