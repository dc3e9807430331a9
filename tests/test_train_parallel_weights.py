"""A process makes, reads and writes one whole weight at a time, and keeps its part; in bytes of tensors."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_cases import largest_difference, saved_weights
from parallel_processes import Mesh, Processes
from triptych import load

TWO: list[Mesh] = [(1, 2, 1), (1, 1, 2), (2, 1, 1)]
FOUR: list[Mesh] = [(2, 1, 2), (1, 4, 1), (1, 2, 2)]
DIGEST = 16_000  # bytes: of the numbers by which processes compare a weight
PLANS = 100_000  # bytes: in which processes tell one another what parts of the optimizer's state they have
KINDS = ["gpt2", "llama", "mixtral", "t5"]


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def check_distributed(pool: Processes, mesh: Mesh, kind: str, path: Path) -> None:
    """New weights and those of a file are the ones of one process, and no process has more than its parts and two whole
    weights: one that is kept, and the next."""
    for dtype in ("float32", "bfloat16"):
        stored = path / dtype
        expected = saved_weights(str(stored), kind, dtype)
        for of in (None, str(stored)) if dtype == "float32" else (str(stored),):
            result = pool.run("distributed", mesh, kind=kind, path=of)
            assert result["weights"].keys() == expected.keys()
            assert largest_difference(result["weights"], expected) == 0.0
            bound = result["parts"] + 2 * result["largest"] + DIGEST
            assert result["most"] <= bound
            control = pool.run("distributed", mesh, kind=kind, path=of, at_once=True)
            if mesh[0] == 1 and (of is None or dtype == "bfloat16"):  # fp32 numbers of a file are not copied
                assert control["most"] > bound


@pytest.mark.parametrize("mesh", TWO, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_one_process(two: Processes, kind: str, mesh: Mesh, tmp_path: Path) -> None:
    check_distributed(two, mesh, kind, tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", FOUR, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_on_four_processes(four: Processes, kind: str, mesh: Mesh, tmp_path: Path) -> None:
    check_distributed(four, mesh, kind, tmp_path)


@pytest.mark.parametrize("mesh", TWO[:2], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_checkpoint_is_written_weight_by_weight(two: Processes, kind: str, mesh: Mesh, tmp_path: Path) -> None:
    result = two.run("written", mesh, kind=kind, path=str(tmp_path / "a"))
    stored = dict(load(tmp_path / "a" / "model").module.named_parameters())
    assert largest_difference({name: p.detach().numpy() for name, p in stored.items()}, result["weights"]) == 0.0
    bound = PLANS + 3 * result["largest"]  # the whole weight, a part that came, and the weight in the order of the file
    assert result["most"] <= bound
    assert two.run("written", mesh, kind=kind, path=str(tmp_path / "b"), at_once=True)["most"] > bound
