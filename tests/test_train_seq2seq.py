"""Encoder-decoders: BLEU and chrF of a seq2seq run, and labels of texts by BART, mBART and T5.

sacrebleu is an extra; where it is missing, a module that counts equal texts stands for it.  Of labels the decoder reads
the text too and has the label at its end.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import references
import triptych
from test_train_losses import gradients
from test_train_tasks import labels, recipe, written
from triptych.cli.training_progress import held_out
from triptych.errors import ConfigError, InputError, TextError
from triptych.generate import Generation, generate
from triptych.text import Encoded
from triptych.train import Job, check_recipe, collate, evaluate, loss, prepare
from triptych.train.data import with_hidden_words
from triptych.train.labelled import ClassLoss, labelled
from triptych.train.task import trained_at
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
    held = run.trainer.held_out
    assert held is not None
    score = evaluate(run.trainer.module, held)
    assert score.baselines["copying the source"] == 100.0
    assert score.metrics["BLEU"] < 100.0  # nothing is trained
    monkeypatch.setattr("triptych.train.text_tasks.translated", lambda module, tokenizer, sources, length: sources)
    assert evaluate(run.trainer.module, held).metrics["BLEU"] == 100.0


def test_a_quick_evaluation_translates_nothing(tmp_path: Path, compared: list[Any]) -> None:
    run = job(tmp_path, changes=("run.rows=1", "data.held_out=0.5"))
    held = run.trainer.held_out
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
    monkeypatch.setattr("triptych.train.task.generate", kept)
    assert translated(run.trainer.module.eval(), run.tokenizer, ["ash bay", "bay ash"], 6) == ["", ""]
    assert [one.reason for one in generations] == ["end", "end"]


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

    whole = task.ObjectiveTask.fitted

    def without_end(self: Any, *given: Any) -> Encoded | None:
        row = whole(self, *given)
        return row and Encoded(row.ids[:-1], row.token_types[:-1], row.offsets[:-1], row.sequence_ids[:-1])

    monkeypatch.setattr(task.ObjectiveTask, "fitted", without_end)
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
        assert batch.inputs.tolist() == [first[0], 5, 7, first[1], 8]
        assert np.array_equal(batch.source[0], tokens)  # type: ignore[index]
