"""Comparisons of every fast path of a model with its plain forward; each records its difference."""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from triptych.generate import Engine, Request
from triptych.model import Model, load
from triptych.probe import Plan, Session, sites
from .comparison import Case, headless, max_abs_diff, mixture

ALONE, CACHED, CHUNKED = "row in a batch = row alone", "cached = uncached", "prefill in chunks = in one"
MAX_COPIED_BYTES = 1 << 30  # bytes of weights up to which a copy on disk is made


def alone(case: Case) -> None:
    """A row of a batch against the row alone."""
    alone = [case.run(slice(i, i + 1))[0] for i in range(len(case.rows))]
    case.record(ALONE, max_abs_diff(case.run(), alone), case.threshold)


def causal(case: Case) -> None:
    """The past under a changed future: bit-equal."""
    if case.model.spec.decoder is None:
        return
    vocab = case.model.spec.vocab
    changed = [[*row[:-1], (row[-1] + 1) % vocab] for row in case.decoded]
    other = replace(case, rows=changed) if case.targets is None else replace(case, targets=changed)
    past = [[x[:-1] for x in outputs] for outputs in (case.run(), other.run())]
    # With another last token an expert's group has another size, for which a product may be summed in another order.
    limit, note = (case.threshold, "") if mixture(case.model) else (0.0, "bit-equal")
    case.record("earlier outputs do not depend on the last token", max_abs_diff(*past), limit, note)


def cached(case: Case) -> None:
    """Token by token through the cache against one forward."""
    if case.model.spec.decoder is None or headless(case.model):
        return
    steps = min(len(row) for row in case.decoded) // 2
    engine = _engine(case, [row[:-steps] for row in case.decoded])
    cached_scores: list[list[Tensor]] = [[] for _ in case.decoded]
    with torch.inference_mode():
        for step in range(steps + 1):
            for scores, new in zip(cached_scores, engine.logits(), strict=True):
                scores.append(new)
            if step < steps:
                for row, ids in zip(engine.rows, case.decoded, strict=True):
                    row.ids.append(ids[len(row.ids)])
    cached = [torch.log_softmax(torch.stack(row).double(), dim=-1) for row in cached_scores]
    plain = [x[-steps - 1 :] for x in case.run()]
    case.record(CACHED, max_abs_diff(cached, plain), case.threshold, f"{steps} steps")


def chunked(case: Case) -> None:
    """A prompt read in chunks against one read at once."""
    if case.model.spec.decoder is None or headless(case.model):
        return
    with torch.inference_mode():
        whole, parts = (
            torch.log_softmax(_engine(case, case.decoded, chunk).logits().double(), dim=-1) for chunk in (None, 5)
        )
    case.record(CHUNKED, max_abs_diff([parts], [whole]), case.threshold, "chunks of 5")


def margin(case: Case) -> None:
    """How far apart the two likeliest tokens must be for greedy text not to depend on batch, cache and chunks.

    Two log-probabilities that each move by a difference change their order only where they are less than twice the
    difference apart.
    """
    ways = [finding.difference for finding in case.findings if finding.name in (ALONE, CACHED, CHUNKED)]
    if case.model.spec.decoder is None or headless(case.model) or not ways:
        return
    best = (scores.topk(2, -1).values for scores in case.run() if scores.shape[-1] > 1)
    gap = min((float((two[:, 0] - two[:, 1]).min()) for two in best), default=0.0)
    note = f"no limit; the two likeliest tokens of these rows are at least {gap:.1e} apart"
    case.record("margin of greedy text", 2 * float(torch.tensor(ways).max()), None, note)


def _engine(case: Case, prompts: list[list[int]], chunk: int | None = None) -> Engine:
    """An engine with a row for each prompt, beside the sources where there are any."""
    sources = [None] * len(prompts) if case.targets is None else case.rows
    engine = Engine(case.model.module, chunk=chunk)
    engine.add(*(Request(prompt=p, source=s, max_new_tokens=0) for p, s in zip(prompts, sources, strict=True)))
    return engine


def reading(case: Case) -> None:
    """Reading every site: bit-equal."""
    names = [name for name in sites(case.model.spec) if name != "logits" or not headless(case.model)]
    session = Session(Plan.of(case.model.spec, names))
    read = case.run(slice(1), session.taps)
    session.close()
    case.record(
        "reading every site does not change the output",
        max_abs_diff(read, case.run(slice(1))),
        0.0,
        f"{len(names)} sites, bit-equal",
    )


def saved(case: Case) -> None:
    """Saved and loaded again."""
    nbytes = sum(p.nbytes for p in case.model.module.parameters())
    if nbytes > MAX_COPIED_BYTES:
        case.skipped.append(f"save and load again: {nbytes / 2**20:,.0f} MiB of weights would be written")
        return
    with tempfile.TemporaryDirectory() as scratch:
        again = replace(case, model=_copied(case, Path(scratch)))
        case.record("saved, loaded = itself", max_abs_diff(again.run(), case.run()), 0.0, "bit-equal")


def _copied(case: Case, scratch: Path) -> Model:
    """The model from files that were written of it; its adapter has files of its own."""
    model, adapter = case.model, None
    if model.adapter is not None:
        model.save_adapter(adapter := scratch / "adapter")
        model = Model(copy.deepcopy(model.module), model.tokenizer, model.hf, model.path)
        model.remove_adapter()
    model.save(scratch / "copy")
    return load(scratch / "copy", device=model.device, ignore=case.ignore, adapter=adapter)


def half(case: Case) -> None:
    """bf16 weights against fp32: reported, without a limit."""
    small = Model(copy.deepcopy(case.model.module).to(torch.bfloat16), case.model.tokenizer)
    case.record("bf16 against fp32", max_abs_diff(replace(case, model=small).run(), case.run()), None, "no limit")


ALL = (alone, causal, cached, chunked, margin, reading, saved, half)
