"""`/v1/responses`: OpenAI's answer to a list of items, of which nothing is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from .chat import use_of
from .conversation import Conversation, Message, begin, call_of, text_of
from .fields import ApiError, Fields
from .generation import ServedRequest, event, respond
from .replies import CallPart, Change, Part, TextPart
from .requests import body
from .thinking import LEVEL, with_reasoning
from .tools import Tool, functions

if TYPE_CHECKING:
    from .app import Server

TEXTS = ("input_text", "output_text", "text", "summary_text")
LEFT_OUT = ("reasoning",)  # items of other servers that say nothing to a model here


def routes(server: Server) -> list[Route]:
    async def responses(request: HttpRequest) -> Response:
        fields = await body(request, "responses", *server.inside)
        worker = server.worker_of(fields)
        variables = await asyncio.to_thread(with_reasoning, worker, fields)
        conversation = replace(conversation_of(fields), variables=variables)
        generation = await begin(worker, limited(fields), conversation, kind="resp_")
        return await respond(
            request, generation, lambda: response_json(generation, conversation),
            lambda: Events(generation, conversation).all(),
        )  # fmt: skip

    return [Route("/v1/responses", responses, methods=["POST"])]


# ---------------------------------------------------------------- the request


def limited(fields: Fields) -> Fields:
    """The fields with the limit under the name that all routes know."""
    limit = fields.get("max_output_tokens")
    return fields if limit is None else fields.changed(max_tokens=limit)


def conversation_of(fields: Fields) -> Conversation:
    """The conversation of a request; an empty input is an empty message of the user.

    Raises ApiError for items that no model here reads, and for tools that are none.
    """
    instructions = fields.get("instructions")
    messages = [Message("system", instructions)] if instructions else []
    content = fields.get("input", "")
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    for i, item in enumerate(items):
        add_item(messages, fields, item, f"input[{i}]")
    if not items:
        messages.append(Message("user"))
    tools = functions(fields, ("function",), tool_of, "responses_tool")
    return Conversation(messages, use_of(fields, tools, "responses_choice"))


def add_item(messages: list[Message], fields: Fields, item: object, at: str) -> None:
    """Add an item of the input; a call belongs to the assistant's message before it."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind in LEFT_OUT:
        fields.note(f"input.{kind}")
    elif kind == "function_call":
        call = fields.inner(item, "responses_call", at=at).values
        calls = (call_of(call["call_id"], call["name"], call["arguments"], at),)
        if messages and messages[-1].role == "assistant":
            messages[-1] = replace(messages[-1], calls=messages[-1].calls + calls)
        else:
            messages.append(Message("assistant", calls=calls))
    elif kind == "function_call_output":
        result = fields.inner(item, "responses_result", at=at).values
        content = text_of(fields, result["output"], TEXTS, "responses_part", f"{at}.output")
        messages.append(Message("tool", content, call_id=result["call_id"]))
    elif kind == "message":
        message = fields.inner(item, "responses_message", at=at).values
        role = "system" if message["role"] == "developer" else message["role"]
        messages.append(Message(role, text_of(fields, message["content"], TEXTS, "responses_part", f"{at}.content")))
    else:
        known = "message, function_call or function_call_output"
        raise ApiError(400, f"{at} must be an item of type {known}; send no other items", at)


def tool_of(tool: Fields) -> Tool:
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    return Tool(tool.values["name"], tool.get("description", ""), parameters, tool.get("strict", False))


# ---------------------------------------------------------------- the response


def item_json(part: Part, status: str) -> dict[str, Any]:
    """An item of the output; one in progress is empty, since what it has comes in events after it."""
    begun = status == "in_progress"
    if isinstance(part, CallPart):
        return {
            "id": f"fc_{part.id}", "type": "function_call", "status": status, "call_id": f"call_{part.id}",
            "name": part.name, "arguments": "" if begun else part.arguments,
        }  # fmt: skip
    content = [] if begun else [content_json(part.text)]
    return {"id": f"msg_{part.id}", "type": "message", "status": status, "role": "assistant", "content": content}


