"""Operations between a stored tensor and a parameter, each with its inverse and the shape of the stored tensor.

The ops work on torch's tensors and NumPy's arrays alike, and as views where they can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

Shape = tuple[int, ...]


class Op:
    """The stored tensor has the shape of the parameter, unless an operation says otherwise."""

    rows: ClassVar = False  # whether it only moves whole rows, so that it also works on packed rows

    def to_ours(self, x: Any) -> Any:
        """The parameter, of the stored tensor."""
        raise NotImplementedError

    def to_source(self, x: Any) -> Any:
        """The inverse."""
        raise NotImplementedError

    def source_shape(self, shape: Shape) -> Shape:
        """The shape of the stored tensor, of that of the parameter."""
        return shape


@dataclass(frozen=True)
class Transpose(Op):
    """The stored matrix is `[inputs, outputs]` (GPT-2's Conv1D)."""

    def to_ours(self, x: Any) -> Any:
        return x.swapaxes(0, 1) if x.ndim == 2 else x

    def to_source(self, x: Any) -> Any:
        return self.to_ours(x)

    def source_shape(self, shape: Shape) -> Shape:
        return shape[::-1]


@dataclass(frozen=True)
class RopePermute(Op):
    """GGUF's llama stores the rows of q and k with the two halves of each head interleaved: (0, K/2, 1, K/2+1, ...)."""

    heads: int
    rows = True

    def to_ours(self, x: Any) -> Any:
        return x.reshape(self.heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    def to_source(self, x: Any) -> Any:
        return x.reshape(self.heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


@dataclass(frozen=True)
class OneRow(Op):
    """The stored vector is a matrix of one row (BART's bias of the logits)."""

    def to_ours(self, x: Any) -> Any:
        return x[0]

    def to_source(self, x: Any) -> Any:
        return x[None]

    def source_shape(self, shape: Shape) -> Shape:
        return (1, *shape)


@dataclass(frozen=True)
class ByHead(Op):
    """GPT-NeoX stores q, k and v of the first head, then of the second: (H, 3, K) rows for our (3, H, K)."""

    heads: int
    rows = True

    def to_ours(self, x: Any) -> Any:
        return x.reshape(self.heads, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    def to_source(self, x: Any) -> Any:
        return x.reshape(3, self.heads, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


@dataclass(frozen=True)
class Stacked(Op):
    """GGUF stores the matrices of all experts as one, `[experts, outputs, inputs]`."""

    experts: int
    rows = True

    def to_ours(self, x: Any) -> Any:
        return x.reshape(-1, *x.shape[2:])

    def to_source(self, x: Any) -> Any:
        return x.reshape(self.experts, -1, *x.shape[1:])

    def source_shape(self, shape: Shape) -> Shape:
        return (self.experts, shape[0] // self.experts, *shape[1:])


@dataclass(frozen=True)
class PlusOne(Op):
    """GGUF stores the whole factor of Gemma's norms, of which the model stores the difference from 1."""

    def to_ours(self, x: Any) -> Any:
        return x - 1

    def to_source(self, x: Any) -> Any:
        return x + 1
