"""LoRA (Hu et al. 2021): a linear map beside which a product of two small matrices is trained; an adapter of such maps
is added to a model and taken off again.  DoRA (Liu et al. 2024) trains the norms of the matrix's rows too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from triptych import ops
from triptych.arguments import checked
from triptych.errors import InputError
from .linear import Linear
from .packed_weight import dense, rows
from .transformer import Adapter, NamedWeights, Transformer


@dataclass(frozen=True, eq=False)
class LoraFactors:
    """The product that LoRA adds to one matrix: `scale * up @ down`.

    down             [rank, inputs]; the same tensor for several linear maps where they share it.
    up               [outputs, rank]
    alpha            the numerator of the scale.
    magnitude        [outputs], of DoRA: the norms that the rows of the sum are given; None leaves them as they are.
    rank_stabilized  the scale is `alpha / sqrt(rank)` (Kalajdzievski 2023), and otherwise `alpha / rank`.
    """

    down: Tensor
    up: Tensor
    alpha: float
    magnitude: Tensor | None = None
    rank_stabilized: bool = False

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / scale_divisor(self.rank, self.rank_stabilized)

    def delta(self) -> Tensor:
        """What is added to the matrix, [outputs, inputs], in fp32 or better."""
        wide = torch.promote_types(self.down.dtype, torch.float32)
        return (self.up.detach().to(wide) @ self.down.detach().to(wide)) * self.scale

    def merged(self, weight: Tensor) -> Tensor:
        """The matrix that computes what `weight` [outputs, inputs] does beside the factors, in fp32 or better."""
        delta = self.delta()
        total = weight.to(delta.device, torch.promote_types(weight.dtype, delta.dtype)) + delta
        if self.magnitude is not None:
            total *= (self.magnitude.detach() / row_norms(total))[:, None]
        return total


def scale_divisor(rank: int, stabilized: bool) -> float:
    """By what `alpha` is divided."""
    return math.sqrt(rank) if stabilized else rank


def row_norms(matrix: Tensor) -> Tensor:
    """The norm of each row of a matrix [outputs, inputs], above 0: a row of zeros has the smallest positive number."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms.clamp(min=torch.finfo(matrix.dtype).tiny)


class LoraLinear(Linear):
    """`x @ weight.T + bias + scale * (x @ down.T) @ up.T`, in the slot of a `Linear` whose parameters it holds.

    Only `down` [rank, inputs] and `up` [outputs, rank] are trained; the weight may be packed.  They have a dtype of
    their own, fp32 beside weights of fewer bits.
    """

    down: Tensor
    up: Tensor

    def __init__(self, base: Linear, factors: LoraFactors, dropout: float = 0.0) -> None:
        with torch.device("meta"):
            super().__init__(base.spec)
        _take_over(self, base)
        self.down, self.up = factors.down, factors.up
        self.alpha, self.rank_stabilized = factors.alpha, factors.rank_stabilized
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.active = True  # see `without_adapter`
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not self.active:
            return out
        if self.training and self.dropout is not None:
            x = self.dropout(x)
        low = self._low(x)
        return out + ops.linear(low, self.up).to(out.dtype)

    def _low(self, x: Tensor) -> Tensor:
        """The scaled products with `down`, [..., rank]; under autocast `linear` casts x itself."""
        mixed = torch.is_autocast_enabled(self.down.device.type)
        return ops.linear(x if mixed else x.to(self.down.dtype), self.down) * self.scale

    @property
    def scale(self) -> float:
        """See `LoraFactors`; setting it changes `alpha`, so that what is merged or saved follows."""
        return self.alpha / scale_divisor(self.down.shape[0], self.rank_stabilized)

    @scale.setter
    def scale(self, value: float) -> None:
        self.alpha = value * scale_divisor(self.down.shape[0], self.rank_stabilized)

    @property
    def factors(self) -> LoraFactors:
        return LoraFactors(self.down, self.up, self.alpha, rank_stabilized=self.rank_stabilized)

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """See `Linear.matrix`; the weight with what the factors add."""
        weight = dense(self.weight)
        return self.factors.merged(weight).to(weight.dtype)

    @torch.no_grad()
    def matrix_rows(self, start: int, stop: int) -> Tensor:
        """See `Linear.matrix_rows`."""
        factors, weight = self.factors, rows(self.weight, start, stop)
        magnitude = None if factors.magnitude is None else factors.magnitude[start:stop]
        return replace(factors, up=self.up[start:stop], magnitude=magnitude).merged(weight).to(weight.dtype)

    def base(self) -> Linear:
        """The linear map without the factors; it holds the same parameters."""
        with torch.device("meta"):
            linear = Linear(self.spec)
        _take_over(linear, self)
        return linear.train(self.training)


