"""Several processes train as one: gradients, losses and the order of the data, on gloo.

Differences are the largest over all tensors, divided by the largest number of all gradients.
"""

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import parallel_cases
from parallel_cases import ALONE, largest_difference
from parallel_processes import Mesh, Processes
from training_objectives import DRAW
from triptych.errors import ConfigError
from triptych.train.parallel.parts import Holders
from triptych.train.parallel.settings import ParallelSettings
from triptych.train.parallel.start import check_mesh

RAGGED = [5, 17, 9, 30, 3, 4, 8, 2]  # with two ranks, 61 and 17 tokens
BOUND = {"float64": 1e-12, "float32": 1e-6}
TWO: list[Mesh] = [(1, 2, 1), (2, 1, 1), (1, 1, 2)]
FOUR: list[Mesh] = [(2, 2, 1), (1, 4, 1), (1, 2, 2), (1, 1, 4)]
DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.2, "resid_pdrop": 0.15},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1},
    "t5": {"dropout_rate": 0.2},
    "llama": {"attention_dropout": 0.2},
}
#: Options of a step beside its rows; the last rows have no trained token, and with two ranks one has none at all.
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "recomputed": {"recompute": True},
    "a rank without trained tokens": {"untrained": [4, 5, 6, 7]},
    "fp32": {"dtype": "float32"},
}


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def assert_equal_steps(pool: Processes, mesh: Mesh, case: str, bound: float, **arguments: Any) -> dict[str, Any]:
    alone: dict[str, Any] = getattr(parallel_cases, case)(ALONE, **arguments)
    together = pool.run(case, mesh, **arguments)
    assert largest_difference(together["gradients"], alone["gradients"]) < bound
    assert abs(together["loss"] - alone["loss"]) < bound * alone["loss"]
    assert abs(together["norm"] - alone["norm"]) < bound * alone["norm"]
    return alone


