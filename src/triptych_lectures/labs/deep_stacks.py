"""Deep stacks that carry the symbol they read to their head, for the labs about norms and first weights."""

from __future__ import annotations

from dataclasses import dataclass

from triptych import nn
from triptych.spec import LayerNormSpec, NormsSpec, SinusoidalSpec
from triptych_lectures.labs.lab import Lab, size
from triptych_lectures.labs.small import block, decoder
from triptych_lectures.labs.trained import Places, TrainingBudget, redraw

HEADS = 4
LEARNED = 0.5  # a stack was trained if its loss went at least half the way from a guess to the best one
PRE, POST = "pre-norm", "post-norm"


@dataclass(frozen=True)
class StackSizes(Lab):
    """What a run of a lab can change: the stacks, their task and their training."""

    width: int = size(32, f"width of the residual stream, a multiple of {HEADS}", multiple=HEADS)
    symbols: int = size(16, "different symbols, two or more", least=2)
    length: int = size(16, "symbols of a row")
    steps: int = size(140, "training steps")
    rows: int = size(8, "rows of a step")
    rate: float = size(3e-3, "learning rate of AdamW")

    @property
    def task(self) -> Places:
        """To name the symbol at hand, which needs no attention."""
        return Places(self.symbols, self.length, (0,))

    def budget(self, warmup: float = 0.0) -> TrainingBudget:
        return TrainingBudget(self.steps, self.rows, self.rate, warmup)


def stack(
    sizes: StackSizes, placement: str, depth: int, seed: int, std: float, *, written: float | None = None
) -> nn.Transformer:
    """A decoder of `depth` blocks with norms placed as `placement` says.

    Its matrices are normal with standard deviation `std`, those that write to the residual stream with `written`, where
    it is given.
    """
    norm = LayerNormSpec(width=sizes.width)
    norms = NormsSpec(pre=norm) if placement == PRE else NormsSpec(post=norm)
    blocks = [block(sizes.width, HEADS, 2 * sizes.width, norms=norms)] * depth
    positions = SinusoidalSpec(width=sizes.width)
    module = nn.new(decoder(sizes.symbols, blocks, embedded=positions, final_norm=norms.pre), seed)
    redraw(module, seed, std, written=written)
    return module
