"""Requests that other clients send, and that hostile ones do: each is answered, or refused with what to do."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from scripted import model as scripted_model
from served import model
from serving import ask, running
from test_serve_worker import letters
from triptych.errors import InputError
from triptych.generate import Constraint
from triptych.serve.app import Server
from triptych.serve.generation import ADVICE
from triptych.serve.limits import ServerLimits
from triptych.serve.worker import ModelWorker

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
TALK = {"model": "hermes", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
TEXT = {"model": "hermes", "prompt": "Hi", "max_tokens": 3}
SURROGATE = '{"const": "\\ud800"}'  # JSON whose text is fine, and whose value no text holds


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    models = {"hermes": scripted_model("hermes"), "letters": letters(), "sentences": model("sentences")}
    with running(Server({name: ModelWorker(one, name, max_rows=4) for name, one in models.items()})) as port:
        yield port


def sent(port: int, route: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, dict[str, Any], str]:
    """The status, the JSON and the advice of the answer to bytes."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", route, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response.headers.get(ADVICE, "")


# ---------------------------------------------------------------- the key


@pytest.mark.parametrize("key", ["", " ", " key", "a\nb", "\xe9", "ключ"])
def test_a_key_that_everyone_has_or_nobody_can_give_is_refused(key: str) -> None:
    """An empty one, of a variable that is not set, let in every request without a key."""
    with pytest.raises(InputError, match="the key must be"):
        Server({}, key=key)


def test_the_key_is_found_in_either_header_and_the_scheme_in_any_case() -> None:
    server = Server({"letters": ModelWorker(letters(), "letters", max_rows=1)}, limits=ServerLimits(), key="a key")
    with running(server) as port:
        for headers in (
            {"authorization": "bearer a key"},
            {"authorization": "Bearer a key", "x-api-key": "none"},
            {"authorization": "Bearer none", "x-api-key": "a key"},
        ):
            assert ask(port, "/v1/models", headers=headers)[0] == 200
        wrong = {"authorization": "Bearer none", "x-api-key": ""}
        assert ask(port, "/v1/models", headers=wrong)[0] == 401


# ---------------------------------------------------------------- what was a 500, or kept others waiting


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        (COMPLETIONS, TEXT | {"logit_bias": {"9" * 5000: 1}}, "logit_bias must have token ids below"),
        (MESSAGES, TALK | {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "have no text"),
        (
            f"{MESSAGES}/count_tokens",
            {"model": "hermes", "messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]},
            "have no text",
        ),
        (COMPLETIONS, TEXT | {"guided_json": SURROGATE}, "guided_json: schema holds what JSON cannot"),
        ("/api/chat", {"model": "hermes", "messages": TALK["messages"], "format": SURROGATE}, "format: schema holds"),
    ],
)
def test_what_failed_inside_is_refused(port: int, route: str, body: dict[str, Any], said: str) -> None:
    status, answer = ask(port, route, body)
    message = answer["error"] if route.startswith("/api/") else answer["error"]["message"]
    assert (status, said in message) == (400, True), answer


