"""The optimizer state of several processes as safetensors files, by torch's distributed checkpoint (DCP).

Each process writes what it trains; any mesh, one process included, reads what it needs of these files.  DCP's own
formats hold pickled objects, so only its safetensors files are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from triptych.checkpoints import atomic_write, open_source
from triptych.errors import CheckpointError, first_line, shown
from ..optimizer import Optimizer
from ..ranks import Messages, Ranks

WRITTEN_AT_ONCE = 1 << 28  # bytes of the whole tensors of which each process writes its parts into one file
COUNTS = "counts.safetensors"  # how many updates AdamW made, a number for each parameter


def as_divided(parameter: Tensor, value: Tensor) -> Tensor:
    """A part of the optimizer's state as the part of a divided tensor that it is."""
    if not isinstance(parameter, DTensor) or not value.dim():
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def write(optimizer: Optimizer, state: Mapping[str, Tensor], directory: Path, messages: Messages) -> None:
    """Write the `state` of `optimizer` in all processes into the existing `directory`.  Every process of `messages`
    makes this call.

    Raises CheckpointError.
    """
    counts = {name: value for name, value in state.items() if not value.dim()}
    tensors: dict[str, Any] = {
        name: as_divided(optimizer.parameters[name.rpartition("/")[0]], value)
        for name, value in state.items()
        if value.dim()
    }
    try:
        if messages.index == 0 and counts:
            atomic_write(directory / COUNTS, safetensors.torch.save(counts))
        with _quiet():
            if tensors:
                writer = HuggingFaceStorageWriter(str(directory), _files(tensors), save_distributed=True)
                save(tensors, storage_writer=writer, process_group=messages.group)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(f"cannot write {directory}: {first_line(error)}; older checkpoints are intact") from None


def read(optimizer: Optimizer, directory: Path, ranks: Ranks) -> None:
    """Set the state of `optimizer` to what is in `directory`, of each process its part.

    Raises CheckpointError where it is of other parameters or of another optimizer.
    """
    counts: dict[str, Tensor] = {}
    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        source = open_source(file)
        counts |= {name: source.read(name) for name, info in source.infos.items() if not info.shape}
    with _quiet():
        reader = HuggingFaceStorageReader(str(directory))
        stored = reader.read_metadata().state_dict_metadata
    for name, tensor in stored.items():
        assert isinstance(tensor, TensorStorageMetadata)
        parameter = optimizer.parameters.get(name.rpartition("/")[0])
        if parameter is None or (name not in counts and tensor.size != parameter.shape):
            raise CheckpointError(f"optimizer state {shown(name)} {list(tensor.size)} fits no parameter of this model")
        if name not in counts:
            like = ranks.local(parameter)
            tensors[name] = as_divided(parameter, torch.empty_like(like, dtype=tensor.properties.dtype))
    try:
        with _quiet():
            if tensors:
                load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        raise CheckpointError(f"cannot read {directory}: {first_line(error)}") from None
    own = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in tensors.items()}
    optimizer.restore(counts | own, copied=False)


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file of each tensor, so that a file has few bytes: DCP has those of one twice in memory."""
    number = size = 0
    numbers = {}
    for name, tensor in tensors.items():
        if not number or size + tensor.nbytes > WRITTEN_AT_ONCE:
            number, size = number + 1, 0
        size += tensor.nbytes
        numbers[name] = number
    return numbers


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warnings of what is meant here: files without its own metadata, and one process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
