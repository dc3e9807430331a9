"""The score of every head in every role, layer by layer, beside the null distributions of `role_definitions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from triptych.spec import AlibiSpec, ModelSpec
from triptych.spec.masks import Mask, Points, full
from .prompts import ProbedModel, check_numbers
from .reads_and_edits import Edits, Plan, Reads, zero
from .role_definitions import DRAWS, Labels, View, label
from .role_texts import HeadSample
from .sites import prefix_of, sites
from .trace import Trace
from .trace_size import trace_size

FAMILY = 0.01  # probability that a model without any role has one above its null, over all heads and roles
FLOOR = 0.25  # of the weight that even attention leaves: less is no role, however far from chance
DIFFUSE = 0.5  # effective number of keys, as a share of those visible
TIMES = 2.5  # and what a diffuse head has of what is usual in its stack and layer
SPREAD = 0.01  # least standard deviation of a null: what differs by less is not a pattern
BYTES = 128 << 20  # of patterns read at once
ALIGNED = 40  # tokens on either side of an alignment

SELF_ROLES = (
    "induction", "duplicate", "delimiter", "boundary", "rare", "previous", "next", "offset", "first", "local",
    "long-range", "diffuse",
)  # fmt: skip
CROSS_ROLES = ("alignment", "delimiter", "boundary", "rare", "first", "diffuse")
AttentionStack = Literal["encoder", "decoder", "cross"]


@dataclass(frozen=True, eq=False)
class HeadLayer:
    """The attention of one layer: its name before `.pattern`, its place, the number of heads and what it sees."""

    name: str
    stack: AttentionStack
    layer: int
    heads: int
    mask: Mask
    fixed_bias: bool


HeadIndex = tuple[HeadLayer, int]


@dataclass
class RoleScores:
    """One role in all heads of the layers that can have it.

    queries   those of the role by stack and sample.
    numbers   of each layer `[5, H]`: the score, that of even weights, mean and spread of the null, and the best offset.
    highest   `[draws]`: the largest standardized score of any head in each draw of the null; None where none is drawn.
    floor     the share that a score must reach of the weight that even attention leaves, at least `FLOOR`.
    """

    role: str
    queries: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    heads: list[HeadIndex] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)
    highest: Tensor | None = None
    floor: float = 0.0

    def add(self, attention: HeadLayer, scores: Tensor, even: Tensor, offsets: Sequence[int] = (0,)) -> None:
        """`scores` `[1 + draws, K, H]`, the role first; `even` `[K, H]`."""
        role, draws = scores[0], scores[1:]
        mean, spread = (draws.mean(0), draws.std(0).clamp_min(SPREAD)) if len(draws) else (even, torch.zeros_like(even))
        each = (role, even, mean, spread, torch.tensor(offsets).to(role)[:, None].expand_as(role))
        best = role.argmax(0, keepdim=True)
        self.numbers.append(torch.stack([one.gather(0, best)[0] for one in each]))
        self.heads += [(attention, head) for head in range(attention.heads)]
        if len(draws):
            highest = ((draws - mean) / spread).amax((1, 2))
            self.highest = highest if self.highest is None else torch.maximum(self.highest, highest)

    def above(self, roles: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The threshold of each head; its distance from the mean of the null in standard deviations, and the
        probability of one as large in any head and role, None where nothing is drawn."""
        score, even, mean, spread, _ = torch.cat(self.numbers, 1)
        if self.role == "diffuse":
            return self._above_others(score), None, None
        least = torch.maximum(mean, even)
        limit = least + max(FLOOR, self.floor) * (1 - least)
        if self.highest is None:
            return limit, None, None
        z = (score - mean) / spread
        p, bound = by_chance(self.highest, z, roles)
        return torch.maximum(limit, mean + bound * spread), z, p

    def _above_others(self, score: Tensor) -> Tensor:
        """`DIFFUSE`, and `TIMES` the median of the heads of the same stack and the lower quartile of the same layer: a
        model that has learned nothing reads evenly in all heads, or in all of a layer, and then none stands out."""
        limits = torch.zeros_like(score)
        for attention in dict.fromkeys(at for at, _ in self.heads):
            own = torch.tensor([at is attention for at, _ in self.heads])
            same = torch.tensor([at.stack == attention.stack for at, _ in self.heads])
            usual = max(float(score[same].median()), float(score[own].quantile(0.25, interpolation="lower")))
            limits[own] = max(DIFFUSE, TIMES * usual)
        return limits


