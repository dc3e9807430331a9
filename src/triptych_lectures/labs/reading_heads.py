"""One head that learns to read the symbol some places back, with scores of several kinds (lectures L0 4.1, L4).

`trained-scale`: with and without the division by √d (Vaswani et al. 2017, section 3.2.1).  `trained-scores`: additive
scores beside dot products.  `cosine-scores`: cosines beside dot products (Henry et al. 2020; Dehghani et al. 2023).
The labs `scaling` and `additive-vs-dot` have what is so before training.
"""

import math
from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from triptych import nn
from triptych.model import Model
from triptych.page import TableSection
from triptych.spec import AdditiveSpec, AttentionSpec, RMSNormSpec, attention
from . import generated_tasks as tasks
from .generated_tasks import GeneratedTask, Places, ShuffledTask, TrainedHead, TrainingBudget
from .lab import Check, Clause, Findings, Ints, Lab, Setup, clause, size
from .statements import gap

Heads = Mapping[tuple[str, int], TrainedHead]  # by what the head is called and its d


class ReadingLab(Lab):
    """One head for each of several cases learns to read the symbol some places back; one on shuffled answers.

    A head has learned if three quarters of its answers are right; a quarter of them is a difference.
    """

    width: int = size(32, "width of the residual stream")
    symbols: int = size(8, "different symbols, two or more", least=2)
    length: int = size(12, "symbols of a row, more than `back`", least=2)
    back: int = size(3, "places back that the head must read", below="length")
    steps: int = size(150, "training steps")
    rows: int = size(16, "rows of a step")
    rate: float = size(3e-3, "learning rate of AdamW")
    tested: int = size(64, "rows that the share of right answers is taken from")

    @property
    def task(self) -> Places:
        return Places(self.symbols, self.length, (self.back,))

    def learned(self, module: nn.Transformer, task: GeneratedTask, seed: int) -> TrainedHead:
        """`module` after training on `task` with these sizes."""
        budget = TrainingBudget(self.steps, self.rows, self.rate)
        return tasks.trained_head(module, task, budget, self.tested, seed)

    def swept(self, setup: Setup, modules: Mapping[tuple[str, int], nn.Transformer]) -> Heads:
        """Each module after training."""
        heads = {}
        for (name, d), module in modules.items():
            setup.progress(f"d {d}, {name}: {self.steps} steps")
            heads[name, d] = self.learned(module, self.task, setup.seed)
        return heads

    def scores(self, module: nn.Transformer, seed: int) -> Tensor:
        """Those of queries with the keys that they see, of some rows, one after the other."""
        rows = [row.ids.tolist() for row in tasks.held_out_rows(self.task, 8, seed)]
        traced = Model(module).trace(rows, read=["blocks.0.attn.scores"])["blocks.0.attn.scores"]
        return torch.cat([own[torch.ones_like(own).tril().bool()] for own in traced])

    def control(self, setup: Setup, module: nn.Transformer) -> Clause:
        """A head that is trained on shuffled answers is right by chance."""
        setup.progress("shuffled answers")
        share, chance = self.learned(module, ShuffledTask(self.task), setup.seed).right, 1 / self.symbols
        return clause(
            f"Control: trained on shuffled answers {share:.0%} are right; chance is {chance:.0%}.",
            Check("control: answers right, trained on shuffled ones", share, most=chance + 0.1),
            instead="The task can be answered without reading",
        )

    def table(self, heads: Heads) -> TableSection:
        """A row for each d, with every name's share of right answers and loss; a case that was not trained is empty."""
        names, widths = dict.fromkeys(name for name, _ in heads), dict.fromkeys(d for _, d in heads)
        rows = [
            [str(d), *(f"{heads[name, d].right:.0%}" if (name, d) in heads else "" for name in names)]
            + [f"{heads[name, d].run.end:.2f}" if (name, d) in heads else "" for name in names]
            for d in widths
        ]
        header = ("d", *(f"right, {name}" for name in names), *(f"nats, {name}" for name in names))
        chance = f"{1 / self.symbols:.0%} are right by chance"
        return TableSection(f"One head after {self.steps} steps; {chance}", header, rows)


SCALED, PLAIN, SMALLER = "1/√d", "no scale", "no scale, smaller weights"


