"""`lab mistakes` and `encoder-writes` at small sizes: each passes, and fails where its mechanism or text is broken."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from lab_results import failed, passes
from triptych.attention import attend
from triptych.spec import causal
from triptych_lectures.labs import encoder_writes, mistakes, run
from triptych_lectures.labs.generated_tasks import MarkovRows
from triptych_lectures.labs.lab import LabResult, Setup

SIZES: dict[str, dict[str, Any]] = {
    "mistakes": {"symbols": 4, "length": 12, "steps": 100, "rows": 32, "rate": 1e-2, "layers": 1},
    "encoder-writes": {"symbols": 4, "length": 10, "steps": 120, "rate": 1e-2},
}


def small(name: str, seed: int = 0) -> LabResult:
    return run(name, Setup(seed=seed, sizes=SIZES[name]))


def shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The symbols of each text come in a random order, so that no rule joins them."""
    texts = MarkovRows.texts
    monkeypatch.setattr(
        MarkovRows, "texts", lambda self, noise, count: noise.permuted(texts(self, noise, count), axis=1)
    )


# ---------------------------------------------------------------- the text


def test_the_text_has_the_entropy_that_it_says() -> None:
    """By counting what follows each pair of symbols."""
    task = MarkovRows(3, 4000, 1, 0.4)
    ids = task.texts(np.random.default_rng(0), 20)
    counts = np.zeros((3, 3, 3))
    np.add.at(counts, (ids[:, :-2], ids[:, 1:-1], ids[:, 2:]), 1)
    shares = counts / counts.sum(-1, keepdims=True)
    counted = -(counts * np.log(shares)).sum() / counts.sum()
    assert task.entropy == pytest.approx(counted, abs=0.01)
    assert task.follows(ids) == pytest.approx(0.6 + 0.4 / 3, abs=0.01)


# ---------------------------------------------------------------- mistakes


def test_the_right_version_is_attend() -> None:
    q, k, v = torch.randn(3, 2, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out, weights = mistakes.attention(q, k, v, 3)
    cut = [x.view(2, 5, 3, 2).transpose(1, 2) for x in (q, k, v)]
    assert torch.allclose(out, attend(*cut, mask=causal()).transpose(1, 2).flatten(2), atol=1e-12)
    assert weights.shape == (2, 3, 5, 5)


def test_the_wrong_view_mixes_tokens() -> None:
    """With 2 heads of 4 tokens, the second head of token 0 is a piece of token 2."""
    v = torch.arange(4.0)[None, :, None].expand(1, 4, 6)
    zero = torch.zeros(1, 4, 6)
    out, _ = mistakes.attention(zero, zero, v, 2, mistakes.HEADS)
    assert out[0, 0].tolist() == [0, 0, 0, 2, 2, 2]


def test_mistakes_pass() -> None:
    result = passes(small("mistakes"))
    assert [section.kind for section in result.sections] == ["table", *["matrix"] * 4, "table", "curve"]


def _always(kind: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The criteria that fail where every version is this one."""
    attention = mistakes.attention
    monkeypatch.setattr(mistakes, "attention", lambda q, k, v, heads, other: attention(q, k, v, heads, kind))
    return failed(small("mistakes"))


def test_mistakes_fail_when_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = _always(mistakes.RIGHT, monkeypatch)
    assert "smallest change of earlier outputs by another last token, mistakes" in claims
    assert f"{mistakes.FORGOTTEN}: weight on later tokens" in claims
    assert "training loss over the entropy, the mistake with the largest" in claims
    assert not any(claim.startswith("right") for claim in claims)


def test_mistakes_fail_when_the_control_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = _always(mistakes.FORGOTTEN, monkeypatch)
    assert {"right: distance from `attend`", "right: training loss over the entropy"} <= claims


def test_mistakes_fail_on_a_text_without_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffle(monkeypatch)
    assert "right: written symbols that follow the rule" in failed(small("mistakes"))


# ---------------------------------------------------------------- an encoder that writes


def test_an_encoder_writes() -> None:
    passes(small("encoder-writes", seed=1))


@pytest.mark.heavy
def test_an_encoder_fails_on_a_text_without_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffle(monkeypatch)
    result = small("encoder-writes")
    assert "written by the decoder after the rule" in failed(result)
    assert result.meaning.startswith("They have not learned what they were trained for")


@pytest.mark.heavy
def test_an_encoder_fails_when_it_is_trained_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the masked encoder is trained on last symbols too, it is not behind, and fills no place inside."""
    rows = encoder_writes.HiddenSymbols.rows

    def last(self: Any, noise: np.random.Generator, count: int) -> Any:
        return rows(encoder_writes.HiddenSymbols(self.text, self.rate, last=True), noise, count)

    monkeypatch.setattr(encoder_writes.HiddenSymbols, "rows", last)
    assert "nats of a next symbol, encoder less decoder" in failed(small("encoder-writes"))


@pytest.mark.heavy
def test_an_encoder_fails_when_it_is_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a causal mask it cannot fill from both sides."""
    monkeypatch.setattr(encoder_writes, "full", causal)
    result = small("encoder-writes")
    assert not result.passed, result.verdict


def test_the_best_filling_is_that_of_all_neighbors() -> None:
    """Without noise, what stands before decides."""
    assert encoder_writes._best_filling(MarkovRows(5, 9, 0, 1e-9), 0, 64) == 1.0
    assert math.isclose(encoder_writes._best_filling(MarkovRows(2, 9, 0, 1.0), 0, 4000), 0.5, abs_tol=0.05)
