"""Exposure bias: trained on true prefixes, writing after its own (Bengio et al. 2015; Ranzato et al. 2016).

The model recites one of a few texts that a cue names.  The next token follows from the one before it, and also from the
cue and the place; only the second still says it after a wrong token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych import nn
from triptych.errors import InputError
from triptych.page import TableSection
from triptych.train import Example
from .generated_tasks import TrainedRun, TrainingBudget, logits, train, with_positions
from .lab import Check, Clauses, Lab, LabResult, Sections, Setup, clause, number, size
from .small_models import block, curve, examples, halves


class ExposureBiasLab(Lab):
    name = "exposure-bias"

    texts: int = size(16, "texts to recite, two or more", least=2)
    length: int = size(16, "tokens of a text, 4 or more; no token occurs twice in all texts", least=4)
    replaced: float = size(0.1, "share of the tokens that are replaced when the model writes, below 1")
    noises: tuple[float, ...] = size(
        (0.3,), "shares that are replaced in the prefixes of training, ascending, below 1", full=(0.01, 0.05, 0.3)
    )
    width: int = size(48, "width of the residual stream, a multiple of 4", multiple=4)
    layers: int = size(2, "blocks")
    steps: int = size(300, "training steps", full=600)
    rows: int = size(32, "rows of a step")
    rate: float = size(3e-3, "learning rate of AdamW, which falls linearly to 0")
    tested: int = size(200, "texts that each model writes in each test", full=1000)

    def __post_init__(self) -> None:
        if max(self.replaced, *self.noises) >= 1:
            raise InputError("sizes replaced and noises: give shares below 1")

    def run(self, setup: Setup) -> LabResult:
        texts = RecitedTexts(self.texts, self.length, setup.seed)
        runs, written = dict[float, TrainedRun](), dict[float, WritingErrors]()
        for share in (0.0, *self.noises):
            setup.progress(f"trained with {share:.0%} of the prefix replaced: {self.steps} steps")
            module, runs[share] = self._train(replace(texts, noise=share), setup.seed)
            ways = (self.replaced, True), (self.replaced, False), (0.0, False)
            errors = (self.errors(module, texts, setup.seed, share=own, forced=forced) for own, forced in ways)
            written[share] = WritingErrors(*errors)
        return self.result(self._conclusion(written), self._sections(written, runs))

    def never_back(self) -> NDArray[np.float64]:
        """[length]: the share of rows with a replaced token before each place, which is the error of a model that never
        comes back."""
        others = self.replaced * (1 - 1 / (self.texts * self.length))  # a random token may be the right one
        return 1 - np.power(1 - others, np.arange(self.length, dtype=np.float64))

    def _conclusion(self, written: dict[float, WritingErrors]) -> Clauses:
        """Means over the second half of the text.  A model that comes back at once has no errors, one that never does
        those of `never_back`; half of them is much, a quarter little."""
        own, most = "wrong after its own text, over never coming back", self.noises[-1]
        plain, noisy = written[0.0], written[most]
        (_, after), (_, back), (_, never) = map(halves, (plain.free, noisy.free, self.never_back()))
        first, second = halves(plain.forced)
        undisturbed = max(float(errors.undisturbed.mean()) for errors in written.values())
        yield clause(
            f"When none of the tokens that they write is replaced, the worst model has {undisturbed:.1%} of them"
            " wrong: this does not tell them apart.",
            Check("control: after its own text, none replaced: wrong, the worst model", undisturbed, most=0.1),
            instead="A model did not learn its texts",
        )
        yield clause(
            f"With {self.replaced:.0%} replaced as a model writes, the one trained on true prefixes is wrong on"
            f" {after:.0%} of the second half of a text, where one that never comes back would be wrong on"
            f" {never:.0%}. After true tokens, as many replaced, it stays at {second:.0%}: what adds up is the"
            " feedback.",
            Check(f"true prefixes: {own}", after / never, least=0.5),
            Check("control: true prefixes, after true tokens, over never coming back", second / never, most=0.25),
            Check("control: true prefixes, after true tokens: wrong more later", second - first, -0.1, 0.1),
            instead="That errors add up after its own text alone was not seen",
        )
        yield clause(
            f"Trained on prefixes of which {most:.0%} is replaced, it comes back: {back:.0%} are wrong, since the"
            " cue and the place still say what follows.",
            Check(f"{most:.0%} of the prefixes replaced: {own}", back / never, most=0.25),
            Check("wrong less than the one trained on true prefixes", after - back, least=0.1),
            instead="Wrong tokens in the prefixes of training did not help it to come back",
        )

    def _train(self, task: RecitedTexts, seed: int) -> tuple[nn.Transformer, TrainedRun]:
        blocks = [block(self.width, 4, 2 * self.width)] * self.layers
        module = with_positions(blocks, task.classes + task.count, self.length, seed)
        return module, train(module, task, TrainingBudget(self.steps, self.rows, self.rate, shape="linear"), seed)

    def errors(
        self, module: nn.Transformer, texts: RecitedTexts, seed: int, *, share: float, forced: bool = False
    ) -> NDArray[np.float64]:
        """[length]: how often the most probable token is not that of the text.

        It is written and read by the next choices, or with `forced` the token of the text is; of these, `share` is
        replaced by random tokens, the same for both.
        """
        noise = np.random.default_rng(seed)
        chosen = noise.integers(texts.count, size=self.tested)
        true, ids = texts.tokens[chosen], texts.cues(chosen)
        wrong = np.zeros(texts.length)
        for place in range(texts.length):
            last = np.arange(ids.shape[1]) == place
            choices = logits(module, examples(ids, ids, last)).argmax(-1).numpy().astype(np.int32)
            wrong[place] = (choices != true[:, place]).mean()
            written = true[:, place] if forced else choices
            ids = np.concatenate([ids, texts.disturbed(written, share, noise)[:, None]], axis=1)
        return wrong

    def _sections(self, written: dict[float, WritingErrors], runs: dict[float, TrainedRun]) -> Sections:
        lines = {f"trained on {_name(share)}": own.free for share, own in written.items()}
        lines |= {"true prefixes, after true tokens": written[0.0].forced, "never coming back": self.never_back()}
        title = f"Written with {self.replaced:.0%} of the tokens replaced"
        header = ("trained on", "nats at the end", "wrong, none replaced", "last token wrong, after true ones")
        rows = [
            [_name(share), number(runs[share].end), f"{own.undisturbed.mean():.1%}"]
            + [f"{wrong[-1]:.0%}" for wrong in (own.forced, own.free)]
            for share, own in written.items()
        ]
        yield curve(title, "token", "share wrong", range(1, self.length + 1), lines)
        yield TableSection("What each model writes", (*header, "after its own"), rows)


@dataclass(frozen=True)
class RecitedTexts:
    """`count` texts of `length` tokens, all different, in an order that `seed` draws; row: a cue, then its text.

    In the prefix of a row a share `noise` of the tokens is replaced by random ones of any text.  What is to be
    predicted stays the text.  The ids of the cues follow those of the tokens.
    """

    count: int
    length: int
    seed: int
    noise: float = 0.0

    @property
    def classes(self) -> int:
        return self.count * self.length

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        """[count, length]: the texts."""
        order = np.random.default_rng(self.seed).permutation(self.classes)
        return order.astype(np.int32).reshape(self.count, self.length)

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        chosen = noise.integers(self.count, size=count)
        true = self.tokens[chosen]
        written = self.disturbed(true, self.noise, noise)
        ids = np.concatenate([self.cues(chosen), written[:, :-1]], axis=1)
        return examples(ids, true)

    def cues(self, chosen: NDArray[np.int64]) -> NDArray[np.int32]:
        """[R, 1]: the cue of each of these texts."""
        return (self.classes + chosen[:, None]).astype(np.int32)

    def disturbed(self, ids: NDArray[np.int32], share: float, noise: np.random.Generator) -> NDArray[np.int32]:
        """`ids` with this share replaced by random tokens."""
        others = noise.integers(self.classes, size=ids.shape)
        return np.where(noise.random(ids.shape) < share, others, ids).astype(np.int32)


class WritingErrors(NamedTuple):
    """The share of wrong choices at each place [length] when each choice follows the true tokens (`forced`) or the ones
    written (`free`), some of them replaced; `undisturbed` is as `free` with none replaced."""

    forced: NDArray[np.float64]
    free: NDArray[np.float64]
    undisturbed: NDArray[np.float64]


def _name(share: float) -> str:
    return f"{share:.0%} of the prefixes replaced" if share else "true prefixes"
