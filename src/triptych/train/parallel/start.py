"""The start of a run in several processes: the process group from torchrun's variables, and what must agree."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

import numpy as np
import torch

from triptych import machine
from triptych.errors import ConfigError, shown
from triptych.nn import Transformer
from triptych.spec.parts import AdditiveSpec, MoESpec
from ..data import Data
from ..precision import draws_globally, has_dropout
from ..ranks import Ranks, SharedError
from .settings import ParallelSettings

if TYPE_CHECKING:
    from ..loop import Progress
    from ..recipe import Recipe

RANK, WORLD = "RANK", "WORLD_SIZE"  # torchrun's variables


def own_rank() -> int:
    """The number of this process among those that train together, 0 for one that trains alone."""
    import torch.distributed as dist

    running = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if running else int(os.environ.get(RANK, "0"))


def processes_of_environment() -> int:
    """How many processes torchrun started, 1 for a process that it did not start."""
    return int(os.environ.get(WORLD, "1")) if RANK in os.environ else 1


def check_mesh(settings: ParallelSettings | None, processes: int) -> None:
    """Raises ConfigError where the mesh of a recipe is not of as many processes as there are."""
    if settings is None:
        if processes > 1:
            raise SharedError(
                f"{processes} processes were started, and the recipe has no table parallel; add it, for example "
                f"--set parallel.shard={processes}"
            )
        return
    if settings.processes != processes:
        product = f"replicate {settings.replicate} x shard {settings.shard} x tensor {settings.tensor}"
        raise SharedError(
            f"parallel has {product} = {settings.processes} processes, and {processes} "
            f"{'runs' if processes == 1 else 'run'}; start {settings.processes} (--processes "
            f"{settings.processes}, or torchrun --nproc-per-node), or change the table parallel"
        )


def check_started(settings: ParallelSettings | None) -> None:
    """`check_mesh` for the processes that run, before anything is read."""
    import torch.distributed as dist

    running = dist.is_available() and dist.is_initialized()
    check_mesh(settings, dist.get_world_size() if running else processes_of_environment())


def join(settings: ParallelSettings | None, device: str, *, clocked: bool) -> Ranks:
    """This process among those that train together; `clocked` where decisions follow the clock.

    Raises ConfigError where the mesh does not fit.
    """
    check_started(settings)
    if settings is None:
        return Ranks()
    if settings.processes == 1:
        alone = Ranks()
        alone.exact_muon = True
        return alone
    own = own_device(device)
    _initialize(own)
    from .mesh import MeshRanks

    return MeshRanks(settings, own, clocked=clocked)


def own_device(name: str) -> torch.device:
    """The device of this process where a recipe asks for `name`: of GPUs that of its number on the machine."""
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    device = machine.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _initialize(device: torch.device) -> None:
    import atexit

    import torch.distributed as dist

    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    try:
        dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the processes do not reach one another: {reason}; look at MASTER_ADDR") from None
    atexit.register(_leave)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def check_agreement(ranks: Ranks, recipe: Mapping[str, object], facts: Mapping[str, object]) -> None:
    """Raises ConfigError, in every process, where a recipe or one of the `facts` of a process is not that of rank 0."""
    if ranks.count == 1:
        return
    own = {"triptych": _installed_version(), "torch": torch.__version__, **dict(_flat(recipe)), **facts}
    first, *others = (json.loads(text) for text in ranks.texts(json.dumps(own, default=str)))
    for rank, other in enumerate(others, 1):
        for name in (*first, *(other.keys() - first.keys())):
            here, there = first.get(name), other.get(name)
            if here != there:
                raise SharedError(
                    f"rank {rank} differs from rank 0 in {name}: {shown(there)} and {shown(here)}; give every process "
                    "the same recipe, data and versions"
                )


def _installed_version() -> str:
    """The version of this library, "" where it runs from its source alone."""
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return ""


def run_facts(data: Data, recipe: Recipe, ranks: Ranks, at: Progress | None) -> dict[str, object]:
    """What must be the same in every process beside its recipe: the data, the weights and the step, as digests."""
    if recipe.parallel is None or recipe.parallel.processes == 1:
        return {}
    texts = hashlib.sha256(np.ascontiguousarray(data.targets()).tobytes())
    for example in data.draw(recipe.run.seed, 0, recipe.run.rows):
        texts.update(np.ascontiguousarray(example.ids).tobytes())
    step = 0 if at is None else at.step
    return {"the data": texts.hexdigest(), "the weights": ranks.weights_digest, "the step": step}


def check_parallel(recipe: Recipe, module: Transformer) -> None:
    """Raises ConfigError for what cannot be trained in several processes."""
    if recipe.parallel is None or recipe.parallel.processes == 1:
        return
    for problem in _problems(recipe, recipe.parallel, module):
        raise SharedError(problem)


def _problems(recipe: Recipe, settings: ParallelSettings, module: Transformer) -> Iterator[str]:
    """Why a recipe and its model cannot be trained in several processes, and what to do."""
    run, rows = recipe.run, recipe.run.rows // recipe.run.accumulate
    if rows < settings.readers:
        yield (
            f"parallel has {settings.readers} processes that read different rows, and a micro-batch {rows}; raise "
            f"run.rows to at least {settings.readers * run.accumulate}"
        )
    if recipe.adapter is not None and recipe.adapter.dropout:
        yield "adapter.dropout is drawn in sequence, which several processes cannot do; set it to 0"
    elif draws_globally(module):
        yield "a part of the model draws dropout from torch's global generator, which several processes cannot share"
    if run.compile and (settings.tensor > 1 or has_dropout(module)):
        yield "run.compile is for processes with parallel.tensor = 1 and models without dropout; leave it out"
    if settings.tensor > 1 and recipe.adapter is not None and recipe.adapter.dora:
        yield "adapter.dora needs whole rows of each matrix; set parallel.tensor = 1"
    if settings.tensor > 1 and recipe.distill is not None:
        yield "distill compares whole rows of logits, which parallel.tensor divides; set parallel.tensor = 1"
    if settings.tensor > 1 and module.has_packed_weights:
        yield "packed weights are not divided; set parallel.tensor = 1, or model.dequantize = true"
    for name, part in module.spec.walk():
        if isinstance(part, AdditiveSpec):
            yield f"{name} scores keys by weights that are read before its layer; train it in one process"
        if isinstance(part, MoESpec) and part.expert.dropout:
            yield f"{name} has dropout inside its experts, which several processes cannot draw; set it to 0"


def _flat(tables: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """The values of nested tables by dotted key."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
