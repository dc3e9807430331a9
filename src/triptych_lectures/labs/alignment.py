"""Does cross-attention align letters with the ones they come from?  (Bahdanau et al. 2015; lecture L4 exercise 15)"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych import nn
from triptych.errors import InputError
from triptych.model import Model, create, load
from triptych.page import AttentionMap, AttentionSection, Curve
from triptych.probe import Edit, Where
from triptych.text import SEQ2SEQ, character_tokenizer
from triptych.train import OptimizerSettings, Pairs
from triptych.train.recipe import DataSettings
from triptych.train.sources import SHAKESPEARE, Pair, pairs
from .lab import Check, Findings, Lab, Setup, clause, size
from .small_models import Points, fit, share_table

# Made-up words, as a printer of 1600 might set them: any letter may stand twice, and v is written u.
LONGEST = 64  # letters of an old spelling


class AlignmentLab(Lab):
    name = "alignment"

    letters: str = size("abcdefghiklm", "letters of made-up words, two or more different", full="abcdefghiklmnoprstvy")
    shortest: int = size(3, "letters of the shortest made-up word", full=4, most="longest")
    longest: int = size(6, "letters of the longest one, at most 31", full=9, most=31)
    doubled: float = size(0.5, "share of its letters that the old spelling doubles, at most 1", full=0.4, most=1)
    trained: int = size(4_000, "made-up pairs to train on", full=20_000)
    held: int = size(100, "held-out pairs", full=200)
    width: int = size(64, "model width D", full=128)
    hidden: int = size(64, "MLP width", full=256)
    heads: int = size(2, "heads of each layer", full=4)
    head_width: int = size(32, "width of a head")
    layers: int = size(1, "layers of the encoder; the decoder has one", full=2)
    rate: float = size(5e-3, "learning rate; Muon's is twice as large", full=3e-3)
    steps: int = size(220, "training steps", full=260)
    rows: int = size(48, "rows of a training step", full=96)

    def __post_init__(self) -> None:
        if len(set(self.letters)) != len(self.letters) or len(self.letters) < 2:
            raise InputError(f"size letters: {self.letters!r} must be two or more letters, all different")

    @property
    def model(self) -> dict[str, object]:
        """The config of the model that is trained, the encoder-decoder of the quickstart by default."""
        return {
            "model_type": "t5", "d_model": self.width, "d_ff": self.hidden, "d_kv": self.head_width,
            "num_heads": self.heads, "num_layers": self.layers, "num_decoder_layers": 1, "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 64,
            "relative_attention_max_distance": 64,
        }  # fmt: skip

    def findings(self, setup: Setup) -> Findings:
        train, held = self._pairs(setup)
        model, losses = self._model(setup, train)
        setup.progress(f"comparing its cross-attention with the alignment of {len(held)} pairs")
        subject = HeldOutPairs(model, held)
        patterns = subject.patterns()
        shares = [subject.hits(pattern) for pattern in patterns]  # for each layer its heads, then their mean
        layer = max(range(len(shares)), key=lambda i: shares[i][-1])
        *heads, mean = shares[layer]
        moved = subject.hits(patterns[layer], moved=True)[-1]
        hidden = {
            "every letter": [],
            "not the partners": subject.truths,
            "not as many others": subject.others(setup.seed),
        }
        visible = {name: subject.right(letters) for name, letters in hidden.items()}
        sees_all, not_partners, not_others = visible.values()
        untrained = HeldOutPairs(Model(nn.new(model.spec, setup.seed), model.tokenizer), held)
        before = untrained.hits(untrained.patterns()[layer])[-1]
        diagonal, on_partner = subject.share(subject.straight), "whose strongest attention is on a true partner"
        yield clause(
            f"To write a letter the decoder attends to the one it comes from, though no alignment was trained: for"
            f" {mean:.0%} of the letters the strongest weight is on a true partner. The diagonal meets"
            f" {diagonal:.0%}, and where it misses, the weights still meet {moved:.0%}. Control: before training"
            f" they met {before:.0%}.",
            Check(f"letters {on_partner}", mean, least=0.6),
            Check(f"letters {on_partner}, less those of the diagonal", mean - diagonal, least=0.1),
            Check(f"letters that the diagonal misses {on_partner}", moved, least=0.45),
            Check(f"letters {on_partner}, less those before training", mean - before, least=0.2),
            instead="The strongest weights do not follow the alignment",
        )
        yield clause(
            f"It uses what it attends to: of the letters {sees_all:.0%} are right, with their partners hidden"
            f" {not_partners:.0%}, and with as many others hidden, the control, {not_others:.0%}.",
            Check("letters right", sees_all, least=0.75),
            Check("letters right with their partners hidden", not_partners, most=0.35),
            Check("control: letters lost with as many others hidden", sees_all - not_others, most=0.2),
            instead="What is written does not depend on the partners alone",
        )
        chance = subject.share(np.concatenate([truth.mean(1) for truth in subject.truths]))
        hits = {"mean of the heads": mean} | {f"head {i}": share for i, share in enumerate(heads)}
        hits |= {"before training": before, "the diagonal": diagonal, "a letter at random": chance}
        yield share_table("Strongest attention on a true partner", ("whose", "share"), hits)
        yield share_table("Letters right", ("the decoder sees", "share"), visible)
        yield from subject.maps(layer, patterns[layer])
        yield from [Curve("Training", "step", "nats a letter", {"loss": losses}, {})] if losses else []

    def _pairs(self, setup: Setup) -> tuple[list[Pair], list[Pair]]:
        if setup.model is not None or setup.data is not None:
            return pairs(DataSettings(path=setup.data or SHAKESPEARE, words=2, held_out_limit=self.held))
        random = np.random.default_rng(setup.seed)
        drawn = [self._respelled(random) for _ in range(self.trained + self.held)]
        return drawn[: self.trained], drawn[self.trained :]

    def _respelled(self, random: np.random.Generator) -> Pair:
        """(old, new) spelling of a word in which no letter stands beside itself."""
        letters = self.letters
        steps = random.integers(1, len(letters), size=random.integers(self.shortest, self.longest + 1))
        word = "".join(letters[i] for i in steps.cumsum() % len(letters))
        old = word.replace("v", "u")
        twice = random.random(len(old)) < self.doubled
        return "".join(letter * (1 + again) for letter, again in zip(old, twice, strict=True)), word

    def _model(self, setup: Setup, train: Sequence[Pair]) -> tuple[Model, Points]:
        """The one that was named, or one trained now, and its losses."""
        if setup.model is not None:
            setup.progress(f"loading {setup.model}")
            return load(setup.model, dequantize=True), []
        model = speller(self.model, train, setup.seed)
        setup.progress(f"training a spelling model for {self.steps} steps")
        data = in_letters(model, train, LONGEST)
        optimizer = OptimizerSettings(name="muon", lr=self.rate, muon_lr=2 * self.rate)
        losses = fit(
            model.module, data, rows=self.rows, length=LONGEST, steps=self.steps, seed=setup.seed, optimizer=optimizer
        )
        return model, losses


def speller(config: Mapping[str, object], lines: Sequence[Pair], seed: int) -> Model:
    """An untrained encoder-decoder of this shape over the letters of these pairs."""
    tokenizer = character_tokenizer("".join(old + new for old, new in lines), SEQ2SEQ)
    ids = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return create({**config, **ids, "decoder_start_token_id": tokenizer.pad_id}, tokenizer, seed=seed)


def in_letters(model: Model, lines: Sequence[Pair], longest: int) -> Pairs:
    """The pairs as rows to train on, of at most `longest` letters."""
    start, encode = model.spec.ids.start, model.inputs.words.encode
    assert start is not None
    return Pairs.of([(encode(old), encode(new)) for old, new in lines], start, longest)


Truth = NDArray[np.bool_]  # [T, S]: which source letters a target letter may come from


class HeldOutPairs:
    """A spelling model and pairs it was not trained on; its decoder reads the right target (teacher forcing)."""

    def __init__(self, model: Model, held: Sequence[Pair]) -> None:
        start = model.spec.ids.start
        self.model, self.pairs = model, held
        self.sources, self.targets = (model.ids([pair[side] for pair in held]) for side in (0, 1))
        lengths = [(len(a) - 1, len(b) - 1) for a, b in zip(self.sources, self.targets, strict=True)]
        if start is None or lengths != [(len(a), len(b)) for a, b in held]:
            raise InputError("this lab needs an encoder-decoder whose tokens are letters and one end token")
        self.read = [[start, *ids[:-1]] for ids in self.targets]
        self.truths = [cheapest(source, target) for source, target in held]
        # of all letters, one pair after the other: whether each has a partner, and whether its own place is one
        self.partnered = np.concatenate([truth.any(1) for truth in self.truths])
        own = [np.arange(len(truth)) for truth in self.truths]
        self.straight = np.concatenate(
            [truth[at, at.clip(max=truth.shape[1] - 1)] for truth, at in zip(self.truths, own, strict=True)]
        )

    def patterns(self) -> list[list[Tensor]]:
        """For each layer, for each pair, `[H, T + 1, S + 1]`: letters and the end."""
        trace = self.model.trace(self.sources, self.read, read=["decoder.blocks.*.cross.pattern"])
        return [trace[site] for site in trace]

    def hits(self, pattern: list[Tensor], moved: bool = False) -> list[float]:
        """The share of letters whose strongest weight is on a true partner: each head's, then that of their mean.
        With `moved`, only of letters that have no partner at their own place."""
        peaks = np.concatenate(list(map(_peaks, pattern, self.truths)), axis=1)
        return [self.share(head, moved) for head in peaks]

    def share(self, hits: NDArray[Any], moved: bool = False) -> float:
        """The mean over the letters that have a partner; NaN where none has."""
        letters = hits[self.partnered & ~(self.straight & moved)]
        return float(letters.mean()) if len(letters) else math.nan

    def others(self, seed: int) -> list[Truth]:
        """As many letters for each as it has partners, drawn from the rest."""
        random = np.random.default_rng(seed)
        ranks = [(random.random(truth.shape) + truth).argsort(1).argsort(1) for truth in self.truths]
        return [rank < truth.sum(1, keepdims=True) for rank, truth in zip(ranks, self.truths, strict=True)]

    def right(self, hidden: Sequence[Truth] = ()) -> float:
        """The share of letters the model has first, where its decoder cannot see the `hidden` source letters."""

        def hide(scores: Tensor, where: Where) -> Tensor:
            letters = hidden[where.item]
            gone = np.pad(letters, [(0, size - own) for size, own in zip(scores.shape[1:], letters.shape, strict=True)])
            return scores.masked_fill(torch.from_numpy(gone), -torch.inf)

        edit = [Edit("decoder.blocks.*.cross.scores", hide)] if hidden else []
        logits = self.model.trace(self.sources, self.read, edit=edit).logits
        right = [x[:-1].argmax(-1) == torch.tensor(ids[:-1]) for x, ids in zip(logits, self.targets, strict=True)]
        return float(torch.cat(right).float().mean())

    def maps(self, layer: int, pattern: list[Tensor]) -> list[AttentionSection]:
        """The pair whose two spellings differ most in length: what is attended to, and what belongs together."""
        i = max(range(len(self.pairs)), key=lambda i: len(self.pairs[i][0]) - len(self.pairs[i][1]))
        source, target = (list(side) for side in self.pairs[i])
        weights = pattern[i][:, : len(target), : len(source)].float().numpy()
        truth = self.truths[i] / self.truths[i].sum(1, keepdims=True).clip(min=1)
        return [
            AttentionSection(title, explained, [AttentionMap("cross", layer, target, source, shown)])
            for title, explained, shown in (
                ("Where it looks", "Rows are letters to write, columns are letters to read.", weights),
                ("Where they come from", "The cheapest alignments of the two spellings.", truth[None]),
            )
        ]


def _peaks(weights: Tensor, truth: Truth) -> Truth:
    """`[H + 1, T]`: for each head and for their mean, for each letter: is the strongest weight on a true partner?"""
    every = torch.cat([weights, weights.mean(0, keepdim=True)])[:, : len(truth)]
    with_end = np.pad(truth, ((0, 0), (0, 1)))  # the end token is the partner of no letter
    peaks: Truth = with_end[np.arange(len(truth)), every.argmax(-1).numpy()]
    return peaks


def cheapest(source: str, target: str) -> Truth:
    """`[T, S]`: the pairs that stand on each other in some cheapest way of turning `source` into `target` by
    inserting, deleting and replacing letters (Levenshtein 1966)."""
    differ = np.array([[a != b for a in source] for b in target])
    ahead, behind = _costs(differ), _costs(differ[::-1, ::-1])[::-1, ::-1]
    through: Truth = ahead[:-1, :-1] + differ + behind[1:, 1:] == ahead[-1, -1]
    return through


def _costs(differ: Truth) -> NDArray[np.int64]:
    """`[T + 1, S + 1]`: fewest changes between the beginnings of two words."""
    rows, columns = differ.shape
    cost = np.add.outer(np.arange(rows + 1), np.arange(columns + 1))
    for t in range(rows):
        for s in range(columns):
            cost[t + 1, s + 1] = min(cost[t, s] + differ[t, s], cost[t, s + 1] + 1, cost[t + 1, s] + 1)
    return cost
