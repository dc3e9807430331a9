"""The objectives that read plain text or pairs of texts: causal, masked, seq2seq, corruption and replaced.

The spans of corruption are those of T5 (Raffel et al. 2020), replaced tokens those of ELECTRA (Clark et al. 2020).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken
from torch import Tensor

from triptych import nn
from triptych.attention import Rows
from triptych.errors import ConfigError, InputError
from triptych.nn import Transformer
from triptych.shards.order import Frame
from triptych.spec import MaskedLMHeadSpec
from triptych.text import Encoded, Tokenizer
from . import metrics, sources
from .checkpoints import read_model
from .data import (
    CausalText,
    Data,
    DocumentStream,
    MaskedText,
    Pairs,
    Piece,
    RandomUse,
    Windows,
    check,
    with_hidden_words,
)
from .evaluate import HeldOut, Score
from .label_tasks import judged_classes
from .labelled import LabelledExample, ReplacedLoss, labelled
from .objectives import Example, Ids, Integers, TokenMasking, TrainingBatch, seq2seq
from .recipe import Recipe
from .shard_rows import ShardDocuments
from .sources import Pair
from .task import HeadTask, ObjectiveTask, Prepared, written

PLAIN = Frame()


class PlainTextTask(ObjectiveTask):
    """Plain text in memory or in shards, as documents to train on and held-out ones."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        sources.refuse_records(recipe)
        if recipe.data.shards:
            self.shards = ShardDocuments(recipe.data)
            self.notes = self.shards.notes
        else:
            self.texts, self.held_texts, self.notes = sources.texts(recipe.data)

    def encoded(self, frame: Frame = PLAIN) -> list[list[Ids]]:
        """The token ids of the documents to train on, and of those held out, without special tokens; of shards, of a
        sample of those to train on, in the `frame` of their rows."""
        if self.shards is not None:
            self.shards.check_tokenizer(self.tokenizer)
            return self.shards.in_memory(frame)
        return [[self.tokenizer.encode_corpus(text) for text in side] for side in (self.texts, self.held_texts)]

    def rows(self, windows: Windows, frame: Frame = PLAIN) -> Data:
        """The rows to train on, made by `windows` of the documents of `encoded`."""
        return windows if self.shards is None else self.shards.rows(windows, frame)


class CausalTask(PlainTextTask):
    """Each token predicted from those before it."""

    def data(self, module: Transformer, tokens: int) -> Prepared:
        words = self.tokenizer
        before, after = _ids(words.eos_id if words.bos_id is None else words.bos_id), _ids(words.eos_id)
        if self.recipe.base is not None and words.leading_bos is None:  # as the texts that this model was trained on
            before = []
        frame = Frame(tuple(before), tuple(after), shifted=True)
        train, held_out = (
            CausalText.of([[*before, *ids.tolist(), *after] for ids in side], self.length)
            for side in self.encoded(frame)
        )
        check(train, words.eos_id, ends=self.shards is not None or len(self.texts) > 1)
        text = "".join(self.held_texts) if self.shards is None else None
        return self.rows(train, frame), HeldOut.of(held_out, train, tokens, text=text, device=self.device)


class MaskedTask(PlainTextTask):
    """Hidden tokens are predicted: any but the special ones, or the commonest only."""

    head = MaskedLMHeadSpec

    def data(self, module: Transformer, tokens: int) -> Prepared:
        words, most = self.tokenizer, self.objective.commonest
        assert words.mask_id is not None
        sides, special = self.encoded(), special_ids(words)
        if most is not None:
            counts = np.bincount(np.concatenate(sides[0]), minlength=words.vocab_size)
            special |= set([i for i in np.argsort(-counts, kind="stable").tolist() if i not in special][most:])
        masking = TokenMasking(words.mask_id, words.vocab_size, special, self.objective.rate)
        before, after = _ids(words.cls_id), _ids(words.sep_id)
        train, held_out = (MaskedText.of(side, self.length, masking, before, after) for side in sides)
        check(train, words.eos_id, ends=False)
        return self.rows(train), HeldOut.of(held_out, train, tokens, device=self.device)


