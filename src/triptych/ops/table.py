"""The table of operations: what each computes, the shape of its result, what it costs, and what a drawing calls it.

A `Dim` is a number or a symbol: `N` tokens of the flat batch, `B` rows, `S` keys, `M` tokens of the source, `P` patches
or frames, `R` rows of a position table that the distances of the rows reach.  A multiply and an add are two FLOPs; only
matrix products are counted, as everywhere in the field.  The functions of tensors stand in `functions.py`, in
`experts.py` and in `triptych.attention`, each under the name of its operation (`implements`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

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


_X = ("x",)
_POSITION_BIAS = "Position bias"

_TABLE = (
    # -- every number on its own
    Operation("relu", _X, "max(x, 0)", "ReLU", "Sets negative numbers to zero."),
    Operation(
        "silu", _X, "x · σ(x)", "SiLU",
        "x · sigmoid(x): close to x for large numbers, close to zero for very negative ones.",
    ),
    Operation(
        "gelu", ("x", "approximate"), "x · Φ(x)", "GELU",
        "x · Φ(x), Φ of the normal distribution: close to x for large numbers, to zero for negative ones.",
    ),
    Operation("tanh", _X, "tanh(x)", "Tanh", "Maps every number to one between -1 and 1."),
    Operation("scale", ("x", "factor"), "factor · x", "Scale", "Multiplies by one fixed number."),
    Operation("shift", ("x", "offset"), "x + offset", "Shift", "Adds one fixed number."),
    Operation(
        "softcap", ("x", "cap"), "cap · tanh(x / cap)", "Soft cap", "Keeps numbers within a bound, smoothly."
    ),
    Operation(
        "add", ("x", "y"), "x + y", "Add",
        "Adds the result to the residual stream, which carries everything computed so far.", _broadcast,
    ),
    Operation("multiply", ("x", "y"), "x · y", "Multiply", "Multiplies number by number.", _broadcast),
    Operation("cast", ("x", "dtype"), "x in another dtype", "Cast", "The same numbers in another dtype."),
    # -- vectors
    Operation(
        "embedding", ("ids", "weight"), "weight[ids]", "Embedding", "Looks up one row of a table for every token.",
        lambda shapes, attributes: (*shapes["ids"], shapes["weight"][1]), dtype="weight",
    ),
    Operation(
        "linear", ("x", "weight", "bias"), "x weightᵀ + bias", "Linear", "Multiplies each vector by a matrix.",
        lambda shapes, attributes: (*shapes["x"][:-1], shapes["weight"][0]), _linear_flops,
    ),
    Operation(
        "layer_norm", ("x", "weight", "bias", "eps"), "(x - mean x) / √(var x + eps) · weight + bias", "LayerNorm",
        "Subtracts the vector's mean and divides by its standard deviation; then a learned scale and shift.",
    ),
    Operation(
        "rms_norm", ("x", "weight", "offset", "eps"), "x / √(mean x² + eps) · (weight + offset)", "RMSNorm",
        "Divides the vector by its root mean square, then multiplies every number by a learned weight.",
    ),
    Operation("l2_normalize", _X, "x / |x|", "Normalize", "Divides the vector by its length."),
    Operation(
        "split_heads", ("x", "shape"), "x[N, H·K] as [N, H, K]", "Split heads", "One vector for each head.", _split
    ),
    Operation("merge_heads", _X, "x[N, H, K] as [N, H·K]", "Merge heads", "The heads' vectors side by side.", _merged),
    Operation(
        "experts", ("x", "scores", "parts", "top_k", "normalize"),
        "Σ_e softmax(scores)[e] · expert_e(x) over the top_k scores", "Experts",
        "The weighted sum of the MLPs (experts) that the router chose for each token.",
    ),
    # -- inputs and rows
    Operation(
        "conv1d", ("x", "weight", "bias", "stride", "lengths"), "Σ_j weight[j] x[stride·t + j - kernel/2] + bias",
        "Convolution", "Each token from its neighbours, one matrix for each place of the kernel.", _convolved,
        lambda shapes, out, attributes: 2 * out[0] * prod(shapes["weight"]), tokenwise=False,
    ),
    Operation(
        "patches", ("x", "first", "weight", "bias", "rows"), "[first; x weightᵀ + bias] of each image", "Patches",
        "Maps each patch of the image to a vector, after one learned vector.",
        lambda shapes, attributes: ("N", shapes["weight"][0]),
        lambda shapes, out, attributes: 2 * int(shapes["x"][0]) * prod(shapes["weight"]), tokenwise=False,
    ),
    Operation(
        "pool", ("x", "rows", "mode"), "mode of x in each row", "Pool", "One vector for the whole text.",
        lambda shapes, attributes: ("B", *shapes["x"][1:]), tokenwise=False,
    ),
    # -- positions
    Operation(
        "sinusoids", ("positions", "width", "theta", "layout"), "sin and cos of position / theta^(2i/width)",
        "Sinusoids", "Sines and cosines of the position, at many wavelengths.",
        lambda shapes, attributes: (*shapes["positions"], attributes["width"]), dtype="float32",
    ),
    Operation(
        "rotation_cos", ("spec", "positions", "length", "dtype"), "cos(position · frequency) · factor", "Cosines",
        "Cosines of the angles of each position.", _angles,
    ),
    Operation(
        "rotation_sin", ("spec", "positions", "length", "dtype"), "± sin(position · frequency) · factor", "Sines",
        "Sines of the angles of each position.", _angles,
    ),
    Operation(
        "rotate", ("x", "cos", "sin", "pairing"), "(a cos - b sin, b cos + a sin) for each pair (a, b) of x", "Rotate",
        "Rotates each pair of numbers by an angle that grows with the position, so that scores depend on distance.",
    ),
    Operation(
        "alibi_bias", ("heads", "q_pos", "k_pos"), "-slope[h] · |q_pos - k_pos|", _POSITION_BIAS,
        "A penalty that grows with the distance, with a slope for every head, added to the scores.",
        lambda shapes, attributes: (attributes["heads"], *_pairs(shapes, attributes)), dtype="float32",
    ),
    Operation(
        "t5_bias", ("weight", "q_pos", "k_pos", "max_distance", "bidirectional"), "weight[bucket(k_pos - q_pos), h]",
        _POSITION_BIAS, "A learned number for every head and distance, added to the scores.",
        lambda shapes, attributes: (shapes["weight"][1], *_pairs(shapes, attributes)), dtype="weight",
    ),
    Operation(
        "reached_table", ("weight", "positions", "longest", "span", "max_distance"),
        "the rows of weight that distances of these rows reach", "Distances", "One vector for each distance.",
        lambda shapes, attributes: ("R", shapes["weight"][1]), dtype="weight", tokenwise=False,
    ),
    Operation(
        "reached_row", ("q_pos", "k_pos", "longest", "span", "max_distance"), "the row of the table for q_pos - k_pos",
        "Distance", "Which of the distances a pair of tokens has.", _pairs, dtype="int64", tokenwise=False,
    ),
    Operation(
        "disentangled_bias", ("q", "k", "row", "pos_q", "pos_k"), "q · pos_k[row] + pos_q[row] · k", _POSITION_BIAS,
        "Scores between contents and relative positions.",
        lambda shapes, attributes: (1, shapes["q"][1], *shapes["row"]), _content_flops, tokenwise=False,
    ),
    # -- attention
    Operation(
        "extend", ("k", "v"), "the cache's keys and values, then these", "Cache",
        "Puts the new keys and values behind those of earlier tokens.",
        lambda shapes, attributes: ("S", *shapes["k"][1:]),
    ),
    Operation(
        "attend", ("q", "k", "v", "bias", "sinks", "weight"), "softmax(mask(softcap(scale · q kᵀ) + bias)) v",
        "Attention", "The mean of the values of the keys that a query may see, weighted by the softmax of its scores.",
        _attended, _attend_flops,
    ),
)  # fmt: skip

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in _TABLE}
