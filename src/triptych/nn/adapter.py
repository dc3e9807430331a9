"""An adapter added to a model and taken off again: which parts stand in the slots, and what is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from triptych.errors import InputError
from triptych.nn.linear import Linear
from triptych.nn.lora import Adapter, LoraFactors, LoraLinear
from triptych.nn.model import Transformer


def fresh_factors(
    module: Transformer, groups: Sequence[Sequence[str]], rank: int, alpha: float, seed: int = 0
) -> dict[str, LoraFactors]:
    """Factors for the slots of `groups`, those of a group with one `down`: `up` is 0, so that the model is as before,
    and `down` uniform within ±1/sqrt(inputs), from `seed` and the order of the slots."""
    random = torch.Generator().manual_seed(seed)
    factors: dict[str, LoraFactors] = {}
    for group in groups:
        inputs = _linear(module, group[0]).spec.inputs
        down = torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=random)
        for slot in group:
            factors[slot] = LoraFactors(down, torch.zeros(_linear(module, slot).spec.outputs, rank), alpha)
    return factors


def attach(module: Transformer, factors: Mapping[str, LoraFactors], dropout: float = 0.0) -> Adapter:
    """Put `LoraLinear` into the slots that `factors` names, freeze everything else, and return what was added.

    Raises InputError where the model has an adapter.
    """
    if module.lora_adapter is not None:
        raise InputError("the model has an adapter already; merge_adapter() or remove_adapter() first")
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
