"""Answers that have to be calls or JSON: what the released clients ask for is kept, by models that write nothing of it
by themselves."""

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("llguidance")

from scripted import TEMPLATES, WEATHER, model, scripted, serving
from test_serve_calls import FORMS
from test_serve_clients import ASK, CHAT_TOOLS, MESSAGES_TOOLS, RESPONSES_TOOLS
from test_serve_replays import send
from triptych.serve.call_constraint import call_constraint
from triptych.serve.generation import ADVICE
from triptych.serve.tools import Tool, ToolUse, form_of

MODE = {
    "type": "object", "required": ["mode", "level"], "additionalProperties": False,
    "properties": {"mode": {"type": "string", "enum": ["on", "off"]}, "level": {"type": "integer", "maximum": 9}},
}  # fmt: skip
SCHEMAS = {"get_weather": WEATHER, "set_mode": MODE}
BOTH = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving({name: model(name) for name in TEMPLATES}) as port:
        yield port


@pytest.mark.parametrize("name", FORMS)
def test_a_required_call_is_one_of_the_tools_and_fits_its_schema(by_openai: Any, name: str) -> None:
    called, ended = set(), 0
    for seed in range(6):
        choice = by_openai.chat.completions.create(
            model=name, messages=ASK, tools=BOTH, tool_choice="required", parallel_tool_calls=False, seed=seed,
            max_tokens=500,
        ).choices[0]  # fmt: skip
        assert not choice.message.content
        if choice.finish_reason == "length":
            continue
        (call,) = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        called.add(call.function.name)
        ended += 1
    # A value of Qwen's form is a text up to a line with an end tag, which these random texts hardly come to.
    assert ended >= (0 if name == "qwen-coder" else 2)
    assert called <= {*SCHEMAS}


@pytest.mark.parametrize("name", FORMS)
def test_a_named_call_is_of_that_tool_on_every_route(by_openai: Any, by_anthropic: Any, name: str) -> None:
    tool = {"name": "set_mode", "parameters": MODE}
    chosen = {"type": "function", "function": {"name": "set_mode"}}
    chat = by_openai.chat.completions.create(model=name, messages=ASK, tools=BOTH, tool_choice=chosen, seed=1)
    assert chat.choices[0].finish_reason == "tool_calls"
    (call,) = chat.choices[0].message.tool_calls
    found = [(call.function.name, json.loads(call.function.arguments))]
    response = by_openai.responses.create(
        model=name, input=ASK, tools=[*RESPONSES_TOOLS, tool | {"type": "function"}],
        tool_choice={"type": "function", "name": "set_mode"},
    )  # fmt: skip
    found += [(item.name, json.loads(item.arguments)) for item in response.output]
    message = by_anthropic.messages.create(
        model=name, max_tokens=2000, messages=ASK, tools=[*MESSAGES_TOOLS, {"name": "set_mode", "input_schema": MODE}],
        tool_choice={"type": "tool", "name": "set_mode"},
    )  # fmt: skip
    assert message.stop_reason == "tool_use"
    found += [(block.name, block.input) for block in message.content]
    assert len(found) == 3
    for called, arguments in found:
        assert called == "set_mode"
        jsonschema.validate(arguments, MODE)


def test_a_required_call_is_streamed_as_any_other(by_openai: Any, by_anthropic: Any) -> None:
    asked = {"model": "hermes", "messages": ASK, "tools": CHAT_TOOLS, "tool_choice": "required", "seed": 4}
    whole = by_openai.chat.completions.create(**asked).choices[0]
    with by_openai.chat.completions.stream(**asked) as stream:
        stream.until_done()
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert [one.function.arguments for one in final.message.tool_calls] == [
        one.function.arguments for one in whole.message.tool_calls
    ]
    tools = [{"name": "set_mode", "input_schema": MODE}]
    with by_anthropic.messages.stream(
        model="hermes", max_tokens=2000, messages=ASK, tools=tools, tool_choice={"type": "any"}
    ) as stream:
        for block in stream.get_final_message().content:
            assert block.type == "tool_use"
            jsonschema.validate(block.input, MODE)


def test_a_call_that_may_be_left_out_is_free(by_openai: Any) -> None:
    """The control: the same models without the choice write what they always write."""
    choice = by_openai.chat.completions.create(model="plain", messages=ASK).choices[0]
    assert choice.finish_reason == "stop"
    raw = by_openai.chat.completions.with_raw_response.create(
        model="hermes", messages=ASK, tools=[{"type": "function", "function": {"name": "x", "strict": True}}]
    )
    assert raw.parse().choices[0].message.tool_calls[0].function.name == "get_weather"  # which is none of the tools
    assert raw.headers[ADVICE] == "tools.strict"


