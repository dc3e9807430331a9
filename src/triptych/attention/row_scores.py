"""The attention scores and weights of one row, computed for some queries at a time to bound the memory.

A piece holds about `PIECE` scores, so that a row of any length takes the memory of its results and little more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.spec.masks import Causal, Full, Points, Window
from . import mask_lowering, reference
from .mechanisms import DOT_PRODUCT
from .request import ContentBias
from .row_plan import FlatKeys, RowPlan, keys_of

PIECE = 1 << 20  # scores of one piece: with what is computed from them they fit the caches of a core


@dataclass(frozen=True, eq=False)
class ScorePiece:
    """The softmax input of the heads `heads` and queries `queries` (of those that were chosen), hidden keys -inf.

    scores   [h, n, s] in fp32 or better, of the keys from column `first` on; no key of another column is visible.
    base     the position of a key minus its place among these s.
    sinks    [h], where the heads have any.
    q_pos    [n] absolute positions of the queries, and `k_pos` [s] of the keys, -1 where there is none.
    """

    heads: slice
    queries: slice
    first: int
    base: int
    q_pos: Int[Tensor, " n"]
    k_pos: Int[Tensor, " s"]
    scores: Float[Tensor, "h n s"]
    sinks: Float[Tensor, " h"] | None = None

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + self.scores.shape[-1])

    def weights(self) -> Float[Tensor, "h n s"]:
        """The softmax of the scores: rows sum to 1, to less beside a sink, to 0 where there is nothing to see."""
        return reference.pattern_of(self.scores[None], self.sinks)[0]


@dataclass(eq=False)
class RowScores:
    """The scores of row `row` of a plan, for some of its heads and queries (indices; None is all of them).

    q, k      as `RowPlan.run` takes them, and `content` too; `sinks` [H].
    """

    plan: RowPlan
    row: int
    q: Tensor
    k: Tensor
    sinks: Tensor | None = None
    content: ContentBias | None = None
    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None

    def __post_init__(self) -> None:
        plan, row, device = self.plan, self.row, self.q.device
        self._heads = range(self.q.shape[1]) if self.heads is None else self.heads
        self._queries = range(plan.rows.lengths[row]) if self.queries is None else self.queries
        self._places = torch.tensor(self._queries, device=device, dtype=torch.long)  # [t] in their row
        self._q_pos = self._places + plan.rows.past[row]
        self._mask = mask_lowering.for_rows(plan.mask, [row])
        # The position of a key minus its column: keys of a flat batch lie one after another, others by position.
        self._base = plan.keys.rows.past[row] if isinstance(plan.keys, FlatKeys) else 0
        self._scale = float(plan.heads.width**-0.5) if plan.heads.scale is None else plan.heads.scale
        self.precision = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        self.chosen_sinks = None if self.sinks is None else self.sinks[list(self._heads)]  # [h]

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[h, t, S]` of everything chosen; a key's column is its position (in a flat batch, its place)."""
        return len(self._heads), len(self._queries), self._keys.shape[1]

    def pieces(self) -> Iterator[ScorePiece]:
        """Every chosen head and query once.  A piece's scores may be overwritten; the next one takes their place.

        Long rows have the heads of one group at a time: a matrix product of few queries takes in all keys as often.
        """
        heads, queries, keys = self.shape
        at_once = PIECE // max(1, keys * self.plan.mechanism.width_of_scores)  # queries, of any heads
        blocks = [slice(0, heads)] if heads * queries <= at_once else self._blocks
        width = max((block.stop - block.start for block in blocks), default=1)
        count = max(1, min(queries, at_once // max(1, width)))
        buffer = torch.empty(width * count * keys, dtype=self.precision, device=self.q.device)
        for block in blocks:
            for start in range(0, queries, count):
                yield self._piece(block, slice(start, min(start + count, queries)), buffer)

    def products(self) -> dict[str, Tensor] | None:
        """The factors of the scores, where these are dot products of which each query sees a range of keys; None where
        something is added or capped, and where other keys are hidden.  A key's position is its place.

        q           [h, t, K] in fp32, scaled, one after another.
        k           [g, S, K] in fp32, of which head i reads `group[i]`.
        from_, to   [t] the first key that each query sees, and the one after the last.
        q_pos       [t] absolute positions of the queries.
        """
        plan = self.plan
        mask = self._mask
        band = all(isinstance(part, Full | Causal | Window) for part in mask_lowering.conjuncts(mask))
        plain = plan.mechanism is DOT_PRODUCT and plan.bias is None and plan.heads.softcap is None
        if not (plain and band) or self._laid[1] is not None or self._base or self.precision != torch.float32:
            return None
        keys, place = self._keys.shape[1], self._q_pos
        window = mask_lowering.window_of(mask)
        from_, to = torch.zeros_like(place), torch.full_like(place, keys)
        if window is not None:
            from_, to = (place - window[0] + 1).clamp(0, keys), (place + window[1] + 1).clamp(0, keys)
        if mask_lowering.implies_causal(mask):
            to = to.minimum((place + 1).clamp(0, keys))
        q, group = (self._own * self._scale).contiguous(), torch.tensor(self._groups)
        return {"q": q, "k": self._keys, "group": group, "from_": from_, "to": to, "q_pos": place}

    def _piece(self, heads: slice, queries: slice, buffer: Tensor) -> ScorePiece:
        plan, chosen = self.plan, self._queries[queries]
        past = plan.rows.past[self.row]
        lowest, columns = past + min(chosen), self._columns(past + min(chosen), past + max(chosen))
        at, q_pos = self._places[queries], self._q_pos[queries]
        k, k_pos = self._keys_of(heads)[:, columns], self._k_pos[columns]
        scores = plan.mechanism.raw_scores(self._own[heads, queries], k, self._scale, buffer)
        if plan.heads.softcap is not None:
            scores = scores.div_(plan.heads.softcap).tanh_().mul_(plan.heads.softcap)
        bias = self._bias(heads, at, q_pos, columns, k_pos)
        if bias is not None:
            scores = scores + bias
        self._hide(scores, at, q_pos, lowest, columns, k_pos)
        sinks = None if self.chosen_sinks is None else self.chosen_sinks[heads]
        return ScorePiece(heads, queries, columns.start, self._base + columns.start, q_pos, k_pos, scores, sinks)

    # ---------------------------------------------------------------- queries and keys

    @cached_property
    def _row(self) -> Tensor:
        """[T, H, K] of the whole row, as the model computed it."""
        return self.q[self.plan.rows.place(self.row)]

    @cached_property
    def _own(self) -> Tensor:
        """[h, t, K] of the chosen heads and queries."""
        row = self._row if self.queries is None else self._row[self._places]
        row = row if self.heads is None else row[:, list(self.heads)]
        return row.transpose(0, 1).to(self.precision)

    @cached_property
    def _laid(self) -> tuple[Tensor, Tensor | None]:
        k, _, k_pos = keys_of(self.plan.keys, self.k, self.k[..., :0], self.row, self.plan.rows.ends[self.row])
        return k, k_pos

    @cached_property
    def _keys(self) -> Tensor:
        """[G, S, K]"""
        return self._laid[0][0].to(self.precision)

    @cached_property
    def _k_pos(self) -> Tensor:
        k, k_pos = self._laid
        return torch.arange(k.shape[2], device=k.device) if k_pos is None else k_pos[0]

    @cached_property
    def _groups(self) -> list[int]:
        """The group of keys that each chosen head reads."""
        return [head * self._keys.shape[0] // self.q.shape[1] for head in self._heads]

    @cached_property
    def _blocks(self) -> list[slice]:
        """Neighbouring chosen heads that read one group."""
        ends = [i for i, group in enumerate(self._groups, 1) if self._groups[i : i + 1] != [group]]
        return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _keys_of(self, heads: slice) -> Tensor:
        """[g, S, K]: what some chosen heads read, of as many heads each."""
        groups = self._groups[heads]
        if len(set(groups)) == 1:
            return self._keys[groups[0] : groups[0] + 1]
        return self._keys if self.heads is None else self._keys[groups]

    # ---------------------------------------------------------------- masks and biases

    def _columns(self, lowest: int, highest: int) -> slice:
        """The keys that queries at these positions may see, where columns are positions."""
        keys = self._keys.shape[1]
        if self._laid[1] is not None:
            return slice(0, keys)
        band, first, end = mask_lowering.window_of(self.plan.mask), 0, keys
        if mask_lowering.implies_causal(self.plan.mask):
            end = min(end, highest + 1)
        if band is not None:
            first, end = max(0, lowest - band[0] + 1), min(end, highest + band[1] + 1)
        return slice(min(first, end), end)

    def _hide(self, scores: Tensor, at: Tensor, q_pos: Tensor, lowest: int, columns: slice, k_pos: Tensor) -> None:
        """Make the scores `[h, n, s]` of keys that cannot be seen -inf."""
        mask, placed = self._mask, self._laid[1] is not None
        if isinstance(mask, Full) and not placed:
            return
        part = slice(0, len(k_pos))
        if isinstance(mask, Causal) and not placed:
            part = slice(min(lowest + 1 - columns.start, len(k_pos)), len(k_pos))  # keys after the first query alone
        documents = self.plan.documents(self.row) if mask_lowering.needs_documents(mask) else None
        q_doc = None if documents is None else documents[0][at][:, None]
        k_doc = None if documents is None else documents[0][columns][None]
        index = torch.arange(columns.start, columns.stop, device=k_pos.device)[None, part]
        q = Points(q_pos[:, None], document=q_doc)
        k = Points(k_pos[None, part], index=index, document=k_doc)
        visible: Tensor = torch.as_tensor(mask.visible(q, k), device=k_pos.device)
        if placed:
            visible = visible & (k_pos >= 0)
        scores[..., part].masked_fill_(~visible, -torch.inf)

    def _bias(self, heads: slice, at: Tensor, q_pos: Tensor, columns: slice, k_pos: Tensor) -> Tensor | None:
        """The bias that is added to the scores, `[h or 1, n, s]`."""
        if self.plan.bias is None:
            return None
        bias = self.plan.bias(q_pos, k_pos)
        if self.content is not None:
            bias = self.content(self._row[at].transpose(0, 1)[None], self._laid[0][:, :, columns], bias)
        bias = bias.reshape(bias.shape[-3:])
        return bias if len(bias) == 1 else bias[list(self._heads[heads])]
