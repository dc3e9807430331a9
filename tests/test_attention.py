"""Attention on every path against its definition, and the definition against plain loops."""

import logging
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from triptych.attention import (
    KERNELS,
    attend,
    attend_reference,
    attention_pattern,
    attention_scores,
    dispatch,
    prepare,
    why,
)
from triptych.errors import InputError
from triptych.ops.native_training import kernels_for
from triptych.spec.masks import block_sparse, causal, dense, full, keys, prefix, same_document, window

B, H, G, K, KV = 2, 6, 3, 8, 5

MASKS = {
    "full": lambda t, s: full(),
    "causal": lambda t, s: causal(),
    "window": lambda t, s: causal() & window(4),
    "around": lambda t, s: window(3, ahead=2),
    "ahead far": lambda t, s: window(2, ahead=5) & keys([s - 2, 3]),
    "prefix": lambda t, s: causal() | prefix([3, 5]),
    "keys": lambda t, s: keys([0, s - 1]),
    "causal keys": lambda t, s: causal() & keys([2, s - 1]),
    "blocks": lambda t, s: block_sparse(3, local=2, first=1, every=4),
    "powers": lambda t, s: causal() & block_sparse(2, powers=True),
    "causal blocks": lambda t, s: causal() & block_sparse(4, first=1) & keys([s, s - 3]),
    "documents": lambda t, s: causal() & same_document(),
    "window documents": lambda t, s: window(5, 1) & same_document(),
    "dense": lambda t, s: causal() & dense(noise(B, t, s, seed=9) > 0),
    "nothing": lambda t, s: window(2) & keys(0),
}


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(t, s, dtype=torch.float32, heads=H, groups=G, kv=KV):
    shapes = ((B, heads, t, K), (B, groups, s, K), (B, groups, s, kv))
    return tuple(noise(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))


