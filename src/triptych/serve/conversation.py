"""A conversation as all routes have it, and the prompt that a model's chat template makes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.errors import TriptychError
from triptych.generate import Constraint
from triptych.nn import InputRow
from triptych.tasks.generation_requests import end_ids
from triptych.text import RenderedPrompt
from .abilities import abilities, require
from .call_constraint import call_constraint
from .call_form import CallForm
from .edits import edited
from .fields import ApiError, Fields
from .generation import ServedRequest
from .replies import Reply
from .requests import generation_request, seed_of
from .structured import constraint_of
from .tools import ToolUse, form_of
from .worker import ModelWorker

MOST_TOKENS = 4096  # of an answer where a request gives no limit


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an assistant's message."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """A message of the system, the user or the assistant (with calls of tools), or what a tool returned for a call."""

    role: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class Conversation:
    """The messages of a request and the tools that the model may call; `begun` is the beginning of its answer, and
    `variables` are further ones of its template."""

    messages: Sequence[Message]
    use: ToolUse = field(default_factory=ToolUse)
    begun: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadConversation:
    """What a model reads: ids, and beside an encoder the source; and the form of the calls that it may write."""

    ids: list[int]
    source: InputRow | None
    form: CallForm | None


def call_of(id: str, name: str, arguments: str, at: str) -> ToolCall:
    """A call whose arguments are JSON in a text.  Raises ApiError where they are no object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, f"{at}.arguments must be a JSON object in a text", at)
    return ToolCall(id, name, value)


def text_of(fields: Fields, content: object, types: Sequence[str], table: str, at: str) -> str:
    """A content that is a text, or a list of parts that are texts, joined.

    Raises ApiError for a part of another type, such as an image, which no model here reads.
    """
    if content is None or isinstance(content, str):
        return content or ""
    assert isinstance(content, list)
    return "".join(part_text(fields, part, types, table, f"{at}[{i}]") for i, part in enumerate(content))


def part_text(fields: Fields, part: object, types: Sequence[str], table: str, at: str) -> str:
    """The text of one part of a content.  Raises as `text_of`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in types:
        problem = f"{at} is no text, and no model here reads anything else; send parts of type {types[0]}"
        raise ApiError(400, problem, at)
    refused = kind == "refusal"
    inner = fields.inner(part, "refusal_part" if refused else table, at=at)
    return str(inner.values["refusal" if refused else "text"])


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with those of the system at the beginning as one, which is all that most templates take."""
    count = next((i for i, one in enumerate(messages) if one.role != "system"), len(messages))
    if count < 2:
        return [*messages]
    joined = "\n\n".join(one.content for one in messages[:count])
    return [replace(messages[0], content=joined), *messages[count:]]


def prompt_of(worker: ModelWorker, conversation: Conversation) -> ReadConversation:
    """The prompt of a conversation.

    Raises ApiError for a model that does not write or has no chat template, one whose template cannot write calls where
    there are some, and a conversation that the template refuses.
    """
    model, use = worker.model, conversation.use
    able = abilities(model.spec, model.tokenizer)
    if "chat" not in able and "completions" in able:
        problem = f"{worker.name} has no chat template; send its prompts to /v1/completions"
        raise ApiError(400, problem, "messages")
    require(worker, "chat")
    template = model.inputs.words.chat
    assert template is not None
    called = any(one.calls or one.role == "tool" for one in conversation.messages)
    form = form_of(template) if use.active or called else None
    tools: dict[str, Any] = {"tools": [tool.variable() for tool in use.tools]} if use.active else {}
    messages = _rendered(with_one_system(conversation.messages), form)
    try:
        text = template.render(messages, True, **conversation.variables, **tools).text
        (ids,), sources = model.inputs.prompts([RenderedPrompt(text + conversation.begun)], "")
    except TriptychError as error:
        raise ApiError(400, str(error), "messages") from None
    return ReadConversation(ids, None if sources is None else sources[0], form if use.active else None)


def _rendered(messages: Sequence[Message], form: CallForm | None) -> list[dict[str, Any]]:
    """The messages as the template reads them."""
    rendered: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for one in messages:
        names |= {call.id: call.name for call in one.calls}
        if one.calls:
            assert form is not None
            message = form.message(one.content, [(call.id, call.name, call.arguments) for call in one.calls])
        else:
            message = {"role": one.role, "content": one.content}
        if one.role == "tool":
            assert form is not None
            name = names.get(one.call_id, one.name)
            message |= {"tool_call_id": form.id_of(one.call_id)} | ({} if name is None else {"name": name})
        elif one.name is not None:
            message["name"] = one.name
        if one.reasoning is not None:
            message["reasoning_content"] = one.reasoning
        rendered.append(message)
    return rendered


async def begin(
    worker: ModelWorker, fields: Fields, conversation: Conversation, *, kind: str, logprobs: int | None = None,
    shorten: bool = False,
) -> ServedRequest:  # fmt: skip
    """The rows of a request for the next message, `n` of them.  `shorten` lets a limit that the model has no room for
    be what it has.  Raises ApiError as `prompt_of`."""
    use, seed = conversation.use, seed_of(fields)
    # In another thread, since a long prompt and a first constraint take long.
    prompt = await asyncio.to_thread(prompt_of, worker, conversation)
    constraint = await asyncio.to_thread(constraint_for, worker, fields, use, prompt.form)
    requests = [
        generation_request(
            worker.model, fields, prompt.ids, prompt.source, number, seed, MOST_TOKENS, shorten,
            logprobs=logprobs, constraint=constraint,
        )
        for number in range(fields.get("n", 1))
    ]  # fmt: skip
    form, edited_requests = prompt.form, await edited(worker, fields, requests)
    return ServedRequest(
        worker, fields, edited_requests, kind=kind, hidden=None if form is None else hidden_ids(worker, form),
        reply=lambda: Reply(form, use.schemas, parallel=use.parallel),
    )  # fmt: skip


def constraint_for(worker: ModelWorker, fields: Fields, use: ToolUse, form: CallForm | None) -> Constraint | None:
    """What the next message has to be: a call of a tool where one is required, a text of the form that the request asks
    for, or one of both.  In other requests calls are free, also of tools that ask for `strict`.

    Raises ApiError for what would not be kept.
    """
    model = worker.model
    constraint = constraint_of(fields, model)
    if not use.forced and (constraint is None or not use.active):
        if use.active and any(tool.strict for tool in use.tools):
            fields.note("tools.strict")
        return constraint
    assert form is not None
    if fields.get("stop"):
        raise ApiError(400, "stop strings and a call that is required do not go together; leave one out", "stop")
    words = model.inputs.words
    composed = call_constraint(form, use, words, end_ids(model.inputs), None if use.forced else constraint)
    try:
        composed.prepare(words, model.spec.vocab)
    except TriptychError as error:
        raise ApiError(400, f"a call cannot be required of this model: {error}", "tool_choice") from None
    return composed


def hidden_ids(worker: ModelWorker, form: CallForm) -> frozenset[int]:
    """The special tokens that no call is written with, so that their text is no part of an answer."""
    tokenizer = worker.model.tokenizer
    added = {} if tokenizer is None else tokenizer.backend.get_added_tokens_decoder()
    return frozenset(id for id, token in added.items() if token.special and token.content not in form.literals)
