"""Cached attention is attention: in one piece, in chunks, and token by token, rows of any length."""

import gc
import mmap
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attend_rows import attend_rows
from triptych.attention import Cache, CachedLayer, CrossCache, FlatKeys, NullCache, Rows, SlotKeys
from triptych.attention.layer_cache import LEAST_IN_HUGE_PAGES
from triptych.errors import InputError, ProbeError
from triptych.native.huge_pages import PAGE
from triptych.spec.masks import causal, full, window

H, G, K, KV, W = 6, 2, 8, 5, 4
LAYERS = [
    CachedLayer(groups=G, width=K, value_width=KV),
    CachedLayer(groups=G, width=K, value_width=KV, window=W),
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
        step = NullCache().begin(rows, "").of(layer)
        outs.append(rows.split(attend_rows(q, *step.extend(layer, k, v), rows, step.layout, mask=mask)))
    return outs


def step(cache, parts, lengths, given, slots=(), provenance=""):
    """One step of every layer over the next `lengths[b]` tokens of each row; appends the outputs to `given`."""
    slots = slots or tuple(range(len(lengths)))
    rows = Rows(tuple(lengths), tuple(cache.lengths[slot] for slot in slots), slots)
    opened = cache.begin(rows, provenance)
    for layer, mask in enumerate(MASKS):
        q, k, v = (
            torch.cat([x[row][a : a + n] for row, (a, n) in enumerate(zip(rows.past, lengths, strict=True))])
            for x in parts[layer]
        )
        mine = opened.of(layer)
        z = attend_rows(q, *mine.extend(layer, k, v), rows, mine.layout, mask=mask)
        for row, out in enumerate(rows.split(z)):
            given[layer][row].append(out)
    opened.finish()


def compare(given, expected):
    for layer, rows in enumerate(expected):
        for row, out in enumerate(rows):
            torch.testing.assert_close(torch.cat(given[layer][row]), out, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 19), min_size=1, max_size=3),
    cuts=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), min_size=0, max_size=4),
    how=st.sampled_from([{"page": 1}, {"page": 3}, {"page": 64}, {"page": None}, {"page": None, "capacity": 1}]),
    order=st.permutations(range(4)),
)
def test_any_cut_into_chunks_is_one_forward(lengths, cuts, how, order):
    """In slots of any order, whatever stands in the slots between; in pages, and in a strip for each slot."""
    cache = Cache(LAYERS, 4, **how)
    slots = tuple(order[: len(lengths)])
    parts = [make(lengths, layer) for layer in range(2)]
    given = [[[] for _ in lengths] for _ in LAYERS]
    for cut in cuts:
        past = [cache.lengths[slot] for slot in slots]
        step(cache, parts, [min(c, n - held) for c, n, held in zip(cut, lengths, past, strict=False)], given, slots)
    while (past := [cache.lengths[slot] for slot in slots]) != lengths:  # decode what is left, one token a row
        step(cache, parts, [min(1, n - held) for n, held in zip(lengths, past, strict=True)], given, slots)
    compare(given, uncached(lengths))


def test_a_wrong_ring_shows():
    """Negative control: a ring that forgets one token too many changes the outputs."""
    lengths = [13]
    cache = Cache([LAYERS[0], CachedLayer(groups=G, width=K, value_width=KV, window=W - 1)], 1)
    given = [[[]], [[]]]
    for _ in range(13):
        step(cache, [make(lengths, layer) for layer in range(2)], [1], given)
    with pytest.raises(AssertionError):
        compare(given, uncached(lengths))


def test_prefill_gives_the_fresh_tensors_back():
    cache, rows = Cache(LAYERS, 2), Rows((3, 5))
    k, v = torch.randn(8, G, K, requires_grad=True), torch.randn(8, G, KV)
    opened = cache.begin(rows, "")
    assert isinstance(opened.of(0).layout, FlatKeys)
    assert opened.of(0).extend(0, k, v)[0] is k
    assert cache.lengths == [0, 0]
    opened.finish()
    assert cache.lengths == [3, 5]
    opened = cache.begin(Rows((1, 1), (3, 5)), "")
    layout = opened.of(0).layout
    assert isinstance(layout, SlotKeys)
    assert layout.lengths == (4, 6)
    again, _ = opened.of(0).extend(0, k[:2], v[:2])
    torch.testing.assert_close(again[1, :, :5].transpose(0, 1), k[3:].detach())


def test_without_pages_writes_are_in_place_and_capacity_doubles():
    cache = Cache(LAYERS[:1], 1, page=None, capacity=4)
    place = cache.stores[0].k.data_ptr()

    def write(past):
        opened = cache.begin(Rows((1,), (past,)), "")
        opened.of(0).extend(0, torch.ones(1, G, K), torch.ones(1, G, KV))
        opened.finish()

    for past in range(4):
        write(past)
    assert cache.stores[0].k.data_ptr() == place
    assert cache.nbytes == 4 * G * (K + KV) * 4
    write(4)
    assert cache.stores[0].k.shape[2] == 8
    assert (cache.stores[0].k[:, :, :5] == 1).all()


