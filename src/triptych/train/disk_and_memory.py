"""Checks that the checkpoints of a run fit on the disk, and a training step in memory.

The memory is estimated from the recipe before any data are read, and from the rows of the first step before it is
taken.  Only what a step certainly keeps is counted (`triptych.count.TrainingMemory`), so that no run is refused that
would fit.
"""

from __future__ import annotations

import math
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from triptych import machine
from triptych.checkpoints.adapter_targets import slot_groups
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import stores_packed
from triptych.count import TrainingMemory, TrainingRow, activation_bytes, block_matrices, count
from triptych.count.training import size
from triptych.errors import CheckpointError, InputError, TriptychError
from triptych.nn.packed_weight import PackedWeight
from triptych.spec import LinearSpec, ModelSpec
from triptych.spec.division import own_part
from .loop import Trainer
from .objectives import TrainingBatch
from .parallel.settings import ParallelSettings
from .precision import chosen
from .recipe import Recipe
from .records import SUFFIXES
from .settings import RunSettings
from .sources import SHAKESPEARE


@dataclass(frozen=True)
class DiskSpace:
    """Of the run in `directory`: bytes of one checkpoint, how many of them are on the disk at most at one time, their
    bytes together, and the bytes that are free for them."""

    directory: Path
    checkpoint_bytes: int
    count: int
    most: int
    free: int

    @staticmethod
    def of(trainer: Trainer, directory: Path, keep: int, old: int) -> DiskSpace:
        """Before `trainer` runs: each checkpoint is written while the newest `keep` are still there.

        `old` bytes in the directory are of checkpoints that are deleted for new ones.
        """
        run, optimizer = trainer.settings, trainer.optimizer
        checkpoint_bytes = optimizer.weight_bytes + optimizer.state_bytes
        written = math.ceil(1.0 / run.save_every) if run.save_every else 0
        if run.steps is not None:
            written = min(written, run.steps)
        first = trainer.at.step == 0 and written <= keep  # the checkpoint before the first step has no optimizer state
        full = min(written, keep + 1)
        most = full * checkpoint_bytes + first * optimizer.weight_bytes
        existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
        return DiskSpace(directory, checkpoint_bytes, full + first, most, shutil.disk_usage(existing).free + old)

    def check(self) -> None:
        """Raises CheckpointError where the disk cannot hold the checkpoints."""
        if self.most > self.free:
            raise CheckpointError(
                f"{self}: too little; free some, give --out on another disk, or write fewer with run.save_every = 1"
            )

    def __str__(self) -> str:
        return (
            f"checkpoints in {self.directory}: {self.count} of {size(self.checkpoint_bytes)} at most at one time, "
            f"{size(self.most)} in all; {size(self.free)} free"
        )


OF_ROWS = ("causal", "masked")  # the objectives whose steps have all the tokens that run.rows and run.length allow


def check_recipe_memory(recipe: Recipe, new_spec: Callable[[Recipe], ModelSpec]) -> None:
    """Refuse a recipe of which a step does not fit into the memory that is free, before its data are read.

    What only the data decide is taken as small as it can be: the vocabulary of a new tokenizer and, of objectives other
    than `OF_ROWS`, the lengths of rows.  `new_spec` gives the spec of a new model with the smallest vocabulary.  Raises
    InputError with the estimate and what to change.
    """
    free = machine.free_on(machine.device(recipe.run.device))
    try:
        header, packed = None if recipe.base is None else read_header(recipe.base.path), None
        if header is not None and header.source is not None and stores_packed(header.source):
            packed = sum(info.nbytes for info in header.source.infos.values())
        at_parts = partial(_memory_of_process, recipe, new_spec(recipe) if header is None else header.spec, packed)
        memory = at_parts(recipe.run.accumulate)
    except TriptychError:
        return  # what reads the data and the model says what is wrong with them
    if free is not None and memory.peak > free:
        parts = range(recipe.run.accumulate, recipe.run.rows + 1)
        first = bisect_left(parts, True, key=lambda number: at_parts(number).peak <= free)
        raise _refusal(memory, memory.peak, free, recipe.run, parts[first] if first < len(parts) else None)


