"""The quality of packed forms in `check`: perplexity and divergence, tokens counted, nothing left out silently."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from cli_models import checkpoint
from triptych.check import check
from triptych.check.quality import TEXT, quality
from triptych.checkpoints.convert import convert
from triptych.cli import main
from triptych.errors import InputError
from triptych.model import Model, create, load
from triptych.native import library, why_not

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SHORT = TEXT[:300]
needs_kernels = pytest.mark.skipif(library() is None, reason=why_not() or "")


def test_perplexity_and_divergence_are_what_they_are_called() -> None:
    model = load(checkpoint("decoder"))
    other = load(checkpoint("decoder"))
    with torch.no_grad():
        other.module.get_parameter("decoder.embed.tokens.weight").mul_(1.5)
    plain, changed = quality({"plain": model, "changed": other}, SHORT)
    ids = model.ids([SHORT])[0]
    width = min(256, model.spec.context or 256)
    loss = total = 0.0
    for start in range(0, len(ids), width):
        row = ids[start : start + width]
        if len(row) > 1:
            scores = model.logits([row])[0][:-1].double().log_softmax(-1)
            loss -= float(scores[range(len(row) - 1), row[1:]].sum())
            total += len(row) - 1
    assert plain.tokens == changed.tokens == total
    assert math.isclose(plain.perplexity, math.exp(loss / total), rel_tol=1e-4)
    assert plain.kl is None
    assert changed.kl is not None
    assert changed.kl > 1e-3  # control: the same weights have none
    assert abs(quality({"plain": model, "same": model}, SHORT)[1].kl or 0.0) < 1e-9


@needs_kernels
def test_a_packed_model_is_measured_beside_fp32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load(checkpoint("decoder")).tokenizer
    assert tokenizer is not None
    create(LLAMA | {"vocab_size": tokenizer.vocab_size}, tokenizer, seed=3).save(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "x.gguf", dtype="q8_0")
    assert main(["check", str(tmp_path / "x.gguf"), "--against", "none", "--quantize", "int4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["quality"]
    assert [one["form"] for one in found] == ["fp32", "packed", "int4"]
    assert found[0]["tokens"] == found[2]["tokens"] > 100
    assert 0 < found[1]["kl"] < found[2]["kl"]
    assert main(["check", str(tmp_path / "x.gguf"), "--against", "none"]) == 0
    assert "KL to fp32" in capsys.readouterr().out


def test_what_has_no_perplexity_is_said(unchecked: None) -> None:
    model = load(checkpoint("decoder"))
    memory = Model(model.module, model.tokenizer)
    with pytest.raises(InputError, match=r"no perplexity: .* does not predict the next token"):
        check(checkpoint("encoder"), against="none", text="A text.")
    with pytest.raises(InputError, match="no perplexity: the model is not in a file"):
        check(memory, against="none", quantize=["int8"])
    with pytest.raises(InputError, match="needs a text of two tokens or more"):
        quality({"fp32": load(checkpoint("decoder"))}, "")
