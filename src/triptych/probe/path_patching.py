"""Path patching between heads (Wang et al. 2022, appendix B; Goldowsky-Dill et al. 2023): what one head tells another.

The corrupt prompt is run three times for each pair of a sender and a receiver, and the clean prompt once:

    1.  clean and corrupt: what every head gives (z).
    2.  corrupt, with the sender's z of the clean prompt, and every other head's z held at its corrupt value.  Only the
        direct paths from the sender change: through the residual stream and, unless `mlps="frozen"`, through the MLPs.
        The receiver's q, k or v is kept.
    3.  corrupt, with the receiver's q, k or v of run 2, everything else free.  This run is measured.

With the receiver "logits", run 2 is measured: what the sender gives the output directly.  Norms are computed anew in
run 2.  As in `patch`, exchange the prompts to see what a corrupt value breaks.  Wang et al. compute the MLPs anew;
Goldowsky-Dill et al. treat them as further nodes, which is `mlps="frozen"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.errors import InputError, ProbeError, shown
from triptych.probe.ablation import values_at
from triptych.probe.head_names import HeadName, attention_head, head_text
from triptych.probe.metric import Answer, Metric, MetricFunction, MetricName, metric_of
from triptych.probe.patching import PatchGrid, check_metric
from triptych.probe.prompts import (
    BATCH_TOKENS,
    Change,
    EditedRun,
    Place,
    ProbedModel,
    Prompt,
    PromptInput,
    check_list,
    differ,
    forward,
    measured_at,
    prompt_of,
    same_prompts,
)
from triptych.probe.sites import sites
from triptych.probe.twins import Observed, TwinRuns
from triptych.spec.model import ModelSpec

Projection = Literal["q", "k", "v"]
Nodes = Literal["recomputed", "frozen"]


def path_patch(
    model: ProbedModel,
    clean: PromptInput,
    corrupt: PromptInput,
    senders: Sequence[HeadName],
    receivers: Sequence[HeadName] | Literal["logits"],
    *,
    into: Projection = "q",
    answer: Answer | Sequence[Answer] | None = None,
    metric: MetricName | MetricFunction | None = None,
    at: int | None = None,
    target: PromptInput = None,
    corrupt_target: PromptInput = None,
    mlps: Nodes = "recomputed",
    batch_tokens: int = BATCH_TOKENS,
    max_bytes: int = 1 << 30,
) -> PatchGrid:
    """Path patching (Wang et al. 2022; Goldowsky-Dill et al. 2023): the metric of the corrupt prompt with one path,
    from a sender to a receiver, as in the clean prompt.  The grid has a row a sender and a column a receiver.

    senders, receivers   heads as (block, head), or (name of the attention, head) where there are two stacks or
                cross-attention.  With "logits" there is one column, what each sender gives the output directly.
    into        the receiver's input: "q", "k" or "v".  Where H query heads share G keys and values, "k" and "v" are
                those of the receiver's group, which its H / G heads all read.
    mlps        between the heads: "recomputed", so that paths through them count, or "frozen" at the corrupt values.

    What a path carries is decided in bits beside a twin of runs 2 and of runs 3, one forward each.

    Raises InputError for prompts that are equal or of unequal length and for answers of several tokens; ProbeError for
    heads that are not there and for a receiver that no path from the sender reaches.
    """
    measure = metric_of(model, answer, metric)
    if into not in get_args(Projection) or mlps not in get_args(Nodes):
        raise InputError(f"into={shown(into)}, mlps={shown(mlps)}: into is q, k or v; mlps recomputed or frozen")
    direct = isinstance(receivers, str)
    if isinstance(receivers, str) and receivers != "logits":
        raise InputError(f"receivers={shown(receivers)} must be a list of heads (block, head), or 'logits'")
    check_list(senders, "senders")
    if not direct:
        check_list(receivers, "receivers")
    sending = [attention_head(model.spec, head) for head in senders]
    receiving = [] if isinstance(receivers, str) else [attention_head(model.spec, head) for head in receivers]
    _check_order(model.spec, sending, receiving, into)
    intact = prompt_of(model, clean, target)
    broken = prompt_of(model, corrupt, target if corrupt_target is None else corrupt_target)
    if same_prompts(intact, broken):
        raise InputError("the clean and the corrupt prompt are the same; there is nothing to patch")
    if intact.lengths != broken.lengths:
        raise InputError(
            f"the clean prompt has {intact.lengths[0]} tokens and the corrupt one {broken.lengths[0]}; a path needs "
            "prompts whose positions correspond"
        )
    broken_at, intact_at = measured_at(model, broken, at), measured_at(model, intact, at)
    plain = forward(model, [EditedRun(intact, intact_at)]), forward(model, [EditedRun(broken, broken_at)])
    measure, before, after = check_metric(measure, plain[0].logits, plain[1].logits)
    outputs = [name for name in sites(model.spec) if name.endswith(".z")]
    frozen = outputs + ([n for n in sites(model.spec) if n.endswith(".mlp.out")] if mlps == "frozen" else [])
    new = values_at(model, [intact], sorted({f"{attention}.z" for attention, _ in sending}), batch_tokens, max_bytes)
    held = values_at(model, [broken], frozen, batch_tokens, max_bytes)
    paths = _Paths(model, broken, broken_at, measure, batch_tokens, held, new, sending)
    columns = tuple(f"{head_text(head)}.{into}" for head in receiving) or ("logits",)
    effects, fired, margin = paths.received(receiving, into) if receiving else paths.direct()
    rows = tuple(map(head_text, sending))
    return PatchGrid(str(measure), rows, columns, after + effects, fired, before, after, margin=margin)


@dataclass(frozen=True, eq=False)
class _Paths:
    """The corrupt prompt with all heads' outputs `held` but for one sender's, which is `new`: run 2 for each sender."""

    model: ProbedModel
    broken: Prompt
    at: int | None
    measure: Metric
    batch_tokens: int
    held: dict[str, list[Tensor]]
    new: dict[str, list[Tensor]]
    sending: Sequence[tuple[str, int]]

    def _runs(self, observed: Sequence[str]) -> tuple[TwinRuns, list[dict[str, Change]]]:
        shared = {name: Place().put(name, rows[0]) for name, rows in self.held.items()}
        changes = []
        for attention, head in self.sending:
            name, place = f"{attention}.z", Place(None, (head,))
            value = place.put(name, place.part(name, self.new[name][0]))(self.held[name][0])
            changes.append({name: Place().put(name, value)})
        every = [[*of_run, *observed] for of_run in changes]
        return TwinRuns(self.model, self.broken, self.at, every, self.batch_tokens, shared), changes

    def direct(self) -> tuple[Tensor, Tensor, float]:
        """By how much each sender changes the metric of run 2 [S, 1], and whether its output differs [S, 1]."""
        runs, changes = self._runs(())
        runs.twin()
        effects = torch.zeros(len(changes), 1)
        for piece in runs.compare(changes, foreign=True):
            effects[piece.numbers, 0] = piece.effect(self.measure)
        fired = [
            bool(differ(self.new[name][0][:, head], self.held[name][0][:, head], runs.margin).any())
            for name, head in ((f"{attention}.z", head) for attention, head in self.sending)
        ]
        return effects, torch.tensor(fired)[:, None], runs.margin

    def received(self, receiving: Sequence[tuple[str, int]], into: str) -> tuple[Tensor, Tensor, float]:
        """By how much the metric of run 3 changes [S, R] with what each receiver reads from each sender, and whether
        it reads anything else than without the sender [S, R]."""
        known = sites(self.model.spec)
        places = {}
        for attention, head in receiving:
            name = f"{attention}.{into}"
            own = head * (known[name].heads or 1) // (known[f"{attention}.q"].heads or 1)
            places[attention, head] = name, Place(None, (own,))
        names = sorted({name for name, _ in places.values()})
        runs, changes = self._runs(names)
        without = runs.twin([dict.fromkeys(names, torch.clone) for _ in self.sending])
        read = [{name: Observed(torch.clone) for name in names} for _ in self.sending]
        for _ in runs.compare([a | b for a, b in zip(changes, read, strict=True)], foreign=True):
            pass
        carried: dict[tuple[int, int], dict[str, Change]] = {}
        for s, (before, after) in enumerate(zip(without, read, strict=True)):
            for r, receiver in enumerate(receiving):
                name, place = places[receiver]
                there, alone = place.part(name, after[name].taken), place.part(name, before[name])
                other = differ(there, alone, runs.margin)
                if bool(other.any()):
                    carried[s, r] = {name: _where(name, place, other, there)}
        return self._measured(carried, (len(self.sending), len(receiving)), runs.margin)

    def _measured(
        self, carried: dict[tuple[int, int], dict[str, Change]], shape: tuple[int, int], margin: float
    ) -> tuple[Tensor, Tensor, float]:
        """Run 3 for each pair that carries something; the others change nothing."""
        effects, fired = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        runs = TwinRuns(self.model, self.broken, self.at, list(carried.values()), self.batch_tokens)
        runs.twin()
        where = torch.tensor(list(carried)).view(-1, 2).T
        for piece in runs.compare(list(carried.values()), foreign=False):
            chosen = tuple(where[:, piece.numbers])
            effects[chosen], fired[chosen] = piece.effect(self.measure), True
        return effects, fired, max(margin, runs.margin)


def _where(name: str, place: Place, other: Tensor, new: Tensor) -> Change:
    """The change that puts those numbers of `new` at a place that are `other` ones."""

    def change(value: Tensor) -> Tensor:
        return place.put(name, torch.where(other, new, place.part(name, value)))(value)

    return change


def _check_order(
    spec: ModelSpec, sending: Sequence[tuple[str, int]], receiving: Sequence[tuple[str, int]], into: str
) -> None:
    """Raise ProbeError for a receiver whose input is computed before the sender, or from the encoder alone."""
    order = list(sites(spec))
    for sender, _ in sending:
        for receiver, _ in receiving:
            encoder = receiver.endswith(".cross") and into in ("k", "v")
            before = order.index(f"{sender}.z") > order.index(f"{receiver}.{into}")
            if before or (encoder and not sender.startswith("encoder.")):
                reason = "it reads the encoder" if encoder else "it is not after it"
                raise ProbeError(f"no path leads from {sender} to {into} of {receiver}: {reason}")
            within = spec.layout == "encoder-decoder" and sender.startswith("encoder.")
            if within and not receiver.startswith("encoder.") and not encoder:
                raise ProbeError(
                    f"no direct path leads from {sender} to {into} of {receiver}: the encoder reaches the decoder "
                    "through k and v of cross-attention"
                )