class TrainedScaleLab(ReadingLab):
    name = "trained-scale"

    widths: Ints = size((4, 64, 1024), "d, widths of the head's queries and keys, ascending", values=2, ascending=True)
    length: int = size(32, "symbols of a row, more than `back`", least=2)

    def findings(self, setup: Setup) -> Findings:
        narrow, wide = self.widths[0], self.widths[-1]
        cases = [(name, d) for d in self.widths for name in (SCALED, PLAIN)] + [(SMALLER, wide)]
        modules = {case: self.head(*case, setup.seed) for case in cases}
        scaled, plain, small = (self.scores(modules[name, wide], setup.seed) for name in (SCALED, PLAIN, SMALLER))
        heads = self.swept(setup, modules)
        right = {case: head.right for case, head in heads.items()}
        worst = min(right[SCALED, d] for d in self.widths)
        lost = {d: right[SCALED, d] - right[PLAIN, d] for d in self.widths}
        yield clause(
            f"With 1/√d the head learns to read the symbol {self.back} places back at every d, {worst:.0%} right"
            " at the worst.",
            Check("1/√d: answers right, the worst over all d", worst, least=0.75),
            instead="The head did not learn with the division",
        )
        yield clause(
            f"Without it the scores of a new head of d {wide} have a standard deviation of {plain.std():.3g}, with"
            f" it {scaled.std():.2g}. At d {narrow} it learns all the same ({right[PLAIN, narrow]:.0%}), at d"
            f" {wide} not within {self.steps} steps ({right[PLAIN, wide]:.0%}).",
            Check(f"d {wide}: deviation of a new head's scores over √d", float(plain.std()) / wide**0.5, 1 / 3, 3),
            Check(f"d {wide}: answers right with 1/√d, less without", lost[wide], least=0.25),
            Check(f"control: d {narrow}: answers right with 1/√d, less without", lost[narrow], -0.1, 0.1),
            instead="The division did not decide at large d alone",
        )
        yield clause(
            f"The same head of d {wide} learns without the division where its first weights are so much smaller"
            f" that its first scores are those of the scaled one ({right[SMALLER, wide]:.0%}): what the division"
            " protects is the beginning of training.",
            Check(f"control: d {wide}, no scale, drawn smaller: answers right", right[SMALLER, wide], least=0.75),
            Check("distance of its first scores from those of 1/√d", gap(small, scaled), most=1e-3),
            instead="The head of smaller first weights did not learn, or began with other scores",
        )
        yield self.control(setup, self.head(SCALED, narrow, setup.seed))
        at_most = {name: heads[name, wide].run for name in (SCALED, PLAIN, SMALLER)}
        yield self.table(heads)
        yield tasks.training_curve(f"d {wide} in training", "nats a symbol", at_most)

    def head(self, name: str, d: int, seed: int) -> nn.Transformer:
        """One layer of attention with one head, whose queries and keys have width d, its values that of the stream."""
        scale = None if name == SCALED else 1.0
        attn = attention(self.width, 1, head_width=d, value_width=self.width, scale=scale)
        module = tasks.attention_alone(attn, self.symbols, self.length, seed)
        if name == SMALLER:
            tasks.multiply_queries_and_keys(module, d**-0.25)
        return module


DIVIDED, UNDIVIDED, ADDITIVE = "dot product, 1/√d", "dot product, no scale", "additive"
SCORES = (DIVIDED, UNDIVIDED, ADDITIVE)


class TrainedScoresLab(ReadingLab):
    name = "trained-scores"

    widths: Ints = size(
        (16, 1024), "d, widths of queries and keys, ascending", values=2, ascending=True, full=(16, 512, 2048)
    )
    steps: int = size(150, "training steps", full=200)
    tested: int = size(64, "rows that the share of right answers is taken from", full=200)

    def findings(self, setup: Setup) -> Findings:
        narrow, wide = self.widths[0], self.widths[-1]
        modules = {(name, d): self.head(name, d, setup.seed) for d in self.widths for name in SCORES}
        first = {name: float(self.scores(modules[name, wide], setup.seed).std()) for name in SCORES}
        heads = self.swept(setup, modules)
        right = {case: head.right for case, head in heads.items()}
        apart = max((right[ADDITIVE, d] - right[DIVIDED, d] for d in self.widths), key=abs)
        worst = min(right[ADDITIVE, d] for d in self.widths)
        ahead = {d: right[ADDITIVE, d] - right[UNDIVIDED, d] for d in self.widths}
        smaller = first[ADDITIVE] / first[UNDIVIDED]
        more = "answers right with the additive score, less with the dot product without scale"
        yield clause(
            f"At d {narrow} both scores learn to read the symbol {self.back} places back, and the dot product needs"
            f" no scale ({right[UNDIVIDED, narrow]:.0%} right, additive {right[ADDITIVE, narrow]:.0%}).",
            Check("additive: answers right, the worst over all d", worst, least=0.75),
            Check(f"control: d {narrow}: {more}", ahead[narrow], -0.1, 0.1),
            instead="The additive score did not learn at every d, or at small d the two were not alike",
        )
        yield clause(
            f"At d {wide} it does: {right[UNDIVIDED, wide]:.0%} are right after {self.steps} steps without a scale,"
            f" {right[ADDITIVE, wide]:.0%} with the additive score, whose first scores have a standard deviation of"
            f" {first[ADDITIVE]:.2g}, where those of the dot product have {first[UNDIVIDED]:.3g}.",
            Check(f"d {wide}: {more}", ahead[wide], least=0.25),
            Check("deviation of first scores, additive over the other", smaller, most=0.5),
            instead="The additive score was not ahead of the dot product without scale",
        )
        yield clause(
            "The division by √d makes up for what the additive score had ahead:"
            f" {right[DIVIDED, wide]:.0%} right at d {wide}, and within 0.1 of it at every d.",
            Check("answers right, additive less 1/√d, furthest from 0 over all d", apart, -0.1, 0.1),
            instead="The additive score and the divided dot product were not alike",
        )
        yield self.control(setup, self.head(ADDITIVE, narrow, setup.seed))
        at_most = {name: heads[name, wide].run for name in SCORES}
        yield self.table(heads)
        yield tasks.training_curve(f"In training, d {wide}", "nats a token", at_most)

    def scorer(self, name: str, d: int) -> AttentionSpec:
        """One head whose queries and keys have width d and whose values that of the stream."""
        mechanism = AdditiveSpec(width=d) if name == ADDITIVE else None
        scale = None if name == DIVIDED else 1.0
        return attention(self.width, 1, head_width=d, value_width=self.width, mechanism=mechanism, scale=scale)

    def head(self, name: str, d: int, seed: int) -> nn.Transformer:
        """One layer of attention with this score."""
        return tasks.attention_alone(self.scorer(name, d), self.symbols, self.length, seed)


