"""Additive and linear attention against explicit loops."""

import math

import pytest
import torch

from attend_rows import attend_rows
from triptych.attention import (
    LINEAR,
    AdditiveOver,
    FlatKeys,
    Rows,
    SlotKeys,
    additive,
    linear,
)
from triptych.errors import InputError
from triptych.spec.masks import block_sparse, causal, full, keys, prefix, window

B, H, G, K, KV = 2, 6, 3, 8, 5


def noise(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(t, s, k=K):
    return noise(B, H, t, K, seed=1), noise(B, G, s, k, seed=2), noise(B, G, s, KV, seed=3)


SEES = {
    "full": (full(), lambda b, i, j: True),
    "causal": (causal(), lambda b, i, j: j <= i),
    "keys": (keys([0, 4]), lambda b, i, j: j < (0, 4)[b]),
    "causal keys": (causal() & keys([3, 6]), lambda b, i, j: j <= i and j < (3, 6)[b]),
    "prefix": (causal() & prefix(4), lambda b, i, j: j <= i and j < 4),
}


def weighted(weight, q, v, seen, groups, s):
    """`out[t] = sum of weight(b, h, t, s) v[s]`, normalized over what is seen; 0 where nothing is."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    t = q.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(t):
                weights = {j: weight(b, h, i, j) for j in range(s) if seen(b, i + s - t, j)}
                for j, w in weights.items():
                    out[b, h, i] += w / sum(weights.values()) * v[b, h * groups // q.shape[1], j]
    return out


@pytest.mark.parametrize("name", SEES)
@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 7), (1, 7)])
def test_additive_is_bahdanau(name, t, s):
    q, k, v = qkv(t, s, k=4)
    w_q, w_k, w_v = noise(9, K, seed=4), noise(9, 4, seed=5), noise(9, seed=6)
    mask, seen = SEES[name]
    given = additive(q, k, v, w_q=w_q, w_k=w_k, w_v=w_v, mask=mask)

    def weight(b, h, i, j):
        return math.exp(w_v @ torch.tanh(w_q @ q[b, h, i] + w_k @ k[b, h * G // H, j]))

    torch.testing.assert_close(given, weighted(weight, q, v, seen, G, s), atol=1e-10, rtol=1e-10)
    wrong = additive(q, k, v, w_q=w_q, w_k=w_k, w_v=w_v.flip(0), mask=mask)
    assert name == "keys" or (wrong - given).abs().max() > 1e-2


def test_additive_takes_the_options_of_attend():
    q, k, v = (x[0, 0] for x in qkv(5, 7))
    weights = {"w_q": noise(9, K, seed=4), "w_k": noise(9, K, seed=5), "w_v": noise(9, seed=6)}
    seen = {}
    additive(q, k, v, **weights, softcap=0.5, hook=lambda name, x: seen.setdefault(name, x))
    assert seen["scores"].abs().max() <= 0.5
    assert additive(q[0], k, v, **weights).shape == (KV,)
    assert (additive(q, k, v, **weights, mask=window(2) & keys(2))[3:] == 0).all()


def phi(x):
    return x + 1 if x > 0 else math.exp(x)


@pytest.mark.parametrize("name", SEES)
@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 7), (1, 7), (7, 5)])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_linear_is_katharopoulos(name, t, s, chunk, monkeypatch):
    monkeypatch.setattr("triptych.attention.mechanisms.CHUNK", chunk)
    q, k, v = qkv(t, s)
    mask, seen = SEES[name]
    at = {"q_pos": torch.arange(s - t, s), "k_pos": torch.arange(s)} if t > s else {}
    given = linear(q, k, v, mask=mask, **at)

    def weight(b, h, i, j):
        pairs = zip(q[b, h, i].tolist(), k[b, h * G // H, j].tolist(), strict=True)
        return sum(phi(x) * phi(y) for x, y in pairs)

    torch.testing.assert_close(given, weighted(weight, q, v, seen, G, s), atol=1e-10, rtol=1e-10)
    assert given.isfinite().all()


def test_linear_with_given_positions_is_linear_in_order():
    q, k, v = qkv(7, 7)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    given = linear(q, k[:, :, order], v[:, :, order], mask=causal(), k_pos=order)
    torch.testing.assert_close(given, linear(q, k, v, mask=causal()))
    assert not torch.allclose(given, linear(q, k[:, :, order], v[:, :, order], mask=causal()))


def test_linear_has_gradients_and_no_nan_where_nothing_is_seen(unchecked):
    leaves = [x.requires_grad_() for x in qkv(5, 5)]
    out = linear(*leaves, mask=causal() & keys([0, 4]))
    assert (out[0] == 0).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))
    small = [x[:1, :3, :3].detach().requires_grad_() for x in leaves]
    torch.autograd.gradcheck(lambda *x: linear(*x, mask=causal()), small)


def test_linear_refuses_what_has_no_linear_form():
    q, k, v = qkv(5, 7)
    for options, words in (
        ({"mask": window(3)}, "Window.*the same for all"),
        ({"mask": causal() & block_sparse(2)}, "BlockSparse"),
        ({"mask": causal() | prefix(2)}, "Or"),
        ({"bias": torch.zeros(5, 7)}, "bias: it acts on scores"),
        ({"dropout": 0.1}, "no|none"),
    ):
        with pytest.raises(InputError, match=words):
            linear(q, k, v, **options)


@pytest.mark.parametrize("lengths", [(5, 5), (5, 3)])
def test_rows_meet_any_mechanism(lengths):
    rows = Rows(lengths)
    q, k, v = noise(rows.total, H, K, seed=1), noise(rows.total, G, K, seed=2), noise(rows.total, G, KV, seed=3)
    w_v = noise(K, seed=4)
    eye = torch.eye(K, dtype=torch.float64)
    for mechanism, alone in (
        (LINEAR, lambda q, k, v: linear(q, k, v, mask=causal())),
        (AdditiveOver(w_v), lambda q, k, v: additive(q, k, v, w_q=eye, w_k=eye, w_v=w_v, mask=causal())),
    ):
        z = attend_rows(q, k, v, rows, FlatKeys(rows), mask=causal(), mechanism=mechanism, scale=1.0)
        parts = [rows.split(x) for x in (z, q, k, v)]
        for zb, *one in zip(*parts, strict=True):
            qb, kb, vb = (x.transpose(0, 1)[None] for x in one)
            torch.testing.assert_close(zb, alone(qb, kb, vb)[0].transpose(0, 1))
        # One decoded token over slots of its own row.
        ends = Rows((1, 1), tuple(n - 1 for n in lengths))
        last = [x.unsqueeze(0) for x in (parts[1][0][-1], parts[1][1][-1])]
        slots = [torch.nn.utils.rnn.pad_sequence(list(x), batch_first=True).transpose(1, 2) for x in parts[2:]]
        decoded = attend_rows(
            torch.cat(last), *slots, ends, SlotKeys(lengths, (0, 1)), mask=causal(), mechanism=mechanism, scale=1.0
        )
        torch.testing.assert_close(decoded, torch.stack([x[-1] for x in parts[0]]))
    with pytest.raises(InputError, match="no scores and no pattern"):
        attend_rows(q, k, v, rows, FlatKeys(rows), mask=causal(), mechanism=LINEAR, hook=lambda n, x, r: x)
