"""A small encoder trained from nothing on records of Shakespeare's plays, for the labs of names and of questions."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triptych.train import Job, check_recipe, prepare
from triptych.train.data import EpochRows
from triptych.train.labelled import LabelledExample
from triptych.train.task import computed, each_row
from .small_models import Points

Records = Iterable[Mapping[str, object]]
READER = {
    "model_type": "modernbert", "global_attn_every_n_layers": 1, "max_position_embeddings": 512,
}  # fmt: skip


class TrainedEncoder(NamedTuple):
    """A trained encoder's job, its losses, and the held-out rows with what its head gave for each."""

    job: Job
    losses: Points
    rows: list[tuple[LabelledExample, Tensor]]


def trained(
    train: Records, held_out: Records, objective: str, sizes: Mapping[str, Any], seed: int, length: int, easy: int = 0
) -> TrainedEncoder:
    """Train an encoder of these `sizes` (width, layers, heads or 4, base or 100, tokens, steps, rows) on records from
    nothing: on the first `easy` of them, then on as many that follow, each read once, and on the others after that."""
    width = sizes["width"]
    model = READER | {
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": sizes["layers"],
        "initializer_range": width**-0.5, "num_attention_heads": sizes.get("heads", 4),
        "global_rope_theta": sizes.get("base", 100.0),
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        files = {"path": Path(folder) / "train.jsonl", "held_out_path": Path(folder) / "held-out.jsonl"}
        for file, records in zip(files.values(), (train, held_out), strict=True):
            file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
        run = {"rows": sizes["rows"], "length": length, "steps": sizes["steps"], "seed": seed, "precision": "fp32"}
        recipe = {
            "tokenizer": f"bpe:{sizes['tokens']}",
            "model": model,
            "data": {key: str(file) for key, file in files.items()} | {"cut_longer": objective == "tags"},
            "objective": {"name": objective},
            "optimizer": {"name": "muon", "lr": 3e-3, "muon_lr": 1e-2, "weight_decay": 0.1},
            "schedule": {"shape": "linear", "warmup": 0.1},
            "run": run | {"evaluate_every": 0.0},
        }
        job = prepare(check_recipe(recipe))
    data = job.trainer.data
    if easy:
        assert isinstance(data, EpochRows)  # of records that each are one row
        for end in (easy, 2 * easy):
            job.trainer.data = EpochRows(data.examples[end - easy : end])
            job.trainer.run(until=end // sizes["rows"])
        job.trainer.data = EpochRows(data.examples[2 * easy :])
    job.trainer.run()
    assert job.trainer.held_out is not None
    with torch.no_grad():
        batches = computed(job.trainer.module.eval(), job.trainer.held_out.batches)
        rows = [row for batch in batches for row in each_row(*batch)]
    return TrainedEncoder(job, [(float(step.step), step.loss) for step in job.trainer.at.history], rows)