def test_a_grammar_of_empty_lines_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its lines was read to the end of the grammar, with the lock that keeps all other threads waiting; blanks
    that a match reads are counted here, and not seconds."""
    import triptych.generate.constraints.constraint as module

    patterns: list[str] = []
    search = module.re.search
    monkeypatch.setattr(module.re, "search", lambda *args: (patterns.append(args[0]), search(*args))[1])
    for grammar in ('root ::= "a"', '\n\n  root ::= "a"', 'x ::= "a"\n\t y-z\n ::= "b"'):
        with pytest.raises(InputError, match="GBNF or EBNF"):
            Constraint.grammar(grammar)
    before_the_name = module.re.compile(patterns[0].split(r"[\w-]")[0], module.re.MULTILINE)
    match = before_the_name.match("\n" * 100 + "x")
    assert match is not None
    assert match.end() == 0


# ---------------------------------------------------------------- bodies


def test_a_media_type_is_read_as_http_has_it_and_a_coded_body_is_refused(port: int) -> None:
    body = json.dumps(TEXT).encode()
    for kind in ("Application/JSON", "application/json;charset=UTF-8", "application/json ; x=y"):
        assert sent(port, COMPLETIONS, body, {"content-type": kind})[0] == 200
    for kind in ("application/jsonl", "text/plain"):
        assert sent(port, COMPLETIONS, body, {"content-type": kind})[0] == 415
    status, answer, _ = sent(port, COMPLETIONS, body, {"content-type": "application/json", "content-encoding": "gzip"})
    assert (status, "content-encoding" in answer["error"]["message"]) == (415, True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model": "hermes",\n "prompt": \'Hi\'}', "line 2, column 12"),
        (b"", "line 1, column 1"),
        (b'{"prompt": "\xe9"}', "byte 12 is no utf-8"),
        (b'{"temperature": NaN}', "'NaN' is no number"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_refused_with_its_place(port: int, body: bytes, said: str) -> None:
    status, answer, _ = sent(port, COMPLETIONS, body, {"content-type": "application/json"})
    assert (status, said in answer["error"]["message"]) == (400, True), answer


# ---------------------------------------------------------------- fields that were ignored, or that say nothing


def test_two_limits_must_be_one(port: int) -> None:
    status, answer = ask(port, CHAT, TALK | {"max_completion_tokens": 2})
    assert (status, "max_tokens and max_completion_tokens differ" in answer["error"]["message"]) == (400, True)
    status, answer = ask(port, CHAT, TALK | {"max_completion_tokens": 3})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


def test_options_of_a_stream_without_one_are_said_to_have_no_effect(port: int) -> None:
    json_body = {"content-type": "application/json"}
    body = TALK | {"stream_options": {"include_usage": True}}
    assert sent(port, CHAT, json.dumps(body).encode(), json_body)[2] == "stream_options"
    assert sent(port, CHAT, json.dumps(TALK).encode(), json_body)[2] == ""


@pytest.mark.parametrize("most", [10**6, 10**30])
def test_a_limit_beyond_the_model_is_named_as_requests_name_it(port: int, most: int) -> None:
    status, answer = ask(port, CHAT, TALK | {"max_tokens": most})
    assert (status, "max_new_tokens" in answer["error"]["message"]) == (400, False)
    assert "max_tokens" in answer["error"]["message"]


GENERATE = {"model": "hermes", "prompt": "Hi", "stream": False, "options": {"num_predict": 2}}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/api/generate", GENERATE | {"template": "", "context": [], "system": "", "format": "", "raw": True}),
        ("/api/chat", {"model": "hermes", "messages": TALK["messages"], "stream": False, "format": ""}),
        ("/api/embed", {"model": "sentences", "input": "tide", "options": {"num_ctx": 2048}}),
        ("/api/show", {"model": "hermes", "name": "hermes"}),
        (COMPLETIONS, TEXT | {"suffix": ""}),
    ],
)
def test_fields_that_say_nothing_are_taken(port: int, route: str, body: dict[str, Any]) -> None:
    """Clients of Ollama send the empty defaults of their functions."""
    assert ask(port, route, body)[0] == 200


@pytest.mark.parametrize("more", [{"template": "{{ x }}"}, {"context": [1]}, {"system": "x", "raw": True}])
def test_fields_that_say_something_that_is_not_done_are_refused(port: int, more: dict[str, Any]) -> None:
    status, answer = ask(port, "/api/generate", GENERATE | more)
    assert (status, next(iter(more)) in answer["error"]) == (400, True)


@pytest.mark.parametrize("head", ["9" * 5000 + ".0", "0." + "9" * 5000])
def test_the_digits_of_an_ablated_head_are_bounded(head: str) -> None:
    server = Server({"letters": ModelWorker(letters(), "letters", max_rows=1)}, inspect=True)
    with running(server) as port:
        body = {"model": "letters", "prompt": "ab", "max_tokens": 1, "ablate_heads": [head]}
        status, answer = ask(port, COMPLETIONS, body)
        assert (status, "ablate_heads[0] must be BLOCK.HEAD" in answer["error"]["message"]) == (400, True), answer
