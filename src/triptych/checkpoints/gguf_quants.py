"""From ggml's packed blocks to numbers (github.com/ggml-org/ggml, ggml-common.h and `dequantize_row_*`).

A block holds 32 elements (`Q4_0` ... `Q8_0`) or 256 (`*_K`) with fp16 scales.  Each function takes blocks
`[n, bytes of a block]`, uint8, and gives float32 `[n, elements]`, computed in float32 in ggml's order, so the
results are its own bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triptych.errors import CheckpointError

_CHUNK = 1 << 15  # elements unpacked at a time: temporaries stay in the core's cache, whatever the tensor


def dequantize(raw: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """`raw [..., bytes of a row]`, uint8, of the packed type `kind` -> `[..., elements of a row]` in `dtype`."""
    if kind not in _UNPACK:
        raise CheckpointError(f"{kind} is not a packed type; known are {', '.join(_UNPACK)}")
    elements, nbytes, unpack = _UNPACK[kind]
    blocks = raw.reshape(-1, nbytes)
    out = torch.empty((len(blocks), elements), dtype=dtype, device=raw.device)
    step = _CHUNK // elements
    for start in range(0, len(blocks), step):
        out[start : start + step] = unpack(blocks[start : start + step])
    return out.view(*raw.shape[:-1], -1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block, as float32 `[n, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bits(packed: Tensor, width: int) -> Tensor:
    """The `width`-bit fields of each byte, lowest first: `[n, ..., c]` -> `[n, ..., 8 / width, c]`."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return torch.bitwise_and(packed.unsqueeze(-2) >> shifts[:, None], 2**width - 1)


def _nibbles(packed: Tensor) -> Tensor:
    """`[n, 16]` bytes -> `[n, 32]`: the low nibbles, then the high ones."""
    return _bits(packed, 4).flatten(1)


def _fifth(packed: Tensor) -> Tensor:
    """Four bytes -> the fifth bit, already in its place, of each of a block's 32 elements."""
    return _bits(packed, 1).transpose(1, 2).flatten(1) << 4


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b, 0) * _nibbles(b[:, 4:]).float() + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth(b[:, 2:6])).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth(b[:, 4:8])).float() + _half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].view(torch.int8).float()


def _scales_and_mins(b: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minimums `[n, 8, 1]` of a `Q4_K` or `Q5_K` block, six bits each in twelve bytes."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1)
    mins = torch.cat([mid & 63, (high >> 4) | ((mid >> 6) << 4)], dim=1)
    return (_half(b, 0) * scales.float()).unsqueeze(-1), (_half(b, 2) * mins.float()).unsqueeze(-1)


def _q4_k(b: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(b)
    values = _bits(b[:, 16:].reshape(-1, 4, 32), 4).flatten(1, 2)  # [n, 8, 32]
    return (scales * values.float() - mins).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(b)
    values = _bits(b[:, 48:].reshape(-1, 4, 32), 4).flatten(1, 2)
    fifth = _bits(b[:, 16:48], 1) << 4  # bit j of byte i belongs to element i of group j
    return (scales * (values | fifth).float() - mins).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low = _bits(b[:, :128].reshape(-1, 2, 64), 4)  # [n, 2, 2, 64]
    high = _bits(b[:, 128:192].reshape(-1, 2, 32), 2)  # [n, 2, 4, 32]
    values = (low.flatten(1).float() + (high.flatten(1) << 4).float() - 32).view(-1, 16, 16)
    scales = _half(b, 208) * b[:, 192:208].view(torch.int8).float()
    return torch.mul(scales.unsqueeze(-1), values).flatten(1)


_UNPACK: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}
