"""BLEU and chrF of a seq2seq run: what is translated, when, and what is refused.

sacrebleu is an extra; where it is missing, a module that counts equal texts stands for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import triptych
from triptych.cli.training_progress import held_out
from triptych.errors import ConfigError, InputError
from triptych.generate import Generation, generate
from triptych.train import Job, check_recipe, evaluate, prepare
from triptych.train.data import with_hidden_words
from triptych.train.text_tasks import translated

WORDS = ("ash", "bay", "elm", "fir", "oak", "yew")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """What is compared: written texts and references.  100 is for equal texts."""
    seen: list[tuple[list[str], list[str]]] = []

    def score(texts: list[str], references: list[list[str]]) -> SimpleNamespace:
        seen.append((texts, references[0]))
        return SimpleNamespace(score=100.0 * sum(map(str.__eq__, texts, references[0])) / len(texts))

    module = ModuleType("sacrebleu")
    module.corpus_bleu = module.corpus_chrf = score  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sacrebleu", module)
    return seen


def job(folder: Path, *, changes: tuple[str, ...] = (), swap: bool = True) -> Job:
    """Two words in the other order; without `swap` in the same."""
    path = folder / "pairs.jsonl"
    pairs = [(f"{a} {b}", f"{b} {a}" if swap else f"{a} {b}") for a in WORDS for b in WORDS if a != b]
    path.write_text("\n".join(json.dumps({"source": source, "target": target}) for source, target in pairs))
    tables: dict[str, Any] = {
        "tokenizer": "words:20",
        "model": {
            "model_type": "t5", "d_model": 24, "d_ff": 40, "d_kv": 8, "num_heads": 3, "num_layers": 1,
            "relative_attention_num_buckets": 8, "relative_attention_max_distance": 8, "dropout_rate": 0.0,
        },
        "data": {"path": str(path), "held_out": 0.3},
        "objective": {"name": "seq2seq", "translate": 5},
        "run": {"rows": 4, "length": 6, "steps": 2, "precision": "fp32", "evaluate_every": 0.5},
    }  # fmt: skip
    return prepare(check_recipe(tables, changes))


def test_the_decoder_of_pairs_reads_hidden_words(tmp_path: Path) -> None:
    plain, hides = (job(tmp_path, changes=(f"objective.hidden={rate}", "objective.translate=4")) for rate in (0.0, 0.5))
    unknown, rows = hides.tokenizer.unk_id, hides.trainer.data.draw(0, 0, 24)
    before = plain.trainer.data.draw(0, 0, 24)
    assert all(
        (a.targets == b.targets).all() and (a.source == b.source).all() for a, b in zip(rows, before, strict=True)
    )
    read = np.concatenate([row.ids[1:] for row in rows])
    assert 0.3 < (read == unknown).mean() < 0.7
    kept = np.concatenate([row.ids[1:] for row in before])
    assert not (kept == unknown).any()
    assert (read[read != unknown] == kept[read != unknown]).all()
    with pytest.raises(InputError, match=r"objective\.hidden puts the unknown token in place of words"):
        with_hidden_words(plain.trainer.data, 0.5, None)


def test_held_out_sources_are_translated_at_the_end(
    tmp_path: Path, compared: list[tuple[list[str], list[str]]]
) -> None:
    run = job(tmp_path)
    compared.clear()
    run.run()
    score = run.trainer.last_score()
    (sources, right), *_, (written, also) = compared
    assert len(sources) == len(written) == 5
    assert right == also == [" ".join(reversed(source.split())) for source in sources]
    model = triptych.Model(run.trainer.module.eval(), run.tokenizer, run.hf)
    assert written == [one.text for one in model.generate(sources, max_new_tokens=6)]
    assert set(score.metrics) == {"BLEU", "chrF"}
    assert score.baselines == {"copying the source": 0.0}
    assert score.tokens > 0
    assert f"BLEU {score.metrics['BLEU']:.1f}, chrF" in held_out(score)
    assert "copying the source 0.0)" in held_out(score)


def test_a_model_that_is_right_scores_100_and_so_does_copying_where_it_is_right(
    tmp_path: Path, compared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job(tmp_path, swap=False)
    held = run.trainer.held
    assert held is not None
    score = evaluate(run.trainer.module, held)
    assert score.baselines["copying the source"] == 100.0
    assert score.metrics["BLEU"] < 100.0  # nothing is trained
    monkeypatch.setattr("triptych.train.text_tasks.translated", lambda module, tokenizer, sources, length: sources)
    assert evaluate(run.trainer.module, held).metrics["BLEU"] == 100.0


def test_a_quick_evaluation_translates_nothing(tmp_path: Path, compared: list[Any]) -> None:
    run = job(tmp_path, changes=("run.rows=1", "data.held_out=0.5"))
    held = run.trainer.held
    assert held is not None
    assert len(held.batches) > 1
    assert not evaluate(run.trainer.module, held.sample(1)).metrics
    assert evaluate(run.trainer.module, held).metrics


def test_what_cannot_be_translated_is_refused_before_training(tmp_path: Path, compared: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"objective\.translate = 500 is more than the 9 pairs held out"):
        job(tmp_path, changes=("objective.translate=500",))
    with pytest.raises(ConfigError, match=r"objective\.translate is for seq2seq; objective causal does not read it"):
        job(tmp_path, changes=("objective.name=causal",))


def test_without_sacrebleu_the_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(InputError, match=r"pip install sacrebleu"):
        job(tmp_path)


def test_sacrebleu_itself(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    run = job(tmp_path, swap=False)
    run.run()
    score = run.trainer.last_score()
    assert score.baselines["copying the source"] == 0.0  # two words hold no four in a row
    assert 0 <= score.metrics["BLEU"] <= score.metrics["chrF"] <= 100


def test_a_translation_ends_where_the_model_ends_it(
    tmp_path: Path, compared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job(tmp_path)
    end = run.tokenizer.eos_id
    generations: list[Generation] = []

    def ends_at_once(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits + 1e4 * (torch.arange(logits.shape[-1]) == end)

    def kept(*arguments: Any) -> list[Generation]:
        generations.extend(generate(*arguments))
        return generations

    run.trainer.module.head.register_forward_hook(ends_at_once)
    monkeypatch.setattr("triptych.train.text_tasks.generate", kept)
    assert translated(run.trainer.module.eval(), run.tokenizer, ["ash bay", "bay ash"], 6) == ["", ""]
    assert [one.reason for one in generations] == ["end", "end"]
