"""Bodies, and the generation requests of their fields: sampling, limits, penalties and biases."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from starlette.requests import Request as HttpRequest
from torch import Tensor

from triptych.errors import InputError, TriptychError, first_line, shown
from triptych.generate import Request, Rule, Sampling
from triptych.model import Model
from triptych.nn import InputRow
from triptych.tasks.generation_requests import end_ids, own_rules
from .fields import ApiError, Fields, read
from .worker import ModelWorker

MOST_TOKENS = 512  # that are generated where a request gives no limit
LAST_SEED = 2**53 - 1  # that JSON carries exactly


async def body(request: HttpRequest, *tables: str, load: bool = True) -> Fields:
    """The fields of a JSON body, once the model that they name is loaded unless not `load`.  Raises ApiError for
    anything else."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    by_name = media == "application/json"
    # Ollama's own examples leave the type to curl; a page of another site, which names its origin, may not.
    if not by_name and ("origin" in request.headers or not request.url.path.startswith("/api/")):
        raise ApiError(415, "send the body as application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the body as it is, without a content-encoding")
    raw = await request.body()
    try:
        data = json.loads(raw, parse_float=_number, parse_constant=_number)
        if rb"\u" in raw:
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has a lone surrogate, which no text holds; leave it out") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; send fewer objects and lists in each other") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {_place_of(error)}") from None
    fields = read(data, *tables)
    if load:
        await request.app.state.server.ready(fields.get("model"))
    return fields


def _place_of(error: ValueError) -> str:
    """What is wrong with a JSON text, and where, without any of it but a number."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start:,} is no {error.encoding}; send UTF-8"
    return first_line(error)


def _number(text: str) -> float | int:
    """A number as JSON Schema has it: 7.0 is an integer.  Raises ValueError for what is no number in JSON, and for one
    that is too large."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is no number there, or too large")
    return int(value) if abs(value) <= LAST_SEED and value.is_integer() else value


def refused(error: TriptychError, worker: ModelWorker, field: str | None = None) -> ApiError:
    """The response to what the library refuses, which names the model as the caller does, not by its path."""
    path, text = worker.model.path, named_as_requested(error)
    return ApiError(400, text if path is None else text.replace(str(path), worker.name), field)


def named_as_requested(error: TriptychError) -> str:
    """What the library refuses, with the limit of new tokens under the name that it has in requests."""
    return str(error).replace("max_new_tokens", "max_tokens")


def seed_of(fields: Fields) -> int:
    """The seed of a request; a random one where it has none, which the response names."""
    seed = fields.get("seed")
    return random.randrange(2**31) if seed is None else int(seed) & LAST_SEED


def stop_of(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop", ())
    return (stop,) if isinstance(stop, str) else tuple(stop)


def generation_request(
    model: Model, fields: Fields, prompt: Sequence[int], source: InputRow | None, number: int, seed: int,
    most: int = MOST_TOKENS, shorten: bool = False, **more: Any,
) -> Request:  # fmt: skip
    """One row of a request: `number` of its `n`, or of its prompts.  Unless a limit is given, it is what the model has
    left, and at most `most` tokens; `shorten` lowers one that the model has no room for.

    Raises ApiError for settings that cannot be, and for a prompt that leaves no room.
    """
    longest = model.spec.longest_row
    room = None if longest is None else longest - len(prompt)
    wanted = limit_of(fields)
    only_scores = wanted == 0 and more.get("score_from") is not None  # its last id does not run
    if room is not None and room < (-1 if only_scores else 1):
        raise ApiError(400, f"the prompt has {len(prompt):,} tokens, and the model reads at most {longest:,}", "prompt")
    limit = (most if room is None else min(room, most)) if wanted is None else wanted
    limit = min(limit, room) if shorten and room is not None else limit
    try:
        sampling = Sampling(
            temperature=fields.get("temperature", 1.0), top_p=fields.get("top_p", 1.0), top_k=fields.get("top_k", 0),
            min_p=fields.get("min_p", 0.0), repetition_penalty=fields.get("repetition_penalty", 1.0), seed=seed,
        )  # fmt: skip
        ends = () if fields.get("ignore_eos") else end_ids(model.inputs)
        return Request(
            prompt=prompt, source=source, sampling=sampling, max_new_tokens=limit, ends=ends,
            rules=rules_of(model, fields, len(prompt)), number=number, priority=fields.get("priority", 0), **more,
        )  # fmt: skip
    except InputError as error:
        raise ApiError(400, named_as_requested(error)) from None


def limit_of(fields: Fields) -> int | None:
    """The most tokens that a request wants; OpenAI's newer field may stand beside the one that it replaces.  Raises
    ApiError where they differ."""
    limits: set[int] = {fields.get("max_tokens"), fields.get("max_completion_tokens")} - {None}
    if len(limits) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    return next(iter(limits), None)


def rules_of(model: Model, fields: Fields, prompt: int) -> list[Rule]:
    """The model's own rules, `logit_bias`, and the penalties of what the row has written: `presence_penalty` once for
    each token that it has, `frequency_penalty` as often as it has it (as OpenAI's API defines them)."""
    rules = own_rules(model.inputs)
    bias = _bias(fields.get("logit_bias") or {}, model.spec.vocab)
    if bias:
        ids, values = torch.tensor([*bias]), torch.tensor([*bias.values()])
        rules.append(lambda logits, row: logits.index_add_(0, ids.to(logits.device), values.to(logits.device)))
    presence, frequency = fields.get("presence_penalty", 0.0), fields.get("frequency_penalty", 0.0)
    if presence or frequency:

        def penalized(logits: Tensor, row: Sequence[int]) -> Tensor:
            written, counts = torch.tensor(row[prompt:], dtype=torch.long).unique(return_counts=True)
            lower = (presence + frequency * counts).to(logits)
            return logits.index_add_(0, written.to(logits.device), -lower)

        rules.append(penalized)
    return rules


def _bias(numbers: dict[str, Any], vocab: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in numbers.items():
        known = key.isascii() and key.isdigit() and len(key) <= len(str(vocab)) and int(key) < vocab
        if not known or isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            problem = f"logit_bias must have token ids below {vocab:,} and numbers from -100 to 100"
            raise ApiError(400, problem, "logit_bias")
        bias[int(key)] = float(value)
    return bias
