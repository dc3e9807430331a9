"""Plans: what is proposed fits and is the best, its tables are a recipe's, and refusals say what would fit."""

import json
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import plan_table
from cli_models import Captured, refused, said
from triptych.count import ClusterRates, Mesh, TrainingPlan, TrainingStep, count, plan
from triptych.count.divided import DividedModel
from triptych.errors import ConfigError, InputError
from triptych.families import read_config
from triptych.spec.division import own_part, shard_rows
from triptych.train.parallel.settings import ParallelSettings
from triptych.train.settings import RunSettings

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
SPEC = read_config(LLAMA)
RATES = ClusterRates(flops=1e9, bandwidth=4e7, between=1e7, per_node=4)
LENGTH = 64


def every(processes: int, rows: int, *, optimizer: Any = "adamw") -> list[tuple[Mesh, TrainingStep]]:
    """All meshes of so many processes, micro-batches of powers of two and recomputation."""
    found = []
    for sizes in product(range(1, processes + 1), repeat=3):
        mesh = Mesh(*sizes)
        if mesh.processes != processes or mesh.tensor > 4:
            continue
        for parts, again in product((1, 2, 4, 8, 16), (False, True)):
            if mesh.readers * parts <= rows:
                step = TrainingStep(LENGTH, 0, -(-rows // (mesh.readers * parts)), parts, again, True, optimizer)
                found.append((mesh, step))
    return found


def seconds(mesh: Mesh, step: TrainingStep, rates: ClusterRates = RATES) -> float:
    """The time of a step, written again: rings that leave a machine share what its processes send to others."""
    counts = count(SPEC)
    forward = counts.flops(LENGTH)
    row = 3 * sum(forward.values()) + step.recompute * (sum(forward.values()) - forward["head"])
    sent = DividedModel(SPEC, mesh.tensor).sent(mesh, step)

    def ring(processes: int, stride: int) -> float:
        members = len({member * stride // 4 for member in range(processes)})  # the machines that have one
        return 4e7 if members == 1 else min(4e7, 1e7 * processes / members)

    shards = ring(mesh.shard, mesh.tensor)
    total = (sent.gather_forward + sent.gather_backward + sent.scatter) / shards
    total += sent.replicate / ring(mesh.replicate, mesh.shard * mesh.tensor) + sent.tensor / ring(mesh.tensor, 1)
    return total + step.rows * step.accumulate * row / mesh.tensor / rates.flops


def test_the_plan_is_the_fastest_that_fits() -> None:
    peaks = sorted(DividedModel(SPEC, m.tensor).memory(m, s).peak for m, s in every(8, 16))
    chosen = set()
    for memory in (peaks[len(peaks) // 4], peaks[len(peaks) // 2], peaks[-1]):
        found = plan(SPEC, 8, memory / 0.9 + 1, length=LENGTH, rows=16, rates=RATES)
        fitting = [one for one in every(8, 16) if DividedModel(SPEC, one[0].tensor).memory(*one).peak <= memory]
        best = min(seconds(*one) for one in fitting)
        assert found.seconds == pytest.approx(best) == pytest.approx(seconds(found.mesh, found.step))
        assert found.memory.peak <= memory
        chosen.add((found.mesh, found.step))
    assert len(chosen) > 1  # less memory changes the plan
    slow = plan(SPEC, 8, 1e12, length=LENGTH, rows=16, rates=replace(RATES, bandwidth=1e3, between=1e3))
    assert slow.seconds is not None
    assert slow.seconds > 100 * best


def test_without_rates_layers_stay_whole_where_they_can() -> None:
    found = plan(SPEC, 8, 1e12, length=LENGTH, rows=16)
    assert (found.mesh.tensor, found.step.accumulate, found.step.recompute) == (1, 1, False)
    assert found.seconds is found.compute_seconds is found.sent_seconds is None
    assert found.step.rows == 2
    others = [plan(SPEC, 8, 1e12, length=LENGTH, rows=rows).step.rows for rows in (8, 9, 17)]
    assert others == [1, 2, 3]


def test_one_process_needs_what_the_count_says() -> None:
    """With the smallest memory that is enough, and a byte less."""
    alone = count(SPEC).training_memory(LENGTH, batch=3).peak
    enough = -(-alone * 10 // 9) + 1
    found = plan(SPEC, 1, enough, length=LENGTH, rows=3, precision="fp32")
    assert (found.memory.peak, found.sent.total, found.step.recompute) == (alone, 0.0, False)
    less = plan(SPEC, 1, enough - 3, length=LENGTH, rows=3, precision="fp32")
    assert less.step.recompute or less.step.accumulate > 1
    assert less.memory.peak < alone


def test_a_refusal_says_on_how_many_processes_it_fits() -> None:
    memory = count(SPEC).total * 16 / 3
    with pytest.raises(InputError, match=r"needs .* a process on .*weights .*; it fits on (\d+) processes") as error:
        plan(SPEC, 1, memory, length=LENGTH, rows=64)
    more = int(str(error.value).rpartition("fits on ")[2].split()[0])
    assert plan(SPEC, more, memory, length=LENGTH, rows=64).memory.peak <= 0.9 * memory
    with pytest.raises(InputError):
        plan(SPEC, more // 2, memory, length=LENGTH, rows=64)
    with pytest.raises(InputError, match="more processes are not enough, take fewer tokens"):
        plan(SPEC, 1, 1e5, length=LENGTH, rows=64)
    with pytest.raises(InputError, match="fewer rows than 64 processes need"):
        plan(SPEC, 64, 1e12, length=LENGTH, rows=2)


def test_layers_that_processes_cannot_share() -> None:
    with pytest.raises(ConfigError, match=r"tensor = 8 does not divide the 4 key/value heads of decoder.blocks.0.attn"):
        own_part(SPEC, 8)
    own = own_part(read_config(LLAMA | {"vocab_size": 511}), 4)
    shapes = own.shapes()
    assert shapes["decoder.embed.tokens.weight"] == (511, 64)  # 4 do not divide it
    assert shapes["decoder.blocks.0.mlp.down.weight"] == (64, 40)
    assert own_part(SPEC, 1) == SPEC
    assert [len(shard_rows(10, 4, i)) for i in range(5)] == [3, 3, 3, 1, 0]


def test_recompute_and_micro_batches_need_less() -> None:
    model, mesh = DividedModel(SPEC, 2), Mesh(1, 2, 2)
    plain = TrainingStep(LENGTH, rows=8, bf16=True)
    kept = {key: model.memory(mesh, step) for key, step in {
        "plain": plain, "again": replace(plain, recompute=True), "parts": replace(plain, rows=2, accumulate=4),
        "fp32": replace(plain, bf16=False), "muon": replace(plain, optimizer="muon"),
    }.items()}  # fmt: skip
    assert kept["again"].activations < kept["plain"].activations / 2
    assert kept["parts"].activations < kept["plain"].activations
    assert kept["parts"].gathered > kept["plain"].gathered  # gradients are whole until the last micro-batch
    assert kept["fp32"].activations > kept["plain"].activations
    assert kept["muon"].optimizer_state < kept["plain"].optimizer_state


def tables(output: str) -> dict[str, Any]:
    """The recipe's tables that a command printed."""
    return tomllib.loads(output[output.index("[parallel]") :])


def test_the_command_prints_tables_that_a_recipe_takes(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    argv = ["count", str(path), "--train", "--gpus", "8", "--memory", "80G", "--batch", "32", "--optimizer", "muon"]
    out, _ = said(argv, capsys)
    recipe = tables(out)
    assert ParallelSettings(**recipe["parallel"]).processes == 8
    assert RunSettings(**recipe["run"], steps=1).rows == 32
    assert recipe["optimizer"] == {"name": "muon"}
    assert "gradients, summed among shards" in out
    rates = ["--flops", "400T", "--bandwidth", "300G", "--per-node", "4", "--between", "50G", "--json"]
    result = json.loads(said([*argv, *rates], capsys)[0])
    expected: TrainingPlan = plan(
        SPEC, 8, 80e9, length=256, rows=32, optimizer="muon", rates=ClusterRates(400e12, 300e9, 50e9, 4)
    )
    assert result == json.loads(json.dumps(expected.to_dict()))
    timed, _ = said([*argv, *rates[:-1]], capsys)
    assert "share of a step" in timed
    named, _ = said(["count", str(path), "--train", "--processes", "2", "--memory", "1.5T"], capsys)
    assert ParallelSettings(**tables(named)["parallel"]).processes == 2


@pytest.mark.parametrize(
    ("options", "told", "code"),
    [
        ("--train", "needs --gpus N and --memory", 2),
        ("--train --gpus 0 --memory 80G", "--gpus", 2),
        ("--train --gpus 8 --memory abc", "'abc' is no number above 0", 2),
        ("--train --gpus 8 --memory 0", "is no number above 0", 2),
        ("--train --gpus 8 --memory -5G", "is no number above 0", 2),
        ("--train --gpus 8 --memory 80G --bandwidth=-1G --flops 1T", "is no number above 0", 2),
        ("--train --gpus 8 --memory 80G --flops 1T", "give both", 2),
        ("--train --gpus 8 --memory 80G --per-node 8", "give both", 2),
        ("--train --gpus 9 --memory 80G --flops 1T --bandwidth 1G --per-node 8", "no whole number of machines of 8", 1),
        ("--train --gpus 8 --memory 80G --context 9", "--context is not for --train", 2),
        ("--train --gpus 8 --memory 80G --batch 1", "fewer rows than 8 processes need", 1),
        ("--train --gpus 8 --memory 1K", "more processes are not enough", 1),
        ("--train --gpus 8 --memory 80G --dtype fp32", "--dtype is not for --train", 2),
        ("--train --gpus 99999 --memory 80G", "more than the 16,384", 1),
        ("--gpus 8", "--gpus is for --train", 2),
        ("--optimizer muon", "--optimizer is for --train", 2),
        ("--length 8", "--length is for --train", 2),
    ],
)
def test_what_cannot_be_planned_is_refused(
    options: str, told: str, code: int, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert told in refused(["count", str(path), *options.split()], capsys, code)


@pytest.mark.heavy
def test_the_table_of_the_page_is_what_plans_say() -> None:
    page = (Path(__file__).parents[1] / "docs" / "concepts" / "planning.md").read_text("utf-8")
    assert plan_table.table() in page
