"""NaN in a query, a key or a value reaches every result that reads it, on every kernel and at every length, and a query
with nothing to see still gets exactly 0."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych.attention import attend, attend_reference, attention_pattern, dispatch, kernel_dense
from triptych.errors import InputError
from triptych.spec.masks import block_sparse, causal, window

LENGTHS = range(1, 41)
MASKS = {"all": None, "causal": causal(), "window": causal() & window(3), "blocks": causal() & block_sparse(4)}


def drawn(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(keys)
    shapes = (2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8)
    q, k, v = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    return q, k, v


def agree(q: Tensor, k: Tensor, v: Tensor, path: str, **options: Any) -> bool:
    """Whether a kernel gives NaN to every query that has one or sees one in a key or a value."""
    try:
        out = attend(q, k, v, path=path, **options)
    except InputError:  # a path that cannot serve this request
        return True
    seen = attention_pattern(q.nan_to_num(0), k.nan_to_num(0), **options) > 0
    spoiled = (k.isnan().any(-1) | v.isnan().any(-1)).repeat_interleave(2, dim=1)
    expected = q.isnan().any(-1) | (seen & spoiled[:, :, None]).any(-1)
    assert bool(expected.any())
    assert bool(attend_reference(q, k, v, **options)[expected].isnan().all())
    return bool(out[expected].isnan().all())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("path", ["auto", *dispatch.KERNELS])
def test_every_kernel_keeps_nan(path: str, mask: str) -> None:
    lost = []
    for keys in LENGTHS:
        for queries in {1, 2, keys - 1, keys} & set(range(1, keys + 1)):
            for at in (0, 1, 2):
                tensors = list(drawn(queries, keys))
                tensors[at][0, 1, -1] = math.nan
                options: dict[str, Any] = {} if mask == "all" else {"mask": MASKS[mask]}
                for sinks in (None, torch.tensor([0.5, -1.0, 2.0, 0.0])):
                    if not agree(*tensors, path, sinks=sinks, **options):
                        lost.append((keys, queries, "qkv"[at], sinks is not None))
    assert not lost


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_keeps_nan(dtype: torch.dtype) -> None:
    for keys in LENGTHS:
        q, k, v = drawn(keys, keys, dtype)
        q[0, 1] = math.nan
        for path in ("auto", "flash"):
            assert agree(q, k, v, path, mask=causal()), (keys, path)
            assert agree(q[:, :, -1:], k, v, path), (keys, path)


def test_the_mask_that_keeps_nan_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the same calls without it, which swallow."""
    swallowed = 0
    for keys in LENGTHS:
        for queries in {1, 2, keys - 1, keys} & set(range(1, keys + 1)):
            q, k, v = drawn(queries, keys)
            spoiled = q.clone()
            spoiled[0, 1] = math.nan
            for options in ({}, {"mask": causal()}, {"mask": causal(), "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}):
                kept = attend(q, k, v, path="flash", **options)
                with monkeypatch.context() as patch:
                    patch.setattr(kernel_dense, "WIDEST_REGISTER", 0)
                    assert torch.equal(attend(q, k, v, path="flash", **options), kept)
                    swallowed += not agree(spoiled, k, v, "flash", **options)
    assert swallowed


@pytest.mark.parametrize("path", ["auto", *dispatch.KERNELS])
def test_a_query_that_sees_nothing_gets_zero(path: str) -> None:
    for keys in (1, 3, 15, 16, 17, 40):
        q, k, v = drawn(keys, keys)
        visible = torch.ones(keys, keys, dtype=torch.bool).tril()
        visible[0] = False
        try:
            out = attend(q, k, v, mask=visible, path=path)
        except InputError:
            continue
        assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0])), keys
