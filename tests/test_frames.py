"""How many Python functions of the package a step enters: counted, not timed, by `bench/frames.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COUNT = """
import json, sys, torch
sys.path.insert(0, "bench")
import frames
torch.set_num_threads(1)
print(json.dumps([frames.counts(), frames.LIMITS, frames.frames(lambda: frames.triptych.causal())]))
"""


@pytest.fixture(scope="module")
def counted() -> tuple[dict[str, int], dict[str, int], int]:
    """Counts, limits, and the count of one call, from a process of its own: here the package's functions are wrapped by
    the checks of their signatures."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counts, limits, one = json.loads(done.stdout)
    return counts, limits, one


def test_frames_of_the_package_are_counted(counted: tuple[dict[str, int], dict[str, int], int]) -> None:
    """A layer has four projections and two norms at least, and one call of a function is at least one frame."""
    counts, _, one = counted
    assert one >= 1
    assert counts["decode per layer"] >= 6
    assert counts["training per layer"] >= 6


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the limits are for Python 3.11; 3.12 inlines comprehensions")
@pytest.mark.parametrize(
    "name", ["decode per layer", "decode outside", "native per layer", "native outside", "training per layer"]
)
def test_a_step_enters_few_functions(name: str, counted: tuple[dict[str, int], dict[str, int], int]) -> None:
    counts, limits, _ = counted
    if name not in counts:
        pytest.skip("the native kernels were not built")
    assert counts[name] <= limits[name]
