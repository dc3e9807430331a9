"""Sabotages of positions, masks and attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sabotage import change, changed, fill, filled, of, parity, regroup
from triptych import ops, spec
from triptych.attention import EncoderOutput, FlatKeys, Heads, RowPlan, Rows
from triptych.attention.cache_steps import NullStep
from triptych.model import Model
from triptych.nn import Taps, attention, attention_states, positions
from triptych.spec.masks import Causal, Mask

# ---------------------------------------------------------------- positions


changed("flipped_rope_pairing", spec.RopeSpec, "llama", slot="Rope.pairing:half", pairing="interleaved")
changed("rope_pairs_the_halves", spec.RopeSpec, "gptj", slot="Rope.pairing:interleaved", pairing="half")
changed("rope_with_another_base", spec.RopeSpec, "llama", theta=20_000.0)
changed("rope_turns_a_part_of_the_head", spec.RopeSpec, "llama", width=8)
changed("rope_turns_the_whole_head", spec.RopeSpec, "phi", "gpt-neox", width=6)


@parity("gpt-neox", "Rope.width")
def rope_turns_the_end_of_the_head(model: Model, patch: pytest.MonkeyPatch) -> None:
    turn = ops.rotate
    patch.setattr(ops, "rotate", lambda x, rotation: turn(x.roll(4, -1), rotation).roll(-4, -1))


@parity("llama", "Rope")
def rope_turns_backwards(model: Model, patch: pytest.MonkeyPatch) -> None:
    turn = ops.rotate

    def backwards(x: Tensor, rotation: ops.Rotation | None) -> Tensor:
        return turn(x, None if rotation is None else replace(rotation, sin=-rotation.sin))

    patch.setattr(ops, "rotate", backwards)


filled("position_forgotten", spec.KindSpec, "llama", position=None)


def rope_scaling_forgotten(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.RopeSpec, scaling=None)


for _variant, _scaling in (("linear", "Interpolate"), ("yarn", "YaRN"), ("llama3", "Llama3"), ("longrope", "LongRope")):
    parity(f"llama-{_variant}", f"Rope.scaling:{_scaling}")(rope_scaling_forgotten)


@parity("llama-yarn", "Rope.scaling:YaRN")
@parity("llama-longrope", "Rope.scaling:LongRope")
def attention_factor_forgotten(model: Model, patch: pytest.MonkeyPatch) -> None:
    for rope in of(model, spec.RopeSpec):
        patch.setattr(rope, "spec", replace(rope.spec, scaling=replace(rope.spec.scaling, attention_factor=1.0)))


@parity("llama-longrope", "Rope.scaling:LongRope")
def short_factors_in_long_rows(model: Model, patch: pytest.MonkeyPatch) -> None:
    for rope in of(model, spec.RopeSpec):
        scaling = rope.spec.scaling
        patch.setattr(rope, "spec", replace(rope.spec, scaling=replace(scaling, long=scaling.short)))


changed("learned_position_off_by_one", spec.LearnedSpec, "bert", "gpt2", slot="Learned", offset=1)


@parity("gpt2", "Embed.position")
def positions_run_on_into_the_next_row(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(positions.Learned, "embed", lambda self, at: self.weight[: len(at)])


@parity("t5", "T5Buckets")
@parity("t5-encoder", "T5Buckets")
def buckets_look_the_other_way(model: Model, patch: pytest.MonkeyPatch) -> None:
    bias = positions.t5_bias
    patch.setattr(positions, "t5_bias", lambda weight, q_pos, k_pos, **how: bias(weight, -q_pos, -k_pos, **how))


changed("buckets_of_an_encoder_look_back_only", spec.T5BucketsSpec, "t5-encoder", bidirectional=False)


@parity("t5-encoder", "T5Buckets.max_distance")
def buckets_reach_twice_as_far(model: Model, patch: pytest.MonkeyPatch) -> None:
    for buckets in of(model, spec.T5BucketsSpec):
        patch.setattr(buckets, "spec", replace(buckets.spec, max_distance=2 * buckets.spec.max_distance))


# ---------------------------------------------------------------- masks and rows


@parity("llama", "Kind.mask:Causal")
def causal_mask_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Causal, "visible", lambda self, q, k: k.position <= q.position + 1)


changed("causal_mask_missing", spec.KindSpec, "llama", slot="Kind.mask:Causal", mask=spec.full())
changed("an_encoder_looks_back_only", spec.KindSpec, "bert", slot="Kind.mask:Full", mask=spec.causal())


@parity("modernbert", "Kind.mask:Window")
def local_layers_see_one_token_less_ahead(model: Model, patch: pytest.MonkeyPatch) -> None:
    narrow = spec.window(4, ahead=2)
    for kind in of(model, spec.KindSpec):
        if kind.spec.mask != spec.full():
            patch.setattr(kind, "spec", replace(kind.spec, mask=narrow))


changed("local_layers_see_everything", spec.KindSpec, "modernbert", slot="Kind.mask:Window", mask=spec.full())
changed("one_base_for_both_kinds", spec.RopeSpec, "modernbert", theta=10_000.0)
changed("window_one_too_wide", spec.KindSpec, "mistral", slot="Kind.mask:Window", mask=spec.causal() & spec.window(5))
changed("window_one_too_narrow", spec.KindSpec, "mistral", slot="Kind.mask:Window", mask=spec.causal() & spec.window(3))


@parity("qwen2-window", "Attention.kind")
@parity("gemma2", "Attention.kind")
def windows_in_the_other_layers(model: Model, patch: pytest.MonkeyPatch) -> None:
    for attn in of(model, spec.AttentionSpec):
        patch.setattr(attn, "spec", replace(attn.spec, kind="self" if attn.spec.kind == "window" else "window"))
    for stack in of(model, spec.StackSpec):
        regroup(stack, patch)


@parity("bert", "Attention")
def rows_of_a_batch_meet(model: Model, patch: pytest.MonkeyPatch) -> None:
    plan = FlatKeys.plan

    def as_one(self: FlatKeys, rows: Rows, mask: Mask, heads: Heads, bias: Any, mechanism: Any) -> RowPlan:
        one = Rows((rows.total,))
        return plan(FlatKeys(one), one, mask, heads, bias=bias, mechanism=mechanism)

    patch.setattr(FlatKeys, "plan", as_one)


# ---------------------------------------------------------------- attention


@parity("llama", "Attention.kv_heads")
def wrong_head_grouping(model: Model, patch: pytest.MonkeyPatch) -> None:
    """Head h reads group h % G instead of h * G // H."""
    run = RowPlan.run

    def interleaved(self: RowPlan, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        groups = k.shape[1]
        together = q.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)
        z = run(self, together, k, v, *rest)
        return z.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)

    patch.setattr(RowPlan, "run", interleaved)


