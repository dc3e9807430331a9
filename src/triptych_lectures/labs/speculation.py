"""What do guessed tokens change, and what do they save?  (Lecture L4 12.9; Leviathan et al. 2023)

A decoder writes with and without guesses, on the engine that serves every generation.  The guesses are of a draft model
that is the decoder itself with noise added to its weights, from none to so much that nothing is left; of prompt lookup;
and of a source that is wrong always.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from triptych import nn
from triptych.generate import DraftModel, Drafts, Engine, LiveRow, PromptLookup, Request, Sampling, Speculation
from triptych.page import Curve, TableSection
from triptych.spec import RopeSpec
from triptych_lectures.labs.lab import Check, Lab, LabResult, Setup, size
from triptych_lectures.labs.small import block, decoder

HEADS = 4
NOTHING, WRONG, LOOKUP = "no guesses", "always wrong", "prompt lookup"


class SpeculationLab(Lab):
    """Texts, forwards and guesses of each way to write."""

    name = "speculation"
    falsified_by = (
        "The claim would be false if one token of one text, greedy or sampled, differed with guesses. It would also be"
        " false if a draft that agrees always did not save forwards, if one that rarely agrees saved as many, or if a"
        " wrong guess were accepted."
    )
    seeds = 5

    rows: int = size(8, "texts written at once, half of them sampled", full=32)
    new: int = size(48, "tokens of each, two or more", least=2, full=160)
    tokens: int = size(4, "guesses of a forward, at most")
    width: int = size(48, f"width of the decoder, a multiple of {2 * HEADS}", multiple=2 * HEADS)
    vocab: int = size(61, "ids that it knows, two or more", least=2)
    noise: tuple[float, ...] = size(
        (0.02, 0.1, 0.5),
        "noise in the draft's weights, over their own deviation",
        full=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    )

    def run(self, setup: Setup) -> LabResult:
        setup.progress(f"{self.rows} texts of {self.new} tokens without guesses")
        module = self.model(setup.seed)
        requests = self.requests_of(setup.seed)
        plain = self.write(module, requests, None)
        runs = {NOTHING: plain}
        ways: dict[str, Callable[[], Drafts]] = {"draft: itself": lambda: self.draft(module, 0.0, setup.seed)}
        for amount in self.noise:
            ways[f"draft: noise {amount:g}"] = partial(self.draft, module, amount, setup.seed)
        ways |= {LOOKUP: PromptLookup, WRONG: lambda: AlwaysWrong(plain.texts, self.vocab)}
        for name, make in ways.items():
            setup.progress(name)
            runs[name] = self.write(module, requests, make())
        drafts = [runs[name] for name in ways if name.startswith("draft")]
        ideal = -(-(self.new - 1) // (self.tokens + 1)) + 1
        checks = (
            Check(
                "tokens that differ from those without guesses",
                sum(different(one, plain) for one in runs.values()),
                most=0,
            ),
            Check("share of guesses accepted, draft: itself", drafts[0].rate, least=0.99),
            Check("forwards, draft: itself, over the fewest possible", drafts[0].forwards / ideal, most=1.1),
            Check(
                "forwards without guesses over those of draft: itself", plain.forwards / drafts[0].forwards, least=2.0
            ),
            Check(
                "forwards of the worst draft over those of the best",
                drafts[-1].forwards / drafts[0].forwards,
                least=1.5,
            ),
            Check(f"guesses accepted, {WRONG}", runs[WRONG].accepted, most=0),
            Check(f"forwards, {WRONG}, over those without guesses", runs[WRONG].forwards / plain.forwards, least=1.0),
            Check(
                f"tokens through the decoder, {WRONG}, over those without",
                runs[WRONG].through / plain.through,
                least=2.0,
            ),
        )
        meaning = (
            "Each token is chosen from the decoder's own logits, with the random number of its place, and a guess"
            " counts only where it is that token. So no guess changes a text, sampled or not; what depends on guesses"
            " is how many tokens one forward gives. A draft that agrees always gives them all at once, one that has"
            " little in common with the decoder gives nearly none. A wrong guess costs: it goes through the decoder and"
            " is thrown away, so a draft that is always wrong needs as many forwards as none and sends several times"
            " the tokens through them. Whether that pays is a question of time, which the engine measures while it"
            " runs; here guesses are always made."
        )
        question = "What do guessed tokens change, and what do they save?"
        return LabResult(question, meaning, checks, (_table(runs, plain), self._curve(drafts[1:], plain)))

    def model(self, seed: int) -> nn.Transformer:
        """A decoder with random weights, large enough for its choices to differ from place to place."""
        blocks = [block(self.width, HEADS, 2 * self.width)] * 2
        torch_seed = random.Random(seed).randrange(1 << 30)
        module = nn.new(decoder(self.vocab, blocks, inside=RopeSpec(width=self.width // HEADS)), torch_seed)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(2.0)
        return module.eval()

    def requests_of(self, seed: int) -> list[Request]:
        """Prompts of random ids; every second text is sampled."""
        draw = random.Random(seed)
        return [
            Request(
                prompt=[draw.randrange(self.vocab) for _ in range(6)], max_new_tokens=self.new, number=i,
                sampling=Sampling(temperature=float(i % 2), seed=seed),
            )
            for i in range(self.rows)
        ]  # fmt: skip

    def draft(self, module: nn.Transformer, amount: float, seed: int) -> DraftModel:
        """The same model with noise of `amount` times the deviation of each matrix added to it."""
        noise, other = torch.Generator().manual_seed(seed), self.model(seed)
        with torch.no_grad():
            for noisy, exact in zip(other.parameters(), module.parameters(), strict=True):
                noisy.copy_(exact)
                if noisy.dim() == 2:
                    noisy.add_(torch.randn(noisy.shape, generator=noise), alpha=amount * float(noisy.std()))
        return DraftModel(Engine(other), self.vocab)

    def write(self, module: nn.Transformer, requests: Sequence[Request], drafts: Drafts | None) -> SpeculativeRun:
        """All texts at once; the counts are those of the engine's rows and steps."""
        speculation = None if drafts is None else Speculation(drafts, self.tokens, adaptive=False)
        engine = Engine(module, speculation=speculation)
        rows = engine.add(*requests)
        steps = 0
        while engine.rows:
            engine.step()
            steps += 1
        drafted, accepted = sum(row.drafted for row in rows), sum(row.accepted for row in rows)
        through = sum(len(row.new) for row in rows) - len(rows) - accepted + drafted
        return SpeculativeRun([row.new for row in rows], steps, through, drafted, accepted)

    def _curve(self, drafts: Sequence[SpeculativeRun], plain: SpeculativeRun) -> Curve:
        points = {
            "guesses accepted": [(x, one.rate) for x, one in zip(self.noise, drafts, strict=True)],
            "forwards, over those without guesses": [
                (x, one.forwards / plain.forwards) for x, one in zip(self.noise, drafts, strict=True)
            ],
        }
        return Curve("The draft model's agreement", "noise in its weights", "share", points, {}, "x")