class PairsTask(ObjectiveTask):
    """Pairs of texts, the second of which is predicted from the first; `objective.translate` of those held out are
    translated at the end."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        sources.refuse_records(recipe)
        self.train, self.held_out = sources.pairs(recipe.data)
        self.texts = [side for pair in self.train for side in pair]

    def data(self, module: Transformer, tokens: int) -> Prepared:
        train, held_out = (self._rows(side, module) for side in (self.train, self.held_out))
        check(train, self.tokenizer.eos_id, ends=True)
        data = with_hidden_words(train, self.objective.hidden, self.tokenizer.unk_id)
        plain = HeldOut.of(held_out, train, tokens, device=self.device)
        return data, plain if self.objective.translate is None else self._translated(plain)

    def _rows(self, pairs: Sequence[Pair], module: Transformer) -> Pairs:
        start, encode = module.spec.ids.start, self.tokenizer.encode
        assert start is not None
        rows = [(encode(source), encode(target)) for source, target in pairs]
        if self.recipe.data.drop_longer:
            rows = [row for row in rows if max(map(len, row)) <= self.length]
        return Pairs.of(rows, start, self.length)

    def _translated(self, held_out: HeldOut) -> WithTranslations:
        """`held_out` with as many of its pairs as the recipe asks for, evenly spaced.

        Raises ConfigError where fewer fit into `run.length`, and InputError where sacrebleu is missing, before anything
        is trained.
        """
        metrics.translation(["a"], ["a"])
        count, encode = self.objective.translate or 0, self.tokenizer.encode
        fitting = [pair for pair in self.held_out if max(len(encode(side)) for side in pair) <= self.length]
        if count > len(fitting):
            raise ConfigError(
                f"objective.translate = {count} is more than the {len(fitting)} pairs held out; lower it or raise "
                "data.held_out"
            )
        chosen = sources.spaced(fitting, count)
        return WithTranslations(
            held_out.batches, held_out.commonest, pairs=chosen, tokenizer=self.tokenizer, length=self.length
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class WithTranslations(HeldOut):
    """Held-out rows, of which `pairs` are also translated: greedily, at most `length` tokens each.  A `sample` of them
    translates nothing."""

    pairs: Sequence[Pair]
    tokenizer: Tokenizer
    length: int

    def of_batches(self, batches: tuple[TrainingBatch, ...]) -> HeldOut:
        return HeldOut(batches, self.commonest)

    def finished(self, score: Score, module: Transformer, hits: Sequence[tuple[TrainingBatch, Tensor]]) -> Score:
        """With BLEU and chrF of the translations; the baseline is BLEU of the sources."""
        originals, right = ([pair[side] for pair in self.pairs] for side in (0, 1))
        translations = translated(module, self.tokenizer, originals, self.length)
        copied = metrics.translation(originals, right)["BLEU"]
        return replace(
            score, metrics=metrics.translation(translations, right), baselines={"copying the source": copied}
        )


def translated(module: Transformer, tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[str]:
    """The text that an encoder-decoder writes for each text, the likeliest token each time, at most `length` tokens."""
    start = module.spec.ids.start
    assert start is not None
    sources, ends = [tokenizer.encode(text) for text in texts], _ids(tokenizer.eos_id)
    with torch.autocast(module.device.type, enabled=False):
        return [one.text for one in written(module, [start], sources, length, ends, tokenizer)]


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of all special tokens that the tokenizer knows by their use."""
    return frozenset(i for i in vars(tokenizer).values() if isinstance(i, int))


def _ids(special: int | None) -> list[int]:
    """The id of a special token as a sequence, empty if the tokenizer lacks it."""
    return [] if special is None else [special]


SENTINELS = 100  # that a new tokenizer gets, as many as T5's


