"""Our model beside the reference library's on the same ragged rows, and how far apart they are.

The measure is max |Δ log-softmax|, or max |Δ| of the outputs themselves where there is no head over words.  A NaN on
either side makes it NaN, which is within nothing.
"""

from collections.abc import Sequence
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import references
import triptych
from triptych import nn, spec
from triptych.attention import Rows
from triptych.model import Model
from triptych.nn import InputRow

WITHIN = 1e-4
ROWS = [[7, 3, 11, 40, 5, 9, 2, 6, 13, 17, 23, 29, 31, 37, 4, 8], [5, 19, 3], [6, 6, 28, 14, 33, 21, 10]]
TARGETS = [[0, 4, 30, 22, 9], [0, 12, 18, 25, 5, 35, 16, 38], [0, 20]]
CPU = torch.device("cpu")
SCORING = spec.LMHeadSpec | spec.MaskedLMHeadSpec | spec.ClassHeadSpec | spec.TokenHeadSpec


@cache
def ours(name: str) -> Model:
    return triptych.load(references.saved(name)[1])


def headless(model: Model) -> bool:
    return model.spec.head is None or isinstance(model.spec.head, spec.PoolingSpec)


def measured(x: Tensor, model: Model) -> Tensor:
    return x.float().log_softmax(-1) if isinstance(model.spec.head, SCORING) else x.float()


def given(row: InputRow) -> dict[str, Tensor]:
    """One row as transformers takes it; frames lie along its last axis."""
    if isinstance(row, Tensor):
        return {"input_features": row.T[None]} if row.dim() == 2 else {"pixel_values": row[None]}
    return {"input_ids": torch.tensor([row])}


def theirs(name: str, row: InputRow, target: list[int] | None = None) -> Tensor:
    """[T, V] of transformers for one row, uncached and alone; the hidden states of a model without a head."""
    reference: Any = references.saved(name)[0]
    with torch.no_grad():
        out = reference(**given(row), **({} if target is None else {"decoder_input_ids": torch.tensor([target])}))
    if hasattr(out, "start_logits"):
        return torch.stack((out.start_logits[0], out.end_logits[0]), dim=-1)
    found = out.logits[0] if hasattr(out, "logits") else out.last_hidden_state[0]
    return found[:, None] if type(reference).__name__ == "ElectraForPreTraining" else found  # one score a token


def mine(model: Model, rows: Sequence[InputRow], targets: list[list[int]] | None) -> list[Tensor]:
    if not headless(model):
        return model.logits(rows, targets)
    module, source = model.module, None
    inputs, where = module.flat(rows)
    if targets is not None:
        source, (inputs, where) = (inputs, where), nn.flat(targets, CPU)
    with torch.no_grad():
        hidden = module(nn.Batch(inputs=inputs, rows=where, source=source))
    return where.split(hidden)


def rows_of(model: Model) -> Sequence[InputRow]:
    """What a model reads; a label is read at the end of a row, where an encoder-decoder finds its EOS.

    The reference has frames of one length only, the longest.
    """
    random, embed = torch.Generator().manual_seed(1), model.spec.reads.embed
    if isinstance(embed, spec.FramesSpec):
        longest = embed.stride * embed.position.length
        return [torch.randn(longest, embed.conv1.inputs, generator=random) for _ in ROWS]
    if isinstance(embed, spec.PatchesSpec):
        return [torch.randn(embed.channels, *embed.image, generator=random) for _ in ROWS]
    return [[*row, *model.spec.ids.eos] for row in ROWS] if _labels_targets(model) else ROWS


def targets_of(model: Model) -> list[list[int]] | None:
    if model.spec.layout != "encoder-decoder":
        return None
    return [[model.spec.ids.start, *row[:-1]] for row in token_rows(model)] if _labels_targets(model) else TARGETS


def token_rows(model: Model) -> list[list[int]]:
    return [list(row) for row in rows_of(model) if not isinstance(row, Tensor)]


def _labels_targets(model: Model) -> bool:
    return model.spec.layout == "encoder-decoder" and isinstance(model.spec.head, spec.ClassHeadSpec)


@cache
def expected(name: str) -> list[Tensor]:
    """What transformers says to each of ROWS (and TARGETS)."""
    rows = rows_of(ours(name))
    targets = targets_of(ours(name)) or [None] * len(rows)
    return [theirs(name, row, target) for row, target in zip(rows, targets, strict=True)]


@cache
def expected_pooled(name: str, mode: str) -> Tensor:
    """[B, D]: each row's mean, its first vector, or what transformers' pooler makes of it."""
    if mode != "dense":
        return torch.stack([row.mean(0) if mode == "mean" else row[0] for row in expected(name)])
    with torch.no_grad():
        return torch.cat([references.saved(name)[0](**given(row)).pooler_output for row in rows_of(ours(name))])


def largest(name: str, model: Model) -> float:
    """The worst disagreement over a ragged batch, pooled vectors included where the model pools."""
    gap = apart(mine(model, rows_of(model), targets_of(model)), expected(name), model)
    if isinstance(model.spec.head, spec.PoolingSpec):
        for mode in ("mean", "first", "dense") if model.spec.head.dense is not None else ("mean", "first"):
            pooled = model.encode(rows_of(model), pooling=mode)
            gap = torch.maximum(gap, (pooled - expected_pooled(name, mode)).abs().max())
    return float(gap)


def apart(found: list[Tensor], expected: list[Tensor], model: Model) -> Tensor:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
    gaps = [(measured(a, model) - measured(b, model)).abs().flatten() for a, b in zip(found, expected, strict=True)]
    return torch.cat(gaps).max()


CHUNKS = (3, 1, 1, 4)  # longer and shorter than what a ring of four takes without copying


@torch.inference_mode()
def through_the_cache(model: Model) -> list[Tensor]:
    """`mine`, CHUNKS of each row at a time; before every step but the first, the rows exchange their cache slots, and
    every step runs them in another order than the one before."""
    module, targets = model.module, targets_of(model)
    rows = targets or ROWS
    cache, cross = module.decoder.cache(len(rows)), None
    if targets is not None:
        cross = module.decoder.cross_cache()
        module(nn.Batch(source=module.flat(rows_of(model)), cross=cross))
    slots, order = list(range(len(rows))), list(range(len(rows)))
    pieces: list[list[Tensor]] = [[] for _ in rows]
    begin, chunks = 0, cycle(CHUNKS)
    while begin < max(map(len, rows)):
        end = begin + next(chunks)
        order.reverse()
        if begin:
            cache.copy(slots, slots[::-1])
            if cross is not None:
                cross.share(slots, slots[::-1])
            slots.reverse()
        parts, live = [rows[i][begin:end] for i in order], tuple(slots[i] for i in order)
        step = Rows(tuple(map(len, parts)), tuple(cache.lengths[slot] for slot in live), live)
        ids = torch.tensor([token for part in parts for token in part])
        logits = module.logits(nn.Batch(inputs=ids, rows=step, cache=cache, cross=cross))
        for i, piece in zip(order, step.split(logits), strict=True):
            pieces[i].append(piece)
        begin = end
    return [torch.cat(row) for row in pieces]


def cached_gap(model: Model) -> float:
    """The worst disagreement between cached and uncached."""
    return float(apart(through_the_cache(model), mine(model, rows_of(model), targets_of(model)), model))