class DoraLinear(LoraLinear):
    """`x @ (magnitude * v / |v|).T + bias`, where v are the rows of `weight + scale * up @ down` (Liu et al. 2024,
    equation 5).  `magnitude` [outputs] is trained too; the norms |v| are a constant of each step (section 4.3).

    Dropout acts on what the adapter changes, as in PEFT: the output of the weight stays.
    """

    magnitude: Tensor

    def __init__(self, base: Linear, factors: LoraFactors, dropout: float = 0.0) -> None:
        super().__init__(base, factors, dropout)
        assert factors.magnitude is not None
        self.magnitude = factors.magnitude

    def forward(self, x: Tensor) -> Tensor:
        out = plain = Linear.forward(self, x)
        if not self.active:
            return out
        if self.training and self.dropout is not None:
            x = self.dropout(x)
            plain = Linear.forward(self, x)
        if self.bias is not None:
            plain = plain - self.bias
        low = self._low(x)
        share = self.magnitude / self.norms()
        return out + (plain * (share - 1) + ops.linear(low, self.up) * share).to(out.dtype)

    @torch.no_grad()
    def norms(self) -> Tensor:
        """The norms [outputs] of the rows that `magnitude` takes the place of."""
        with torch.autocast(self.down.device.type, enabled=False):
            return row_norms(super().factors.merged(dense(self.weight)))

    @property
    def factors(self) -> LoraFactors:
        return replace(super().factors, magnitude=self.magnitude)


def _take_over(linear: Linear, other: Linear) -> None:
    """Let a linear map hold the parameters of another of its spec, and stand where that does."""
    for name in linear.spec.tensors():
        linear.register_parameter(name, other._parameters[name])
    linear.takes_packed, linear.dtype, linear.device = other.takes_packed, other.dtype, other.device


@torch.no_grad()
def fresh_factors(
    module: Transformer, groups: Sequence[Sequence[str]], rank: int, alpha: float, seed: int = 0,
    *, dora: bool = False, rank_stabilized: bool = False,
) -> dict[str, LoraFactors]:  # fmt: skip
    """Factors for the slots of `groups`, those of a group with one `down`: `up` is 0, so that the model is as before,
    and `down` uniform within ±1/sqrt(inputs), from `seed` and the order of the slots; with `dora` with the norms of the
    rows that are there (on the meta device where those are, for `with_factors` to compute)."""
    random = torch.Generator().manual_seed(seed)
    factors: dict[str, LoraFactors] = {}
    for group in groups:
        inputs = _linear(module, group[0]).spec.inputs
        down = torch.empty(rank, inputs, dtype=torch.float32).uniform_(-(inputs**-0.5), inputs**-0.5, generator=random)
        for slot in group:
            up = down.new_zeros(_linear(module, slot).spec.outputs, rank)
            norms = row_norms(dense(_linear(module, slot).weight).float()) if dora else None
            factors[slot] = LoraFactors(down, up, alpha, norms, rank_stabilized)
    return factors


def with_factors(
    weights: NamedWeights, factors: Mapping[str, LoraFactors], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """`weights`, and then the parameters of `factors` in `dtype`; norms on the meta device are those of the rows of
    the weights that went before."""
    norms: dict[str, Tensor] = {}
    for name, value in weights:
        one = factors.get(name.removesuffix(".weight"))
        if one is not None and one.magnitude is not None and one.magnitude.is_meta:
            norms[name.removesuffix(".weight")] = row_norms(dense(value).float())
        yield name, value
    for slot, one in factors.items():
        for leaf, factor in (("down", one.down), ("up", one.up), ("magnitude", norms.get(slot, one.magnitude))):
            if factor is not None:
                yield f"{slot}.{leaf}", factor.detach().to(dtype, copy=True)


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
        if one.magnitude is not None and one.magnitude.shape != (spec.outputs,):
            raise InputError(f"{slot}: magnitude must be [{spec.outputs}]")
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
        norms = None if one.magnitude is None else parameter(one.magnitude)
        one = replace(one, down=parameter(one.down), up=parameter(one.up), magnitude=norms)
        kind = LoraLinear if norms is None else DoraLinear
        _put(module, slot, kind(_linear(module, slot), one, dropout))
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


@contextmanager
def without_adapter(module: Transformer) -> Iterator[None]:
    """Inside, the model computes as it does without its adapter.  Raises InputError where it has none."""
    slots = factors_of(module)
    parts = [part for name, part in module.named_modules() if name in slots and isinstance(part, LoraLinear)]
    for part in parts:
        part.active = False
    try:
        yield
    finally:
        for part in parts:
            part.active = True


def _linear(module: Transformer, slot: str) -> Linear:
    part = module.get_submodule(slot)
    assert isinstance(part, Linear), slot
    return part


def _put(module: Transformer, slot: str, part: Linear) -> None:
    path, _, leaf = slot.rpartition(".")
    module.get_submodule(path).add_module(leaf, part)
