"""`lab sparse-patterns` at small sizes: passes, and fails where a kernel computes or leaves out what it should not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab_results import passes
from triptych.attention import dispatch, kernel_sparse
from triptych.errors import InputError
from triptych.spec import Mask, block_sparse, causal, window
from triptych.spec.masks import BlockSparse
from triptych_lectures.labs import run, sparse_patterns
from triptych_lectures.labs.lab import Setup
from triptych_lectures.labs.sparse_patterns import POWERS, STRIDED

SMALL = {"lengths": (256, 512, 1024), "width": 6, "block": 4, "powers_block": 4, "same": 128}


def failed() -> set[str]:
    return {check.claim for check in run("sparse-patterns", Setup(sizes=SMALL)).checks if not check.passed}


def test_passes() -> None:
    passes(run("sparse-patterns", Setup(sizes=SMALL)))


def test_pairs_are_those_of_the_call() -> None:
    inputs = [torch.randn(1, 3, 256, 8) for _ in range(3)]
    assert sparse_patterns.pairs(causal(), inputs) == 3 * 256 * 256
    blocks = sparse_patterns.powers(256, 16)  # 16 blocks, of which the last sees 0, 1, 2, 4 and 8 back
    assert sparse_patterns.pairs(blocks, inputs) == 3 * 256 * 5 * 16


def test_fails_when_the_block_kernel_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(dispatch.KERNELS["block"], cannot=lambda request: ["broken"])
    monkeypatch.setitem(dispatch.KERNELS, "block", broken)
    claims = failed()
    for way in (STRIDED, POWERS):
        assert f"{way}: pairs computed grow as T to the power" in claims
    assert any(claim.endswith(f"{sparse_patterns.ARRAY}, over those of the mask itself") for claim in claims)


def test_fails_when_the_kernel_reads_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def every(request: Any, pattern: BlockSparse) -> Tensor:
        blocks = -(-request.keys // pattern.block)
        return torch.arange(blocks).expand(blocks, -1)

    monkeypatch.setattr(kernel_sparse, "_candidates", every)
    monkeypatch.setattr(kernel_sparse, "block_saves", lambda request: "block" in repr(request.mask))
    claims = failed()
    assert f"{POWERS}: largest over smallest of pairs / (T · blocks seen)" in claims
    assert "largest difference from the definition" not in claims


def test_fails_when_the_kernel_forgets_the_blocks_that_all_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockSparse, "visible_to_all", lambda self, blocks: [])
    assert "largest difference from the definition" in failed()


def test_fails_when_only_neighbours_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("strided", "powers"):
        monkeypatch.setattr(sparse_patterns, name, lambda length, block: causal() & window(16))
    claims = failed()
    assert f"{STRIDED}: layers until each position has reached all before it" in claims
    assert f"{POWERS}: layers until each position has reached all before it" in claims


def test_fails_when_as_many_neighbours_stand_for_the_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbours(length: int, block: int) -> Mask:
        return causal() & block_sparse(block, local=1 + (-(-length // block) - 1).bit_length())

    monkeypatch.setattr(sparse_patterns, "powers", neighbours)
    assert failed() == {f"{POWERS}: layers until each position has reached all before it"}


def test_one_length_is_refused() -> None:
    with pytest.raises(InputError, match="size lengths: 64 is too few; give 2 values or more"):
        run("sparse-patterns", Setup(sizes={"lengths": (64,)}))
