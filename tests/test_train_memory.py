"""The memory of a training step: estimated before the data are read and before the first step, refused in one line."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
from cli_models import Captured, checkpoint, refused
from test_count_memory import LLAMA, kept_by_torch
from test_train_adapters import base_of
from test_train_adapters import recipe as adapter_recipe
from triptych import machine
from triptych.checkpoints.header import read_header
from triptych.cli import main
from triptych.count import OF_A_LOGIT, TrainingRow, activation_bytes, block_matrices, count
from triptych.errors import ConfigError, InputError
from triptych.nn.packed_weight import PackedWeight
from triptych.ops import native_training
from triptych.train import causal, check_recipe, check_start, data, model_of_recipe, prepare, resume
from triptych.train.disk_and_memory import check_step_memory, next_step_memory, recipe_memory

TEXT = "the old mill stands where the river bends, and its wheel has not turned since the war\n"
SIZES = {"hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 512}  # fmt: skip
MODEL = SIZES | {"model_type": "llama"}
BERT = SIZES | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 52, "num_layers": 2, "num_heads": 4}


def lines(records: Iterable[object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def tables(directory: Path, objective: str = "causal", **changes: Any) -> dict[str, Any]:
    """A recipe with its data in `directory`."""
    files = {
        "text.txt": TEXT * 30,
        "pairs.jsonl": lines({"source": TEXT[i : i + 30], "target": TEXT[i:50]} for i in range(30)),
        "labels.jsonl": lines({"text": TEXT[i:], "label": str(i % 2)} for i in range(30)),
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    path, model, tokenizer = {
        "causal": ("text.txt", MODEL, "byte"),
        "masked": ("text.txt", BERT, "bpe:300"),
        "seq2seq": ("pairs.jsonl", T5, "byte"),
        "labels": ("labels.jsonl", BERT, "words:40"),
    }[objective]
    every: dict[str, Any] = {
        "tokenizer": tokenizer, "model": model, "data": {"path": str(directory / path)},
        "objective": {"name": objective},
        "run": {"rows": 4, "length": 100, "steps": 2, "precision": "fp32", "save_every": 0, "sample_every": 0},
    }  # fmt: skip
    return every | {name: every.get(name, {}) | values for name, values in changes.items()}


def estimated(recipe: Any) -> Any:
    """What the recipe alone says."""
    header = None if recipe.base is None else read_header(recipe.base.path)
    spec = model_of_recipe.smallest(recipe) if header is None else header.spec
    return recipe_memory(recipe, spec, None, recipe.run.accumulate)


CASES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "accumulated": {"run": {"accumulate": 3}},
    "adamw": {"optimizer": {"name": "adamw"}},
    "recomputed": {"run": {"recompute": True}},
    "encoder": {"objective": "masked"},
    "encoder-decoder": {"objective": "seq2seq"},
    "labels": {"objective": "labels"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_recipe_alone_never_says_more_than_the_rows_do(name: str, tmp_path: Path) -> None:
    changes = dict(CASES[name])
    recipe = check_recipe(tables(tmp_path, changes.pop("objective", "causal"), **changes))
    before, after = estimated(recipe), next_step_memory(prepare(recipe).trainer)
    for part in ("weights", "gradients", "optimizer_state", "activations", "logits"):
        assert 0 < getattr(before, part) <= getattr(after, part) or part == "logits"
    if recipe.objective.name == "causal":  # rows and vocabulary are known
        assert before == after


def test_an_adapter_has_gradients_of_its_own_numbers(tmp_path: Path) -> None:
    base = {"model": {"path": str(checkpoint("decoder"))}, "adapter": {"rank": 2, "alpha": 4}, "run": {"length": 20}}
    changed = tables(tmp_path, **base)
    del changed["tokenizer"]
    changed["model"] = base["model"]
    recipe = check_recipe(changed)
    trainer = prepare(recipe).trainer
    before, after = estimated(recipe), next_step_memory(trainer)
    assert before.gradients == after.gradients == 4 * sum(p.numel() for p in trainer.optimizer.parameters.values())
    assert before.optimizer_state == after.optimizer_state == 2 * after.gradients
    assert before.peak <= after.peak
    part = check_recipe({**changed, "adapter": {"rank": 2, "alpha": 4, "targets": ["q"]}})
    assert next_step_memory(prepare(part).trainer).activations == 0  # nothing is certain of blocks before the first map


def test_packed_weights_take_what_their_blocks_do(tmp_path: Path) -> None:
    run = prepare(adapter_recipe(tmp_path, base_of("gguf", tmp_path)))
    packed = [p for p in run.trainer.module.parameters() if isinstance(p, PackedWeight)]
    dense = sum(p.numel() for p in packed)
    rest = sum(p.nbytes for p in run.trainer.module.parameters() if not isinstance(p, PackedWeight))
    assert dense < next_step_memory(run.trainer).weights - rest < 1.3 * dense  # about a byte a number, in Q8_0


def test_gradients_and_states_count_and_what_fits_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = check_recipe(tables(tmp_path))
    peak = estimated(recipe).peak
    monkeypatch.setattr(machine, "free_memory", lambda: peak)
    check_start(recipe)
    monkeypatch.setattr(machine, "free_memory", lambda: peak - 1)
    with pytest.raises(InputError, match=r"needs .* of memory, and .* are free \(weights .*, gradients .*, optim"):
        check_start(recipe)
    run = prepare(recipe)
    memory = next_step_memory(run.trainer)
    monkeypatch.setattr(machine, "free_memory", lambda: memory.peak - memory.weights)
    check_step_memory(run.trainer)
    monkeypatch.setattr(machine, "free_memory", lambda: memory.peak - memory.weights - 1)
    with pytest.raises(InputError, match="optimizer state"):
        run.run()
    assert run.trainer.at.step == 0


def test_the_number_of_parts_in_the_message_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = check_recipe(tables(tmp_path, run={"rows": 64}))
    whole = estimated(recipe)
    monkeypatch.setattr(machine, "free_memory", lambda: whole.peak // 3)
    with pytest.raises(InputError) as error:
        check_start(recipe)
    setting = str(error.value).partition("--set ")[2].partition(")")[0]
    key, _, parts = setting.partition("=")
    assert key == "run.accumulate"
    check_start(check_recipe(tables(tmp_path, run={"rows": 64}), [setting]))
    with pytest.raises(InputError):
        check_start(check_recipe(tables(tmp_path, run={"rows": 64}), [f"run.accumulate={int(parts) - 1}"]))


def test_a_model_that_is_too_large_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = check_recipe(tables(tmp_path, run={"rows": 1, "length": 2}))
    monkeypatch.setattr(machine, "free_memory", lambda: 2 * estimated(recipe).weights)
    with pytest.raises(InputError, match="take a smaller model"):
        check_start(recipe)


def test_a_run_is_refused_before_its_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    found = tables(tmp_path)
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe no text")
    file, out = tmp_path / "tiny.toml", tmp_path / "run"
    lines = [f"tokenizer = {json.dumps(found.pop('tokenizer'))}"]
    for name, table in found.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    file.write_text("\n".join(lines))
    monkeypatch.setattr(machine, "free_memory", lambda: 10_000_000_000)
    argv = ["train", str(file), "--out", str(out)]
    line = refused([*argv, "--set", "run.rows=1000000"], capsys)
    for words in ("a step of 1,000,000 rows", " GB of memory, and 10.0 GB are free", "--set run.accumulate="):
        assert words in line
    assert not out.exists()
    assert main(argv) == 1  # a run that fits reads them
    assert "write it as UTF-8" in capsys.readouterr().err


def test_rows_of_any_length_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = check_recipe(tables(tmp_path, "seq2seq", run={"out": str(tmp_path / "run")}))
    run = prepare(recipe)
    memory = next_step_memory(run.trainer)
    assert estimated(recipe).peak < memory.peak - memory.weights - 1
    monkeypatch.setattr(machine, "free_memory", lambda: memory.peak - memory.weights - 1)
    check_start(recipe)
    with pytest.raises(InputError, match=r"--set run\.rows=2\), or raise run\.accumulate"):
        run.run()
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = check_recipe(tables(tmp_path, run={"out": str(tmp_path / "run"), "save_every": 0.5}))
    prepare(recipe).run(until=1)
    monkeypatch.setattr(machine, "free_memory", lambda: 1000)
    with pytest.raises(InputError, match=r"of memory, and 0\.0 MB are free"):
        resume(tmp_path / "run")


def test_a_second_run_into_a_directory_is_refused_before_its_data_are_read(tmp_path: Path) -> None:
    recipe = check_recipe(tables(tmp_path, run={"out": str(tmp_path / "run"), "save_every": 1.0}))
    prepare(recipe).run()
    (tmp_path / "text.txt").unlink()
    with pytest.raises(ConfigError, match="already holds a run; continue it with --resume"):
        triptych.train(recipe)
    with pytest.raises(triptych.TriptychError, match=r"text\.txt"):
        triptych.train(recipe, force=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file, and a run needs a directory"):
        triptych.train(recipe, out=tmp_path / "file")
    assert (tmp_path / "run" / "model").exists()


def test_in_bf16_matrices_are_kept_twice_and_activations_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_training, "kernels_for", lambda dtype: None)  # which keep less
    wide = LLAMA | {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 3}
    model, tokens = triptych.create(wide), 512  # of fewer, attention keeps its pattern in fp32
    kept, logits = activation_bytes(model.spec, Counter([TrainingRow(tokens)]), bf16=True)
    counted = kept + logits / OF_A_LOGIT + 2 * block_matrices(model.spec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = 4 * kept_by_torch(model, tokens)
    assert 0.8 * measured < counted <= 1.02 * measured


def test_the_command_and_the_check_have_one_estimate(tmp_path: Path) -> None:
    """`count` prints what a run checks: the same parts of the same spec."""
    recipe = check_recipe(tables(tmp_path, optimizer={"name": "adamw"}))
    run = prepare(recipe)
    assert count(run.trainer.module.spec).training_memory(100, batch=4) == next_step_memory(run.trainer)


def test_more_parts_than_rows_are_one_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, edges = [causal([1, 2, 3]) for _ in range(3)], list[int]()
    monkeypatch.setattr(data, "pairwise", lambda some: edges.append(len(some)) or itertools.pairwise(some))
    assert [len(part) for part in data.micro_batches(rows, 10_000)] == [1, 1, 1]
    assert edges == [4]  # and not one for each part: a billion of them would take minutes
    assert [len(part) for part in data.micro_batches(rows, 2)] == [2, 1]
