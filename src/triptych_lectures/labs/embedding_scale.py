"""Token embeddings multiplied by √d beside sinusoidal positions (Vaswani et al. 2017, section 3.4; lecture L2).

The lecture multiplies embeddings by √d "to stabilize magnitudes".  Here tokens are drawn with three deviations in use:
0.02 (BERT, GPT-2), 1/√d, and 1 (torch's own).  For each, with and without √d: the share of the token in what the first
norm gives, and the steps of training until half of a task is learned in which the order decides.
"""

from collections.abc import Mapping
from itertools import product
from statistics import fmean

import torch

from triptych import nn
from triptych.attention import Rows
from triptych.page import TableSection
from triptych.spec import RMSNormSpec, SinusoidalSpec
from . import generated_tasks as tasks
from .bounds import rounded_down
from .generated_tasks import LAST, GeneratedTask, Places, ShuffledTask, TrainedRun, TrainingBudget
from .lab import Check, Clauses, Ints, Lab, LabResult, Sections, Setup, clause, size
from .small_models import block, decoder

SMALL, UNIT, LARGE = "0.02", "1/√d", "1"  # standard deviations of the tokens' numbers
DEVIATIONS = (SMALL, UNIT, LARGE)
Case = tuple[str, bool]  # a deviation, and whether √d multiplies
CASES: tuple[Case, ...] = tuple(product(DEVIATIONS, (False, True)))
Shares = Mapping[Case, list[float]]
Runs = Mapping[Case, list[TrainedRun]]
HEADS = 4
TOKENS = 256  # of which the share is measured: so many that their mean is near 0


