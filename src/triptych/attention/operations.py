"""Attention's own operations in the table: rotations, position biases, the cache's `extend`, and `attend`."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.attention import position_biases, rope
from triptych.ops import Attributes, Operation, Shape, Shapes, register
from triptych.spec.masks import Causal


def _angles(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["positions"][0], 1, attributes["spec"].width


def _attended(shapes: Shapes, attributes: Attributes) -> Shape:
    tokens, heads, _ = shapes["q"]
    return tokens, heads, shapes["v"][2]


def _attend_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    """q against k, then the weights against v; every query against every key that a window leaves.  Of linear
    attention, what each key adds to its sums (in causal one, each new key) and what each query reads of them."""
    queries, heads, width = shapes["q"]
    if attributes["mechanism"] == "linear":
        added = queries if attributes["keys"] == "self" and isinstance(attributes["mask"], Causal) else shapes["k"][0]
        return int(2 * (added * shapes["k"][1] + queries * heads) * width * (shapes["v"][2] + 1))
    keys = min(shapes["k"][0], attributes.get("span") or shapes["k"][0])
    return int(2 * queries * keys * heads * (width + shapes["v"][2]))


def _content_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    """Queries against the distances' keys, and keys against the distances' queries."""
    total = 0
    for table, tokens in (("pos_k", "q"), ("pos_q", "k")):
        if table in shapes:
            reached, _, width = shapes[table]
            total += 2 * shapes[tokens][0] * reached * shapes["q"][1] * width
    return total


def attend(*arguments: object) -> None:
    raise NotImplementedError("a program's attend is run by a row plan (`triptych.program.interpreter`)")


def extend(*arguments: object) -> None:
    raise NotImplementedError("a program's extend is run by a cache step (`triptych.program.interpreter`)")


for _operation in (
    Operation(
        name="rotation_cos", equation="cos(position · frequency) · factor", run=rope.rotation_cos,
        arguments=("spec", "positions", "length", "dtype"), shape=_angles,
    ),
    Operation(
        name="rotation_sin", equation="± sin(position · frequency) · factor", run=rope.rotation_sin,
        arguments=("spec", "positions", "length", "dtype"), shape=_angles,
    ),
    Operation(
        name="alibi_bias", equation="-slope[h] · |q_pos - k_pos|", run=position_biases.alibi_bias,
        arguments=("heads", "q_pos", "k_pos"),
        shape=lambda shapes, attributes: (attributes["heads"], shapes["q_pos"][-1], shapes["k_pos"][-1]),
    ),
    Operation(
        name="t5_bias", equation="weight[bucket(k_pos - q_pos), h]", run=position_biases.t5_bias,
        arguments=("weight", "q_pos", "k_pos", "max_distance", "bidirectional"),
        shape=lambda shapes, attributes: (shapes["weight"][1], shapes["q_pos"][-1], shapes["k_pos"][-1]),
    ),
    Operation(
        name="reached_table", equation="the rows of weight that distances of these rows reach",
        run=position_biases.reached_table, arguments=("weight", "positions", "longest", "span", "max_distance"),
        shape=lambda shapes, attributes: ("R", shapes["weight"][1]),
    ),
    Operation(
        name="reached_row", equation="the row of the table for q_pos - k_pos", run=position_biases.reached_row,
        arguments=("q_pos", "k_pos", "longest", "span", "max_distance"),
        shape=lambda shapes, attributes: (shapes["q_pos"][-1], shapes["k_pos"][-1]),
    ),
    Operation(
        name="disentangled_bias", equation="q · pos_k[row] + pos_q[row] · k", run=position_biases.disentangled_bias,
        arguments=("q", "k", "row", "pos_q", "pos_k"),
        shape=lambda shapes, attributes: (1, shapes["q"][1], *shapes["row"]), flops=_content_flops,
    ),
    Operation(
        name="extend", equation="the cache's keys and values, then these", run=extend, arguments=("k", "v"),
        shape=lambda shapes, attributes: ("S", *shapes["k"][1:]),
    ),
    Operation(
        name="attend", equation="softmax(mask(softcap(scale · q kᵀ) + bias)) v", run=attend,
        arguments=("q", "k", "v", "bias", "sinks", "weight"), shape=_attended, flops=_attend_flops,
    ),
):  # fmt: skip
    register(_operation)
