"""Training an adapter from a recipe: what is trained and stored, exact resumption, and the commands that open it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cli_models
import triptych
from cli_models import Captured
from test_cli_train import said
from triptych.checkpoints.convert import convert
from triptych.errors import CheckpointError, ConfigError, InputError
from triptych.native import library
from triptych.nn.packed_weight import PackedWeight, dense
from triptych.train import check_recipe, prepare, resume, verify_resume

TEXT = "the old mill stands where the river bends, and its wheel has not turned since the war.\n" * 30


def recipe(directory: Path, base: Path | str, **changes: Any) -> Any:
    """A recipe of four steps with its text in `directory`."""
    (directory / "text.txt").write_text(TEXT)
    tables: dict[str, Any] = {
        "model": {"path": str(base)},
        "data": {"path": str(directory / "text.txt")},
        "objective": {"name": "causal"},
        "adapter": {"rank": 2, "alpha": 4},
        "optimizer": {"lr": 0.01},
        "run": {"rows": 2, "length": 24, "steps": 4, "seed": 1, "save_every": 0.5, "sample_every": 0.0,
                "out": str(directory / "run")},
    }  # fmt: skip
    for name, values in changes.items():
        tables[name] = tables.get(name, {}) | values
    return check_recipe(tables)


def gguf(directory: Path) -> Path:
    """The decoder of `cli_models` with rows of whole blocks, in Q8_0."""
    plain = triptych.load(cli_models.checkpoint("decoder"))
    wide = plain.hf | {"hidden_size": 32, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 2,
                       "num_key_value_heads": 1}  # fmt: skip
    triptych.create(wide, plain.tokenizer).save(directory / "wide")
    convert(directory / "wide", directory / "base.gguf", dtype="q8_0")
    return directory / "base.gguf"


def base_of(kind: str, directory: Path) -> Path:
    if kind == "directory":
        return cli_models.checkpoint("decoder")
    if library() is None:
        pytest.skip("the native kernels were not built")
    return gguf(directory)


@pytest.mark.parametrize("kind", ["directory", pytest.param("gguf", marks=pytest.mark.heavy)])
def test_only_the_adapter_is_trained_and_stored(kind: str, tmp_path: Path) -> None:
    base = base_of(kind, tmp_path)
    job = prepare(recipe(tmp_path, base, run={"steps": 12}))
    module = job.trainer.module
    packed = [n for n, p in module.named_parameters() if isinstance(p, PackedWeight)]
    assert bool(packed) == (kind == "gguf")
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    assert len({n.rpartition(".")[2] for n in job.trainer.optimizer.parameters} - {"down", "up"}) == 0
    losses: list[float] = []
    job.run(lambda event: losses.append(event.loss))
    changed = {n for n, p in module.named_parameters() if not torch.equal(dense(p), dense(before[n]))}
    assert changed == set(job.trainer.optimizer.parameters)
    assert sum(losses[-3:]) < sum(losses[:3])
    out = tmp_path / "run"
    steps = sorted(out.glob("step-*"))
    assert {file.name for file in steps[-1].iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "train_state"
    }  # fmt: skip
    for directory in (out / "model", steps[-1]):
        config = json.loads((directory / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(base)
        stored = load_file(directory / "adapter_model.safetensors")
        assert sum(one.numel() for one in stored.values()) == module.lora_adapter.parameters
    assert sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) < 2e6
    opened = triptych.load(out)  # base and adapter
    ids = [[5, 6, 7, 8, 9]]
    trained = triptych.Model(module, job.tokenizer, job.hf)
    assert torch.equal(opened.logits(ids)[0], trained.logits(ids)[0])
    assert not torch.equal(opened.logits(ids)[0], triptych.load(base).logits(ids)[0])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("directory", {"dropout": 0.3}),
        ("directory", {"targets": ["q", "v", "down"]}),
        ("gguf", {"dropout": 0.2}),
        ("gguf", {"rank": 2}),
    ],
)
def test_resuming_gives_the_same_bits(kind: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    verify_resume(recipe(tmp_path, base_of(kind, tmp_path), adapter=adapter), 4)


@pytest.mark.heavy
@pytest.mark.parametrize("targets", [["c_attn"], ["q", "k", "v"], ["q"], "all-linear"])
def test_resuming_gives_the_same_bits_with_fused_matrices(targets: Any, tmp_path: Path) -> None:
    decoder = triptych.load(cli_models.checkpoint("decoder"))
    hf = {"model_type": "gpt2", "vocab_size": decoder.spec.vocab, "n_embd": 24, "n_layer": 2, "n_head": 3,
          "n_positions": 64, "resid_pdrop": 0.1}  # fmt: skip
    triptych.create(hf, decoder.tokenizer).save(tmp_path / "gpt2")
    verify_resume(recipe(tmp_path, tmp_path / "gpt2", adapter={"targets": targets}), 4)


@pytest.mark.heavy
def test_a_resumed_run_that_forgets_its_optimizer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the tests above."""
    monkeypatch.setattr("triptych.train.optimizer.Optimizer.restore", lambda self, state: None)
    with pytest.raises(triptych.TriptychError, match=r"cannot resume: .*(down|up) differs"):
        verify_resume(recipe(tmp_path, cli_models.checkpoint("decoder")), 4)


