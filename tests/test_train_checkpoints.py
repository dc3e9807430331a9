"""Training checkpoints: resuming is exact, a damaged checkpoint is skipped, other tools can load them."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych import nn
from triptych.attention import Rows
from triptych.errors import CheckpointError, ConfigError, TriptychError
from triptych.train import Checkpoints, Job, Optimizer, Recipe, check_recipe, prepare, resume, verify_resume
from triptych.train.checkpoints import read_model, read_progress, why_invalid

TEXT = "It was the best of times, it was the worst of times,\nit was the age of wisdom; " * 12
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
         "max_position_embeddings": 32}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "causal": SIZES | {"model_type": "llama", "num_key_value_heads": 1},
    "masked": SIZES | {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "seq2seq": {"model_type": "t5", "d_model": 24, "d_ff": 40, "d_kv": 8, "num_heads": 3, "num_layers": 2},
}
TOKENIZERS = {"causal": "characters", "masked": "words:60", "seq2seq": "byte"}


def recipe(folder: Path, objective: str = "causal", steps: int = 20, out: Path | None = None, **run: Any) -> Recipe:
    path = folder / ("pairs.jsonl" if objective == "seq2seq" else "text.txt")
    if objective == "seq2seq":
        rows = [{"source": f"loue {i}", "target": f"love {i}"} for i in range(40)]
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        path.write_text(TEXT)
    tables = {
        "model": MODELS[objective],
        "tokenizer": TOKENIZERS[objective],
        "data": {"path": str(path), "held_out": 0.2},
        "objective": {"name": objective},
        "run": {"rows": 3, "length": 16, "steps": steps, "out": out and str(out), "save_every": 0.5, **run},
    }
    return check_recipe(tables)


def weights(job: Job) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in job.trainer.module.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("objective", ["causal", "masked", "seq2seq"])
def test_ten_steps_and_ten_more_are_twenty(tmp_path: Path, objective: str) -> None:
    whole = prepare(recipe(tmp_path, objective))
    whole.run()
    half = prepare(recipe(tmp_path, objective, out=tmp_path / "run"))
    half.run(until=10)
    again = resume(tmp_path / "run")
    assert again.trainer.at.step == 10
    assert [record.step for record in again.trainer.at.history] == list(range(1, 11))
    assert not same(weights(again), weights(whole))
    again.run()
    assert again.trainer.at.step == 20
    assert same(weights(again), weights(whole))


def test_adamw_resumes_exactly_too(tmp_path: Path) -> None:
    with_adam = recipe(tmp_path).model_copy(update={"optimizer": Recipe.model_fields["optimizer"].default})
    with_adam = check_recipe(with_adam.model_dump(), ["optimizer.name=adamw", "run.save_every=0.3"])
    verify_resume(with_adam, 6)


def test_verify_resume_goes_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "restore", lambda self, state: None)
    with pytest.raises(TriptychError, match=r"cannot resume: .* differs from the run that was not interrupted"):
        verify_resume(recipe(tmp_path), 4)


def test_the_first_checkpoint_is_there_before_the_first_step(tmp_path: Path) -> None:
    job = prepare(recipe(tmp_path, out=tmp_path / "run"))
    fresh = weights(job)
    job.run(until=0)
    again = resume(tmp_path / "run")
    assert again.trainer.at.step == 0
    assert same(weights(again), fresh)
    again.run(until=1)  # the directory may hold a run, if it is this one
    assert again.trainer.at.step == 1


def test_two_are_kept(tmp_path: Path) -> None:
    prepare(recipe(tmp_path, out=tmp_path / "run", save_every=0.2)).run()
    assert sorted(path.name for path in (tmp_path / "run").glob("*step-*")) == ["step-00000016", "step-00000020"]


def test_a_second_run_into_the_same_place_is_refused(tmp_path: Path) -> None:
    prepare(recipe(tmp_path, out=tmp_path / "run")).run(until=0)
    with pytest.raises(ConfigError, match="already holds a run"):
        prepare(recipe(tmp_path, out=tmp_path / "run")).run()


def test_a_resumed_run_may_be_changed(tmp_path: Path) -> None:
    prepare(recipe(tmp_path, out=tmp_path / "run")).run()
    job = resume(tmp_path / "run", ["run.steps=22"])
    job.run()
    assert job.trainer.at.step == 22


def test_a_checkpoint_is_what_others_load(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    job = prepare(recipe(tmp_path, out=tmp_path / "run"))
    job.run()
    path = Checkpoints(tmp_path / "run").newest().path
    other = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer("the age of wisdom")["input_ids"]
    assert ids == job.tokenizer.encode("the age of wisdom")
    module, _, _ = read_model(path)
    with torch.no_grad():
        ours = module.logits(nn.Batch(inputs=torch.tensor(ids), rows=Rows((len(ids),)))).log_softmax(-1)
        theirs = other(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert (ours - theirs).abs().max() < 1e-4


def test_fine_tuning_begins_with_what_is_there(tmp_path: Path) -> None:
    prepare(recipe(tmp_path, out=tmp_path / "run")).run()
    path = Checkpoints(tmp_path / "run").newest().path
    tables = recipe(tmp_path).model_dump() | {"model": {"path": str(path)}, "tokenizer": None}
    job = prepare(check_recipe(tables))
    assert job.trainer.at.step == 0
    assert same(weights(job), dict(read_model(path)[0].named_parameters()))
    with pytest.raises(ConfigError, match=r"model\.hidden_size does not go with model\.path"):
        prepare(check_recipe(tables | {"model": {"path": str(path), "hidden_size": 3}}))


# ---------------------------------------------------------------- broken checkpoints


WEIGHTS, MANIFEST = "model.safetensors", "train_state/manifest.json"
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {  # the file, None to remove it, the reason
    "truncated": (WEIGHTS, lambda raw: raw[:-9], "model.safetensors has"),
    "flipped": (
        WEIGHTS, lambda raw: raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:], "the bytes of model.safetensors have changed"
    ),
    "missing": ("train_state/optimizer.safetensors", None, "optimizer.safetensors' is missing"),
    "no manifest": (MANIFEST, None, "manifest.json"),
    "not a manifest": (MANIFEST, lambda raw: b'{"files": 3}', "is not a manifest"),
    "empty manifest": (MANIFEST, lambda raw: b'{"files": {}}', "manifest.json does not list config.json"),
}  # fmt: skip


def damage(path: Path, kind: str) -> None:
    name, change, _ = DAMAGES[kind]
    if change is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(change((path / name).read_bytes()))


@pytest.mark.parametrize("kind", DAMAGES)
def test_resume_skips_a_damaged_checkpoint_and_gives_the_reason(tmp_path: Path, kind: str) -> None:
    prepare(recipe(tmp_path, steps=4, out=tmp_path / "run")).run()
    damage(tmp_path / "run/step-00000004", kind)
    job = resume(tmp_path / "run")
    assert job.trainer.at.step == 2
    assert len(job.skipped) == 1
    assert DAMAGES[kind][2] in job.skipped[0]
    job.run()
    assert Checkpoints(tmp_path / "run").newest().step == 4  # the damaged one was replaced
    damage(tmp_path / "run/step-00000004", kind)
    damage(tmp_path / "run/step-00000002", kind)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        resume(tmp_path / "run")


# ---------------------------------------------------------------- killed while writing


class Killed(BaseException):
    """Stands for the end of the process; a BaseException, so that no `except Exception` handles it."""


WRITES = ("rename", "replace", "fsync", "mkdir", "link", "unlink", "rmdir")


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], dict[str, int]]]:
    """`kill_at(k)`: only the next k changes to the disk happen."""
    state = {"left": 1 << 30, "done": 0}

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if state["left"] <= 0:
                raise Killed
            state["left"] -= 1
            state["done"] += 1
            return real(*args, **options)

        return call

    for name in WRITES:
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    monkeypatch.setattr("triptych.checkpoints.save._swap", lambda a, b: False)

    def arm(left: int) -> dict[str, int]:
        state.update(left=left, done=0)
        return state

    yield arm
    arm(1 << 30)


def test_killed_at_any_moment_of_saving_a_valid_checkpoint_is_left(
    tmp_path: Path, kill_at: Callable[[int], dict[str, int]]
) -> None:
    job = prepare(recipe(tmp_path, steps=4, out=tmp_path / "base"))
    job.run(until=2)  # steps 0 and 2 are saved, so that saving step 4 has something to delete
    job.trainer.on_save = lambda trainer: None
    job.trainer.run()

    def save(out: Path) -> None:
        Checkpoints(out).save(job.trainer, job.hf, job.tokenizer, job.recipe.model_dump())

    shutil.copytree(tmp_path / "base", tmp_path / "count")
    state = kill_at(1 << 30)
    save(tmp_path / "count")
    total, outcomes = state["done"], set()
    assert total > 20
    for k in range(total):
        out = tmp_path / f"run{k}"
        kill_at(1 << 30)
        shutil.copytree(tmp_path / "base", out)
        kill_at(k)
        with pytest.raises(Killed):
            save(out)
        kill_at(1 << 30)
        newest = Checkpoints(out).newest()
        outcomes.add(newest.step)
        assert why_invalid(newest.path) is None
        assert read_progress(newest.path)[0].step == newest.step
        save(out)
        assert Checkpoints(out).newest().step == 4
        assert sorted(path.name for path in out.glob("*step-*")) == ["step-00000002", "step-00000004"]
        shutil.rmtree(out)
    assert outcomes == {2, 4}


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(recipe(tmp_path, out=tmp_path / "run"))
    job.run(until=10)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        job.trainer.run()
    assert Checkpoints(tmp_path / "run").newest().step == 10


@pytest.mark.heavy
def test_a_run_survives_fifty_kills(tmp_path: Path) -> None:
    """A process is killed with SIGKILL at random moments, mostly while it saves; each time the run can be resumed."""
    out, random_time = tmp_path / "run", random.Random(0)
    prepare(recipe(tmp_path, steps=100_000, out=out, save_every=1e-5)).run(until=0)
    reached = 0
    for _ in range(50):
        child = os.fork()
        if child == 0:
            try:
                resume(out).run()
            finally:
                os._exit(1)
        while max(path.name for path in out.glob("step-*")) <= f"step-{reached:08}":
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the resumed run ended by itself"
            time.sleep(0.005)
        time.sleep(random_time.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        newest = Checkpoints(out).newest().step
        assert newest > reached
        reached = newest