def test_arguments_are_an_object_also_where_the_schema_does_not_say_so(by_openai: Any) -> None:
    tool = {"name": "count", "parameters": {"properties": {"n": {"type": "boolean"}}, "required": ["n"]}}
    for seed in range(4):
        choice = by_openai.chat.completions.create(
            model="hermes", messages=ASK, tools=[{"type": "function", "function": tool}], tool_choice="required",
            parallel_tool_calls=False, seed=seed, max_tokens=1000,
        ).choices[0]  # fmt: skip
        assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments)["n"], bool)


@pytest.mark.parametrize(("city", "allowed"), [("a < b", True), ("a\nb", True), ("a</b", False)])
def test_a_text_in_an_element_has_nothing_that_might_close_it(city: str, allowed: bool) -> None:
    glm = scripted("ok", TEMPLATES["glm"])
    assert glm.tokenizer is not None
    assert glm.tokenizer.chat is not None
    tool = Tool("get_weather", "", {"properties": {"city": {"type": "string"}}, "required": ["city"]})
    constraint = call_constraint(form_of(glm.tokenizer.chat), ToolUse((tool,), "required"), glm.tokenizer)
    row = constraint.start(glm.tokenizer, glm.spec.vocab, ())
    text = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n</tool_call>"
    ids = glm.tokenizer.encode(text, special=False)
    assert (row.leading(ids) == len(ids)) == allowed


class Word(StrEnum):
    yes = "yes"
    no = "no"


class Verdict(BaseModel):
    word: Word
    score: int


def test_structured_answers_are_what_clients_parse(by_openai: Any, by_anthropic: Any) -> None:
    chat = by_openai.chat.completions.parse(model="plain", messages=ASK, response_format=Verdict, seed=1)
    response = by_openai.responses.parse(model="plain", input=ASK, text_format=Verdict)
    message = by_anthropic.messages.parse(model="plain", max_tokens=200, messages=ASK, output_format=Verdict)
    for parsed in (chat.choices[0].message.parsed, response.output_parsed, message.parsed_output):
        assert isinstance(parsed, Verdict)


def test_a_format_with_tools_is_a_call_or_the_format(port: int) -> None:
    verdict = {"type": "json_schema", "json_schema": {"name": "v", "schema": Verdict.model_json_schema()}}
    kinds = set()
    for seed in range(8):
        body = {"model": "hermes", "messages": ASK, "tools": BOTH, "response_format": verdict, "seed": seed}
        _, _, (answer,) = send(port, "/v1/chat/completions", {}, body | {"max_tokens": 600})
        choice = answer["choices"][0]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            Verdict.model_validate_json(choice["message"]["content"])
    assert {"stop", "tool_calls"} <= kinds


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        (
            "hermes",
            {"tools": [{"name": "x", "parameters": {"type": "object", "minProperties": 2, "unknown": {}}}]},
            "x",
        ),
        ("qwen-coder", {"tools": [{"name": "x", "parameters": WEATHER | {"minProperties": 2}}]}, "minProperties"),
        (
            "glm",
            {"tools": [{"name": "x", "parameters": {"properties": {"a": {"type": "string", "pattern": "a+"}}}}]},
            "tools: the arguments of x: a: pattern is not kept",
        ),
        ("hermes", {"tools": [{"name": "x"}], "stop": ["}"]}, "stop strings and a call"),
        ("hermes", {"tools": [{"name": "two words"}]}, "tools[0].name must be of letters"),
        ("plain", {"tools": [{"name": "x"}]}, "does not read tools"),
    ],
)
def test_what_would_not_be_kept_is_refused(port: int, name: str, more: dict[str, Any], said: str) -> None:
    tools = [{"type": "function", "function": tool} for tool in more["tools"]]
    body = {"model": name, "messages": ASK, "tool_choice": "required"} | more | {"tools": tools}
    status, _, (answer,) = send(port, "/v1/chat/completions", {}, body)
    assert status == 400, answer
    assert said in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_format_that_would_not_be_kept_is_named_by_its_field(port: int, path: str) -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": {"type": "string", "format": "never-heard-of"}}
    body: dict[str, Any] = {"model": "plain", "input": ASK, "text": {"format": wanted}}
    if path == "/v1/messages":
        body = {"model": "plain", "max_tokens": 9, "messages": ASK, "output_config": {"format": wanted}}
    status, _, (answer,) = send(port, path, {}, body)
    assert status == 400
    assert answer["error"]["message"].startswith("text.format" if path == "/v1/responses" else "output_config.format")
