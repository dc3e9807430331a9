"""Attention patterns as sections of a page: all weights of a head, or the largest of each query of a long text.

A weight in [0, 1] becomes round(w * 65535), so its error is at most 1/131070.  In the packed text, two byte planes in
deflate and base64, the high bytes come first and the low bytes after them: most weights are small, so the first plane
is nearly all zeros, which deflate removes, and the masked half of a causal map costs almost nothing.
"""

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from triptych.errors import InputError
from .sections import Json, Section

STEPS = 65535  # weights are stored as whole multiples of 1/STEPS
TOP_STEPS = 255  # the largest weights of a query are stored as (i / TOP_STEPS)², so that small ones keep their digits
MAX_BYTES = 64 * 2**20  # of the attention weights in a page, counted unpacked: two each in the memory of the browser
LEAST = 0.02  # weights of a long text that a page keeps, beside the largest of each query
MOST_KEYS = 65535  # positions that two bytes hold, beside the sign for none

StackName = Literal["encoder", "decoder", "cross"]
Measures = Mapping[str, Sequence[float]]


def packed_bytes(heads: int, queries: int, keys: int) -> int:
    """Bytes that a [heads, queries, keys] pattern takes in the memory of the browser."""
    return 2 * heads * queries * keys


def pack(pattern: npt.NDArray[np.float32]) -> str:
    """Base64 text of weights in [0, 1], any shape, which the page's script reads back."""
    return _deflated(*_bytes(np.rint(pattern.astype(np.float64) * STEPS)))


def pack_top(keys: npt.NDArray[np.integer], weights: npt.NDArray[np.float32]) -> str:
    """Base64 text of the keys [H, T, K] (-1: none) and weights in [0, 1] of each query, best first.

    Keys become differences from those of the query before, modulo 2^16, in two byte planes [H, K, T]: a head that reads
    one token, or always the same distance, is a row of equal bytes.  The weights' bytes follow, to within 0.004.
    """
    steps = np.diff(keys.transpose(0, 2, 1), axis=-1, prepend=0).astype(np.int64) & 0xFFFF
    roots = np.rint(np.sqrt(weights.astype(np.float64)) * TOP_STEPS).transpose(0, 2, 1)
    return _deflated(*_bytes(steps), roots)


