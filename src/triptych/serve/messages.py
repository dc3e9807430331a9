"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's answer to a conversation, and the size of one."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .conversation import Conversation, Message, ToolCall, begin, part_text, prompt_of, text_of
from .errors import ANTHROPIC, anthropic_json
from .fields import ApiError, Fields
from .generation import ServedRequest, advice_header, event, respond
from .replies import CallPart, Change, Part
from .requests import body
from .structured import constraint_of
from .tools import Tool, functions, tool_use

if TYPE_CHECKING:
    from .app import Server

#: A line that Claude Code puts first, with a hash that changes each time: no prompt would begin like the last one.
BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
PING = 5.0  # seconds without an event, after which one says that the server lives


def routes(server: Server) -> list[Route]:
    async def messages(request: HttpRequest) -> Response:
        fields = await body(request, "messages", "messages_generation", *server.inside)
        worker = server.worker_of(fields)
        conversation = conversation_of(fields)
        stopped = fields.changed(stop=fields.get("stop_sequences", []))
        generation = await begin(worker, stopped, conversation, kind="msg_", shorten=True)
        return await respond(request, generation, lambda: whole(generation), lambda: events(generation))

    async def count_tokens(request: HttpRequest) -> Response:
        fields = await body(request, "messages")
        worker = server.worker_of(fields)
        await asyncio.to_thread(constraint_of, fields, worker.model)  # a count is of a request that would be answered
        prompt = await asyncio.to_thread(prompt_of, worker, conversation_of(fields))
        return JSONResponse({"input_tokens": len(prompt.ids)}, headers=advice_header(fields))

    return [
        Route(ANTHROPIC, messages, methods=["POST"]),
        Route(f"{ANTHROPIC}/count_tokens", count_tokens, methods=["POST"]),
    ]


