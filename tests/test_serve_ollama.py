"""Released clients against a running server: openai's for vectors, completions and recordings, Ollama's for its own
routes."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("uvicorn", reason="needs the extra serve")
ollama = pytest.importorskip("ollama", reason="needs the client of Ollama")
openai = pytest.importorskip("openai", reason="needs the client of OpenAI")

from served import model, server_of  # noqa: E402
from serving import running as serving  # noqa: E402
from triptych.media.audio import write_wav  # noqa: E402


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(server_of(["decoder", "encoder", "sentences", "hears"])) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def of_openai(address: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def of_ollama(address: str) -> Iterator[Any]:
    with ollama.Client(address) as client:
        yield client


GREEDY = {"temperature": 0, "num_predict": 12}
TALK = [{"role": "user", "content": "the river"}]


def test_openai_embeds_and_completes(of_openai: Any) -> None:
    texts = ["the old mill", "tide"]
    answer = of_openai.embeddings.create(model="sentences", input=texts)  # as base64, unless floats are asked for
    found = torch.tensor([one.embedding for one in answer.data])
    torch.testing.assert_close(found, model("sentences").encode(texts), atol=1e-5, rtol=0)
    expected = model("decoder").generate(["tide"], max_new_tokens=9)[0].text
    settings = {"model": "decoder", "prompt": "tide", "max_tokens": 9, "temperature": 0}
    assert of_openai.completions.create(**settings).choices[0].text == expected
    events = [*of_openai.completions.create(**settings, stream=True, stream_options={"include_usage": True})]
    assert "".join(one.choices[0].text for one in events[:-1]) == expected
    assert events[-1].usage.prompt_tokens == 4
    scores = of_openai.completions.create(**settings | {"max_tokens": 1}, echo=True, logprobs=1).choices[0].logprobs
    assert (scores.tokens[:4], scores.token_logprobs[0]) == (list("tide"), None)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's own route of translations
def test_openai_hears(of_openai: Any, tmp_path: Any) -> None:
    path = tmp_path / "a.wav"
    write_wav(path, np.sin(np.arange(32_000) ** 1.3 / 20).astype(np.float32))
    with path.open("rb") as file:
        heard = of_openai.audio.transcriptions.create(model="hears", file=file, language="en")
    assert heard.text == model("hears").transcribe(path, language="en").text
    with path.open("rb") as file:
        whole = of_openai.audio.translations.create(model="hears", file=file, response_format="verbose_json")
    assert whole.text == model("hears").transcribe(path, task="translate").text
    assert whole.segments[0].start == 0.0


def test_openai_s_errors_name_what_is_wrong(of_openai: Any, tmp_path: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5'"):
        of_openai.embeddings.create(model="gpt-5", input="a")
    with pytest.raises(openai.BadRequestError, match=r"it serves /v1/embeddings, /v1/fill"):
        of_openai.completions.create(model="encoder", prompt="a")
    (tmp_path / "a.mp3").write_bytes(b"ID3")
    with (
        pytest.raises(openai.APIStatusError, match="is not a WAV file") as error,
        (tmp_path / "a.mp3").open("rb") as file,
    ):
        of_openai.audio.transcriptions.create(model="hears", file=file)
    assert error.value.status_code == 415


def test_ollama_lists_and_shows_models(of_ollama: Any, address: str) -> None:
    listed = of_ollama.list().models
    assert [one.model for one in listed] == ["decoder", "encoder", "sentences", "hears"]
    assert listed[0].details.family == "llama"
    assert listed[0].size > 0
    assert len({one.digest for one in listed}) == 4
    shown = of_ollama.show("decoder:latest")
    assert shown.modelinfo["llama.context_length"] == model("decoder").spec.context
    assert (shown.capabilities, of_ollama.show("sentences").capabilities) == (["completion"], ["embedding"])
    assert str(model("decoder").path) not in shown.model_dump_json()
    with pytest.raises(ollama.ResponseError, match="there is no model 'llama9'"):
        of_ollama.show("llama9")


def test_ollama_chats_whole_and_streamed(of_ollama: Any) -> None:
    expected = "".join(model("decoder").chat(TALK, max_new_tokens=12))
    whole = of_ollama.chat("decoder", TALK, options=GREEDY)
    assert (whole.message.content, whole.done, whole.message.role) == (expected, True, "assistant")
    assert whole.done_reason in ("stop", "length")
    assert 0 < whole.prompt_eval_duration <= whole.total_duration
    pieces = [*of_ollama.chat("decoder:latest", TALK, options=GREEDY, stream=True)]
    assert "".join(one.message.content for one in pieces) == expected
    assert [one.done for one in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == whole.eval_count == 12
    assert len(pieces) > 2
    sampled = [
        of_ollama.chat("decoder", TALK, options={"seed": seed, "num_predict": 12}).message.content for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    stopped = of_ollama.chat("decoder", TALK, options=GREEDY | {"stop": [expected[3]]})
    assert stopped.message.content == expected[: expected.index(expected[3])]


def test_a_body_of_ollama_s_needs_no_type_unless_a_page_sends_it(address: str) -> None:
    body = json.dumps({"model": "decoder", "prompt": "tide", "stream": False, "options": GREEDY}).encode()
    with urllib.request.urlopen(f"{address}/api/generate", body) as response:  # as a form, which is curl's default too
        assert json.load(response)["done"]
    other = urllib.request.Request(f"{address}/api/generate", body, {"origin": "http://elsewhere"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(other)
    with error.value as refused:
        assert (refused.code, json.load(refused)) == (415, {"error": "send the body as application/json"})


def test_ollama_generates_embeds_and_refuses(of_ollama: Any) -> None:
    raw = of_ollama.generate("decoder", "tide", raw=True, options=GREEDY)
    assert raw.response == model("decoder").generate(["tide"], max_new_tokens=12)[0].text
    templated = of_ollama.generate("decoder", "the river", options=GREEDY)
    assert templated.response == "".join(model("decoder").chat(TALK, max_new_tokens=12)) != raw.response
    assert of_ollama.generate("decoder").done_reason == "load"
    vectors = torch.tensor(of_ollama.embed("sentences", ["the old mill"]).embeddings)
    torch.testing.assert_close(vectors, model("sentences").encode(["the old mill"]), atol=1e-5, rtol=0)
    for how, said in (
        ({"options": {"mirostat": 1}}, "mirostat is not supported"),
        ({"options": {"top_k": -1}}, "top_k must be at least 0"),
        ({"format": {"type": "object", "format": 3}}, "format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ):
        with pytest.raises(ollama.ResponseError, match=said) as error:
            of_ollama.chat("decoder", TALK, **how)
        assert error.value.status_code == 400


def test_ollama_s_answers_have_the_format_that_is_wanted(of_ollama: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the extra serve")
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    values = [
        json.loads(
            of_ollama.chat("decoder", TALK, format=schema, options=GREEDY | {"num_predict": 40}).message.content
        ),
        json.loads(of_ollama.generate("decoder", "tide", raw=True, format=schema, options={"seed": 1}).response),
    ]
    assert all(value in ({"n": 1}, {"n": 22}) for value in values)
    assert of_ollama.chat("decoder", TALK, format="json", options=GREEDY).message.content.lstrip()[0] == "{"
    assert of_ollama.chat("decoder", TALK, options=GREEDY).message.content.lstrip()[0] != "{"  # the control


def test_ollama_calls_a_tool_and_reads_what_it_returned() -> None:
    import scripted

    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": scripted.WEATHER}}]
    name = next(iter(scripted.TEMPLATES))
    one = scripted.model(name)
    with scripted.serving({name: one}) as port, ollama.Client(f"http://127.0.0.1:{port}") as client:
        assert "tools" in client.show(name).capabilities
        talk: list[Any] = [{"role": "user", "content": "What is the weather?"}]
        whole = client.chat(name, talk, tools=tools, options={"temperature": 0})
        (call,) = whole.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", scripted.ARGUMENTS)
        parts = [*client.chat(name, talk, tools=tools, options={"temperature": 0}, stream=True)]
        assert [one for part in parts for one in part.message.tool_calls or ()] == [call]
        talk += [whole.message, {"role": "tool", "tool_name": "get_weather", "content": "rain"}]
        again = client.chat(name, talk, tools=tools, options={"temperature": 0, "num_predict": 3})
        assert again.prompt_eval_count > whole.prompt_eval_count


def test_thinking_is_what_the_template_makes_of_it() -> None:
    """The prompt has as many tokens more as the template writes; where it has no thinking, it cannot be asked for."""
    from scripted import LEVELS, PLAIN, THINKING, scripted
    from scripted import serving as serving_models

    models = {
        name: scripted("ok", source) for name, source in (("switch", THINKING), ("levels", LEVELS), ("plain", PLAIN))
    }
    with serving_models(models) as port, ollama.Client(f"http://127.0.0.1:{port}") as client:

        def tokens(name: str, think: Any) -> int:
            how = {"think": think, "options": {"num_predict": 1}}
            counts = {
                client.chat(name, TALK, **how).prompt_eval_count,
                client.generate(name, TALK[0]["content"], **how).prompt_eval_count,
            }
            assert len(counts) == 1
            return int(counts.pop())

        usual = tokens("switch", None)
        assert [tokens("switch", think) - usual for think in (True, False)] == [0, len("<quick>")]
        usual = tokens("levels", None)
        assert [tokens("levels", think) - usual for think in ("low", "medium", "high", True, False)] == [
            -3,
            0,
            -2,
            0,
            0,
        ]
        assert tokens("plain", False) == tokens("plain", None)
        for name, think, problem in (
            ("switch", "low", "no levels of thinking"),
            ("plain", True, "turns thinking on"),
            ("plain", "high", "turns thinking on"),
            ("levels", "extreme", "think must be one of"),
        ):
            with pytest.raises(ollama.ResponseError, match=problem) as error:
                client._request_raw("POST", "/api/chat", json={"model": name, "messages": TALK, "think": think})
            assert error.value.status_code == 400
        thinking = {name: "thinking" in client.show(name).capabilities for name in models}
        assert thinking == {"switch": True, "levels": True, "plain": False}


def test_ollama_lists_what_is_loaded_and_gives_one_vector_to_older_clients(of_ollama: Any) -> None:
    loaded = of_ollama.ps().models
    assert [one.model for one in loaded] == [one.model for one in of_ollama.list().models]
    assert {one.expires_at.year for one in loaded} == {9999}
    assert loaded[0].context_length == model("decoder").spec.context
    vector = of_ollama.embeddings("sentences", "the old mill").embedding
    assert list(vector) == pytest.approx(model("sentences").encode(["the old mill"])[0].tolist(), abs=1e-5)
    assert list(of_ollama.embeddings("sentences", "").embedding) == []
    with pytest.raises(ollama.ResponseError, match="the model reads 16"):
        of_ollama.embeddings("sentences", "the old mill " * 9)


def test_more_tokens_than_there_is_room_for_are_as_many_as_there_are(of_ollama: Any) -> None:
    """Ollama's clients send limits that are larger than small models."""
    for answer in (
        of_ollama.chat("decoder", TALK, options=GREEDY | {"num_predict": 4096}),
        of_ollama.generate("decoder", "the river", options=GREEDY | {"num_predict": 4096}),
    ):
        assert answer.prompt_eval_count + answer.eval_count <= model("decoder").spec.context
        assert answer.done_reason in ("stop", "length")
