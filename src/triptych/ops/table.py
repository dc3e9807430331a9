"""The table of operations: what each computes, the shape of its result, and what it costs.

A `Dim` is a number or a symbol: `N` tokens of the flat batch, `B` rows, `S` keys, `M` tokens of the source, `P` patches
or frames, `R` rows of a position table that the distances of the rows reach.  A multiply and an add are two FLOPs; only
matrix products are counted, as everywhere in the field.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.ops import functions
from triptych.ops.experts import experts
from triptych.ops.pooling import pool

Dim = int | str
Shape = tuple[Dim, ...]
Attributes = Mapping[str, Any]
Shapes = Mapping[str, Sequence[Any]]


def _no_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation.

    name        as it stands in a program.
    equation    what it computes, in the letters of its arguments.
    run         the function of tensors.
    arguments   names of the arguments of `run`, in order.
    shape       the symbolic shape of the result, from the shapes of the tensor arguments and the other arguments.
    flops       the FLOPs of its matrix products, from sizes in numbers.
    """

    name: str
    equation: str
    run: Callable[..., Any]
    arguments: tuple[str, ...]
    shape: Callable[[Shapes, Attributes], Shape]
    flops: Callable[[Shapes, Sequence[int], Attributes], int] = _no_flops

    def nbytes(self, shapes: Shapes, out: Sequence[int], itemsize: int) -> int:
        """Bytes it reads and writes when nothing is in a cache: every tensor argument and the result once."""
        return itemsize * (sum(prod(shape) for shape in shapes.values()) + prod(out))


OPERATIONS: dict[str, Operation] = {}
_BY_FUNCTION: dict[object, Operation] = {}


def register(operation: Operation, *functions: object) -> None:
    """Add an operation, and the functions of torch that are recorded as it."""
    OPERATIONS[operation.name] = operation
    for function in (operation.run, *functions):
        _BY_FUNCTION.setdefault(function, operation)


def operation_of(function: object) -> Operation | None:
    """The operation a function is recorded as; None where it is none."""
    return _BY_FUNCTION.get(function)


def _like(name: str) -> Callable[[Shapes, Attributes], Shape]:
    return lambda shapes, attributes: tuple(shapes[name])


def _broadcast(shapes: Shapes, attributes: Attributes) -> Shape:
    return max((tuple(shape) for shape in shapes.values()), key=lambda shape: len(shape))


