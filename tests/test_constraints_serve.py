"""Constraints behind HTTP: the forms of OpenAI, vLLM and llama.cpp, and bodies that are wrong."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")

from serving import running  # noqa: E402
from test_constraints import PERSON, model  # noqa: E402
from test_serve_openai import ask, streamed  # noqa: E402
from triptych.serve.app import Server  # noqa: E402
from triptych.serve.fields import ApiError, read  # noqa: E402
from triptych.serve.structured import constraint_of, format_constraint  # noqa: E402
from triptych.serve.worker import ModelWorker  # noqa: E402
from triptych.text import ChatTemplate, Tokenizer, byte_tokenizer  # noqa: E402
from usual_models import Owner, Sentiment  # noqa: E402

OPEN = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
PLAIN = {"prompt": "x", "max_tokens": 300, "temperature": 1.0, "seed": 4}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    one = model()
    words = byte_tokenizer()
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}:")
    one.tokenizer = Tokenizer(words.backend, words.specials, chat=template)
    with running(Server({"bytes": ModelWorker(one, "bytes", max_rows=8)})) as number:
        yield number


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": OPEN}, "person"),
    ({"response_format": {"type": "json_schema", "name": "person", "schema": PERSON}}, "person"),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, "person"),
    ({"json_schema": PERSON}, "person"),
    ({"guided_json": json.dumps(PERSON)}, "person"),
    ({"structured_outputs": {"json": PERSON}}, "person"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice"),
    ({"guided_choice": ["yes", "no"]}, "choice"),
    ({"structured_outputs": {"regex": "yes|no", "json": None}}, "choice"),
    ({"guided_regex": "yes|no"}, "choice"),
    ({"grammar": 'start: "yes" | "no"'}, "choice"),
    ({"guided_grammar": 'start: "yes" | "no"'}, "choice"),
    ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, "choice"),
]


def check(kind: str, text: str) -> None:
    if kind == "choice":
        assert text in ("yes", "no")
    else:
        assert jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text))


@pytest.mark.parametrize(("form", "kind"), FORMS)
def test_each_form_is_kept(port: int, form: dict[str, Any], kind: str) -> None:
    status, whole, _ = ask(port, "/v1/completions", PLAIN | form | {"n": 2})
    assert status == 200, whole
    for choice in whole["choices"]:
        assert choice["finish_reason"] == "stop"
        check(kind, choice["text"])


def test_conversations_whole_and_streamed(port: int) -> None:
    body = {
        "model": "bytes",
        "messages": [{"role": "user", "content": "a person"}],
        "max_tokens": 300,
        "temperature": 0,
    }
    _, plain, _ = ask(port, "/v1/chat/completions", body | {"response_format": {"type": "text"}})
    with pytest.raises(json.JSONDecodeError):
        json.loads(plain["choices"][0]["message"]["content"])
    _, whole, _ = ask(port, "/v1/chat/completions", body | {"response_format": OPEN})
    text = whole["choices"][0]["message"]["content"]
    check("person", text)
    _, events, _ = ask(port, "/v1/chat/completions", body | {"response_format": OPEN, "stream": True})
    deltas = [one["choices"][0] for one in streamed(events)]
    assert "".join(one["delta"].get("content", "") for one in deltas) == text
    assert deltas[-1]["finish_reason"] == "stop"
    _, any_object, _ = ask(port, "/v1/chat/completions", body | {"response_format": {"type": "json_object"}, "seed": 1})
    choice = any_object["choices"][0]
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


def test_the_newer_routes_keep_their_own_forms(port: int) -> None:
    """OpenAI's responses and Anthropic's messages, and what is wrong with them."""
    flat = {"type": "json_schema", "name": "person", "schema": PERSON}
    body = {"model": "bytes", "input": "a person", "max_output_tokens": 300, "temperature": 0}
    status, answer, _ = ask(port, "/v1/responses", body | {"text": {"format": flat}})
    assert status == 200, answer
    check("person", answer["output"][0]["content"][0]["text"])
    asked = {
        "model": "bytes",
        "messages": [{"role": "user", "content": "a person"}],
        "max_tokens": 300,
        "temperature": 0,
    }
    own = {"format": {"type": "json_schema", "schema": PERSON}}
    status, answer, _ = ask(port, "/v1/messages", asked | {"output_config": own})
    assert status == 200, answer
    check("person", answer["content"][0]["text"])
    for route, wrong in (
        ("/v1/responses", body | {"text": {"format": {"type": "xml"}}}),
        ("/v1/messages", asked | {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}),
    ):
        status, answer, _ = ask(port, route, wrong)
        assert status == 400
        assert "format" in answer["error"]["message"]


def test_one_that_is_cut_says_length(port: int) -> None:
    _, whole, _ = ask(port, "/v1/completions", PLAIN | {"response_format": OPEN, "max_tokens": 5})
    assert whole["choices"][0]["finish_reason"] == "length"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format must be of type object"),
    ({"response_format": {}}, "response_format.type must be text, json_object or json_schema, not None"),
    ({"response_format": {"type": "xml"}}, "not 'xml'"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema is not supported"),
    ({"response_format": {"type": "json_schema"}}, "schema is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "json_schema must be a JSON object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "the schema must be an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stric": 1}}}, "did you mean 'strict'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "schema/not is not kept"),
    ({"json_schema": {"x-guidance": {}}}, "schema/x-guidance"),
    ({"structured_outputs": {}}, "structured_outputs must have one of json, regex"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs must have one of"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag is not supported"),
    ({"guided_choice": []}, "list of 1 to 4,096 texts"),
    ({"guided_choice": ["a", 5]}, "the choices must be texts"),
    ({"guided_choice": ["x" * 70_000]}, "guided_choice has 70,000 characters"),
    ({"guided_regex": "(a"}, "guided_regex: regex"),
    ({"guided_regex": ""}, "must be a text that is not empty"),
    ({"guided_regex": "a" * 9000}, "guided_regex has 9,000 characters; at most 8,192 are read"),
    ({"guided_json": {"description": "x" * 300_000}}, "characters; at most 262,144 are read"),
    ({"grammar": 'root ::= "a"'}, "grammar is in the form of GBNF or EBNF; write it as Lark's"),
    ({"grammar": "start: x"}, "unknown name"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex and guided_choice do not go together"),
    ({"guided_regex": "a", "stop": ["\n"]}, "stop and guided_regex do not go together"),
    ({"guided_regex": "a", "response_format": {"type": "xml"}}, "not 'xml'"),
]


@pytest.mark.parametrize(("form", "problem"), WRONG)
def test_what_is_wrong_is_a_400_that_names_it(port: int, form: dict[str, Any], problem: str) -> None:
    status, answer, _ = ask(port, "/v1/completions", PLAIN | form)
    assert status == 400
    assert problem in answer["error"]["message"]
    assert answer["error"]["param"].split(".")[0] in form
    assert "\n" not in answer["error"]["message"]


def test_text_beside_another_form_is_no_second_constraint(port: int) -> None:
    status, whole, _ = ask(port, "/v1/completions", PLAIN | {"response_format": {"type": "text"}, "guided_regex": "ab"})
    assert (status, whole["choices"][0]["text"]) == (200, "ab")


def test_a_constraint_of_a_request_in_python() -> None:
    one = model()
    fields = read({"prompt": "x", "guided_regex": "ab"}, "completions", "constraint")
    constraint = constraint_of(fields, one)
    assert constraint is not None
    assert constraint.kind == "regex"
    assert constraint_of(read({"prompt": "x"}, "completions", "constraint"), one) is None
    assert format_constraint({"type": "text"}, "format") is None
    one.tokenizer = None
    with pytest.raises(ApiError, match="needs a tokenizer"):
        constraint_of(fields, one)


def test_openais_client_parses_what_its_own_schema_asked_for(port: int) -> None:
    """The schema that the released client makes of a pydantic model: strict, all properties required, closed."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    asked = {"model": "bytes", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "seed": 2}
    with client:
        for kind in (Sentiment, Owner):
            answer = client.chat.completions.parse(response_format=kind, **asked)
            assert isinstance(answer.choices[0].message.parsed, kind)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(response_format=Owner, **asked | {"max_tokens": 4})
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            client.chat.completions.create(response_format=form({"type": "array", "uniqueItems": True}), **asked)


def form(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
