"""The lectures' worked examples and corrected figures: which test holds each, and those that need whole parts.

What is attention and nothing else is in `test_lectures_attention.py`, what is counting in `test_count.py`.
"""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tiny
from triptych import families, nn, spec
from triptych.attention import Rows, attend
from triptych.count import Count, count
from triptych.model import Model
from triptych.probe import Trace
from triptych.train import Example, collate

HERE = Path(__file__).parent
FILES = ("test_lectures.py", "test_lectures_attention.py", "test_count.py", "test_labs_writing.py")

EXAMPLES: dict[int, tuple[str, ...]] = {
    1: ("test_l0_2_6_attention_of_four_tokens",),
    2: ("test_l2_example_1",),
    3: ("test_l2_example_2_shapes_through_a_layer", "test_l2_practice_2_shapes_through_a_layer"),
    4: ("test_l2_example_3_causality_and_padding", "test_why_minus_infinity_gives_exactly_zero"),
    5: ("test_l2_practice_1_one_dimension",),
    6: ("test_l4_and_l2_example_2_shapes", "test_l4_shape_trace_through_a_layer", "test_attention_is_quadratic"),
    7: ("test_qwen3_4b_cache",),
    8: ("test_qwen3_4b_as_published",),
    9: ("test_l4_12_3_toy",),
    10: ("test_l1_sat_and_l0_2_6_softmax",),
    11: ("test_qwen3_4b_as_published", "test_qwen3_4b_cache"),
    12: ("test_root_d_keeps_softmax_from_being_sharp",),
    13: ("test_heads_cost_scores_and_nothing_else", "test_l4_exercise_7_heads_through_a_layer"),
}

# Where a lecture is wrong or two disagree.
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "L1: softmax([8.5, 42, 3.2, 42]) is [0, .5, 0, .5], and a tie shows no saturation": (
        "test_l1_sat_and_l0_2_6_softmax",
    ),
    "L0 exercise 6: the gap to 4 B is the MLP, the embedding is already in": (
        "test_the_lecture_s_smaller_count_and_where_its_gap_is",
    ),
    "L0 4.1: unscaled scores make softmax too sharp, not too flat": ("test_root_d_keeps_softmax_from_being_sharp",),
    "L1, L2: attention is equivariant, not invariant, and only without a causal mask": (
        "test_attention_is_permutation_equivariant_without_a_causal_mask",
        "test_a_stack_is_permutation_equivariant_without_positions_and_mask",
    ),
    "L4 12.5: -1e9 is not exactly 0 for a row with nothing to see": ("test_a_large_negative_number_is_not_a_mask",),
    "L4 exercise 12: identical tokens in one bidirectional sequence stay identical": (
        "test_l4_exercise_12_identical_tokens",
        "test_identical_tokens_in_one_bidirectional_sequence",
    ),
    "L1: cross-attention needs a mask where sources are padded": (
        "test_cross_attention_needs_a_mask_when_sources_are_padded",
        "test_source_padding_leaves_decoder_logits_unchanged",
    ),
    "L1: LayerNorm divides by sqrt(var + eps), not by (std + eps)": ("test_layer_norm_adds_eps_under_the_root",),
    "'All use the same formula': T5 has no 1/sqrt(d)": ("test_t5_does_not_scale_its_scores",),
    "L1: GPT-2's MLP has biases; its base has D 768, 1024 is medium": ("test_gpt2_as_published",),
    "'F about 2.7 D (Llama, Qwen)': Qwen3-4B 3.8, Llama-3-8B 3.5; Llama-1 and the smaller Llama-2 2.69 to 2.7": (
        "test_how_wide_mlps_are_beside_their_models",
    ),
    "L1: the mask may come before the scale, a finite bias may not": (
        "test_the_mask_may_come_before_or_after_the_scale_but_a_bias_may_not",
    ),
    "L0 9.2: BERT and BART are post-norm": ("test_bert_and_bart_are_post_norm",),
    "L0 3: attention may normalize, Qwen3's does": ("test_qwen3_normalizes_queries_and_keys",),
    "L0 2.5: d_v need not be d_k": ("test_values_may_be_narrower_than_keys",),
    "L4 12.5: GPT and BERT differ in more than the mask": ("test_gpt_and_bert_differ_in_more_than_the_mask",),
    "L1: generation reads what training does not show": ("test_generation_reads_what_training_does_not_show",),
    "L1: BERT cannot generate; it can be made to, and is worse at it": ("test_an_encoder_writes",),
    "L4 12.10: SwiGLU's MLP is 8/3 d wide at equal parameters": ("test_swiglu_at_equal_parameters_is_narrower",),
}