def test_a_base_that_has_moved_or_changed_is_one_line(tmp_path: Path) -> None:
    base = tmp_path / "base"
    triptych.load(cli_models.checkpoint("decoder")).save(base)
    prepare(recipe(tmp_path, base)).run(until=2)
    model = triptych.load(base)
    model.module.get_parameter("decoder.blocks.0.mlp.up.weight").detach().mul_(1.5)
    model.save(base)
    with pytest.raises(CheckpointError, match=r"its base .* has changed since") as caught:
        resume(tmp_path / "run")
    assert "\n" not in str(caught.value)
    base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"its base .* is not there; give it"):
        resume(tmp_path / "run")
    with pytest.raises(CheckpointError, match="is not there"):
        triptych.load(tmp_path / "run")


def test_recipes_that_cannot_train_an_adapter(tmp_path: Path) -> None:
    base = cli_models.checkpoint("decoder")
    with pytest.raises(ConfigError, match=r"adapter\.rank = 0: input should be greater than 0"):
        recipe(tmp_path, base, adapter={"rank": 0})
    with pytest.raises(ConfigError, match=r"adapter\.ranks is not a key of a recipe \(did you mean 'rank'\?\)"):
        recipe(tmp_path, base, adapter={"ranks": 4})
    with pytest.raises(ConfigError, match=r"adapter\.alpha = nan"):
        recipe(tmp_path, base, adapter={"alpha": float("nan")})
    tables = recipe(tmp_path, base).model_dump() | {"model": {"model_type": "llama"}, "tokenizer": "byte"}
    with pytest.raises(ConfigError, match=r"adapter needs the model that it is for; give model\.path"):
        check_recipe(tables)
    with pytest.raises(InputError, match="'qq' names no linear map"):
        prepare(recipe(tmp_path, base, adapter={"targets": ["qq"]}))


@pytest.mark.heavy
def test_the_commands_train_an_adapter_generate_with_it_and_merge_it(tmp_path: Path, capsys: Captured) -> None:
    base, out = cli_models.checkpoint("decoder"), tmp_path / "run"
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "my.toml").write_text(
        f'model = {{path = "{base}"}}\ndata = {{path = "{tmp_path}/text.txt"}}\nobjective = {{name = "causal"}}\n'
        '[adapter]\nrank = 2\nalpha = 8\ntargets = ["q", "v"]\n'
        "[optimizer]\nlr = 0.05\n[run]\nrows = 2\nlength = 24\nsteps = 3\n"
    )
    said(["train", str(tmp_path / "my.toml"), "--out", str(out)], capsys)
    options = ["the", "--max-new-tokens", "12"]
    by_run = said(["generate", str(out), *options], capsys)[0]
    assert by_run == said(["generate", str(base), "--adapter", str(out), *options], capsys)[0]
    assert by_run == said(["generate", str(base), "--adapter", str(out / "model"), *options], capsys)[0]
    said(["convert", str(base), str(tmp_path / "merged"), "--adapter", str(out)], capsys)
    assert by_run == said(["generate", str(tmp_path / "merged"), *options], capsys)[0]
    assert by_run != said(["generate", str(base), *options], capsys)[0]
    told = said(["check", str(base), "--adapter", str(out), "--against", "none"], capsys)[0]
    assert "passed" in told
    error = said(["bench", str(base), "--adapter", str(out)], capsys, code=2)[1]
    assert "bench measures whole models" in error
    error = said(["generate", str(base), "--adapter", str(tmp_path / "nothing"), *options], capsys, code=1)[1]
    assert "holds no adapter_config.json" in error


def test_the_page_shows_the_recipe_of_the_examples() -> None:
    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "concepts" / "adapters.md").read_text(encoding="utf-8")
    shown = page.partition('```toml title="docs/examples/adapter.toml"\n')[2].partition("```")[0]
    assert shown.strip()
    assert shown in (docs / "examples" / "adapter.toml").read_text(encoding="utf-8")


def test_the_size_of_checkpoints_is_that_of_the_adapter(tmp_path: Path) -> None:
    job = prepare(recipe(tmp_path, cli_models.checkpoint("decoder")))
    adapter = job.trainer.module.lora_adapter
    assert job.trainer.optimizer.weight_bytes == 4 * adapter.parameters
    whole = prepare(recipe(tmp_path, cli_models.checkpoint("decoder")).model_copy(update={"adapter": None}))
    assert whole.trainer.optimizer.weight_bytes == sum(p.nbytes for p in whole.trainer.module.parameters())


def test_a_head_beside_an_adapter_is_refused(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"the mill {i}", "label": str(i % 2)}) for i in range(40)]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    changes = {"data": {"path": str(tmp_path / "labels.jsonl")}, "objective": {"name": "labels"}}
    with pytest.raises(ConfigError, match="labels trains a head, which the file of an adapter does not hold") as caught:
        prepare(recipe(tmp_path, cli_models.checkpoint("encoder"), **changes))
    assert "\n" not in str(caught.value)
