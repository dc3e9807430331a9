"""Rows of the objectives that read plain text or pairs of texts: causal, masked and seq2seq."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triptych import nn
from triptych.errors import ConfigError
from triptych.text import Tokenizer
from triptych.train import sources
from triptych.train.data import CausalText, Data, EpochRows, MaskedText, Pairs, check, with_hidden_words
from triptych.train.evaluate import HeldOut
from triptych.train.objectives import TokenMasking
from triptych.train.recipe import Recipe
from triptych.train.sources import Pair
from triptych.train.translations import with_translations

Text = str | Pair  # a document, or source and target


def text_data(
    recipe: Recipe,
    module: nn.Transformer,
    tokenizer: Tokenizer | None,
    train: Sequence[Text],
    held: Sequence[Text],
    tokens: int,
) -> tuple[Data, HeldOut]:
    """Rows of plain text and pairs, and those held out in batches of about `tokens` tokens."""
    if tokenizer is None:
        raise ConfigError(f"objective {recipe.objective.name} reads text, and the model reads none; use labels")
    masking = _masking(recipe, tokenizer, train) if recipe.objective.name == "masked" else None
    data, held_data = (_data(recipe, module, tokenizer, side, masking) for side in (train, held))
    seq2seq = recipe.objective.name == "seq2seq"
    check(data, tokenizer.eos_id, ends=seq2seq or (recipe.objective.name == "causal" and len(train) > 1))
    text = "".join(documents(held)) if recipe.objective.name == "causal" else None
    if isinstance(data, EpochRows):
        data = with_hidden_words(data, recipe.objective.hidden, tokenizer.unk_id)
    evaluation = HeldOut.of(held_data, data, tokens, text=text, device=recipe.run.device)
    return data, with_translations(evaluation, recipe, tokenizer, pairs(held))


def texts(recipe: Recipe) -> tuple[Sequence[Text], Sequence[Text], Sequence[str]]:
    """Training and held-out texts, pairs for seq2seq and otherwise documents, and notes on how they were read."""
    return (*sources.pairs(recipe.data), []) if recipe.objective.name == "seq2seq" else sources.texts(recipe.data)


def documents(texts: Sequence[Text]) -> list[str]:
    return [text for text in texts if isinstance(text, str)]


def pairs(texts: Sequence[Text]) -> list[Pair]:
    return [text for text in texts if not isinstance(text, str)]


def _masking(recipe: Recipe, tokenizer: Tokenizer, train: Sequence[Text]) -> TokenMasking:
    """Masking of every token but the special ones, or of the commonest tokens only."""
    assert tokenizer.mask_id is not None
    special = frozenset(i for i in vars(tokenizer).values() if isinstance(i, int))
    if recipe.objective.commonest is not None:
        size = tokenizer.vocab_size
        counts = sum(np.bincount(tokenizer.encode_corpus(text), minlength=size) for text in documents(train))
        order = [int(i) for i in np.argsort(-np.asarray(counts), kind="stable") if int(i) not in special]
        special |= frozenset(order[recipe.objective.commonest :])
    return TokenMasking(tokenizer.mask_id, tokenizer.vocab_size, special, recipe.objective.rate)


def _data(
    recipe: Recipe, module: nn.Transformer, tokenizer: Tokenizer, texts: Sequence[Text], masking: TokenMasking | None
) -> Data:
    """Rows for the objective from documents, or from pairs of texts."""
    length, start = recipe.run.length, module.spec.ids.start
    if recipe.objective.name == "seq2seq":
        assert start is not None
        rows = [(tokenizer.encode(source), tokenizer.encode(target)) for source, target in pairs(texts)]
        if recipe.data.drop_longer:
            rows = [row for row in rows if max(map(len, row)) <= length]
        return Pairs.of(rows, start, length)
    rows_of_ids = [tokenizer.encode_corpus(document).tolist() for document in documents(texts)]
    if masking is not None:
        before, after = _ids(tokenizer.cls_id), _ids(tokenizer.sep_id)
        return MaskedText.of(rows_of_ids, length, masking, before, after)
    before, after = _ids(tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id), _ids(tokenizer.eos_id)
    if recipe.base is not None and tokenizer.leading_bos is None:  # as the texts that this model was trained on
        before = []
    return CausalText.of([[*before, *document, *after] for document in rows_of_ids], length)


def _ids(special: int | None) -> list[int]:
    """The id of a special token as a sequence, empty if the tokenizer lacks it."""
    return [] if special is None else [special]