changed("missing_score_scale", spec.AttentionSpec, "bert", "gpt2", "llama", scale=1.0)
changed("scores_scaled_like_everyone_s", spec.AttentionSpec, "gpt2-layer-scale", "gpt2-unscaled", "t5", scale=None)


@parity("llama-mha", "Attention.scale")
def scale_by_the_model_s_width(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.AttentionSpec, scale=model.spec.decoder.width**-0.5)


changed("missing_cap_of_the_scores", spec.AttentionSpec, "gemma2", softcap=None)
changed("scores_scaled_by_the_head_width", spec.AttentionSpec, "gemma2", scale=None)


@parity("gemma3", "Kind.position")
def one_base_for_all_layers(model: Model, patch: pytest.MonkeyPatch) -> None:
    kinds = model.module.decoder.kinds
    fill(kinds["window"], patch, "position", kinds["self"].position)


@parity("gemma3", "Kind.position")
def bases_of_the_two_kinds_swapped(model: Model, patch: pytest.MonkeyPatch) -> None:
    full, window = model.module.decoder.kinds["self"], model.module.decoder.kinds["window"]
    first, second = full.position, window.position
    fill(full, patch, "position", second)
    fill(window, patch, "position", first)


filled("missing_query_norm", spec.AttentionSpec, "phi-normed", "qwen3", q_norm=None)
filled("missing_key_norm", spec.AttentionSpec, "phi-normed", "qwen3", k_norm=None)


@parity("qwen3", "Attention.q_norm")
def query_norm_after_the_rotation(model: Model, patch: pytest.MonkeyPatch) -> None:
    for attn in of(model, spec.AttentionSpec):
        norm = attn.q_norm
        fill(attn, patch, "q_norm", None)
        _after_rotation(attn, norm, patch)


def _after_rotation(attn: Any, norm: Any, patch: pytest.MonkeyPatch) -> None:
    forward = attn.forward

    class Late(Taps):
        def __call__(self, site: str, value: Tensor, rows: Rows) -> Tensor:
            return norm(value) if site == "q_rot" else value

    patch.setattr(attn, "forward", lambda x, state, layer, taps: forward(x, state, layer, Late()))


@parity("llama", "Attention")
def keys_and_values_swapped(model: Model, patch: pytest.MonkeyPatch) -> None:
    project = attention.Attention.project
    patch.setattr(attention.Attention, "project", lambda self, y, rows, taps: project(self, y, rows, taps)[::-1])


@parity("t5", "Block.cross")
def cross_attention_missing(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in of(model, spec.BlockSpec):
        patch.setattr(block, "forward", _without_cross(block))


def _without_cross(block: Any) -> Callable[..., Tensor]:
    def forward(x: Tensor, ctx: Any, layer: int, taps: Any) -> Tensor:
        x = x + block.attn(block.attn_norm.pre(x), ctx.own[layer], layer, taps)
        return x + block.mlp(block.mlp_norm.pre(x), ctx, taps)

    return forward


@parity("t5", "Block.cross")
def cross_attention_reads_self_keys(model: Model, patch: pytest.MonkeyPatch) -> None:
    def own(attn: Any, rows: Rows, x: Tensor, source: Any, random: Any) -> attention_states.SelfState:
        plan = FlatKeys(rows).plan(rows, spec.full(), attention_states.heads_of(attn, x, random))
        return attention_states.SelfState(
            rows, plan, NullStep(FlatKeys(rows)), position=None, rotation=None, content=None
        )

    patch.setattr("triptych.nn.stack.cross_state", own)


@parity("t5", "Block.cross")
def cross_attention_reads_the_next_row_s_source(model: Model, patch: pytest.MonkeyPatch) -> None:
    def neighbour(memory: Tensor, rows: Rows) -> EncoderOutput:
        sources = rows.split(memory)
        turned = [sources[-1], *sources[:-1]]
        return EncoderOutput(torch.cat(turned), Rows(tuple(map(len, turned))))

    patch.setattr("triptych.nn.transformer.EncoderOutput", neighbour)


@parity("t5", "Block.cross")
def cross_attention_sees_the_padding(model: Model, patch: pytest.MonkeyPatch) -> None:
    def padded(memory: Tensor, rows: Rows) -> EncoderOutput:
        filled = torch.nn.utils.rnn.pad_sequence(rows.split(memory), batch_first=True)
        return EncoderOutput(filled.flatten(0, 1), Rows((rows.longest,) * len(rows)))

    patch.setattr("triptych.nn.transformer.EncoderOutput", padded)
