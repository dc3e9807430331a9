"""One vector per row from the vectors of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from triptych.ops.functions import RowLengths
from triptych.ops.recording import implements, record


@implements("pool")
def pool(x: Tensor, rows: RowLengths, mode: str) -> Tensor:
    """[N, D] -> [B, D]: the `mean` of the vectors of all of a row's tokens, special ones included, the `first` or the
    `last`."""
    if has_torch_function_unary(x):
        return record(pool, x, x, rows, mode)
    if mode == "mean":
        return torch.stack([row.mean(0) for row in x.split(list(rows.lengths))])
    if mode == "first":
        return x[list(rows.starts)]
    return x[[start + length - 1 for start, length in zip(rows.starts, rows.lengths, strict=True)]]
