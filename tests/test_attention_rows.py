"""Rows of a flat batch through attention: every way they are laid out gives what each row gives alone."""

import pytest
import torch

from attend_rows import attend_rows
from triptych.attention import (
    FlatKeys,
    Heads,
    Rows,
    SlotKeys,
    alibi_bias,
    attend,
    attend_reference,
    disentangled_bias,
    distance_row,
)
from triptych.errors import InputError
from triptych.spec.masks import Mask, block_sparse, causal, full, keys, prefix, same_document, window

H, G, K, KV = 6, 2, 8, 5
MASKS = {
    "full": full(),
    "causal": causal(),
    "window": causal() & window(3),
    "around": window(3, 2),
    "prefix": causal() | prefix([3, 2, 5, 1]),
    "keys": keys([3, 9, 1, 4]),
    "blocks": causal() & block_sparse(4, first=1),
}
SPAN, TABLE = 5, torch.Generator().manual_seed(4)
PLACED = {name: torch.randn(2 * SPAN, n, K, generator=TABLE) for name, n in (("pos_q", H), ("pos_k", G))}
LENGTHS = [(7, 7, 7, 7), (7, 11, 2, 5), (70, 9, 131, 65), (7, 0, 2, 7), (1, 1, 1, 1)]


def tokens(rows: Rows, *shape: int, seed: int) -> torch.Tensor:
    return torch.randn(rows.total, *shape, generator=torch.Generator().manual_seed(seed))


def alone(q, k, v, q_past, mask, row, bias="none", **options):
    """One row by the definition: q [T, H, K] at q_past.., k [S, G, K] at 0.."""
    q_pos, k_pos = torch.arange(len(q)) + q_past, torch.arange(len(k))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    placed, content = BIASES[bias]
    if placed is not None:
        options["bias"] = placed(q_pos, k_pos) if content is None else content(q, k, placed(q_pos, k_pos))
    one = single(mask, row)
    return attend_reference(q, k, v, mask=one, q_pos=q_pos, k_pos=k_pos, **options)[0].transpose(0, 1)


def by_places(q_pos, k_pos):
    return alibi_bias(H, q_pos, k_pos)


def distances(q_pos, k_pos):
    return distance_row(q_pos[..., :, None] - k_pos[..., None, :], span=SPAN)


def by_content(q, k, row):
    return disentangled_bias(q, k, row, **PLACED)


BIASES = {"none": (None, None), "places": (by_places, None), "content": (distances, by_content)}


def single(mask: Mask, row: int) -> Mask:
    """The mask of one row, written out."""
    if mask == MASKS["prefix"]:
        return causal() | prefix([3, 2, 5, 1][row])
    return keys([3, 9, 1, 4][row]) if mask == MASKS["keys"] else mask


def slots(rows: Rows, capacity: int, seed: int):
    """Keys and values of as many slots as the rows name."""
    random, count = torch.Generator().manual_seed(seed), max(rows.slots) + 1
    return torch.randn(count, G, capacity, K, generator=random), torch.randn(count, G, capacity, KV, generator=random)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("bias", BIASES)
