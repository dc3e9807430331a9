"""`/v1/chat/completions`: OpenAI's answer to a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from triptych.generate.request import TokenLogprobs
from triptych.text import Tokenizer
from .conversation import Conversation, Message, begin, call_of, text_of
from .fields import ApiError, Fields
from .generation import Generated, ServedRequest, error_event, event, respond
from .replies import CallPart, Change, Reply
from .requests import body
from .thinking import with_variables
from .tools import Tool, ToolUse, functions, tool_use

if TYPE_CHECKING:
    from .app import Server


def routes(server: Server) -> list[Route]:
    async def chat(request: HttpRequest) -> Response:
        fields = await body(request, "sampling", "constraint", "chat", *server.inside)
        worker = server.worker_of(fields)
        top = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
        variables = await asyncio.to_thread(with_variables, worker, fields)
        conversation = replace(conversation_of(fields), variables=variables)
        generation = await begin(worker, fields, conversation, kind="chatcmpl-", logprobs=top)
        return await respond(request, generation, lambda: whole(generation), lambda: events(generation))

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


# ---------------------------------------------------------------- the request


def conversation_of(fields: Fields) -> Conversation:
    """The conversation of a request.  Raises ApiError for messages and tools that are none."""
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    messages = [message_of(fields, one, f"messages[{i}]") for i, one in enumerate(fields.values["messages"])]
    messages, begun = begun_of(fields, messages)
    tools = functions(fields, ("function", None), function_of, "chat_tool")
    return Conversation(messages, use_of(fields, tools, "chat_choice"), begun)


def begun_of(fields: Fields, messages: list[Message]) -> tuple[list[Message], str]:
    """With `continue_final_message` the messages before the last one, and its text as the beginning of the answer: what
    the model reads is what it would have written so far.  vLLM's clients also send `add_generation_prompt: false`.

    Raises ApiError for a last message that is not the assistant's, and where the two fields contradict each other.
    """
    goes_on = bool(fields.get("continue_final_message"))
    if fields.get("add_generation_prompt", not goes_on) is goes_on:
        problem = "add_generation_prompt must be the opposite of continue_final_message; leave it out"
        raise ApiError(400, problem, "add_generation_prompt")
    if not goes_on:
        return messages, ""
    *before, last = messages
    if not before or last.role != "assistant" or last.calls:
        problem = "continue_final_message needs a last message of the assistant, after one that it answers"
        raise ApiError(400, problem, "continue_final_message")
    return before, last.content


def message_of(fields: Fields, value: object, at: str) -> Message:
    message = fields.inner(value, "chat_message", at=at)
    role = message.values["role"]
    content = text_of(fields, message.get("content"), ("text", "refusal"), "text_part", f"{at}.content")
    tool_calls = message.get("tool_calls", [])
    if tool_calls and role != "assistant":
        raise ApiError(400, f"{at}.tool_calls are for the assistant's messages", f"{at}.tool_calls")
    if (role == "tool") != ("tool_call_id" in message.values):
        raise ApiError(400, f"{at} must have a tool_call_id where its role is tool, and nowhere else", at)
    if message.get("content") is None and not tool_calls and role != "assistant":
        raise ApiError(400, f"{at}.content is missing", f"{at}.content")
    calls = []
    for i, one in enumerate(tool_calls):
        where = f"{at}.tool_calls[{i}]"
        call = fields.inner(one, "chat_call", at=where)
        function = call.values["function"]
        calls.append(call_of(call.values["id"], function["name"], function["arguments"], f"{where}.function"))
    return Message(
        "system" if role == "developer" else role, content, tuple(calls), message.get("tool_call_id", ""),
        message.get("name"), message.get("reasoning_content"),
    )  # fmt: skip


def function_of(tool: Fields) -> Tool:
    """A tool in the form of the chat route, whose function is an object of its own."""
    function = tool.values.get("function", tool.values)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], function.get("description", ""), parameters, function.get("strict", False))


def use_of(fields: Fields, tools: Sequence[Tool], table: str) -> ToolUse:
    """The tools with `tool_choice`, as OpenAI's routes give it, and `parallel_tool_calls`."""
    choice, name = fields.get("tool_choice", "auto"), None
    if isinstance(choice, dict):
        chosen = fields.inner(choice, table, at="tool_choice").values
        choice, name = "named", chosen.get("function", chosen)["name"]
    return tool_use(tools, choice, name, fields.get("parallel_tool_calls", True))