@pytest.mark.parametrize("mesh", TWO, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5"])
def test_gradients_are_those_of_one_process(two: Processes, kind: str, mesh: Mesh) -> None:
    for options in STEPS.values():
        bound = BOUND[options.get("dtype", "float64")]
        assert_equal_steps(two, mesh, "gradients", bound, kind=kind, lengths=RAGGED, **options)


@pytest.mark.parametrize("mesh", TWO, ids=str)
def test_a_loss_in_parts_has_the_same_gradients(two: Processes, mesh: Mesh) -> None:
    """Those of embeddings, head and blocks; the logits of three tokens are in memory at a time."""
    for kind in ("gpt2", "llama", "t5"):
        alone = assert_equal_steps(two, mesh, "gradients_in_parts", 1e-12, kind=kind, lengths=RAGGED)
        whole = parallel_cases.gradients(ALONE, kind, RAGGED)
        assert largest_difference(alone["gradients"], whole["gradients"]) < 1e-12


@pytest.mark.parametrize("mesh", TWO, ids=str)
@pytest.mark.parametrize("kind", list(DROPOUT))
def test_dropout_is_that_of_one_process(two: Processes, kind: str, mesh: Mesh) -> None:
    plain = parallel_cases.gradients(ALONE, kind, RAGGED)
    for options in ({}, {"accumulate": 2}, {"recompute": True}):
        case = {"kind": kind, "lengths": RAGGED, "changes": DROPOUT[kind], **options}
        alone = assert_equal_steps(two, mesh, "gradients", 1e-12, **case)
        assert largest_difference(alone["gradients"], plain["gradients"]) > 0.01


@pytest.mark.parametrize("mesh", TWO, ids=str)
def test_experts_without_tokens(two: Processes, mesh: Mesh) -> None:
    """Of 4 tokens a rank, some of 6 experts have none on one rank, and some on no rank."""
    for options in ({}, {"accumulate": 2}, {"recompute": True}):
        lengths = [2, 2, 2, 2] if options else [1, 2]
        assert_equal_steps(two, mesh, "gradients", 1e-12, kind="mixtral", lengths=lengths, **options)
    few = parallel_cases.gradients(ALONE, "mixtral", [1, 2])
    assert 0 < sum(".experts." in name and name.endswith(".up.weight") for name in few["gradients"]) < 12


@pytest.mark.parametrize("mesh", TWO, ids=str)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_adapters(two: Processes, kind: str, mesh: Mesh) -> None:
    assert_equal_steps(two, mesh, "adapter_gradients", 1e-12, kind=kind, lengths=RAGGED)


@pytest.mark.parametrize("mesh", TWO, ids=str)
def test_adapters_that_are_switched_off_for_the_reference(two: Processes, mesh: Mesh) -> None:
    for options in ({}, {"accumulate": 2}, {"recompute": True}):
        case = {"kind": "llama", "lengths": RAGGED, "pairs": True, **options}
        assert_equal_steps(two, mesh, "adapter_gradients", 1e-12, **case)


@pytest.mark.parametrize("mesh", TWO[:2], ids=str)
def test_adapters_with_norms(two: Processes, mesh: Mesh) -> None:
    """DoRA; with parallel.tensor above 1 it is refused."""
    alone = assert_equal_steps(two, mesh, "adapter_gradients", 1e-12, kind="llama", lengths=RAGGED, dora=True)
    assert any(name.endswith(".magnitude") for name in alone["gradients"])


def test_losses_divided_by_a_rank_s_own_tokens_are_found(two: Processes) -> None:
    """The control of the tests above."""
    alone = parallel_cases.gradients(ALONE, "gpt2", RAGGED)
    wrong = two.run("with_own_weights", (1, 2, 1), kind="gpt2", lengths=RAGGED)
    assert largest_difference(wrong["gradients"], alone["gradients"]) > 0.1


@pytest.mark.parametrize("mesh", TWO, ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_losses_of_many_steps(two: Processes, optimizer: str, mesh: Mesh) -> None:
    settings = {"name": optimizer, "lr": 0.003, "muon_lr": 0.003}
    case = {"kind": "gpt2", "lengths": [*RAGGED, 12, 11, 29], "steps": 40, "rows": 4, "optimizer": settings}
    alone, together = parallel_cases.losses(parallel_cases.EXACT, **case), two.run("losses", mesh, **case)
    assert max(abs(a - b) for a, b in zip(together, alone, strict=True)) < 1e-4
    assert alone[-1] < alone[0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_are_read_in_the_order_of_one_process(two: Processes, accumulate: int) -> None:
    case = {"kind": "gpt2", "lengths": RAGGED, "accumulate": accumulate}
    alone = parallel_cases.rows_read(ALONE, **case)
    assert len(alone) == 2 * accumulate
    for mesh in TWO:
        assert two.run("rows_read", mesh, **case) == alone


def test_processes_that_disagree_stop_with_what_differs(two: Processes) -> None:
    recipe, facts = {"run": {"seed": 0, "steps": 3}}, {"the data": "1"}
    assert two.run("disagreement", (1, 2, 1), recipe=recipe, facts=facts, rank=5) == ""
    error = two.run("disagreement", (1, 2, 1), recipe=recipe, facts=facts, rank=1)
    assert error.startswith("rank 1 differs from rank 0 in run.seed: 1 and 0")


@pytest.mark.parametrize(
    ("settings", "processes", "says"),
    [
        (None, 2, "--set parallel.shard=2"),
        (ParallelSettings(shard=2), 1, "--processes 2"),
        (ParallelSettings(replicate=2, shard=2), 3, "replicate 2 x shard 2 x tensor 1 = 4 processes, and 3 run"),
    ],
)
def test_a_mesh_that_does_not_fit(settings: ParallelSettings | None, processes: int, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_mesh(settings, processes)
    assert says in str(error.value)


@pytest.mark.parametrize("divided", [None, 0, 1])
@pytest.mark.parametrize("shape", [(12, 20), (10, 6), (2, 8)])
def test_blocks_cover_a_matrix_once(shape: tuple[int, int], divided: int | None) -> None:
    """Also where there are fewer rows than processes, or not equally many for each."""
    seen = np.zeros(shape, dtype=int)
    holders = Holders(shard=4, tensor=2)
    for holder in holders.once(divided):
        block = holders.block(shape, divided, holder)
        assert seen[block.ranges].shape == block.shape
        seen[block.ranges] += 1
    assert (seen == 1).all()


# ---------------------------------------------------------------- heavier meshes and cases


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", FOUR, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_gradients_on_four_processes(four: Processes, kind: str, mesh: Mesh) -> None:
    for options in STEPS.values():
        bound = BOUND[options.get("dtype", "float64")]
        assert_equal_steps(four, mesh, "gradients", bound, kind=kind, lengths=RAGGED, **options)
    assert_equal_steps(four, mesh, "gradients", 1e-12, kind=kind, lengths=RAGGED, changes=DROPOUT[kind])


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", FOUR[:3], ids=str)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_grouped_heads_and_experts_on_four_processes(four: Processes, kind: str, mesh: Mesh) -> None:
    assert_equal_steps(four, mesh, "gradients", 1e-12, kind=kind, lengths=RAGGED)
    assert_equal_steps(four, mesh, "gradients", 1e-12, kind=kind, lengths=[1, 2, 1, 1], accumulate=1)


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", FOUR, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_a_hundred_losses_on_four_processes(four: Processes, kind: str, mesh: Mesh) -> None:
    case = {"kind": kind, "lengths": [*RAGGED, 12, 11, 29], "steps": 100, "rows": 4, "optimizer": {"lr": 0.003}}
    alone, together = parallel_cases.losses(ALONE, **case), four.run("losses", mesh, **case)
    assert max(abs(a - b) for a, b in zip(together, alone, strict=True)) < 1e-4


@pytest.mark.heavy
@pytest.mark.parametrize("objective", list(DRAW))
def test_every_objective(two: Processes, objective: str) -> None:
    in_fp32 = ("speech", "preference", "distilled")  # frames, references and teachers are fp32
    dtype = "float32" if objective in in_fp32 else "float64"
    for seed in range(2):
        case = DRAW[objective](seed)
        pickled = pickle.dumps((case.module, case.examples))
        for mesh in TWO[:2]:
            assert_equal_steps(two, mesh, "of_rows", BOUND[dtype], pickled=pickled, dtype=dtype)
