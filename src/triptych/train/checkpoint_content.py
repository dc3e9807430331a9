"""What one training checkpoint holds, and the writing of its files by one process or by several together.

Rank 0 writes the weights, tensor by tensor, and what belongs to the model; the optimizer's state is written by the
process that has it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
from pydantic import Field
from torch import Tensor

from triptych.checkpoints import local_path, write_directory
from triptych.checkpoints.adapters import save_adapter
from triptych.checkpoints.load_weights import stored_config, stored_tensors
from triptych.checkpoints.save import DeferredTensor, written_in_order
from triptych.errors import CheckpointError, TriptychError
from triptych.nn import LoraFactors, Transformer
from triptych.text import Tokenizer
from .loop import StepRecord, Trainer
from .optimizer import Optimizer
from .ranks import Messages, Ranks
from .settings import Config, NonNegative, RecipeSection

WholeNumber = Annotated[int, Field(ge=0)]
TRAIN_STATE = "train_state"
STATE, OPTIMIZER = f"{TRAIN_STATE}/state.json", f"{TRAIN_STATE}/optimizer.safetensors"


class SavedState(RecipeSection):
    """`train_state/state.json`: the fields of `Progress`, and the recipe."""

    version: Literal[1] = 1
    step: WholeNumber
    elapsed: NonNegative
    tokens: WholeNumber
    history: list[StepRecord]
    recipe: Config


@dataclass(frozen=True, eq=False)
class CheckpointContent:
    """What a checkpoint of `step` holds.

    module           the trained model, of which no weight is read.
    forms            its weights on the meta device; the numbers are in `weights`, or of an adapter in `factors`.
    optimizer_state  what this process has of it.
    state            the text of `state.json`.
    """

    step: int
    ranks: Ranks
    module: Transformer
    forms: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    factors: Mapping[str, LoraFactors] | None
    optimizer: Optimizer
    optimizer_state: Mapping[str, Tensor]
    hf: Mapping[str, Any] | None
    tokenizer: Tokenizer | None
    recipe: Mapping[str, Any]
    files: Mapping[str, bytes]
    state: str

    @staticmethod
    def of(
        trainer: Trainer, hf: Mapping[str, Any] | None, tokenizer: Tokenizer | None, recipe: Mapping[str, Any],
        files: Mapping[str, bytes], *, copied: bool = False,
    ) -> CheckpointContent:  # fmt: skip
        """The present state of `trainer`, with `files` beside weights and tokenizer; `copied` where it is written while
        training goes on.  Every process makes this call."""
        ranks, module, state = trainer.ranks, trainer.module, trainer.optimizer.state()
        factors = None if module.lora_adapter is None else ranks.whole_factors(module)
        text = json.dumps(SavedState(**asdict(trainer.at), recipe=dict(recipe)).model_dump(), allow_nan=False)
        forms = {name: _on_meta(weight) for name, weight in module.named_parameters()}
        return CheckpointContent(
            trainer.at.step, ranks, module, forms, {} if factors else ranks.saved_weights(module, copied=copied),
            _copied_factors(factors) if factors and copied else factors, trainer.optimizer,
            {name: value.clone() for name, value in state.items()} if copied else state,
            hf, tokenizer, recipe, files, text,
        )  # fmt: skip

    def write(self, build: Path, messages: Messages) -> None:
        """Write the directory `build`.  Every process of `messages` makes this call.

        Raises CheckpointError, in every process.
        """
        beside = self._beside()
        if self.factors is not None:
            base, factors = local_path(self.recipe["model"]["path"]), self.factors
            messages.on_first(of_disk(build, lambda: save_adapter(build, self.module, base, beside, factors)))
        else:
            config = stored_config(self.module, self.hf)
            _write_together(messages, self._tensors(), lambda pairs: write_directory(build, pairs, config, beside))
        if self.ranks.count > 1:
            from .parallel.checkpoints import write_optimizer

            write_optimizer(messages, self.optimizer, self.optimizer_state, build / TRAIN_STATE)

    def _beside(self) -> dict[str, bytes | str]:
        """The files beside weights and config, of which an adapter has no tokenizer; the optimizer's state of one
        process is one of them."""
        words = {} if self.tokenizer is None else self.tokenizer.files()
        files: dict[str, bytes | str] = {} if self.factors is not None else {**words, **self.files}
        files[STATE] = self.state
        if self.ranks.count == 1 or not self.optimizer_state:
            files[OPTIMIZER] = safetensors.torch.save(dict(self.optimizer_state))
        return files

    def _tensors(self) -> Iterator[tuple[str, DeferredTensor]]:
        spec = self.module.spec
        likes, makers = stored_tensors(spec, self.hf, self.forms), stored_tensors(spec, self.hf, self.weights)
        return ((name, DeferredTensor(like(), makers[name])) for name, like in likes.items())


def _on_meta(weight: Tensor) -> Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def _copied_factors(factors: Mapping[str, LoraFactors]) -> dict[str, LoraFactors]:
    def copied(one: LoraFactors) -> LoraFactors:
        norms = None if one.magnitude is None else one.magnitude.detach().clone()
        return replace(one, down=downs[id(one.down)], up=one.up.detach().clone(), magnitude=norms)

    downs = {id(one.down): one.down.detach().clone() for one in factors.values()}  # those that are shared stay so
    return {slot: copied(one) for slot, one in factors.items()}


Pairs = Iterable[tuple[str, DeferredTensor]]


def _write_together(messages: Messages, tensors: Pairs, write: Callable[[Pairs], None]) -> None:
    """Let rank 0 write `tensors`, each of which all processes make together, in the order of the file.

    Raises the TriptychError or OSError of rank 0 in every process, as CheckpointError in the others.
    """
    pairs = list(tensors)
    left = deque(tensor for _, tensor in written_in_order(pairs))

    def next_of(tensor: DeferredTensor) -> Tensor:
        expected = left.popleft()
        assert expected is tensor
        return tensor.make()

    error: TriptychError | OSError | None = None
    if messages.index == 0:
        try:
            write([(name, replace(tensor, make=partial(next_of, tensor))) for name, tensor in pairs])
        except (TriptychError, OSError) as problem:
            error = problem
    while left:  # of the other processes all, of rank 0 what an error left
        left.popleft().make()

    def report() -> None:
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write a checkpoint: {error.strerror or error}")
        if error is not None:
            raise error

    messages.on_first(report)


def not_written(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write {path}: {error.strerror or error}; older checkpoints are intact")


def of_disk(path: Path, function: Callable[[], object]) -> Callable[[], None]:
    """`function`, whose OSError is a CheckpointError."""

    def run() -> None:
        try:
            function()
        except OSError as error:
            raise not_written(path, error) from None

    return run
