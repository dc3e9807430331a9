"""Requests as programs send them, from files: each is answered, and what has no effect in it is named, nothing else.

The files are written after what these programs are known to send; none is a recording.
"""

import http.client
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from scripted import ANSWERS, ARGUMENTS, THINKING, model, scripted, serving
from served import model as encoder
from serving import ask
from triptych.serve.generation import ADVICE

FILES = {path.stem: json.loads(path.read_text("utf-8")) for path in Path(__file__).parent.glob("data/serve/*.json")}


def serve() -> AbstractContextManager[int]:
    models = {name: model(name) for name in ("hermes", "plain")} | {"switch": scripted("ok", THINKING)}
    return serving(models | {name: encoder(name) for name in ("sentences", "ranks")}, key="k")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serve() as port:
        yield port


def send(port: int, path: str, headers: dict[str, str], body: Any) -> tuple[int, dict[str, str], list[Any]]:
    """The status, the headers, and the objects of the response: one, or those of its events or lines."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | headers)
        response = connection.getresponse()
        text = response.read().decode()
    answered = {name.lower(): value for name, value in response.getheaders()}
    if answered["content-type"].startswith("application/x-ndjson"):
        return response.status, answered, [json.loads(line) for line in text.splitlines()]
    if not answered["content-type"].startswith("text/event-stream"):
        return response.status, answered, [json.loads(text)]
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return response.status, answered, [json.loads(one) for one in data if one != "[DONE]"]


@pytest.mark.parametrize("name", sorted(FILES))
def test_each_request_is_answered_and_says_what_has_no_effect(port: int, name: str) -> None:
    file = FILES[name]
    for request in file["requests"]:
        path = request.get("path", file["path"])
        status, headers, objects = send(port, path, file["headers"], request["body"])
        assert status == 200, objects
        streamed = headers["content-type"].startswith(("text/event-stream", "application/x-ndjson"))
        assert streamed == request["body"].get("stream", False), request["body"]
        named = [one.strip() for one in headers.get(ADVICE, "").split(",") if one.strip()]
        assert sorted(named) == sorted(request["without_effect"])


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_field_that_no_route_has_is_refused_in_each_object(port: int, name: str) -> None:
    """The control: what these requests have is honored or named, because nothing else passes."""
    file = FILES[name]
    for request in file["requests"]:
        for changed, path in with_unknown(request["body"], "body"):
            status, _, (answer,) = send(port, request.get("path", file["path"]), file["headers"], changed)
            assert status == 400, path
            error = answer["error"]
            assert "frobnicate" in (error if isinstance(error, str) else error["message"]), path


def undescribed(body: dict[str, Any]) -> bool:
    """Whether a body has what /openapi.json leaves out, since no schema tells those that are answered from others: a
    tool chosen by its name, calls before their results in Anthropic's blocks, options that depend on each other."""
    blocks = [block for one in body.get("messages", ()) if isinstance(one["content"], list) for block in one["content"]]
    return (
        (isinstance(body.get("tool_choice"), dict) and "name" in json.dumps(body["tool_choice"]))
        or any(block["type"] != "text" for block in blocks)
        or {"response_format", "max_completion_tokens"} <= {*body}
        or "repeat_last_n" in body.get("options", {})
        or ("logprobs" in body and body["logprobs"] is None)
    )  # fmt: skip


def test_each_request_is_valid_by_the_document(port: int) -> None:
    _, document = ask(port, "/openapi.json", headers={"authorization": "Bearer k"})
    for file in FILES.values():
        for request in file["requests"]:
            path, body = request.get("path", file["path"]).partition("?")[0], request["body"]
            (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
            schema = {"components": document["components"], "allOf": [content["schema"]]}
            validator = jsonschema.Draft202012Validator(schema)
            assert validator.is_valid(body) or undescribed(body), body
            assert not validator.is_valid({"frobnicate": 1} | body)  # the control: not everything is valid


FREE = ("parameters", "input_schema", "input", "metadata", "client_metadata", "reasoning", "thinking", "output",
        "context_management", "cache_control", "caller", "prediction", "schema", "json_schema", "format", "logit_bias",
        "arguments")  # objects whose content is the client's own  # fmt: skip


LEFT_OUT = ("reasoning", "thinking", "custom", "web_search", "local_shell", "web_search_20250305")


def with_unknown(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """The value with an unknown key in one of the objects that the server reads, for each of them."""
    if isinstance(value, dict):
        if value.get("type") not in LEFT_OUT:
            yield {"frobnicate": 1} | value, path
            for key, inner in value.items():
                if key != "documents" and (key not in FREE or isinstance(inner, list)):
                    yield from ((value | {key: changed}, at) for changed, at in with_unknown(inner, f"{path}.{key}"))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            for changed, at in with_unknown(inner, f"{path}[{i}]"):
                yield [*value[:i], changed, *value[i + 1 :]], at


def test_codex_gets_calls_and_its_empty_request_an_answer(port: int) -> None:
    file = FILES["codex"]
    *turns, probe = [send(port, file["path"], file["headers"], one["body"])[2] for one in file["requests"]]
    for events in turns:
        assert events[0]["type"] == "response.created"
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in done] == ["message", "function_call"]
        assert (done[1]["name"], json.loads(done[1]["arguments"])) == ("get_weather", ARGUMENTS)
        assert events[-1]["type"] == "response.completed"
        assert [tool["name"] for tool in events[-1]["response"]["tools"]] == ["shell", "get_weather"]
    assert (probe[-1]["type"], probe[-1]["response"]["usage"]["output_tokens"]) == ("response.incomplete", 1)


def test_claude_code_reads_its_prompt_once_though_the_billing_line_changes(port: int) -> None:
    file = FILES["claude-code"]
    first, second, count = [
        send(port, one.get("path", file["path"]), file["headers"], one["body"])[2] for one in file["requests"]
    ]
    before, after = first[-2]["usage"], second[-2]["usage"]
    prompt = before["input_tokens"] + before["cache_read_input_tokens"]
    assert (second[-2]["type"], second[-2]["delta"]["stop_reason"]) == ("message_delta", "tool_use")
    assert after["cache_read_input_tokens"] >= prompt - 40  # all but where the first turn's answer begins
    starts = [event["content_block"] for event in second if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["text", "tool_use"]
    assert count[0]["input_tokens"] == prompt
    changed = file["requests"][1]["body"]
    system = [{"type": "text", "text": "Another first line, which is read."}, *changed["system"][1:]]
    events = send(port, file["path"], file["headers"], changed | {"system": system})[2]
    usage = events[-2]["usage"]
    assert usage["cache_read_input_tokens"] < 100 < prompt  # the control: the line decides what is reused


def test_langchain_and_open_webui_get_calls_and_texts(port: int) -> None:
    file = FILES["langchain"]
    (whole,), chunks = [send(port, file["path"], file["headers"], one["body"])[2] for one in file["requests"]]
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == ARGUMENTS
    assert chunks[-1]["usage"]["total_tokens"] > 0
    file = FILES["open-webui"]
    chunks, (title,) = [send(port, file["path"], file["headers"], one["body"])[2] for one in file["requests"]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == title["choices"][0]["message"]["content"] == ANSWERS["plain"]
