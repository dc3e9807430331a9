"""Prompts as the requests of a generation, with what the files beside a checkpoint say about generating."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from triptych.arguments import check_ids
from triptych.errors import ConfigError, InputError, ProbeError, shown
from triptych.generate import Request, Rule, Sampling, forbid
from triptych.probe import Plan, Session
from triptych.tasks.model_inputs import ModelInputs, Texts


def end_ids(inputs: ModelInputs) -> tuple[int, ...]:
    """Ids that end a generation: the config's, and the tokenizer's."""
    stops = () if inputs.tokenizer is None else tuple(inputs.tokenizer.stop_ids)
    return tuple(dict.fromkeys((*inputs.spec.ids.eos, *stops)))


def generation_requests(
    inputs: ModelInputs,
    hf: Mapping[str, Any],
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

    `hf` is the config of the checkpoint.  Raises InputError for prompts and rules that are none, ProbeError for a read
    with its gradient or of positions from the end, ConfigError for special ids in the files that are no ids.
    """
    if plan.wants_grad:
        raise ProbeError("grad=True needs trace(); a generation has no autograd graph")
    if plan.from_end:
        raise ProbeError("positions count from 0 in a generation, where the end of a row is not known; give at= >= 0")
    if inputs.spec.layout == "encoder-decoder":
        prefix = prefix or _ids_of(inputs, hf, "forced_bos_token_id")  # mBART's target language
    rows, sources = inputs.prompts(prompts, prefix)
    never = _ids_of(inputs, hf, "bad_words_ids")  # Marian's padding
    if not isinstance(rules, Sequence):
        raise InputError(f"rules must be a list of functions, not {type(rules).__name__}")
    of_sampling = {field.name: settings.pop(field.name) for field in fields(Sampling) if field.name in settings}
    sampling = Sampling(seed=0 if seed is None else seed, **of_sampling)
    ends = (*end_ids(inputs), *check_ids(stop_ids, inputs.spec.vocab, "stop_ids"))
    session = Session(plan, allow_null=allow_null) if plan.reads or plan.edits else None
    return [
        Request(
            prompt=row, source=None if sources is None else sources[i], ends=ends, number=i, probe=session,
            sampling=sampling, rules=[*([forbid(never)] if never else []), *rules], **settings,
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip


def _ids_of(inputs: ModelInputs, hf: Mapping[str, Any], name: str) -> list[int]:
    """Token ids of the generation config, or of the config where older files keep them; words of several ids are not
    among them.  Raises ConfigError for anything else."""
    value = inputs.side_file("generation_config.json").get(name, hf.get(name))
    words = value if isinstance(value, list) else [] if value is None else [[value]]
    if not all(isinstance(word, list) and all(type(i) is int for i in word) for word in words):
        raise ConfigError(f"{inputs.path or 'config'}: {name} must be token ids, not {shown(value)}")
    return [word[0] for word in words if len(word) == 1 and 0 <= word[0] < inputs.spec.vocab]
