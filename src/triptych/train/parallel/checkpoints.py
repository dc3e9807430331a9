"""A checkpoint of several processes: the model by rank 0, tensor by tensor, and the optimizer by all.

It is built beside its place and renamed once every file is written, as that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from triptych.errors import CheckpointError, TriptychError
from triptych.nn import LoraFactors, Transformer, assign, attach, empty, factors_of, finish_loading
from triptych.nn.packed_weight import gathered
from ..optimizer import Optimizer
from ..ranks import Ranks, SharedError
from . import optimizer_files

WRITTEN_AT_ONCE = 1 << 28  # bytes of weights in a file: rank 0 has one file's in memory


def write_tensors(
    ranks: Ranks, tensors: Iterable[tuple[str, Tensor]], write: Callable[[Iterator[tuple[str, Tensor]]], None]
) -> None:
    """Let rank 0 write `tensors` while all processes gather them, one after another.

    Raises the TriptychError or OSError of rank 0 in every process, as CheckpointError in the others.
    """
    pairs = iter(tensors)

    def first() -> None:
        try:
            write(pairs)
        except OSError as error:
            raise CheckpointError(f"cannot write a checkpoint: {error.strerror or error}") from None

    error: TriptychError | None = None
    if ranks.index == 0:
        try:
            first()
        except TriptychError as problem:
            error = problem
    for _ in pairs:  # of the other processes all, of rank 0 what an error left
        pass

    def report() -> None:
        if error is not None:
            raise error

    ranks.on_first(report)


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


def write_optimizer(ranks: Ranks, optimizer: Optimizer, directory: Path) -> None:
    """Write the optimizer's files into `directory`, which rank 0 has made.  Raises CheckpointError in every process."""
    problem = ""
    try:
        optimizer_files.write(optimizer, directory, ranks)
    except CheckpointError as error:
        problem = str(error)
    if texts := [text for text in ranks.texts(problem) if text]:
        raise CheckpointError(texts[0]) if ranks.index == 0 else SharedError(texts[0])


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
