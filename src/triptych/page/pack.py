"""Attention weights as text: 16-bit integers, two byte planes, deflate, base64.

A weight in [0, 1] becomes round(w * 65535), so its error is at most 1/131070.  The
high bytes of a head come first and the low bytes after them: most weights are small, so the first plane is nearly
all zeros, which deflate removes, and the masked half of a causal map costs almost nothing.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np
import numpy.typing as npt

STEPS = 65535
"""Weights are stored as whole multiples of 1/STEPS."""

MAX_BYTES = 64 * 2**20
"""Limit of the attention weights in a page, counted unpacked: two bytes each in the memory of the browser."""


def packed_bytes(heads: int, queries: int, keys: int) -> int:
    """Bytes that a [heads, queries, keys] pattern takes in the memory of the browser."""
    return 2 * heads * queries * keys


def pack(pattern: npt.NDArray[np.float32]) -> str:
    """Base64 text of weights in [0, 1], any shape; `unpack` and the page's script read it back."""
    steps = np.rint(pattern.astype(np.float64) * STEPS).astype(np.uint16).ravel()
    planes = np.concatenate([steps >> 8, steps & 255]).astype(np.uint8)
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode("ascii")


def unpack(text: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """The weights `pack` wrote, in [0, 1], with the given shape."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    high, low = planes.reshape(2, -1).astype(np.uint16)
    return ((high << 8 | low) / STEPS).reshape(shape)


TOP_STEPS = 255
"""The largest weights of a query are stored as (i / TOP_STEPS)², so that small ones keep their digits."""


def pack_top(keys: npt.NDArray[np.integer], weights: npt.NDArray[np.float32]) -> str:
    """Base64 text of the keys [H, T, K] (-1: none) and weights in [0, 1] of each query, best first.

    Keys become differences from those of the query before, modulo 2^16, in two byte planes [H, K, T]: a head that reads
    one token, or always the same distance, is a row of equal bytes.  The weights' bytes follow, to within 0.004.
    """
    order = (0, 2, 1)
    places = keys.transpose(order).astype(np.int64)
    steps = (np.diff(places, axis=-1, prepend=0) & 0xFFFF).astype(np.uint16).ravel()
    roots = np.rint(np.sqrt(weights.astype(np.float64)) * TOP_STEPS).transpose(order).astype(np.uint8).ravel()
    planes = np.concatenate([(steps >> 8).astype(np.uint8), (steps & 255).astype(np.uint8), roots])
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode("ascii")


def unpack_top(text: str, shape: tuple[int, int, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The keys and weights `pack_top` wrote, [H, T, K] each."""
    heads, queries, count = shape
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8).reshape(3, heads, count, queries)
    places = np.cumsum(planes[0].astype(np.int64) << 8 | planes[1], axis=-1) & 0xFFFF
    keys = np.where(places == 0xFFFF, -1, places)
    return keys.transpose(0, 2, 1), ((planes[2] / TOP_STEPS) ** 2).transpose(0, 2, 1)