def names_in(name: str) -> set[str]:
    tree = ast.parse((HERE / name).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_example_and_every_correction_has_a_test() -> None:
    there = set().union(*map(names_in, FILES))
    assert list(EXAMPLES) == list(range(1, 14))
    assert len(CORRECTIONS) == 19
    for what, names in (EXAMPLES | CORRECTIONS).items():
        assert names, what
        assert set(names) <= there, what


# ---------------------------------------------------------------- shapes through our own layers


def one_layer(width: int, heads: int, tokens: int) -> Trace:
    """What a one-block encoder of this width shows of a row of tokens."""
    norm = spec.RMSNormSpec(width=width)
    block = spec.BlockSpec(
        attn=spec.attention(width, heads),
        mlp=spec.mlp(width, 1, "relu"),
        attn_norm=spec.NormsSpec(pre=norm),
        mlp_norm=spec.NormsSpec(pre=norm),
    )
    embed = spec.EmbedSpec(vocab=5, width=width)
    stacked = spec.StackSpec(embed=embed, kinds={"self": spec.KindSpec(mask=spec.full())}, blocks=(block,))
    head = spec.LMHeadSpec(proj=spec.LinearSpec(inputs=width, outputs=5))
    model = Model(nn.new(spec.ModelSpec(family="tiny", encoder=stacked, head=head)))
    sites = [f"blocks.0.attn.{site}" for site in ("in", "q", "k", "v", "scores", "pattern", "z", "out")]
    return model.trace([[i % 5 for i in range(tokens)]], read=sites)


def shape(trace: Trace, site: str) -> tuple[int, ...]:
    return tuple(trace[f"blocks.0.attn.{site}"][0].shape)


def test_l2_example_2_shapes_through_a_layer() -> None:
    """D 8, 2 heads, T 3: 3x4 a head, scores 3x3, the heads side by side 3x8, output 3x8."""
    trace = one_layer(8, 2, 3)
    assert shape(trace, "q") == shape(trace, "k") == shape(trace, "v") == (3, 2, 4)
    assert shape(trace, "scores") == (2, 3, 3)
    assert trace["blocks.0.attn.z"][0].flatten(1).shape == shape(trace, "out") == (3, 8)


def test_l2_practice_2_shapes_through_a_layer() -> None:
    trace = one_layer(1024, 16, 128)
    assert shape(trace, "q") == (128, 16, 64)
    assert shape(trace, "scores") == (16, 128, 128)


def test_l4_shape_trace_through_a_layer() -> None:
    """(10, 512) -> (8, 10, 64) -> (8, 10, 10) -> (10, 512)."""
    trace = one_layer(512, 8, 10)
    q, pattern, v, z = (trace[f"blocks.0.attn.{site}"][0] for site in ("q", "pattern", "v", "z"))
    assert shape(trace, "in") == shape(trace, "out") == (10, 512)
    assert q.transpose(0, 1).shape == (8, 10, 64)
    assert pattern.shape == (8, 10, 10)
    assert_close((pattern @ v.transpose(0, 1)).transpose(0, 1), z)  # the axes are what their sizes say


def test_l4_exercise_7_heads_through_a_layer() -> None:
    elements = {heads: one_layer(512, heads, 10)["blocks.0.attn.scores"][0].numel() for heads in (1, 8)}
    assert elements == {1: 100, 8: 800}


# ---------------------------------------------------------------- norms, scales, embeddings


def test_layer_norm_adds_eps_under_the_root() -> None:
    """L1 divides by (std + eps), which for small vectors is another function."""
    x = torch.tensor([[0.0, 0.001, 0.002, 0.003]], dtype=torch.float64)
    norm = nn.build(spec.LayerNormSpec(width=4, eps=1e-5)).double()
    with torch.no_grad():
        norm.weight.fill_(1)
        norm.bias.fill_(0)
        ours = norm(x)[0]
    assert_close(ours, expand(0.447214, 0.149071), atol=1e-6, rtol=0)
    lecture = (x - x.mean()) / (x.std(correction=0) + 1e-5)
    assert_close(lecture[0], expand(1.329747, 0.443249), atol=1e-6, rtol=0)


def expand(far: float, near: float) -> Tensor:
    return torch.tensor([-far, -near, near, far], dtype=torch.float64)


def test_the_embedding_scale_is_the_root_of_the_width() -> None:
    """The original's sqrt(D): tokens of variance 1/D enter as large as the positions, which it does not scale."""
    width, rows = 64, Rows((50,))
    embed = nn.build(spec.EmbedSpec(vocab=50, width=width, position=spec.SinusoidalSpec(width=width), scale=width**0.5))
    ids = torch.arange(50)
    with torch.no_grad():
        embed.tokens.weight.normal_(0, width**-0.5)
        given, found = embed.tokens.weight, embed(ids, rows, None)
        assert_close(found - given * 8, embed.position.embed(ids))
    assert given.var().item() == pytest.approx(1 / width, rel=0.1)
    assert (given * 8).var().item() == pytest.approx(1, rel=0.1)


def buckets_explain(scores: Tensor, products: Tensor) -> bool:
    """What the products leave of the scores [H, T, T] depends on the distance alone."""
    left = (scores - products)[0]
    return all(left.diagonal(n).std(correction=0) < 1e-5 for n in range(1 - len(left), len(left)))


def test_t5_does_not_scale_its_scores() -> None:
    trace = Model(tiny.encoder_decoder()).trace([[5, 6, 7, 9, 11, 3]], [[0, 2]], read=["encoder.blocks.0.attn.*"])
    q, k, scores = (trace[f"encoder.blocks.0.attn.{site}"][0] for site in ("q", "k", "scores"))
    products = q.transpose(0, 1) @ k.permute(1, 2, 0)
    assert buckets_explain(scores, products)
    assert not buckets_explain(scores, products / tiny.K**0.5)
    hf = {"model_type": "t5", "vocab_size": 7, "d_model": 6, "d_kv": 4, "d_ff": 5, "num_layers": 1, "num_heads": 2}
    t5 = families.read_config(hf)
    assert {part.scale for _, part in t5.walk() if isinstance(part, spec.AttentionSpec)} == {1.0}


# ---------------------------------------------------------------- what a whole stack sees


def final(module: nn.Transformer, row: Tensor) -> Tensor:
    """The last hidden states [T, D] of one row, in float64."""
    with torch.no_grad():
        return module(nn.Batch(inputs=row, rows=Rows((len(row),))))


def encoder_without_positions() -> nn.Transformer:
    return tiny.encoder("none").double()


def test_a_stack_is_permutation_equivariant_without_positions_and_mask() -> None:
    row = torch.tensor([3, 14, 15, 9, 26, 5, 35, 8, 40])
    order = torch.randperm(len(row), generator=torch.Generator().manual_seed(1))

    def error(module: nn.Transformer) -> float:
        return (final(module, row[order]) - final(module, row)[order]).abs().max().item()

    assert error(encoder_without_positions()) < 1e-13
    assert error(tiny.decoder("none").double()) > 0.1  # a causal mask is enough to tell places apart
    assert error(tiny.encoder("learned").double()) > 0.1
    plain = final(encoder_without_positions(), row)
    assert (final(encoder_without_positions(), row[order]) - plain).abs().max() > 0.1  # equivariant, not invariant


def test_identical_tokens_in_one_bidirectional_sequence() -> None:
    """It takes positions, a causal mask or two contexts to tell two of one token apart."""
    row, other = torch.tensor([7, 4, 19, 4, 30]), torch.tensor([7, 4, 19, 4, 31])
    alike = final(encoder_without_positions(), row)
    assert_close(alike[1], alike[3], atol=1e-13, rtol=0)
    for apart in (final(tiny.encoder("learned").double(), row), final(tiny.decoder("none").double(), row)):
        assert (apart[1] - apart[3]).abs().max() > 0.05
    assert (final(encoder_without_positions(), other)[1] - alike[1]).abs().max() > 0.05


def test_source_padding_leaves_decoder_logits_unchanged() -> None:
    model, target = Model(tiny.encoder_decoder()), [[0, 5, 9], [0, 8]]
    sources = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    alone = [model.logits([s], [t])[0] for s, t in zip(sources, target, strict=True)]
    together = model.logits(sources, target)
    padded = torch.tensor([[5, 6, 7, 0, 0, 0], sources[1]])
    masked = model.logits(padded, target, mask=padded != 0)
    for found in (together, masked):
        for a, b in zip(found, alone, strict=True):
            assert_close(a, b, atol=1e-5, rtol=0)
    unmasked = model.logits([row.tolist() for row in padded], target)
    assert (unmasked[0] - alone[0]).abs().max() > 0.05  # as tokens, they would be read


# ---------------------------------------------------------------- published sizes


def published(**hf: object) -> Count:
    return count(families.read_config(hf))


GPT2 = {"model_type": "gpt2", "vocab_size": 50_257, "n_positions": 1024}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


def test_gpt2_as_published() -> None:
    """124 M has D 768; D 1024 is the medium one.  Both matrices of the MLP have biases."""
    base = published(**GPT2, n_embd=768, n_layer=12, n_head=12)
    medium = published(**GPT2, n_embd=1024, n_layer=24, n_head=16)
    assert (base.total, medium.total) == (124_439_808, 354_823_168)
    shapes = base.spec.shapes()
    assert shapes["decoder.blocks.0.mlp.up.bias"] == (3072,)
    assert shapes["decoder.blocks.0.mlp.down.bias"] == (768,)
    assert base.parameters["mlp"] == 12 * (2 * 768 * 3072 + 3072 + 768)


def test_how_wide_mlps_are_beside_their_models() -> None:
    context = {"max_position_embeddings": 4096}
    llama2 = published(**LLAMA, **context, vocab_size=32_000, intermediate_size=11_008)
    llama3 = published(**LLAMA, **context, vocab_size=128_256, intermediate_size=14_336, num_key_value_heads=8)
    assert (llama2.total, llama3.total) == (6_738_415_616, 8_030_261_248)
    assert (ratio(llama2), ratio(llama3)) == (2.6875, 3.5)
    larger = {13: (5120, 13_824), 33: (6656, 17_920), 65: (8192, 22_016)}  # Llama-1; Llama-2 has the first of them too
    assert [hidden / width for width, hidden in larger.values()] == pytest.approx([2.7, 2.692, 2.6875], abs=1e-3)
    assert 28_672 / 8192 == 3.5  # Llama-2 70B
    assert 9728 / 2560 == 3.8  # Qwen3-4B, whose shapes are held in test_count


def ratio(model: Count) -> float:
    hidden, width = model.spec.shapes()["decoder.blocks.0.mlp.up.weight"]
    return hidden / width


# ---------------------------------------------------------------- what families do not share


SMALL_LLAMA = {"model_type": "llama", "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2,
               "num_attention_heads": 4, "intermediate_size": 37, "max_position_embeddings": 32}  # fmt: skip
BERT = {**SMALL_LLAMA, "model_type": "bert"}
BART = {"model_type": "bart", "vocab_size": 50, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37,
        "max_position_embeddings": 32}  # fmt: skip
SMALL_GPT2 = {**GPT2, "n_embd": 24, "n_layer": 2, "n_head": 4}
QWEN3 = {**SMALL_LLAMA, "model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 2}


def blocks(hf: dict[str, object]) -> list[spec.BlockSpec]:
    return [part for _, part in families.read_config(hf).walk() if isinstance(part, spec.BlockSpec)]


def test_bert_and_bart_are_post_norm() -> None:
    """L0 9.2 says that pre-norm is what real models use."""
    for hf in (BERT, BART):
        assert all(one.attn_norm.post is not None and one.attn_norm.pre is None for one in blocks(hf))
    for hf in (SMALL_GPT2, SMALL_LLAMA):
        assert all(one.attn_norm.pre is not None and one.attn_norm.post is None for one in blocks(hf))


def test_qwen3_normalizes_queries_and_keys() -> None:
    """L0 3 says that attention does not normalize; its own example does."""
    model = Model(nn.new(families.read_config(QWEN3), seed=1))
    trace = model.trace([[3, 14, 15]], read=["blocks.0.attn.q", "blocks.0.attn.q_rot"])
    q, after = trace["blocks.0.attn.q"][0], trace["blocks.0.attn.q_rot"][0]
    mean_square = q.square().mean(-1, keepdim=True)
    assert_close(after.square().mean(-1, keepdim=True), torch.ones_like(mean_square), atol=1e-2, rtol=0)
    assert (mean_square - 1).abs().max() > 0.1
    assert not any("q_norm" in name for name in families.read_config(SMALL_LLAMA).shapes())


def test_values_may_be_narrower_than_keys() -> None:
    """L0 2.5 says that all models have d_v = d_k.  Here are the widths of DeepSeek-V2's latent attention."""
    q, k, v = torch.randn(1, 2, 5, 192), torch.randn(1, 2, 5, 192), torch.randn(1, 2, 5, 128)
    assert attend(q, k, v).shape == (1, 2, 5, 128)


def test_gpt_and_bert_differ_in_more_than_the_mask() -> None:
    """L4 12.5 says that the mask is the only difference."""
    bert, gpt = families.read_config(BERT), families.read_config(SMALL_GPT2)
    assert (bert.encoder.embed.token_types, gpt.decoder.embed.token_types) == (2, 0)
    assert bert.encoder.final_norm is None
    assert gpt.decoder.final_norm is not None
    assert type(bert.head) is not type(gpt.head)
    assert (blocks(BERT)[0].attn_norm.pre is None) != (blocks(SMALL_GPT2)[0].attn_norm.pre is None)


def test_generation_reads_what_training_does_not_show() -> None:
    """L1 says there is no shift between them.  Teacher forcing reads the data after a wrong prediction, generation
    reads the wrong prediction, and what follows differs."""
    model, row, start = Model(tiny.decoder()), [7, 4, 19, 11, 30, 2, 23, 9], 3
    ids = np.array(row, np.int32)
    read_in_training = collate([Example(ids[:-1], ids[1:], np.ones(len(row) - 1, bool))]).ids.tolist()
    forced = [int(logits.argmax()) for logits in model.logits([row])[0][start - 1 :]]
    assert forced[0] != row[start]  # the prediction is wrong, and training reads the right token all the same
    assert read_in_training[start] == row[start]
    (written,) = model.generate([row[:start]], max_new_tokens=len(forced))
    assert written.ids[0] == forced[0]
    assert list(written.ids[1:]) != forced[1:]


def test_swiglu_at_equal_parameters_is_narrower() -> None:
    """L4 12.10 gives it the 4 d of a plain MLP."""
    width = 96

    def parameters(part: spec.Part) -> int:
        return sum(p.numel() for p in nn.build(part).parameters())

    plain = parameters(spec.mlp(width, 4 * width, "gelu"))
    assert parameters(spec.glu(width, 8 * width // 3, "silu")) == plain
    assert parameters(spec.glu(width, 4 * width, "silu")) == 1.5 * plain