def noise_spans(length: int, rate: float, mean: float, random: np.random.Generator) -> list[tuple[int, int]]:
    """The spans [start, stop) to remove from `length` tokens, in order, as in T5.

    About `rate` of the tokens are removed, in spans of `mean` tokens on average; kept and removed spans alternate, the
    first is kept and the last removed, and all divisions into as many spans are equally likely.
    """
    removed, count = _noise(length, rate, mean)
    sides = (_composition(length - removed, count, random), _composition(removed, count, random))
    return [(start, stop) for start, stop in np.cumsum(np.stack(sides, axis=1)).reshape(-1, 2).tolist()]


def _noise(length: int, rate: float, mean: float) -> tuple[int, int]:
    """The number of tokens, of `length`, that are removed, and in how many spans."""
    removed = min(max(round(length * rate), 1), length - 1)
    return removed, min(max(round(removed / mean), 1), removed, length - removed)


def _composition(total: int, parts: int, random: np.random.Generator) -> Integers:
    """`parts` positive numbers that add up to `total`, each such sequence equally likely."""
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def corrupted(tokens: Ids, spans: Sequence[tuple[int, int]], sentinels: Sequence[int], end: int) -> tuple[Ids, Ids]:
    """Source and target: the tokens with each span replaced by its sentinel, and each sentinel with the span it stands
    for; both end with `end`."""
    source, target, at = list[int](), list[int](), 0
    for (start, stop), sentinel in zip(spans, sentinels, strict=False):
        source += [*tokens[at:start].tolist(), sentinel]
        target += [sentinel, *tokens[start:stop].tolist()]
        at = stop
    return np.array([*source, *tokens[at:], end], dtype=np.int32), np.array([*target, end], dtype=np.int32)


def window_length(length: int, rate: float, mean: float) -> int:
    """The most tokens whose source and target, after corruption, have at most `length` tokens each."""

    def longest(tokens: int) -> int:
        removed, count = _noise(tokens, rate, mean)
        return max(tokens - removed, removed) + count + 1

    return next(tokens for tokens in itertools.count(2) if longest(tokens + 1) > length)


@dataclass(frozen=True, eq=False)
class CorruptedText(Windows):
    """Windows of documents, in which other spans are removed at each drawing; in `held_out_rows` always the same."""

    rate: float
    span: float
    sentinels: tuple[int, ...]
    start: int
    end: int

    use = RandomUse.CORRUPTION
    shortest = 2

    def row(self, piece: Piece, random: np.random.Generator) -> Example:
        tokens = piece[0]
        spans = noise_spans(len(tokens), self.rate, self.span, random)
        return seq2seq(*corrupted(tokens, spans, self.sentinels, self.end), self.start)


class CorruptionTask(PlainTextTask):
    """Spans of the text are removed, and written by the decoder."""

    def completed(self, tokenizer: Tokenizer) -> Tokenizer:
        tokenizer.backend.add_special_tokens(
            [AddedToken(f"<extra_id_{i}>", special=True, normalized=False) for i in range(SENTINELS)]
        )
        return Tokenizer(tokenizer.backend, tokenizer.specials)

    def data(self, module: Transformer, tokens: int) -> Prepared:
        settings, tokenizer, start = self.objective, self.tokenizer, module.spec.ids.start
        length = window_length(self.length, settings.rate, settings.span)
        _, most = _noise(length, settings.rate, settings.span)
        named = [tokenizer.backend.token_to_id(f"<extra_id_{i}>") for i in range(most)]
        ids = tuple(i for i in named if i is not None)
        if len(ids) < most or tokenizer.eos_id is None or start is None:
            raise ConfigError(
                f"objective corruption needs an EOS token and {most} sentinels, <extra_id_0> and on, in the tokenizer"
            )
        train, held_out = (
            CorruptedText(_stream(side), length, settings.rate, settings.span, ids, start, tokenizer.eos_id)
            for side in self.encoded()
        )
        return self.rows(train), HeldOut.of(held_out, train, tokens, device=self.device)


#: Samples tokens for the positions (the second argument) of a row of ids (the first), which hold the mask token there.
Replacer = Callable[[Ids, Integers, np.random.Generator], Ids]