@dataclass(frozen=True)
class SpeculativeRun:
    """What one way to write gave: the texts, forwards of the decoder, tokens that went through it after the prompts,
    and guesses made and accepted."""

    texts: list[list[int]]
    forwards: int
    through: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class AlwaysWrong:
    """Guesses that are never what the row goes on with: the next id after each right one."""

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int) -> None:
        self.texts, self.vocab = texts, vocab

    def guess(self, rows: Sequence[LiveRow], counts: Sequence[int]) -> list[list[int]]:
        places = zip(rows, counts, strict=True)
        return [[(token + 1) % self.vocab for token in self._coming(row, count)] for row, count in places]

    def _coming(self, row: LiveRow, count: int) -> Sequence[int]:
        begun = len(row.new)
        return self.texts[row.request.number][begun : begun + count]

    def forget(self, rows: Sequence[LiveRow]) -> None:
        """Nothing is kept of rows."""

    def reset(self) -> None:
        """Nothing is kept."""


def different(one: SpeculativeRun, other: SpeculativeRun) -> int:
    pairs = zip(one.texts, other.texts, strict=True)
    return sum(a != b for x, y in pairs for a, b in zip(x, y, strict=True))


def _table(runs: dict[str, SpeculativeRun], plain: SpeculativeRun) -> TableSection:
    rows = []
    for name, written in runs.items():
        guesses = f"{written.drafted:,}", f"{written.accepted:,}", f"{written.rate:.1%}"
        rows.append(
            [name, *guesses, str(written.forwards), f"{plain.forwards / written.forwards:.2f}", f"{written.through:,}"]
        )
    header = ("", "guesses", "accepted", "rate", "forwards", "times fewer", "tokens through the decoder")
    return TableSection("Guesses and forwards", header, rows)
