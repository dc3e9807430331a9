"""The next word of a text in a pretrained decoder, and the last token's attention patterns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.model import Model
from triptych.probe import Edit, Read, Where, put
from triptych_lectures.labs.other_patterns import Path, Replacement, distance, search, shuffled


@dataclass(frozen=True)
class DecoderSizes:
    """The text, the search, and how many layers are compared one by one."""

    text: str
    steps: int
    rate: float
    faithful: float
    sensitive: int


@dataclass(frozen=True)
class DecoderResult:
    """What was measured.  `alone` is the output's change when one layer is shuffled, `sensitive` the layers where it is
    largest and `apart` how far the alternative is from the original there; of each token the share of attention
    (`weights`) and the output's change when it is hidden (`hidden`)."""

    last: LastToken
    other: Replacement
    mixed: Replacement
    path: Path
    alone: list[float]
    sensitive: list[int]
    apart: list[float]
    weights: list[float]
    hidden: list[float]

    @property
    def most_read(self) -> int:
        return self.weights.index(max(self.weights))

    @property
    def most_needed(self) -> int:
        return self.hidden.index(self.drop)

    @property
    def drop(self) -> float:
        return max(self.hidden)


class LastToken:
    """The last token of a text in one model: its attention in every layer, and the next word's distribution."""

    def __init__(self, model: Model, text: str) -> None:
        if model.spec.layout != "decoder":
            raise InputError(f"this lab predicts the next word; it needs a decoder, not an {model.spec.layout}")
        self.model, (self.ids,) = model, model.ids([text])
        self.tokens = [str(i) for i in self.ids] if model.tokenizer is None else model.tokenizer.tokens(self.ids)
        trace = model.trace([self.ids], read=[Read("blocks.*.attn.pattern", at=self.at)])
        self.patterns = torch.stack([trace[site][0][:, 0] for site in trace])  # [L, H, T]
        self.output = trace.logits[0][-1:].softmax(-1)  # [1, V]

    @property
    def at(self) -> int:
        return len(self.ids) - 1

    def edit(self, site: str, fn: Callable[[Tensor, Where], Tensor]) -> Edit:
        return Edit(site, fn, at=self.at)

    def put(self, layer: int, pattern: Tensor) -> Edit:
        """Use `pattern` [H, T] as the last token's attention in this layer."""
        return put(f"blocks.{layer}.attn.pattern", pattern[:, None], at=self.at)

    def put_all(self, patterns: Tensor) -> list[Edit]:
        return [self.put(layer, pattern) for layer, pattern in enumerate(patterns)]

    def logits(self, edits: Sequence[Edit], grad: bool = False) -> Tensor:
        """`[V]`, of the next word."""
        return self.model.trace([self.ids], read=[Read("logits", at=self.at, grad=grad)], edit=edits)["logits"][0][0]

    @property
    def weights(self) -> Tensor:
        return torch.ones(())

    def with_patterns(self, patterns: Tensor, *, grad: bool = False) -> Tensor:
        return self.logits(self.put_all(patterns), grad)[None]

    def moved(self, edits: Sequence[Edit]) -> float:
        """Total variation between the next word's distributions with and without the edits, 0 to 1."""
        return distance(self.logits(edits).softmax(-1), self.output[0])


def of_decoder(model: Model, sizes: DecoderSizes, seed: int, progress: Callable[[str], None]) -> DecoderResult:
    """Search for other patterns of the last token, shuffle them, and hide one token after the other."""
    last, random = LastToken(model, sizes.text), torch.Generator().manual_seed(seed)
    progress(f"searching for other patterns in all {len(last.patterns)} layers of the decoder, {sizes.steps} steps")
    other, path = search(last, random, steps=sizes.steps, rate=sizes.rate, faithful=sizes.faithful)
    progress("shuffling the decoder's patterns")
    mixed = shuffled(last, other.attention, random)
    alone = [last.moved([last.put(layer, mixed.patterns[layer])]) for layer in range(len(last.patterns))]
    sensitive = sorted(range(len(alone)), key=lambda layer: -alone[layer])[: sizes.sensitive]
    apart = [distance(other.patterns[layer], last.patterns[layer]) for layer in sensitive]
    progress("hiding one token of the decoder after the other")
    hidden = [last.moved([last.edit("blocks.*.attn.scores", _without(key))]) for key in range(len(last.ids))]
    weights = last.patterns.mean((0, 1)).tolist()
    return DecoderResult(last, other, mixed, path, alone, sensitive, apart, weights, hidden)


def _without(key: int) -> Callable[[Tensor, Where], Tensor]:
    return lambda scores, where: scores.index_fill(-1, torch.tensor([key]), -torch.inf)
