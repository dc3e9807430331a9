"""The score of every head in every role, layer by layer, beside the nulls that `role_labels` draws for most roles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from triptych.probe.reads_and_edits import Edit, Edits, Plan, Read, Reads, zero
from triptych.probe.role_labels import DRAWS, Labels, View, label
from triptych.probe.role_texts import HeadSample
from triptych.probe.size import trace_size
from triptych.probe.trace import Trace
from triptych.spec import AlibiSpec, ModelSpec
from triptych.spec.masks import Mask, Points, full
from triptych.text import Tokenizer

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
Stack = Literal["encoder", "decoder", "cross"]


@runtime_checkable
class Probed(Protocol):
    """What `triptych.Model` has of what is used here."""

    tokenizer: Tokenizer | None

    @property
    def spec(self) -> ModelSpec: ...

    def check_words(self, what: str) -> None: ...

    def ids(self, texts: Any, mask: Tensor | None = None, *, target: bool = False) -> list[list[int]]: ...

    def generate(self, prompts: Any, *, max_new_tokens: int = 64) -> Sequence[Any]: ...

    def trace(
        self, rows: Any, target: Any = None, *, read: Reads = (), edit: Edits = (), max_bytes: int = 1 << 30,
        allow_null: bool = False,
    ) -> Trace: ...  # fmt: skip


@dataclass(frozen=True, eq=False)
class HeadLayer:
    """The attention of one layer: its name before `.pattern`, its place, the number of heads and what it sees."""

    name: str
    stack: Stack
    layer: int
    heads: int
    mask: Mask
    fixed_bias: bool


@dataclass
class RoleScores:
    """One role in every layer that can have it: `[H]` tensors in the order of `layers`.

    `floor` is the share that a score must reach of the weight that even attention leaves, at least `FLOOR`.
    `score`, `mean` and `spread` of the null, `even` the score of even weights, `offset` the best of those searched.
    `highest` `[draws]` is the largest standardized score of any head in each draw of the null.
    """

    role: str
    queries: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # by stack
    layers: list[HeadLayer] = field(default_factory=list)
    score: list[Tensor] = field(default_factory=list)
    mean: list[Tensor] = field(default_factory=list)
    spread: list[Tensor] = field(default_factory=list)
    even: list[Tensor] = field(default_factory=list)
    offset: list[Tensor] = field(default_factory=list)
    highest: Tensor | None = None
    floor: float = 0.0

    def add(self, attention: HeadLayer, scores: Tensor, even: Tensor, offsets: Sequence[int] = (0,)) -> None:
        """`scores` `[1 + draws, K, H]`, the role first; `even` `[K, H]`."""
        role, draws = scores[0], scores[1:]
        best = role.argmax(0, keepdim=True)
        self.layers.append(attention)
        self.score.append(role.gather(0, best)[0])
        self.even.append(even.gather(0, best)[0])
        self.offset.append(torch.tensor(offsets)[best[0]])
        mean, spread = (draws.mean(0), draws.std(0).clamp_min(SPREAD)) if len(draws) else (even, torch.zeros_like(even))
        self.mean.append(mean.gather(0, best)[0])
        self.spread.append(spread.gather(0, best)[0])
        if len(draws):
            highest = ((draws - mean) / spread).amax((1, 2))
            self.highest = highest if self.highest is None else torch.maximum(self.highest, highest)

    def above(self, roles: int) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
        """For each layer the threshold of each head; its distance from the mean of the null in standard deviations,
        and the probability of one as large in any head and role, None where nothing is drawn."""
        if self.role == "diffuse":
            return self._above_others(), [None] * len(self.layers), [None] * len(self.layers)
        limits, zs, ps = [], [], []
        for score, mean, spread, even in zip(self.score, self.mean, self.spread, self.even, strict=True):
            least = torch.maximum(mean, even)
            limit = least + max(FLOOR, self.floor) * (1 - least)
            z = p = None
            if self.highest is not None:
                z = (score - mean) / spread
                reached = (self.highest[:, None] >= z[None]).sum(0)
                p = ((1 + reached) / (1 + len(self.highest)) * roles).clamp_max(1)
                rank = int(FAMILY / roles * (1 + len(self.highest)))  # so many draws may reach a score that counts
                bound = self.highest.sort(descending=True).values[max(rank - 1, 0)]
                limit = torch.maximum(limit, mean + bound * spread)
            limits.append(limit)
            zs.append(z)
            ps.append(p)
        return limits, zs, ps

    def _above_others(self) -> list[Tensor]:
        """`DIFFUSE`, and `TIMES` the median of the heads of the same stack and the lower quartile of the same layer: a
        model that has learned nothing reads evenly in all heads, or in all of a layer, and then none stands out."""
        limits = []
        for attention, score in zip(self.layers, self.score, strict=True):
            all_heads = torch.cat([
                other for at, other in zip(self.layers, self.score, strict=True) if at.stack == attention.stack
            ])  # fmt: skip
            usual = max(float(all_heads.median()), float(score.quantile(0.25, interpolation="lower")))
            limits.append(torch.full_like(score, max(DIFFUSE, TIMES * usual)))
        return limits


def attentions(spec: ModelSpec) -> list[HeadLayer]:
    """Every layer whose heads have patterns, in the order of the forward."""
    every = []
    for stack_name, stack in spec.stacks.items():
        prefix = f"{stack_name}." if spec.layout == "encoder-decoder" else ""
        name: Stack = "encoder" if stack_name == "encoder" else "decoder"
        for i, block in enumerate(stack.blocks):
            kind = stack.kinds[block.attn.kind]
            own = f"{prefix}blocks.{i}"
            fixed = isinstance(kind.position, AlibiSpec)
            every.append(HeadLayer(f"{own}.attn", name, i, block.attn.heads, kind.mask, fixed))
            if block.cross is not None:
                every.append(HeadLayer(f"{own}.cross", "cross", i, block.cross.heads, full(), False))
    known = Plan.of(spec).sites
    return [one for one in every if f"{one.name}.pattern" in known]


def score_all(
    model: Probed, samples: list[HeadSample], roles: Sequence[str], types: dict[Stack, dict[str, set[int]]], seed: int
) -> dict[str, RoleScores]:
    """Every role of every head on the samples; a role that the samples cannot show is left out."""
    every = attentions(model.spec)
    views: dict[tuple[Stack, str], View] = {}
    labels: dict[tuple[Stack, str], list[Labels]] = {}
    scores: dict[str, RoleScores] = {}
    for attention, patterns, without_content in _read(model, samples, every):
        key = (attention.stack, repr(attention.mask))
        if key not in views:
            views[key] = view = _view(model.spec, samples, attention)
            labels[key] = _labels(view, attention.stack, roles, types[attention.stack], seed)
        view = views[key]
        flat = torch.cat([p.flatten(1) for p in patterns], 1).T.contiguous()  # [places, H]
        even = view.even[:, None].expand(-1, attention.heads)
        if without_content is not None:
            even = torch.cat([p.flatten(1) for p in without_content], 1).T
        for one in labels[key]:
            role = scores.setdefault(one.role, RoleScores(one.role))
            role.queries[attention.stack], role.floor = one.queries, max(role.floor, one.floor)
            role.add(attention, one.scores(flat), one.scores(even.contiguous())[0], one.offsets)
        _add_diffuse(scores, roles, attention, view, flat)
        if attention.stack == "cross" and "alignment" in roles:
            _add_alignment(scores, attention, view, patterns, seed)
    return scores


def _read(
    model: Probed, samples: list[HeadSample], every: list[HeadLayer]
) -> Iterator[tuple[HeadLayer, list[Tensor], list[Tensor] | None]]:
    """Each layer with its patterns `[H, T, S]` of the samples, and those without content where the positions are a
    fixed bias.  As many layers are read in a forward as fit `BYTES`."""
    rows = [sample.ids for sample in samples]
    targets = None if samples[0].target is None else [sample.target for sample in samples]
    lengths = [len(sample.target or sample.ids) for sample in samples]
    group: list[HeadLayer] = []
    used = 0
    for one in [*every, None]:
        nbytes = 0
        if one is not None:
            plan = Plan.of(model.spec, [f"{one.name}.pattern"])
            nbytes = trace_size(plan, lengths, [] if targets is None else [len(row) for row in rows]).total
        if group and (one is None or used + nbytes > BYTES):
            read = [Read(f"{each.name}.pattern") for each in group]
            trace = model.trace(rows, targets, read=read)
            fixed = [each for each in group if each.fixed_bias]
            silent: list[Edit] = [zero(f"{each.name}.q_rot") for each in fixed]
            bare = model.trace(rows, targets, read=read, edit=silent, allow_null=True) if fixed else None
            for each in group:
                name = f"{each.name}.pattern"
                without = [p.float().cpu() for p in bare[name]] if bare is not None and each.fixed_bias else None
                yield each, [p.float().cpu() for p in trace[name]], without
            group, used = [], 0
        if one is not None:
            group.append(one)
            used += nbytes


def _view(spec: ModelSpec, samples: list[HeadSample], attention: HeadLayer) -> View:
    """The queries, keys and visibility of one kind of attention."""
    of_decoder = [sample.ids if sample.target is None else sample.target for sample in samples]
    sources = [sample.ids for sample in samples]
    queries = sources if attention.stack == "encoder" else of_decoder
    keys = of_decoder if attention.stack == "decoder" else sources
    visible = []
    for q, k in zip(queries, keys, strict=True):
        t, s = torch.arange(len(q)), torch.arange(len(k))
        seen = torch.as_tensor(attention.mask.visible(Points(t[:, None]), Points(s[None, :])))
        visible.append(np.broadcast_to(seen.numpy(), (len(q), len(k))).reshape(len(q), len(k)).copy())
    return View(attention.stack, samples, queries, keys, visible)


def _labels(view: View, stack: Stack, roles: Sequence[str], types: dict[str, set[int]], seed: int) -> list[Labels]:
    built_in = CROSS_ROLES if stack == "cross" else SELF_ROLES
    every = []
    for number, role in enumerate(roles):
        linear = role not in ("diffuse", "alignment")
        of_source = stack == "encoder" or (stack == "decoder" and view.samples[0].target is None)
        if linear and (role in built_in or (role not in SELF_ROLES and of_source)):
            noise = np.random.default_rng([seed, 1, number])
            one = label(role, view, types, noise)
            every += [] if one is None else [one]
    return every


def _add_diffuse(
    scores: dict[str, RoleScores], roles: Sequence[str], attention: HeadLayer, view: View, flat: Tensor
) -> None:
    """The exponential of the entropy of a query's weights over the number of keys it sees, mean over queries with 8."""
    if "diffuse" not in roles:
        return
    shares, start = [], 0
    for r, (q, k) in enumerate(zip(view.queries, view.keys, strict=True)):
        rows = flat[start : start + len(q) * len(k)].view(len(q), len(k), -1)
        start += len(q) * len(k)
        seen = torch.from_numpy(view.visible[r].sum(1))
        if view.samples[r].kind in ("text", "control") and bool((seen >= 8).any()):
            entropy = torch.special.entr(rows[seen >= 8]).sum(1)  # [t, H]
            shares.append(entropy.exp() / seen[seen >= 8, None])
    if shares:
        share = torch.cat(shares).mean(0)
        role = scores.setdefault("diffuse", RoleScores("diffuse"))
        role.queries[attention.stack] = {
            r: list(range(len(view.queries[r]))) for r in view.of_kind("text") or view.of_kind("control")
        }
        role.add(attention, share[None, None], torch.ones(1, len(share)))


