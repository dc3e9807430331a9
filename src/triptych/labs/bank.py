"""How does one word come to mean two things? (lectures L0 exercise 5 and L4 12.2: "She sat by the river bank")"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.labs.lab import Check, Finding, Setup
from triptych.labs.pretrained import decoder
from triptych.model import Model
from triptych.page import AttentionMap, AttentionSection, Curve, TableSection
from triptych.probe import Edit, Where

# What stands before the telling word, and that word; "bank" follows.
RIVER, MONEY, ALMOST = ("She sat by the", "river"), ("She went to the", "money"), ("She sat by the", "money")
SHORES = ("She sat by the river bank", "They fished from the muddy bank", "We swam to the other bank")
LENDERS = ("She went to the money bank", "He borrowed cash from the bank", "They robbed the bank")
READERS, SHOWN = 12, 8  # heads cut off together; of them, in the table and as maps

Head = tuple[int, int]  # layer, head
Lines = list[float]  # one number a layer, the embedding first


def run(setup: Setup) -> Finding:
    """Two sentences that end in one word: its vectors by layer, as they are and with attention cut off."""
    model = decoder(setup)
    setup.say("comparing the two vectors of 'bank', layer by layer")
    pair = Pair(model, RIVER, MONEY)
    readers = pair.readers()
    whole, word, before = pair.cosines(), pair.cosines(pair.cut()), pair.cosines(pair.cut(back=1))
    few, chance = pair.cosines(pair.cut(readers[:READERS])), pair.cosines(pair.cut(_others(readers, setup.seed)))
    least = Pair(model, RIVER, ALMOST)
    alike, apart = _senses(model)

    def left(cosines: Lines) -> float:
        """The share of the parting that is still there."""
        parted = sum(1 - x for x in whole)
        return sum(1 - x for x in cosines) / parted if parted else math.nan

    deep = slice(len(whole) // 4, None)
    checks = (
        Check("cosine of the two 'bank's as they enter", whole[0], least=1 - 1e-6),
        Check("lowest cosine in a later layer", min(whole), most=0.9),
        Check("share of the parting left when 'bank' cannot see 'river' or 'money'", left(word), most=0.3),
        Check("share left when it cannot see the word before instead", left(before), least=0.7),
        Check("parting left if the sentences differ in no other word", 1 - min(least.cosines(least.cut())), most=1e-4),
        Check(
            f"share left without {READERS} other heads, less that without the readers", left(chance) - left(few), 0.2
        ),
        Check("cosine within a sense, less that between senses", _mean(alike[deep]) - _mean(apart[deep]), 0.02),
    )
    meaning = (
        "One token enters as one vector, whatever stands around it. Attention moves what 'river' or 'money' say into"
        " 'bank', in a few heads of the early layers, and from there on the two vectors differ; banks of one sense are"
        " nearer to each other than to those of the other. That attention does it is not read off the weights but"
        " tested: with this one link cut the vectors stay together, with another cut they do not. Many of the heads"
        " that read the word read whatever comes just before (last column), and do not choose it for its meaning."
    )
    parting = {
        "as it is": whole,
        "'bank' cannot see 'river' or 'money'": word,
        f"{READERS} heads that read it cannot": few,
        "'bank' cannot see 'the'": before,
    }
    sections = (
        pair.table(readers[:SHOWN]),
        _curve("The two vectors of 'bank'", parting),
        _curve("Six sentences that end in 'bank', means", {"of one sense": alike, "of two senses": apart}),
        pair.maps(readers[:SHOWN]),
    )
    return Finding("How does one word come to mean two things?", meaning, checks, sections)


class Pair:
    """Two sentences that end in the same token, in one model, and what attends to what in them."""

    def __init__(self, model: Model, *sentences: tuple[str, str]) -> None:
        self.model, self.rows = model, model.ids([f"{start} {word} bank" for start, word in sentences])
        if model.spec.layout != "decoder" or len({row[-1] for row in self.rows}) > 1:
            raise InputError("this lab needs a decoder whose tokenizer ends both sentences in one and the same token")
        starts = [len(row) for row in model.ids([start for start, _ in sentences])]
        self.words = [range(start, len(row) - 1) for start, row in zip(starts, self.rows, strict=True)]
        trace = model.trace(self.rows, read=["blocks.*.attn.pattern"])
        self.patterns = [trace[site] for site in trace]  # for each layer, for each row, [H, T, T]

    def cosines(self, edit: Sequence[Edit] = ()) -> Lines:
        return _cosines(*_last(self.model, self.rows, edit))

    def cut(self, heads: Sequence[Head] | None = None, back: int = 0) -> list[Edit]:
        """No attention from 'bank' to the telling word, or to what stands `back` tokens before it, in these heads."""
        edits = []
        for layer in range(len(self.patterns)):
            chosen = None if heads is None else [head for at, head in heads if at == layer]
            for row, word in enumerate(self.words if chosen is None or chosen else ()):
                hide = _hide(slice(word.start - back, word.stop - back))
                edits.append(Edit(f"blocks.{layer}.attn.scores", hide, row, word.stop, chosen))
        return edits

    def reads(self) -> Tensor:
        """`[L, 2, H]`: the weight 'bank' gives the telling word of each sentence."""
        both = [
            [p[:, -1, w.start : w.stop].sum(-1) for p, w in zip(layer, self.words, strict=True)]
            for layer in self.patterns
        ]
        return torch.stack([torch.stack(layer) for layer in both])

    def readers(self) -> list[Head]:
        """Every head, those that read the word most first."""
        weights = self.reads().mean(1)
        found = [divmod(int(i), weights.shape[1]) for i in weights.flatten().argsort(descending=True)]
        return [(layer, head) for layer, head in found]

    def table(self, heads: Sequence[Head]) -> TableSection:
        weights, rows = self.reads(), []
        for layer, head in heads:
            elsewhere = torch.cat([p[head].diagonal(-1)[1:-1] for p in self.patterns[layer]]).mean()
            river, money = weights[layer, :, head].tolist()
            rows.append([str(layer), str(head), f"{river:.2f}", f"{money:.2f}", f"{elsewhere:.2f}"])
        header = ("layer", "head", "to 'river'", "to 'money'", "other words to the one before")
        return TableSection("Weight from 'bank', where it reads the word most", header, rows)

    def maps(self, heads: Sequence[Head]) -> AttentionSection:
        tokens = [str(i) for i in self.rows[0]] if (t := self.model.tokenizer) is None else t.tokens(self.rows[0])
        maps = []
        for layer in sorted({layer for layer, _ in heads}):
            chosen = sorted(head for at, head in heads if at == layer)
            weights = self.patterns[layer][0][chosen].float().numpy()
            maps.append(AttentionMap("decoder", layer, tokens, tokens, weights, chosen))
        return AttentionSection("Where they look", "Rows are queries, columns are keys; the last row is 'bank'.", maps)


def _hide(keys: slice) -> Callable[[Tensor, Where], Tensor]:
    def hidden(scores: Tensor, where: Where) -> Tensor:
        scores = scores.clone()
        scores[..., keys] = -torch.inf
        return scores

    return hidden


def _others(readers: Sequence[Head], seed: int) -> list[Head]:
    rest = readers[READERS:]
    return [rest[i] for i in torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:READERS]]


def _last(model: Model, rows: Sequence[Sequence[int]], edit: Sequence[Edit] = ()) -> list[Tensor]:
    """For each row `[L + 1, D]`: the last token's vector as it enters the first block and leaves each."""
    trace = model.trace(rows, read=["blocks.0.resid_pre", "blocks.*.resid_post"], edit=edit)
    return [torch.stack([trace[site][row][-1] for site in trace]).double() for row in range(len(rows))]


def _cosines(a: Tensor, b: Tensor) -> Lines:
    found: Lines = torch.cosine_similarity(a, b, dim=-1).tolist()
    return found


def _senses(model: Model) -> tuple[Lines, Lines]:
    """By layer the mean cosine of two 'bank's of one sense, and of different ones."""
    last = _last(model, model.ids([*SHORES, *LENDERS]))
    shores, lenders = last[: len(SHORES)], last[len(SHORES) :]
    same = [_cosines(a, b) for side in (shores, lenders) for i, a in enumerate(side) for b in side[:i]]
    other = [_cosines(a, b) for a in shores for b in lenders]
    alike, apart = ([_mean(layer) for layer in zip(*lines, strict=True)] for lines in (same, other))
    return alike, apart


def _curve(title: str, lines: dict[str, Lines]) -> Curve:
    series = {name: [(float(i), x) for i, x in enumerate(line)] for name, line in lines.items()}
    return Curve(title, "blocks passed", "cosine", series, {})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
