"""What order is to a model without positions: nothing for an encoder, something for a causal decoder of two layers.

Lectures L0, L1 and L2; Haviv et al. 2022, "Transformer Language Models without Positional Encodings Still Learn
Positional Information".
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from triptych import nn
from triptych.errors import InputError, counted
from triptych.model import Model
from triptych.page import TableSection
from triptych.spec import LearnedSpec, RMSNormSpec, full
from triptych.train import Example
from .generated_tasks import TrainedRun, TrainingBudget, held_out_rows, right, train, training_curve
from .lab import Check, Findings, Ints, Lab, Setup, clause, size
from .small_models import CAUSAL, block, curve, decoder

ENCODER, DECODER = "encoder", "causal decoder"
NEAR = 0.05  # from the share that counts give: more than four standard errors of 2,000 rows
SOLVED = 0.95


@dataclass(frozen=True)
class FirstOfTwo:
    """Rows with some tokens 0 and some tokens 1 among `others` further ones, and the question which of the two comes
    first, asked by the last token.  A token that begins every row stands before them.

    How many 0 and how many 1 there are is drawn apart, from 1 to `most`.  With `mixed`, the tokens are shuffled once
    more after the answer was taken, so that it is no longer in their order.
    """

    most: int
    others: int
    length: int
    mixed: bool = False
    classes: int = 2

    @property
    def vocab(self) -> int:
        return 2 + self.others + 2  # the two that begin and ask

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        begin, ask, trained = self.vocab - 2, self.vocab - 1, np.arange(self.length + 2) == self.length + 1
        rows = []
        for zeros, ones in noise.integers(1, self.most + 1, (count, 2)):
            further = noise.integers(2, begin, self.length - zeros - ones)
            tokens = noise.permutation(np.concatenate([np.zeros(zeros), np.ones(ones), further])).astype(np.int32)
            first = tokens[tokens < 2][0]
            ids = np.array([begin, *(noise.permutation(tokens) if self.mixed else tokens), ask], dtype=np.int32)
            rows.append(Example(ids, np.where(trained, first, 0).astype(np.int32), trained))
        return rows

    @property
    def from_counts(self) -> float:
        """The best share of right answers that the counts of tokens allow.  Among a and b tokens in random order one
        of the a comes first with probability a / (a + b), so the best guess is the more frequent one."""
        pairs = list(product(range(1, self.most + 1), repeat=2))
        return float(sum(Fraction(max(a, b), a + b) for a, b in pairs) / len(pairs))


class OrderCase(NamedTuple):
    """A model that is trained: its kind and layers, whether it has positions, and whether the order was shuffled."""

    kind: str
    layers: int
    placed: bool = False
    mixed: bool = False

    @property
    def name(self) -> str:
        positions = "with positions" if self.placed else "without positions"
        return f"{self.kind}, {counted(self.layers, 'layer')}, {positions}{', order shuffled' if self.mixed else ''}"


class TrainedModel(NamedTuple):
    """A model after training, its losses, and the share of new rows that it answers right."""

    module: nn.Transformer
    run: TrainedRun
    right: float


BLIND, PLACED, MIXED = (
    OrderCase(ENCODER, 2, placed, mixed) for placed, mixed in ((False, False), (True, False), (True, True))
)


class OrderLab(Lab):
    name = "order"

    most: int = size(3, "tokens of each kind at most, two or more", least=2)
    others: int = size(2, "further kinds of tokens")
    length: int = size(10, "tokens of a row beside the first and the last, more than twice `most`")
    width: int = size(32, "model width D", multiple=4)
    depths: Ints = size((1, 2, 3, 4), "layers of the decoders without positions, from 1 on", values=2, ascending=True)
    steps: int = size(250, "training steps")
    rows: int = size(64, "rows of a training step")
    rate: float = size(1e-2, "learning rate of AdamW, which falls linearly to 0")
    tested: int = size(2000, "rows that are tested")
    read: int = size(400, "rows on which the place is read, and as many that fit it", least=50)

    def __post_init__(self) -> None:
        if self.depths[0] != 1:
            raise InputError("size depths: must begin with 1")
        if self.length <= 2 * self.most:
            raise InputError(f"sizes length {self.length} and most {self.most}: the length must be above twice `most`")

    @property
    def task(self) -> FirstOfTwo:
        return FirstOfTwo(self.most, self.others, self.length)

    def findings(self, setup: Setup) -> Findings:
        deep = [OrderCase(DECODER, layers) for layers in self.depths]
        placed = [PLACED, OrderCase(DECODER, 1, placed=True), OrderCase(DECODER, 2, placed=True)]
        models = {case: self._trained(case, setup) for case in (BLIND, *placed, *deep, MIXED)}
        setup.progress("reading the place")
        places = {case: self._place(models[case].module, setup.seed) for case in (BLIND, deep[-1])}
        counts = self.task.from_counts
        share = {case: model.right for case, model in models.items()}
        worst_placed, worst_deep = (min(share[case] for case in of) for of in (placed, deep[1:]))
        before, after = places[deep[-1]][:2]
        yield clause(
            f"An encoder without positions is right in {share[BLIND]:.1%}, which is what the counts of the tokens"
            f" give ({counts:.1%}). With positions every model is right, {worst_placed:.1%} at the worst.",
            near_counts(BLIND, share[BLIND] - counts),
            Check("with positions: right, the worst model", worst_placed, least=SOLVED),
            instead="That positions decide what can be answered was not seen",
        )
        yield clause(
            f"A causal decoder without positions does no better with one layer ({share[deep[0]]:.1%}), whose last"
            f" token reads embeddings alone. With more it does ({worst_deep:.1%} at the worst): their tokens have"
            " read those before them and no others.",
            near_counts(deep[0], share[deep[0]] - counts),
            Check("decoders of more layers, without positions: right, the worst", worst_deep, least=SOLVED),
            instead="That the mask replaces positions from the second layer on was not seen",
        )
        yield clause(
            f"After the decoder's first layer a linear fit explains {after:.0%} of the variance of the place, and"
            " before it nothing, as in the whole encoder.",
            Check("decoder without positions: R² of the place after its first layer", after, least=0.5),
            Check("decoder without positions: R² of the place before it", before, most=0.1),
            Check("encoder without positions: R² of the place, the best layer", max(places[BLIND]), most=0.1),
            instead="The place was not where the mask should put it",
        )
        yield clause(
            "Control: where the tokens were shuffled after the answer was taken, a model with positions is right in"
            f" {share[MIXED]:.1%}, as from counts.",
            near_counts(MIXED, share[MIXED] - counts),
            instead="Where the order says nothing, a model with positions was not as right as counts are",
        )
        rows = [[case.name, f"{model.right:.1%}", f"{model.run.end:.3f}"] for case, model in models.items()]
        title = f"Which comes first, on {self.tested:,} new rows; from counts {counts:.1%}"
        reads = {case.name: [f"{r2:.2f}" for r2 in line] for case, line in places.items()}
        header = ("model", "embeddings", *(f"layer {layer}" for layer in range(1, self.depths[-1] + 1)))
        filled = [[name, *line, *[""] * (len(header) - 1 - len(line))] for name, line in reads.items()]
        shown = {case.name: models[case].run for case in (BLIND, PLACED, *deep[:2])}
        by_depth = {"decoder": [share[case] for case in deep]}
        yield TableSection(title, ("model", "right", "nats at the end"), rows)
        yield curve("Right without positions", "layers", "share", self.depths, by_depth, {"from counts": counts})
        yield TableSection("R² of a linear fit of the place", header, filled)
        yield training_curve("In training", "nats an answer", shown)

    def _trained(self, case: OrderCase, setup: Setup) -> TrainedModel:
        setup.progress(f"{case.name}: {self.steps} steps")
        task, norm = replace(self.task, mixed=case.mixed), RMSNormSpec(width=self.width)
        positions = LearnedSpec(length=self.length + 2, width=self.width) if case.placed else None
        blocks = [block(self.width, 4, 2 * self.width)] * case.layers
        mask = CAUSAL if case.kind == DECODER else full()
        module = nn.new(decoder(task.vocab, blocks, embedded=positions, final_norm=norm, mask=mask), setup.seed)
        budget = TrainingBudget(self.steps, self.rows, self.rate, warmup=0.1, shape="linear")
        run = train(module, task, budget, setup.seed)
        return TrainedModel(module, run, right(module, held_out_rows(task, self.tested, setup.seed)))

    def _place(self, module: nn.Transformer, seed: int) -> list[float]:
        """Of the embeddings and after each layer: the share of the variance of the place, on new rows, that a linear
        fit by least squares explains."""
        rows = [row.ids.tolist() for row in held_out_rows(self.task, 2 * self.read, seed)]
        trace = Model(module).trace(rows, read=["blocks.0.resid_pre", "blocks.*.resid_post"])
        place = torch.arange(1.0, self.length + 1, dtype=torch.float64).repeat(self.read)
        explained = []
        for site in trace:
            states = torch.stack([own[1:-1] for own in trace[site]]).double()  # [2 x read, length, D]
            fitted, new = torch.nn.functional.pad(states, (0, 1), value=1.0).split(self.read)
            weights = torch.linalg.lstsq(fitted.flatten(0, 1), place[:, None], driver="gelsd").solution
            error = (new.flatten(0, 1) @ weights)[:, 0] - place
            explained.append(1 - float(error.square().mean() / place.var(correction=0)))
        return explained


def near_counts(case: OrderCase, difference: float) -> Check:
    return Check(f"{case.name}: right, less the best guess from counts", difference, -NEAR, NEAR)
