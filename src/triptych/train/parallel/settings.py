"""The table `[parallel]` of a recipe."""

from __future__ import annotations

from ..settings import Positive, RecipeSection


class ParallelSettings(RecipeSection):
    """Train in several processes, started by torchrun or by `--processes N` on one machine.

    The product of the three is the number of processes.  Losses, gradients and the order of the data are those of one
    process.
    """

    replicate: Positive = 1
    """Number of groups of processes that each have the whole model; they read different rows."""
    shard: Positive = 1
    """Number of processes among which weights, gradients and optimizer state are divided; they read different rows."""
    tensor: Positive = 1
    """Number of processes among which each layer is divided (heads, widths, vocabulary); they read the same rows."""

    @property
    def processes(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def holders(self) -> int:
        """The number of processes that have the weights together."""
        return self.shard * self.tensor

    @property
    def readers(self) -> int:
        """The number of processes that read different rows."""
        return self.replicate * self.shard
