"""LoRA (Hu et al. 2021): a linear map beside which a product of two small matrices is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from triptych import ops
from triptych.nn.linear import Linear
from triptych.nn.weights import dense, rows


@dataclass(frozen=True, eq=False)
class LoraFactors:
    """What LoRA adds to one matrix: `alpha / rank * up @ down`.

    down    [rank, inputs]; the same tensor for several linear maps where they share it.
    up      [outputs, rank]
    alpha   the numerator of the scale.
    """

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def delta(self) -> Tensor:
        """The change of the matrix, [outputs, inputs], in fp32 or better."""
        wide = torch.promote_types(self.down.dtype, torch.float32)
        return (self.up.detach().to(wide) @ self.down.detach().to(wide)) * self.scale


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: LoRA in some of its linear slots.

    rank, alpha   the rank of its matrices A [rank, inputs] and B [outputs, rank], whose product is multiplied by
                  alpha / rank; a file may have others for some slots.
    dropout       the probability with which an input of A is dropped in training.
    slots         the dotted names of the linear maps that it changes.
    parameters    the number of trained parameters.
    """

    rank: int
    alpha: float
    dropout: float
    slots: tuple[str, ...] = field(repr=False)
    parameters: int
    frozen: tuple[str, ...] = field(repr=False)  #: parameters that were trained before it was added


class LoraLinear(Linear):
    """`x @ weight.T + bias + alpha / rank * (x @ down.T) @ up.T`, in the slot of a `Linear` whose parameters it holds.

    Only `down` [rank, inputs] and `up` [outputs, rank] are trained; the weight may be packed.  They have a dtype of
    their own, fp32 beside weights of fewer bits.
    """

    down: Tensor
    up: Tensor

    def __init__(self, base: Linear, down: Tensor, up: Tensor, alpha: float, dropout: float = 0.0) -> None:
        with torch.device("meta"):
            super().__init__(base.spec)
        for name, parameter in base.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.down, self.up = down, up
        self.alpha = alpha
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.takes_packed, self.dtype, self.device = base.takes_packed, base.dtype, base.device
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training and self.dropout is not None:
            x = self.dropout(x)
        low = ops.linear(x.to(self.down.dtype), self.down) * self.scale
        return out + ops.linear(low, self.up).to(out.dtype)

    @property
    def scale(self) -> float:
        """`alpha / rank`; setting it changes `alpha`, so that what is merged or saved follows."""
        return self.alpha / self.down.shape[0]

    @scale.setter
    def scale(self, value: float) -> None:
        self.alpha = value * self.down.shape[0]

    @property
    def factors(self) -> LoraFactors:
        return LoraFactors(self.down, self.up, self.alpha)

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """See `Linear.matrix`; the weight with what the factors add."""
        weight = dense(self.weight)
        return (weight.to(torch.promote_types(weight.dtype, torch.float32)) + self.factors.delta()).to(weight.dtype)

    @torch.no_grad()
    def matrix_rows(self, start: int, stop: int) -> Tensor:
        """See `Linear.matrix_rows`."""
        delta = LoraFactors(self.down, self.up[start:stop], self.alpha).delta()
        return rows(self.weight, start, stop) + delta.to(self.weight.dtype)

    def base(self) -> Linear:
        """The linear map without the factors; it holds the same parameters."""
        with torch.device("meta"):
            linear = Linear(self.spec)
        for name in ("weight", "bias"):
            if (parameter := self._parameters.get(name)) is not None:
                linear.register_parameter(name, parameter)
        linear.takes_packed, linear.dtype, linear.device = self.takes_packed, self.dtype, self.device
        return linear.train(self.training)