def _memory_of_process(recipe: Recipe, spec: ModelSpec, packed: int | None, parts: int) -> TrainingMemory:
    """`recipe_memory` of one of the processes of the recipe's mesh."""
    mesh = recipe.parallel or ParallelSettings()
    rows = min(parts * mesh.readers, recipe.run.rows)
    memory, shard = recipe_memory(recipe, own_part(spec, mesh.tensor), packed, rows), mesh.shard
    weights, gradients, state = memory.weights, memory.gradients, memory.optimizer_state
    return replace(memory, weights=weights // shard, gradients=gradients // shard, optimizer_state=state // shard)


def check_step_memory(trainer: Trainer) -> None:
    """Refuse a run whose next step does not fit into the memory that is free, before it is taken.

    Raises InputError with the estimate and what to change.
    """
    memory, free = next_step_memory(trainer), machine.free_on(trainer.device)
    there = memory.weights + sum(tensor.nbytes for tensor in trainer.optimizer.state().values())
    needed = memory.peak - there
    if trainer.settings.save_in_background:
        copied = memory.gradients if trainer.module.lora_adapter is not None else memory.weights
        needed += copied + memory.optimizer_state
    if free is not None and needed > free:
        raise _refusal(memory, needed, free, trainer.settings, None)


def next_step_memory(trainer: Trainer) -> TrainingMemory:
    """The memory that the next step of a run needs, by the rows that it will have."""
    batches = trainer.next_batches()
    activations, logits = max((_backward_bytes(trainer, batch) for batch in batches), key=sum)
    local, optimizer = trainer.ranks.local, trainer.optimizer
    stored = (p.blocks if isinstance(p, PackedWeight) else local(p) for p in trainer.module.parameters())
    weights = sum(tensor.nbytes for tensor in stored)
    gradients = sum(local(p).nbytes for p in optimizer.parameters.values())
    whole = sum(p.nbytes for p in optimizer.parameters.values())  # of all processes
    state = optimizer.state_bytes * gradients // max(whole, 1)
    return TrainingMemory(weights, gradients, state, activations, logits, len(batches) > 1)


def _backward_bytes(trainer: Trainer, batch: TrainingBatch) -> tuple[int, int]:
    """The bytes that the backward of a batch needs, and those of its logits."""
    module, rows = trainer.module, batch.rows
    sources = (0,) * len(rows) if batch.source is None else batch.source[1].lengths
    trained = torch.bincount(rows.row_of(batch.at.device)[batch.at], minlength=len(rows)).tolist()
    sizes = Counter(map(TrainingRow, rows.lengths, sources, trained))
    adapted = None if module.lora_adapter is None else frozenset(module.lora_adapter.slots)
    bf16 = trainer.precision == "bf16"
    return _activations(module.spec, sizes, adapted, recompute=trainer.settings.recompute, bf16=bf16)


def _activations(
    spec: ModelSpec, rows: Counter[TrainingRow], adapted: frozenset[str] | None, *, recompute: bool, bf16: bool
) -> tuple[int, int]:
    """`activation_bytes`, with the copies of weights in bf16; none of blocks where an adapter (`adapted`) leaves some
    linear maps out, since those before its first map keep nothing."""
    activations, logits = activation_bytes(spec, rows, recompute=recompute, bf16=bf16)
    if adapted is not None:
        maps = {name for name, part in spec.walk() if isinstance(part, LinearSpec) and ".blocks." in name}
        return (activations if maps <= adapted else 0), logits
    return activations + (2 * block_matrices(spec) if bf16 and not recompute and rows else 0), logits


def recipe_memory(recipe: Recipe, spec: ModelSpec, packed: int | None, parts: int) -> TrainingMemory:
    """The least that a step of a model `spec` needs in so many micro-batches, before its data are read; `packed` are
    the bytes of packed weights that an adapter leaves so."""
    run = recipe.run
    length, number, path = 1, run.rows // parts, Path(recipe.data.path)
    one_document = recipe.data.path == SHAKESPEARE or (path.is_file() and path.suffix.lower() not in SUFFIXES)
    if recipe.objective.name in OF_ROWS and one_document:  # every row has as many tokens as it may have
        length, number = run.length, -(-run.rows // parts)
    elif recipe.objective.name in OF_ROWS:  # rows end where documents do
        number = run.rows * run.length // parts
    trained = None if recipe.objective.name == "causal" else 0
    rows = Counter({TrainingRow(length, int(spec.layout == "encoder-decoder"), trained): number})
    memory, adapted = count(spec).training_memory(1, optimizer=recipe.optimizer.name), None
    if recipe.adapter is not None and recipe.base is not None:
        maps = {name: part for name, part in spec.walk() if isinstance(part, LinearSpec)}
        groups = slot_groups(spec, recipe.adapter.targets)
        adapted = frozenset(chain(*groups))
        number = sum(maps[group[0]].inputs + sum(maps[slot].outputs for slot in group) for group in groups)
        gradients = 4 * recipe.adapter.rank * number
        weights = memory.weights if packed is None or recipe.base.dequantize else packed
        memory = replace(memory, weights=weights, gradients=gradients, optimizer_state=2 * gradients)
    width = max(stack.width for stack in spec.stacks.values())
    bf16 = chosen(run.precision, machine.device(run.device), width) == "bf16"
    activations, logits = _activations(spec, rows, adapted, recompute=run.recompute, bf16=bf16)
    logits = logits if recipe.objective.name == "causal" else 0  # of others the data or another head decide
    return replace(memory, activations=activations, logits=logits, accumulated=parts > 1)


def _refusal(memory: TrainingMemory, needed: int, free: int, run: RunSettings, parts: int | None) -> InputError:
    """The error of a step that needs `needed` bytes more than are in memory; in `parts` micro-batches it would fit."""
    names = ("weights", "gradients", "optimizer_state", "activations", "logits")
    listed = ", ".join(f"{name.replace('_', ' ')} {size(getattr(memory, name))}" for name in names)
    there = memory.peak - needed
    if memory.weights + memory.optimizer_state + memory.gradients - there > free:
        change = "take a smaller model, train an adapter beside an existing one, or free some memory"
    elif parts is not None:
        change = f"compute it in {parts:,} parts (--set run.accumulate={parts}), or lower run.rows or run.length"
    else:
        change = f"lower run.length or run.rows (--set run.rows={max(1, run.rows // 2)})"
        change += f", or raise run.accumulate (--set run.accumulate={run.rows})" if run.accumulate < run.rows else ""
    step = f"a step of {run.rows:,} rows of at most {run.length:,} tokens"
    return InputError(f"{step} needs {size(needed)} of memory, and {size(free)} are free ({listed}); {change}")
