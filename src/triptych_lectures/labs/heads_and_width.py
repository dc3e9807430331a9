"""What H heads of width D/H cost beside one head of width D, and what they are for.

Vaswani et al. 2017, 3.2.2 and table 3 A; lecture L4 and its exercise 7.

`heads-vs-width`: one block, counted and measured.  `trained-heads`: 1 to 16 heads trained at equal parameters.  In both
one layer of attention without an MLP names the symbols that stand some places back: one place, for which one pattern of
attention is enough, or several at once, which one pattern can only give as a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import torch

from triptych import nn
from triptych.count import count
from triptych.errors import InputError, counted
from triptych.model import Model
from triptych.page import Curve, TableSection
from triptych.spec import full
from triptych.train import OptimizerSettings, Pairs
from .counting import products, shortest_seconds
from .generated_tasks import (
    GeneratedTask,
    Places,
    ShuffledTask,
    TrainedHead,
    TrainingBudget,
    right,
    trained_head,
    training_curve,
    with_positions,
)
from .lab import Check, Checks, Clause, Ints, Lab, LabResult, Setup, size
from .small_models import block, curve, decoder, fit, line_table, parameters

VOCAB = 64
COLUMNS = ("parameters", "matmul FLOPs", "score elements")
# The trained task: name the symbols that stand so many places back, all of them in one answer.
PLACES: dict[str, Ints] = {"one place": (3,), "four places": (1, 2, 3, 4)}


class HeadsVsWidthLab(Lab):
    """One block of width D for H in HEADS, counted and measured; then one head and four trained to read places."""

    name = "heads-vs-width"
    falsified_by = (
        "That the costs are equal is arithmetic, which is false here only if the library counts or computes something"
        " else than the formula. The claim about the use is false if one head reads four places as well as four heads"
        " do, or if one head cannot even read one place, so that its failure at four says nothing about heads."
    )

    width: int = size(512, "model width D of the block that is counted", multiple="heads")
    tokens: int = size(10, "tokens on which it is counted")
    long: int = size(512, "tokens on which it is timed")
    heads: Ints = size((1, 2, 4, 8, 16), "numbers of heads, the first 1, each a divisor of the width")
    narrow: int = size(32, "model width of the layers that are trained, a multiple of 4", multiple=4)
    symbols: int = size(4, "symbols of the task that is trained, 2 to 16", least=2, most=16)
    length: int = size(12, "tokens of its rows, more than 4", least=5)
    steps: int = size(250, "training steps")
    rows: int = size(64, "rows of a training step")
    tested: int = size(64, "rows that are tested")

    def __post_init__(self) -> None:
        if self.heads[0] != 1 or len(self.heads) < 2:
            raise InputError("size heads: this lab compares with one head; begin with 1, and give two or more")

    def run(self, setup: Setup) -> LabResult:
        setup.progress(f"one block of width {self.width}, {self.heads[0]} to {self.heads[-1]} heads")
        costs: dict[int, Costs] = {}
        off: list[int] = []
        ids = [i % VOCAB for i in range(self.long)]
        for heads in self.heads:
            model = Model(nn.new(decoder(VOCAB, [block(self.width, heads, self.width)], mask=full()), setup.seed))
            measured = _measured(model, self.tokens)
            off += [abs(a - b) for a, b in zip(_counted(model, self.tokens), measured, strict=True)]
            with torch.inference_mode():
                costs[heads] = *measured, shortest_seconds(lambda model=model: model.logits([ids]), calls=5)
        shares: dict[tuple[str, int], float] = {}
        for name, heads in product(PLACES, (1, 4)):
            setup.progress(f"training {counted(heads, 'head')} to read {name}: {self.steps} steps")
            shares[name, heads] = self._read_places(heads, PLACES[name], setup.seed)
        over_one = [[cost / one for cost, one in zip(costs[h], costs[1], strict=True)] for h in self.heads]
        scores_off = [abs(costs[h][2] / (h * costs[1][2]) - 1) for h in self.heads]
        most, tokens = self.heads[-1], self.tokens
        shown = 8 if 8 in self.heads else most  # the lecture has 8
        scores, four = float(shown * tokens**2), "four places read right by four heads"
        one_of_one, four_of_one = (shares["one place", heads] for heads in (1, 4))  # read by one head, by four
        one_of_four, four_of_four = (shares["four places", heads] for heads in (1, 4))
        checks = (
            Check("arithmetic: counted from the spec and measured: largest difference", float(max(off)), most=0.0),
            Check(f"arithmetic: parameters of {most} heads over one", over_one[-1][0], 1.0, 1.0),
            Check(f"arithmetic: matmul FLOPs of {most} heads over one", over_one[-1][1], 1.0, 1.0),
            Check(
                "arithmetic: score elements over H times those of one head, largest difference from 1",
                max(scores_off),
                most=0.0,
            ),
            Check(f"arithmetic: score elements of {shown} heads on {tokens} tokens", costs[shown][2], scores, scores),
            Check("control: one place read right by one head", one_of_one, least=0.95),
            Check(four, four_of_four, least=0.9),
            Check(f"{four}, less by one", four_of_four - one_of_four, 0.2),
        )
        meaning = (
            "The projections are D x D whether their output is one head or cut into H, and the H score matrices take"
            " D/H multiplications an entry instead of D: parameters and matmul FLOPs are equal. What grows is the"
            f" number of scores, H T² instead of T² ({scores:,.0f} against {tokens**2:,} for {shown} heads on {tokens}"
            " tokens), and with it the work of softmax and the memory of a stored pattern. What is gained are H"
            " patterns. A single head returns one average: trained to name the symbols at four places it is right"
            f" {one_of_four:.0%} of the time, four heads of a quarter of its width"
            f" {four_of_four:.0%}, with the same parameters and steps. At a single place one head is enough"
            f" ({one_of_one:.0%}). The criteria marked arithmetic follow from the formula and test that the"
            " library keeps to it; the others are experiments. Times depend on the machine and decide nothing."
        )
        title, time = f"One block of width {self.width} on {tokens} tokens, measured", f"time for {self.long} tokens"
        rows = [
            [str(h), str(self.width // h), *(f"{x:,}" for x in own), f"{1000 * seconds:.1f} ms"]
            for h, (*own, seconds) in costs.items()
        ]
        right = f"Symbols named right after {self.steps} steps, by one layer of width {self.narrow}"
        read = {"one head": (one_of_one, one_of_four), "four heads": (four_of_one, four_of_four)}
        lines = dict(zip((*COLUMNS, time), zip(*over_one, strict=True), strict=True))
        sections = (
            TableSection(f"{title}; time of a forward on {self.long}", ("heads", "head width", *COLUMNS, time), rows),
            line_table(right, "the task reads", PLACES, read, ".0%"),
            curve("Cost beside that of one head", "heads", "times one head", self.heads, lines, log="xy"),
        )
        return LabResult(
            "What do H heads cost beside one, and what are they for?", (Clause(meaning, checks),), sections
        )

    def _read_places(self, heads: int, places: Sequence[int], seed: int) -> float:
        """Share of held-out answers right of one layer of attention without an MLP, trained on the places task."""
        noise, task = np.random.default_rng(seed), Places(self.symbols, self.length, tuple(places))
        data = Pairs(tuple(task.rows(noise, self.steps * self.rows)))
        module = with_positions([block(self.narrow, heads, hidden=None)], task.classes, self.length, seed)
        settings = OptimizerSettings(name="adamw", lr=1e-2, weight_decay=0.0)
        fit(module, data, rows=self.rows, length=self.length, steps=self.steps, seed=seed, optimizer=settings)
        return right(module, task.rows(noise, self.tested))


Costs = tuple[int, int, int, float]  # parameters, matmul FLOPs, score elements, seconds


def _counted(model: Model, tokens: int) -> tuple[int, int, int]:
    """Parameters, matmul FLOPs and score elements, from the spec alone."""
    cost = count(model.spec)
    return cost.total, sum(cost.flops(tokens).values()), cost.score_elements(tokens)


def _measured(model: Model, tokens: int) -> tuple[int, int, int]:
    """The same from the module: its tensors, the matmuls that torch counts, and the scores that enter softmax."""
    ids = list(range(tokens))
    flops = products(lambda: model.logits([ids])).total
    scores = model.trace([ids], read=["blocks.0.attn.scores"])["blocks.0.attn.scores"][0]
    return parameters(model.module), flops, scores.numel()


class TrainedHeadsLab(Lab):
    """Each number of heads on each task; then shuffled answers."""

    name = "trained-heads"
    falsified_by = (
        "One head that reads several places as well as one head for each would have shown the claim false, and so would"
        " more heads that read them worse than fewer do, up to the number of places. A difference at one place would"
        " mean that heads help or harm for another reason than the number of patterns."
    )

    heads: Ints = size(
        (1, 4, 16),
        "heads, in ascending order, each a divisor of width",
        values=2,
        ascending=True,
        full=(1, 2, 4, 8, 16),
    )
    width: int = size(32, "width of the residual stream, which the heads share", multiple="heads")
    one: Ints = size((3,), "places back that the first task reads")
    several: Ints = size((1, 2, 3, 4), "places back that the second task reads; as many heads are needed")
    symbols: int = size(5, "different symbols, two or more", least=2)
    length: int = size(12, "symbols of a row")
    steps: int = size(400, "training steps")
    rows: int = size(32, "rows of a step")
    rate: float = size(1e-2, "learning rate of AdamW, which falls linearly to 0")
    tested: int = size(64, "rows that the share of right answers is taken from")

    def __post_init__(self) -> None:
        if len(self.one) != 1:
            raise InputError("size one: the first task reads one place, which must be a single number")

    def run(self, setup: Setup) -> LabResult:
        tasks = {
            ONE: Places(self.symbols, self.length, self.one),
            SEVERAL: Places(self.symbols, self.length, self.several),
        }
        layers: Layers = {}
        for name, heads in product(tasks, self.heads):
            setup.progress(f"{name}, {counted(heads, 'head')}: {self.steps} steps")
            layers[name, heads] = self._trained(heads, tasks[name], setup.seed)
        setup.progress("shuffled answers")
        shuffled = self._trained(self.heads[-1], ShuffledTask(tasks[ONE]), setup.seed)
        return LabResult(
            "How many heads does a layer need?",
            (Clause(self._meaning(layers), self._checks(layers, shuffled)),),
            self._sections(layers),
        )

    def _checks(self, layers: Layers, shuffled: TrainedHead) -> Checks:
        places, fewest = len(self.several), self.heads[0]
        enough = min((heads for heads in self.heads if heads >= places), default=self.heads[-1])
        learned = {heads: layers[SEVERAL, heads].run.learned for heads in self.heads}
        rising = [learned[b] - learned[a] for a, b in pairwise(self.heads) if b <= enough]
        beyond = [learned[heads] - learned[enough] for heads in self.heads if heads > enough]
        at_one = [layers[ONE, heads].right for heads in self.heads]
        counts = [layers[SEVERAL, heads].parameters for heads in self.heads]
        many, more = layers[SEVERAL, enough].right, layers[SEVERAL, enough].right - layers[SEVERAL, fewest].right
        read, one = f"{places} places read right by {enough} heads", "control: one place read right"
        return (
            Check("parameters, most less fewest over the numbers of heads", max(counts) - min(counts), most=0.0),
            Check(read, many, least=0.9),
            Check(f"{read}, less by {fewest}", more, 0.25),
            Check(
                f"learned more with each larger number up to {enough} heads, the least",
                min(rising, default=0.0),
                least=0.0,
            ),
            Check(f"learned more with more than {enough} heads, the most", max(beyond, default=0.0), most=0.1),
            Check(f"{one}, most less least over the numbers", max(at_one) - min(at_one), most=0.1),
            Check(f"{one}, the least", min(at_one), least=0.9),
            Check(
                "control: right of one place, trained on shuffled answers", shuffled.right, most=1 / self.symbols + 0.1
            ),
        )

    def _meaning(self, layers: Layers) -> str:
        shares = ", ".join(f"{layers[SEVERAL, heads].right:.0%} by {heads}" for heads in self.heads)
        most = self.heads[-1]
        return (
            f"A head returns one weighted sum. To name {len(self.several)} symbols in their order from one sum, a head"
            " has to weigh the places differently and the rest of the layer to take the sum apart again; with a head"
            " for each place nothing is mixed. All layers have the same parameters, only cut into more heads, and the"
            f" same steps: {shares}. More heads than places do not help, and may cost something: {most} heads of width"
            f" {self.width // most} learned {layers[SEVERAL, most].run.learned:.0%}. With one place to read, one head"
            " is as good as any number. What many heads are good for is many places at once. Learned is the share of"
            " the way from the loss of a guess, 0, to the best one, 1."
        )

    def _trained(self, heads: int, task: GeneratedTask, seed: int) -> TrainedHead:
        """One layer of attention with so many heads, without an MLP, after training."""
        module = with_positions([block(self.width, heads, hidden=None)], task.classes, self.length, seed)
        budget = TrainingBudget(self.steps, self.rows, self.rate, shape="linear")
        return trained_head(module, task, budget, self.tested, seed)

    def _sections(self, layers: Layers) -> tuple[TableSection, Curve]:
        tasks = (ONE, SEVERAL)
        rows = [
            [str(heads), str(self.width // heads), f"{layers[SEVERAL, heads].parameters:,}"]
            + [f"{layers[name, heads].right:.0%}" for name in tasks]
            + [f"{layers[name, heads].run.end:.2f}" for name in tasks]
            for heads in self.heads
        ]
        columns = [f"{what}, {name}" for what in ("right", "nats") for name in tasks]
        title = f"After {self.steps} steps; {ONE}: {self.one[0]} back, {SEVERAL}: {', '.join(map(str, self.several))}"
        runs = {counted(heads, "head"): layers[SEVERAL, heads].run for heads in self.heads}
        return (
            TableSection(title, ("heads", "head width", "parameters", *columns), rows),
            training_curve(f"{len(self.several)} places in training", "nats an answer", runs),
        )


Layers = dict[tuple[str, int], TrainedHead]
ONE, SEVERAL = "one place", "several places"