def options_for(name, t, s):
    mask = {"mask": MASKS[name](t, s)}
    if t > s:
        mask |= {"q_pos": torch.arange(s - t, s), "k_pos": torch.arange(s)}
    if "documents" not in name:
        return mask
    return {**mask, "q_doc": torch.arange(t + 2)[2:] // 4 % 3, "k_doc": torch.arange(s) // 5 % 3}


def by_loops(q, k, v, seen, *, scale, softcap=None, bias=None, sinks=None):
    """The definition once more, one number at a time, in Python floats."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            for t in range(q.shape[2]):
                exps = {}
                for s in range(k.shape[2]):
                    if not seen(b, t, s):
                        continue
                    x = sum(float(a) * float(c) for a, c in zip(q[b, h, t], k[b, g, s], strict=True)) * scale
                    x = softcap * math.tanh(x / softcap) if softcap else x
                    exps[s] = math.exp(x + (float(bias[h, t, s]) if bias is not None else 0.0))
                total = sum(exps.values()) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
                for s, e in exps.items():
                    out[b, h, t] += e / total * v[b, g, s].double()
    return out


def test_the_definition_is_these_loops():
    t, s = 3, 7
    q, k, v = qkv(t, s, torch.float64)
    bias, sinks = noise(H, t, s, seed=4, dtype=torch.float64), noise(H, seed=5, dtype=torch.float64)
    bias[:, 1, 4] = -torch.inf
    lengths = (5, 2)

    def seen(b, i, j):
        return j < lengths[b] and j <= i + s - t

    expected = by_loops(q, k, v, seen, scale=0.3, softcap=1.7, bias=bias, sinks=sinks)
    given = attend_reference(q, k, v, mask=causal() & keys(lengths), scale=0.3, softcap=1.7, bias=bias, sinks=sinks)
    torch.testing.assert_close(given, expected, atol=1e-12, rtol=1e-12)
    # Negative controls: another order, another grouping and another scale are other numbers.
    for wrong in (
        {"scale": 0.3, "softcap": 1.7, "bias": bias * 0.3, "sinks": sinks},
        {"scale": None, "softcap": 1.7, "bias": bias, "sinks": sinks},
        {"scale": 0.3, "softcap": 1.7, "bias": bias},
    ):
        assert (attend_reference(q, k, v, mask=causal() & keys(lengths), **wrong) - expected).abs().max() > 1e-3
    other = attend_reference(
        q, k.flip(1), v.flip(1), mask=causal() & keys(lengths), scale=0.3, softcap=1.7, bias=bias, sinks=sinks
    )
    assert (other - expected).abs().max() > 1e-3


EXTRAS = {
    "plain": lambda t, s, dtype: {},
    "scale": lambda t, s, dtype: {"scale": 0.7},
    "softcap": lambda t, s, dtype: {"softcap": 2.0},
    "sinks": lambda t, s, dtype: {"sinks": noise(H, seed=6, dtype=dtype)},
    "bias": lambda t, s, dtype: {"bias": noise(1, H, t, s, seed=7, dtype=dtype)},
    "all": lambda t, s, dtype: {
        "softcap": 2.0,
        "sinks": noise(H, seed=6, dtype=dtype),
        "bias": noise(s, seed=7, dtype=dtype).masked_fill(torch.arange(s) % 3 == 1, -torch.inf),
    },
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", MASKS)
def test_every_path_that_can_agrees_with_the_reference(name, extra):
    for t, s in ((13, 13), (11, 17), (1, 19), (7, 5)):
        for dtype, near in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
            q, k, v = qkv(t, s, dtype)
            options = {**options_for(name, t, s), **EXTRAS[extra](t, s, dtype)}
            expected = attend_reference(q, k, v, **options)
            assert expected.isfinite().all()
            for path, reasons in why(q, k, v, **options).items():
                if not reasons:
                    given = attend(q, k, v, path=path, **options)
                    torch.testing.assert_close(given, expected, atol=near, rtol=near, msg=lambda m: f"{path}: {m}")  # noqa: B023
            torch.testing.assert_close(attend(q, k, v, **options), expected, atol=near, rtol=near)


def test_no_path_refuses_what_it_is_for():
    """Negative control for the test above: it would pass if every path refused."""
    q, k, v = qkv(13, 17)
    for path, names in {
        "window": ["window", "around", "ahead far", "window documents", "nothing"],
        "block": ["blocks", "causal blocks"],
        "flash": list(MASKS),
        "materialized": list(MASKS),
        "reference": list(MASKS),
    }.items():
        for name in names:
            assert why(q, k, v, **options_for(name, 13, 17))[path] == []


@settings(max_examples=25, deadline=None)
@given(
    t=st.integers(1, 70),
    more=st.integers(0, 40),
    back=st.integers(1, 40),
    ahead=st.integers(0, 20),
    block=st.integers(1, 9),
    every=st.integers(0, 4),
    first=st.integers(0, 2),
    learns=st.booleans(),
)
def test_sparse_paths_at_any_size(t, more, back, ahead, block, every, first, learns):
    s = t + more
    q, k, v = qkv(t, s, torch.float64)
    leaves = [x.requires_grad_(learns) for x in (q, k, v)]
    upstream = noise(B, H, t, KV, seed=8, dtype=torch.float64)
    for path, mask in (
        ("window", window(back, ahead)),
        ("window", causal() & window(back)),
        ("block", block_sparse(block, first=first, every=every)),
        ("block", causal() & block_sparse(block, local=2, every=every)),
        ("block", block_sparse(block, local=2, first=first, powers=True)),
        ("block", causal() & block_sparse(block, every=every, powers=True)),
    ):
        if why(q, k, v, mask=mask)[path]:
            continue  # as wide as the row: no window is left
        given = attend(q, k, v, mask=mask, path=path)
        expected = attend_reference(q, k, v, mask=mask)
        torch.testing.assert_close(given, expected, atol=1e-10, rtol=1e-10)
        if learns:
            a, b = (torch.autograd.grad(out, leaves, upstream) for out in (given, expected))
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("extra", ["plain", "all"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_agree_with_the_reference(name, extra):
    for t, s in ((13, 13), (11, 17)):
        q, k, v = qkv(t, s, torch.float64)
        options = {**options_for(name, t, s), **EXTRAS[extra](t, s, torch.float64)}
        leaves = [x.requires_grad_() for x in (q, k, v, *(options[n] for n in ("bias", "sinks") if n in options))]
        upstream = noise(B, H, t, KV, seed=8, dtype=torch.float64)
        expected = torch.autograd.grad(attend_reference(q, k, v, **options), leaves, upstream)
        assert all(x.isfinite().all() for x in expected)
        for path, reasons in why(q, k, v, **options).items():
            if not reasons:
                given = torch.autograd.grad(attend(q, k, v, path=path, **options), leaves, upstream)
                torch.testing.assert_close(given, expected, atol=1e-10, rtol=1e-10)


def test_the_reference_has_the_gradient_of_its_values(unchecked):
    q, k, v = (x[:1, :, :3].requires_grad_() for x in qkv(3, 3, torch.float64))
    sinks = noise(H, seed=6, dtype=torch.float64).requires_grad_()
    bias = noise(H, 3, 3, seed=7, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(
        lambda q, k, v, bias, sinks: attend_reference(
            q, k, v, mask=causal() & keys(2) & window(1), bias=bias, sinks=sinks, softcap=3.0
        ),
        (q, k, v, bias, sinks),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("learns", [False, True])
def test_a_query_with_nothing_to_see_gives_exactly_nothing(dtype, learns):
    t, s = 13, 13
    hopeless = torch.zeros(s, dtype=dtype).fill_(-torch.inf)
    requests = [
        {"mask": keys([0, 5])},
        {"mask": causal() & window(2) & keys([0, 5])},
        {"mask": block_sparse(4) & causal() & keys([0, 5])},
        {"bias": torch.stack([hopeless, torch.zeros(s, dtype=dtype)])[:, None, None]},
        {"mask": keys([0, 5]), "sinks": torch.zeros(H, dtype=dtype)},
        {"k_pos": torch.stack([torch.full((s,), -1), torch.arange(s)]), "q_pos": torch.arange(t)},
    ]
    served = set()
    for options in requests:
        q, k, v = (x.requires_grad_(learns) for x in qkv(t, s, dtype))
        for path, reasons in why(q, k, v, **options).items():
            if reasons:
                continue
            served.add(path)
            out = attend(q, k, v, path=path, **options)
            assert (out[0] == 0).all()
            assert out.isfinite().all()
            assert (out[1, :, :4].abs() > 0).any()
            if learns:
                for x, grad in zip((q, k, v), torch.autograd.grad(out.float().sum(), (q, k, v)), strict=True):
                    assert grad.isfinite().all()
                    assert x is v or (grad[0] == 0).all()
    assert served == set(KERNELS) - (set() if kernels_for(dtype) else {"native"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_its_own_rounding(dtype):
    """Each path must be within a few roundings of what the same inputs give in fp64."""
    t, s = 29, 37
    q, k, v = qkv(t, s, dtype)
    step = torch.finfo(dtype).eps
    for name in MASKS:
        options = options_for(name, t, s)
        exact = attend_reference(q.double(), k.double(), v.double(), **options)
        for path, reasons in why(q, k, v, **options).items():
            if not reasons:
                given = attend(q, k, v, path=path, **options)
                assert given.dtype == dtype
                assert (given.double() - exact).abs().max() <= 4 * step * v.abs().max().double(), path


def test_shapes_without_batch_or_heads():
    q, k, v = (x[0, 0] for x in qkv(5, 7))
    whole = attend_reference(q[None, None], k[None, None], v[None, None], mask=causal())[0, 0]
    for function in (attend, attend_reference):
        torch.testing.assert_close(function(q, k, v, mask=causal()), whole)
        torch.testing.assert_close(function(q[-1], k, v), whole[-1])
        assert function(q[-1], k, v).shape == (KV,)


def test_positions_are_the_truth():
    """A permuted row with its positions gives the permuted output, on every path that takes positions."""
    t = 13
    q, k, v = qkv(t, t)
    order = torch.randperm(t, generator=torch.Generator().manual_seed(3))
    for mask in (causal(), causal() & window(4), causal() | prefix(3), block_sparse(4) & causal()):
        expected = attend_reference(q, k, v, mask=mask)[:, :, order]
        for path in ("auto", "flash", "materialized", "reference"):
            given = attend(
                q[:, :, order], k[:, :, order], v[:, :, order], mask=mask, q_pos=order, k_pos=order, path=path
            )
            torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("mask", "t", "s"),
    [
        (full(), 13, 17),
        (causal(), 13, 13),
        (causal(), 1, 17),
        (causal(), 11, 17),
        (keys([5, 9]), 13, 17),
        (causal() & window(4), 13, 17),
        (dense(torch.ones(B, 13, 17, dtype=torch.bool)), 13, 17),
    ],
)
@pytest.mark.parametrize("kv", [KV, K, 11])
@pytest.mark.parametrize("learns", [False, True])
def test_flash_stays_fused(mask, t, s, kv, learns):
    """Torch falls back in silence; with every other kernel forbidden it raises instead."""
    q, k, v = (x.requires_grad_(learns) for x in qkv(t, s, kv=kv))
    strided = q.mT.contiguous().mT
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for asked in (q, strided):
            given = attend(asked, k, v, mask=mask, path="flash")
            torch.testing.assert_close(given, attend_reference(q, k, v, mask=mask), atol=1e-5, rtol=1e-5)


def test_what_falls_back_is_what_flash_refuses():
    """The other side of the test above: these would leave the fused kernel, so the path says no."""
    q, k, v = qkv(5, 7)
    learned = noise(5, 7, seed=1).requires_grad_()
    assert why(q, k, v, dropout=0.1)["flash"]
    assert why(q, k, v, bias=learned)["flash"]
    assert why(q, k, v, softcap=2.0)["flash"]
    assert not why(q, k, v, sinks=torch.zeros(H))["flash"]
    assert why(q.requires_grad_(), k, v, sinks=torch.zeros(H))["flash"]


def watch(monkeypatch):
    """Record what SDPA is given."""
    seen = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **kw: seen.append(kw) or real(*a, **kw))
    return seen


def test_no_mask_is_built_where_none_is_needed(monkeypatch):
    seen = watch(monkeypatch)
    q, k, v = qkv(21, 21)  # as many keys as a register holds numbers, or more
    attend(q, k, v, mask=causal() & window(99) & keys(21), path="flash")
    attend(q[:, :, :1], k, v, mask=causal(), path="flash")
    attend(q, k, v, mask=keys([4, 9]), path="flash")
    assert (seen[0]["is_causal"], seen[0]["attn_mask"]) == (True, None)
    assert (seen[1]["is_causal"], seen[1]["attn_mask"]) == (False, None)
    assert seen[2]["attn_mask"].stride(2) == 0  # one row in memory for all queries
    with torch.no_grad():
        monkeypatch.setattr("triptych.attention.request.AttentionRequest.visible", property(lambda self: 1 / 0))
        attend(q[:, :, :6], k, v, mask=causal(), path="flash")  # a chunk after 15 cached keys
    assert len(seen) == 3


def test_a_cached_chunk_is_exact_at_size():
    q, k, v = qkv(150, 421, kv=K)
    expected = attend_reference(q, k, v, mask=causal())
    torch.testing.assert_close(attend(q, k, v, mask=causal(), path="flash"), expected, atol=1e-5, rtol=1e-5)
    # Top-left alignment, the kernel's own idea of causality, is something else.
    wrong = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert (wrong - expected).abs().max() > 0.1


def test_auto_takes_the_sparse_path_where_it_saves():
    def chosen(t, s, dtype=torch.float32, learns=False, **options):
        q, k, v = (x.requires_grad_(learns) for x in qkv(1, 1, dtype))
        q, k, v = q.expand(-1, -1, t, -1), k.expand(-1, -1, s, -1), v.expand(-1, -1, s, -1)
        choose = dispatch.choose_of_torch if learns else dispatch.choose
        return choose(prepare(q, k, v, **options)[0]).name

    assert chosen(4096, 4096, mask=causal() & window(512)) == "window"
    assert chosen(1, 4096, mask=causal() & window(512)) == "window"
    assert chosen(1, 32, mask=causal()) == "flash"
    assert chosen(4096, 4096, mask=causal() & window(4000)) == "flash"
    assert chosen(4096, 4096, mask=causal() & block_sparse(64, local=4)) == "block"
    assert chosen(4096, 4096, mask=causal()) == "flash"
    assert chosen(32, 32, mask=causal()) == "materialized"
    assert chosen(128, 128, mask=causal()) == "flash"
    assert chosen(128, 128, torch.bfloat16, mask=causal()) == "flash"
    assert chosen(128, 128, torch.bfloat16, learns=True, mask=causal()) == "materialized"
    assert chosen(4096, 4096, mask=causal(), softcap=3.0) == "materialized"


def test_a_large_pattern_is_told_of_once(caplog):
    dispatch._log_once.cache_clear()
    q, k, v = qkv(1, 1)
    q, k, v = q.expand(-1, -1, 2048, -1), k.expand(-1, -1, 2048, -1), v.expand(-1, -1, 2048, -1)
    request = prepare(q, k, v, mask=causal(), softcap=2.0)[0]
    with caplog.at_level(logging.INFO, "triptych"):
        dispatch.choose(request)
        dispatch.choose(request)
    assert [r.getMessage() for r in caplog.records] == [
        "attention builds its full T x S pattern, since flash cannot: softcap: the kernel has no place for it"
    ]


def test_hook_reads_and_edits_scores_and_pattern():
    q, k, v = qkv(5, 7, torch.float64)
    seen = {}

    def look(name, x):
        seen[name] = x
        return x

    options = {"mask": causal(), "softcap": 2.0, "sinks": noise(H, seed=6, dtype=torch.float64)}
    out = attend_reference(q, k, v, hook=look, **options)
    torch.testing.assert_close(seen["scores"], attention_scores(q, k, **options))
    torch.testing.assert_close(seen["pattern"], attention_pattern(q, k, **options))
    assert (seen["scores"][:, :, 0, 3:] == -torch.inf).all()
    assert (seen["pattern"].sum(-1) < 1).all()  # the sink took its share
    torch.testing.assert_close(out, seen["pattern"] @ v.repeat_interleave(H // G, 1))

    def knock_out(name, x):
        return x.index_fill(1, torch.tensor([4]), -torch.inf) if name == "scores" else x

    edited = attend_reference(q, k, v, hook=knock_out, **options)
    assert (edited[:, 4] == 0).all()
    torch.testing.assert_close(edited[:, :4], out[:, :4])


def test_dropout_drops_weights_and_keeps_their_mean():
    q, k, v = qkv(5, 7)
    v = torch.ones_like(v)
    for path in ("reference", "materialized"):
        torch.manual_seed(0)
        outs = torch.stack([attend(q, k, v, dropout=0.25, path=path) for _ in range(100)])
        assert (outs.mean() - 1).abs() < 0.03
        assert outs.std() > 0.1


def test_refusals_name_what_is_wrong(unchecked):
    q, k, v = qkv(5, 7)
    for options, words in (
        ({"path": "flahs"}, "did you mean 'flash'"),
        ({"path": "window"}, "no window in the mask"),
        ({"path": "block", "mask": window(3), "bias": torch.zeros(5, 7)}, "bias: .*; no block pattern"),
        ({"bias": torch.zeros(5, 6)}, r"bias .*\[5, 6\]"),
        ({"sinks": torch.zeros(4)}, r"one logit for each head, \[6\]"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"scale": math.inf}, "scale=inf"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"softcap": math.nan}, "softcap=nan"),
        ({"k_pos": torch.arange(6)}, r"k_pos \[6\]"),
    ):
        with pytest.raises(InputError, match=words):
            attend(q, k, v, **options)
    for options, words in (
        ({"q": q.numpy()}, r"q is a ndarray, not a tensor; give torch.from_numpy\(q\)"),
        ({"k": k.tolist()}, r"k is a list, not a tensor; give torch.tensor\(k\)"),
        ({"v": None}, "v is a NoneType"),
        ({"bias": np.zeros((5, 7))}, r"give torch.from_numpy\(bias\)"),
        ({"q_pos": [0, 1, 2, 3, 4]}, r"give torch.tensor\(q_pos\)"),
    ):
        for function in (attend, attend_reference):
            with pytest.raises(InputError, match=words):
                function(**{"q": q, "k": k, "v": v, **options})
    with pytest.raises(InputError, match="multiple of G"):
        attend(q[:, :4], k, v)
    with pytest.raises(InputError, match="must agree in B, G and S"):
        attend(q[..., :4], k, v)
    with pytest.raises(InputError, match="one floating dtype"):
        attend(q, k.double(), v)
    with pytest.raises(InputError, match="give q"):
        attend(q[0], k, v)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_a_scale_that_is_not_positive_is_the_definition_s(scale: float) -> None:
    """Above 2,048 pairs, where a fused kernel, which gives NaN, would be taken for a positive one."""
    q, v = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    for values in (q, v):
        expected = attend_reference(q, q, values, mask=causal(), scale=scale)
        torch.testing.assert_close(attend(q, q, values, mask=causal(), scale=scale), expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(attend(q, q, values, mask=causal()), expected, atol=1e-2)
