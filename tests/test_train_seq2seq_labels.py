"""Labels of texts by BART, mBART and T5, whose decoder reads the text too and has the label at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import references
import triptych
from test_train_losses import gradients
from test_train_tasks import labels, recipe, written
from triptych.errors import ConfigError, TextError
from triptych.text import Encoded
from triptych.train import collate, loss, prepare
from triptych.train.labelled import ClassLoss, labelled
from triptych.train.task import trained_at

SIZES: dict[str, dict[str, Any]] = {
    "bart": {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64,
             "dropout": 0.0, "init_std": 0.1},
    "t5": {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 1, "dropout_rate": 0.0},
}  # fmt: skip
SIZES["mbart"] = SIZES["bart"]
ROWS = {"bart-classes": [[7, 3, 11, 2], [5, 19, 3, 40, 8, 2], [9, 2]],
        "t5-classes": [[7, 3, 11, 1], [5, 19, 3, 40, 8, 1], [9, 1]]}  # fmt: skip
GOALS = [[3], [0], [4]]


def settings(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES[model_type]}


@pytest.mark.parametrize("broken", [False, True], ids=["", "a label is another"])
@pytest.mark.parametrize("name", ROWS)
def test_a_batch_has_the_loss_and_the_gradients_of_transformers(name: str, broken: bool) -> None:
    rows, module = ROWS[name], triptych.load(references.saved(name)[1]).module
    goals = [[1], *GOALS[1:]] if broken else GOALS
    head = ClassLoss(tuple("abcde"))
    batch = collate(
        [
            labelled(Encoded(row, [0] * len(row), [], []), goal, head, i, trained_at(len(row), len(row) - 1))
            for i, (row, goal) in enumerate(zip(rows, goals, strict=True))
        ]
    )
    ours, _ = loss(module.eval(), batch)
    (ours / batch.weight).backward()

    model = references.build(name)
    pad = model.config.pad_token_id
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)
    wanted = model(input_ids=ids, attention_mask=(ids != pad).long(), labels=torch.tensor(GOALS).flatten()).loss
    wanted.backward()
    found = gradients(module)
    named = {key: p.grad for key, p in model.named_parameters() if p.grad is not None and key in found}
    assert len(named) > 20
    largest = max(float(grad.abs().max()) for grad in named.values())
    apart = max(float((found[key] - grad).abs().max()) for key, grad in named.items()) / largest
    same = abs(float(ours.detach()) / batch.weight - float(wanted.detach())) < 1e-5 and apart < 1e-4
    assert same != broken


@pytest.mark.heavy
@pytest.mark.parametrize("model_type", SIZES)
def test_labels_train_save_and_open(model_type: str, tmp_path: Path) -> None:
    """Better than guesses on held-out texts, saved with their names, and what transformers computes of them."""
    path = written(tmp_path / "a.jsonl", labels())
    run = {"out": str(tmp_path / "run"), "save_every": 1.0, "steps": 60}
    job = prepare(recipe({"name": "labels"}, {"path": path}, model=settings(model_type), run=run))
    job.run()
    score = job.trainer.last_score()
    assert score.metrics["accuracy"] > score.baselines["majority"] + 0.2
    model = triptych.load(tmp_path / "run")
    texts = [row["text"] for row in labels()[:3]] + [row["text"] for row in labels()[-3:]]
    found = [dict(one) for one in model.classify(texts)]
    assert {frozenset(one) for one in found} == {frozenset({"good", "bad"})}
    import transformers

    reference = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    assert reference.config.id2label == {0: "bad", 1: "good"}
    for text, ours in zip(texts, found, strict=True):
        ids = torch.tensor([model.tokenizer.encode(text)])  # type: ignore[union-attr]
        with torch.no_grad():
            theirs = reference(input_ids=ids).logits[0].softmax(-1).tolist()
        assert [ours["bad"], ours["good"]] == pytest.approx(theirs, abs=1e-4)


@pytest.mark.heavy
def test_shuffled_labels_are_not_learned(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", labels(shuffled=True))
    job = prepare(recipe({"name": "labels"}, {"path": path}, model=settings("bart"), run={"steps": 60}))
    job.run()
    assert job.trainer.last_score().metrics["accuracy"] < 0.75


def test_other_objectives_are_refused(tmp_path: Path) -> None:
    rows = [{"words": ["a", "b"], "tags": ["x", "y"]}] * 8
    with pytest.raises(ConfigError, match=r"objective tags trains one of bert, .*; the model is of type bart"):
        prepare(recipe({"name": "tags"}, {"path": written(tmp_path / "a.jsonl", rows)}, model=settings("bart")))


def test_a_row_without_its_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triptych.train import task

    whole = task.Fitter.__call__

    def without_end(self: Any, *given: Any) -> Encoded | None:
        row = whole(self, *given)
        return row and Encoded(row.ids[:-1], row.token_types[:-1], row.offsets[:-1], row.sequence_ids[:-1])

    monkeypatch.setattr(task.Fitter, "__call__", without_end)
    path = written(tmp_path / "a.jsonl", labels())
    with pytest.raises(TextError, match=r"a\.jsonl, line 1: the row does not end with an end-of-text token"):
        prepare(recipe({"name": "labels"}, {"path": path}, model=settings("t5")))


def test_the_decoder_reads_the_text_shifted() -> None:
    """BART from its start token on, mBART from each row's own last token on."""
    for model_type, first in (("bart", [0, 0]), ("mbart", [6, 9])):
        keys = {"vocab_size": 12, "decoder_start_token_id": 0}
        name = {"bart": "Bart", "mbart": "MBart"}[model_type] + "ForSequenceClassification"
        model = triptych.create(settings(model_type) | keys | {"architectures": [name]})
        tokens, rows = model.module.flat([[5, 7, 6], [8, 9]])
        batch = model.module.labelled_batch(tokens, rows)
        assert batch.inputs is not None
        assert batch.inputs.tolist() == [first[0], 5, 7, first[1], 8]
        assert np.array_equal(batch.source[0], tokens)  # type: ignore[index]
