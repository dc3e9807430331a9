"""What guesses the next tokens of a generation, from what `draft=` names."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from triptych.arguments import integer
from triptych.attention import CacheType
from triptych.errors import InputError, shown
from triptych.generate import BUDGET, DraftModel, Engine, Executor, PromptLookup, Speculation
from triptych.nn import Transformer
from triptych.text import Tokenizer

NGRAM = "ngram"


@runtime_checkable
class LoadedModel(Protocol):
    """A model with its tokenizer (`triptych.model.Model`)."""

    module: Transformer
    tokenizer: Tokenizer | None
    executor: Executor


def speculation(
    model: LoadedModel, draft: object, tokens: int, cache_type: CacheType = "auto"
) -> Speculation | None:  # fmt: skip
    """Up to `tokens` guesses a step for `model`, by `draft`: another model, whose cache is of `cache_type` too, "ngram"
    for prompt lookup, None for none.

    Raises InputError for anything else, for a number of tokens below 1, and for a draft model with another vocabulary
    or other tokens.
    """
    integer("draft_tokens", tokens, 1)
    if draft is None:
        return None
    if draft == NGRAM:
        return Speculation(PromptLookup(), tokens)
    if not isinstance(draft, LoadedModel):
        raise InputError(f"draft={shown(draft)} must be a Model or {NGRAM!r}")
    vocab = model.module.spec.vocab
    engine = Engine(draft.module, chunk=BUDGET, executor=draft.executor, cache_type=cache_type)
    guesses = DraftModel(engine, vocab)
    ids = range(vocab)
    names = [words.tokens(ids) for words in (model.tokenizer, draft.tokenizer) if words is not None]
    if len(names) == 2 and names[0] != names[1]:
        raise InputError("the draft model's tokenizer has other tokens; it must be the model's own")
    return Speculation(guesses, tokens)