def test_self_attention_of_rows_is_each_row_alone(name, lengths, bias):
    rows, mask = Rows(lengths), MASKS[name]
    q, k, v = tokens(rows, H, K, seed=1), tokens(rows, G, K, seed=2), tokens(rows, G, KV, seed=3)
    placed, content = BIASES[bias]
    z = attend_rows(q, k, v, rows, FlatKeys(rows), mask=mask, bias=placed, content=content)
    for row, (zb, qb, kb, vb) in enumerate(zip(*(rows.split(x) for x in (z, q, k, v)), strict=True)):
        torch.testing.assert_close(zb, alone(qb, kb, vb, 0, mask, row, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_cross_attention_over_ragged_sources(lengths):
    rows, source = Rows((3, 3, 3, 3)), Rows(lengths)
    q, k, v = tokens(rows, H, K, seed=1), tokens(source, G, K, seed=2), tokens(source, G, KV, seed=3)
    z = attend_rows(q, k, v, rows, FlatKeys(source), mask=full())
    for row, (zb, qb, kb, vb) in enumerate(
        zip(rows.split(z), rows.split(q), source.split(k), source.split(v), strict=True)
    ):
        torch.testing.assert_close(zb, alone(qb, kb, vb, 0, full(), row), atol=1e-5, rtol=1e-5)
    assert all((rows.split(z)[row] == 0).all() for row, length in enumerate(lengths) if length == 0)


def test_targets_and_sources_of_many_lengths_run_in_few_calls():
    """Where all queries of a row see all keys, rows of similar lengths on both sides are padded together."""
    rows, source = Rows((3, 40, 17, 5, 80, 9, 12)), Rows((7, 35, 20, 0, 90, 31, 2))
    leaves = [
        tokens(of, *shape, seed=i).requires_grad_()
        for i, (of, *shape) in enumerate([(rows, H, K), (source, G, K), (source, G, KV)])
    ]
    z = attend_rows(*leaves, rows, FlatKeys(source), mask=full())
    parts = [of.split(x) for of, x in zip((rows, source, source), leaves, strict=True)]
    wanted = torch.cat([alone(*(part[row] for part in parts), 0, full(), row) for row in range(len(rows))])
    torch.testing.assert_close(z, wanted, atol=1e-5, rtol=1e-5)
    got, right = (torch.autograd.grad(out.square().sum(), leaves) for out in (z, wanted))
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    heads = Heads(heads=H, groups=G, width=K, value_width=KV, dtype=z.dtype, device=z.device)
    assert len(FlatKeys(source).plan(rows, full(), heads).pieces) == 3
    bias = BIASES["places"][0]  # positions matter to it: rows of one shape run together, and no others
    assert len(FlatKeys(source).plan(rows, full(), heads, bias=bias).pieces) == 7


@pytest.mark.parametrize("mask", [causal(), full()], ids=["causal", "full"])
def test_rows_are_gathered_once_for_all_calls(mask):
    """The gradient of a gather is as large as the batch, so that one for each call would cost calls times tokens."""
    rows = Rows((*range(60, 90), 200, 300))
    leaves = [tokens(rows, n, w, seed=i).requires_grad_() for i, (n, w) in enumerate([(H, K), (G, K), (G, KV)])]
    z = attend_rows(*leaves, rows, FlatKeys(rows), mask=mask)
    seen, waiting, whole = set(), [z.grad_fn], 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        whole += node.name().startswith("IndexSelect") and any(
            after is not None and hasattr(after, "variable") for after, _ in node.next_functions
        )
        waiting += [after for after, _ in node.next_functions]
    assert whole == 3  # queries, keys and values


@pytest.mark.parametrize("name", ["full", "causal", "window", "prefix", "blocks"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("past", [(4, 4, 4, 4), (4, 9, 0, 2)])
@pytest.mark.parametrize("where", [(), (1, 2, 3, 4), (5, 0, 2, 1)])
@pytest.mark.parametrize("bias", ["places", "content"])
def test_slots_hold_rows_of_any_length(name, lengths, past, where, bias):
    """Rows live in slots side by side, or in any order."""
    rows, mask = Rows(lengths, past, where), MASKS[name]
    k, v = slots(rows, max(23, *rows.ends), seed=5)
    q = tokens(rows, H, K, seed=1)
    placed, content = BIASES[bias]
    z = attend_rows(q, k, v, rows, SlotKeys(rows.ends, rows.slots), mask=mask, bias=placed, content=content)
    for row, (zb, qb) in enumerate(zip(rows.split(z), rows.split(q), strict=True)):
        kb, vb = (x[rows.slots[row], :, : rows.ends[row]].transpose(0, 1) for x in (k, v))
        torch.testing.assert_close(zb, alone(qb, kb, vb, past[row], mask, row, bias), atol=1e-5, rtol=1e-5)


def test_long_ragged_chunks_run_by_shape():
    """So that no mask of all pairs is built; each row is what it is alone."""
    rows = Rows((300, 200, 300), (200, 600, 200))
    k, v = slots(rows, 800, seed=5)
    q = tokens(rows, H, K, seed=1)
    heads = Heads(heads=H, groups=G, width=K, value_width=KV, dtype=q.dtype, device=q.device)
    plan = SlotKeys(rows.ends, rows.slots).plan(rows, causal(), heads)
    assert [piece.request.rows for piece in plan.pieces] == [2, 1]
    z = plan.run(q, k, v)
    for row, (zb, qb) in enumerate(zip(rows.split(z), rows.split(q), strict=True)):
        kb, vb = (x[row, :, : rows.ends[row]].transpose(0, 1) for x in (k, v))
        torch.testing.assert_close(zb, alone(qb, kb, vb, rows.past[row], causal(), row), atol=1e-5, rtol=1e-5)


def test_slots_with_positions_in_any_order():
    rows = Rows((2, 2), (5, 3))
    order = torch.tensor([[6, 0, 3, 1, 2, 5, 4, -1], [4, -1, 0, -1, 2, 1, 3, -1]])
    k, v = slots(rows, 8, seed=5)
    held = SlotKeys((8, 8), (0, 1), order)
    q = tokens(rows, H, K, seed=1)
    seen = []
    z = attend_rows(q, k, v, rows, held, mask=causal() & window(4))
    hooked = attend_rows(
        q, k, v, rows, held, mask=causal() & window(4), hook=lambda n, x, r: seen.append((n, x.shape, r)) or x
    )
    torch.testing.assert_close(z, hooked, atol=1e-5, rtol=1e-5)
    assert [s for s in seen if s[0] == "pattern"] == [("pattern", (H, 2, 7), 0), ("pattern", (H, 2, 5), 1)]
    for row, (zb, qb) in enumerate(zip(rows.split(z), rows.split(q), strict=True)):
        there = order[row].argsort()[(order[row] < 0).sum() :]
        kb, vb = (x[row, :, there].transpose(0, 1) for x in (k, v))
        one = alone(qb, kb, vb, rows.past[row], causal() & window(4), row)
        torch.testing.assert_close(zb, one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [(7, 7), (7, 11)])
def test_hook_reads_and_edits_row_by_row(lengths):
    rows = Rows(lengths)
    q, k, v = tokens(rows, H, K, seed=1), tokens(rows, G, K, seed=2), tokens(rows, G, KV, seed=3)
    seen = {}

    def first_key_only(name, x, row):
        seen[name, row] = x
        return torch.zeros_like(x).index_fill(2, torch.tensor([0]), 1.0) if name == "pattern" else x

    plain = attend_rows(q, k, v, rows, FlatKeys(rows), mask=causal())
    read = attend_rows(q, k, v, rows, FlatKeys(rows), mask=causal(), hook=lambda name, x, row: x)
    edited = attend_rows(q, k, v, rows, FlatKeys(rows), mask=causal(), hook=first_key_only)
    torch.testing.assert_close(plain, read, atol=1e-5, rtol=1e-5)
    for row, zb in enumerate(rows.split(edited)):
        first = rows.split(v)[row][0].repeat_interleave(H // G, 0)
        torch.testing.assert_close(zb, first.expand_as(zb))
        assert seen["scores", row].shape == (H, lengths[row], lengths[row])
        assert (seen["scores", row].triu(1) == -torch.inf).sum() == H * lengths[row] * (lengths[row] - 1) / 2


@pytest.mark.parametrize("lengths", [(7, 7, 7), (7, 11, 5), (67, 71, 5)])
def test_a_changed_future_token_leaves_the_past_bit_identical(lengths):
    rows = Rows(lengths)
    q, k, v = tokens(rows, H, K, seed=1), tokens(rows, G, K, seed=2), tokens(rows, G, KV, seed=3)
    z = attend_rows(q, k, v, rows, FlatKeys(rows), mask=causal())
    for x in (q, k, v):
        x[rows.starts[1] + 4] += 1.0
    again = attend_rows(q, k, v, rows, FlatKeys(rows), mask=causal())
    past = torch.ones(rows.total, dtype=torch.bool)
    past[rows.starts[1] + 4 : rows.starts[2]] = False
    assert torch.equal(z[past], again[past])
    assert not torch.isclose(z[~past], again[~past]).all(-1).all(-1).any()


def test_gradients_reach_every_row():
    for lengths in [(7, 7), (7, 3)]:
        rows = Rows(lengths)
        leaves = [tokens(rows, n, w, seed=i).requires_grad_() for i, (n, w) in enumerate([(H, K), (G, K), (G, KV)])]
        for mask in (causal(), full()):
            z = attend_rows(*leaves, rows, FlatKeys(rows), mask=mask)
            got = torch.autograd.grad(z.square().sum(), leaves)
            parts = [rows.split(x) for x in leaves]
            ref = sum(alone(*(p[r] for p in parts), 0, mask, r).square().sum() for r in range(2))
            for a, b in zip(got, torch.autograd.grad(ref, leaves), strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def planned(rows, keys, mask=None):
    heads = Heads(heads=H, groups=G, width=K, value_width=K, dtype=torch.float32, device=torch.device("cpu"))
    return keys.plan(rows, causal() if mask is None else mask, heads)


def test_equal_rows_are_views():
    rows = Rows((5, 5))
    q, k, v = tokens(rows, H, K, seed=1), tokens(rows, G, K, seed=2), tokens(rows, G, K, seed=3)
    (piece,) = planned(rows, FlatKeys(rows)).pieces
    assert piece.request.aligned
    assert piece.queries.batch(q).data_ptr() == q.data_ptr()
    assert [x.data_ptr() for x in piece.keys.batch(k, v)] == [k.data_ptr(), v.data_ptr()]


def test_decode_of_even_rows_needs_no_mask():
    even, ragged, moved = Rows((1, 1), (6, 6)), Rows((1, 1), (6, 3)), Rows((1, 1), (6, 6), (4, 5))
    (piece,) = planned(even, SlotKeys(even.ends, even.slots)).pieces
    assert piece.request.visible is None
    (piece,) = planned(ragged, SlotKeys(ragged.ends, ragged.slots)).pieces
    assert piece.request.visible.shape == (2, 1, 1, 7)
    assert piece.request.q_pos is None
    (piece,) = planned(moved, SlotKeys(moved.ends, moved.slots)).pieces
    k, v = slots(moved, 16, 2)
    assert piece.keys.batch(k, v)[0].data_ptr() == k[4].data_ptr()  # neighbouring slots are a view


def test_packed_rows_see_their_own_document():
    rows = Rows((5, 4), documents=torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3]))
    q, k, v = tokens(rows, H, K, seed=1), tokens(rows, G, K, seed=2), tokens(rows, G, KV, seed=3)
    for mask in (causal() & same_document(), same_document()):
        z = attend_rows(q, k, v, rows, FlatKeys(rows), mask=mask)
        inner = Rows((2, 3, 1, 3))
        expected = attend_rows(q, k, v, inner, FlatKeys(inner), mask=causal() if mask != same_document() else full())
        torch.testing.assert_close(z, expected, atol=1e-5, rtol=1e-5)
        hooked = attend_rows(q, k, v, rows, FlatKeys(rows), mask=mask, hook=lambda name, x, row: x)
        torch.testing.assert_close(hooked, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="the batch has no documents"):
        planned(Rows((5, 4)), FlatKeys(Rows((5, 4))), same_document())
    with pytest.raises(InputError, match="documents are not kept in a cache"):
        planned(rows, SlotKeys((5, 4), (0, 1)), same_document())
    with pytest.raises(InputError, match="one for each of 9 tokens"):
        Rows((5, 4), documents=torch.zeros(8, dtype=torch.long))


def test_rows_know_their_places():
    rows = Rows((3, 0, 2), (5, 9, 0))
    assert (rows.starts, rows.total, rows.ends, rows.equal) == ((0, 3, 3), 5, (8, 9, 2), False)
    assert rows.positions().tolist() == [5, 6, 7, 0, 1]
    assert rows.row_of().tolist() == [0, 0, 0, 2, 2]
    with torch.inference_mode():
        made = Rows((3, 2)).positions()
    assert not made.is_inference()
    with pytest.raises(InputError, match="3 rows but 2"):
        Rows((1, 2, 3), (0, 0))
    assert rows.take([2, 0]) == Rows((2, 3), (0, 5), (2, 0))
    assert rows.tokens([2, 0]).tolist() == [3, 4, 0, 1, 2]


def test_nothing_at_all():
    empty = Rows(())
    assert attend_rows(
        torch.zeros(0, H, K), torch.zeros(0, G, K), torch.zeros(0, G, KV), empty, FlatKeys(empty), mask=causal()
    ).shape == (0, H, KV)
    hollow = Rows((0, 0))
    assert attend_rows(
        torch.zeros(0, H, K), torch.zeros(0, G, K), torch.zeros(0, G, KV), hollow, FlatKeys(hollow), mask=causal()
    ).shape == (0, H, KV)
    assert attend(torch.zeros(2, H, 3, K), torch.zeros(2, G, 0, K), torch.zeros(2, G, 0, KV)).tolist() == (
        torch.zeros(2, H, 3, KV).tolist()
    )


def test_refusals():
    rows = Rows((3, 2))
    q, k, v = tokens(rows, H, K, seed=1), tokens(rows, G, K, seed=2), tokens(rows, G, KV, seed=3)
    with pytest.raises(InputError, match="5 queries, but the rows have 6 tokens"):
        attend_rows(q, k, v, Rows((6,)), FlatKeys(rows), mask=causal())
    with pytest.raises(InputError, match="queries in 1 rows, keys in 2 rows"):
        attend_rows(q, k, v, Rows((5,)), FlatKeys(rows), mask=causal())