def by_chance(highest: Tensor, z: Tensor, roles: int = 1) -> tuple[Tensor, Tensor]:
    """The probability that any head in any of so many roles comes as far as `z`, and the distance that counts, which
    few of the `highest` of the draws reach."""
    reached = (highest[:, None] >= z).sum(0, dtype=torch.float32)
    rank = int(FAMILY / roles * (1 + len(highest)))
    p = ((1 + reached) / (1 + len(highest)) * roles).clamp_max(1)
    return p, highest.sort(descending=True).values[max(rank - 1, 0)]


def attentions(spec: ModelSpec) -> list[HeadLayer]:
    """Every layer whose heads have patterns, in the order of the forward."""
    every = []
    for stack_name, stack in spec.stacks.items():
        name: AttentionStack = "encoder" if stack_name == "encoder" else "decoder"
        for i, block in enumerate(stack.blocks):
            kind = stack.kinds[block.attn.kind]
            own = f"{prefix_of(spec, stack_name)}blocks.{i}"
            fixed = isinstance(kind.position, AlibiSpec)
            every.append(HeadLayer(f"{own}.attn", name, i, block.attn.heads, kind.mask, fixed))
            if block.cross is not None:
                every.append(HeadLayer(f"{own}.cross", "cross", i, block.cross.heads, full(), False))
    known = sites(spec)
    return [one for one in every if f"{one.name}.pattern" in known]


def score_all(
    model: ProbedModel, samples: list[HeadSample], roles: Sequence[str],
    types: dict[AttentionStack, dict[str, set[int]]], seed: int,
) -> dict[str, RoleScores]:  # fmt: skip
    """Every role of every head on the samples; a role that the samples cannot show is left out."""
    views: dict[tuple[AttentionStack, str], tuple[View, list[Labels]]] = {}
    scores: dict[str, RoleScores] = {}
    for attention, patterns, without_content in _read(model, samples):
        key = (attention.stack, repr(attention.mask))
        if key not in views:
            new = _view(samples, attention)
            views[key] = new, _labels(new, roles, types[attention.stack], seed)
        view, labels = views[key]
        flat = torch.cat([p.flatten(1) for p in patterns], 1).T.contiguous()  # [places, H]
        even = view.even[:, None].expand(-1, attention.heads)
        if without_content is not None:
            even = torch.cat([p.flatten(1) for p in without_content], 1).T
        for role_labels in labels:
            role = scores.setdefault(role_labels.role, RoleScores(role_labels.role))
            role.queries[attention.stack], role.floor = role_labels.queries, max(role.floor, role_labels.floor)
            role.add(attention, role_labels.scores(flat), role_labels.scores(even.contiguous())[0], role_labels.offsets)
        if "diffuse" in roles:
            _add_diffuse(scores, attention, view, patterns)
        if attention.stack == "cross" and "alignment" in roles:
            _add_alignment(scores, attention, view, patterns, seed)
    return scores


def _read(
    model: ProbedModel, samples: list[HeadSample]
) -> Iterator[tuple[HeadLayer, list[Tensor], list[Tensor] | None]]:
    """Each layer with its patterns `[H, T, S]` of the samples, and those without content where the positions are a
    fixed bias.  As many layers are read in a forward as fit `BYTES`."""
    lengths = [len(sample.decoded) for sample in samples]
    sources = [len(sample.ids) for sample in samples if sample.target is not None]
    groups: list[list[HeadLayer]] = []
    used = 0
    for layer in attentions(model.spec):
        nbytes = trace_size(Plan.of(model.spec, f"{layer.name}.pattern"), lengths, sources).total
        if not groups or used + nbytes > BYTES:
            groups.append([])
            used = 0
        groups[-1].append(layer)
        used += nbytes
    for group in groups:
        read = [f"{layer.name}.pattern" for layer in group]
        trace = trace_samples(model, samples, read)
        silent = [zero(f"{layer.name}.q_rot") for layer in group if layer.fixed_bias]
        bare = trace_samples(model, samples, read, silent) if silent else None
        for layer, name in zip(group, read, strict=True):
            without = [p.float().cpu() for p in bare[name]] if bare is not None and layer.fixed_bias else None
            yield layer, [p.float().cpu() for p in trace[name]], without


def trace_samples(model: ProbedModel, samples: Sequence[HeadSample], read: Reads, edit: Edits = ()) -> Trace:
    """The values of the samples at some sites, in one forward."""
    targets = None if samples[0].target is None else [sample.target for sample in samples]
    trace = model.trace([sample.ids for sample in samples], targets, read=read, edit=edit, allow_null=True)
    check_numbers("logits", trace.logits)
    return trace


