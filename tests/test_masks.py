"""The mask algebra: its definition against plain loops, its simplification and its lowering against its definition."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.attention import mask_lowering, prepare
from triptych.errors import InputError
from triptych.spec.masks import (
    And,
    Full,
    Mask,
    Points,
    block_sparse,
    causal,
    dense,
    full,
    keys,
    prefix,
    same_document,
    window,
)

B, H, T, S = 2, 3, 5, 7


def sees(name: str, i: int, j: int, row: int) -> bool:
    """Each mask once more, in words of its documentation."""
    match name:
        case "full":
            return True
        case "causal":
            return j <= i
        case "window":
            return i - 3 < j <= i
        case "around":
            return i - 3 < j <= i + 2
        case "prefix":
            return j < (2, 4)[row]
        case "keys":
            return j < (6, 3)[row]
        case "blocks":
            a, b = i // 2, j // 2
            return abs(a - b) < 1 or b < 1 or (b + 1) % 3 == 0
        case _:
            raise ValueError(name)


LEAVES: dict[str, Mask] = {
    "full": full(),
    "causal": causal(),
    "window": window(3),
    "around": window(3, ahead=2),
    "prefix": prefix([2, 4]),
    "keys": keys([6, 3]),
    "blocks": block_sparse(2, first=1, every=3),
}


def request(mask, **options):
    q, k = torch.zeros(B, H, T, 4), torch.zeros(B, H, S, 4)
    return prepare(q, k, k, mask=mask, **options)[0]


def lowered(mask, **options):
    seen = request(mask, **options).visible
    return torch.ones(B, 1, T, S, dtype=torch.bool) if seen is None else seen.expand(B, -1, T, S)


@pytest.mark.parametrize("name", LEAVES)
def test_each_mask_is_what_its_words_say(name):
    seen = lowered(LEAVES[name])
    for row, t, j in itertools.product(range(B), range(T), range(S)):
        assert bool(seen[row, 0, t, j]) == sees(name, t + S - T, j, row), (row, t, j)


expressions = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda inner: st.tuples(st.sampled_from("&|"), inner, inner),
    max_leaves=5,
)


def build(tree) -> Mask:
    if isinstance(tree, str):
        return LEAVES[tree]
    a, b = build(tree[1]), build(tree[2])
    return a & b if tree[0] == "&" else a | b


def holds(tree, i, j, row) -> bool:
    if isinstance(tree, str):
        return sees(tree, i, j, row)
    a, b = holds(tree[1], i, j, row), holds(tree[2], i, j, row)
    return (a and b) if tree[0] == "&" else (a or b)


@settings(max_examples=60, deadline=None)
@given(expressions)
def test_expressions_lower_to_their_meaning(tree):
    seen = lowered(build(tree))
    for row, t, j in itertools.product(range(B), range(T), range(S)):
        assert bool(seen[row, 0, t, j]) == holds(tree, t + S - T, j, row)


@settings(max_examples=60, deadline=None)
@given(expressions, st.integers(1, 7), st.booleans())
def test_simplifying_changes_nothing(tree, queries, aligned):
    mask = build(tree)
    simple = mask_lowering.simplify(mask, queries, S, aligned=aligned)
    number = functools.partial(mask_lowering.per_row, B, torch.device("cpu"))
    q = Points(torch.arange(S - queries, S).view(1, 1, -1, 1), per_row=number)
    k = Points(torch.arange(S).view(1, 1, 1, -1), per_row=number)
    shape = (B, 1, queries, S)
    assert torch.equal(mask.visible(q, k).expand(shape), simple.visible(q, k).expand(shape))


@settings(max_examples=60, deadline=None)
@given(expressions)
def test_promises_hold(tree):
    """What a path believes of a mask is true of it."""
    mask = build(tree)
    seen = lowered(mask)
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    if mask_lowering.implies_causal(mask):
        assert not (seen & (distance < 0)).any()
    if (band := mask_lowering.window_of(mask)) is not None:
        assert not (seen & ((distance >= band[0]) | (distance < -band[1]))).any()
    if mask_lowering.only_keys(mask):
        assert (seen == seen[:, :, :1]).all()
    if isinstance(mask, Full):
        assert seen.all()


def test_joining_flattens_and_forgets_units():
    assert (causal() & window(4)) & keys(3) == causal() & (window(4) & keys(3))
    assert causal() & causal() == causal()
    assert full() & causal() == causal()
    assert full() & full() == full()
    assert full() | causal() == full()
    assert isinstance(causal() & window(2), And)
    assert isinstance(causal() | full(), Full)


@pytest.mark.parametrize(
    ("mask", "queries", "simple"),
    [
        (causal() & window(7), 5, causal()),
        (window(9), 5, causal()),
        (causal() & window(6), 5, causal() & window(6)),
        (causal(), 1, full()),
        (window(7, ahead=4), 5, full()),
        (window(7, ahead=3), 5, window(7, ahead=3)),
        (keys([7, 8]), 5, full()),
        (keys([7, 6]), 5, keys([7, 6])),
        (causal() & same_document(), 5, causal() & same_document()),
        (causal() & same_document() & keys(7) & window(8), 1, same_document()),
    ],
)
def test_what_simplifies(mask, queries, simple):
    assert mask_lowering.simplify(mask, queries, 7, aligned=True) == simple


def test_nothing_about_positions_simplifies_where_they_are_given():
    for mask in (causal(), window(99), causal() & window(99)):
        assert mask_lowering.simplify(mask, 1, 7, aligned=False) == mask


def test_empty_slots_are_never_visible():
    positions = torch.tensor([4, -1, 0, 2, -1, 3, 1])
    q_pos = torch.tensor([0, 1, 2, 3, 4])
    seen = lowered(full(), k_pos=positions, q_pos=q_pos)
    assert torch.equal(seen, (positions >= 0).expand(B, 1, T, S))
    seen = lowered(causal(), k_pos=positions, q_pos=q_pos)
    assert torch.equal(seen[0, 0], (positions >= 0) & (positions <= q_pos[:, None]))


def test_documents():
    q_doc, k_doc = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 3, 3]]), torch.tensor([1, 0, 2, 1, 1, 3, 9])
    seen = lowered(same_document(), q_doc=q_doc, k_doc=k_doc)
    assert torch.equal(seen[:, 0], q_doc[:, :, None] == k_doc)
    with pytest.raises(InputError, match=r"same_document\(\) compares documents and none are given"):
        request(same_document(), k_doc=k_doc)
    with pytest.raises(InputError, match=r"same_document\(\) compares documents and none are given"):
        request(same_document() & causal())
    with pytest.raises(InputError, match="the mask does not compare them"):
        request(causal(), q_doc=q_doc, k_doc=k_doc)


def test_two_arrays_are_two_masks():
    """Equal by identity: joining them drops neither."""
    first, second = torch.rand(T, S) > 0.5, torch.rand(T, S) > 0.5
    assert torch.equal(lowered(dense(first) & dense(second))[0, 0], first & second)
    assert torch.equal(lowered(dense(first) | dense(second))[0, 0], first | second)
    assert dense(first) != dense(first)


def test_lengths_are_any_integers(unchecked):
    import numpy as np

    assert prefix(np.int64(2)) == prefix(2)
    assert keys(np.array([1, 2])) == keys([1, 2])
    with pytest.raises(InputError, match=r"triptych\.causal"):
        request("causal")


def test_arrays_are_masks():
    made = torch.rand(B, H, T, S) > 0.5
    assert torch.equal(lowered(made), made)
    assert torch.equal(lowered(made[:, 0]), made[:, :1])
    assert torch.equal(lowered(dense(made[0, 0].numpy()))[1], made[0, :1])
    assert torch.equal(lowered(dense(made[:, 0]) & causal()), made[:, :1] & lowered(causal()))
    with pytest.raises(InputError, match="true where visible"):
        request(made.float())
    with pytest.raises(InputError, match="does not fit"):
        lowered(made[..., :-1])
    with pytest.raises(InputError, match="3 lengths for 2 rows"):
        lowered(keys([1, 2, 3]))


def test_rows_take_their_lengths_along():
    mask = keys([6, 3]) & (causal() | prefix([2, 4])) & dense(torch.rand(B, T, S) > 0.5)
    mask = mask_lowering.adopt(mask, torch.device("cpu"))
    whole = lowered(mask)
    q, k = torch.zeros(1, H, T, 4), torch.zeros(1, H, S, 4)
    one = prepare(q, k, k, mask=mask_lowering.for_rows(mask, [1]))[0].visible
    assert torch.equal(one[0, 0], whole[1, 0])


def test_bad_masks_are_refused():
    for make in (lambda: window(0), lambda: window(3, -1), lambda: block_sparse(0), lambda: block_sparse(2, local=0)):
        with pytest.raises(InputError, match=r"at least 1|back must be"):
            make()


def test_masks_are_not_combined_with_and_or_with_arrays(unchecked: None) -> None:
    """`causal() and window(3)` would be the window alone."""
    with pytest.raises(InputError, match="combine masks with & and"):
        causal() and window(3)
    with pytest.raises(InputError, match=r"not with Tensor; see triptych\.dense"):
        causal() & torch.ones(3, 3, dtype=torch.bool)  # type: ignore[operator]


@pytest.mark.parametrize("back", [0, float("nan"), 2.5])
def test_a_window_is_a_whole_number_of_keys(back: int, unchecked: None) -> None:
    with pytest.raises(
        InputError, match=r"back=.* must be an integer|back must be >= 1 and ahead >= 0, both whole numbers"
    ):
        window(back)


@pytest.mark.parametrize("length", [-1, 1.5, [2, -1], [], torch.tensor(2.5)])
@pytest.mark.parametrize("mask", [prefix, keys])
def test_lengths_are_whole_numbers_from_0(mask, length, unchecked: None) -> None:
    with pytest.raises(InputError, match=r"an integer of at least 0|one length, a whole number from 0"):
        mask(length)
    assert mask([0, 2]).lengths == (0, 2)
