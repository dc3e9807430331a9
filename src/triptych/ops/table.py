"""The table of operations: what each computes, the shape of its result, what it costs, and what a drawing calls it.

A `Dim` is a number or a symbol: `N` tokens of the flat batch, `B` rows, `S` keys, `M` tokens of the source, `P` patches
or frames, `R` rows of a position table that the distances of the rows reach.  A multiply and an add are two FLOPs; only
matrix products are counted, as everywhere in the field.  The entries stand in `table.toml`, the functions of tensors in
`functions.py`, in `experts.py` and in `triptych.attention`, each under the name of its operation (`implements`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from triptych.files import tables_of
from triptych.spec.masks import Causal

Dim = int | str
Shape = tuple[Dim, ...]
Attributes = Mapping[str, Any]
Shapes = Mapping[str, Sequence[Any]]
ShapeRule = Callable[[Shapes, Attributes], Shape]
FlopRule = Callable[[Shapes, Sequence[int], Attributes], int]


def shape_of_x(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of the argument `x`."""
    return tuple(shapes["x"])


def no_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    """Of an operation without a matrix product."""
    return 0


@dataclass(frozen=True)
class Operation:
    """One operation.

    name        as it stands in a program, and in the registry of every executor.
    arguments   names of the arguments of its function, in order.
    equation    what it computes, in the letters of its arguments.
    label       what drawings call it.
    description what it does, in a sentence for a reader of the live page.
    shape       the symbolic shape of the result, from the shapes of the tensor arguments and the other arguments.
    flops       the FLOPs of its matrix products, from sizes in numbers.
    dtype       of the result: that of its first tensor argument (`x`), of its weight, or a fixed one.
    tokenwise   whether the result for a token depends on that token alone; attention's depends on its mask.
    """

    name: str
    arguments: tuple[str, ...]
    equation: str
    label: str
    description: str
    shape: ShapeRule = shape_of_x
    flops: FlopRule = no_flops
    dtype: Literal["x", "weight", "float32", "int64"] = "x"
    tokenwise: bool = True

    def nbytes(self, shapes: Shapes, out: Sequence[int], itemsize: int) -> int:
        """Bytes it reads and writes when nothing is in a cache: every tensor argument and the result once."""
        return itemsize * (sum(prod(shape) for shape in shapes.values()) + prod(out))


def _broadcast(shapes: Shapes, attributes: Attributes) -> Shape:
    return max((tuple(shape) for shape in shapes.values()), key=len)


def _split(shapes: Shapes, attributes: Attributes) -> Shape:
    _, heads, width = attributes["shape"]
    return shapes["x"][0], (shapes["x"][-1] // width if heads == -1 else heads), width


def _merged(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["x"][0], int(shapes["x"][1]) * int(shapes["x"][2])


def _convolved(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["x"][0] if attributes["stride"] == 1 else "N", shapes["weight"][0]


def _angles(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["positions"][0], 1, attributes["spec"].width


def _pairs(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["q_pos"][-1], shapes["k_pos"][-1]


def _attended(shapes: Shapes, attributes: Attributes) -> Shape:
    tokens, heads, _ = shapes["q"]
    return tokens, heads, shapes["v"][2]


def _linear_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    return 2 * prod(out) * int(shapes["weight"][1])


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


_SHAPES: dict[str, ShapeRule] = {
    "alibi": lambda shapes, attributes: (attributes["heads"], *_pairs(shapes, attributes)),
    "angles": _angles,
    "attended": _attended,
    "broadcast": _broadcast,
    "convolved": _convolved,
    "disentangled": lambda shapes, attributes: (1, shapes["q"][1], *shapes["row"]),
    "extended": lambda shapes, attributes: ("S", *shapes["k"][1:]),
    "looked_up": lambda shapes, attributes: (*shapes["ids"], shapes["weight"][1]),
    "mapped": lambda shapes, attributes: (*shapes["x"][:-1], shapes["weight"][0]),
    "merged": _merged,
    "pairs": _pairs,
    "patches": lambda shapes, attributes: ("N", shapes["weight"][0]),
    "pooled": lambda shapes, attributes: ("B", *shapes["x"][1:]),
    "reached": lambda shapes, attributes: ("R", shapes["weight"][1]),
    "sinusoids": lambda shapes, attributes: (*shapes["positions"], attributes["width"]),
    "split": _split,
    "t5": lambda shapes, attributes: (shapes["weight"][1], *_pairs(shapes, attributes)),
    "x": shape_of_x,
}
_FLOPS: dict[str, FlopRule] = {
    "attend": _attend_flops,
    "content": _content_flops,
    "conv": lambda shapes, out, attributes: 2 * out[0] * prod(shapes["weight"]),
    "linear": _linear_flops,
    "none": no_flops,
    "patches": lambda shapes, out, attributes: 2 * int(shapes["x"][0]) * prod(shapes["weight"]),
}


def _operation(
    name: str, arguments: Sequence[str] = ("x",), shape: str = "x", flops: str = "none", **texts: Any
) -> Operation:
    """What the entry of `table.toml` says."""
    return Operation(name, tuple(arguments), shape=_SHAPES[shape], flops=_FLOPS[flops], **texts)


_TABLE = tables_of(__file__)
OPERATIONS: dict[str, Operation] = {name: _operation(name, **entry) for name, entry in _TABLE.items()}
