"""Builds generation requests from prompts and the checkpoint's special ids, and sets up speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from triptych.arguments import check_ids, integer
from triptych.attention import CacheType
from triptych.errors import ConfigError, InputError, ProbeError, shown
from triptych.generate import BUDGET, DraftModel, Engine, PromptLookup, Request, Rule, Sampling, Speculation, forbid
from triptych.generate.sampling import check_rules
from triptych.nn import InputRow
from triptych.probe import Plan, Session
from .model_inputs import ModelInputs, TaskModel, Texts


def end_ids(inputs: ModelInputs) -> tuple[int, ...]:
    """Ids that end a generation: the config's, and the tokenizer's."""
    stops = () if inputs.tokenizer is None else tuple(inputs.tokenizer.stop_ids)
    return tuple(dict.fromkeys((*inputs.spec.ids.eos, *stops)))


def generation_requests(
    inputs: ModelInputs,
    prompts: Texts,
    prefix: str | Sequence[int],
    plan: Plan,
    *,
    allow_null: bool,
    rules: Sequence[Rule],
    seed: int | None,
    stop_ids: Sequence[int],
    **settings: Any,
) -> list[Request]:
    """A request for each prompt, under one plan of reads and edits; `settings` are fields of `Sampling` and `Request`.

    Raises InputError for prompts and rules that are none, ProbeError for a read
    with its gradient or of positions from the end, ConfigError for special ids in the files that are no ids.
    """
    if plan.wants_grad:
        raise ProbeError("grad=True needs trace(); a generation has no autograd graph")
    if plan.from_end:
        raise ProbeError("positions count from 0 in a generation, where the end of a row is not known; give at= >= 0")
    rows, sources = decoder_rows(inputs, prompts, prefix)
    check_rules(rules)
    of_sampling = {field.name: settings.pop(field.name) for field in fields(Sampling) if field.name in settings}
    sampling = Sampling(seed=0 if seed is None else seed, **of_sampling)
    ends = (*end_ids(inputs), *check_ids(stop_ids, inputs.spec.vocab, "stop_ids"))
    session = Session(plan, allow_null=allow_null) if plan.reads or plan.edits else None
    return [
        Request(
            prompt=row, source=None if sources is None else sources[i], ends=ends, number=i, probe=session,
            sampling=sampling, rules=[*own_rules(inputs), *rules], **settings,
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip


def decoder_rows(
    inputs: ModelInputs, prompts: Texts, prefix: str | Sequence[int]
) -> tuple[list[list[int]], Sequence[InputRow] | None]:
    """`ModelInputs.prompts`; where an encoder-decoder's generation config names a first id, that is its prefix unless
    another is given."""
    if inputs.spec.layout == "encoder-decoder":
        prefix = prefix or _ids_of(inputs, "forced_bos_token_id")  # mBART's target language
    return inputs.prompts(prompts, prefix)


def own_rules(inputs: ModelInputs) -> list[Rule]:
    """The rules of the generation config: ids that are never written."""
    never = _ids_of(inputs, "bad_words_ids")  # Marian's padding
    return [forbid(never)] if never else []


def _ids_of(inputs: ModelInputs, name: str) -> list[int]:
    """Token ids of the generation config, or of the config where older files keep them; words of several ids are not
    among them.  Raises ConfigError for anything else."""
    value = inputs.generation_config().get(name)
    words = value if isinstance(value, list) else [] if value is None else [[value]]
    if not all(isinstance(word, list) and all(type(i) is int for i in word) for word in words):
        raise ConfigError(f"{inputs.path or 'config'}: {name} must be token ids, not {shown(value)}")
    return [word[0] for word in words if len(word) == 1 and 0 <= word[0] < inputs.spec.vocab]


def speculation(
    model: TaskModel, draft: object, tokens: int, cache_type: CacheType = "auto"
) -> Speculation | None:  # fmt: skip
    """Up to `tokens` guesses a step for `model`, by `draft`: another model, whose cache is of `cache_type` too, "ngram"
    for prompt lookup, None for none.

    Raises InputError for anything else, for a number of tokens below 1, and for a draft model with another vocabulary
    or other tokens.
    """
    integer("draft_tokens", tokens, 1)
    if draft is None:
        return None
    if draft == "ngram":
        return Speculation(PromptLookup(), tokens)
    if not isinstance(draft, TaskModel):
        raise InputError(f"draft={shown(draft)} must be a Model or 'ngram'")
    vocab = model.module.spec.vocab
    engine = Engine(draft.module, chunk=BUDGET, executor=draft.executor, cache_type=cache_type)
    guesses = DraftModel(engine, vocab)
    ids = range(vocab)
    names = [words.tokens(ids) for words in (model.tokenizer, draft.tokenizer) if words is not None]
    if len(names) == 2 and names[0] != names[1]:
        raise InputError("the draft model's tokenizer has other tokens; it must be the model's own")
    return Speculation(guesses, tokens)
