"""`/v1/completions` with echo and log-probabilities: the values are the model's own, for decoders and
encoder-decoders."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="needs the extra serve")

from cli_models import checkpoint
from served import model, server_of
from serving import running as serving
from test_serve_openai import ask, streamed
from triptych.model import Model, load
from triptych.serve.app import Server
from triptych.serve.worker import ModelWorker

TEXT = "the river bends"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(server_of(["decoder", "encoder-decoder", "encoder"])) as port:
        yield port


@torch.inference_mode()
def likelihoods(of: Model, ids: list[int], source: list[int] | None = None) -> list[float]:
    """The log-probability of each id but the first, by one forward of the modules."""
    (logits,) = of.logits([ids]) if source is None else of.logits([source], [ids])
    scores = logits.float().log_softmax(-1)
    return [float(scores[i, token]) for i, token in enumerate(ids[1:])]


def completed(port: int, **body: Any) -> Any:
    status, answer, _ = ask(port, "/v1/completions", {"model": "decoder", "temperature": 0, **body})
    assert status == 200, answer
    return answer


def test_echo_gives_the_log_probabilities_of_the_prompt_and_of_one_token_more(port: int) -> None:
    ids = model("decoder").ids([TEXT])[0]
    answer = completed(port, prompt=ids, echo=True, logprobs=2, max_tokens=1)
    (choice,) = answer["choices"]
    scores = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert len(scores["tokens"]) == len(ids) + 1 == len(scores["text_offset"]) == len(scores["top_logprobs"])
    assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
    assert "".join(scores["tokens"][: len(ids)]) == TEXT
    assert scores["text_offset"][:5] == [0, 1, 2, 3, 4]
    expected = likelihoods(model("decoder"), ids)
    assert scores["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
    assert expected != pytest.approx(expected[::-1], abs=1e-4)  # the control: another order is seen
    assert max(scores["top_logprobs"][-1].values()) == scores["token_logprobs"][-1]  # greedy
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 1)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_prompt_in_pieces_beside_others_has_the_same_values(port: int) -> None:
    rows = [[5 + i, *range(30, 60 + i)] for i in range(6)]
    answer = completed(port, prompt=rows, echo=True, logprobs=0, max_tokens=1)
    for row, choice in zip(rows, answer["choices"], strict=True):
        expected = likelihoods(model("decoder"), row)
        assert choice["logprobs"]["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * len(row)  # the chosen one


def test_no_token_is_written_where_only_the_prompt_is_scored(port: int) -> None:
    longest = model("decoder").spec.context
    assert longest is not None
    ids = [i % 90 + 33 for i in range(longest)]  # leaves no room for another token
    answer = completed(port, prompt=[ids, ids[:1]], echo=True, logprobs=1, max_tokens=0)
    whole, single = answer["choices"]
    assert whole["logprobs"]["token_logprobs"][1:] == pytest.approx(likelihoods(model("decoder"), ids), abs=1e-4)
    assert len(whole["logprobs"]["tokens"]) == longest == answer["usage"]["prompt_tokens"] - 1
    assert single["logprobs"]["token_logprobs"] == [None]
    assert answer["usage"]["completion_tokens"] == 0
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]


def test_an_end_token_is_among_the_log_probabilities_and_not_in_the_text(port: int) -> None:
    end = model("decoder").end_ids[0]
    answer = completed(port, prompt=TEXT, echo=True, logprobs=0, max_tokens=5, logit_bias={str(end): 100})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
    assert len(choice["logprobs"]["tokens"]) == len(model("decoder").ids([TEXT])[0]) + 1


def test_a_stream_of_echoed_text_is_the_whole_answer(port: int) -> None:
    body = {"prompt": [TEXT, "the mill"], "echo": True, "logprobs": 1, "max_tokens": 6, "n": 2, "seed": 3,
            "temperature": 1.0}  # fmt: skip
    whole = completed(port, **body)
    status, text, _ = ask(port, "/v1/completions", {"model": "decoder", "stream": True, **body})
    assert status == 200
    for choice in whole["choices"]:
        parts = [one["choices"][0] for one in streamed(text) if one["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for one in parts for value in one["logprobs"][name]] == values


def test_the_best_of_several_has_the_highest_mean_log_probability(port: int) -> None:
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 1.5, "seed": 4, "logprobs": 0}
    every = completed(port, n=6, **body)["choices"]
    means = [sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["tokens"]) for one in every]
    order = sorted(range(6), key=lambda i: -means[i])
    assert order != list(range(6))  # the control: not simply the first ones
    best = completed(port, n=2, best_of=6, **body)
    assert [one["text"] for one in best["choices"]] == [every[i]["text"] for i in order[:2]]
    assert [one["index"] for one in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == sum(len(one["logprobs"]["tokens"]) for one in every)


def test_a_target_has_its_log_probabilities_beside_its_source(port: int) -> None:
    both = model("encoder-decoder")
    words = both.inputs.words
    target = words.encode("a ship", special=False)
    body = {"model": "encoder-decoder", "prompt": TEXT, "decoder_prefix": target, "echo": True, "logprobs": 1}
    answer = completed(port, max_tokens=1, **body)
    scores = answer["choices"][0]["logprobs"]["token_logprobs"]
    expected = likelihoods(both, [both.spec.start_id(), *target], words.encode(TEXT))
    assert scores[0] is None
    assert scores[1:-1] == pytest.approx(expected, abs=1e-4)
    other = completed(port, max_tokens=1, **body | {"prompt": "tide"})["choices"][0]["logprobs"]["token_logprobs"]
    assert other[1:-1] != pytest.approx(expected, abs=1e-4)  # the control: the source is read
    named = completed(port, max_tokens=1, **body | {"decoder_prefix": "a ship"})
    assert named["choices"] == answer["choices"]
    assert named["usage"]["prompt_tokens"] == len(words.encode(TEXT)) + 1 + len(target)
    written = completed(port, model="encoder-decoder", prompt=TEXT, max_tokens=9)["choices"][0]["text"]
    assert written == both.generate([TEXT], max_new_tokens=9)[0].text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": "encoder-decoder", "prompt": "a", "echo": True}, "give the target as decoder_prefix"),
        ({"model": "encoder", "prompt": "a"}, "it serves /v1/embeddings, /v1/fill, /tokenize"),
        ({"prompt": "a"}, "model is missing; this server has decoder, encoder-decoder, encoder"),
    ],
    ids=["echo alone", "an encoder", "no model"],
)
def test_what_a_model_cannot_do_is_refused_with_what_it_can(port: int, body: Any, said: str) -> None:
    status, answer, _ = ask(port, "/v1/completions", body)
    assert status == 400
    assert said in answer["error"]["message"]


def test_a_target_follows_the_checkpoint_s_own_rules(tmp_path: Path) -> None:
    plain = model("encoder-decoder").generate([TEXT], max_new_tokens=9)[0]
    directory = tmp_path / "t5"
    shutil.copytree(checkpoint("encoder-decoder"), directory)
    rules = {"bad_words_ids": [[plain.ids[0]]], "forced_bos_token_id": 100}  # as Marian and mBART have them
    (directory / "generation_config.json").write_text(json.dumps(rules))
    ruled = load(directory)
    with serving(Server({"t5": ModelWorker(ruled, "t5", max_rows=2)})) as port:
        written = completed(port, model="t5", prompt=TEXT, max_tokens=9)["choices"][0]["text"]
    expected = ruled.generate([TEXT], max_new_tokens=9)[0]
    assert written == expected.text != plain.text
    assert plain.ids[0] not in expected.ids
