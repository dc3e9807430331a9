"""Two ways to make generation cheaper: speculative decoding, and linear attention with a state of constant size
(lecture L4 12.9).

`speculation` (Leviathan et al. 2023): guesses of a draft model that is the decoder with noise in its weights, of prompt
lookup, and of a source that is always wrong.  `linear-state` (Katharopoulos et al. 2020): two sums a layer beside the
keys and values of all tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from triptych import nn
from triptych.count import count
from triptych.generate import DraftModel, Drafts, Engine, LiveRow, PromptLookup, Request, Sampling, Speculation
from triptych.model import Model
from triptych.page import TableSection
from triptych.spec import LinearKernelSpec, ModelSpec, RopeSpec
from .counting import products
from .lab import Check, Findings, Ints, Lab, Setup, clause, size
from .small_models import block, curve, decoder, power

HEADS = 4
NOTHING, WRONG, LOOKUP = "no guesses", "always wrong", "prompt lookup"


class SpeculationLab(Lab):
    name = "speculation"

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

    def findings(self, setup: Setup) -> Findings:
        setup.progress(f"{self.rows} texts of {self.new} tokens without guesses")
        module = self.model(setup.seed)
        requests = self.requests_of(setup.seed)
        plain = self.write(module, requests, None)
        runs = {NOTHING: plain}
        noises = {"itself": 0.0} | {f"noise {amount:g}": amount for amount in self.noise}
        ways: dict[str, Drafts] = {
            f"draft: {name}": self.draft(module, amount, setup.seed) for name, amount in noises.items()
        }
        for name, guesses in (ways | {LOOKUP: PromptLookup(), WRONG: AlwaysWrong(plain.texts, self.vocab)}).items():
            setup.progress(name)
            runs[name] = self.write(module, requests, guesses)
        drafts = [runs[name] for name in ways]
        ideal = -(-(self.new - 1) // (self.tokens + 1)) + 1
        ours, worst, wrong = drafts[0], drafts[-1], runs[WRONG]
        saved = plain.forwards / ours.forwards
        texts = ((a, b) for one in runs.values() for a, b in zip(one.texts, plain.texts, strict=True))
        changed = sum(a != b for one, other in texts for a, b in zip(one, other, strict=True))
        yield clause(
            "A guess counts only where it is the token that the decoder's own logits and the random number of its"
            f" place choose. So no guess changes a token of the {self.rows} texts, greedy or sampled.",
            Check("tokens that differ from those without guesses", changed, most=0),
            Check(f"guesses accepted, {WRONG}", wrong.accepted, most=0),
            Check("guesses made, the draft with the fewest", min(one.drafted for one in (*drafts, wrong)), least=1),
            instead="Guesses change the texts, or none were made",
        )
        yield clause(
            f"What guesses change is the number of forwards: a draft that agrees always needs {ours.forwards},"
            f" without guesses it is {plain.forwards}.",
            Check("share of guesses accepted, draft: itself", ours.rate, least=0.99),
            Check("forwards, draft: itself, over the fewest possible", ours.forwards / ideal, 1.0, 1.1),
            Check("forwards without guesses over those of draft: itself", saved, least=2.0),
            instead="The decoder as its own draft does not save what it could",
        )
        yield clause(
            f"A draft with as little in common as noise of {self.noise[-1]:g} leaves ({worst.rate:.0%} of its"
            f" guesses accepted) needs {worst.forwards}.",
            Check("forwards of the worst draft over those of the best", worst.forwards / ours.forwards, least=1.5),
            Check("share of guesses accepted, the worst draft", worst.rate, most=0.5),
            instead="The worst draft agrees too often, or saves as much as the best",
        )
        yield clause(
            "A wrong guess costs: it goes through the decoder and is thrown away. A draft that is always wrong"
            f" needs as many forwards as none and sends {wrong.through / plain.through:.1f} times the tokens"
            " through them.",
            Check(f"forwards, {WRONG}, over those without guesses", wrong.forwards / plain.forwards, 1.0, 1.0),
            Check(f"tokens through the decoder, {WRONG}, over those without", wrong.through / plain.through, 2.0),
            instead="Wrong guesses do not cost this",
        )
        lines = {
            "guesses accepted": [one.rate for one in drafts[1:]],
            "forwards, over those without guesses": [one.forwards / plain.forwards for one in drafts[1:]],
        }
        agreement = curve("The draft model's agreement", "noise in its weights", "share", self.noise, lines, log="x")
        rows = [
            [
                name, f"{one.drafted:,}", f"{one.accepted:,}", f"{one.rate:.1%}", str(one.forwards),
                f"{one.of_a_row:.1f}", f"{plain.of_a_row / one.of_a_row:.2f}", self.expected(one),
                f"{one.through:,}",
            ]
            for name, one in runs.items()
        ]  # fmt: skip
        costs = "forwards until all are written", "of a row, mean", "times fewer", f"expected, {self.tokens} guesses"
        header = ("", "guesses", "accepted", "rate", *costs, "tokens through the decoder")
        yield TableSection("Guesses and forwards", header, rows)
        yield agreement

    def expected(self, one: SpeculativeRun) -> str:
        """Tokens of a forward in which each guess after right ones has the chance of this run: the sum of chance^i for
        i from 0 to the number of guesses (Leviathan et al. 2023, equation 1).  What follows a wrong guess is no try."""
        chance = one.accepted / max(one.accepted + one.refused, 1)
        return f"{sum(chance**i for i in range(self.tokens + 1)):.2f}"

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
        steps = refused = 0
        while engine.rows:
            wrong = [row.drafted - row.accepted for row in rows]
            engine.step()
            refused += sum(row.drafted - row.accepted > was for row, was in zip(rows, wrong, strict=True))
            steps += 1
        drafted, accepted = sum(row.drafted for row in rows), sum(row.accepted for row in rows)
        through = sum(len(row.new) for row in rows) - len(rows) - accepted + drafted
        return SpeculativeRun([row.new for row in rows], steps, through, drafted, accepted, refused)


class SpeculativeRun(NamedTuple):
    """What one way to write gave: the texts, forwards of the decoder, tokens that went through it after the prompts,
    guesses made and accepted, and forwards of a row that refused one."""

    texts: list[list[int]]
    forwards: int
    through: int
    drafted: int
    accepted: int
    refused: int

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def of_a_row(self) -> float:
        """Forwards that a row takes part in, on the mean: each gives it one token and the guesses accepted."""
        return (sum(map(len, self.texts)) - self.accepted) / len(self.texts)


class AlwaysWrong:
    """Guesses that are never what the row goes on with: the next id after each right one."""

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int) -> None:
        self.texts, self.vocab = texts, vocab

    def guess(self, rows: Sequence[LiveRow], counts: Sequence[int]) -> list[list[int]]:
        right = [
            self.texts[row.request.number][len(row.new) : len(row.new) + count]
            for row, count in zip(rows, counts, strict=True)
        ]
        return [[(token + 1) % self.vocab for token in tokens] for tokens in right]

    def forget(self, rows: Sequence[LiveRow]) -> None:
        """Nothing is kept of rows."""

    def reset(self) -> None:
        """Nothing is kept."""


VOCAB, LAYERS = 59, 2
ROUNDING = 1e-4  # nats by which two ways to compute a log-probability in fp32 may differ
LINEAR, SOFTMAX = "linear attention", "softmax attention"


class LinearStateLab(Lab):
    name = "linear-state"

    lengths: Ints = size(
        (64, 128, 256, 512),
        "tokens of the text, prompt and new ones, ascending",
        values=2,
        ascending=True,
        full=(64, 256, 1024, 4096),
    )
    width: int = size(48, f"width of the decoder, a multiple of {2 * HEADS}", multiple=2 * HEADS, full=96)
    new: int = size(24, "tokens written at each length, fewer than the shortest has", full=48, below="lengths")

    def findings(self, setup: Setup) -> Findings:
        points: dict[str, dict[int, MeasuredLength]] = {}
        for name, spec in self.specs().items():
            setup.progress(f"{name}: {', '.join(f'{n:,}' for n in self.lengths)} tokens")
            model = Model(nn.new(spec, setup.seed))
            points[name] = {n: measure(model, n, self.new, setup.seed) for n in self.lengths}
        every = [point for of_length in points.values() for point in of_length.values()]
        first, last = self.lengths[0], self.lengths[-1]
        linear, softmax = points[LINEAR], points[SOFTMAX]
        counted = count(self.specs()[LINEAR]).cache_bytes(last, dtype="fp32")
        grown, more = (of[last].flops / of[first].flops for of in (linear, softmax))
        kept, dearer = linear[last].nbytes / linear[first].nbytes, softmax[last].flops / linear[last].flops
        grows = power(self.lengths, [of.nbytes for of in softmax.values()])
        yield clause(
            "A weight of linear attention is a product of features, so sums over all tokens so far are all that"
            f" the next one needs: {linear[last].nbytes:,} bytes a row after {first:,} tokens as after {last:,},"
            f" and {linear[last].flops:,} FLOPs for one more token.",
            Check(f"{LINEAR}: bytes of a row at {last:,} tokens over those at {first:,}", kept, 1.0, 1.0),
            Check(f"{LINEAR}: bytes over those that `count` gives", linear[last].nbytes / counted, 1.0, 1.0),
            Check(f"{LINEAR}: FLOPs that one more token runs, last over first", grown, 1.0, 1.0),
            instead="The state of linear attention is not constant",
        )
        yield clause(
            "Control: softmax attention needs each key for itself. Its cache grows with the text, to"
            f" {softmax[last].nbytes:,} bytes, and so does the work of one more token, from"
            f" {softmax[first].flops:,} to {softmax[last].flops:,} FLOPs, at {last:,} tokens {dearer:.1f} times"
            " those of linear attention.",
            Check(f"{SOFTMAX}: bytes of a row grow as T to the power", grows, 0.95, 1.05),
            Check(f"{SOFTMAX}: FLOPs that one more token runs, last over first", more, least=1.1),
            Check(f"FLOPs that one more token runs at {last:,} tokens, {SOFTMAX} over linear", dearer, least=1.1),
            instead="Softmax attention does not come to cost more",
        )
        yield clause(
            "Nothing is approximated: the tokens written with the state are those of a forward over the whole text.",
            Check("tokens that differ from those without a cache", sum(one.tokens for one in every), most=0),
            Check("largest difference of a log-probability", max(one.difference for one in every), most=ROUNDING),
            instead="With a cache something else is computed",
        )
        rows = [
            [f"{n:,}", name, f"{of[n].nbytes:,} bytes", f"{of[n].flops:,}", f"{of[n].difference:.1e}"]
            for n in self.lengths
            for name, of in points.items()
        ]
        header = ("T", "", "cache of a row", "FLOPs of one more token", "largest difference, nats")
        lines = {name: [float(point.nbytes) for point in of.values()] for name, of in points.items()}
        yield TableSection("The cache over the length", header, rows)
        yield curve("Bytes of a row in the cache", "T", "bytes", self.lengths, lines, log="xy")

    def specs(self) -> dict[str, ModelSpec]:
        """The same decoder with both kinds of attention."""
        plain = block(self.width, HEADS, 2 * self.width)
        linear = replace(plain, attn=replace(plain.attn, mechanism=LinearKernelSpec()))
        inside = RopeSpec(width=self.width // HEADS)
        blocks = {LINEAR: linear, SOFTMAX: plain}
        return {name: decoder(VOCAB, [kind] * LAYERS, inside=inside) for name, kind in blocks.items()}


class MeasuredLength(NamedTuple):
    """At one length: bytes of a row in the cache, FLOPs that one more token runs, and the largest difference of a
    log-probability (nats) from that of a forward over the whole text; `tokens` are others, by more than rounding."""

    nbytes: int
    flops: int
    difference: float
    tokens: int


def measure(model: Model, length: int, new: int, seed: int) -> MeasuredLength:
    """Write the last `new` of `length` tokens, the prompt read in two pieces."""
    noise = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCAB, (length - new,), generator=noise).tolist()
    engine = Engine(model.module, chunk=-(-len(prompt) // 2), executor="modules")  # whose products torch counts
    engine.cache.longest = length
    (row,) = engine.add(Request(prompt=prompt, max_new_tokens=new, all_logits=True, keep_slot=True))
    seen: list[Tensor] = []

    def step() -> None:
        seen.extend(output.logits for output in engine.step() if output.logits is not None)

    flops = 0
    while engine.rows:
        flops = products(step).total  # at the end that of the last token
    written = torch.cat(seen)[len(prompt) - 1 :].log_softmax(-1)
    whole = model.logits([row.ids[:-1]])[0][len(prompt) - 1 :].log_softmax(-1)
    chosen = whole.gather(1, torch.tensor(row.new)[:, None])[:, 0]
    differing = int((whole.amax(-1) - chosen > ROUNDING).sum())
    return MeasuredLength(engine.cache.nbytes, flops, float((written - whole).abs().max()), differing)