def test_trim_and_go_on():
    lengths = [11, 9]
    cache = Cache(LAYERS, 2)
    wrong = [make(lengths, layer, seed=7) for layer in range(2)]
    right = [make(lengths, layer) for layer in range(2)]
    given = [[[], []], [[], []]]
    step(cache, right, [7, 5], given)
    step(cache, wrong, [1, 1], [[[], []], [[], []]])
    cache.trim(0, 7)
    cache.trim(1, 5)
    while cache.lengths != lengths:
        step(cache, right, [min(1, n - held) for n, held in zip(lengths, cache.lengths, strict=True)], given)
    compare(given, uncached(lengths))


def test_a_window_layer_refuses_to_go_back_too_far_but_may_start_again():
    lengths = [11, 9]
    parts = [make(lengths, layer) for layer in range(2)]
    cache = Cache(LAYERS, 2)
    step(cache, parts, [9, 9], [[[], []], [[], []]])
    with pytest.raises(InputError, match="cannot trim slot 0 from 9 to 7 tokens: a layer with a window of 4"):
        cache.trim(0, 7)
    assert cache.lengths == [9, 9]
    cache.trim(0, 0)
    cache.trim(1, 0)
    given = [[[], []], [[], []]]
    step(cache, parts, [7, 5], given)
    step(cache, parts, [4, 4], given)
    compare(given, uncached(lengths))
    with pytest.raises(InputError, match="cannot trim slot 0 to 12 tokens: it holds 11"):
        cache.trim(0, 12)


def test_slots_are_added_freed_and_given_out_again():
    lengths = [11, 9, 7]
    parts = [make(lengths, layer) for layer in range(2)]
    cache = Cache(LAYERS)
    assert cache.add(2) == [0, 1]
    given = [[[], [], []] for _ in LAYERS]
    two = [[x[:2] for x in part] for part in parts]
    step(cache, two, [6, 5], given, (0, 1))
    cache.free([0])
    assert cache.add(2) == [0, 2]
    assert cache.lengths == [0, 5, 0]
    freed = cache.pages.free[0][0]
    assert not any(x.any() for x in cache.stores[0].pages(freed, freed + 1))  # a hidden key must be finite
    assert not cache.stores[1].k[0].any()
    third = [[x[2:] for x in part] for part in parts]
    rest = [[[]] for _ in LAYERS]
    step(cache, third, [7], rest, (2,))
    compare(rest, [[rows[2]] for rows in uncached(lengths)])
    mixed = [[[], []] for _ in LAYERS]  # one row goes on while another begins, in any order
    step(cache, [[[x[0], x[1]] for x in part] for part in parts], [3, 4], mixed, (0, 1))
    expected = uncached(lengths)
    for layer in range(2):
        torch.testing.assert_close(mixed[layer][0][0], expected[layer][0][:3], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mixed[layer][1][0], expected[layer][1][5:], atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="slot 3 is not in use"):
        cache.free([3])
    cache.free([1])
    with pytest.raises(InputError, match="slot 1 is not in use"):
        cache.free([1])


@pytest.mark.parametrize("page", [None, 1, 3, 64])
def test_copies_are_independent(page):
    lengths = [11, 9, 7]
    parts = [make(lengths, layer) for layer in range(2)]
    cache = Cache(LAYERS, 3, page=page)
    step(cache, parts, [6, 5, 4], [[[], [], []] for _ in LAYERS])
    order = [2, 0, 0]
    cache.copy(order, [0, 1, 2])  # read before written: slot 0 moves to 1 and 2, and takes 2
    assert cache.lengths == [4, 6, 6]
    turned = [[[x[row] for row in order] for x in parts[layer]] for layer in range(2)]
    given = [[[], [], []] for _ in LAYERS]
    step(cache, turned, [3, 5, 5], given)
    expected = uncached(lengths)
    for layer in range(2):
        for out, row, first in zip(given[layer], order, (4, 6, 6), strict=True):
            torch.testing.assert_close(out[0], expected[layer][row][first:], atol=1e-5, rtol=1e-5)


def test_without_pages_a_copy_leaves_nothing_of_a_longer_row():
    cache = Cache([LAYERS[0]], 2, page=None)
    (store,) = cache.stores
    cache.begin(Rows((2, 6)), "").finish()
    store.k.fill_(1.0), store.v.fill_(1.0)
    cache.copy([0], [1])
    assert cache.lengths == [2, 2]
    assert store.k[1, :, :2].eq(1).all()
    assert not store.k[1, :, 2:6].any()
    assert not store.v[1, :, 2:6].any()


