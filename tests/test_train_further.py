"""Training an existing model further: where it may come from, what a recipe then means, and what a run leaves."""

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_models import LLAMA, Captured, checkpoint
from test_train_checkpoints import weights
from triptych.checkpoints import header
from triptych.checkpoints.convert import convert
from triptych.cli import main
from triptych.count.training import size
from triptych.errors import CheckpointError, ConfigError, InputError, TextError
from triptych.model import create, load
from triptych.text import DECODER, byte_tokenizer
from triptych.train import check_recipe, prepare, read_recipe, resume, write_new_recipe
from triptych.train.disk_and_memory import DiskSpace
from triptych.train.new_recipe import in_markdown, toml
from triptych.train.recipe import sections

RUN = {"rows": 2, "length": 12, "steps": 3, "evaluate_every": 0.0, "sample_every": 0.0}


def recipe(text: Path, path: Path | str, out: Path | None = None, **model: Any) -> Any:
    tables = {"model": {"path": str(path), **model}, "data": {"path": str(text)}, "objective": {"name": "causal"}}
    return check_recipe({**tables, "run": RUN}, values={"run.out": out and str(out)})


def packed_file(folder: Path) -> Path:
    """A tiny decoder whose rows are whole blocks, as a GGUF file of Q8_0."""
    tokenizer = byte_tokenizer(DECODER)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
    create(LLAMA | sizes | {"vocab_size": tokenizer.vocab_size}, tokenizer).save(folder / "plain")
    convert(folder / "plain", folder / "packed.gguf", dtype="q8_0")
    return folder / "packed.gguf"


# ---------------------------------------------------------------- where the model comes from


