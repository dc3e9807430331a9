"""1 to 16 heads trained at equal parameters (Vaswani et al. 2017, section 3.2.2 and table 3 A; lecture L4).

One layer of attention without an MLP names the symbols that stand some places back: one place, for which one pattern
of attention is enough, or several at once, which one pattern can only give as a sum.
"""

from __future__ import annotations

from itertools import pairwise

from triptych import nn
from triptych.errors import InputError
from triptych.page import Curve, TableSection
from triptych.spec import LearnedSpec, RMSNormSpec
from triptych_lectures.labs.lab import Check, Lab, LabResult, Setup, size
from triptych_lectures.labs.small import block, decoder
from triptych_lectures.labs.trained import GeneratedTask, Places, Shuffled, TrainedHead, TrainingBudget, trained_head


class TrainedHeadsLab(Lab):
    """Each number of heads on each task; then shuffled answers."""

    name = "trained-heads"
    falsified_by = (
        "One head that reads several places as well as one head for each would have shown the claim false, and so would"
        " more heads that read them worse than fewer do, up to the number of places. A difference at one place would"
        " mean that heads help or harm for another reason than the number of patterns."
    )
    seeds = 5

    heads: tuple[int, ...] = size(
        (1, 4, 16),
        "heads, in ascending order, each a divisor of width",
        values=2,
        ascending=True,
        full=(1, 2, 4, 8, 16),
    )
    width: int = size(32, "width of the residual stream, which the heads share")
    one: tuple[int, ...] = size((3,), "places back that the first task reads")
    several: tuple[int, ...] = size((1, 2, 3, 4), "places back that the second task reads; as many heads are needed")
    symbols: int = size(5, "different symbols, two or more", least=2)
    length: int = size(12, "symbols of a row")
    steps: int = size(400, "training steps")
    rows: int = size(32, "rows of a step")
    rate: float = size(1e-2, "learning rate of AdamW, which falls linearly to 0")
    tested: int = size(64, "rows that the share of right answers is taken from")

    def __post_init__(self) -> None:
        if any(self.width % heads for heads in self.heads):
            raise InputError(f"sizes width and heads: the width, {self.width}, must be a multiple of each number")
        if len(self.one) != 1:
            raise InputError("size one: the first task reads one place, which must be a single number")

    def run(self, setup: Setup) -> LabResult:
        tasks = {
            ONE: Places(self.symbols, self.length, self.one),
            SEVERAL: Places(self.symbols, self.length, self.several),
        }
        layers: Layers = {}
        for name, task in tasks.items():
            for heads in self.heads:
                setup.progress(f"{name}, {heads} head{'s' * (heads > 1)}: {self.steps} steps")
                layers[name, heads] = self._trained(heads, task, setup.seed)
        setup.progress("shuffled answers")
        shuffled = self._trained(self.heads[-1], Shuffled(tasks[ONE]), setup.seed)
        return LabResult(
            "How many heads does a layer need?",
            self._meaning(layers),
            self._checks(layers, shuffled),
            (self._table(layers), self._curve(layers)),
        )

    def _checks(self, layers: Layers, shuffled: TrainedHead) -> tuple[Check, ...]:
        places = len(self.several)
        enough = min((heads for heads in self.heads if heads >= places), default=self.heads[-1])
        learned = {heads: layers[SEVERAL, heads].run.learned for heads in self.heads}
        rising = [learned[b] - learned[a] for a, b in pairwise(self.heads) if b <= enough]
        beyond = [learned[heads] - learned[enough] for heads in self.heads if heads > enough]
        at_one = [layers[ONE, heads].right for heads in self.heads]
        few, many = layers[SEVERAL, self.heads[0]], layers[SEVERAL, enough]
        counts = [layers[SEVERAL, heads].parameters for heads in self.heads]
        return (
            Check("parameters, most less fewest over the numbers of heads", max(counts) - min(counts), most=0.0),
            Check(f"{places} places read right by {enough} heads", many.right, least=0.9),
            Check(
                f"{places} places read right by {enough} heads, less by {self.heads[0]}", many.right - few.right, 0.25
            ),
            Check(
                f"learned more with each larger number up to {enough} heads, the least",
                min(rising, default=0.0),
                least=0.0,
            ),
            Check(f"learned more with more than {enough} heads, the most", max(beyond, default=0.0), most=0.1),
            Check(
                "control: one place read right, most less least over the numbers", max(at_one) - min(at_one), most=0.1
            ),
            Check("control: one place read right, the least", min(at_one), least=0.9),
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

    def layer(self, heads: int, task: GeneratedTask, seed: int) -> nn.Transformer:
        """One layer of attention with so many heads, without an MLP."""
        positions = LearnedSpec(length=self.length, width=self.width)
        final_norm = RMSNormSpec(width=self.width)
        attention = block(self.width, heads, hidden=None)
        return nn.new(decoder(task.classes, [attention], embedded=positions, final_norm=final_norm), seed)

    def _trained(self, heads: int, task: GeneratedTask, seed: int) -> TrainedHead:
        budget = TrainingBudget(self.steps, self.rows, self.rate, shape="linear")
        return trained_head(self.layer(heads, task, seed), task, budget, self.tested, seed)

    def _table(self, layers: Layers) -> TableSection:
        rows = [
            [
                str(heads),
                str(self.width // heads),
                f"{layers[SEVERAL, heads].parameters:,}",
                *(f"{layers[name, heads].right:.0%}" for name in (ONE, SEVERAL)),
                *(f"{layers[name, heads].run.end:.2f}" for name in (ONE, SEVERAL)),
            ]
            for heads in self.heads
        ]
        header = ("heads", "head width", "parameters", f"right, {ONE}", f"right, {SEVERAL}", f"nats, {ONE}")
        title = f"After {self.steps} steps; {ONE}: {self.one[0]} back, {SEVERAL}: {', '.join(map(str, self.several))}"
        return TableSection(title, (*header, f"nats, {SEVERAL}"), rows)

    def _curve(self, layers: Layers) -> Curve:
        lines = {f"{heads} head{'s' * (heads > 1)}": layers[SEVERAL, heads].run.losses for heads in self.heads}
        guess = layers[SEVERAL, self.heads[0]].run.guess
        return Curve(f"{len(self.several)} places in training", "step", "nats an answer", lines, {"guess": guess})


Layers = dict[tuple[str, int], TrainedHead]
ONE, SEVERAL = "one place", "several places"
