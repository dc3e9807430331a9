"""Which heads separate the vectors of one word in two sentences?  (Lecture L0 5.1 and its exercise 5: "She
sat by the river bank")

The claim is that attention from the last word to the one before it separates its two vectors, by a few early heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.model import Model
from triptych.page import AttentionSection, TableSection
from triptych.probe import Edit, LinkTable, Where
from triptych.probe.role_scores import at_offset, mean_weight
from .lab import Check, Clause, Findings, Lab, Setup, clause, size
from .pretrained import decoder, head_maps, last_states
from .small_models import curve

SHORES = (
    "She sat by the river bank", "They fished from the muddy bank", "We swam to the other bank",
    "The boat reached the bank",
)  # fmt: skip
LENDERS = (
    "She went to the money bank", "He borrowed cash from the bank", "They robbed the bank",
    "I have an account at the bank",
)  # fmt: skip
PARTED = 2000  # ways to part the sentences that are tried, drawn where there are more
SHOWN = 8  # of the heads that are cut, in the table and as maps


class BankLab(Lab):
    name = "bank"
    seeds = 1

    ambiguous: str = size("bank", "the word with two meanings, which ends each sentence")
    start: str = size("She sat by the", "words before the deciding word of the first sentence")
    word: str = size("river", "deciding word of the first sentence")
    other_start: str = size("She went to the", "words before the deciding word of the second sentence")
    other_word: str = size("money", "deciding word of the second sentence")
    one_sense: str = size("|".join(SHORES), "sentences of the first meaning, four or more, separated by |")
    other_sense: str = size("|".join(LENDERS), "sentences of the second meaning, four or more")
    readers: int = size(12, "heads that are cut together")

    def __post_init__(self) -> None:
        for name in ("ambiguous", "word", "other_word"):
            if len(getattr(self, name).split()) != 1:
                raise InputError(f"size {name}: {getattr(self, name)!r} must be one word")
        if any(len(side) < 4 for side in self.senses):
            raise InputError("sizes one_sense and other_sense: give four or more sentences of each, separated by |")
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

    def findings(self, setup: Setup) -> Findings:
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
        left = [one / separations[0] if separations[0] else math.nan for one in separations[1:]]
        nothing_else = 1 - min(almost.cosines(almost.cut()))
        setup.progress("comparing the two senses, and the heads that read the word with other words in its place")
        senses_of = Senses(model, *self.senses)
        within, between = senses_of.lines(senses_of.true)
        content = pair.content()
        link = model.link(f"{self.start} {self.word} {self.ambiguous}", *self._words())
        yield self._separated(min(whole), left[0], left[3], nothing_else)
        yield self._few_heads(left[1], left[2], pair.mean(late) / pair.mean(early))
        yield self._two_senses(senses_of)
        yield self._content(content, link)
        senses = f"{sum(map(len, self.senses))} sentences that end in {last}, means"
        of_senses, layers = {"of one sense": within, "of two senses": between}, range(len(whole))
        yield pair.table(early[:SHOWN], self)
        yield curve(f"The two vectors of {last}", "blocks passed", "cosine", layers, cosines)
        yield curve(senses, "blocks passed", "cosine", layers, of_senses)
        yield pair.maps(early[:SHOWN])

    def _words(self) -> tuple[str, str]:
        """The last word and the deciding one of the first sentence, each with its number among words that are alike."""
        words = f"{self.start} {self.word} {self.ambiguous}".split()
        of_word = f"{self.start} {self.word}".split().count(self.word)
        return f"{self.ambiguous}@{words.count(self.ambiguous)}", f"{self.word}@{of_word}"

    def _separated(self, lowest: float, word: float, before: float, nothing_else: float) -> Clause:
        share = "share of the separation left when"
        return clause(
            f"Attention moves what {self.word!r} or {self.other_word!r} say into {self.ambiguous!r}: its two vectors"
            f" enter alike and separate, to a cosine of {lowest:.2f}. With this one link cut {word:.0%} of the"
            f" separation is left; with another link cut, the control, {before:.0%}.",
            Check("lowest cosine in a later layer", lowest, most=0.9),
            Check(f"{share} {self.link}", word, most=0.3),
            Check("separation left if the sentences differ in no other word", nothing_else, most=1e-4),
            Check(f"control: {share} it cannot see the word before that one instead", before, least=0.7),
            instead="It is not this link that separates the two vectors",
        )

    def _few_heads(self, few: float, control: float, weight: float) -> Clause:
        share = f"share of the separation left without the {self.readers} strongest readers of"
        return clause(
            f"A few early heads do it: without the {self.readers} strongest readers of the first third of the layers"
            f" {few:.0%} of the separation is left; control: without as many later heads, which read the word"
            f" {weight:.2f} times as strongly, {control:.0%}.",
            Check(f"{share} the first third of the layers", few, most=0.6),
            Check(f"control: {share} the other layers", control, least=0.8),
            Check("weight of the later readers on the deciding word, over that of the early ones", weight, least=0.6),
            instead="It was not seen to be a few early heads that separate them",
        )

    def _two_senses(self, senses: Senses) -> Clause:
        apart, as_far = senses.apart(senses.true), senses.as_far()
        return clause(
            f"Words of one sense are nearer to each other than to those of the other, by {apart:.2f}; of all ways to"
            f" part the {len(senses.cosines)} sentences in two such groups {as_far:.0%} separate them as far.",
            Check("cosine within a sense, less that between senses", apart, least=0.02),
            Check("control: share of the ways to part the sentences that separate as far", as_far, most=0.05),
            instead="The vectors do not tell the two senses apart",
        )

    def _content(self, content: Content, link: LinkTable) -> Clause:
        """What is said of chance follows the test of `triptych heads --link`, whichever way it comes out."""
        own = next(row for row in link.rows if (row.layer, row.head) == content.head)
        tested = f"`heads --link {self.ambiguous}:{self.word}` puts other words in its place, to which this head gives"
        tested += f" {own.null:.2f}, and finds {len(link.above)} of {len(link.rows)} heads beyond chance,"
        return clause(
            f"{content.name.capitalize()} gives the deciding words {content.weight:.2f} of its weight, and the word"
            f" before any other token {content.elsewhere:.2f}. It was found on these sentences: {tested}"
            f" {'this one among them' if own.above else 'this one not among them'} (p {own.p:.2g}).",
            Check(f"{content.name}: weight to {self.word!r} and {self.other_word!r}, mean", content.weight, least=0.6),
            Check(f"{content.name}: weight of other words to the one before", content.elsewhere, most=0.25),
            instead="No head reads the deciding words, and no others from the word before them",
        )


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


class Senses:
    """Sentences of two senses that end in one word: the vectors of this word by layer."""

    def __init__(self, model: Model, one: Sequence[str], other: Sequence[str]) -> None:
        last = last_states(model, model.ids([*one, *other])).double()
        last = torch.nn.functional.normalize(last, dim=-1)
        self.cosines = (last @ last.mT).permute(1, 2, 0)  # [n, n, L + 1]
        self.true = tuple(range(len(one)))
        self.deep = slice(self.cosines.shape[-1] // 4, None)

    def lines(self, first: Sequence[int]) -> tuple[Lines, Lines]:
        """By layer, the mean cosine within both groups, the `first` sentences and the rest, and that between them."""
        n = len(self.cosines)
        group = torch.isin(torch.arange(n), torch.tensor(first))
        pairs = torch.ones(n, n).triu(1).bool()
        same = group[:, None] == group
        within, between = (self.cosines[pairs & which].mean(0).tolist() for which in (same, ~same))
        return within, between

    def apart(self, first: Sequence[int]) -> float:
        """The mean cosine within the groups less that between them, after the first quarter of the layers."""
        within, between = self.lines(first)
        return fmean(within[self.deep]) - fmean(between[self.deep])

    def as_far(self) -> float:
        """The share of the ways to part the sentences in groups of these sizes that separate them as far, the true one
        among them."""
        n, first = len(self.cosines), len(self.true)
        ways: Iterable[Sequence[int]] = combinations(range(n), first)
        if math.comb(n, first) > PARTED:
            random = np.random.default_rng(n)
            ways = [self.true, *(random.permutation(n)[:first].tolist() for _ in range(PARTED - 1))]
        least = self.apart(self.true) - 1e-9
        return fmean([float(self.apart(way) >= least) for way in ways])


class SentencePair:
    """Two sentences that end in the same token, and one model's attention in them."""

    def __init__(self, model: Model, ambiguous: str, *sentences: tuple[str, str]) -> None:
        if model.spec.layout != "decoder":
            raise InputError(f"this lab needs a decoder, and this model is an {model.spec.layout}")
        self.model, self.rows = model, model.ids([f"{start} {word} {ambiguous}" for start, word in sentences])
        before_last = model.ids([f"{start} {word}" for start, word in sentences])
        if len(
            {tuple(row[len(own) :]) for row, own in zip(self.rows, before_last, strict=True)} - {(self.rows[0][-1],)}
        ):
            raise InputError(
                f"this lab needs a model that has {ambiguous!r} as one and the same token in each sentence; in a model"
                " of letters it is several"
            )
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
        a, b = last_states(self.model, self.rows, edit).double().unbind(1)
        cosines: Lines = torch.cosine_similarity(a, b, dim=-1).tolist()
        return cosines

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
        return fmean([float(weights[head]) for head in heads])

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
