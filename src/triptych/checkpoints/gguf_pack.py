"""From numbers to ggml's packed blocks (github.com/ggml-org/ggml, `quantize_row_*_ref` in ggml-quants.c).

The inverse of `gguf_quants` for the types without importance weights.  Each function takes float32 blocks `[n, 32]`
and gives uint8 `[n, bytes of a block]`, computed in float32 in ggml's order, so the bytes are its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triptych.errors import CheckpointError

BLOCK = 32  # elements
_CHUNK = 1 << 18  # elements packed at a time, so that temporaries stay small beside the tensor


def pack(values: Tensor, kind: str) -> Tensor:
    """`values [..., elements of a row]`, of any floating dtype, as `kind` ("Q8_0", ...): uint8 `[..., bytes of a row]`.

    Raises CheckpointError for rows that are not whole blocks, and for numbers that are not finite or whose scale
    does not fit fp16.
    """
    if kind not in PACKED:
        raise CheckpointError(f"{kind} cannot be packed; known are {', '.join(PACKED)}")
    if values.shape[-1] % BLOCK:
        raise CheckpointError(f"rows of {values.shape[-1]} are not whole blocks of {BLOCK} ({kind})")
    nbytes, function = PACKED[kind]
    blocks = values.reshape(-1, BLOCK)
    out = torch.empty((len(blocks), nbytes), dtype=torch.uint8)
    step = _CHUNK // BLOCK
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step].float()
        if not bool(part.isfinite().all()):
            raise CheckpointError(f"holds numbers that are not finite, which {kind} cannot keep")
        out[start : start + step] = function(part)
    return out.view(*values.shape[:-1], values.shape[-1] // BLOCK * nbytes)


def _half(scale: Tensor) -> Tensor:
    """`[n, 1]` as the two bytes of its fp16."""
    half = scale.half()
    if not bool(half.isfinite().all()):
        raise CheckpointError("holds numbers too large for the fp16 scale of a packed block; use bf16 or f32")
    return half.view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _nibbles(codes: Tensor) -> Tensor:
    """`[n, 32]` numbers from 0 to 15 -> `[n, 16]` bytes: the first half in the low nibbles."""
    low, high = codes.clamp(0, 15).to(torch.uint8).chunk(2, dim=1)
    return low | (high << 4)


def _q4_0(x: Tensor) -> Tensor:
    """The number farthest from zero becomes -8, whatever its sign."""
    scale = x.gather(1, x.abs().argmax(dim=1, keepdim=True)) / -8
    return torch.cat([_half(scale), _nibbles((x * _inverse(scale) + 8.5).trunc())], dim=1)


def _q4_1(x: Tensor) -> Tensor:
    low = x.amin(dim=1, keepdim=True)
    scale = (x.amax(dim=1, keepdim=True) - low) / 15
    return torch.cat([_half(scale), _half(low), _nibbles(((x - low) * _inverse(scale) + 0.5).trunc())], dim=1)


def _q8_0(x: Tensor) -> Tensor:
    """Codes are rounded as C's `roundf` does, halves away from zero."""
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    y = x * _inverse(scale)
    whole = y.abs().floor()
    codes = (whole + (2 * (y.abs() - whole)).floor()) * y.sign()
    return torch.cat([_half(scale), codes.to(torch.int8).view(torch.uint8)], dim=1)


# name -> (bytes of a block, how it is made)
PACKED: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q8_0": (34, _q8_0),
}
