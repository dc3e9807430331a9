"""`lab corrections` passes, and fails where a part would do what the lecture says."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab_results import failed, passes
from triptych import attention
from triptych.attention import dispatch
from triptych.nn import linear
from triptych_lectures import labs
from triptych_lectures.labs import corrections
from triptych_lectures.labs.lab import Setup

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("seed", range(5))
def test_passes(seed: int) -> None:
    passes(labs.run("corrections", Setup(seed=seed)))


def test_fails_when_attention_does_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(*args: Any, **options: Any) -> Any:
        request, tensors, restore = attention.prepare(*args, **options)
        return replace(request, scale=1.0), tensors, restore

    monkeypatch.setattr(dispatch, "prepare", unscaled)
    claims = failed(labs.run("corrections"))
    assert {"entropy of 64 weights, d 64, divided by √d, nats", "distance of `attend` from the order after"} <= claims


def test_fails_when_masks_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = corrections.attend
    monkeypatch.setattr(corrections, "attend", lambda *tensors, mask=None, **rest: attend(*tensors, **rest))
    claims = failed(labs.run("corrections"))
    assert "largest weight of a row that sees nothing" in claims
    assert "change by padding of the source, masked" in claims


def test_fails_when_norms_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.RMSNorm, "forward", lambda self, x: x)
    claims = failed(labs.run("corrections"))
    assert "queries of Qwen3 as scores read them: mean square, distance from 1" in claims


def test_fails_when_qwen3_is_a_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(corrections.SMALL, "Qwen3", corrections.SMALL["Llama"])
    claim = "queries of Qwen3 as scores read them: mean square, distance from 1"
    assert failed(labs.run("corrections")) == {claim}


def test_fails_when_bert_is_a_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(corrections.SMALL, "BERT", corrections.SMALL["GPT-2"])
    result = labs.run("corrections")
    assert "share of post-norm blocks, BERT and BART" in failed(result)
    assert "“GPT and BERT differ in the mask alone” (L4 12.5) is not refuted" in result.meaning


def test_fails_when_a_config_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(corrections.PUBLISHED, "GPT-2", corrections.PUBLISHED["GPT-2 medium"])
    monkeypatch.setitem(corrections.WIDTHS, "Llama-3 8B", (4096, 11_008))
    assert failed(labs.run("corrections")) == {
        "parameters with D 768", "biases of the 12 MLPs", "F over D of Llama-3 8B"
    }  # fmt: skip


def test_fails_when_softmax_makes_a_number_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda self, *rest: softmax(self, *rest).nan_to_num())
    assert failed(labs.run("corrections")) == {"share of the weights of that row that are NaN where -∞ is added"}
