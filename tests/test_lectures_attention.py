"""The lectures' worked examples that are attention and nothing else.  Where a lecture's figure is wrong, the test holds
the right one and says so."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from triptych.attention import attend, attend_reference, attention_pattern, attention_scores, sinusoidal
from triptych.spec.masks import causal, full, keys
from triptych.spec.positions import SinusoidalSpec

NEAR = {"atol": 1e-4, "rtol": 0}


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(params=["auto", "flash", "materialized", "reference"])
def path(request):
    return request.param


def test_l0_2_6_attention_of_four_tokens(path):
    x = rows([1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1])
    q = x @ rows([1, 0, 1, 0], [0, 1, 0, 1]).T
    k = x @ rows([0, 1, 1, 0], [1, 0, 0, 1]).T
    v = x @ rows([1, 1, 0, 0], [0, 0, 1, 1]).T
    assert torch.equal(q, rows([2, 0], [0, 2], [1, 1], [1, 1]))
    assert torch.equal(k, torch.ones(4, 2, dtype=torch.float64))
    assert torch.equal(v, rows([1, 1], [1, 1], [2, 0], [0, 2]))
    assert_close(attention_pattern(q, k), torch.full((4, 4), 0.25, dtype=torch.float64))
    assert_close(attend(q, k, v, path=path), torch.ones(4, 2, dtype=torch.float64))


def test_l2_example_1(path):
    q, k, v = torch.eye(2, dtype=torch.float64), rows([1, 0], [1, 1]), rows([1, 2], [3, 4])
    assert_close(attention_pattern(q, k), rows([0.5, 0.5], [0.33024, 0.66976]), **NEAR)
    assert_close(attend(q, k, v, path=path), rows([2, 3], [2.33952, 3.33952]), **NEAR)


def test_l2_example_3_causality_and_padding():
    q = torch.randn(1, 1, 4, 8)
    seen = torch.isfinite(attention_scores(q, q, mask=causal()))[0, 0]
    assert torch.equal(seen, torch.ones(4, 4).tril().bool())
    seen = torch.isfinite(attention_scores(q, q, mask=causal() & keys(3)))[0, 0]
    assert not seen[:, 3].any()  # padding blocks a whole column
    assert torch.equal(seen[:, :3], torch.ones(4, 3).tril().bool())


def test_l2_practice_1_one_dimension(path):
    q, k, v = rows([2], [0], [1]), rows([1], [3], [-1]), rows([10], [20], [30])
    weights = rows([0.017980, 0.981690, 0.000329], [1 / 3, 1 / 3, 1 / 3], [0.117310, 0.866813, 0.015876])
    assert_close(attention_pattern(q, k, scale=1.0), weights, **NEAR)
    assert_close(attend(q, k, v, scale=1.0, path=path), rows([19.82349], [20], [18.98566]), **NEAR)


def test_l4_and_l2_example_2_shapes():
    for t, d, heads, width in ((10, 512, 8, 64), (3, 8, 2, 4)):
        x = torch.randn(t, d)
        split = x.view(t, heads, width).transpose(0, 1)[None]
        assert split.shape == (1, heads, t, width)
        assert attention_scores(split, split).shape == (1, heads, t, t)
        z = attend(split, split, split)
        assert z.transpose(1, 2).flatten(2)[0].shape == (t, d)


def test_l4_exercise_6_and_15_cross_attention_scores():
    assert attention_scores(torch.randn(1, 1, 10, 8), torch.randn(1, 1, 15, 8)).shape == (1, 1, 10, 15)
    alignment = attention_pattern(torch.randn(1, 1, 5, 8), torch.randn(1, 1, 7, 8))
    assert_close(alignment.sum(-1), torch.ones(1, 1, 5))


def test_l4_12_3_toy(path):
    np.random.seed(0)
    q, k, v = (torch.from_numpy(np.random.randn(4, 8)) for _ in range(3))
    weights, out = attention_pattern(q, k), attend(q, k, v, path=path)
    assert_close(weights[0], rows(0.301029, 0.301079, 0.191134, 0.206757), **NEAR)
    assert_close(weights[3], rows(0.819516, 0.085838, 0.022843, 0.071803), **NEAR)
    first = rows(-0.047625, -0.102534, -0.363957, -0.107750, -0.207784, 0.405654, 0.424662, 0.167437)
    assert_close(out[0], first, **NEAR)
    assert_close(attention_pattern(q, k, mask=causal())[1], rows(0.402860, 0.597140, 0, 0), **NEAR)


def test_l1_sat_and_l0_2_6_softmax():
    """Scores of a single query, taken through attention: a key of width 1 under a query of 1 is its own score."""
    one = torch.ones(1, 1, dtype=torch.float64)

    def soft(*scores):
        return attention_pattern(one[0], rows(*scores)[:, None], scale=1.0)

    assert_close(soft(0.8, 4.2, 1.5, 0.6, 3.8), rows(0.018559, 0.556105, 0.037373, 0.015195, 0.372768), **NEAR)
    assert_close(soft(8.3, -1.2, 12.7, 0.4), rows(0.012128, 9.1e-7, 0.987866, 4.5e-6), **NEAR)
    # L1 prints [0, .55, 0, .45] for two equal scores.  Equal scores get equal weights, saturated or not.
    assert_close(soft(8.5, 42, 3.2, 42), rows(0, 0.5, 0, 0.5), **NEAR)
    assert_close(soft(*(x / 8 for x in (8.5, 42, 3.2, 42))), rows(0.0075, 0.4943, 0.0039, 0.4943), **NEAR)


def entropy(weights):
    return -(weights * weights.clamp_min(1e-300).log()).sum(-1).mean().item()


def test_root_d_keeps_softmax_from_being_sharp():
    """L0 4.1 has the direction right: without 1/sqrt(d), softmax is too sharp, not too flat."""
    made = np.random.default_rng(0)
    q, k = (torch.from_numpy(made.standard_normal((64, 64)))[None, None] for _ in range(2))
    assert entropy(attention_pattern(q, k, scale=1.0)) == pytest.approx(0.6108, abs=1e-4)
    assert entropy(attention_pattern(q, k)) == pytest.approx(3.6809, abs=1e-4)
    assert entropy(torch.full((64, 64), 1 / 64)) == pytest.approx(4.1589, abs=1e-4)


def test_l4_exercise_7_heads_share_the_same_work():
    """H heads of width D/H: as many multiplications as one head of width D, H times the score elements."""
    t, d = 10, 512
    elements, products = {}, {}
    for heads in (1, 8):
        q = torch.randn(1, heads, t, d // heads)
        scores = attention_scores(q, q)
        elements[heads] = scores.numel()
        products[heads] = scores.numel() * q.shape[3]
    assert elements == {1: 100, 8: 800}
    assert products[1] == products[8]


def test_l4_exercise_9_attention_grows_with_the_square():
    assert (32_768 / 2_048) ** 2 == 256
    pairs = [attention_scores(torch.zeros(1, 1, t, 2), torch.zeros(1, 1, t, 2)).numel() for t in (8, 128)]
    assert pairs[1] / pairs[0] == 256


def test_l0_exercise_3_agreement_with_pytorch():
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    for mask, is_causal in ((full(), False), (causal(), True)):
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        for path in ("flash", "materialized", "reference"):
            assert_close(attend(q, k, v, mask=mask, path=path), theirs, atol=1e-5, rtol=0)


def test_a_large_negative_number_is_not_a_mask():
    """L4 12.5 says filling with -1e9 gives exactly 0.  For a row with nothing to see it gives uniform weights, and an
    added -inf gives NaN.  Ours gives exactly 0."""
    q, v = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 5)
    hidden = torch.ones(3, 3).tril(-1).bool()  # the first row sees nothing
    scores = q @ q.mT
    filled = scores.masked_fill(~hidden, -1e9).softmax(-1)
    assert_close(filled[0, 0, 0], torch.full((3,), 1 / 3))
    assert scores.masked_fill(~hidden, -torch.inf).softmax(-1)[0, 0, 0].isnan().all()
    assert (attention_pattern(q, q, mask=hidden)[0, 0, 0] == 0).all()
    for path in ("flash", "materialized", "reference"):
        assert (attend(q, q, v, mask=hidden, path=path)[0, 0, 0] == 0).all()


def test_attention_is_permutation_equivariant_without_a_causal_mask():
    """L1 and L2 say invariant.  Outputs move with their tokens; under a causal mask they change."""
    x = torch.randn(1, 1, 9, 8, dtype=torch.float64)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))

    def error(mask):
        moved = attend_reference(x[:, :, order], x[:, :, order], x[:, :, order], mask=mask)
        return (moved - attend_reference(x, x, x, mask=mask)[:, :, order]).abs().max().item()

    assert error(full()) < 1e-14
    assert error(causal()) > 0.1
    assert (attend(x, x, x) - attend(x, x, x)[:, :, order]).abs().max() > 0.1  # so it is not invariant


def test_l0_exercise_7_positions_break_the_symmetry():
    x = torch.randn(9, 8, dtype=torch.float64)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    table = sinusoidal(torch.arange(9), SinusoidalSpec(width=8)).double()

    def layer(x):
        return attend_reference(x, x, x)

    assert_close(layer(x[order]), layer(x)[order])
    assert (layer(x[order] + table) - layer(x + table)[order]).abs().max() > 0.05


def test_l4_exercise_12_identical_tokens():
    """Identical tokens in one bidirectional sequence without positions get identical outputs; it takes a causal mask,
    positions or two contexts to tell them apart."""
    x = torch.randn(5, 8, dtype=torch.float64)
    x[3] = x[1]
    both_ways, masked = attend_reference(x, x, x), attend_reference(x, x, x, mask=causal())
    assert torch.equal(both_ways[1], both_ways[3])
    assert (masked[1] - masked[3]).abs().max() > 0.05


def test_the_mask_may_come_before_or_after_the_scale_but_a_bias_may_not():
    """L1 adds the mask before dividing by sqrt(d), others after: with 0 and -inf they agree, with finite biases they do
    not.  Here the scale comes first."""
    q, k = torch.randn(4, 16, dtype=torch.float64), torch.randn(4, 16, dtype=torch.float64)
    mask = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~torch.ones(4, 4).tril().bool(), -torch.inf)
    bias = torch.randn(4, 4, dtype=torch.float64)

    def before(added):
        return ((q @ k.T + added) / 4).softmax(-1)

    def after(added):
        return (q @ k.T / 4 + added).softmax(-1)

    assert_close(before(mask), after(mask))
    assert (before(bias) - after(bias)).abs().max() > 0.05
    assert_close(attention_pattern(q, k, bias=bias), after(bias))


def test_cross_attention_needs_a_mask_when_sources_are_padded():
    """L1 says it needs none."""
    q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 5, 8)
    longer = torch.cat((k, torch.randn(1, 1, 2, 8)), 2)
    alone = attend(q, k, k)
    assert_close(attend(q, longer, longer, mask=keys(5)), alone)
    assert (attend(q, longer, longer) - alone).abs().max() > 0.01


def test_why_minus_infinity_gives_exactly_zero():
    weights = attention_pattern(torch.randn(4, 8), torch.randn(4, 8), mask=causal())
    assert (weights.triu(1) == 0).all()
    assert_close(weights.sum(-1), torch.ones(4))
