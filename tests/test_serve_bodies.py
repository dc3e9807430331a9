"""Bodies of conversations that cannot be answered: each is a 400 of one line that names what was wrong, and where."""

import http.client
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from scripted import WEATHER, model, serving
from served import server_of
from serving import running
from test_serve_replays import send
from test_serve_worker import letters

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
FORMAT = {"type": "json_schema", "schema": {"type": "boolean"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    models = {"hermes": model("hermes"), "llama3": model("llama3"), "mistral": model("mistral"), "letters": letters()}
    with serving(models) as port:
        yield port


def chat(*messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "hermes", "messages": [*messages]} | more


def items(*input: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"model": "hermes", "input": [*input]} | more


def talk(*messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return MESSAGES, {"model": "hermes", "max_tokens": 8, "messages": [*messages]} | more


BAD: list[tuple[tuple[str, Any], str]] = [
    ((CHAT, {"messages": [USER]}), "model is missing"),
    ((CHAT, {"model": "hermes"}), "messages is missing"),
    (chat(), "messages must be at least 1"),
    (chat("Hi"), "messages[0] must be a JSON object"),
    (chat({"content": "Hi"}), "messages[0].role is missing"),
    (chat({"role": "robot", "content": "Hi"}), 'messages[0].role must be one of "system"'),
    (chat({"role": "user"}), "messages[0].content is missing"),
    (chat({"role": "user", "content": 3}), "messages[0].content must be of type"),
    (chat({"role": "user", "content": [IMAGE]}), "messages[0].content[0] is no text"),
    (chat({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0].text is missing"),
    (chat({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}), "messages[0].content[0].y is not"),
    (chat({"role": "user", "content": "x", "tool_calls": [CALL]}), "messages[0].tool_calls are for the assistant"),
    (chat({"role": "tool", "content": "x"}), "messages[0] must have a tool_call_id"),
    (chat(USER | {"tool_call_id": "x"}), "messages[0] must have a tool_call_id where its role is tool"),
    (chat({"role": "assistant", "tool_calls": [CALL | {"id": 1}]}), "messages[0].tool_calls[0].id must be of type"),
    (chat({"role": "assistant", "tool_calls": [CALL | {"function": {"name": "x"}}]}), "function.arguments is missing"),
    (
        chat({"role": "assistant", "tool_calls": [CALL | {"function": {"name": "x", "arguments": "[1]"}}]}),
        "messages[0].tool_calls[0].function.arguments must be a JSON object",
    ),
    (chat(USER, tools="get_weather"), "tools must be of type array"),
    (chat(USER, tools=[{"type": "function"}]), "tools[0].function is missing"),
    (chat(USER, tools=[TOOL | {"function": {"name": ""}}]), "tools[0].function.name must be at least 1"),
    (chat(USER, tools=[TOOL | {"function": {"name": "two words"}}]), "tools[0].name must be of letters"),
    (chat(USER, tools=[TOOL, TOOL]), "two tools are named 'get_weather'"),
    (chat(USER, tools=[TOOL], tool_choice="perhaps"), "tool_choice must be auto, none, required or a tool"),
    (chat(USER, tools=[TOOL], tool_choice={"type": "function"}), "tool_choice.function is missing"),
    (
        chat(USER, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
        "tool_choice names 'other', which is none of the tools",
    ),
    (chat(USER, tool_choice="required"), "tool_choice is required, and there are no tools"),
    (chat(USER, functions=[]), "give the functions as tools"),
    (chat(USER, top_logprobs=3), "top_logprobs needs logprobs: true"),
    (chat(USER, stream_options={"x": 1}), "stream_options.x is not supported"),
    (chat(USER, modalities=["audio"]), "modalities must be one of"),
    (chat(USER, chat_template="{{ x }}"), "chat_template is not supported"),
    (chat(USER, model="letters"), "letters has no chat template"),
    (
        chat({"role": "assistant", "content": "x", "tool_calls": [CALL, CALL | {"id": "b"}]}, model="llama3"),
        "one call at a time",
    ),
    (chat(USER, reasoning_effort=3), "reasoning_effort must be of type string"),
    (
        chat(USER, chat_template_kwargs={"enable_thinkin": True}),
        "chat_template_kwargs.enable_thinkin: the chat template",
    ),
    (chat(USER, chat_template_kwargs={"messages": "x"}), "chat_template_kwargs.messages: the chat template"),
    (items(USER, reasoning={"effort": 3}), "reasoning.effort must be of type string"),
    (items(USER, previous_response_id="resp_1"), "send the whole conversation as input"),
    (items(USER, conversation="conv_1"), "no conversations are kept"),
    (items(USER, background=True), "background must be one of false"),
    (items(USER, truncation="auto"), "truncation must be one of"),
    (items({"type": "item_reference", "id": "x"}), "input[0] must be an item of type message, function_call"),
    (items({"type": "function_call", "name": "x", "arguments": "{}"}), "input[0].call_id is missing"),
    (items({"type": "function_call_output", "call_id": "x"}), "input[0].output is missing"),
    (items({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}), "input[0].content[0] is no text"),
    (items(3), "input[0] must be an item"),
    (items(USER, model=None), "model is missing"),
    (items(USER, tools=[{"type": "function"}]), "tools[0].name is missing"),
    ((MESSAGES, {"model": "hermes", "messages": [USER]}), "max_tokens is missing"),
    (talk(), "messages must be at least 1"),
    (talk({"role": "user", "content": [{"type": "image", "source": {}}]}), "messages[0].content[0] is no text"),
    (talk({"role": "assistant", "content": [USE]}), "the last message has a call"),
    (talk({"role": "user", "content": [USE]}), "messages[0].content[0] is no text"),
    (talk({"role": "user", "content": [{"type": "tool_result"}]}), "messages[0].content[0].tool_use_id is missing"),
    (talk(USER, tools=[{"name": "x"}]), "tools[0].input_schema is missing"),
    (talk(USER, tool_choice={"type": "tool"}), "tool_choice has a name where its type is tool"),
    (talk(USER, tool_choice={"type": "any"}), "there are no tools"),
    (talk(USER, system=3), "system must be of type"),
    (talk(USER, system=[{"type": "text", "text": 3}]), "system[0].text must be of type"),
    (talk(USER, stop_sequences=[""]), "stop_sequences has an empty string"),
    (talk(USER, temperature=2), "temperature must be at most 1"),
    (talk(USER, mcp_servers=[]), "mcp_servers is not supported"),
    (talk({"role": "user", "content": [{"type": "document", "source": {}}]}), "messages[0].content[0] is no text"),
    (talk(USER, output_config={"format": {"type": "json_schema"}}), "output_config.format.schema is missing"),
    (talk(USER, output_format=FORMAT, output_config={"format": FORMAT}), "do not go together"),
    (
        ("/v1/messages/count_tokens", {"model": "hermes", "messages": [USER], "output_format": {"type": "xml"}}),
        "output_format.type must be text, json_object or json_schema",
    ),
    (chat(USER, response_format=FORMAT | {"strict": "yes"}), "response_format.strict must be of type boolean"),
    (
        chat({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}),
        "messages[0].content[0] is no text",
    ),
    (chat({"role": "user", "content": [{"type": "file", "file": {}}]}), "messages[0].content[0] is no text"),
    (chat(USER, web_search_options={}), "web_search_options is not supported"),
    (chat(USER, tools=[TOOL], tool_choice={"type": "allowed_tools"}), 'tool_choice.type must be one of "function"'),
    (items(USER, {"type": "custom_tool_call", "call_id": "c", "name": "x", "input": ""}), "input[1] must be an item"),
    (items(USER, prompt={"id": "pmpt_1"}), "send the text as instructions"),
    (("/v1/completions", {"model": "hermes", "prompt": "x", "grammar": 'root ::= "a"'}), "GBNF or EBNF"),
    (("/v1/completions", {"model": "hermes", "prompt": "x", "n_predict": 8}), "n_predict is not supported"),
    (("/v1/completions", {"model": "hermes", "prompt": "x", "typical_p": 1}), "typical_p is not supported"),
    (("/tokenize", {"model": "hermes", "prompt": "x", "add_generation_prompt": True}), "does not go with prompt"),
]


@pytest.mark.parametrize(("request_", "said"), BAD, ids=[said for _, said in BAD])
def test_a_body_that_cannot_be_answered_is_named(port: int, request_: tuple[str, Any], said: str) -> None:
    path, body = request_
    status, _, (answer,) = send(port, path, {}, body)
    error = answer["error"]
    assert status == 400
    assert said in error["message"]
    assert "\n" not in error["message"]
    if path.startswith(MESSAGES):
        assert (answer["type"], error["type"]) == ("error", "invalid_request_error")
    else:
        assert {"message", "type", "param", "code"} == set(error)


def test_a_model_that_does_not_chat_names_a_route_that_serves_it() -> None:
    with running(server_of(["encoder", "hears"])) as port:
        for name, route in (("encoder", "/v1/fill"), ("hears", "/v1/audio/transcriptions")):
            for path, body in (chat(USER), items(USER), talk(USER), ("/api/chat", {"messages": [USER]})):
                status, _, (answer,) = send(port, path, {}, body | {"model": name})
                message = answer["error"] if path == "/api/chat" else answer["error"]["message"]
                assert (status, route in message) == (400, True), message
                assert "/v1/completions" not in message


def test_a_call_in_the_history_needs_a_form_too(port: int) -> None:
    """Without tools in the request, the template still has to write the call."""
    asked = {"role": "assistant", "tool_calls": [CALL]}
    returned = {"role": "tool", "tool_call_id": "call_1", "content": "9 degrees"}
    for name in ("hermes", "llama3", "mistral"):
        status, _, (answer,) = send(port, *[CHAT, {}, {"model": name, "messages": [USER, asked, returned]}])
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")


def test_bodies_that_are_nested_deeply_or_no_json(port: int) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = {"type": "object", "properties": {"x": deep}}
    tool = {"type": "function", "function": {"name": "x", "parameters": deep}}
    assert send(port, *[CHAT, {}, {"model": "hermes", "messages": [USER], "tools": [tool]}])[0] in (200, 400)
    for path in (CHAT, RESPONSES, MESSAGES):
        for body in ([], None, "x", 3):
            status, _, (answer,) = send(port, path, {}, body)
            assert (status, answer["error"]["message"]) == (400, "the body must be a JSON object")


@pytest.mark.parametrize("value", ["1e999", "NaN", "-Infinity", '"\\ud800"', "1" * 5000], ids=lambda value: value[:9])
def test_values_that_no_response_could_hold_are_refused(port: int, value: str) -> None:
    """They would come back in what a response repeats of its request."""
    body = f'{{"model": "hermes", "input": "Hi", "max_output_tokens": 1, "metadata": {{"x": {value}}}}}'
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", RESPONSES, body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 400
        assert b"the body" in response.read()
