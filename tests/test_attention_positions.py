"""Position arithmetic against transformers, and against properties that hold without it."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from triptych import attention, nn, spec
from triptych.errors import InputError
from triptych.spec.positions import NTK, Interpolate, Llama3, LongRope, RopeSpec, SinusoidalSpec, YaRN

WIDTH, HEADS, ORIGINAL = 48, 3, 512
SHORT = tuple(1 + i / 50 for i in range(WIDTH // 2))
LONG = tuple(2 + i / 7 for i in range(WIDTH // 2))


def oracle(kind, theta=10_000.0, longest=4096, length=None, **parameters):
    config = LlamaConfig(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        head_dim=WIDTH,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    if kind == "default":
        return 1.0 / theta ** (torch.arange(0, WIDTH, 2).float() / WIDTH), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


def scaled(kind, scaling, **parameters):
    """A scaling, and what a configuration calls it: one with an original length has the same one."""
    if scaling is Interpolate:
        return scaling(**parameters), {"kind": kind, **parameters}
    theirs = {"kind": kind, "original_max_position_embeddings": ORIGINAL, **parameters}
    return scaling(original_length=ORIGINAL, **parameters), theirs


CASES = {
    "none": (None, {"kind": "default"}),
    "linear": scaled("linear", Interpolate, factor=2.5),
    "llama3": scaled("llama3", Llama3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": scaled("yarn", YaRN, factor=8.0),
    "yarn not truncated": scaled("yarn", YaRN, factor=8.0, truncate=False, beta_fast=20.0, beta_slow=2.0),
    "yarn with mscale": scaled("yarn", YaRN, factor=8.0, mscale=0.7, mscale_all_dim=1.3),
    "yarn with a given factor": scaled("yarn", YaRN, factor=8.0, attention_factor=1.1),
}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_factor_are_those_of_transformers(name, theta):
    scaling, theirs = CASES[name]
    spec = RopeSpec(width=WIDTH, theta=theta, scaling=scaling)
    frequencies, factor = oracle(theta=theta, **theirs)
    torch.testing.assert_close(attention.inverse_frequencies(spec).float(), frequencies, atol=0, rtol=1e-6)
    assert attention.attention_factor(spec) == pytest.approx(factor, rel=1e-6)
    if scaling is not None:  # negative control: every scaling changes something
        plain = attention.inverse_frequencies(RopeSpec(width=WIDTH, theta=theta)).float()
        assert ((plain - frequencies).abs() / plain).max() > 0.1


@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1])
@pytest.mark.parametrize("given", [None, 1.25])
def test_longrope_is_that_of_transformers(length, given):
    scaling = LongRope(short=SHORT, long=LONG, original_length=ORIGINAL, max_length=4096, attention_factor=given)
    spec = RopeSpec(width=WIDTH, scaling=scaling)
    extra = {} if given is None else {"attention_factor": given}
    frequencies, factor = oracle(
        "longrope",
        length=length,
        short_factor=list(SHORT),
        long_factor=list(LONG),
        original_max_position_embeddings=ORIGINAL,
        factor=4096 / ORIGINAL,
        **extra,
    )
    torch.testing.assert_close(attention.inverse_frequencies(spec, length).float(), frequencies, atol=0, rtol=1e-6)
    assert attention.attention_factor(spec) == pytest.approx(factor, rel=1e-6)
    with pytest.raises(InputError, match="length"):
        attention.inverse_frequencies(spec)


def test_longrope_takes_a_length_for_each_token():
    spec = RopeSpec(width=WIDTH, scaling=LongRope(short=SHORT, long=LONG, original_length=ORIGINAL, max_length=4096))
    positions, lengths = torch.tensor([0, 9, 900, 3]), torch.tensor([10, 10, 901, 901])
    cos, sin = attention.rope_angles(spec, positions, lengths)
    for i, length in enumerate(lengths.tolist()):
        one = attention.rope_angles(spec, positions[i : i + 1], length)
        assert torch.equal(cos[i], one[0][0])
        assert torch.equal(sin[i], one[1][0])
    assert not torch.equal(cos[3], attention.rope_angles(spec, positions[3:], 10)[0][0])


def test_ntk_stretches_the_slowest_pair_by_its_factor_and_keeps_the_fastest():
    plain, ntk = (attention.inverse_frequencies(RopeSpec(width=WIDTH, scaling=s)) for s in (None, NTK(factor=4.0)))
    ratio = plain / ntk
    assert ratio[0] == 1
    assert ratio[-1].item() == pytest.approx(4.0)


def test_rotation_is_that_of_llama():
    q = torch.randn(7, HEADS, WIDTH)
    positions = torch.tensor([0, 3, 1, 90, 8, 2000, 5])
    cos, sin = attention.rope_angles(RopeSpec(width=WIDTH), positions)
    theirs, _ = apply_rotary_pos_emb(q, q, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    torch.testing.assert_close(attention.rotate(q, cos, sin, "half"), theirs, atol=1e-6, rtol=1e-6)
    assert (attention.rotate(q, cos, sin, "interleaved") - theirs).abs().max() > 0.1


def test_interleaved_rotation_is_a_complex_product():
    q = torch.randn(7, HEADS, WIDTH)
    cos, sin = attention.rope_angles(RopeSpec(width=WIDTH), torch.arange(7))
    turned = torch.view_as_complex(q.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(attention.rotate(q, cos, sin, "interleaved"), torch.view_as_real(turned).flatten(2))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_scores_depend_on_distance_alone_and_partial_rotation_leaves_the_rest(pairing):
    spec = RopeSpec(width=16)
    q, k = (torch.randn(1, HEADS, 24, dtype=torch.float64).expand(9, -1, -1) for _ in range(2))
    at = [
        attention.rotate(x, *attention.rope_angles(spec, torch.arange(9) + shift), pairing)
        for x, shift in ((q, 0), (k, 5), (k, 6))
    ]
    assert torch.equal(at[0][..., 16:], q[..., 16:])
    near, far = ((at[0] * at[i]).sum(-1) for i in (1, 2))
    torch.testing.assert_close(near, near[:1].expand_as(near), atol=1e-4, rtol=1e-4)
    assert (near - far).abs().max() > 0.1
    assert (
        attention.rotate(q.bfloat16(), *attention.rope_angles(spec, torch.arange(9)), pairing).dtype == torch.bfloat16
    )


def test_sinusoids_are_those_of_the_paper():
    positions, width = torch.tensor([0, 5, 1000]), 10
    made = attention.sinusoidal(positions, SinusoidalSpec(width=width))
    for n, p in enumerate(positions.tolist()):
        for i in range(width // 2):
            angle = p / 10_000 ** (2 * i / width)
            assert made[n, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-4)
            assert made[n, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-4)
    halves = attention.sinusoidal(positions, SinusoidalSpec(width=width, layout="halves"))
    assert torch.equal(halves, torch.cat((made[:, 0::2], made[:, 1::2]), 1))


def test_alibi_slopes_are_the_published_ones():
    assert attention.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    published_for_12 = [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    torch.testing.assert_close(attention.alibi_slopes(12), torch.tensor(published_for_12))
    bias = attention.alibi_bias(3, torch.tensor([4, 2]), torch.tensor([0, 4, 5]))
    torch.testing.assert_close(bias, -attention.alibi_slopes(3)[:, None, None] * torch.tensor([[4.0, 0, 1], [2, 2, 3]]))
    batched = attention.alibi_bias(3, torch.tensor([[4, 2], [1, 1]]), torch.tensor([[0, 4, 5], [0, 1, 2]]))
    assert torch.equal(batched[0], bias)
    assert batched.shape == (2, 3, 2, 3)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (16, 90)])
def test_t5_buckets_are_those_of_transformers(bidirectional, buckets, furthest):
    relative = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(relative, bidirectional, buckets, furthest)
    made = attention.t5_bucket(relative, buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
    assert torch.equal(made, theirs)
    other = attention.t5_bucket(relative, buckets=buckets, max_distance=furthest, bidirectional=not bidirectional)
    assert not torch.equal(other, theirs)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 16), (32, 8), (16, 4), (32, 5), (8, 4), (64, 16)])
def test_t5_buckets_without_far_ones_are_those_of_transformers_or_refused(bidirectional, buckets, furthest):
    """Where even the largest distance has a bucket of its own, the formula divides by the logarithm of 1 or less."""
    refused = 0
    for relative in torch.arange(-80, 81):
        theirs = T5Attention._relative_position_bucket(relative, bidirectional, buckets, furthest)
        if theirs < 0:  # no row of the embedding: transformers raises an IndexError
            refused += 1
            with pytest.raises(InputError, match=f"a distance of {abs(int(relative))} has no bucket"):
                attention.t5_bucket(relative, buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
        else:
            made = attention.t5_bucket(relative, buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
            assert int(made) == int(theirs), int(relative)
    assert refused or bidirectional
    with pytest.raises(InputError, match="1 are too few"):
        attention.t5_bucket(torch.tensor([3]), buckets=1, max_distance=16, bidirectional=bidirectional)


def test_t5_bias_reads_the_bucket_of_key_minus_query():
    weight = torch.randn(32, 5)
    q_pos, k_pos = torch.tensor([7, 1]), torch.tensor([0, 9, 40])
    made = attention.t5_bias(weight, q_pos, k_pos)
    for t, s in ((0, 0), (0, 2), (1, 1)):
        bucket = T5Attention._relative_position_bucket(k_pos[s] - q_pos[t], True, 32, 128)
        assert torch.equal(made[:, t, s], weight[bucket])
    assert attention.t5_bias(weight, q_pos.expand(4, 2), k_pos.expand(4, 3)).shape == (4, 5, 2, 3)


@pytest.mark.parametrize(("buckets", "furthest"), [(256, 512), (6, 12), (32, 512), (7, 40)])
def test_rows_of_distances_are_those_of_transformers(buckets, furthest):
    distance = torch.arange(-600, 601)
    theirs = (make_log_bucket_position(distance, buckets, furthest).long() + buckets).clamp(0, 2 * buckets - 1)
    made = attention.distance_row(distance, span=buckets, max_distance=furthest)
    assert torch.equal(made, theirs)
    near = distance.abs() <= buckets // 2
    assert torch.equal(made[near], distance[near] + buckets)
    plain = attention.distance_row(distance, span=buckets)
    assert torch.equal(plain, torch.tensor([min(max(d + buckets, 0), 2 * buckets - 1) for d in distance.tolist()]))
    assert not torch.equal(plain, made)


def test_disentangled_attention_is_the_sum_of_the_paper():
    """He et al. 2021, equations 2 to 4, pair by pair; position to content at the distance that the authors' code has
    (tests/sabotage_relative.py shows that no checkpoint means the paper's)."""
    heads, width, span, model, t = 3, 4, 2, 11, 7
    made = torch.Generator().manual_seed(0)
    x, table = torch.randn(t, model, generator=made), torch.randn(2 * span, model, generator=made)
    w = {name: torch.randn(heads * width, model, generator=made) for name in ("q", "k", "pos_q", "pos_k")}
    layer = spec.attention(model, heads, head_width=width, scale=(3 * width) ** -0.5)
    layer = nn.build(replace(layer, pos_q=layer.q, pos_k=layer.k))
    part = nn.build(spec.DisentangledSpec(width=model, span=span))
    nn.assign(part, "weight", table)
    for name, weight in w.items():
        nn.assign(layer, f"{name}.weight", weight)
    q, k = ((x @ w[name].T).unflatten(1, (heads, width)).transpose(0, 1)[None] for name in ("q", "k"))
    at = torch.arange(t)
    prepared = part.prepare(attention.Rows((t,)), x)
    bias = prepared.content(layer)(q, k, prepared.bias(at, at))
    scores = attention.attention_scores(q, k, bias=bias, scale=layer.spec.scale)[0]
    for h, i, j in product(range(heads), range(t), range(t)):
        d = 0 if i - j <= -span else 2 * span - 1 if i - j >= span else i - j + span
        mine = slice(h * width, (h + 1) * width)
        query, key = w["q"][mine] @ x[i], w["k"][mine] @ x[j]
        pos_query, pos_key = w["pos_q"][mine] @ table[d], w["pos_k"][mine] @ table[d]
        expected = (query @ key + query @ pos_key + key @ pos_query) / (3 * width) ** 0.5
        torch.testing.assert_close(scores[h, i, j], expected, atol=1e-4, rtol=1e-4)


def test_what_no_row_reaches_is_left_out_of_the_table():
    part = nn.build(spec.DisentangledSpec(width=5, span=6, max_distance=9))
    nn.assign(part, "weight", torch.randn(12, 5))
    table, row = part.reached(attention.Rows((3, 2), (1, 0)))
    assert torch.equal(table, part.weight[3:10])
    assert row(torch.tensor([3]), torch.arange(4)).tolist() == [[6, 5, 4, 3]]
    assert len(part.reached(attention.Rows((100,)))[0]) == 12