def content_json(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def status_of(generation: ServedRequest) -> str:
    return {None: "in_progress", "length": "incomplete"}.get(generation.choices[0].finish_reason, "completed")


def response_json(generation: ServedRequest, conversation: Conversation, *, begun: bool = False) -> dict[str, Any]:
    """The response; as it is while it is written where it has only `begun`."""
    fields, reply, status = generation.fields, generation.choices[0].reply, status_of(generation)
    parts = reply.parts or [TextPart()]
    whole = [item_json(one, status if one is parts[-1] else "completed") for one in parts]
    return {
        "id": generation.id, "object": "response", "created_at": generation.created,
        "completed_at": int(time.time()) if status == "completed" else None, "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "error": None, "model": generation.worker.name, "output": [] if begun else whole,
        "usage": None if begun else usage_json(generation), "metadata": fields.get("metadata", {}),
        "instructions": fields.get("instructions"), "previous_response_id": None,
        "max_output_tokens": fields.get("max_output_tokens"), "max_tool_calls": None,
        "temperature": fields.get("temperature", 1.0), "top_p": fields.get("top_p", 1.0), "top_logprobs": 0,
        "presence_penalty": fields.get("presence_penalty", 0.0),
        "frequency_penalty": fields.get("frequency_penalty", 0.0),
        "text": {"format": {"type": "text"}} | fields.get("text", {}),
        "reasoning": {"effort": conversation.variables.get(LEVEL), "summary": None},
        "tools": tools_json(conversation), "tool_choice": choice_json(conversation),
        "parallel_tool_calls": conversation.use.parallel, "truncation": "disabled", "store": False,
        "background": False, "service_tier": "default", "safety_identifier": None, "prompt_cache_key": None,
        "user": None,
    }  # fmt: skip


def tools_json(conversation: Conversation) -> list[dict[str, Any]]:
    return [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
         "strict": tool.strict}
        for tool in conversation.use.tools
    ]  # fmt: skip


def choice_json(conversation: Conversation) -> object:
    use = conversation.use
    return {"type": "function", "name": use.tools[0].name} if use.choice == "named" else use.choice


def usage_json(generation: ServedRequest) -> dict[str, Any]:
    prompt, written = generation.prompt_tokens, generation.written_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": generation.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": written, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + written,
    }  # fmt: skip


class Events:
    """The events of a response: each item of its output is added, grows and is done, one after another."""

    def __init__(self, generation: ServedRequest, conversation: Conversation) -> None:
        self.generation, self.conversation, self.sent = generation, conversation, 0

    def event(self, kind: str, **fields: object) -> bytes:
        number, self.sent = self.sent, self.sent + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    async def all(self) -> AsyncIterator[bytes]:
        generation, reply = self.generation, self.generation.choices[0].reply
        begun = response_json(generation, self.conversation, begun=True)
        yield self.event("response.created", response=begun)
        yield self.event("response.in_progress", response=begun)
        try:
            async for _, _, changes in generation.changes():
                for change in changes:
                    for one in self.of(change, reply.parts.index(change.part)):
                        yield one
        except ApiError as error:
            failed = begun | {"status": "failed", "error": {"code": "server_error", "message": error.message}}
            yield self.event("response.failed", response=failed)
            return
        if not reply.parts:  # nothing was written: an empty message
            reply.parts.append(TextPart())
            for change in (Change(reply.parts[0], begins=True), Change(reply.parts[0], ends=True)):
                for one in self.of(change, 0):
                    yield one
        response = response_json(generation, self.conversation)
        yield self.event(f"response.{response['status']}", response=response)

    def of(self, change: Change, index: int) -> list[bytes]:
        part = change.part
        if isinstance(part, CallPart):
            return self.of_call(part, change, index)
        where = {"item_id": f"msg_{part.id}", "output_index": index, "content_index": 0}
        if change.begins:
            added = item_json(part, "in_progress")
            return [
                self.event("response.output_item.added", output_index=index, item=added),
                self.event("response.content_part.added", **where, part=content_json("")),
            ]
        if not change.ends:
            return [self.event("response.output_text.delta", **where, delta=change.delta, logprobs=[])]
        item = item_json(part, status_of(self.generation).replace("in_progress", "completed"))
        return [
            self.event("response.output_text.done", **where, text=part.text, logprobs=[]),
            self.event("response.content_part.done", **where, part=content_json(part.text)),
            self.event("response.output_item.done", output_index=index, item=item),
        ]

    def of_call(self, call: CallPart, change: Change, index: int) -> list[bytes]:
        where = {"item_id": f"fc_{call.id}", "output_index": index}
        if change.begins:
            added = item_json(call, "in_progress")
            return [self.event("response.output_item.added", output_index=index, item=added)]
        if not change.ends:
            return [self.event("response.function_call_arguments.delta", **where, delta=change.delta)]
        done = {"arguments": call.arguments, "name": call.name}
        item = item_json(call, "completed" if call.whole else "incomplete")
        return [
            self.event("response.function_call_arguments.done", **where, **done),
            self.event("response.output_item.done", output_index=index, item=item),
        ]
