"""Path patching between heads (Wang et al. 2022, appendix B; Goldowsky-Dill et al. 2023): the effect of
one head's output on the input of another.

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
from typing import Literal

import torch
from torch import Tensor

from triptych.arguments import checked
from triptych.errors import InputError, ProbeError, shown
from triptych.spec.model import ModelSpec
from .metric import Answer, MetricFunction, MetricName, metric_of
from .patching import PatchGrid, check_metric
from .prompts import (
    BATCH_TOKENS,
    Change,
    EditedRun,
    Place,
    ProbedModel,
    PromptInput,
    check_list,
    differ,
    forward,
    measured_at,
    two_prompts,
    values_at,
)
from .sites import HeadName, Site, attention_head, sites
from .twin_runs import Observed, TwinRuns

Projection = Literal["q", "k", "v"]


@checked
def path_patch(
    model: ProbedModel,
    clean: PromptInput,
    corrupt: PromptInput,
    senders: Sequence[HeadName],
    receivers: Sequence[HeadName] | Literal["logits"],
    *,
    into: Literal["q", "k", "v"] = "q",
    answer: Answer | Sequence[Answer] | None = None,
    metric: MetricName | MetricFunction | None = None,
    at: int | None = None,
    target: PromptInput = None,
    corrupt_target: PromptInput = None,
    mlps: Literal["recomputed", "frozen"] = "recomputed",
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
    if isinstance(receivers, str):
        if receivers != "logits" or into != "q":
            given = f"receivers={shown(receivers)}, into={into!r}"
            raise InputError(f"{given}: receivers must be a list of heads (block, head), or 'logits' without into=")
    else:
        check_list(receivers, "receivers")
    check_list(senders, "senders")
    sending = [attention_head(model.spec, head) for head in senders]
    receiving = [] if isinstance(receivers, str) else [attention_head(model.spec, head) for head in receivers]
    _check_order(model.spec, sending, receiving, into)
    intact, broken = two_prompts(model, clean, corrupt, target, corrupt_target)
    if intact.lengths != broken.lengths:
        raise InputError(
            f"the clean prompt has {intact.lengths[0]} tokens and the corrupt one {broken.lengths[0]}; a path needs "
            "prompts whose positions correspond"
        )
    plain = EditedRun(broken, measured_at(model, broken, at))
    clean_and_corrupt = forward(model, [EditedRun(intact, measured_at(model, intact, at))]), forward(model, [plain])
    measure, before, after = check_metric(measure, clean_and_corrupt[0].logits, clean_and_corrupt[1].logits)
    known = sites(model.spec)
    frozen = [name for name in known if name.endswith((".z", ".mlp.out") if mlps == "frozen" else ".z")]
    sent = sorted({f"{attention}.z" for attention, _ in sending})
    (clean_values,) = values_at(model, [intact], sent, max_bytes, batch_tokens)
    (corrupt_values,) = values_at(model, [broken], frozen, max_bytes, batch_tokens)
    frozen_run = EditedRun(broken, plain.at, {name: Place().put(name, value) for name, value in corrupt_values.items()})
    changes: list[dict[str, Change]] = []
    parts = []  # of each sender, its output in the clean prompt and in the corrupt one
    for name, place in ((f"{attention}.z", Place(None, (head,))) for attention, head in sending):
        parts.append((place.part(name, clean_values[name]), place.part(name, corrupt_values[name])))
        changes.append({name: Place().put(name, place.put(name, parts[-1][0])(corrupt_values[name]))})
    places = [_read_at(known, receiver, into) for receiver in receiving]
    read = sorted({name for name, _ in places})
    runs = TwinRuns(model, frozen_run, [[*of_run, *read] for of_run in changes], batch_tokens)
    fired = torch.zeros(len(sending), len(places) or 1, dtype=torch.bool)
    effects = fired.float()
    if places:
        carried = _carried(runs, changes, places, read)
        receiver_runs = TwinRuns(model, plain, list(carried.values()), batch_tokens)
        receiver_runs.twin()
        where = torch.tensor(list(carried)).view(-1, 2).T
        for piece in receiver_runs.compare(list(carried.values()), foreign=False):
            chosen = tuple(where[:, piece.numbers])
            effects[chosen], fired[chosen] = piece.effect(measure), True
        margin = max(runs.margin, receiver_runs.margin)
    else:
        runs.twin()
        margin = runs.margin
        for piece in runs.compare(changes, foreign=True):
            effects[piece.numbers, 0] = piece.effect(measure)
        fired[:, 0] = torch.tensor([bool(differ(*both, margin).any()) for both in parts])
    columns = tuple(f"{attention} head {head}.{into}" for attention, head in receiving) or ("logits",)
    rows = tuple(f"{attention} head {head}" for attention, head in sending)
    return PatchGrid(str(measure), rows, columns, after + effects, fired, before, after, margin=margin)


def _carried(
    runs: TwinRuns, changes: Sequence[dict[str, Change]], places: Sequence[tuple[str, Place]], names: Sequence[str]
) -> dict[tuple[int, int], dict[str, Change]]:
    """Run 2 of each sender: for each receiver that it reaches, the numbers of its input that are others than without
    the sender.  `places` are those inputs, and `names` their sites."""
    without = runs.twin([dict.fromkeys(names, torch.clone) for _ in changes])
    read = [{name: Observed(torch.clone) for name in names} for _ in changes]
    for _ in runs.compare([a | b for a, b in zip(changes, read, strict=True)], foreign=True):
        pass
    carried: dict[tuple[int, int], dict[str, Change]] = {}
    for s, (alone, beside) in enumerate(zip(without, read, strict=True)):
        for r, (name, place) in enumerate(places):
            there = place.part(name, beside[name].taken)
            other = differ(there, place.part(name, alone[name]), runs.margin)
            if bool(other.any()):
                carried[s, r] = {name: _put_where(name, place, other, there)}
    return carried


def _read_at(known: dict[str, Site], receiver: tuple[str, int], into: str) -> tuple[str, Place]:
    """The site and place at which a head reads: of keys and values that of its group."""
    attention, head = receiver
    name = f"{attention}.{into}"
    return name, Place(None, (head * (known[name].heads or 1) // (known[f"{attention}.q"].heads or 1),))


def _put_where(name: str, place: Place, other: Tensor, new: Tensor) -> Change:
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
