"""Reads and edits inside a served model: the library's own values, behind --inspect alone, within a limit of bytes."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("uvicorn", reason="needs the extra serve")

from serving import ask, running
from test_serve_worker import letters
from triptych.model import Model
from triptych.probe import add, zero
from triptych.serve.app import Server
from triptych.serve.worker import ModelWorker

GREEDY = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
PATTERN, AFTER = "blocks.1.attn.pattern", "blocks.0.resid_post"


@pytest.fixture(scope="module")
def model() -> Model:
    return letters()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(Server({"letters": ModelWorker(letters(), "letters", max_rows=8)}, inspect=True)) as one:
        yield one


def inspected(port: int, **body: object) -> Any:
    status, answer = ask(port, "/v1/inspect", {"prompt": "abcd"} | body)
    assert status == 200, answer
    return answer


def test_what_is_read_is_the_librarys_own(port: int, model: Model) -> None:
    trace = model.trace(["abcd"], read=[PATTERN, AFTER])
    answer = inspected(port, read=[PATTERN, {"site": AFTER, "at": [1, 2]}], top_logprobs=3)
    assert [one["text"] for one in answer["tokens"]] == list("abcd")
    pattern = answer["reads"][PATTERN]
    assert (pattern["shape"], pattern["positions"]) == ([2, 4, 4], [0, 1, 2, 3])
    torch.testing.assert_close(torch.tensor(pattern["values"]), trace[PATTERN][0])
    torch.testing.assert_close(torch.tensor(answer["reads"][AFTER]["values"]), trace[AFTER][0][1:3])
    assert answer["reads"][AFTER]["positions"] == [1, 2]
    best = trace.logits[0][-1].float().log_softmax(-1).topk(3)
    assert [one["id"] for one in answer["predictions"][-1]] == best.indices.tolist()
    assert [one["logprob"] for one in answer["predictions"][-1]] == pytest.approx(best.values.tolist(), abs=1e-5)
    encoded = inspected(port, read=[PATTERN], encoding_format="base64")["reads"][PATTERN]["base64"]
    values = np.frombuffer(base64.b64decode(encoded), "<f4").reshape(2, 4, 4)
    assert np.allclose(values, trace[PATTERN][0].numpy())


def test_masked_scores_are_null_and_statistics_are_the_librarys(port: int, model: Model) -> None:
    answer = inspected(port, read=["blocks.0.attn.scores"], statistics={"layers": 1, "top": 2})
    scores = answer["reads"]["blocks.0.attn.scores"]["values"]
    assert [[key is None for key in query] for query in scores[0]] == [[k > q for k in range(4)] for q in range(4)]
    (measured,) = model.statistics(["abcd"], layers=1, top=2).statistics(PATTERN)
    assert torch.tensor(answer["statistics"][f"{PATTERN}:entropy"]["values"]).allclose(measured.entropy)
    assert not any(name.startswith("blocks.0") for name in answer["statistics"])


def test_edits_change_the_forward_as_the_librarys_do(port: int, model: Model) -> None:
    vector = [float(i) for i in range(16)]
    edits = [zero("blocks.1.attn.z", heads=[0]), add(AFTER, torch.tensor(vector), at=[2])]
    expected = model.trace(["abcd"], read=["blocks.1.resid_post"], edit=edits)
    answer = inspected(
        port, read=["blocks.1.resid_post"], ablate_heads=["1.0"], edit=[{"site": AFTER, "add": vector, "at": [2]}]
    )
    values = torch.tensor(answer["reads"]["blocks.1.resid_post"]["values"])
    torch.testing.assert_close(values, expected["blocks.1.resid_post"][0])
    plain = inspected(port, read=["blocks.1.resid_post"])["reads"]["blocks.1.resid_post"]["values"]
    assert not torch.tensor(plain).allclose(values)
    assert answer["edits"] == {AFTER: 1, "blocks.1.attn.z": 1}


@pytest.mark.parametrize(
    "edit",
    [
        {"ablate_heads": ["0.0", "1.1"]},
        {"edit": [{"site": "blocks.*.attn.z", "zero": True}]},
        {"steer": {"site": AFTER, "toward": "aaa", "away": "zzz", "scale": 8}},
    ],
    ids=str,
)
def test_a_generation_is_edited_and_others_are_not(port: int, edit: dict[str, Any]) -> None:
    _, before = ask(port, "/v1/completions", GREEDY)
    status, changed = ask(port, "/v1/completions", GREEDY | edit)
    assert status == 200, changed
    assert changed["choices"][0]["text"] != before["choices"][0]["text"]
    _, after = ask(port, "/v1/completions", GREEDY)
    assert after["choices"][0]["text"] == before["choices"][0]["text"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"read": ["blocks.9.attn.pattern"]}, "blocks.9.attn.pattern"),
        ({"read": ["nothing"]}, "nothing"),
        ({"read": [{"site": PATTERN, "head": 0}]}, "read[0].head is not supported here (did you mean 'heads'?)"),
        ({"read": [{"site": PATTERN, "heads": 7}]}, "head"),
        ({"read": [3]}, "read[0] must be a JSON object"),
        ({"read": [PATTERN], "max_bytes": 10}, "bytes"),
        ({"edit": [{"site": AFTER}]}, "edit[0] must have zero"),
        ({"edit": [{"site": AFTER, "zero": True, "add": [1]}]}, "one of the three"),
        ({"edit": [{"site": AFTER, "add": [1, "a"]}]}, "edit[0].add must be numbers"),
        ({"edit": [{"site": AFTER, "add": [1.0, 2.0]}]}, "16"),
        ({"ablate_heads": ["1"]}, "BLOCK.HEAD"),
        ({"ablate_heads": ["7.0"]}, "blocks.7"),
        ({"ablate_heads": [1.0]}, "BLOCK.HEAD"),
        ({"steer": {"site": AFTER}}, "give two prompts"),
        ({"steer": {"site": AFTER, "vector": [1.0]}}, "vector"),
        ({"prompt": ""}, "prompt must be at least 1"),
        ({"prompt": [1, 99999]}, "99999"),
        ({"statistics": {"layers": 9}}, "9"),
        ({"encoding_format": "pickle"}, "encoding_format must be one of"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_in_a_line(port: int, body: dict[str, Any], said: str) -> None:
    status, error = ask(port, "/v1/inspect", {"prompt": "abcd"} | body)
    assert status == 400, error
    assert said in error["error"]["message"]
    assert "\n" not in error["error"]["message"]


def test_without_inspect_nothing_is_read_or_edited() -> None:
    with running(Server({"letters": ModelWorker(letters(), "letters", max_rows=2)})) as port:
        status, error = ask(port, "/v1/inspect", {"prompt": "abcd", "read": [PATTERN]})
        assert (status, "--inspect" in error["error"]["message"]) == (404, True)
        for name in ("edit", "ablate_heads"):
            status, error = ask(port, "/v1/completions", GREEDY | {name: []})
            assert (status, error["error"]["param"]) == (400, name)
            assert "start the server with --inspect" in error["error"]["message"]
