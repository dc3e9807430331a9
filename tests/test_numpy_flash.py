"""FlashAttention's tiles in NumPy beside `attend` and autograd, and `lab flash-tiles`, which counts what they move."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab_results import passes
from triptych.errors import InputError
from triptych_lectures.labs import flash_tiles, run
from triptych_lectures.labs.lab import LabResult, Setup
from triptych_lectures.scratch import numpy_flash
from triptych_lectures.scratch.numpy_flash import Memory

FILE = Path(numpy_flash.__file__)
SMALL = {"lengths": (32, 64, 128), "width": 8, "memories": (128, 256, 512)}


def failed(result: LabResult) -> set[str]:
    return {check.claim.split(":")[0] for check in result.checks if not check.passed}


def test_results_and_gradients_are_the_library_s() -> None:
    assert max(flash_tiles.differences(np.random.default_rng(1))) <= 1e-10


@pytest.mark.parametrize("tiles", [(1, 1), (3, 7), (7, 3), (20, 30), (64, 64)])
def test_the_size_of_the_tiles_changes_only_rounding(tiles: tuple[int, int]) -> None:
    q, k, v, dout = (np.random.default_rng(0).normal(size=(n, 5)) for n in (20, 30, 30, 20))
    results = []
    for sides in (tiles, (1000, 1000)):
        out, lse = numpy_flash.forward(q, k, v, sides, True, Memory())
        results.append([out, lse, *numpy_flash.backward(q, k, v, out, lse, dout, sides, True, Memory())])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-13, rtol=0)


def test_scores_far_apart_do_not_overflow() -> None:
    q, k = np.full((2, 1), 1e3), np.array([[-1.0], [1.0], [0.5]])
    out, lse = numpy_flash.forward(q, k, np.array([[1.0], [2.0], [3.0]]), (1, 1), False, Memory())
    assert out.tolist() == [[2.0], [2.0]]
    assert lse.tolist() == [1e3, 1e3]


def test_what_moves_and_in_which_order() -> None:
    """4 queries and keys in tiles of 2, d 1: q once, three of four tiles of k and v, out and its log-sum-exp once."""
    memory, x = Memory(), np.ones((4, 1))
    numpy_flash.forward(x, x, x, (2, 2), True, memory)
    assert memory.order == [(0, 0), (1, 0), (1, 1)]
    assert (memory.reads, memory.writes, memory.extra) == (4 + 3 * 2 * 2, 4 + 4, 4)
    assert memory.fast == 2 + 2 + 2 + 2 + 4 + 3 * 2  # q, k, v, out; scores; m, total, shrink


class Multiplied(np.ndarray[Any, np.dtype[np.float64]]):
    """An array that counts the matrix products of which it is a factor."""

    products = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Multiplied.products += ufunc is np.matmul
        plain = [x.view(np.ndarray) if isinstance(x, np.ndarray) else x for x in inputs]
        made = getattr(ufunc, method)(*plain, **options)
        return made.view(Multiplied) if isinstance(made, np.ndarray) else made


def products_of(ways: Callable[[], Any]) -> int:
    before = Multiplied.products
    ways()
    return Multiplied.products - before


def test_the_tiles_backward_has_one_product_more_and_the_lab_says_so() -> None:
    """Plain attention keeps its weights: dv, dp, dq and dk are four products; of one tile the scores are a fifth."""
    q, k, v, dout = (np.random.default_rng(0).normal(size=(6, 3)).view(Multiplied) for _ in range(4))
    out, lse = numpy_flash.forward(q, k, v, (6, 6), False, Memory())
    assert products_of(lambda: numpy_flash.forward(q, k, v, (6, 6), False, Memory())) == 2
    assert products_of(lambda: numpy_flash.backward(q, k, v, out, lse, dout, (6, 6), False, Memory())) == 5
    said = run("flash-tiles", Setup(sizes=SMALL)).meaning
    assert "Tiles add one product, the scores of the backward" in said


def test_passes() -> None:
    passes(run("flash-tiles", Setup(sizes=SMALL)))


class _NoShrinking:
    """NumPy, but for the factor [r, 1] of what was added up under a smaller maximum, which is 1."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def exp(self, x: Any) -> Any:
        return np.ones_like(x) if x.ndim == 2 and x.shape[1] == 1 else np.exp(x)


def test_fails_when_sums_keep_the_old_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_flash, "np", _NoShrinking())
    assert "largest difference of a result from attend()" in failed(run("flash-tiles", Setup(sizes=SMALL)))


def test_fails_when_the_backward_forgets_what_the_softmax_takes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Memory.write

    def without(self: Memory, rows: slice, array: Any, tile: Any) -> None:
        write(self, rows, array, tile if array.ndim == 2 or array.sum() else 0 * tile)

    backward = numpy_flash.backward

    def broken(*arguments: Any) -> Any:
        monkeypatch.setattr(Memory, "write", without)
        try:
            return backward(*arguments)
        finally:
            monkeypatch.setattr(Memory, "write", write)

    monkeypatch.setattr(numpy_flash, "backward", broken)
    assert failed(run("flash-tiles", Setup(sizes=SMALL))) == {"largest difference of a gradient from autograd"}


def _keeps_scores(right: Callable[..., Any], q: Any, k: Any, v: Any, tiles: Any, causal: bool, memory: Memory) -> Any:
    memory.allocate(len(q), len(k))
    return right(q, k, v, tiles, causal, memory)


def _small_tiles(right: Callable[..., Any], q: Any, k: Any, v: Any, tiles: Any, causal: bool, memory: Memory) -> Any:
    return right(q, k, v, (4, 4), causal, memory)


@pytest.mark.parametrize(
    ("breaks", "claims"),
    [
        (_keeps_scores, {"tiles"}),
        (_small_tiles, {"forward", "plain over tiles, numbers moved forward, fast memory 512"}),
    ],
)
def test_fails_when_the_tiles_save_nothing(
    breaks: Callable[..., Any], claims: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = numpy_flash.forward
    monkeypatch.setattr(numpy_flash, "forward", lambda *given: breaks(forward, *given))
    assert claims <= failed(run("flash-tiles", Setup(sizes=SMALL)))


def test_fails_when_a_larger_memory_has_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles_for = flash_tiles.tiles_for
    monkeypatch.setattr(flash_tiles, "tiles_for", lambda memory, width: tiles_for(100_000 // memory, width))
    assert {"forward", "backward"} <= failed(run("flash-tiles", Setup(sizes=SMALL)))


def test_one_length_is_refused() -> None:
    with pytest.raises(InputError, match="size lengths: 64 is too few; give 2 values or more"):
        run("flash-tiles", Setup(sizes={"lengths": (64,)}))


def test_it_is_one_page_that_runs_by_itself() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 120
    done = subprocess.run([sys.executable, "-m", numpy_flash.__name__], capture_output=True, text=True, check=True)
    *_, last = done.stdout.splitlines()
    assert last.split() == ["1024", "1,246,208", "2,639,872", "2,048", "1,048,576"]