def _add_alignment(
    scores: dict[str, RoleScores], attention: HeadLayer, view: View, patterns: list[Tensor], seed: int
) -> None:
    """The mean weight along the best path through the source that never goes back; the null are the same rows in
    another order, which a head that always reads the same keys does not notice."""
    noise = torch.Generator().manual_seed(seed)
    total, used = torch.zeros(1 + DRAWS, 1, attention.heads), 0
    even = 0.0
    queries = {}
    for r in view.of_kind("text"):
        pattern = patterns[r][:, :ALIGNED, :ALIGNED]  # [H, T, S]
        _, t, s = pattern.shape
        if t < 4 or s < 4:
            continue
        orders = torch.cat([torch.arange(t)[None], torch.rand(DRAWS, t, generator=noise).argsort(-1)])
        for start in range(0, len(orders), 200):
            some = pattern[:, orders[start : start + 200]].transpose(0, 1)  # [draws, H, T, S]
            total[start : start + 200, 0] += _best_path(some)
        used, even = used + 1, even + 1 / s
        queries[r] = list(range(t))
    if used:
        role = scores.setdefault("alignment", RoleScores("alignment"))
        role.queries["cross"] = queries
        role.add(attention, total / used, torch.full((1, attention.heads), even / used))


def _best_path(patterns: Tensor) -> Tensor:
    """`[..., T, S]` -> `[...]`: the largest mean weight over positions s_1 <= s_2 <= ... <= s_T."""
    best = patterns[..., 0, :]
    for t in range(1, patterns.shape[-2]):
        best = best.cummax(-1).values + patterns[..., t, :]
    return best.amax(-1) / patterns.shape[-2]
