"""LoRA (Hu et al. 2021): a linear map beside which a product of two small matrices is trained; an adapter of such maps
is added to a model and taken off again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triptych import ops
from triptych.arguments import checked
from triptych.errors import InputError
from .linear import Linear
from .packed_weight import dense, rows
from .transformer import Adapter, Transformer


@dataclass(frozen=True, eq=False)
class LoraFactors:
    """The product that LoRA adds to one matrix: `alpha / rank * up @ down`.

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
        _take_over(self, base)
        self.down, self.up = down, up
        self.alpha = alpha
        self.dropout = nn.Dropout(dropout) if dropout else None
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
        _take_over(linear, self)
        return linear.train(self.training)


def _take_over(linear: Linear, other: Linear) -> None:
    """Let a linear map hold the parameters of another of its spec, and stand where that does."""
    for name in linear.spec.tensors():
        linear.register_parameter(name, other._parameters[name])
    linear.takes_packed, linear.dtype, linear.device = other.takes_packed, other.dtype, other.device


def fresh_factors(
    module: Transformer, groups: Sequence[Sequence[str]], rank: int, alpha: float, seed: int = 0
) -> dict[str, LoraFactors]:
    """Factors for the slots of `groups`, those of a group with one `down`: `up` is 0, so that the model is as before,
    and `down` uniform within ±1/sqrt(inputs), from `seed` and the order of the slots."""
    random = torch.Generator().manual_seed(seed)
    factors: dict[str, LoraFactors] = {}
    for group in groups:
        inputs = _linear(module, group[0]).spec.inputs
        down = torch.empty(rank, inputs, dtype=torch.float32).uniform_(-(inputs**-0.5), inputs**-0.5, generator=random)
        for slot in group:
            factors[slot] = LoraFactors(down, down.new_zeros(_linear(module, slot).spec.outputs, rank), alpha)
    return factors


@checked
def attach(module: Transformer, factors: Mapping[str, LoraFactors], dropout: float = 0.0) -> Adapter:
    """Put `LoraLinear` into the slots that `factors` names, freeze everything else, and return what was added.

    Raises InputError where the model has an adapter.
    """
    if module.lora_adapter is not None:
        raise InputError("the model has an adapter already; merge_adapter() or remove_adapter() first")
    for slot, one in factors.items():
        spec = _linear(module, slot).spec
        if (*one.up.shape, *one.down.shape) != (spec.outputs, one.rank, one.rank, spec.inputs):
            raise InputError(f"{slot}: up must be [{spec.outputs}, rank] and down [rank, {spec.inputs}]")
    dtype = torch.promote_types(module.dtype, torch.float32)
    frozen = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    parameters: dict[int, nn.Parameter] = {}  # by the identity of the tensor, so that a shared one stays shared

    def parameter(value: Tensor) -> nn.Parameter:
        if id(value) not in parameters:
            parameters[id(value)] = nn.Parameter(value.detach().to(module.device, dtype, copy=True))
        return parameters[id(value)]

    for slot, one in factors.items():
        part = LoraLinear(_linear(module, slot), parameter(one.down), parameter(one.up), one.alpha, dropout)
        _put(module, slot, part)
    count = sum(value.numel() for value in parameters.values())
    (rank, alpha), _ = Counter((one.rank, one.alpha) for one in factors.values()).most_common(1)[0]
    module.lora_adapter = Adapter(rank, alpha, dropout, tuple(factors), count, frozen)
    return module.lora_adapter


def detach(module: Transformer) -> dict[str, LoraFactors]:
    """Put the plain linear maps back and train again what was trained before; the factors that stood there.

    Raises InputError where the model has no adapter.
    """
    factors = factors_of(module)
    assert module.lora_adapter is not None
    for slot in factors:
        part = module.get_submodule(slot)
        assert isinstance(part, LoraLinear)
        _put(module, slot, part.base())
    for name in module.lora_adapter.frozen:
        module.get_parameter(name).requires_grad_(True)
    module.lora_adapter = None
    return factors


@checked
def factors_of(module: Transformer) -> dict[str, LoraFactors]:
    """The factors by slot.  Raises InputError where the model has no adapter."""
    if module.lora_adapter is None:
        raise InputError("the model has no adapter; add_adapter() adds one, and load(..., adapter=DIR) reads one")
    parts = {slot: module.get_submodule(slot) for slot in module.lora_adapter.slots}
    return {slot: part.factors for slot, part in parts.items() if isinstance(part, LoraLinear)}


def _linear(module: Transformer, slot: str) -> Linear:
    part = module.get_submodule(slot)
    assert isinstance(part, Linear), slot
    return part


def _put(module: Transformer, slot: str, part: Linear) -> None:
    path, _, leaf = slot.rpartition(".")
    module.get_submodule(path).add_module(leaf, part)
