"""Examples of span corruption (T5: Raffel et al. 2020) and of replaced tokens (ELECTRA: Clark et al. 2020).

They are cut from plain text.  The masking of masked language models is in `objectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken

from triptych import nn
from triptych.attention import Rows
from triptych.errors import ConfigError, InputError
from triptych.nn import Transformer
from triptych.spec import MaskedLMHeadSpec
from triptych.text import Encoded, Tokenizer
from triptych.train import metrics, sources
from triptych.train.checkpoints import read_model
from triptych.train.data import Data, DocumentStream, Use, Windows, random_numbers
from triptych.train.evaluate import HeldOut, Score
from triptych.train.labelled import LabelledExample, ReplacedLoss, labelled
from triptych.train.objectives import Example, Ids, TokenMasking, seq2seq
from triptych.train.recipe import Recipe
from triptych.train.task import HeadTask, JudgedRows, Outputs
from triptych.train.text_tasks import CausalTask, special_ids

SENTINELS = 100  # that a new tokenizer gets, as many as T5's


def noise_spans(length: int, rate: float, mean: float, random: np.random.Generator) -> list[tuple[int, int]]:
    """The spans [start, stop) to remove from `length` tokens, in order, as in T5.

    About `rate` of the tokens are removed, in spans of `mean` tokens on average; kept and removed spans alternate, the
    first is kept and the last removed, and all divisions into as many spans are equally likely.
    """
    removed = min(max(round(length * rate), 1), length - 1)
    count = min(max(round(removed / mean), 1), removed, length - removed)
    sides = (_composition(length - removed, count, random), _composition(removed, count, random))
    edges = np.cumsum(np.stack(sides, axis=1).reshape(-1)).tolist()
    return list(zip(edges[0::2], edges[1::2], strict=True))


def _composition(total: int, parts: int, random: np.random.Generator) -> NDArray[np.int64]:
    """`parts` positive numbers that add up to `total`, each such sequence equally likely."""
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1 if parts > 1 else np.zeros(0, dtype=int)
    return np.diff(np.concatenate([[0], cuts, [total]]))


def corrupted(tokens: Ids, spans: Sequence[tuple[int, int]], sentinels: Sequence[int], end: int) -> tuple[Ids, Ids]:
    """Source and target: the tokens with each span replaced by its sentinel, and each sentinel with the span it stands
    for; both end with `end`."""
    source: list[int] = []
    target: list[int] = []
    at = 0
    for (start, stop), sentinel in zip(spans, sentinels, strict=False):
        source += [*tokens[at:start].tolist(), sentinel]
        target += [sentinel, *tokens[start:stop].tolist()]
        at = stop
    source += tokens[at:].tolist()
    return np.array([*source, end], dtype=np.int32), np.array([*target, end], dtype=np.int32)


def window_length(length: int, rate: float, mean: float) -> int:
    """The most tokens whose source and target, after corruption, have at most `length` tokens each."""

    def longest(tokens: int) -> int:
        removed = min(max(round(tokens * rate), 1), tokens - 1)
        count = min(max(round(removed / mean), 1), removed, tokens - removed)
        return max(tokens - removed + count + 1, removed + count + 1)

    most = 2
    while longest(most + 1) <= length:
        most += 1
    return most


@dataclass(frozen=True, eq=False)
class CorruptedText(Windows):
    """Windows of documents, in which other spans are removed each time one is drawn; in `held` always the same."""

    rate: float
    span: float
    sentinels: tuple[int, ...]
    start: int
    end: int

    use = Use.CORRUPTION
    shortest = 2

    def row(self, piece: tuple[Ids, ...], random: np.random.Generator) -> Example:
        tokens = piece[0]
        spans = noise_spans(len(tokens), self.rate, self.span, random)
        return seq2seq(*corrupted(tokens, spans, self.sentinels, self.end), self.start)


class CorruptionTask(CausalTask):
    """Plain text, as for the objective `causal`, from which spans are removed."""

    def completed(self, tokenizer: Tokenizer) -> Tokenizer:
        tokenizer.backend.add_special_tokens(
            [AddedToken(f"<extra_id_{i}>", special=True, normalized=False) for i in range(SENTINELS)]
        )
        return Tokenizer(tokenizer.backend, tokenizer.specials)

    def data(self, module: Transformer, tokens: int) -> tuple[Data, HeldOut]:
        settings, tokenizer, start = self.recipe.objective, self.tokenizer, module.spec.ids.start
        length = window_length(self.length, settings.rate, settings.span)
        most = len(noise_spans(length, settings.rate, settings.span, random_numbers(0, Use.CORRUPTION, 0)))
        named = [tokenizer.backend.token_to_id(f"<extra_id_{i}>") for i in range(most)]
        ids = tuple(i for i in named if i is not None)
        if len(ids) < most or tokenizer.eos_id is None or start is None:
            raise ConfigError(
                f"objective corruption needs an EOS token and {most} sentinels, <extra_id_0> and on, in the tokenizer"
            )
        train, held = (
            CorruptedText(_stream(texts, tokenizer), length, settings.rate, settings.span, ids, start, tokenizer.eos_id)
            for texts in (self.texts, self.held_texts)
        )
        return train, HeldOut.of(held, train, tokens, device=self.device)


#: Samples tokens for the positions (the second argument) of a row of ids (the first), which hold the mask token there.
Replacer = Callable[[Ids, NDArray[np.int64], np.random.Generator], Ids]


def by_frequency(shares: NDArray[np.float64]) -> Replacer:
    """Tokens by their frequency `shares` [V] in the training text, whatever stands around them."""

    def replaced(ids: Ids, hidden: NDArray[np.int64], random: np.random.Generator) -> Ids:
        return np.asarray(random.choice(len(shares), len(hidden), p=shares), dtype=np.int32)

    return replaced


def by_generator(module: Transformer) -> Replacer:
    """Samples of a masked language model, which is not trained."""

    @torch.no_grad()
    def replaced(ids: Ids, hidden: NDArray[np.int64], random: np.random.Generator) -> Ids:
        if not len(hidden):
            return np.zeros(0, dtype=np.int32)
        rows = Rows((len(ids),))
        x = module(nn.Batch(inputs=torch.from_numpy(ids.astype(np.int64)), rows=rows))
        shares = module.unembed(x[torch.from_numpy(hidden)], rows).double().softmax(-1).cumsum(-1).numpy()
        drawn = shares < random.random(len(hidden))[:, None] * shares[:, -1:]
        return np.asarray(drawn.sum(-1), dtype=np.int32)

    return replaced


@dataclass(frozen=True, eq=False)
class ReplacedText(Windows):
    """Windows of documents, some tokens of which are replaced by samples: others each time a window is drawn."""

    masking: TokenMasking
    replacer: Replacer
    before: Ids
    after: Ids

    use = Use.CORRUPTION

    def row(self, piece: tuple[Ids, ...], random: np.random.Generator) -> LabelledExample:
        """A token is labelled replaced only where the sample differs from it, as in ELECTRA."""
        hidden = self.masking(np.concatenate([self.before, *piece, self.after]), random)
        places = np.flatnonzero(hidden.trained)
        ids = hidden.targets.copy()
        ids[places] = self.replacer(hidden.ids, places, random)
        row = Encoded(ids.tolist(), [0] * len(ids), [], [])
        return labelled(row, (ids != hidden.targets).astype(np.int64), ReplacedLoss(), 0, np.ones(len(ids), dtype=bool))


class ReplacedTask(HeadTask):
    """Plain text, some tokens of which are replaced; the model tells which."""

    kind = "replaced"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        sources.refuse_records(recipe)
        self.texts, self.held_texts, self.notes = sources.texts(recipe.data)

    def data(self, module: Transformer, tokens: int) -> tuple[Data, HeldOut]:
        tokenizer = self.tokenizer
        if tokenizer.mask_id is None or tokenizer.cls_id is None or tokenizer.sep_id is None:
            raise ConfigError("objective replaced needs a tokenizer with mask, class and separator tokens")
        rate, special = self.recipe.objective.rate, special_ids(tokenizer)
        masking = TokenMasking(tokenizer.mask_id, tokenizer.vocab_size, special, rate, shares=(1.0, 0.0))
        before, after = np.array([tokenizer.cls_id], np.int32), np.array([tokenizer.sep_id], np.int32)
        streams = [_stream(texts, tokenizer) for texts in (self.texts, self.held_texts)]
        replacer = self._replacer(streams[0].arrays[0], tokenizer, masking)
        train, held = (ReplacedText(one, self.length - 2, masking, replacer, before, after) for one in streams)
        return train, JudgedRows.of_rows(held.held(), _judged, tokens, self.device)

    def _replacer(self, tokens: Ids, tokenizer: Tokenizer, masking: TokenMasking) -> Replacer:
        path = self.recipe.objective.generator
        if path is None:
            counts = np.bincount(tokens, minlength=tokenizer.vocab_size).astype(np.float64)
            counts[sorted(masking.special)] = 0.0
            if not counts.any():
                raise InputError("the training text has no token but special and unknown ones; give other text")
            return by_frequency(counts / counts.sum())
        module, other, _ = read_model(Path(path))
        if other is None or not isinstance(module.spec.head, MaskedLMHeadSpec):
            raise ConfigError(f"objective.generator = {path!r} is not a masked language model")
        if other.backend.get_vocab() != tokenizer.backend.get_vocab():
            raise ConfigError(f"objective.generator = {path!r} has another vocabulary than the model")
        return by_generator(module.float().eval())


def _judged(nats: float, count: int, rows: Outputs) -> Score:
    """Accuracy over all tokens and F1 of the replaced ones, beside the guess that none was replaced."""
    right = np.concatenate([example.goal for example, _ in rows])
    predicted = np.concatenate([(output.numpy()[:, 0] > 0).astype(np.int64) for _, output in rows])
    figures = {
        "accuracy": metrics.accuracy(predicted, right),
        "F1 of replaced": metrics.f1(predicted == 1, right == 1),
    }
    original = int((right == 0).sum())
    guesses = {"majority": original / len(right)}
    return Score(nats, count, int((predicted == right).sum()), original, metrics=figures, baselines=guesses)


def _stream(texts: Sequence[str], tokenizer: Tokenizer) -> DocumentStream:
    """Documents as token ids without special tokens."""
    return DocumentStream.of([(tokenizer.encode_corpus(text),) for text in texts])