@pytest.mark.parametrize("lengths", [(7, 7, 7), (7, 3, 1)])
def test_cross_cache_serves_ragged_sources(lengths):
    source, rows = Rows(lengths), Rows((2, 2, 2))
    memory, q = torch.randn(source.total, 3), torch.randn(6, H, K)
    w_k, w_v = torch.randn(3, G * K), torch.randn(3, G * KV)
    calls = []

    def project(x, of):
        calls.append(of)
        return (x @ w_k).view(-1, G, K), (x @ w_v).view(-1, G, KV)

    k, v = project(memory, source)
    expected = attend_rows(q, k, v, rows, FlatKeys(source), mask=full())
    cache = CrossCache(LAYERS, torch.float32, "cpu")
    cache.fill(memory, source)
    for later in (rows, Rows((2, 2, 2), (5, 5, 5))):
        for layer in range(2):
            z = attend_rows(q, *cache.keys(layer, project), later, cache.layout(later), mask=full())
            torch.testing.assert_close(z, expected, atol=1e-5, rtol=1e-5)
    assert len(calls) == 3  # each layer projected once
    cache.share([1, 1, 0], [0, 1, 2])
    turned = q.view(3, 2, H, K)[[1, 1, 0]].flatten(0, 1)
    z = attend_rows(turned, *cache.keys(0, project), rows, cache.layout(rows), mask=full()).view(3, 2, H, KV)
    torch.testing.assert_close(z, expected.view(3, 2, H, KV)[[1, 1, 0]], atol=1e-5, rtol=1e-5)
    cache.fill(memory[:2], Rows((2,), slots=(1,)))  # a source of its own, not in the place that slot 0 reads
    cache.keys(1, project)
    assert len(cache.keys(0, project)[0]) == 3  # no source was copied
    z = attend_rows(turned, *cache.keys(0, project), rows, cache.layout(rows), mask=full()).view(3, 2, H, KV)
    torch.testing.assert_close(z[[0, 2]], expected.view(3, 2, H, KV)[[1, 0]], atol=1e-5, rtol=1e-5)
    cache.free([1])
    with pytest.raises(InputError, match=r"slots \[1\] have no source"):
        cache.layout(rows)


def test_a_cache_refuses_what_does_not_follow():
    cache = Cache(LAYERS, 1)
    rows, following = Rows((3,)), Rows((1,), (3,))
    cache.begin(rows, "an edit").finish()
    assert cache.provenance == ["an edit"]
    cache.begin(following, "an edit")
    with pytest.raises(ProbeError, match="under edits 'an edit', not 'none'"):
        cache.begin(following, "")
    with pytest.raises(InputError, match="slot 0 holds 3 tokens, its row begins at 2"):
        cache.begin(Rows((1,), (2,)), "an edit")
    with pytest.raises(InputError, match="slot 4, but the cache has 1 slots"):
        cache.begin(Rows((1,), (0,), (4,)), "")
    with pytest.raises(InputError, match="two rows live in one cache slot"):
        Cache(LAYERS, 2).begin(Rows((1, 1), (0, 0), (1, 1)), "")
    cache.trim(0, 0)
    cache.begin(rows, "").finish()  # nothing is left of the edit
    assert cache.provenance == [""]


@pytest.mark.parametrize("window", [None, 7])
def test_large_stores_share_huge_pages_and_keep_what_they_hold(window: int | None) -> None:
    layers = [CachedLayer(groups=2, width=32, value_width=16) for _ in range(3)]
    layers.append(CachedLayer(groups=2, width=32, value_width=16, window=window))
    small, large = Cache(layers, page=None, capacity=16), Cache(layers, page=None, capacity=8192, slots=1)
    assert small.nbytes < LEAST_IN_HUGE_PAGES < large.nbytes
    for cache in (small, large):
        for number, store in enumerate(cache.stores):
            store.k.fill_(number + 1)
            store.v.fill_(-number - 1)
        before = [(store.k.clone(), store.v.clone()) for store in cache.stores]
        places = cache.capacity
        cache.ensure_capacity(2 * places)
        cache.add(2)
        for number, (store, (k, v)) in enumerate(zip(cache.stores, before, strict=True)):
            held = (number + 1) * k.numel(), -(number + 1) * v.numel()
            assert (float(store.k.sum(dtype=torch.float64)), float(store.v.sum(dtype=torch.float64))) == held
            assert torch.equal(store.k[: len(k), :, : k.shape[2]], k)
            assert torch.equal(store.v[: len(v), :, : v.shape[2]], v)
    first, second, third = large.stores[:3]
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert first.k.data_ptr() % PAGE == 0
        assert second.k.data_ptr() == first.v.data_ptr() + first.v.nbytes
        assert third.v.data_ptr() == third.k.data_ptr() + third.k.nbytes


def test_a_cache_that_ran_is_freed_without_the_garbage_collector():
    cache = Cache(LAYERS, slots=1)
    q, k, v = (x[0] for x in make([3], 0))
    gc.collect()
    gc.disable()
    try:
        step = cache.begin(Rows((3,)), "")
        keys = step.of(0)
        attend_rows(q, *keys.extend(0, k, v), Rows((3,)), keys.layout, mask=MASKS[0])
        step.finish()
        freed = weakref.ref(cache)
        del cache, step, keys
        assert freed() is None
    finally:
        gc.enable()
