"""What a process of several keeps and sends, as counted from the spec, beside what it does keep and send."""

from collections.abc import Iterator
from typing import Any

import pytest

from parallel_cases import CONFIGS
from parallel_processes import Mesh as Sizes
from parallel_processes import Processes
from triptych.count.divided import DividedModel, Mesh, SentBytes, TrainingStep
from triptych.families import read_config

ROWS, LENGTH = 8, 12
TWO: list[Sizes] = [(1, 2, 1), (2, 1, 1), (1, 1, 2)]
FOUR: list[Sizes] = [(2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2)]
UNEVEN = {"intermediate_size": 42, "vocab_size": 45, "tie_word_embeddings": True}
#: Of the step: the kind of model, what its config has, and the options of the step.
CASES: dict[str, dict[str, Any]] = {
    "decoder": {"kind": "llama"},
    "recomputed": {"kind": "llama", "recompute": True},
    "accumulated in bf16": {"kind": "gpt2", "accumulate": 2, "precision": "bf16", "recompute": True},
    "norms after sums": {"kind": "gemma2", "recompute": True},
    "norms of queries": {"kind": "qwen3", "precision": "bf16"},
    "encoder-decoder": {"kind": "t5"},
    "experts": {"kind": "mixtral", "recompute": True},
    "muon": {"kind": "llama", "optimizer": {"name": "muon"}, "accumulate": 2},
    "rows that differ": {"kind": "llama", "changes": UNEVEN},
}
#: Beside it, norms of queries and keys are summed, and processes whose experts have no token send their zeros.
BOUND = {"norms of queries": 0.01}


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def predicted(case: dict[str, Any], sizes: Sizes) -> tuple[DividedModel, Mesh, TrainingStep]:
    mesh, accumulate = Mesh(*sizes), case.get("accumulate", 1)
    spec = read_config(CONFIGS[case["kind"]] | case.get("changes", {}))
    step = TrainingStep(
        LENGTH, LENGTH // 2 if case["kind"] == "t5" else 0, ROWS // mesh.readers // accumulate, accumulate,
        case.get("recompute", False), case.get("precision") == "bf16", case.get("optimizer", {}).get("name", "adamw"),
    )  # fmt: skip
    return DividedModel(spec, mesh.tensor), mesh, step


def kinds(sent: SentBytes) -> dict[str, float]:
    """Bytes by what moves: tensors that are gathered, that are scattered, and sums and matrices."""
    gather = sent.gather_forward + sent.gather_backward
    return {"gather": gather, "scatter": sent.scatter, "sum": sent.replicate + sent.tensor + sent.muon}


def recorded(measured: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of all processes."""
    total = {"gather": 0.0, "scatter": 0.0, "sum": 0.0}
    for rank in measured:
        for name, number in rank["sent"].items():
            kind = name.partition(" ")[0]
            total["sum" if kind == "all" else kind] += number / len(measured)
    return total


def check(pool: Processes, name: str, sizes: Sizes) -> None:
    case = CASES[name]
    measured = pool.run("cost", sizes, rows=ROWS, length=LENGTH, **case)
    model, mesh, step = predicted(case, sizes)
    memory = model.memory(mesh, step)
    for rank, own in enumerate(measured):
        numbers = 4 * sum(model.numbers(mesh.shard, rank // mesh.tensor % mesh.shard).values())
        assert own["weights"] == numbers <= memory.weights
        assert own["gradients"] == numbers or case["kind"] == "mixtral"  # an expert without tokens has none
    assert measured[0]["weights"] == memory.weights == memory.gradients
    assert measured[0]["optimizer_state"] == memory.optimizer_state
    counted = kinds(model.sent(mesh, step))
    assert recorded(measured) == pytest.approx(counted, rel=BOUND.get(name, 1e-9))
    for other in TWO if mesh.processes == 2 else FOUR:  # the control
        if other != sizes:
            model, mesh, step = predicted(case, other)
            assert recorded(measured) != pytest.approx(kinds(model.sent(mesh, step)), rel=0.05)


@pytest.mark.parametrize("sizes", TWO, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_keep_and_send_what_is_counted(two: Processes, name: str, sizes: Sizes) -> None:
    check(two, name, sizes)


@pytest.mark.heavy
@pytest.mark.parametrize("sizes", FOUR, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_four_processes_keep_and_send_what_is_counted(four: Processes, name: str, sizes: Sizes) -> None:
    check(four, name, sizes)
