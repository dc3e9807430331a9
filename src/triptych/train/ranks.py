"""`Ranks`: the processes that train one model together, as the loop sees them.  The class here is one process alone,
whose every answer is immediate; that of several is `triptych.train.parallel.mesh.MeshRanks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triptych.checkpoints.load_weights import DetachedWeights
from triptych.errors import ConfigError, TriptychError
from triptych.nn import LoraFactors, NamedWeights, Transformer, factors_of, fill
from triptych.ops import RowNoise
from .objectives import Example, TrainingBatch, collate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SharedError(ConfigError):
    """An error that every process of a run raises; rank 0 reports it."""


class LostProcessError(TriptychError):
    """A process of a run ended before the run did."""


class Messages:
    """What processes tell one another; here one process alone.

    index, count   the number of this process, and how many there are.
    group          over which they talk, None for the group of all.
    """

    index: int = 0
    count: int = 1
    group: ProcessGroup | None = None

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process."""
        return flag

    def texts(self, text: str) -> list[str]:
        """The text that each process gives."""
        return [text]

    def on_first(self, function: Callable[[], object]) -> None:
        """Call `function` in rank 0 while the others wait.  Raises its TriptychError in every process."""
        function()


class Ranks(Messages):
    """One process that trains alone.

    exact_muon      Muon orthogonalizes in fp32, whose result does not depend on how a gradient was summed.
    weights_digest  of a thousand numbers of each weight that was distributed, to compare processes.
    """

    exact_muon: bool = False
    weights_digest: str = ""

    def watch(self) -> AbstractContextManager[object]:
        """Inside, what a lost process causes in the others is a LostProcessError."""
        return nullcontext()

    def distribute(
        self, module: Transformer, weights: NamedWeights | None = None, device: torch.device | None = None
    ) -> None:
        """Leave to each process its part of the weights, in place: of a module on the meta device its part of
        `weights`, which is read or drawn tensor by tensor.  One process alone uses `device`."""
        if weights is not None:
            fill(module, weights)
        if device is not None:
            module.to(device)

    def saved_weights(self, module: Transformer, *, copied: bool = False) -> Mapping[str, Tensor]:
        """Whole weights by name, of which rank 0 has the numbers, for `for_saving` to read one after another; `copied`
        where the module is trained meanwhile."""
        weights = DetachedWeights(module)
        return {name: weight.clone() for name, weight in weights.items()} if copied else weights

    def whole_factors(self, module: Transformer) -> Mapping[str, LoraFactors]:
        """The factors of an adapter, each as one tensor; those that were shared stay so."""
        return factors_of(module)

    @property
    def for_saving(self) -> Messages:
        """The messages of a thread that writes a checkpoint while the others train."""
        return self

    def batch(self, examples: Sequence[Example], numbers: Sequence[int], device: torch.device) -> TrainingBatch:
        """This process' share of a micro-batch, the rows `numbers` of a step.

        Raises InputError where none of them is trained.
        """
        return collate([examples[i] for i in numbers], device).numbered(numbers)

    def noise(self, seed: int, rows: Sequence[int]) -> RowNoise:
        """What dropout draws from, for rows of these numbers in a step whose seed is `seed`."""
        return RowNoise(seed, rows)

    def gathered(self, vectors: Tensor) -> Tensor:
        """Rows [M, D] of all processes that read different rows, in their order, with gradients."""
        return vectors

    def rows_before(self, count: int) -> int:
        """How many rows of those that `gathered` joins come before the `count` rows of this process."""
        return 0

    def sums(self, *values: float) -> Sequence[float]:
        """Each value summed over the processes that read different rows."""
        return values

    def clock(self) -> float:
        """Seconds since some moment, the same in every process where decisions follow it."""
        return time.monotonic()

    def before_backward(self, module: Transformer, *, last: bool) -> None:
        """To be called before each backward pass of a step; `last` is that after which gradients are summed."""

    def after_backward(self, module: Transformer) -> None:
        """To be called once a step's gradients are there."""

    def after_evaluation(self, module: Transformer) -> None:
        """To be called after forward passes that no backward pass follows."""

    def local(self, parameter: Tensor) -> Tensor:
        """The part of a parameter that this process trains, which shares its memory."""
        return parameter

    def localize_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Let the parts of `local` have the gradients of their parameters."""

    def shape(self, part: Tensor) -> torch.Size:
        """The shape of the parameter of which `part` is what `local` gives."""
        return part.shape

    def sharing_key(self, part: Tensor) -> Hashable:
        """Equal for the parts of matrices that `map_matrices` takes together."""
        return part.shape

    def map_matrices(
        self, parameters: Sequence[Tensor], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """`function` of whole matrices [n, rows, columns], of which this process has `parts`, those of `parameters`;
        its parts of the result."""
        return list(function(torch.stack(list(parts))))

    def gradient_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The global norm [] of the gradients."""
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
