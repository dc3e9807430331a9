"""OpenAI's routes over a real socket: whole and streamed answers are the library's own, and bad bodies are named."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")

from test_serve_worker import letters  # noqa: E402
from triptych.serve.app import Server  # noqa: E402
from triptych.serve.generation import ADVICE  # noqa: E402
from triptych.serve.worker import ModelWorker  # noqa: E402


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    worker = ModelWorker(letters(), "letters", max_rows=8)
    server = uvicorn.Server(uvicorn.Config(Server({"letters": worker}).app(), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(60)
    worker.thread.join(60)
    assert not worker.thread.is_alive()


def ask(port: int, route: str, body: Any = None, *, raw: bytes | None = None) -> tuple[int, Any, dict[str, str]]:
    data = json.dumps(body).encode() if raw is None else raw
    method = "GET" if body is None and raw is None else "POST"
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, route, data, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    streamed = headers["content-type"].startswith("text/event-stream")
    return response.status, text.decode() if streamed else json.loads(text), headers


def streamed(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


GREEDY = {"model": "letters", "prompt": "abc", "max_tokens": 12, "temperature": 0}


def test_a_completion_is_the_librarys_own_whole_and_streamed(port: int) -> None:
    model = letters()
    expected = model.generate(["abc"], max_new_tokens=12)[0]
    status, whole, headers = ask(port, "/v1/completions", GREEDY | {"user": "me"})
    assert status == 200
    assert whole["choices"][0]["text"] == expected.text
    assert whole["choices"][0]["finish_reason"] == {"end": "stop", "length": "length"}[expected.reason]
    assert whole["usage"]["completion_tokens"] == len(expected.ids)
    assert headers[ADVICE] == "user"
    _, text, _ = ask(port, "/v1/completions", GREEDY | {"stream": True, "stream_options": {"include_usage": True}})
    *events, usage = streamed(text)
    assert "".join(one["choices"][0]["text"] for one in events) == expected.text
    assert usage["usage"] == whole["usage"]


def test_n_prompts_and_seeds(port: int) -> None:
    body = {"prompt": ["abc", "hello"], "n": 2, "max_tokens": 8, "temperature": 0.9, "seed": 5}
    _, first, _ = ask(port, "/v1/completions", body)
    _, again, _ = ask(port, "/v1/completions", body)
    texts = [one["text"] for one in first["choices"]]
    assert texts == [one["text"] for one in again["choices"]]
    assert [one["index"] for one in first["choices"]] == [0, 1, 2, 3]
    _, other, _ = ask(port, "/v1/completions", body | {"seed": 6})
    assert texts != [one["text"] for one in other["choices"]]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ({"prompt": "a", "best_off": 3}, 400, "best_off is not supported here (did you mean 'best_of'?)"),
        ({"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of=2 must be at least n=3"),
        ({"prompt": "a", "best_of": 2, "stream": True}, 400, "best_of"),
        ({"prompt": "a", "decoder_prefix": "b"}, 400, "decoder_prefix is for encoder-decoders"),
        ({"prompt": "a", "temprature": 1}, 400, "temperature"),
        ({"max_tokens": 3}, 400, "prompt is missing"),
        ({"prompt": "a", "max_tokens": "3"}, 400, "max_tokens must be of type integer"),
        ({"prompt": "a", "max_tokens": 0}, 400, "at least 1"),
        ({"prompt": "a", "temperature": True}, 400, "temperature must be of type number"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": []}, 400, "prompt must be"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [99999]}, 400, "99999"),
        ({"prompt": "a", "stop": ["x", 3]}, 400, "stop must be"),
        ({"prompt": "a", "stop": [""]}, 400, "empty string"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "max_tokens": 5000}, 400, "positions"),
        ({"prompt": "a", "model": "gpt-5"}, 404, "no model 'gpt-5'"),
        ([1], 400, "must be a JSON object"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_bodies_are_refused_by_name(port: int, body: Any, status: int, said: str) -> None:
    answered, error, _ = ask(port, "/v1/completions", body)
    assert (answered, error["error"]["type"]) == (status, "invalid_request_error")
    assert said in error["error"]["message"]
    assert "\n" not in error["error"]["message"]


def test_models_health_and_routes_that_are_not(port: int) -> None:
    assert ask(port, "/v1/models")[1]["data"][0]["id"] == "letters"
    assert ask(port, "/v1/models/letters")[0] == 200
    assert ask(port, "/v1/models/other")[0] == 404
    assert ask(port, "/health")[1].items() >= {"status": "ok", "stalled": []}.items()
    assert ask(port, "/v2")[0] == 404
    assert ask(port, "/v1/completions", raw=b"{")[0] == 400
    assert (
        ask(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})[0] == 400
    )  # no template