def model_json(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def models_json(names: list[str]) -> dict[str, Any]:
    """The list of models in Anthropic's form."""
    data = [model_json(name) for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


# ---------------------------------------------------------------- the request


def conversation_of(fields: Fields) -> Conversation:
    """The conversation of a request.  Where its last message is the assistant's, the answer goes on from there.

    Raises ApiError for blocks that no model here reads, and for tools that are none.
    """
    system = system_of(fields)
    messages = [Message("system", system)] if system else []
    for i, value in enumerate(fields.values["messages"]):
        at = f"messages[{i}]"
        message = fields.inner(value, "messages_message", at=at).values
        add_message(messages, fields, message["role"], message["content"], f"{at}.content")
    begun = ""
    if not messages:  # blocks of thinking alone
        raise ApiError(400, "messages have no text; send at least one of the user's", "messages")
    if messages[-1].role == "assistant":
        if messages[-1].calls:
            raise ApiError(400, "the last message has a call; send its tool_result after it", "messages")
        begun = messages.pop().content
    tools = functions(fields, ("custom", None), tool_of, "messages_tool")
    choice = fields.get("tool_choice", {"type": "auto"})
    kind, name = choice["type"], choice.get("name")
    if (kind == "tool") != (name is not None):
        raise ApiError(400, "tool_choice has a name where its type is tool, and nowhere else", "tool_choice.name")
    parallel = not choice.get("disable_parallel_tool_use", False)
    return Conversation(messages, tool_use(tools, CHOICES[kind], name, parallel), begun)


def system_of(fields: Fields) -> str:
    """The system prompt, its blocks divided by empty lines, without a billing line before it."""
    system = fields.get("system", "")
    texts = [system] if isinstance(system, str) else [
        part_text(fields, block, ("text",), "messages_text", f"system[{i}]") for i, block in enumerate(system)
    ]  # fmt: skip
    if texts and BILLING.match(texts[0]):
        texts[0] = BILLING.sub("", texts[0], count=1)
        fields.note("system.x-anthropic-billing-header")
    return "\n\n".join(text for text in texts if text)


def add_message(messages: list[Message], fields: Fields, role: str, content: object, at: str) -> None:
    """Add what a message says, returns of tools and calls apart; one of the role before it continues that one."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    assert isinstance(blocks, list)
    begun = False  # whether this message has added one of its role
    for i, block in enumerate(blocks):
        where, kind = f"{at}[{i}]", block.get("type") if isinstance(block, Mapping) else None
        if role == "user" and kind == "tool_result":
            result = fields.inner(block, "messages_result", at=where).values
            text = text_of(fields, result.get("content"), ("text",), "messages_text", f"{where}.content")
            messages.append(Message("tool", text, call_id=result["tool_use_id"]))
        elif role == "assistant" and kind in ("thinking", "redacted_thinking"):
            fields.note(f"messages.content.{kind}")
        elif role == "assistant" and kind == "tool_use":
            use = fields.inner(block, "messages_call", at=where).values
            add(messages, Message(role, calls=(ToolCall(use["id"], use["name"], use["input"]),)), "")
        else:
            text = part_text(fields, block, ("text",), "messages_text", where)
            add(messages, Message(role, text), "" if role == "assistant" and begun else "\n\n")
        begun = True
    if not blocks:
        add(messages, Message(role), "")


def add(messages: list[Message], message: Message, between: str) -> None:
    """Add a message, or what it has to the last one of its role."""
    last = messages[-1] if messages else None
    if last is None or last.role != message.role:
        messages.append(message)
        return
    texts = [text for text in (last.content, message.content) if text]
    messages[-1] = replace(last, content=between.join(texts), calls=last.calls + message.calls)


def tool_of(tool: Fields) -> Tool:
    return Tool(
        tool.values["name"], tool.get("description", ""), tool.values["input_schema"], tool.get("strict", False)
    )


# ---------------------------------------------------------------- the response


def block_json(part: Part, generation: ServedRequest) -> dict[str, Any]:
    """A text; or a call, which is one only with arguments that are an object, else the text that the model wrote."""
    if not isinstance(part, CallPart):
        return {"type": "text", "text": part.text, "citations": None}
    value = part.value()
    if value is None:
        return {"type": "text", "text": written(part, generation), "citations": None}
    call = {"type": "tool_use", "id": f"toolu_{part.id}", "name": part.name, "input": value}
    return call | {"caller": {"type": "direct"}}


def written(call: CallPart, generation: ServedRequest) -> str:
    parser = generation.choices[0].reply.parser
    assert parser is not None
    form = parser.form
    return f"{form.opening}{form.head}{call.name}{form.middle}{call.arguments}"


def stop_reason(generation: ServedRequest) -> str:
    choice, spec = generation.choices[0], generation.worker.model.spec
    if choice.finish_reason == "tool_calls" and any(call.value() is not None for call in choice.reply.calls):
        return "tool_use"
    if choice.reason == "length":
        room = spec.longest_row
        exceeded = room is not None and generation.prompt_tokens + generation.fields.values["max_tokens"] > room
        return "model_context_window_exceeded" if exceeded else "max_tokens"
    return "stop_sequence" if choice.stop is not None else "end_turn"


def usage_json(generation: ServedRequest) -> dict[str, Any]:
    """Tokens; of the prompt, those that were not computed again are counted apart."""
    reused = generation.reused_tokens
    return {
        "input_tokens": generation.prompt_tokens - reused, "output_tokens": generation.written_tokens,
        "cache_read_input_tokens": reused, "cache_creation_input_tokens": 0, "cache_creation": None,
        "server_tool_use": None, "service_tier": None, "inference_geo": None, "output_tokens_details": None,
    }  # fmt: skip


def message_json(generation: ServedRequest) -> dict[str, Any]:
    return {
        "id": generation.id, "type": "message", "role": "assistant", "model": generation.worker.name, "content": [],
        "stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None,
        "usage": usage_json(generation),
    }  # fmt: skip


def whole(generation: ServedRequest) -> dict[str, Any]:
    choice = generation.choices[0]
    content = [block_json(part, generation) for part in choice.reply.parts]
    ended = {"content": content, "stop_reason": stop_reason(generation), "stop_sequence": choice.stop}
    return message_json(generation) | ended


async def events(generation: ServedRequest) -> AsyncIterator[bytes]:
    """The blocks of the message one after another.  A call comes once it is whole, so that its arguments are JSON;
    while it is written, pings come."""
    yield sent("message_start", message=message_json(generation))
    yield sent("ping")
    index, last = 0, time.monotonic()
    try:
        async for _, _, changes in generation.changes():
            news = []
            for change in changes:
                news += block_events(change, index, generation)
                index += change.ends
            if not news and time.monotonic() - last > PING:
                news = [sent("ping")]
            for one in news:
                last = time.monotonic()
                yield one
    except ApiError as error:
        yield event(anthropic_json(error), "error")
        return
    delta = {"stop_reason": stop_reason(generation), "stop_sequence": generation.choices[0].stop}
    yield sent("message_delta", delta=delta, usage=usage_json(generation))
    yield sent("message_stop")


def sent(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)


def block_events(change: Change, index: int, generation: ServedRequest) -> list[bytes]:
    """What a change of the reply is in Anthropic's events."""
    part = change.part
    if not isinstance(part, CallPart):
        if change.begins:
            return [sent("content_block_start", index=index, content_block={"type": "text", "text": ""})]
        if change.ends:
            return [sent("content_block_stop", index=index)]
        return [sent("content_block_delta", index=index, delta={"type": "text_delta", "text": change.delta})]
    if not change.ends:
        return []
    block = block_json(part, generation)
    if block["type"] == "text":
        start, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
    else:
        arguments = json.dumps(block["input"], ensure_ascii=False)
        start, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
    return [
        sent("content_block_start", index=index, content_block=start),
        sent("content_block_delta", index=index, delta=delta),
        sent("content_block_stop", index=index),
    ]