def test_a_directory_a_run_a_gguf_file_and_a_hub_name_train_alike(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, gguf = checkpoint("decoder"), tmp_path / "model.gguf"
    convert(directory, gguf)
    run = tmp_path / "run"
    shutil.copytree(directory, run / "model")
    trained = []
    found = header.local_path
    monkeypatch.setattr(
        header, "local_path", lambda path, *options: directory if path == "hub:o/n" else found(path, *options)
    )
    for path in (directory, run, gguf, "hub:o/n"):
        job = prepare(recipe(text, path))
        first = weights(job)
        job.run()
        assert not any(torch.equal(first[name], value) for name, value in weights(job).items() if value.ndim > 1)
        trained.append(weights(job))
    for other in trained[1:]:
        assert all(torch.equal(trained[0][name], value) for name, value in other.items())


def test_packed_weights_are_unpacked_only_on_demand(text: Path, tmp_path: Path) -> None:
    gguf = packed_file(tmp_path)
    packed = load(gguf, dequantize=True)
    with pytest.raises(ConfigError, match=r"packed weights.*model\.dequantize = true .*adapter") as error:
        prepare(recipe(text, gguf))
    assert "\n" not in str(error.value)
    job = prepare(recipe(text, gguf, tmp_path / "run", dequantize=True))
    for name, value in packed.module.named_parameters():
        assert torch.equal(weights(job)[name], value), name
    job.run()
    assert load(tmp_path / "run").module.dtype == torch.float32
    again = resume(tmp_path / "run", ["run.steps=4"])
    again.run()
    assert again.trainer.at.step == 4


def test_how_texts_end_travels_with_the_model(text: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(checkpoint("decoder"), base)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    prepare(recipe(text, base, tmp_path / "run")).run()
    resume(tmp_path / "run", ["run.steps=4"]).run()
    assert set(load(tmp_path / "run").end_ids) >= {3, 5}
    assert not {3, 5} <= set(load(checkpoint("decoder")).end_ids)  # the control


@pytest.mark.parametrize(
    ("layout", "objective", "message"),
    [
        ("encoder", "causal", "needs the layout decoder; .* is of layout encoder, whose objective is masked"),
        ("decoder", "seq2seq", "is of layout decoder, whose objective is causal"),
    ],
)
def test_an_objective_of_another_layout(layout: str, objective: str, message: str, text: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"source": "loue", "target": "love"}\n' * 9)
    data = pairs if objective == "seq2seq" else text
    given = recipe(data, checkpoint(layout))
    changed = given.model_copy(update={"objective": given.objective.model_copy(update={"name": objective})})
    with pytest.raises(ConfigError, match=message):
        prepare(changed)


def test_a_model_that_is_missing_or_has_no_tokenizer(text: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        prepare(recipe(text, tmp_path / "none"))
    base = tmp_path / "base"
    shutil.copytree(checkpoint("decoder"), base)
    for file in base.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(TextError, match="has no tokenizer"):
        prepare(recipe(text, base))


def test_defaults_are_those_of_fine_tuning() -> None:
    tables = {"model": {"path": "x"}, "data": {"path": "x"}, "objective": {"name": "causal"}, "run": RUN}
    further = check_recipe(tables)
    assert (further.optimizer.name, further.optimizer.lr, further.schedule.warmup) == ("adamw", 5e-5, 0.1)
    assert check_recipe({**tables, "optimizer": {"lr": 1e-4}}).optimizer.lr == 1e-4
    new = check_recipe({**tables, "model": {"model_type": "llama"}, "tokenizer": "byte"})
    assert (new.optimizer.name, new.optimizer.lr) == ("muon", 3e-3)
    # A recipe for a new model that is put on an existing one keeps neither its tokenizer nor its learning rate ...
    decoder = read_recipe("decoder", base="x.gguf")
    assert (decoder.model, decoder.tokenizer, decoder.optimizer.lr) == ({"path": "x.gguf"}, None, 5e-5)
    # ... unlike one for an existing model.
    kept = check_recipe({**tables, "optimizer": {"lr": 1e-4}}, base="y")
    assert (kept.model["path"], kept.optimizer.lr) == ("y", 1e-4)


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ("optimizer.learning_rate=1", "optimizer.lr"),
        ("seconds=3", "run.seconds"),
        ("run.lr=3", "optimizer.lr"),
        ("learning_rate=1", "optimizer.lr"),
        ("run.batch_size=3", "run.rows"),
        ("length=3", "run.length"),
        ("name=adamw", "objective.name or optimizer.name"),
    ],
)
def test_a_key_of_another_table_or_library_is_answered(change: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"is not a key of a recipe \(did you mean '{re.escape(right)}'\?\)"):
        read_recipe("decoder", [change])


# ---------------------------------------------------------------- what a run leaves


def test_a_run_holds_its_newest_model(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = prepare(recipe(text, checkpoint("decoder"), out))
    job.run(until=1)
    assert job.model == out / "model"
    before = load(out / "model").module
    job = resume(out)
    job.run()
    after = load(out / "model")
    assert sorted(path.name for path in (out / "model").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert after.generate(["the old"], max_new_tokens=3)[0].ids
    for name, value in weights(job).items():
        assert torch.equal(after.module.get_parameter(name), value)
        assert value.ndim < 2 or not torch.equal(before.get_parameter(name), value)
    one, two = (out / place / "model.safetensors" for place in ("model", "step-00000003"))
    assert one.stat().st_ino == two.stat().st_ino  # no second copy on the disk
    assert not [path for path in out.iterdir() if path.name.startswith(".model")]


def test_a_folder_model_of_something_else_is_kept(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "model").mkdir(parents=True)
    (out / "model/mine").write_text("mine")
    with pytest.raises(ConfigError, match="was written by no run, and this run would replace it"):
        prepare(recipe(text, checkpoint("decoder"), out)).run(force=True)
    assert (out / "model/mine").read_text() == "mine"


def test_the_size_of_checkpoints_is_said_and_right(text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "run"
    job = prepare(recipe(text, checkpoint("decoder"), out))
    space = DiskSpace.of(job.trainer, out, 2, 0)
    job.run(on_note=said.append)
    (line,) = [line for line in said if line.startswith("checkpoints in")]
    assert size(space.checkpoint_bytes) in line
    tensors = ("model.safetensors", "train_state/optimizer.safetensors")
    written = sum((out / "step-00000003" / name).stat().st_size for name in tensors)
    assert space.checkpoint_bytes == pytest.approx(written, rel=0.2)  # headers of a tiny model
    assert space.count == 3  # of the three steps


def test_a_disk_that_is_too_full_is_refused_before_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    job = prepare(recipe(text, checkpoint("decoder"), out))
    most = DiskSpace.of(job.trainer, out, 2, 0).most
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=most - 1))
    with pytest.raises(CheckpointError, match=r"in all; .* free: too little; free some") as error:
        job.run()
    assert "\n" not in str(error.value)
    assert not list(out.glob("step-*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=most))
    job.run()


# ---------------------------------------------------------------- a written recipe


def test_every_key_has_a_meaning() -> None:
    missing = [name for name, kind in sections().items() if not all(f.description for f in kind.model_fields.values())]
    assert not missing, "describe each key by a text under it"


@pytest.mark.parametrize("value", [True, 3, 2.5e-5, 'a "b" \\ \n é \x7f', [1, 2.5], {"a b": {"c": [True]}}])
def test_values_survive_toml(value: Any) -> None:
    assert tomllib.loads(f"x = {toml(value)}")["x"] == value


def test_a_new_recipe_is_the_one_it_was_written_from(tmp_path: Path) -> None:
    for name in ("decoder", "encoder", "encoder-decoder"):
        path = tmp_path / f"{name}.toml"
        write_new_recipe(path, name)
        expected = read_recipe(name, values={"run.out": f"runs/{name}"})
        assert read_recipe(path) == expected
        assert len(path.read_text("utf-8").splitlines()) < 45


def test_a_recipe_for_an_existing_model_runs_as_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    packed_file(tmp_path)
    argv = ["train", "--new", "my.toml", "--from", "packed.gguf", "--data", str(text), "--set", "run.steps=2"]
    assert main([*argv, "--set", "run.rows=2"]) == 0
    assert capsys.readouterr().out == "wrote my.toml, objective causal; train with: triptych train my.toml\n"
    written = read_recipe("my.toml")
    assert (written.base.dequantize, written.run.out) == (True, "runs/my")
    context = load("packed.gguf").spec.context
    assert written.run.length <= context
    assert main(["train", "my.toml", "--set", "run.length=8"]) == 0
    assert "the model is runs/my/model" in capsys.readouterr().err
    assert main(["generate", "runs/my", "the old", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    before = Path("my.toml").read_bytes()
    assert main(argv) == 1
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert Path("my.toml").read_bytes() == before


def test_a_new_recipe_of_an_adapter_leaves_the_weights_packed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    packed_file(tmp_path)
    argv = ["train", "--new", "my.toml", "--from", "packed.gguf", "--data", str(text), "--adapter"]
    assert main([*argv, "--set", "run.steps=2", "--set", "run.rows=2", "--set", "run.length=8"]) == 0
    written = read_recipe("my.toml")
    assert (written.base.dequantize, written.adapter.rank, written.adapter.targets) == (False, 8, "all-linear")
    assert main(["train", "my.toml"]) == 0
    assert main(["generate", "runs/my", "the old", "--max-new-tokens", "2"]) == 0
    assert main(["convert", "packed.gguf", "merged.gguf", "--adapter", "runs/my"]) == 0
    assert load("merged.gguf").adapter is None
    capsys.readouterr()
    for asked in ([], ["--quantize", "file"]):  # the bytes are printed where packing was asked for
        assert main(["generate", "packed.gguf", "the old", "--max-new-tokens", "1", *asked]) == 0
        assert ("matrices are packed" in capsys.readouterr().err) == bool(asked)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["train", "--new", "x.toml", "--adapter"], 2, "--new FILE --from MODEL --adapter"),
        (["train", "x.toml", "--adapter"], 2, "in a recipe it is the table [adapter]"),
        (["train", "x.toml", "--objective", "labels"], 2, "in a recipe it is objective.name"),
        (["train", "--new", "x.toml", "--objective", "labels"], 2, "--new FILE --from MODEL --objective"),
        (["train", "--new", "x.toml", "--from", "x", "--objective", "label"], 2, "(did you mean 'labels'?)"),
        (["train"], 2, "a run needs a RECIPE; --new my.toml writes one"),
        (["train", "--new", "x.json"], 1, "a recipe is a .toml file"),
        (["train", "--new", "x.toml", "--from", "nowhere"], 1, "nowhere: no such file or directory"),
        (["train", "--new", "x.toml", "--resume"], 2, "--new writes a recipe and stops"),
        (["train", "--new", "x.toml", "--set", "run.rows=-1"], 1, "input should be greater than 0"),
        (["train", "decoder", "--resume", "--from", "x"], 2, "leave out --from and --data"),
    ],
)
def test_a_recipe_that_cannot_be_written(
    argv: list[str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(argv) == code
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(checkpoint("encoder"), base)
    model = load(base)
    if model.spec.head is not None:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    with pytest.raises((InputError, CheckpointError)):
        write_new_recipe(tmp_path / "x.toml", base=str(base))
    with pytest.raises(InputError, match="of an adapter is for an existing model alone"):
        write_new_recipe(tmp_path / "x.toml", "decoder", adapter=True)
    assert not (tmp_path / "x.toml").exists()


def test_the_page_lists_every_key() -> None:
    page = (Path(__file__).parents[1] / "docs/concepts/recipes.md").read_text("utf-8")
    assert in_markdown() in page, "run tools/recipes.py"
    assert all(f"`{key}`" in page for kind in sections().values() for key in kind.model_fields)