DOT, COSINE = "dot product", "cosine"
DRAWN, LARGER = "as drawn", "drawn larger"
Begun = tuple[str, str]  # a score, and how the weights begin


class CosineScoresLab(ReadingLab):
    name = "cosine-scores"

    d: int = size(64, "width of queries and keys")
    factor: float = size(16.0, "how much larger the other weights of queries and keys are drawn")
    length: int = size(16, "symbols of a row, more than `back`", least=2)

    def findings(self, setup: Setup) -> Findings:
        before, heads, after = dict[Begun, float](), dict[Begun, TrainedHead](), dict[Begun, float]()
        for case in product((DOT, COSINE), (DRAWN, LARGER)):
            setup.progress(f"{case[0]}, weights {case[1]}: {self.steps} steps")
            module = self.head(*case, setup.seed)
            before[case] = self._largest(module, setup.seed)
            heads[case] = self.learned(module, self.task, setup.seed)
            after[case] = self._largest(module, setup.seed)
        larger = f"weights {self.factor:g} times as large"
        less, bounded = heads[DOT, DRAWN].right - heads[DOT, LARGER].right, "largest score before training, over √d"
        yield clause(
            f"From weights as they are drawn both scores learn: {heads[DOT, DRAWN].right:.0%} of the answers are"
            f" right with dot products, {heads[COSINE, DRAWN].right:.0%} with cosines.",
            Check("dot product: answers right, weights as drawn", heads[DOT, DRAWN].right, least=0.75),
            Check("cosine: answers right, weights as drawn", heads[COSINE, DRAWN].right, least=0.75),
            instead="From weights as drawn not both of them learned",
        )
        yield clause(
            f"From {larger} of queries and keys, {heads[DOT, LARGER].right:.0%} are right with dot products"
            f" after {self.steps} steps and {heads[COSINE, LARGER].right:.0%} with cosines.",
            Check(f"dot product: answers right less with {larger}", less, least=0.25),
            Check(f"cosine: answers right with {larger}", heads[COSINE, LARGER].right, least=0.75),
            instead="The size of the first weights did not decide for dot products alone",
        )
        yield clause(
            "A dot product grows with the length of query and key, and its first scores reach"
            f" {before[DOT, LARGER]:.0f} times √d from these weights. A cosine does not: no score of a new head is"
            f" above √d ({max(before[COSINE, begin] for begin in (DRAWN, LARGER)):.2f} times).",
            Check(f"cosine: {bounded}", max(before[COSINE, begin] for begin in (DRAWN, LARGER)), most=1.001),
            Check(f"control: dot product, {larger}: {bounded}", before[DOT, LARGER], least=1.001),
            instead="The scores were not bounded as claimed",
        )
        yield self.control(setup, self.head(COSINE, DRAWN, setup.seed))
        rows = [
            [*case, f"{head.right:.0%}", f"{head.run.end:.2f}", f"{before[case]:.2f}", f"{after[case]:.2f}"]
            for case, head in heads.items()
        ]
        header = ("score", "weights", "right", "nats at the end", "largest score / √d before", "after")
        by_name = {f"{name}, weights {begin}": head.run for (name, begin), head in heads.items()}
        yield TableSection(f"One head after {self.steps} steps; d {self.d}", header, rows)
        yield tasks.training_curve("In training", "nats a token", by_name)

    def head(self, name: str, begin: str, seed: int) -> nn.Transformer:
        """One layer of attention with one head; the norms of queries and keys begin with weights of 1."""
        norm = RMSNormSpec(width=self.d) if name == COSINE else None
        attn = attention(self.width, 1, head_width=self.d, value_width=self.width, q_norm=norm, k_norm=norm)
        module = tasks.attention_alone(attn, self.symbols, self.length, seed)
        if begin == LARGER:
            tasks.multiply_queries_and_keys(module, self.factor)
        return module

    def _largest(self, module: nn.Transformer, seed: int) -> float:
        """The largest score of a query with a key that it sees, without its sign, over √d."""
        return float(self.scores(module, seed).abs().max()) / math.sqrt(self.d)
