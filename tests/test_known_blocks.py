"""Grids whose runs skip the blocks below their change give what runs of all blocks give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from triptych.model import Model
from triptych.nn import Transformer
from triptych.probe import PatchGrid, known_blocks
from triptych.probe.known_blocks import KnownBlocks

CLEAN, CORRUPT = [3, 1, 4, 1, 5, 9, 2], [3, 1, 7, 1, 5, 9, 2]
TARGET = [1, 8, 2, 6]
MODELS: dict[str, Callable[[], Transformer]] = {
    "decoder": lambda: tiny.decoder(blocks=4),
    "encoder": tiny.encoder,
    "encoder-decoder": tiny.encoder_decoder,
    "mixture": tiny.mixture,
    "attention only": tiny.attention_only,
}


def grid(model: Model, **options: Any) -> PatchGrid:
    answer = {"answer": (5, 6)} if model.spec.head is not None else {}
    target = {"target": TARGET} if model.spec.layout == "encoder-decoder" else {}
    at = {"at": 2} if model.spec.layout == "encoder" else {}
    return model.patch(CLEAN, CORRUPT, **answer, **target, **at, **options)


def in_full(model: Model, monkeypatch: pytest.MonkeyPatch, **options: Any) -> PatchGrid:
    """Every run with all of its blocks."""
    with monkeypatch.context() as patched:
        patched.setattr(KnownBlocks, "of", lambda model, runs: KnownBlocks(model.spec, {}))
        return grid(model, **options)


def blocks_run(model: Model, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens went through how many blocks: the sum over blocks."""
    counted = 0
    kinds = {type(block) for stack in (model.module.encoder, model.module.decoder) if stack for block in stack.blocks}
    with monkeypatch.context() as patched:
        for kind in kinds:

            def forward(self: Any, x: Tensor, *rest: Any, own: Any = kind.forward) -> Tensor:
                nonlocal counted
                counted += len(x)
                return own(self, x, *rest)

            patched.setattr(kind, "forward", forward)
        call()
    return counted


def assert_same(one: PatchGrid, other: PatchGrid) -> None:
    """To the rounding of products in batches of other sizes."""
    assert (one.rows, one.columns) == (other.rows, other.columns)
    torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=1e-4, equal_nan=True)
    moved = (other.values - other.corrupt).abs() > 1e-3  # where more than rounding changed
    assert bool(moved.any())
    assert bool(one.fired[moved].all())


SITES = [{}, {"site": ["*.z", "*mlp.out"]}, {"heads": True, "positions": None}, {"site": "*"}]


@pytest.mark.parametrize("options", SITES, ids=["streams", "outputs", "heads", "every site"])
@pytest.mark.parametrize("name", MODELS)
def test_grids_are_those_of_whole_runs(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "attention only" and "site" in options and options["site"] != "*":
        options = {"site": "*.z"}
    if options.get("site") == "*":  # scores and patterns are over keys, which have no columns of their own
        options = {"site": ["*embed", "*.attn.*", "*.cross.*"][: 3 if name == "encoder-decoder" else 2]}
    model = Model(MODELS[name]())
    with monkeypatch.context() as patched:
        patched.setattr(known_blocks, "TOGETHER", 1)
        own = grid(model, **options)
    assert_same(own, in_full(model, monkeypatch, **options))
    assert_same(grid(model, **options, batch_tokens=20), own)


def test_blocks_below_a_change_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks, seven positions: the runs of block i need 4 - i blocks, and one run more gives what is known."""
    model = Model(tiny.decoder(blocks=4))
    monkeypatch.setattr(known_blocks, "TOGETHER", 1)
    n = len(CLEAN)
    whole = blocks_run(model, lambda: in_full(model, monkeypatch), monkeypatch)
    spared = blocks_run(model, lambda: grid(model), monkeypatch)
    assert whole == 4 * n + (1 + 4 * n) * 4 * n  # the clean prompt; the corrupt one, and with each change
    assert spared == 4 * n + 4 * n + (4 + 3 + 2 + 1) * n * n  # the corrupt one is what is known


def test_ablations_share_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(tiny.decoder(blocks=4))
    ablated = lambda: model.ablate([CLEAN], "heads", answer=5)  # noqa: E731
    own = ablated()
    with monkeypatch.context() as patched:
        patched.setattr(KnownBlocks, "of", lambda model, runs: KnownBlocks(model.spec, {}))
        whole = ablated()
    torch.testing.assert_close(own.values, whole.values, atol=1e-4, rtol=1e-4)


def test_models_that_may_compute_something_else_run_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that changes what a block gives at each call, which one known result cannot stand for."""
    model = Model(tiny.decoder(blocks=4))
    calls = 0

    def hook(module: Any, args: Any, out: Tensor) -> None:
        nonlocal calls
        calls += 1

    handle = model.module.decoder.blocks[0].register_forward_hook(hook)
    grid(model, batch_tokens=1)
    assert calls == 2 + 4 * len(CLEAN)  # the clean prompt, the corrupt one and each of its changes
    handle.remove()
    model.module.train()
    count = blocks_run(model, lambda: grid(model), monkeypatch)
    assert count == blocks_run(model, lambda: in_full(model, monkeypatch), monkeypatch)


def test_a_block_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: runs that begin one block too late lose what they change."""
    model = Model(tiny.decoder(blocks=4))
    whole, begins = in_full(model, monkeypatch), known_blocks.begins
    late = lambda spec, run: tuple((prefix, min(first + 1, 4)) for prefix, first in begins(spec, run))  # noqa: E731
    monkeypatch.setattr(known_blocks, "begins", late)
    with pytest.raises(AssertionError):
        assert_same(grid(model), whole)
