"""One pass of an encoder over many texts: pooled vectors, and the words behind masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.nn import NO_TAPS, Pooling, Row, Taps, Transformer, flat
from triptych.spec import model as spec


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of rows grouped by length, longest first, at most `tokens` tokens a group (one row at the least)."""
    group: list[int] = []
    held = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and held + lengths[i] > tokens:
            yield group
            group, held = [], 0
        group.append(i)
        held += lengths[i]
    if group:
        yield group


def pooling(module: Transformer, mode: str | None = None, normalize: bool | None = None) -> spec.Pooling:
    """How the model's vectors are pooled, the mean unless the checkpoint says; `mode` and `normalize` replace that.

    Raises InputError for a mode that there is not, or not without the checkpoint's pooler.
    """
    how = module.spec.head if isinstance(module.spec.head, spec.Pooling) else spec.Pooling()
    if mode is not None:
        if mode not in ("mean", "first", "dense"):
            raise InputError(f"pooling={mode!r} must be 'mean', 'first' or 'dense'")
        if mode == "dense" and how.dense is None:
            raise InputError("this checkpoint has no pooler; use pooling='mean' or 'first'")
        how = replace(how, mode=mode)  # type: ignore[arg-type]
    return how if normalize is None else replace(how, normalize=normalize)


@torch.inference_mode()
def encode(module: Transformer, rows: Sequence[Row], pooling: spec.Pooling, *, batch_tokens: int = 4096) -> Tensor:
    """One vector a row, [B, D] in the dtype of the model: an encoder's output, or a decoder's last hidden states,
    pooled.  Rows of similar length run together and nothing is padded."""
    pool = module.head if isinstance(module.head, Pooling) else Pooling(replace(pooling, dense=None))
    if isinstance(module.head, Pooling) and pooling != module.head.spec:
        pool = Pooling(replace(pooling, dense=None))
        pool.dense = module.head.dense
    found: list[Tensor | None] = [None] * len(rows)
    for group in batches([module.length(row) for row in rows], batch_tokens):
        ids, where = module.flat([rows[i] for i in group])
        hidden = module.encode(ids, where) if module.encoder is not None else module.decode(ids, where)
        for i, vector in zip(group, pool(hidden, where), strict=True):
            found[i] = vector
    return torch.stack([vector for vector in found if vector is not None])


@torch.inference_mode()
def fill(
    module: Transformer, rows: Sequence[Sequence[int]], mask_id: int, *, top: int = 5, taps: Taps = NO_TAPS
) -> list[list[list[tuple[int, float]]]]:
    """For each row, for each place that holds `mask_id`, the `top` likeliest (id, probability), best first.

    Raises InputError for a row without a mask or a model without a masked-LM head.
    """
    if not isinstance(module.spec.head, spec.MaskedLMHead):
        raise InputError(f"this {module.spec.family} model has no masked-LM head, so it cannot fill words in")
    for i, row in enumerate(rows):
        if mask_id not in row:
            raise InputError(f"text {i} has no mask token to fill")
    ids, where = flat(rows, module.device)
    probs = torch.softmax(module(ids, where, taps=taps).float(), dim=-1)
    answers = []
    for row, p in zip(rows, where.split(probs), strict=True):
        best = [p[i].topk(min(top, p.shape[-1])) for i, token in enumerate(row) if token == mask_id]
        answers.append([list(zip(b.indices.tolist(), b.values.tolist(), strict=True)) for b in best])
    return answers