class EmbeddingScaleLab(Lab):
    name = "embedding-scale"

    widths: Ints = size((64, 512), "d, widths at which the share is measured, ascending", ascending=True)
    width: int = size(64, f"d of the models that are trained, a multiple of {HEADS}", multiple=HEADS)
    layers: int = size(2, "blocks of the models that are trained")
    symbols: int = size(16, "different symbols, two or more", least=2)
    length: int = size(16, "symbols of a row, two or more", least=2)
    draws: int = size(2, "models trained in each case, over which the mean is taken", full=10)
    steps: int = size(160, "training steps")
    rows: int = size(8, "rows of a step")
    rate: float = size(3e-3, "learning rate of AdamW")

    def run(self, setup: Setup) -> LabResult:
        shares = {case: [self.share(*case, width, setup.seed) for width in self.widths] for case in CASES}
        order, own = (Places(self.symbols, self.length, (back,)) for back in (1, 0))
        runs: dict[Case, list[TrainedRun]] = {}
        for case in CASES:
            setup.progress(f"deviation {case[0]}, {_named(case)}: {self.draws} times {self.steps} steps")
            seeds = range(setup.seed * self.draws, (setup.seed + 1) * self.draws)
            runs[case] = [self._train(*case, order, seed) for seed in seeds]
        setup.progress("controls: no order, shuffled answers")
        alone = [self._half([self._train(LARGE, scaled, own, setup.seed)]) for scaled in (False, True)]
        shuffled = self._train(UNIT, True, ShuffledTask(order), setup.seed)
        return self.result(self._conclusion(shares, runs, alone, shuffled), self._sections(shares, runs))

    def _conclusion(self, shares: Shares, runs: Runs, alone: list[float], shuffled: TrainedRun) -> Clauses:
        share = {case: own[-1] for case, own in shares.items()}
        half = {case: self._half(own) for case, own in runs.items()}
        sooner = {name: half[name, False] - half[name, True] for name in DEVIATIONS}
        matched = [half[LARGE, False], half[UNIT, True]]
        small = [case for case in CASES if case[0] != LARGE and case != (UNIT, True)]
        off = max((share[case] - 2 / 3 for case in ((LARGE, False), (UNIT, True))), key=abs)
        soonest = min(half[case] for case in small)
        least = min(fmean(run.learned for run in runs[case]) for case in small)
        d, later = self.widths[-1], "steps sooner with √d to learn half"
        yield clause(
            f"Beside sinusoids of width {d}, tokens drawn with 1/√d are {share[UNIT, False]:.1%} of what the first"
            f" norm gives, and {share[UNIT, True]:.0%} with √d. Drawn with 0.02 they are {share[SMALL, False]:.2%}"
            f" and {share[SMALL, True]:.0%}; with 1, {share[LARGE, False]:.0%} and {share[LARGE, True]:.1%}: then"
            " √d leaves almost nothing of the positions.",
            Check(f"1/√d, d {d}, no √d: share of the token", share[UNIT, False], most=0.1),
            Check(f"1/√d, d {d}, √d: share of the token", share[UNIT, True], least=0.5, most=0.8),
            Check(f"1, d {d}, no √d: share of the token", share[LARGE, False], least=0.5, most=0.8),
            Check(f"1, d {d}, √d: share of the token", share[LARGE, True], least=0.95),
            instead="√d did not decide the share of the token",
        )
        yield clause(
            f"Naming the symbol one place back is half learned after {half[UNIT, True]:.4g} steps with √d and"
            f" {half[UNIT, False]:.4g} without where tokens are drawn with 1/√d, after {half[SMALL, True]:.4g} and"
            f" {half[SMALL, False]:.4g} with 0.02.",
            Check(f"1/√d: {later}", sooner[UNIT], least=float(LAST)),
            Check(f"0.02: {later}", sooner[SMALL], least=float(LAST)),
            instead="That √d makes small tokens learn sooner was not seen",
        )
        yield clause(
            f"Drawn with 1 it is the other way round: {half[LARGE, False]:.4g} steps without √d,"
            f" {half[LARGE, True]:.4g} with it. The factor is no rule of its own: tokens of the size of the"
            f" positions, 1 without √d and 1/√d with it, learn half soonest ({matched[0]:.4g} and {matched[1]:.4g}"
            f" steps); smaller ones come later, and end no lower than {rounded_down(least, '.2f')} of the task.",
            Check(f"1: {later}", sooner[LARGE], most=-float(LAST)),
            Check("these two: share of the token less 2/3, where sizes are equal", off, -0.15, 0.15),
            Check("1 without √d, later than 1/√d with it", matched[0] - matched[1], -LAST, LAST),
            Check("steps of smaller tokens to half, beyond these two", soonest - max(matched), least=1),
            Check("smaller tokens: learned at the end, the least", least, least=0.5),
            instead="That tokens of the size of the positions learn soonest was not seen",
        )
        yield clause(
            f"Controls: where the answer is the symbol at hand and the order does not matter, tokens drawn"
            f" with 1 learn half {alone[1] - alone[0]:.4g} steps later with √d than without; shuffled answers"
            " are not learned.",
            Check("control: symbol at hand, 1: steps later with √d", alone[1] - alone[0], -LAST, LAST),
            Check("control: symbol at hand, 1: steps to learn half, the later", max(alone), most=self.steps),
            Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
            instead="A control did not hold",
        )

    def model(self, name: str, scaled: bool, width: int, symbols: int, seed: int) -> nn.Transformer:
        """A decoder whose tokens are drawn with this deviation, with sinusoidal positions."""
        positions, last = SinusoidalSpec(width=width), RMSNormSpec(width=width)
        blocks = [block(width, HEADS, 2 * width)] * self.layers
        scale = width**0.5 if scaled else None
        module = nn.new(decoder(symbols, blocks, embedded=positions, final_norm=last, scale=scale), seed)
        noise, deviation = torch.Generator().manual_seed(seed), {SMALL: 0.02, UNIT: width**-0.5, LARGE: 1.0}[name]
        tokens = module.get_parameter("decoder.embed.tokens.weight")
        tokens.data = deviation * torch.randn(tokens.shape, generator=noise)
        return module

    @torch.no_grad()
    def share(self, name: str, scaled: bool, width: int, seed: int) -> float:
        """Of the squares of what the first norm gives, over all pairs of a token and a position, the part that differs
        with the token, over this and the part that all tokens of a position share."""
        module = self.model(name, scaled, width, TOKENS, seed)
        assert module.decoder is not None
        ids, rows = torch.arange(TOKENS).repeat_interleave(self.length), Rows((self.length,) * TOKENS)
        x = module.decoder.embed(ids, rows)
        normed = module.decoder.blocks[0].attn_norm.pre(x).reshape(TOKENS, self.length, width)
        token = float(normed.mean(1).var(0).sum())
        shared = float(normed.mean(0).square().sum(-1).mean()) - token / TOKENS  # a mean holds a part of the variance
        return token / (token + shared)

    def _train(self, name: str, scaled: bool, task: GeneratedTask, seed: int) -> TrainedRun:
        budget = TrainingBudget(self.steps, self.rows, self.rate)
        return tasks.train(self.model(name, scaled, self.width, self.symbols, seed), task, budget, seed)

    def _half(self, runs: list[TrainedRun]) -> float:
        return tasks.mean_steps(runs, 0.5, self.steps)

    def _sections(self, shares: Shares, runs: Runs) -> Sections:
        learned = {case: fmean(run.learned for run in own) for case, own in runs.items()}
        rows = [
            [
                case[0], _named(case), *(f"{x:.2%}" for x in shares[case]), f"{self._half(own):.4g}",
                f"{learned[case]:.2f}",
            ]
            for case, own in runs.items()
        ]  # fmt: skip
        widths = (f"token's share, d {d}" for d in self.widths)
        columns = (*widths, f"steps to half, d {self.width}", "learned at the end")
        first = {f"{case[0]}, {_named(case)}": own[0] for case, own in runs.items()}
        yield TableSection("Tokens beside sinusoidal positions", ("deviation of tokens", "factor", *columns), rows)
        yield tasks.training_curve("The symbol one place back, in training", "nats a symbol", first)


def _named(case: Case) -> str:
    return "√d" if case[1] else "no factor"
