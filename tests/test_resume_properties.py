"""Random recipes, interrupted by a signal at a random step once or twice, are bit for bit the run that was not."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import cli_models
import triptych
from test_train_tasks import CASES, ENCODER, written
from triptych.text import SEQ2SEQ, byte_tokenizer
from triptych.train import Interrupted, Job, check_recipe, prepare, resume

TEXT = "the old mill stands where the river bends, and its wheel has not turned since the war.\n" * 20
PAIRS = [{"source": f"line {i} " * (1 + i % 3), "target": f"Line {i}. " * (1 + i % 2)} for i in range(24)]
ORDER = ("causal", "adapter", "fused adapter", "seq2seq", "further seq2seq", *CASES)


def tables(name: str, folder: Path, r: random.Random) -> dict[str, Any]:
    """A recipe of `name`, the rest of which is drawn: dropout, accumulation, optimizer, schedule and steps."""
    (folder / "text.txt").write_text(TEXT)
    run = {
        "rows": 6, "length": 32, "steps": r.randint(4, 7), "seed": r.randrange(100), "accumulate": r.choice([1, 2, 3]),
        "precision": "fp32", "sample_every": 0.0, "save_every": r.choice([0.3, 0.5, 1.0]), "evaluate_every": 0.0,
        "recompute": r.random() < 0.5,
    }  # fmt: skip
    made: dict[str, Any] = {
        "data": {"path": str(folder / "text.txt")}, "objective": {"name": "causal"},
        "optimizer": {"name": r.choice(["adamw", "muon"]), "lr": 0.01},
        "schedule": {"shape": r.choice(["cosine", "linear"]), "warmup": r.choice([0.0, 0.4])}, "run": run,
    }  # fmt: skip
    dropout = r.choice([0.0, 0.2])
    if name in CASES:
        objective, rows = CASES[name]
        data = {"path": written(folder / "rows.jsonl", rows()), "held_out": 0.25}
        model = ENCODER["model"] | {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return made | {"objective": objective, "data": data, "tokenizer": ENCODER["tokenizer"], "model": model}
    if name.endswith("seq2seq"):
        data = {"path": written(folder / "pairs.jsonl", PAIRS), "held_out": 0.25}
        made |= {"objective": {"name": "seq2seq"}, "data": data, "tokenizer": "byte"}
        config = {
            "model_type": "bart", "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 37,
            "encoder_attention_heads": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 29, "dropout": dropout,
            "max_position_embeddings": 60, "init_std": 0.1,
        }  # fmt: skip
        if name == "seq2seq":
            return made | {"model": config}
        words = byte_tokenizer(SEQ2SEQ)
        known = {"vocab_size": words.vocab_size, "eos_token_id": words.eos_id, "pad_token_id": words.pad_id}
        triptych.create(config | known | {"decoder_start_token_id": words.pad_id}, words).save(folder / "base")
        return {key: value for key, value in made.items() if key != "tokenizer"} | {
            "model": {"path": str(folder / "base")}
        }
    base = cli_models.checkpoint("decoder")
    if name == "fused adapter":
        plain = triptych.load(base)
        hf = {"model_type": "gpt2", "vocab_size": plain.spec.vocab, "n_embd": 24, "n_layer": 2, "n_head": 3,
              "n_positions": 64, "resid_pdrop": dropout}  # fmt: skip
        triptych.create(hf, plain.tokenizer).save(folder / "gpt2")
        base = folder / "gpt2"
    if name != "causal":
        made |= {"adapter": {"rank": r.randint(1, 4), "alpha": r.choice([2, 5]), "dropout": r.choice([0.0, 0.3]),
                             "targets": r.choice(["all-linear", ["q", "v"]])}}  # fmt: skip
    return made | {"model": {"path": str(base)}}


def interrupted(job: Job, at: int) -> None:
    """Run the job, and send this process SIGTERM after step `at`."""

    def stop(event: Any) -> None:
        if event.step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        job.run(stop)


def differing(whole: Job, resumed: Job) -> list[str]:
    """The parameters, optimizer states and losses of the two runs that are not the same bits."""
    trainers = whole.trainer, resumed.trainer
    ours, theirs = ({**dict(one.module.named_parameters()), **one.optimizer.state()} for one in trainers)
    assert ours.keys() == theirs.keys()
    names = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    steps = zip(whole.trainer.at.history, resumed.trainer.at.history, strict=True)
    return names + [f"loss of step {a.step}" for a, b in steps if (a.step, a.loss, a.lr) != (b.step, b.loss, b.lr)]


def compared(name: str, seed: int, folder: Path) -> list[str]:
    """`differing` of a drawn recipe, interrupted at one or two drawn steps."""
    r = random.Random(f"{name} {seed}")
    made = tables(name, folder, r)
    steps = made["run"]["steps"]
    stops = sorted(r.sample(range(1, steps), r.choice([1, 2])))
    whole = prepare(check_recipe(made))
    whole.run()
    out = str(folder / "run")
    job = prepare(check_recipe(made, values={"run.out": out}))
    for at in stops:
        interrupted(job, at)
        job = resume(out)
        assert job.trainer.at.step == at
    job.run()
    return differing(whole, job)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ORDER)
def test_an_interrupted_run_is_the_run_that_was_not(name: str, seed: int, tmp_path: Path) -> None:
    assert compared(name, seed, tmp_path) == []


@pytest.mark.heavy
@pytest.mark.parametrize("forgotten", ["the optimizer", "the step of the schedule"])
def test_what_a_checkpoint_forgets_is_noticed(forgotten: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""
    if forgotten == "the optimizer":
        monkeypatch.setattr("triptych.train.optimizer.Optimizer.restore", lambda self, state: None)
    else:
        monkeypatch.setattr(
            "triptych.train.data.random_numbers", lambda seed, use, counter: __import__("numpy").random.default_rng()
        )
    assert compared("causal", 0, tmp_path) != []
