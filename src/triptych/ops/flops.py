"""The FLOPs of each operation that has a matrix product, attention under a window among them, from sizes in numbers.

A multiply and an add are two FLOPs; only matrix products are counted, as everywhere in the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from triptych.spec.masks import Causal

Attributes = Mapping[str, Any]
Shapes = Mapping[str, Sequence[Any]]
FlopRule = Callable[[Shapes, Sequence[int], Attributes], int]


def no_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    """Of an operation without a matrix product."""
    return 0


def linear_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    return 2 * prod(out) * int(shapes["weight"][1])


def attend_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    """q against k, then the weights against v; every query against every key that a window leaves.  Of linear
    attention, what each key adds to its sums (in causal one, each new key) and what each query reads of them."""
    queries, heads, width = shapes["q"]
    if attributes["mechanism"] == "linear":
        added = queries if attributes["keys"] == "self" and isinstance(attributes["mask"], Causal) else shapes["k"][0]
        return int(2 * (added * shapes["k"][1] + queries * heads) * width * (shapes["v"][2] + 1))
    keys = min(shapes["k"][0], attributes.get("span") or shapes["k"][0])
    return int(2 * queries * keys * heads * (width + shapes["v"][2]))


def content_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    """Queries against the distances' keys, and keys against the distances' queries."""
    total = 0
    for table, tokens in (("pos_k", "q"), ("pos_q", "k")):
        if table in shapes:
            reached, _, width = shapes[table]
            total += 2 * shapes[tokens][0] * reached * shapes["q"][1] * width
    return total
