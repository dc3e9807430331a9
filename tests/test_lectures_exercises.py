"""Exercises of the lectures that are a few lines of code, done with the library's own parts.

The worked examples are in `test_lectures.py` and `test_lectures_attention.py`; `docs/lectures.toml` says which test,
lab or written answer belongs to which exercise.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from triptych import nn, spec
from triptych.attention import attend, attention_pattern, attention_scores
from triptych.model import Model


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_l0_1_attention_in_a_few_lines() -> None:
    """4 tokens of width 8, in NumPy: its weights sum to 1 in each row, and `attend` gives the same."""
    draw = np.random.default_rng(0)
    x, *maps = draw.standard_normal((4, 8)), *draw.standard_normal((3, 8, 8))
    q, k, v = (x @ w for w in maps)
    weights = softmax(q @ k.T / math.sqrt(8))
    assert weights.sum(-1) == pytest.approx(np.ones(4), abs=1e-12)
    ours = attend(*(torch.from_numpy(one) for one in (q, k, v)))
    assert_close(ours, torch.from_numpy(weights @ v))
    assert (ours - torch.from_numpy(softmax(q @ k.T) @ v)).abs().max() > 0.1  # the division matters


def test_scores_are_not_symmetric_and_values_go_with_their_keys() -> None:
    q, k, v = torch.randn(3, 7, 8)
    scores, order = attention_scores(q[None, None], k[None, None])[0, 0], torch.randperm(7)
    assert (scores - scores.T).abs().max() > 0.1
    assert_close(attend(q, k[order], v[order]), attend(q, k, v))
    assert (attend(q, k[order], v) - attend(q, k, v)).abs().max() > 0.1


def test_l4_1_the_gradient_of_a_lookup_is_a_covariance() -> None:
    """dz/dq = β Σ p_j (v_j - z) k_jᵀ, and nothing is left of it where one weight is 1."""
    q, k, v = torch.randn(5).double(), torch.randn(6, 5).double(), torch.randn(6, 3).double()
    for beta, most in ((1.7, math.inf), (1e4, 1e-12)):

        def lookup(q: Tensor, beta: float = beta) -> Tensor:
            return attend(q, k, v, scale=beta)

        p = (beta * (k @ q)).softmax(0)
        z = p @ v
        expected = beta * (p[:, None, None] * (v - z)[:, :, None] * k[:, None, :]).sum(0)
        found = torch.autograd.functional.jacobian(lookup, q)
        assert_close(found, expected, atol=1e-10, rtol=1e-8)
        assert found.abs().max() <= most


def test_l4_2_the_variance_of_a_dot_product() -> None:
    """d, for entries that need not be normal, and of which only one side has to be uncorrelated."""
    draws, d = 100_000, 24
    q = torch.randint(0, 2, (draws, d)).double() * 2 - 1  # ±1: mean 0, variance 1
    mixed = torch.randn(draws, 1).double().expand(-1, d)  # k: one number, d times; correlated through and through
    for k in (torch.randn(draws, d).double(), mixed):
        assert (q * k).sum(1).var().item() == pytest.approx(d, rel=0.03)
    assert (mixed * torch.randn(draws, 1).double()).sum(1).var().item() > 5 * d  # correlated on both sides
    assert (q * q).sum(1).mean().item() == d  # not independent: it is the mean that grows


def test_l4_3_the_lead_of_the_largest_score() -> None:
    """Half of the rows of 64 normal scores have a lead of 0.282 deviations and more: P(lead > g) is 64 times the
    integral of φ(y) Φ(y - g)^63, where the one with y exceeds all others by g."""
    y = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    normal = torch.distributions.Normal(0.0, 1.0)
    leads = (0.2815, 0.2825, 0.347)
    led = [float(64 * torch.trapezoid(normal.log_prob(y).exp() * normal.cdf(y - g) ** 63, y)) for g in leads]
    assert led[0] > 0.5 > led[1]  # the median to three digits
    assert led[2] < 0.45  # not 1/√(2 ln 64), which is near the mean of the leads: exp is over 2,000 at d 512
    assert math.sqrt(512) * 0.282 == pytest.approx(6.4, abs=0.05)
    assert math.exp(6.4) == pytest.approx(600, rel=0.01)
    text = " ".join((Path(__file__).parents[1] / "docs" / "lectures.toml").read_text("utf-8").split())
    assert "exceeds the second in half of the rows by 0.282 √d and more" in text


def test_l4_4_what_matches_is_not_what_is_fetched() -> None:
    """A B C A: keys hold the token before, values the token itself, so the second A fetches B."""
    a, b, c, nothing = torch.eye(4)
    before, itself = torch.stack([nothing, a, b, c]), torch.stack([a, b, c, a])
    assert_close(attend(a, before, itself, scale=50.0), b)
    assert_close(attend(a, itself, itself, scale=50.0), a)  # one vector for both gives back what was asked for
    pattern = attention_pattern(itself, before, scale=50.0, mask=spec.causal())
    assert pattern[3].argmax() == 1


def one_block(width: int, heads: int, hidden: int, mask: spec.Mask) -> Model:
    """A pre-norm block of attention and SwiGLU under RMSNorm, with random weights."""
    norms = spec.NormsSpec(pre=spec.RMSNormSpec(width=width))
    block = spec.BlockSpec(
        attn=spec.attention(width, heads), mlp=spec.glu(width, hidden, "silu"), attn_norm=norms, mlp_norm=norms
    )
    embed = spec.EmbedSpec(vocab=23, width=width)
    stack = spec.StackSpec(embed=embed, kinds={"self": spec.KindSpec(mask=mask)}, blocks=(block,))
    head = spec.LMHeadSpec(proj=spec.LinearSpec(inputs=width, outputs=23))
    return Model(nn.new(spec.ModelSpec(family="tiny", decoder=stack, head=head, init_std=width**-0.5)))


def test_l0_2_a_block_keeps_the_shape_and_adds_twice() -> None:
    """[1, 16, 256] in and out: in a flat batch of one row, [16, 256].  What it adds is attention's and the MLP's."""
    model = one_block(256, 8, 683, spec.full())
    trace = model.trace([[i % 23 for i in range(16)]], read=["blocks.0.*"])
    read = {site: trace[f"blocks.0.{site}"][0] for site in ("resid_pre", "attn.out", "mlp.out", "resid_post")}
    assert {tuple(value.shape) for value in read.values()} == {(16, 256)}
    assert_close(read["resid_post"], read["resid_pre"] + read["attn.out"] + read["mlp.out"])
    assert trace["blocks.0.mlp.gate"][0].shape == (16, 683)
    hidden = torch.nn.functional.silu(trace["blocks.0.mlp.gate"][0]) * trace["blocks.0.mlp.up"][0]
    assert_close(trace["blocks.0.mlp.act"][0], hidden)


def test_l4_13_a_causal_map_is_lower_triangular() -> None:
    model = one_block(32, 4, 64, spec.causal())
    (pattern,) = model.trace([list(range(10))], read=["blocks.0.attn.pattern"])["blocks.0.attn.pattern"]
    assert pattern.shape == (4, 10, 10)
    assert (pattern.triu(1) == 0).all()
    assert (pattern.tril() > 0).sum() == 4 * 55  # every place at or below the diagonal has some weight
    assert_close(pattern.sum(-1), torch.ones(4, 10))


def test_l4_14_shapes_at_every_step() -> None:
    """D 512, 8 heads, T 16."""
    trace = one_block(512, 8, 1024, spec.causal()).trace([[i % 23 for i in range(16)]], read=["blocks.0.attn.*"])
    found = {site.removeprefix("blocks.0.attn."): tuple(trace[site][0].shape) for site in trace}
    assert found == {
        "in": (16, 512),
        **dict.fromkeys(("q", "k", "v", "q_rot", "k_rot", "k_ctx", "v_ctx", "z"), (16, 8, 64)),
        **dict.fromkeys(("scores", "pattern"), (8, 16, 16)),
        "out": (16, 512),
    }
