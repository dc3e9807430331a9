"""The cache of causal linear attention: two sums of constant size in place of keys and values.

Linear attention (Katharopoulos et al. 2020) weighs the value v_j by `φ(q)·φ(k_j)`, so what a query needs of all keys
before it is `Σ φ(k_j) v_jᵀ [K, Kv]` and `Σ φ(k_j) [K]`.  A step adds its tokens to these sums when it is finished, and
its queries read the sums before it and its own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.attention.mechanisms import LINEAR, Mechanism, divided, features, running
from triptych.attention.placing import ContentBias, Heads, Placing, ScoreBias
from triptych.attention.row_batching import batched
from triptych.attention.row_plan import FlatKeys
from triptych.attention.rows import Rows
from triptych.attention.store import Snapshot, Store
from triptych.errors import InputError
from triptych.spec.masks import Mask


@dataclass(frozen=True, eq=False)
class SumKeys:
    """New keys and values of `rows` behind the sums of what came before: k `[N, G, K]` are features, v `[N + B * K, G,
    Kv + 1]` the values, with a 1 behind each, and then for each row its sums, one row of them for each feature."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def plan(
        self, rows: Rows, mask: Mask, heads: Heads, bias: ScoreBias | None = None, mechanism: Mechanism = LINEAR
    ) -> SumPlan:
        """Raises InputError for what linear attention has no form for, as without a cache."""
        if mechanism is not LINEAR:
            raise InputError("a cache of sums serves linear attention alone")
        request, _ = Placing(rows, rows.longest, rows.longest).request(mask, heads, bias)
        LINEAR.plan(request)  # raises where it cannot serve
        return SumPlan(rows)


@dataclass(frozen=True, eq=False)
class SumPlan:
    """Linear attention of `rows` over keys as `SumKeys` lays them out."""

    rows: Rows

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, content: ContentBias | None = None
    ) -> Tensor:
        """q [N, H, K] -> [N, H, Kv]."""
        rows, groups = self.rows, k.shape[1]
        batching = batched(rows, q.device)
        new, before = v[: rows.total], v[rows.total :].view(len(rows), -1, *v.shape[1:]).transpose(1, 2)
        queries = batching.batch(features(q.to(k.dtype)))
        grouped = queries.view(len(rows), groups, -1, *queries.shape[2:])  # [B, G, H / G, T, K]
        keys, values = (batching.batch(x)[:, :, None] for x in (k, new))
        total = running(grouped, keys, values) + grouped @ before[:, :, None]
        return batching.flat(divided(total).flatten(1, 2)).to(q.dtype)


class SumStep:
    """One step of the layers that keep sums.  A first prefill gives the fresh tensors back, as `FullStep` does."""

    def __init__(self, stores: Sequence[Store], rows: Rows, snapshots: dict[int, Snapshot], *, fresh: bool) -> None:
        self.stores, self.rows, self.snapshots, self.fresh = stores, rows, snapshots, fresh
        self.layout = FlatKeys(rows) if fresh else SumKeys(rows)
        self.slots = list(rows.slots)
        self.begin = [row for row, past in enumerate(rows.past) if not past]  # what their slots still have is forgotten
        self.after: dict[int, Tensor] = {}  # of each layer, written by `finish`

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        store, rows = self.stores[layer], self.rows
        new_k, new_v = _terms(store, k, v)
        batching = batched(rows, k.device)
        before = torch.cat((store.k[self.slots], store.v[self.slots]), -1)
        before[self.begin] = 0.0
        self.after[layer] = before + batching.batch(new_k).mT @ batching.batch(new_v)
        for row, slot in enumerate(self.slots):
            if slot in self.snapshots:
                here = slice(rows.starts[row], rows.starts[row] + rows.lengths[row])
                self.snapshots[slot].added[layer] = new_k[here], new_v[here]
        if self.fresh:
            return k, v
        return new_k, torch.cat((new_v, before.transpose(1, 2).flatten(0, 1)))

    def finish(self) -> None:
        """Add the step's tokens.  Not before every layer was extended: a step that fails changes nothing."""
        for layer, after in self.after.items():
            store = self.stores[layer]
            store.k[self.slots], store.v[self.slots] = after[..., :-1], after[..., -1:]


def put_back(store: Store, slot: int, snapshot: Snapshot, layer: int, count: int) -> None:
    """The sums of a slot as they were at `hold`, and after the first `count` of the tokens that came since."""
    new_k, new_v = (x[:count].transpose(0, 1) for x in snapshot.added[layer])
    k, v = snapshot.sums[layer]
    after = torch.cat((k, v), -1) + new_k.mT @ new_v
    store.k[slot], store.v[slot] = after[..., :-1], after[..., -1:]


def _terms(store: Store, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Features [N, G, K] of keys, and values with a 1 behind each [N, G, Kv + 1], in the store's precision."""
    k, v = k.detach().to(store.k.dtype), v.detach().to(store.k.dtype)
    return features(k), F.pad(v, (0, 1), value=1.0)
