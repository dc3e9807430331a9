"""Cached attention is attention: in one piece, in chunks, and token by token, rows of any length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.attention import Cache, CrossCache, FlatKeys, LayerSpec, NullCache, Rows, SlotKeys, attend_rows
from triptych.errors import InputError, ProbeError
from triptych.spec.masks import causal, full, window

H, G, K, KV, W = 6, 2, 8, 5, 4
LAYERS = [
    LayerSpec(groups=G, width=K, value_width=KV),
    LayerSpec(groups=G, width=K, value_width=KV, window=W),
]
MASKS = [causal(), causal() & window(W)]


def make(lengths, layer, seed=0):
    """q, k, v of each row, whole."""
    made = torch.Generator().manual_seed(seed + layer)
    return [[torch.randn(n, h, w, generator=made) for n in lengths] for h, w in ((H, K), (G, K), (G, KV))]


def uncached(lengths, seed=0):
    """What every row gives without a cache: `[layer][row]`."""
    outs = []
    for layer, mask in enumerate(MASKS):
        rows = Rows(tuple(lengths))
        q, k, v = (torch.cat(x) for x in make(lengths, layer, seed))
        outs.append(rows.split(attend_rows(q, NullCache().extend(layer, k, v, rows), rows, mask=mask)))
    return outs


def step(cache, parts, lengths, given, past=None):
    """One step of every layer over the next `lengths[b]` tokens of each row; appends the outputs to `given`."""
    rows = Rows(tuple(lengths), cache.lengths)
    cache.begin(rows, "")
    for layer, mask in enumerate(MASKS):
        q, k, v = (
            torch.cat([x[row][a : a + n] for row, (a, n) in enumerate(zip(rows.past, lengths, strict=True))])
            for x in parts[layer]
        )
        z = attend_rows(q, cache.extend(layer, k, v, rows), rows, mask=mask)
        for row, out in enumerate(rows.split(z)):
            given[layer][row].append(out)
    cache.advance(rows)


def compare(given, expected):
    for layer, rows in enumerate(expected):
        for row, out in enumerate(rows):
            torch.testing.assert_close(torch.cat(given[layer][row]), out, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 19), min_size=1, max_size=3),
    cuts=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), min_size=0, max_size=4),
    slack=st.sampled_from([0, 3]),
    capacity=st.sampled_from([1, 8]),
)
def test_any_cut_into_chunks_is_one_forward(lengths, cuts, slack, capacity):
    cache = Cache(LAYERS, len(lengths), capacity=capacity, slack=slack)
    parts = [make(lengths, layer) for layer in range(2)]
    given = [[[] for _ in lengths] for _ in LAYERS]
    for cut in cuts:
        step(cache, parts, [min(c, n - held) for c, n, held in zip(cut, lengths, cache.lengths, strict=False)], given)
    while cache.lengths != tuple(lengths):  # decode what is left, one token a row
        step(cache, parts, [min(1, n - held) for n, held in zip(lengths, cache.lengths, strict=True)], given)
    compare(given, uncached(lengths))


def test_a_wrong_ring_shows():
    """Negative control: a ring that forgets one token too many changes the outputs."""
    lengths = [13]
    cache = Cache(LAYERS, 1)
    cache.stores[1].window = cache.stores[1].ring = W - 1
    cache.stores[1].k, cache.stores[1].v = cache.stores[1].k[:, :, 1:], cache.stores[1].v[:, :, 1:]
    given = [[[]], [[]]]
    for _ in range(13):
        step(cache, [make(lengths, layer) for layer in range(2)], [1], given)
    with pytest.raises(AssertionError):
        compare(given, uncached(lengths))


def test_prefill_gives_the_fresh_tensors_back():
    cache, rows = Cache(LAYERS, 2), Rows((3, 5))
    k, v = torch.randn(8, G, K, requires_grad=True), torch.randn(8, G, KV)
    held = cache.extend(0, k, v, rows)
    assert isinstance(held, FlatKeys)
    assert held.k is k
    assert cache.lengths == (0, 0)
    cache.advance(rows)
    assert cache.lengths == (3, 5)
    again = cache.extend(0, k[:2], v[:2], Rows((1, 1), (3, 5)))
    assert isinstance(again, SlotKeys)
    assert again.lengths == (4, 6)
    torch.testing.assert_close(again.k[1, :, :5].transpose(0, 1), k[3:].detach())


def test_writes_are_in_place_and_capacity_doubles():
    cache = Cache(LAYERS[:1], 1, capacity=4)
    place = cache.stores[0].k.data_ptr()
    for held in range(4):
        cache.extend(0, torch.ones(1, G, K), torch.ones(1, G, KV), Rows((1,), (held,)))
        cache.advance(Rows((1,), (held,)))
    assert cache.stores[0].k.data_ptr() == place
    assert cache.nbytes == 4 * G * (K + KV) * 4
    cache.extend(0, torch.ones(1, G, K), torch.ones(1, G, KV), Rows((1,), (4,)))
    assert cache.stores[0].k.shape[2] == 8
    assert (cache.stores[0].k[:, :, :5] == 1).all()


@pytest.mark.parametrize("slack", [0, 3])
def test_trim_and_go_on(slack):
    lengths = [11, 9]
    cache = Cache(LAYERS, 2, slack=slack)
    wrong = [make(lengths, layer, seed=7) for layer in range(2)]
    right = [make(lengths, layer) for layer in range(2)]
    given = [[[], []], [[], []]]
    step(cache, right, [7, 5], given)
    back = 1 + slack
    step(cache, wrong, [back, back], [[[], []], [[], []]])
    cache.trim((7, 5))
    while cache.lengths != tuple(lengths):
        step(cache, right, [min(1, n - held) for n, held in zip(lengths, cache.lengths, strict=True)], given)
    compare(given, uncached(lengths))


def test_a_window_layer_refuses_to_go_back_too_far_but_may_start_again():
    lengths = [11, 9]
    parts = [make(lengths, layer) for layer in range(2)]
    cache = Cache(LAYERS, 2)
    step(cache, parts, [9, 9], [[[], []], [[], []]])
    with pytest.raises(InputError, match=r"slot 0 cannot go back from 9 to 7.*slack=1"):
        cache.trim((7, 8))
    assert cache.lengths == (9, 9)
    cache.trim((0, 0))
    given = [[[], []], [[], []]]
    step(cache, parts, [7, 5], given)
    step(cache, parts, [4, 4], given)
    compare(given, uncached(lengths))
    with pytest.raises(InputError, match="trim to"):
        cache.trim((12, 9))


def test_filter_and_fork():
    lengths = [11, 9, 7]
    parts = [make(lengths, layer) for layer in range(2)]
    cache = Cache(LAYERS, 3)
    step(cache, parts, [6, 5, 4], [[[], [], []] for _ in LAYERS])
    other = cache.fork()
    order = [2, 0, 0]
    cache.filter(order)
    assert cache.lengths == (4, 6, 6)
    turned = [[[x[row] for row in order] for x in parts[layer]] for layer in range(2)]
    given = [[[], [], []] for _ in LAYERS]
    step(cache, turned, [3, 5, 5], given)
    expected = uncached(lengths)
    for layer in range(2):
        for out, row, first in zip(given[layer], order, (4, 6, 6), strict=True):
            torch.testing.assert_close(out[0], expected[layer][row][first:], atol=1e-5, rtol=1e-5)
    given = [[[], [], []] for _ in LAYERS]
    step(other, parts, [5, 4, 3], given)  # the fork saw none of it
    torch.testing.assert_close(given[1][1][0], expected[1][1][5:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [(7, 7, 7), (7, 3, 0)])
def test_cross_cache_serves_ragged_sources(lengths):
    source, rows = Rows(lengths), Rows((2, 2, 2))
    k, v, q = torch.randn(source.total, G, K), torch.randn(source.total, G, KV), torch.randn(6, H, K)
    expected = attend_rows(q, FlatKeys(k, v, source), rows, mask=full())
    cache = CrossCache()
    cache.fill(3, k, v, source)
    assert 3 in cache
    later = Rows((2, 2, 2), (5, 5, 5))
    torch.testing.assert_close(attend_rows(q, cache.keys(3), later, mask=full()), expected, atol=1e-5, rtol=1e-5)
    twin = cache.fork()
    cache.filter([1, 1, 0])
    turned = q.view(3, 2, H, K)[[1, 1, 0]].flatten(0, 1)
    z = attend_rows(turned, cache.keys(3), later, mask=full()).view(3, 2, H, KV)
    torch.testing.assert_close(z, expected.view(3, 2, H, KV)[[1, 1, 0]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attend_rows(q, twin.keys(3), later, mask=full()), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="already here"):
        cache.fill(3, k, v, source)


def test_a_cache_keeps_its_dtype_and_refuses_what_does_not_follow():
    cache = Cache(LAYERS, 1, dtype=torch.bfloat16)
    rows, following = Rows((3,)), Rows((1,), (3,))
    cache.begin(rows, "an edit")
    cache.extend(0, torch.randn(3, G, K), torch.randn(3, G, KV), rows)
    cache.advance(rows)
    assert cache.provenance == "an edit"
    assert cache.stores[0].k.dtype == torch.bfloat16
    cache.begin(following, "an edit")
    assert cache.extend(0, torch.randn(1, G, K), torch.randn(1, G, KV), following).k.dtype == torch.float32
    with pytest.raises(ProbeError, match="under edits 'an edit', not 'none'"):
        cache.begin(following, "")
    with pytest.raises(InputError, match=r"holds \[3\] tokens, the rows begin at \[2\]"):
        cache.begin(Rows((1,), (2,)), "an edit")
    cache.trim((0,))
    cache.begin(rows, "")  # nothing is left of the edit
    assert cache.provenance == ""