def _bytes(numbers: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The high and the low bytes of numbers below 2^16."""
    short = numbers.astype(np.uint16)
    return short >> 8, short & 255


def _deflated(*planes: npt.NDArray[Any]) -> str:
    data = b"".join(plane.astype(np.uint8).tobytes() for plane in planes)
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention of one layer: `pattern[h, t, s]` is the weight of key s for query t in head h, [H, T, S].

    `queries` and `keys` are the T and S tokens as text.  `heads` are the numbers of the H heads where they
    are a selection of the layer's; by default 0 .. H-1.  `roles` say what each of the H heads does, "" where nothing is
    known; heads of one role have one colour.  `measures` name numbers of the H heads, such as a mean distance.  Raises
    InputError for a pattern of another shape, or with weights outside [0, 1], and for another number of roles.
    """

    stack: StackName
    layer: int
    queries: Sequence[str]
    keys: Sequence[str]
    pattern: npt.ArrayLike
    heads: Sequence[int] | None = None
    roles: Sequence[str] | None = None
    measures: Measures | None = None

    def __post_init__(self) -> None:
        where = f"attention map {self.stack} layer {self.layer}"
        if self.stack not in get_args(StackName):
            raise InputError(f"{where}: no such stack; use one of {', '.join(get_args(StackName))}")
        weights = self.weights
        tokens = (len(self.queries), len(self.keys))
        if weights.ndim != 3 or not weights.size or weights.shape != (len(self.head_names), *tokens):
            raise InputError(
                f"{where}: the pattern is {list(weights.shape)}; it must be [H, T, S] with"
                f" {tokens[0]} queries, {tokens[1]} keys and at least one head"
            )
        _check_heads(where, self, weights, "the pattern after softmax, not the scores")
        object.__setattr__(self, "pattern", weights)

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        return np.asarray(self.pattern, dtype=np.float32)

    @property
    def head_names(self) -> list[int]:
        return list(range(len(self.weights))) if self.heads is None else list(self.heads)

    @property
    def size(self) -> int:
        """Bytes in the memory of the browser."""
        return packed_bytes(*self.weights.shape)

    def packed(self) -> Json:
        return {"weights": pack(self.weights)}


@dataclass(frozen=True, eq=False)
class TopMap:
    """The largest weights of one layer: key `top_keys[h, t, k]` has `top_weights[h, t, k]`, [H, T, K] each, best first.

    For texts whose patterns are too large for a page.  A query with fewer than K keys has -1 in place of the others.
    Everything else is as in `AttentionMap`.  Raises InputError for arrays of another shape, weights outside [0, 1], and
    keys that are not there.
    """

    stack: StackName
    layer: int
    queries: Sequence[str]
    keys: Sequence[str]
    top_keys: npt.NDArray[np.int32]
    top_weights: npt.NDArray[np.float32]
    heads: Sequence[int] | None = None
    roles: Sequence[str] | None = None
    measures: Measures | None = None

    def __post_init__(self) -> None:
        where = f"largest weights of {self.stack} layer {self.layer}"
        keys, weights = self.top_keys, self.top_weights
        shape = (len(self.head_names), len(self.queries))
        if keys.ndim != 3 or keys.shape[:2] != shape or weights.shape != keys.shape or not keys.size:
            raise InputError(
                f"{where}: {list(keys.shape)} keys and {list(weights.shape)} weights; both must be [H, T, K]"
            )
        if keys.min() < -1 or keys.max() >= min(len(self.keys), MOST_KEYS):
            raise InputError(f"{where}: keys must be positions below {min(len(self.keys), MOST_KEYS)}, or -1")
        _check_heads(where, self, weights, "those after softmax")

    @property
    def head_names(self) -> list[int]:
        return list(range(len(self.top_keys))) if self.heads is None else list(self.heads)

    @property
    def size(self) -> int:
        """Bytes in the memory of the browser."""
        return 3 * self.top_keys.size

    def packed(self) -> Json:
        """Each query's keys in their order, which packs better than that of the weights; of those after the first only
        weights of at least `LEAST`."""
        kept = (self.top_weights >= LEAST) | (np.arange(self.top_keys.shape[2]) == 0)
        keys = np.where(kept, self.top_keys, -1)
        order = np.argsort(np.where(keys < 0, MOST_KEYS, keys), axis=-1, kind="stable")
        weights = np.take_along_axis(np.where(kept, self.top_weights, np.float32(0)), order, -1)
        return {"count": self.top_keys.shape[2], "top": pack_top(np.take_along_axis(keys, order, -1), weights)}


AnyMap = AttentionMap | TopMap


def _check_heads(where: str, layer_map: AnyMap, weights: npt.NDArray[np.float32], passed: str) -> None:
    heads = len(weights)
    if not (weights.min() >= 0 and weights.max() <= 1):  # NaN fails both
        raise InputError(f"{where}: weights must lie in [0, 1]; pass {passed}")
    if layer_map.roles is not None and len(layer_map.roles) != heads:
        raise InputError(f"{where}: {len(layer_map.roles)} roles for {heads} heads; give one a head")
    for name, values in (layer_map.measures or {}).items():
        if len(values) != heads or not all(map(math.isfinite, values)):
            raise InputError(f"{where}: {name} must be one finite number for each of {heads} heads")


@dataclass(frozen=True, eq=False)
class AttentionSection(Section):
    """Interactive attention maps of any number of layers; stacks appear in the order of `maps`.

    A layer may have a `TopMap` of all its heads and an `AttentionMap` of some of them, which then stands in its place.
    `roles` describes the names of roles.  Raises InputError when a (stack, layer) appears twice or the weights exceed
    `MAX_BYTES`.
    """

    note: str
    maps: Sequence[AnyMap]

    def __post_init__(self) -> None:
        layers = [(item.stack, item.layer, type(item)) for item in self.maps]
        repeated = next((layer for layer in layers if layers.count(layer) > 1), None)
        if repeated:
            raise InputError(
                f"attention {self.title!r}: {repeated[0]} layer {repeated[1]} appears twice; pass one map per layer"
            )
        total = sum(item.size for item in self.maps)
        if total > MAX_BYTES:
            largest = max(self.maps, key=lambda item: item.size)
            heads, queries, keys = len(largest.head_names), len(largest.queries), len(largest.keys)
            raise InputError(
                f"attention {self.title!r}: {len(self.maps)} layers of up to {heads} heads x {queries} x {keys} weights"
                f" take {total / 2**20:,.0f} MiB and a page carries at most {MAX_BYTES // 2**20};"
                " choose fewer layers, heads or query rows"
            )

    def data(self) -> Json:
        index: dict[tuple[str, ...], int] = {}  # layers of one stack share their tokens: each list is stored once
        maps = []
        for one in self.maps:
            queries, keys = (index.setdefault(tuple(tokens), len(index)) for tokens in (one.queries, one.keys))
            where = {"stack": one.stack, "layer": one.layer, "heads": one.head_names, "queries": queries, "keys": keys}
            measures = {name: [float(f"{x:.4g}") for x in values] for name, values in (one.measures or {}).items()}
            roles = {} if one.roles is None else {"roles": list(one.roles)}
            maps.append(where | one.packed() | roles | ({} if one.measures is None else {"measures": measures}))
        return {"note": self.note, "steps": STEPS, "tokens": [list(tokens) for tokens in index], "maps": maps}


@dataclass(frozen=True, eq=False)
class ComparisonSection(Section):
    """The same heads on other texts, beside the first `AttentionSection` of the page.

    `texts` are that section's text and those of `others`, one section each.  Raises InputError for another number of
    texts.
    """

    note: str
    texts: Sequence[str]
    others: Sequence[AttentionSection]

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.others) + 1 or not self.others:
            raise InputError(f"comparison {self.title!r}: {len(self.texts)} texts for 1 + {len(self.others)} sections")

    def data(self) -> Json:
        return {"note": self.note, "texts": list(self.texts), "others": [one.data() for one in self.others]}
