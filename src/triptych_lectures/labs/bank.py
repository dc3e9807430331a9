"""Which heads separate the vectors of one word in two sentences?  (Lecture
L0 5.1 and its exercise 5: "She sat by the river bank")

The claim is that attention from the last word to the one before it separates its two vectors, by a few early heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.model import Model
from triptych.page import AttentionSection, TableSection
from triptych.probe import Edit, Where
from triptych.probe.role_scores import at_offset, mean_weight
from .lab import Check, Clause, Lab, LabResult, Setup, size
from .pretrained import decoder, head_maps
from .small_models import curve

SHORES = ("She sat by the river bank", "They fished from the muddy bank", "We swam to the other bank")
LENDERS = ("She went to the money bank", "He borrowed cash from the bank", "They robbed the bank")
SHOWN = 8  # of the heads that are cut, in the table and as maps


class BankLab(Lab):
    """Two sentences that end in one word: its vectors by layer, as they are and with attention cut off."""

    name = "bank"
    falsified_by = (
        "The claim is false if the two vectors separate as far with the link from the last word to the deciding one"
        " cut, or stay together with another link cut. That a few early heads do it is false if cutting as many heads"
        " that read the word as strongly in later layers has the same effect."
    )
    seeds = 1

    ambiguous: str = size("bank", "the word with two meanings, which ends each sentence")
    start: str = size("She sat by the", "words before the deciding word of the first sentence")
    word: str = size("river", "deciding word of the first sentence")
    other_start: str = size("She went to the", "words before the deciding word of the second sentence")
    other_word: str = size("money", "deciding word of the second sentence")
    one_sense: str = size("|".join(SHORES), "sentences of the first meaning, two or more, separated by |")
    other_sense: str = size("|".join(LENDERS), "sentences of the second meaning, two or more")
    readers: int = size(12, "heads that are cut together")

    def __post_init__(self) -> None:
        if any(len(side) < 2 for side in self.senses):
            raise InputError("sizes one_sense and other_sense: give two or more sentences of each, separated by |")
        for sentence in (text for side in self.senses for text in side):
            if not sentence.endswith(f" {self.ambiguous}"):
                raise InputError(
                    f"size ambiguous: {sentence!r} does not end in {self.ambiguous!r}; give sentences that do"
                )

    @property
    def senses(self) -> tuple[list[str], list[str]]:
        one, other = ([text.strip() for text in side.split("|")] for side in (self.one_sense, self.other_sense))
        return one, other

    @property
    def link(self) -> str:
        """What is cut, in words."""
        return f"{self.ambiguous!r} cannot see {self.word!r} or {self.other_word!r}"

    def run(self, setup: Setup) -> LabResult:
        model = decoder(setup)
        last, readers = repr(self.ambiguous), self.readers
        setup.progress(f"comparing the two vectors of {last}, layer by layer")
        pair, almost = (
            SentencePair(model, self.ambiguous, (self.start, self.word), (start, self.other_word))
            for start in (self.other_start, self.start)
        )
        early, late = pair.readers(readers)
        cuts = {
            "as it is": [],
            self.link: pair.cut(),
            f"{readers} early heads that read it cannot": pair.cut(early),
            f"{readers} later heads that read it cannot": pair.cut(late),
            f"{last} cannot see the word before": pair.cut(back=1),
        }
        cosines = {name: pair.cosines(cut) for name, cut in cuts.items()}
        whole = cosines["as it is"]
        separations = [sum(1 - x for x in line) for line in cosines.values()]
        word, few, control, before = (left / separations[0] if separations[0] else math.nan for left in separations[1:])
        (within, between), content = self._senses(model), pair.content()
        share, without = "share of the separation left", f"without the {readers} strongest readers of"
        deep = slice(len(within) // 4, None)
        checks = (
            Check(f"cosine of the two {self.ambiguous!r}s as they enter", whole[0], least=1 - 1e-6),
            Check("lowest cosine in a later layer", min(whole), most=0.9),
            Check(f"{share} when {self.link}", word, most=0.3),
            Check(f"control: {share} when it cannot see the word before that one instead", before, least=0.7),
            Check(
                "separation left if the sentences differ in no other word",
                1 - min(almost.cosines(almost.cut())),
                most=1e-4,
            ),
            Check(f"{share} {without} the first third of the layers", few, most=0.6),
            Check(f"control: {share} {without} the other layers", control, least=0.8),
            Check(
                "weight of the later readers on the deciding word, over that of the early ones",
                pair.mean(late) / pair.mean(early),
                least=0.6,
            ),
            Check("cosine within a sense, less that between senses", _mean(within[deep]) - _mean(between[deep]), 0.02),
            Check(f"{content.name}: weight to {self.word!r} and {self.other_word!r}, mean", content.weight, least=0.6),
            Check(f"{content.name}: weight of other words to the one before", content.elsewhere, most=0.25),
        )
        senses = f"{sum(map(len, self.senses))} sentences that end in {last}, means"
        of_senses, layers = {"of one sense": within, "of two senses": between}, range(len(whole))
        sections = (
            pair.table(early[:SHOWN], self),
            curve(f"The two vectors of {last}", "blocks passed", "cosine", layers, cosines),
            curve(senses, "blocks passed", "cosine", layers, of_senses),
            pair.maps(early[:SHOWN]),
        )
        meaning = self._meaning(few, control, content)
        return LabResult("How does one word get two meanings?", (Clause(meaning, checks),), sections)

    def _meaning(self, few: float, control: float, content: Content) -> str:
        return (
            f"One token enters as one vector, whatever stands around it. Attention moves what {self.word!r} or"
            f" {self.other_word!r} say into {self.ambiguous!r}, in a few heads of the early layers, and from there on"
            " the two vectors differ; words of one sense are nearer to each other than to those of the other. Cutting"
            " tests that: with this one link cut the vectors stay together, with another link cut they do not. Without"
            f" the {self.readers} strongest readers of the first third of the layers {few:.0%} of the separation is"
            f" left; without as many later heads that read the word about as strongly, {control:.0%}. Most readers read"
            f" whatever stands just before them (last column). {content.name.capitalize()} does not:"
            f" it gives the deciding word {content.weight:.2f} and the word before any other token"
            f" {content.elsewhere:.2f}."
        )

    def _senses(self, model: Model) -> tuple[Lines, Lines]:
        """By layer, the mean cosine of two last words of one sense, and of two of different senses."""
        one, other = self.senses
        last = _last(model, model.ids([*one, *other]))
        shores, lenders = last[: len(one)], last[len(one) :]
        same = [_cosines(a, b) for side in (shores, lenders) for i, a in enumerate(side) for b in side[:i]]
        between_senses = [_cosines(a, b) for a in shores for b in lenders]
        within, between = ([_mean(layer) for layer in zip(*lines, strict=True)] for lines in (same, between_senses))
        return within, between


Head = tuple[int, int]  # layer, head
Lines = list[float]  # one number a layer, the embedding first


class Content(NamedTuple):
    """A head that reads the deciding words by their meaning: its mean weight there, and the mean weight that other
    words give to the word before them."""

    head: Head
    weight: float
    elsewhere: float

    @property
    def name(self) -> str:
        return f"layer {self.head[0]} head {self.head[1]}"


class SentencePair:
    """Two sentences that end in the same token, and one model's attention in them."""

    def __init__(self, model: Model, ambiguous: str, *sentences: tuple[str, str]) -> None:
        if model.spec.layout != "decoder":
            raise InputError(f"this lab needs a decoder, and this model is an {model.spec.layout}")
        self.model, self.rows = model, model.ids([f"{start} {word} {ambiguous}" for start, word in sentences])
        if len({row[-1] for row in self.rows}) > 1:
            raise InputError("this lab needs a tokenizer that ends both sentences in one and the same token")
        starts = [len(row) for row in model.ids([start for start, _ in sentences])]
        self.words = [range(start, len(row) - 1) for start, row in zip(starts, self.rows, strict=True)]
        trace = model.trace(self.rows, read=["blocks.*.attn.pattern"])
        self.patterns = [trace[site] for site in trace]  # for each layer, for each row, [H, T, T]
        deciding = [torch.zeros(len(row), len(row), dtype=torch.bool) for row in self.rows]
        for reads, word in zip(deciding, self.words, strict=True):
            reads[-1, word.start : word.stop] = True
        before = [at_offset(range(2, len(row) - 1), -1, len(row)) for row in self.rows]
        # [L, 2, H]: the weight that the last word gives the deciding one, and the mean weight that the tokens before
        # this one give the token before them
        self.weights, elsewhere = (
            torch.stack([torch.stack(list(map(mean_weight, layer, reads))) for layer in self.patterns])
            for reads in (deciding, before)
        )
        self.elsewhere = elsewhere.mean(1)  # [L, H]

    def cosines(self, edit: Sequence[Edit] = ()) -> Lines:
        return _cosines(*_last(self.model, self.rows, edit))

    def cut(self, heads: Sequence[Head] | None = None, back: int = 0) -> list[Edit]:
        """No attention from the last word to the deciding one, or to the token `back` before it, in `heads` or all."""
        edits = []
        for layer in range(len(self.patterns)):
            chosen = None if heads is None else [head for at, head in heads if at == layer]
            for row, word in enumerate(self.words if chosen is None or chosen else ()):
                hide = _hide(range(word.start - back, word.stop - back))
                edits.append(Edit(f"blocks.{layer}.attn.scores", hide, row, word.stop, chosen))
        return edits

    def readers(self, count: int) -> tuple[list[Head], list[Head]]:
        """The `count` heads with the largest weight on the word, in the first third of the layers and in the rest."""
        weights = self.weights.mean(1)
        order = [divmod(int(i), weights.shape[1]) for i in weights.flatten().argsort(descending=True)]
        third = len(self.patterns) // 3
        early, late = ([at for at in order if (at[0] < third) == first][:count] for first in (True, False))
        return early, late

    def mean(self, heads: Sequence[Head]) -> float:
        """The mean weight of these heads on the word."""
        weights = self.weights.mean(1)
        return _mean([float(weights[head]) for head in heads])

    def content(self) -> Content:
        """The head whose weight on the deciding word exceeds most its weight on the previous token elsewhere."""
        more = self.weights.amin(1) - self.elsewhere
        head = divmod(int(more.argmax()), more.shape[1])
        return Content(head, self.mean([head]), float(self.elsewhere[head]))

    def table(self, heads: Sequence[Head], sizes: BankLab) -> TableSection:
        numbers = torch.cat([self.weights, self.elsewhere[:, None]], 1)  # [L, 3, H]
        rows = [[str(layer), str(head), *(f"{x:.2f}" for x in numbers[layer, :, head])] for layer, head in heads]
        header = ("layer", "head", f"to {sizes.word!r}", f"to {sizes.other_word!r}", "other words to the one before")
        return TableSection(f"Weight from {sizes.ambiguous!r}, where it reads the word most", header, rows)

    def maps(self, heads: Sequence[Head]) -> AttentionSection:
        tokens = [str(i) for i in self.rows[0]] if (t := self.model.tokenizer) is None else t.tokens(self.rows[0])
        maps = head_maps([layer[0] for layer in self.patterns], sorted(heads), tokens)
        return AttentionSection(
            "Where they look", "Rows are queries, columns are keys; the last row is the last word.", maps
        )


def _hide(keys: range) -> Callable[[Tensor, Where], Tensor]:
    places = torch.tensor(keys)
    return lambda scores, where: scores.index_fill(-1, places, -torch.inf)


def _last(model: Model, rows: Sequence[Sequence[int]], edit: Sequence[Edit] = ()) -> list[Tensor]:
    """For each row `[L + 1, D]`: the last token's vector as it enters the first block and leaves each block."""
    trace = model.trace(rows, read=["blocks.0.resid_pre", "blocks.*.resid_post"], edit=edit)
    return [torch.stack([trace[site][row][-1] for site in trace]).double() for row in range(len(rows))]


def _cosines(a: Tensor, b: Tensor) -> Lines:
    cosines: Lines = torch.cosine_similarity(a, b, dim=-1).tolist()
    return cosines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
