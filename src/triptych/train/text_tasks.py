"""The objectives that read plain text or pairs of texts: causal, masked and seq2seq."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from triptych.errors import ConfigError
from triptych.generate import Engine, Request, Scheduler, generate
from triptych.nn import Transformer
from triptych.spec import MaskedLMHeadSpec
from triptych.text import Tokenizer
from triptych.train import metrics, sources
from triptych.train.data import CausalText, Data, MaskedText, Pairs, check, with_hidden_words
from triptych.train.evaluate import HeldOut, Score
from triptych.train.objectives import TokenMasking, TrainingBatch
from triptych.train.recipe import Recipe
from triptych.train.sources import Pair
from triptych.train.task import ObjectiveTask


class CausalTask(ObjectiveTask):
    """Plain text, each token predicted from those before it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        sources.refuse_records(recipe)
        self.texts, self.held_texts, self.notes = sources.texts(recipe.data)

    def data(self, module: Transformer, tokens: int) -> tuple[Data, HeldOut]:
        words = self.tokenizer
        before, after = _ids(words.eos_id if words.bos_id is None else words.bos_id), _ids(words.eos_id)
        if self.recipe.base is not None and words.leading_bos is None:  # as the texts that this model was trained on
            before = []
        train, held = (
            CausalText.of([[*before, *words.encode_corpus(text).tolist(), *after] for text in side], self.length)
            for side in (self.texts, self.held_texts)
        )
        check(train, words.eos_id, ends=len(self.texts) > 1)
        return train, HeldOut.of(held, train, tokens, text="".join(self.held_texts), device=self.device)


class MaskedTask(CausalTask):
    """Plain text, hidden tokens of which are predicted: of all but the special ones, or of the commonest only."""

    head = MaskedLMHeadSpec

    def data(self, module: Transformer, tokens: int) -> tuple[Data, HeldOut]:
        words, most = self.tokenizer, self.recipe.objective.commonest
        assert words.mask_id is not None
        sides = [[words.encode_corpus(text) for text in side] for side in (self.texts, self.held_texts)]
        special = special_ids(words)
        if most is not None:
            counts = sum(np.bincount(ids, minlength=words.vocab_size) for ids in sides[0])
            order = [int(i) for i in np.argsort(-np.asarray(counts), kind="stable") if int(i) not in special]
            special |= frozenset(order[most:])
        masking = TokenMasking(words.mask_id, words.vocab_size, special, self.recipe.objective.rate)
        before, after = _ids(words.cls_id), _ids(words.sep_id)
        train, held = (MaskedText.of(side, self.length, masking, before, after) for side in sides)
        check(train, words.eos_id, ends=False)
        return train, HeldOut.of(held, train, tokens, device=self.device)


class PairsTask(ObjectiveTask):
    """Pairs of texts, the second of which is predicted from the first; `objective.translate` of those held out are
    translated at the end."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        sources.refuse_records(recipe)
        self.train, self.held = sources.pairs(recipe.data)
        self.texts = [side for pair in self.train for side in pair]

    def data(self, module: Transformer, tokens: int) -> tuple[Data, HeldOut]:
        train, held = (self._rows(side, module) for side in (self.train, self.held))
        check(train, self.tokenizer.eos_id, ends=True)
        data = with_hidden_words(train, self.recipe.objective.hidden, self.tokenizer.unk_id)
        plain = HeldOut.of(held, train, tokens, device=self.device)
        return data, plain if self.recipe.objective.translate is None else self._translated(plain)

    def _rows(self, pairs: Sequence[Pair], module: Transformer) -> Pairs:
        start, encode = module.spec.ids.start, self.tokenizer.encode
        assert start is not None
        rows = [(encode(source), encode(target)) for source, target in pairs]
        if self.recipe.data.drop_longer:
            rows = [row for row in rows if max(map(len, row)) <= self.length]
        return Pairs.of(rows, start, self.length)

    def _translated(self, held: HeldOut) -> WithTranslations:
        """`held` with as many of its pairs as the recipe asks for, evenly spaced.

        Raises ConfigError where fewer fit into `run.length`, and InputError where sacrebleu is missing, before anything
        is trained.
        """
        metrics.translation(["a"], ["a"])
        count, encode = self.recipe.objective.translate or 0, self.tokenizer.encode
        fitting = [pair for pair in self.held if max(len(encode(side)) for side in pair) <= self.length]
        if count > len(fitting):
            raise ConfigError(
                f"objective.translate = {count} is more than the {len(fitting)} pairs held out; lower it or raise "
                "data.held_out"
            )
        chosen = tuple(fitting[i * len(fitting) // count] for i in range(count))
        return WithTranslations(
            held.batches, held.commonest, pairs=chosen, tokenizer=self.tokenizer, length=self.length
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class WithTranslations(HeldOut):
    """Held-out rows, of which `pairs` are also translated: greedily, at most `length` tokens each.  A `sample` of them
    translates nothing."""

    pairs: tuple[Pair, ...]
    tokenizer: Tokenizer
    length: int

    def of_batches(self, batches: tuple[TrainingBatch, ...]) -> HeldOut:
        return HeldOut(batches, self.commonest)

    def measured(self, module: Transformer, batches: Iterable[TrainingBatch]) -> Score:
        """The score of `HeldOut`, and BLEU and chrF of the translations; the baseline is BLEU of the sources."""
        score = super().measured(module, batches)
        originals, right = ([pair[side] for pair in self.pairs] for side in (0, 1))
        written = translated(module, self.tokenizer, originals, self.length)
        copied = metrics.translation(originals, right)["BLEU"]
        return replace(score, metrics=metrics.translation(written, right), baselines={"copying the source": copied})


def translated(module: Transformer, tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[str]:
    """What an encoder-decoder writes for each text, the likeliest token each time, at most `length` tokens."""
    start = module.spec.ids.start
    assert start is not None
    requests = [
        Request(
            prompt=[start], source=tokenizer.encode(text), max_new_tokens=length, ends=_ids(tokenizer.eos_id), number=i
        )
        for i, text in enumerate(texts)
    ]
    with torch.autocast(module.device.type, enabled=False):
        return [one.text for one in generate(Scheduler(Engine(module)), requests, tokenizer)]


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of all special tokens that the tokenizer knows by their use."""
    return frozenset(i for i in vars(tokenizer).values() if isinstance(i, int))


def _ids(special: int | None) -> list[int]:
    """The id of a special token as a sequence, empty if the tokenizer lacks it."""
    return [] if special is None else [special]