def _heads(shapes: Shapes, attributes: Attributes) -> Shape:
    """`[N, heads * width]` as `[N, heads, width]`."""
    _, heads, width = attributes["shape"]
    return shapes["x"][0], (shapes["x"][-1] // width if heads == -1 else heads), width


def _linear_flops(shapes: Shapes, out: Sequence[int], attributes: Attributes) -> int:
    return 2 * prod(out) * int(shapes["weight"][1])


def split_heads(x: Tensor, shape: Sequence[int]) -> Tensor:
    """[N, heads * width] as [N, heads, width]; `shape` is (-1 or N, heads, width)."""
    return x.view(x.shape[0], *shape[1:])


def merge_heads(x: Tensor) -> Tensor:
    """[N, heads, width] as [N, heads * width]."""
    return x.flatten(1)


def cast(x: Tensor, dtype: str) -> Tensor:
    """x in another dtype."""
    return x.to(getattr(torch, dtype))


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """`ops.rotate` with the rotation's tensors apart."""
    return functions.rotate(x, functions.Rotation(cos, sin, pairing))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


for _operation, *_recorded in (
    (
        Operation(
            name="embedding", equation="weight[ids]", run=F.embedding, arguments=("ids", "weight"),
            shape=lambda shapes, attributes: (*shapes["ids"], shapes["weight"][1]),
        ),
    ),
    (
        Operation(
            name="linear", equation="x weightᵀ + bias", run=F.linear, arguments=("x", "weight", "bias"),
            shape=lambda shapes, attributes: (*shapes["x"][:-1], shapes["weight"][0]), flops=_linear_flops,
        ),
    ),
    (
        Operation(
            name="layer_norm", equation="(x - mean x) / √(var x + eps) · weight + bias", run=functions.layer_norm,
            arguments=("x", "weight", "bias", "eps"), shape=_like("x"),
        ),
    ),
    (
        Operation(
            name="rms_norm", equation="x / √(mean x² + eps) · (weight + offset)", run=functions.rms_norm,
            arguments=("x", "weight", "offset", "eps"), shape=_like("x"),
        ),
    ),
    (
        Operation(
            name="split_heads", equation="x[N, H·K] as [N, H, K]", run=split_heads, arguments=("x", "shape"),
            shape=_heads,
        ),
        Tensor.view,
    ),
    (
        Operation(
            name="merge_heads", equation="x[N, H, K] as [N, H·K]", run=merge_heads, arguments=("x",),
            shape=lambda shapes, attributes: (shapes["x"][0], int(shapes["x"][1]) * int(shapes["x"][2])),
        ),
        Tensor.flatten,
    ),
    (
        Operation(
            name="rotate", equation="(a cos - b sin, b cos + a sin) for each pair (a, b) of x", run=turned,
            arguments=("x", "cos", "sin", "pairing"), shape=_like("x"),
        ),
        functions.rotate,
    ),
    (Operation(name="relu", equation="max(x, 0)", run=F.relu, arguments=("x",), shape=_like("x")),),
    (Operation(name="silu", equation="x · σ(x)", run=F.silu, arguments=("x",), shape=_like("x")),),
    (Operation(name="tanh", equation="tanh x", run=torch.tanh, arguments=("x",), shape=_like("x")),),
    (
        Operation(
            name="gelu", equation="x · Φ(x)", run=gelu, arguments=("x", "approximate"), shape=_like("x"),
        ),
        F.gelu,
    ),
    (
        Operation(name="add", equation="x + y", run=operator.add, arguments=("x", "y"), shape=_broadcast),
        Tensor.add, Tensor.__radd__,
    ),
    (Operation(name="scale", equation="factor · x", run=operator.mul, arguments=("x", "factor"), shape=_like("x")),),
    (Operation(name="shift", equation="x + offset", run=operator.add, arguments=("x", "offset"), shape=_like("x")),),
    (
        Operation(name="multiply", equation="x · y", run=operator.mul, arguments=("x", "y"), shape=_broadcast),
        Tensor.mul, Tensor.__rmul__,
    ),
    (
        Operation(
            name="softcap", equation="cap · tanh(x / cap)", run=functions.softcap, arguments=("x", "cap"),
            shape=_like("x"),
        ),
    ),
    (
        Operation(
            name="cast", equation="x in another dtype", run=cast, arguments=("x", "dtype"), shape=_like("x"),
        ),
        Tensor.to,
    ),
    (
        Operation(
            name="conv1d", equation="Σ_j weight[j] x[stride·t + j - kernel/2] + bias", run=functions.conv1d,
            arguments=("x", "weight", "bias", "stride", "lengths"),
            shape=lambda shapes, attributes: (
                shapes["x"][0] if attributes["stride"] == 1 else "N", shapes["weight"][0]
            ),
            flops=lambda shapes, out, attributes: 2 * out[0] * prod(shapes["weight"]),
        ),
    ),
    (
        Operation(
            name="patches", equation="[first; x weightᵀ + bias] of each image", run=functions.patches,
            arguments=("x", "first", "weight", "bias", "rows"),
            shape=lambda shapes, attributes: ("N", shapes["weight"][0]),
            flops=lambda shapes, out, attributes: 2 * int(shapes["x"][0]) * prod(shapes["weight"]),
        ),
    ),
    (
        Operation(
            name="pool", equation="mode of x in each row", run=pool,
            arguments=("x", "rows", "mode"), shape=lambda shapes, attributes: ("B", *shapes["x"][1:]),
        ),
    ),
    (
        Operation(
            name="l2_normalize", equation="x / |x|", run=F.normalize, arguments=("x", "p", "dim"), shape=_like("x"),
        ),
    ),
    (
        Operation(
            name="experts", equation="Σ_e softmax(scores)[e] · expert_e(x) over the top_k scores",
            run=experts, arguments=("x", "scores", "parts", "top_k", "normalize"), shape=_like("x"),
        ),
    ),
    (
        Operation(
            name="sinusoids", equation="sin and cos of position / theta^(2i/width)", run=functions.sinusoids,
            arguments=("positions", "width", "theta", "layout"),
            shape=lambda shapes, attributes: (*shapes["positions"], attributes["width"]),
        ),
    ),
):  # fmt: skip
    register(_operation, *_recorded)
