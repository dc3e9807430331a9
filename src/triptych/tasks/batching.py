"""Rows of similar length run together: the batches of a task, and the outputs of a head for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.nn import Batch, Transformer, flat
from triptych.spec import ClassHeadSpec
from triptych.text import Encoded

BATCH_TOKENS = 4096  # tokens of one batch, unless a single row is longer


def batches(lengths: Sequence[int], tokens: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """Indices of rows grouped by length, longest first, at most `tokens` tokens a group (one row at the least)."""
    group: list[int] = []
    total = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and total + lengths[i] > tokens:
            yield group
            group, total = [], 0
        group.append(i)
        total += lengths[i]
    if group:
        yield group


@torch.inference_mode()
def head_outputs(module: Transformer, rows: Sequence[Encoded | Tensor]) -> list[Tensor]:
    """The output of the head for each row in fp32: `[C]` of a head over classes, `[T, C]` of one over tokens.

    An encoder-decoder reads each row in its decoder too, shifted one position to the right; where the config names no
    start token, the row's own last token is put first (mBART's language).  Raises InputError for a row that does not
    end with an end-of-text token where an encoder-decoder classifies at that token.
    """
    outputs: list[Tensor] = [torch.empty(0)] * len(rows)
    lengths = [module.length(row) if isinstance(row, Tensor) else len(row.ids) for row in rows]
    for group in batches(lengths):
        for i, output in zip(group, _forward(module, [rows[i] for i in group]), strict=True):
            outputs[i] = output.float()
    return outputs


def _forward(module: Transformer, either: Sequence[Encoded | Tensor]) -> Sequence[Tensor]:
    if pixels := [row for row in either if isinstance(row, Tensor)]:
        inputs, where = module.flat(pixels)
        return list(module.logits(Batch(inputs=inputs, rows=where)))
    rows = [row for row in either if isinstance(row, Encoded)]
    device, ids = module.device, module.spec.ids
    tokens, where = flat([row.ids for row in rows], device)
    types = torch.tensor([kind for row in rows for kind in row.token_types], device=device)
    for i, row in enumerate(rows):
        if module.decoder is not None and isinstance(module.spec.head, ClassHeadSpec) and row.ids[-1] not in ids.eos:
            raise InputError(f"text {i} does not end with an end-of-text token, where this model looks for the label")
    output = module.logits(module.labelled_batch(tokens, where, token_types=types))
    return list(output) if isinstance(module.spec.head, ClassHeadSpec) else where.split(output)