# ---------------------------------------------------------------- the response

REPLACED = "\ufffd"  # stands for a part of a character, whose bytes are not known from the text


def logprobs_of(tokenizer: Tokenizer | None, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
    if not logprobs or tokenizer is None:
        return None

    before = tokenizer.encode("a", special=False)  # behind which a token has the space that it begins with
    begun = len(tokenizer.decode(before))

    def entry(token: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([*before, token])[begun:]
        return {"token": text, "logprob": value, "bytes": None if REPLACED in text else list(text.encode())}

    content = [
        entry(token, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.top]}
        for token, one in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def call_json(call: CallPart) -> dict[str, Any]:
    return {
        "id": f"call_{call.id}", "type": "function", "function": {"name": call.name, "arguments": call.arguments},
    }  # fmt: skip


def message_json(reply: Reply) -> dict[str, Any]:
    calls = [call_json(call) for call in reply.calls]
    content = reply.text or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    return message | ({"tool_calls": calls} if calls else {})


def whole(generation: ServedRequest) -> dict[str, Any]:
    tokenizer = generation.worker.model.tokenizer
    choices = [
        {
            "index": number,
            "message": message_json(one.reply),
            "logprobs": logprobs_of(tokenizer, one.ids, one.logprobs),
            "finish_reason": one.finish_reason,
        }
        for number, one in enumerate(generation.choices)
    ]
    return generation.head("chat.completion") | {"choices": choices, "usage": generation.usage}


def delta_of(change: Change, choice: Generated) -> dict[str, Any] | None:
    """A change as OpenAI's clients add it up; a call has its name once, and its index ever after."""
    part = change.part
    if isinstance(part, CallPart):
        index = {"index": choice.reply.calls.index(part)}
        if change.begins:
            began = call_json(part) | {"function": {"name": part.name, "arguments": ""}}
            return {"tool_calls": [index | began]}
        return {"tool_calls": [index | {"function": {"arguments": change.delta}}]} if change.delta else None
    return {"content": change.delta} if change.delta else None


async def events(generation: ServedRequest) -> AsyncIterator[bytes]:
    """First the role of each choice, then what it says piece by piece, then the usage where it was requested; the last
    event is `[DONE]`."""
    head, tokenizer = generation.head("chat.completion.chunk"), generation.worker.model.tokenizer
    with_usage = generation.fields.get("stream_options", {}).get("include_usage")
    unused = {"usage": None} if with_usage else {}  # before the last chunk

    def chunk(number: int, delta: object, logprobs: object = None, reason: str | None = None) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event(head | {"choices": [choice]} | unused)

    for number in range(len(generation.rows)):
        yield chunk(number, {"role": "assistant", "content": ""})
    try:
        async for number, piece, changes in generation.changes():
            choice = generation.choices[number]
            deltas = [delta for change in changes if (delta := delta_of(change, choice)) is not None]
            logprobs = logprobs_of(tokenizer, piece.ids, piece.logprobs)
            for i, delta in enumerate(deltas or ([{}] if logprobs is not None else [])):
                yield chunk(number, delta, None if i else logprobs)
            if choice.reason is not None:
                yield chunk(number, {}, reason=choice.finish_reason)
    except ApiError as error:
        yield error_event(error)
        return
    if with_usage:
        yield event(head | {"choices": [], "usage": generation.usage})
    yield b"data: [DONE]\n\n"
