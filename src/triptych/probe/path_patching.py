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
from typing import Literal, get_args

from torch import Tensor

from triptych.errors import InputError, ProbeError, shown
from triptych.probe.ablation import values_at
from triptych.probe.head_names import HeadName, attention_head, head_text
from triptych.probe.metric import Answer, Metric, MetricFunction, MetricName, measured, metric_of
from triptych.probe.patching import PatchGrid
from triptych.probe.prompts import (
    BATCH_TOKENS,
    Change,
    EditedRun,
    Place,
    ProbedModel,
    Prompt,
    PromptInput,
    check_list,
    chunks,
    forward,
    measured_at,
    prompt_of,
    same_prompts,
)
from triptych.probe.sites import sites
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
    outputs = [name for name in sites(model.spec) if name.endswith(".z")]
    frozen = outputs + ([n for n in sites(model.spec) if n.endswith(".mlp.out")] if mlps == "frozen" else [])
    given = values_at(model, [intact], sorted({f"{attention}.z" for attention, _ in sending}), batch_tokens, max_bytes)
    held = values_at(model, [broken], frozen, batch_tokens, max_bytes)
    plain = forward(model, [EditedRun(intact, intact_at)])
    measure = measure.beside(plain.logits)
    paths = [EditedRun(broken, broken_at, _frozen_but(sender, given, held)) for sender in sending]
    if direct:
        values, fired = measured(model, paths, measure, batch_tokens)
        columns: tuple[str, ...] = ("logits",)
        values, fired = values[:, None], fired[:, None]
    else:
        values, fired = _received(model, broken, broken_at, measure, paths, receiving, into, batch_tokens)
        columns = tuple(f"{head_text(head)}.{into}" for head in receiving)
    before, _ = measured(model, [EditedRun(broken, broken_at)], measure, batch_tokens)
    values = values.where(fired, before)  # what changes no value changes no bit of the metric, in any batch
    rows = tuple(map(head_text, sending))
    return PatchGrid(str(measure), rows, columns, values, fired, float(measure(plain.logits)), float(before))


def _received(
    model: ProbedModel, broken: Prompt, at: int | None, measure: Metric, paths: Sequence[EditedRun],
    receiving: Sequence[tuple[str, int]], into: str, batch_tokens: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The metric [S, R] with what each receiver reads from each sender, and whether it reads anything else [S, R]."""
    names = sorted({f"{attention}.{into}" for attention, _ in receiving})
    read: dict[str, list[Tensor]] = {name: [] for name in names}
    for some in chunks(paths, batch_tokens):
        trace = forward(model, some, names).trace
        for name in names:
            read[name] += trace[name]
    known, runs = sites(model.spec), []
    for sender in range(len(paths)):
        for attention, head in receiving:
            name = f"{attention}.{into}"
            queries = known[f"{attention}.q"].heads or 1
            own = head * (known[name].heads or 1) // queries
            runs.append(EditedRun(broken, at, {name: Place(None, (own,)).put(name, read[name][sender])}))
    values, fired = measured(model, runs, measure, batch_tokens)
    return values.view(len(paths), -1), fired.view(len(paths), -1)


def _frozen_but(
    sender: tuple[str, int], given: dict[str, list[Tensor]], held: dict[str, list[Tensor]]
) -> dict[str, Change]:
    """Every output of a head (and MLP) at the value held, but the sender's at the one given."""
    changes = {name: Place().put(name, rows[0]) for name, rows in held.items()}
    name = f"{sender[0]}.z"
    there = held[name][0].clone()
    there[:, sender[1]] = given[name][0][:, sender[1]]
    return changes | {name: Place().put(name, there)}


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
