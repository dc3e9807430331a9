"""Sabotages of caches, measured by cached against uncached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from sabotage import cached
from triptych.attention import CrossCache, FullCache, NullCache, Rows, SlotKeys, WindowCache
from triptych.model import Model
from triptych.nn import attention, positions, stack


@cached("llama", "FullCache")
def keys_written_one_place_late(model: Model, patch: pytest.MonkeyPatch) -> None:
    write = FullCache.write

    def late(self: FullCache, k: Tensor, v: Tensor, rows: Rows) -> None:
        write(self, k, v, Rows(rows.lengths, tuple(past + 1 if past else 0 for past in rows.past)))

    patch.setattr(FullCache, "write", late)


@cached("llama", "FullCache")
def stale_lengths(model: Model, patch: pytest.MonkeyPatch) -> None:
    """The new tokens are written and not counted."""
    extend = FullCache.extend
    patch.setattr(FullCache, "extend", lambda self, k, v, rows: replace(extend(self, k, v, rows), lengths=rows.past))


@cached("llama", "SelfView")
def keys_cached_before_they_turn(model: Model, patch: pytest.MonkeyPatch) -> None:
    def unturned(self: Any, attn: Any, x: Tensor, taps: Any) -> Any:
        k, v = attn.project(x, self.rows, taps)
        turned = self.rotate(k) if isinstance(self.cache, NullCache) else k
        return self.cache.extend(self.layer, turned, v, self.rows)

    patch.setattr(attention.SelfView, "keys", unturned)


@cached("gpt2", "Learned")
def positions_restart_at_every_step(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = stack.Embed.forward
    patch.setattr(
        stack.Embed, "forward", lambda self, ids, rows, types: forward(self, ids, replace(rows, past=()), types)
    )


@cached("gpt2", "Learned")
def cached_positions_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = stack.Embed.forward

    def late(self: Any, ids: Tensor, rows: Rows, types: Any) -> Tensor:
        return forward(self, ids, Rows(rows.lengths, tuple(past + 1 if past else 0 for past in rows.past)), types)

    patch.setattr(stack.Embed, "forward", late)


@cached("mistral", "WindowCache")
@cached("qwen2-window", "WindowCache")
@cached("gemma3", "WindowCache")
def window_cache_one_too_short(model: Model, patch: pytest.MonkeyPatch) -> None:
    init = WindowCache.__init__

    def short(self: WindowCache, layer: Any, *rest: Any) -> None:
        init(self, replace(layer, window=layer.window - 1), *rest)

    patch.setattr(WindowCache, "__init__", short)


@cached("mistral", "WindowCache")
def ring_overwritten_under_a_chunk(model: Model, patch: pytest.MonkeyPatch) -> None:
    def hasty(self: WindowCache, k: Tensor, v: Tensor, rows: Rows) -> SlotKeys:
        self.write(k, v, rows)
        return SlotKeys(self.k, self.v, (self.ring,) * len(rows), self._positions(rows.ends))

    patch.setattr(WindowCache, "extend", hasty)


@cached("llama", "FullCache.take")
def full_keys_stay_when_rows_move(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullCache, "take", lambda self, slots: None)


@cached("mistral", "WindowCache.take")
def window_keys_stay_when_rows_move(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowCache, "take", lambda self, slots: None)


@cached("t5", "CrossCache.filter")
def sources_stay_when_rows_move(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CrossCache, "filter", lambda self, slots: None)


@cached("t5", "T5Buckets")
def cached_distances_from_the_step_s_own_beginning(model: Model, patch: pytest.MonkeyPatch) -> None:
    bias = positions.t5_bias

    def own(weight: Tensor, q_pos: Tensor, k_pos: Tensor, **how: Any) -> Tensor:
        return bias(weight, q_pos - q_pos[..., :1], k_pos, **how)

    patch.setattr(positions, "t5_bias", own)
