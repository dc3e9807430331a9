"""Dropout at several places of a block, trained over depth (Srivastava et al. 2014; Vaswani et al. 2017; lecture L2).

The lecture has X' = X + Dropout(A) and Y = X' + Dropout(F), and says that the place decides how stable training is.
Each stack learns to name the symbol one place back, with dropout at one place, and is tested without any.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch import nn as torch_nn

from triptych import nn, ops
from triptych.page import TableSection
from triptych.spec import BlockSpec, ModelSpec, RMSNormSpec, SinusoidalSpec
from triptych.train import collate
from triptych.train.objectives import final
from . import generated_tasks as tasks
from .generated_tasks import GeneratedTask, Places, ShuffledTask, TrainedRun, TrainingBudget
from .lab import Check, Clauses, Ints, Lab, LabResult, Sections, Setup, clause, size
from .small_models import block, decoder

NONE, WEIGHTS, OUTPUTS, EMBEDDINGS, STREAM = (
    "none", "attention weights", "sublayers' outputs", "embeddings", "residual stream",
)  # fmt: skip
USUAL = (WEIGHTS, OUTPUTS, EMBEDDINGS)
PLACES = (NONE, *USUAL, STREAM)
HEADS = 4


class StreamDropout(BlockSpec):
    """A block whose dropout is on the residual stream itself: on each sum, and not on what is added."""


class StreamDropoutBlock(nn.Block, of=StreamDropout):
    def forward(self, x: Tensor, ctx: nn.Context, layer: int, taps: nn.Taps) -> Tensor:
        assert self.mlp is not None
        drop = partial(ops.dropout, rate=self.spec.dropout, training=self.training, random=ctx.random)
        x = drop(x + self.attn(self.attn_norm.pre(x), ctx.own[layer], layer, taps.at("attn")))
        return drop(x + self.mlp(self.mlp_norm.pre(x), ctx, taps.at("mlp")))


class DroppedStack(NamedTuple):
    """A stack after training: its run, the share of answers right without dropout, and before training the cosine of
    two passes of one row with different draws of what is dropped."""

    run: TrainedRun
    right: float
    cosine: float


Stacks = dict[tuple[str, int], DroppedStack]


class DropoutPlacesLab(Lab):
    name = "dropout-places"

    depths: Ints = size((2, 12), "layers of the stacks, ascending", values=2, ascending=True, full=(2, 6, 12, 24))
    dropped: float = size(0.1, "probability with which a number is dropped, below 1", most=0.99)
    width: int = size(32, f"width of the residual stream, a multiple of {HEADS}", multiple=HEADS)
    symbols: int = size(16, "different symbols, two or more", least=2)
    length: int = size(16, "symbols of a row, two or more", least=2)
    steps: int = size(150, "training steps")
    rows: int = size(8, "rows of a step")
    rate: float = size(3e-3, "learning rate of AdamW")
    tested: int = size(64, "rows that the share of right answers is taken from")

    @property
    def task(self) -> Places:
        """To name the symbol one place back."""
        return Places(self.symbols, self.length, (1,))

    def run(self, setup: Setup) -> LabResult:
        stacks: Stacks = {}
        for depth, place in product(self.depths, PLACES):
            setup.progress(f"{depth} layers, dropout: {place}: {self.steps} steps")
            stacks[place, depth] = self._trained(place, depth, self.task, setup.seed)
        setup.progress("shuffled answers")
        shuffled = self._trained(NONE, self.depths[0], ShuffledTask(self.task), setup.seed)
        same = self._apart(setup.seed)
        return self.result(self._conclusion(stacks, shuffled.right, same), self._sections(stacks))

    def _conclusion(self, stacks: Stacks, shuffled: float, same: float) -> Clauses:
        shallow, deep = self.depths[0], self.depths[-1]
        none, stream, early = (stacks[own] for own in ((NONE, deep), (STREAM, deep), (STREAM, shallow)))
        cost = {place: none.right - stacks[place, deep].right for place in USUAL}
        most, closer = max(cost.values(), key=abs), stacks[OUTPUTS, deep].cosine - stream.cosine
        apart = max(stacks[place, deep].cosine for place in USUAL)
        shown = ", ".join(f"{place} {stacks[place, deep].right:.0%}" for place in USUAL)
        yield clause(
            f"In {deep} layers dropout of {self.dropped:g} at the usual places changes little: {shown} right, and"
            f" {none.right:.0%} without dropout.",
            Check(f"no dropout, {deep} layers: right", none.right, least=0.9),
            Check(f"usual places, {deep} layers: right less than without, furthest from 0", most, -0.1, 0.1),
            Check("usual places: cosine of two passes of a new stack, the largest", apart, most=1 - 1e-3),
            instead="The usual places were not alike or dropped nothing, or the task was not learned",
        )
        yield clause(
            "What must not be dropped is the residual stream itself, the sum in place of what is added:"
            f" {stream.right:.0%} right with {deep} layers, {early.right:.0%} with {shallow}. Its zeros multiply"
            f" over {2 * deep} sums: two passes of one row through a new stack end with a cosine of"
            f" {stream.cosine:.2f}, with dropout on the outputs {stacks[OUTPUTS, deep].cosine:.2f}.",
            Check(f"residual stream, {deep} layers: right less than without", none.right - stream.right, 0.25),
            Check(f"control: residual stream, {shallow} layers: right", early.right, least=0.5),
            Check("cosine of two passes: outputs, more than the stream", closer, least=0.25),
            instead="That depth does not bear dropout on the stream was not seen",
        )
        yield clause(
            f"Controls: without dropout the changed block computes what the usual one does; trained on shuffled"
            f" answers {shuffled:.0%} are right, by chance.",
            Check("control: logits of the two blocks without dropout, largest difference", same, most=1e-4),
            Check("control: right, trained on shuffled answers", shuffled, most=1 / self.symbols + 0.1),
            instead="The control did not hold",
        )

    def stack(self, place: str, depth: int, seed: int) -> nn.Transformer:
        """A pre-norm decoder of `depth` blocks with dropout at `place`."""
        return nn.new(self.spec(place, depth), seed)

    def spec(self, place: str, depth: int) -> ModelSpec:
        """Of the decoder whose dropout is at `place`."""
        own, rate = block(self.width, HEADS, 2 * self.width), self.dropped
        layer = {
            WEIGHTS: replace(own, attn=replace(own.attn, dropout=rate)),
            OUTPUTS: replace(own, dropout=rate),
            STREAM: StreamDropout(**vars(own) | {"dropout": rate}),
        }.get(place, own)
        positions, last = SinusoidalSpec(width=self.width), RMSNormSpec(width=self.width)
        model = decoder(self.symbols, [layer] * depth, embedded=positions, final_norm=last, scale=self.width**0.5)
        stack = model.decoder
        assert stack is not None
        embed = replace(stack.embed, dropout=rate if place == EMBEDDINGS else 0.0)
        return replace(model, decoder=replace(stack, embed=embed))

    def _trained(self, place: str, depth: int, task: GeneratedTask, seed: int) -> DroppedStack:
        module = self.stack(place, depth, seed)
        rows = tasks.held_out_rows(task, self.tested, seed)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(seed)
            module.train()
            one, other = (final(module, collate(rows[:8])) for _ in range(2))
        cosine = float(torch_nn.functional.cosine_similarity(one, other, dim=-1).mean())
        run = tasks.train(module, task, TrainingBudget(self.steps, self.rows, self.rate), seed)
        return DroppedStack(run, tasks.right(module.eval(), rows), cosine)

    def _apart(self, seed: int) -> float:
        """The largest difference of logits of the block that drops the stream and the usual one without dropout."""
        rows = tasks.held_out_rows(self.task, 2, seed)
        one, other = (self.stack(place, self.depths[0], seed).eval() for place in (NONE, STREAM))
        return float((tasks.logits(one, rows) - tasks.logits(other, rows)).abs().max())

    def _sections(self, stacks: Stacks) -> Sections:
        whats = ("right", "nats in training", "cosine before")
        columns = [f"{what}, {depth} layers" for what, depth in product(whats, self.depths)]
        rows = []
        for place in PLACES:
            own = [stacks[place, depth] for depth in self.depths]
            shown = [f"{one.right:.0%}" for one in own], [f"{one.run.end:.2f}" for one in own]
            rows.append([place, *shown[0], *shown[1], *(f"{one.cosine:.2f}" for one in own)])
        chance = f"{1 / self.symbols:.0%} are right by chance"
        title = f"After {self.steps} steps with dropout of {self.dropped:g}, tested without; {chance}"
        runs = {place: stacks[place, self.depths[-1]].run for place in PLACES}
        yield TableSection(title, ("dropout on", *columns), rows)
        yield tasks.training_curve(f"{self.depths[-1]} layers in training", "nats a symbol", runs)