def _view(samples: list[HeadSample], attention: HeadLayer) -> View:
    """The queries, keys and visibility of one kind of attention."""
    of_decoder = [sample.decoded for sample in samples]
    sources = [sample.ids for sample in samples]
    queries = sources if attention.stack == "encoder" else of_decoder
    keys = of_decoder if attention.stack == "decoder" else sources
    visible = []
    for q, k in zip(queries, keys, strict=True):
        t, s = torch.arange(len(q)), torch.arange(len(k))
        seen = torch.as_tensor(attention.mask.visible(Points(t[:, None]), Points(s[None, :])))
        visible.append(np.broadcast_to(seen.numpy(), (len(q), len(k))).reshape(len(q), len(k)).copy())
    return View(attention.stack, samples, queries, keys, visible)


def _labels(view: View, roles: Sequence[str], types: dict[str, set[int]], seed: int) -> list[Labels]:
    """Those of the roles that heads of a stack can have: those with links read the source or the only row."""
    built_in = CROSS_ROLES if view.stack == "cross" else SELF_ROLES
    of_source = view.stack == "encoder" or (view.stack == "decoder" and view.samples[0].target is None)
    every = [
        label(role, view, types, np.random.default_rng([seed, 1, number])) for number, role in enumerate(roles)
        if role not in ("diffuse", "alignment") and (role in built_in or (role not in SELF_ROLES and of_source))
    ]  # fmt: skip
    return [one for one in every if one is not None]


def _add_diffuse(scores: dict[str, RoleScores], attention: HeadLayer, view: View, patterns: list[Tensor]) -> None:
    """The exponential of the entropy of a query's weights over the number of keys it sees, mean over queries with 8."""
    shares = []
    for r in view.of_kind("text", "control"):
        seen = torch.from_numpy(view.visible[r].sum(1))
        if bool((seen >= 8).any()):
            entropy = torch.special.entr(patterns[r].permute(1, 2, 0).contiguous()[seen >= 8]).sum(1)  # [t, H]
            shares.append(entropy.exp() / seen[seen >= 8, None])
    if shares:
        share = torch.cat(shares).mean(0)
        role = scores.setdefault("diffuse", RoleScores("diffuse"))
        role.queries[attention.stack] = {
            r: list(range(len(view.queries[r]))) for r in view.of_kind("text") or view.of_kind("control")
        }
        role.add(attention, share[None, None], torch.ones_like(share)[None])


def _add_alignment(
    scores: dict[str, RoleScores], attention: HeadLayer, view: View, patterns: list[Tensor], seed: int
) -> None:
    """The mean weight along the best path through the source that never goes back; the null are the same rows in
    another order, which a head that always reads the same keys does not notice."""
    noise = torch.Generator().manual_seed(seed)
    total, used = torch.zeros(1 + DRAWS, 1, attention.heads, dtype=torch.float32), 0
    even = 0.0
    queries = {}
    for r in view.of_kind("text"):
        pattern = patterns[r][:, :ALIGNED, :ALIGNED]  # [H, T, S]
        _, t, s = pattern.shape
        if t < 4 or s < 4:
            continue
        orders = torch.cat(
            [torch.arange(t)[None], torch.rand(DRAWS, t, generator=noise, dtype=torch.float32).argsort(-1)]
        )
        for start in range(0, len(orders), 200):
            some = pattern[:, orders[start : start + 200]].transpose(0, 1)  # [draws, H, T, S]
            total[start : start + 200, 0] += _best_path(some)
        used, even = used + 1, even + 1 / s
        queries[r] = list(range(t))
    if used:
        role = scores.setdefault("alignment", RoleScores("alignment"))
        role.queries["cross"] = queries
        role.add(attention, total / used, torch.full_like(total[0], even / used))


def _best_path(patterns: Tensor) -> Tensor:
    """`[..., T, S]` -> `[...]`: the largest mean weight over positions s_1 <= s_2 <= ... <= s_T."""
    best = patterns[..., 0, :]
    for t in range(1, patterns.shape[-2]):
        best = best.cummax(-1).values + patterns[..., t, :]
    return best.amax(-1) / patterns.shape[-2]


def mean_weight(patterns: Tensor, reads: Tensor) -> Tensor:
    """`[..., T, S]` weights -> `[...]`: what each query gives the keys it `reads`, `[T, S]` booleans, summed over these
    keys; the mean over the queries that read any (Clark et al. 2019)."""
    summed = (patterns * reads.to(patterns.dtype)).sum(-1)
    return summed[..., reads.any(-1)].mean(-1)


def at_offset(queries: range, offset: int, length: int) -> Tensor:
    """`[length, length]` booleans: each of the queries reads the key `offset` places behind it; negative is before."""
    reads = torch.zeros(length, length, dtype=torch.bool)
    for query in queries:
        reads[query, query + offset] = True
    return reads
