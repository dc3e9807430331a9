"""What checkpoints of several processes have beside those of one: the optimizer by all, and whole copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from triptych.errors import CheckpointError
from triptych.nn import LoraFactors, Transformer, assign, attach, empty, factors_of, finish_loading
from triptych.nn.packed_weight import gathered
from ..optimizer import Optimizer
from ..ranks import Messages, SharedError
from . import optimizer_files


def whole_factors(module: Transformer) -> Mapping[str, LoraFactors]:
    """The factors of an adapter, each as one tensor; those that were shared stay so.  Every process makes this call."""
    whole: dict[int, Tensor] = {}

    def gather(part: Tensor) -> Tensor:
        if id(part) not in whole:
            whole[id(part)] = gathered(part.detach())
        return whole[id(part)]

    def gathered_factors(one: LoraFactors) -> LoraFactors:
        magnitude = None if one.magnitude is None else gather(one.magnitude)
        return replace(one, down=gather(one.down), up=gather(one.up), magnitude=magnitude)

    return {slot: gathered_factors(one) for slot, one in factors_of(module).items()}


def write_optimizer(messages: Messages, optimizer: Optimizer, state: Mapping[str, Tensor], directory: Path) -> None:
    """Write the files of the optimizer's `state`, of which each process has its part, into `directory`, which rank 0
    has made.  Raises CheckpointError in every process."""
    problem = ""
    try:
        optimizer_files.write(optimizer, state, directory, messages)
    except CheckpointError as error:
        problem = str(error)
    if texts := [text for text in messages.texts(problem) if text]:
        raise CheckpointError(texts[0]) if messages.index == 0 else SharedError(texts[0])


def whole_module(module: Transformer) -> Transformer:
    """A copy of the divided `module` with whole weights.  Every process makes this call."""
    whole = empty(module.spec)
    for name in module.spec.shapes():
        if name not in module.spec.ties:
            assign(whole, name, gathered(module.get_parameter(name).detach()).clone())
    whole = finish_loading(whole)
    if module.lora_adapter is not None:
        attach(whole, whole_factors(module), module.lora_adapter.dropout)
    return whole