def by_frequency(shares: NDArray[np.float64]) -> Replacer:
    """Tokens by their frequency `shares` [V] in the training text, whatever stands around them."""

    def replaced(ids: Ids, hidden: Integers, random: np.random.Generator) -> Ids:
        return np.asarray(random.choice(len(shares), len(hidden), p=shares), dtype=np.int32)

    return replaced


def by_generator(module: Transformer) -> Replacer:
    """Samples of a masked language model, which is not trained."""

    @torch.no_grad()
    def replaced(ids: Ids, hidden: Integers, random: np.random.Generator) -> Ids:
        if not len(hidden):
            return np.zeros(0, dtype=np.int32)
        rows = Rows((len(ids),))
        x = module(nn.Batch(inputs=torch.from_numpy(ids.astype(np.int64)), rows=rows))
        shares = module.unembed(x[torch.from_numpy(hidden)], rows).double().softmax(-1).cumsum(-1).numpy()
        drawn = shares < random.random(len(hidden))[:, None] * shares[:, -1:]
        return np.asarray(drawn.sum(-1), dtype=np.int32)

    return replaced


@dataclass(frozen=True, eq=False)
class ReplacedText(MaskedText):
    """Windows of documents, the hidden tokens of which are replaced by samples: others each time a window is drawn."""

    replacer: Replacer

    use = RandomUse.CORRUPTION
    held_out_rows = Windows.held_out_rows

    def row(self, piece: Piece, random: np.random.Generator) -> LabelledExample:
        """A token is labelled replaced only where the sample differs from it, as in ELECTRA."""
        hidden = super().row(piece, random)
        places = np.flatnonzero(hidden.trained)
        ids = hidden.targets.copy()
        ids[places] = self.replacer(hidden.ids, places, random)
        row = Encoded(ids.tolist(), [0] * len(ids), [], [])
        return labelled(row, (ids != hidden.targets).astype(np.int64), ReplacedLoss(), 0, np.ones(len(ids), dtype=bool))


class ReplacedTask(HeadTask, PlainTextTask):
    """Some tokens are replaced; the model tells which."""

    kind = "replaced"

    def data(self, module: Transformer, tokens: int) -> Prepared:
        tokenizer = self.tokenizer
        if tokenizer.mask_id is None or tokenizer.cls_id is None or tokenizer.sep_id is None:
            raise ConfigError("objective replaced needs a tokenizer with mask, class and separator tokens")
        rate, special = self.objective.rate, special_ids(tokenizer)
        masking = TokenMasking(tokenizer.mask_id, tokenizer.vocab_size, special, rate, shares=(1.0, 0.0))
        before, after = np.array([tokenizer.cls_id], np.int32), np.array([tokenizer.sep_id], np.int32)
        streams = [_stream(side) for side in self.encoded()]
        replacer = self._replacer(streams[0].arrays[0], special)
        train, held_out = (ReplacedText(one, self.length - 2, masking, before, after, replacer) for one in streams)
        guesses = {"majority": np.zeros((1, self.length), dtype=np.int64)}  # that none was replaced
        judge = partial(judged_classes, guesses, "F1 of replaced")
        return self.rows(train), self.judged(held_out.held_out_rows(), judge, tokens)

    def _replacer(self, tokens: Ids, special: frozenset[int]) -> Replacer:
        path = self.objective.generator
        if path is None:
            counts = np.bincount(tokens, minlength=self.tokenizer.vocab_size).astype(np.float64)
            counts[sorted(special)] = 0.0
            if not counts.any():
                raise InputError("the training text has no token but special and unknown ones; give other text")
            return by_frequency(counts / counts.sum())
        module, other, _ = read_model(Path(path))
        if other is None or not isinstance(module.spec.head, MaskedLMHeadSpec):
            raise ConfigError(f"objective.generator = {path!r} is not a masked language model")
        if other.backend.get_vocab() != self.tokenizer.backend.get_vocab():
            raise ConfigError(f"objective.generator = {path!r} has another vocabulary than the model")
        return by_generator(module.float().eval())


def _stream(documents: Sequence[Ids]) -> DocumentStream:
    return DocumentStream.of([(document,) for document in documents])
