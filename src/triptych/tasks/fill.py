"""The likeliest tokens behind masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.arguments import integer
from triptych.errors import InputError
from triptych.nn import NO_TAPS, Batch, Taps, Transformer, flat
from triptych.spec import MaskedLMHeadSpec


@torch.inference_mode()
def fill(
    module: Transformer, rows: Sequence[Sequence[int]], mask_id: int, *, top: int = 5, taps: Taps = NO_TAPS
) -> list[list[list[tuple[int, float]]]]:
    """For each row, for each position that holds `mask_id`, the `top` likeliest (id, probability), best first.

    Raises InputError for a row without a mask or a model without a masked-LM head.
    """
    if not isinstance(module.spec.head, MaskedLMHeadSpec):
        raise InputError(f"this {module.spec.family} model has no masked-LM head, so it cannot fill words in")
    integer("top", top, 1)
    for i, row in enumerate(rows):
        if mask_id not in row:
            raise InputError(f"text {i} has no mask token to fill")
    ids, where = flat(rows, module.device)
    probs = torch.softmax(module.logits(Batch(inputs=ids, rows=where, taps=taps)).float(), dim=-1)
    answers = []
    for row, p in zip(rows, where.split(probs), strict=True):
        best = [p[i].topk(min(top, p.shape[-1])) for i, token in enumerate(row) if token == mask_id]
        answers.append([list(zip(b.indices.tolist(), b.values.tolist(), strict=True)) for b in best])
    return answers
