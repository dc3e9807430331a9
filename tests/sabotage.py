"""Ways to get a transformer slightly wrong, one small function each.  None may pass the comparisons it is aimed at.

A sabotage is handed a loaded model and a `MonkeyPatch`, through which alone it breaks things, so that all of it is
undone.  `@parity(variant, slots)` is measured against the reference model of that name in `references`, `@cached(...)`
by cached against uncached.  A slot is named by its part and field, `Rope.pairing`, with the value where the field is a
choice (`MLP.act:relu`), or by the part alone where the arithmetic of the part itself is what breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Identity, ModuleList, Parameter

import triptych
from triptych import families, spec
from triptych.attention import CrossCache, FlatKeys, FullCache, NullCache, Rows, SlotKeys, WindowCache
from triptych.families.weights import Load, RopePermute
from triptych.model import Model
from triptych.nn import attention, linear, positions, stack
from triptych.nn import heads as head_parts
from triptych.spec.masks import Causal
from triptych.spec.part import Part

Break = Callable[[Model, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Sabotage:
    """`breaks` applied to the model of reference `variant`; `slots` are the parts and fields it gets wrong."""

    name: str
    variant: str
    slots: tuple[str, ...]
    breaks: Break

    @contextmanager
    def applied(self, model: Model) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.breaks(model, patch)
            yield


PARITY: list[Sabotage] = []
CACHED: list[Sabotage] = []


def parity(variant: str, *slots: str) -> Callable[[Break], Break]:
    return _listed(PARITY, variant, slots)


def cached(variant: str, *slots: str) -> Callable[[Break], Break]:
    return _listed(CACHED, variant, slots)


def _listed(into: list[Sabotage], variant: str, slots: tuple[str, ...]) -> Callable[[Break], Break]:
    def add(breaks: Break) -> Break:
        into.append(Sabotage(breaks.__name__, variant, slots, breaks))
        return breaks

    return add


def of(model: Model, *kinds: type[Part]) -> Iterator[Any]:
    """Every module made from such a part."""
    return (module for module in model.module.modules() if isinstance(getattr(module, "spec", None), kinds))


def change(model: Model, patch: pytest.MonkeyPatch, kind: type[Part], **fields: Any) -> None:
    """Other values in the spec that every such module computes by."""
    for module in of(model, kind):
        patch.setattr(module, "spec", replace(module.spec, **fields))


def put(model: Model, patch: pytest.MonkeyPatch, kind: type[Part], slot: str, value: Any) -> None:
    """Something else, or None, in a slot of every such module."""
    for module in of(model, kind):
        fill(module, patch, slot, value)


def fill(module: torch.nn.Module, patch: pytest.MonkeyPatch, slot: str, value: Any) -> None:
    """Modules keep their children and parameters outside `__dict__`, where `setattr` could not be undone."""
    held = module._modules if slot in module._modules else module._parameters
    patch.setitem(held, slot, value)


# ---------------------------------------------------------------- positions


@parity("llama", "Rope.pairing:half")
def flipped_rope_pairing(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Rope, pairing="interleaved")


@parity("llama", "Rope.theta")
def rope_with_another_base(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Rope, theta=20_000.0)


@parity("llama", "Rope.width")
def rope_turns_a_part_of_the_head(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Rope, width=8)


@parity("llama", "Rope")
def rope_turns_backwards(model: Model, patch: pytest.MonkeyPatch) -> None:
    turn = positions.rotate
    patch.setattr(positions, "rotate", lambda x, cos, sin, pairing: turn(x, cos, -sin, pairing))


@parity("llama", "Kind.position")
def position_forgotten(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, spec.Kind, "position", None)


def rope_scaling_forgotten(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Rope, scaling=None)


for _variant, _scaling in (("linear", "Interpolate"), ("yarn", "YaRN"), ("llama3", "Llama3"), ("longrope", "LongRope")):
    parity(f"llama-{_variant}", f"Rope.scaling:{_scaling}")(rope_scaling_forgotten)


@parity("llama-yarn", "Rope.scaling:YaRN")
@parity("llama-longrope", "Rope.scaling:LongRope")
def attention_factor_forgotten(model: Model, patch: pytest.MonkeyPatch) -> None:
    for rope in of(model, spec.Rope):
        patch.setattr(rope, "spec", replace(rope.spec, scaling=replace(rope.spec.scaling, attention_factor=1.0)))


@parity("llama-longrope", "Rope.scaling:LongRope")
def short_factors_in_long_rows(model: Model, patch: pytest.MonkeyPatch) -> None:
    for rope in of(model, spec.Rope):
        scaling = rope.spec.scaling
        patch.setattr(rope, "spec", replace(rope.spec, scaling=replace(scaling, long=scaling.short)))


@parity("gpt2", "Learned")
@parity("bert", "Learned")
def learned_position_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Learned, offset=1)


@parity("gpt2", "Embed.position")
def positions_run_on_into_the_next_row(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(positions.Learned, "embed", lambda self, at: self.weight[: len(at)])


@parity("t5", "T5Buckets")
@parity("t5-encoder", "T5Buckets")
def buckets_look_the_other_way(model: Model, patch: pytest.MonkeyPatch) -> None:
    bias = positions.t5_bias
    patch.setattr(positions, "t5_bias", lambda weight, q_pos, k_pos, **how: bias(weight, -q_pos, -k_pos, **how))


@parity("t5-encoder", "T5Buckets.bidirectional")
def buckets_of_an_encoder_look_back_only(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.T5Buckets, bidirectional=False)


@parity("t5-encoder", "T5Buckets.max_distance")
def buckets_reach_twice_as_far(model: Model, patch: pytest.MonkeyPatch) -> None:
    for buckets in of(model, spec.T5Buckets):
        patch.setattr(buckets, "spec", replace(buckets.spec, max_distance=2 * buckets.spec.max_distance))


# ---------------------------------------------------------------- masks and rows


@parity("llama", "Kind.mask:Causal")
def causal_mask_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Causal, "visible", lambda self, q, k: k.position <= q.position + 1)


@parity("llama", "Kind.mask:Causal")
def causal_mask_missing(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Kind, mask=spec.full())


@parity("bert", "Kind.mask:Full")
def an_encoder_looks_back_only(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Kind, mask=spec.causal())


@parity("mistral", "Kind.mask:Window")
def window_one_too_wide(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Kind, mask=spec.causal() & spec.window(5))


@parity("mistral", "Kind.mask:Window")
def window_one_too_narrow(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Kind, mask=spec.causal() & spec.window(3))


@parity("qwen2-window", "Attention.kind")
def windows_in_the_other_layers(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in of(model, spec.Block):
        attn = block.spec.attn
        swapped = replace(attn, kind="self" if attn.kind == "window" else "window")
        patch.setattr(block, "spec", replace(block.spec, attn=swapped))


@parity("bert", "Attention")
def rows_of_a_batch_meet(model: Model, patch: pytest.MonkeyPatch) -> None:
    attend = attention.attend_rows

    def as_one(q: Tensor, keys: FlatKeys, rows: Rows, **options: Any) -> Tensor:
        one = Rows((rows.total,))
        return attend(q, FlatKeys(keys.k, keys.v, one), one, **options)

    patch.setattr(attention, "attend_rows", as_one)


# ---------------------------------------------------------------- attention


@parity("llama", "Attention.kv_heads")
def wrong_head_grouping(model: Model, patch: pytest.MonkeyPatch) -> None:
    """Head h reads group h % G instead of h * G // H."""
    attend = attention.attend_rows

    def interleaved(q: Tensor, keys: FlatKeys, rows: Rows, **options: Any) -> Tensor:
        groups = keys.k.shape[1]
        together = q.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)
        z = attend(together, keys, rows, **options)
        return z.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)

    patch.setattr(attention, "attend_rows", interleaved)


@parity("llama", "Attention.scale")
@parity("gpt2", "Attention.scale")
@parity("bert", "Attention.scale")
def missing_score_scale(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Attention, scale=1.0)


@parity("t5", "Attention.scale")
@parity("gpt2-unscaled", "Attention.scale")
@parity("gpt2-layer-scale", "Attention.scale")
def scores_scaled_like_everyone_s(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Attention, scale=None)


@parity("llama-mha", "Attention.scale")
def scale_by_the_model_s_width(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Attention, scale=model.spec.decoder.width**-0.5)


@parity("qwen3", "Attention.q_norm")
def missing_query_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, spec.Attention, "q_norm", None)


@parity("qwen3", "Attention.k_norm")
def missing_key_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, spec.Attention, "k_norm", None)


@parity("qwen3", "Attention.q_norm")
def query_norm_after_the_rotation(model: Model, patch: pytest.MonkeyPatch) -> None:
    for attn in of(model, spec.Attention):
        norm = attn.q_norm
        fill(attn, patch, "q_norm", None)
        _after_rotation(attn, norm, patch)


def _after_rotation(attn: Any, norm: Any, patch: pytest.MonkeyPatch) -> None:
    forward = attn.forward

    def late(x: Tensor, view: Any, taps: Any) -> Tensor:
        turn, turned = view.rotate, []

        def rotate(x: Tensor) -> Tensor:
            turned.append(x)
            return norm(turn(x)) if len(turned) == 1 else turn(x)  # the queries turn first

        return forward(x, replace(view, rotate=rotate), taps)

    patch.setattr(attn, "forward", late)


@parity("llama", "Attention")
def keys_and_values_swapped(model: Model, patch: pytest.MonkeyPatch) -> None:
    project = attention.Attention.project
    patch.setattr(attention.Attention, "project", lambda self, y, rows, taps: project(self, y, rows, taps)[::-1])


@parity("t5", "Block.cross")
def cross_attention_missing(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in of(model, spec.Block):
        patch.setattr(block, "forward", _without_cross(block))


def _without_cross(block: Any) -> Callable[..., Tensor]:
    def forward(x: Tensor, ctx: Any, layer: int, taps: Any) -> Tensor:
        x = x + block.attn(block.attn_norm.pre(x), ctx.own(block.spec.attn.kind, layer), taps)
        return x + block.mlp(block.mlp_norm.pre(x), ctx.rows, taps)

    return forward


@parity("t5", "Block.cross")
def cross_attention_reads_self_keys(model: Model, patch: pytest.MonkeyPatch) -> None:
    def own(self: Any, attn: Any, x: Tensor, taps: Any) -> FlatKeys:
        return FlatKeys(*attn.project(x, self.rows, taps), self.rows)

    patch.setattr(attention.CrossView, "keys", own)


@parity("t5", "Block.cross")
def cross_attention_reads_the_next_row_s_source(model: Model, patch: pytest.MonkeyPatch) -> None:
    def neighbour(self: Any, attn: Any, x: Tensor, taps: Any) -> SlotKeys:
        lengths = (self.held.lengths[-1], *self.held.lengths[:-1])
        return SlotKeys(self.held.k.roll(1, 0), self.held.v.roll(1, 0), lengths)

    patch.setattr(attention.CrossView, "keys", neighbour)


@parity("t5", "Block.cross")
def cross_attention_sees_the_padding(model: Model, patch: pytest.MonkeyPatch) -> None:
    def all_of_it(self: Any, attn: Any, x: Tensor, taps: Any) -> SlotKeys:
        return replace(self.held, lengths=(max(self.held.lengths),) * len(self.held.lengths))

    patch.setattr(attention.CrossView, "keys", all_of_it)


# ---------------------------------------------------------------- norms


@parity("llama", "RMSNorm")
def norm_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    """Gemma's (1 + weight) where the weight is the whole factor."""
    change(model, patch, spec.RMSNorm, offset=1.0)


@parity("llama", "RMSNorm")
def rms_norm_that_centres(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = linear.RMSNorm.forward
    patch.setattr(linear.RMSNorm, "forward", lambda self, x: forward(self, x - x.mean(-1, keepdim=True)))


@parity("gpt2", "LayerNorm")
def layer_norm_that_does_not_centre(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear.LayerNorm, "forward", lambda self, x: _rms(x, self.spec.eps) * self.weight + self.bias)


@parity("bert", "LayerNorm")
def layer_norm_by_the_unbiased_variance(model: Model, patch: pytest.MonkeyPatch) -> None:
    def unbiased(self: Any, x: Tensor) -> Tensor:
        root = (x.var(-1, keepdim=True) + self.spec.eps).sqrt()
        return (x - x.mean(-1, keepdim=True)) / root * self.weight + self.bias

    patch.setattr(linear.LayerNorm, "forward", unbiased)


@parity("gpt2-untied", "LayerNorm.eps")
def layer_norm_eps_outside_the_root(model: Model, patch: pytest.MonkeyPatch) -> None:
    def outside(self: Any, x: Tensor) -> Tensor:
        spread = x.std(-1, correction=0, keepdim=True) + self.spec.eps
        return (x - x.mean(-1, keepdim=True)) / spread * self.weight + self.bias

    patch.setattr(linear.LayerNorm, "forward", outside)


@parity("llama-mha", "RMSNorm.eps")
def rms_norm_eps_outside_the_root(model: Model, patch: pytest.MonkeyPatch) -> None:
    def outside(self: Any, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.spec.eps) * self.weight

    patch.setattr(linear.RMSNorm, "forward", outside)


@parity("gpt2-untied", "LayerNorm.eps")
def layer_norm_with_another_eps(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.LayerNorm, eps=1e-5)


@parity("llama-mha", "RMSNorm.eps")
def rms_norm_with_another_eps(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.RMSNorm, eps=1e-6)


@parity("gpt2", "LayerNorm.bias")
@parity("bert", "LayerNorm.bias")
def missing_norm_bias(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, spec.LayerNorm, "bias", None)


class Around(torch.nn.Module):
    """The norms around one sublayer, any of them anywhere."""

    def __init__(self, pre: Any = None, post: Any = None) -> None:
        super().__init__()
        self.pre, self.out, self.post = pre or Identity(), Identity(), post or Identity()


@parity("llama", "Norms.pre")
@parity("gpt2", "Norms.pre")
def pre_norm_applied_as_post_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in of(model, spec.Block):
        for slot in ("attn_norm", "mlp_norm"):
            fill(block, patch, slot, Around(post=getattr(block, slot).pre))


@parity("bert", "Norms.post")
def post_norm_applied_as_pre_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in of(model, spec.Block):
        for slot in ("attn_norm", "mlp_norm"):
            fill(block, patch, slot, Around(pre=getattr(block, slot).post))


@parity("llama", "Block")
def norms_of_attention_and_mlp_swapped(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in of(model, spec.Block):
        first, second = block.attn_norm, block.mlp_norm
        fill(block, patch, "attn_norm", second)
        fill(block, patch, "mlp_norm", first)


@parity("t5", "Block.cross_norm")
def missing_cross_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in model.module.decoder.blocks:
        fill(block, patch, "cross_norm", Around())


@parity("llama", "Stack.final_norm")
@parity("t5", "Stack.final_norm")
def missing_final_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, spec.Stack, "final_norm", None)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


# ---------------------------------------------------------------- MLP, linear, block


@parity("llama", "GLU")
def swapped_gate_and_up(model: Model, patch: pytest.MonkeyPatch) -> None:
    for mlp in of(model, spec.GLU):
        gate, up = mlp.gate, mlp.up
        fill(mlp, patch, "gate", up)
        fill(mlp, patch, "up", gate)


@parity("llama", "GLU.act:silu")
def gelu_for_silu(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.GLU, act="gelu")


@parity("t5-gated", "GLU.act:gelu_tanh")
def exact_gelu_for_the_tanh_one_in_a_gate(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.GLU, act="gelu")


@parity("gpt2-unscaled", "MLP.act:gelu_tanh")
def exact_gelu_for_the_tanh_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.MLP, act="gelu")


@parity("bert", "MLP.act:gelu")
def tanh_gelu_for_the_exact_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.MLP, act="gelu_tanh")


@parity("t5", "MLP.act:relu")
def gelu_for_relu(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.MLP, act="gelu")


def _missing_bias(place: str) -> Break:
    def missing(model: Model, patch: pytest.MonkeyPatch) -> None:
        for name, module in model.module.named_modules():
            if name.endswith(place):
                fill(module, patch, "bias", None)

    missing.__name__ = f"missing_bias_of_{place}"
    return missing


for _place in ("q", "k", "v", "out", "gate", "up", "down"):
    parity("llama-biased", "Linear.bias")(_missing_bias(_place))


@parity("gpt2", "Linear")
def square_matrix_not_transposed(model: Model, patch: pytest.MonkeyPatch) -> None:
    for attn in of(model, spec.Attention):
        fill(attn.out, patch, "weight", Parameter(attn.out.weight.detach().T))


@parity("llama", "Block")
def attention_and_mlp_in_parallel(model: Model, patch: pytest.MonkeyPatch) -> None:
    def parallel(self: Any, x: Tensor, ctx: Any, layer: int, taps: Any) -> Tensor:
        seen = self.attn(self.attn_norm.pre(x), ctx.own(self.spec.attn.kind, layer), taps)
        return x + seen + self.mlp(self.mlp_norm.pre(x), ctx.rows, taps)

    patch.setattr(stack.Block, "forward", parallel)


@parity("llama", "Stack")
def blocks_in_reverse(model: Model, patch: pytest.MonkeyPatch) -> None:
    for stacked in of(model, spec.Stack):
        fill(stacked, patch, "blocks", ModuleList(reversed(stacked.blocks)))


# ---------------------------------------------------------------- embedding and heads


@parity("bert", "Embed.token_types")
def token_types_dropped(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.Embed, token_types=0)


@parity("bert", "Embed.norm")
def missing_embedding_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, spec.Embed, "norm", None)


@parity("llama", "Embed")
@parity("gpt2", "Embed")
def embedding_scaled_by_the_root_of_the_width(model: Model, patch: pytest.MonkeyPatch) -> None:
    for embed in of(model, spec.Embed):
        patch.setattr(embed, "spec", replace(embed.spec, scale=embed.spec.width**0.5))


@parity("gpt2", "Table")
def tokens_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stack.Table, "forward", lambda self, ids: self.weight[ids - 1])


@parity("t5", "LMHead.scale")
def missing_tied_head_scale(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.LMHead, scale=None)


@parity("t5-v1.1", "LMHead")
def tied_head_scale_on_an_untied_head(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.LMHead, scale=model.spec.decoder.width**-0.5)


@parity("gpt2", "Model.ties")
@parity("llama-tied", "Model.ties")
def head_not_tied(model: Model, patch: pytest.MonkeyPatch) -> None:
    """The head keeps what it was initialized with."""
    proj = model.module.head.proj
    fresh = torch.randn(proj.weight.shape, generator=torch.Generator().manual_seed(0))
    fill(proj, patch, "weight", Parameter(fresh * proj.weight.std().item()))


@parity("bert", "MaskedLMHead.act:gelu")
def relu_in_the_masked_head(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.MaskedLMHead, act="relu")


@parity("bert", "MaskedLMHead")
def missing_masked_head_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, spec.MaskedLMHead, "norm", Identity())


@parity("bert", "MaskedLMHead")
def missing_masked_head_bias(model: Model, patch: pytest.MonkeyPatch) -> None:
    fill(model.module.head.proj, patch, "bias", None)


@parity("bert-classes", "ClassHead.dense")
def class_head_without_its_dense(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, spec.ClassHead, "dense", None)


@parity("bert-classes", "ClassHead")
def class_head_reads_the_last_token(model: Model, patch: pytest.MonkeyPatch) -> None:
    def last(self: Any, x: Tensor, rows: Rows) -> Tensor:
        return self.classes(torch.tanh(self.dense(torch.stack([row[-1] for row in rows.split(x)]))))

    patch.setattr(head_parts.ClassHead, "forward", last)


@parity("bert-tokens", "TokenHead")
def token_head_reads_the_next_token(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head_parts.TokenHead, "forward", lambda self, x, rows: self.classes(x.roll(-1, 0)))


@parity("bert-pooler", "Pooling.dense")
def pooler_without_its_tanh(model: Model, patch: pytest.MonkeyPatch) -> None:
    pool = head_parts.Pooling.forward

    def bare(self: Any, x: Tensor, rows: Rows) -> Tensor:
        return self.dense(x[list(rows.starts)]) if self.spec.mode == "dense" else pool(self, x, rows)

    patch.setattr(head_parts.Pooling, "forward", bare)


@parity("bert-no-pooler", "Pooling.mode:mean")
def mean_over_the_whole_batch(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head_parts.Pooling, "forward", lambda self, x, rows: x.mean(0).expand(len(rows), -1))


# ---------------------------------------------------------------- checkpoints


@parity("gpt2", "Attention")
def qkv_split_in_the_wrong_order(model: Model, patch: pytest.MonkeyPatch) -> None:
    split = Load.to_ours

    def backwards(self: Load, x: Any) -> dict[str, Any]:
        return split(replace(self, ours=self.ours[::-1]), x)

    patch.setattr(Load, "to_ours", backwards)
    patch.setattr(model, "module", triptych.load(model.path).module)


@parity("llama", "Rope")
def rope_permutation_of_gguf_forgotten(model: Model, patch: pytest.MonkeyPatch) -> None:
    """q and k as a GGUF stores them, read as if it stored them like everyone."""
    parameters = dict(model.module.named_parameters())
    for load in families.save_plan(model.spec, "gguf"):
        if any(isinstance(op, RopePermute) for op in load.ops):
            packed = load.to_source(parameters).detach()
            for name, value in replace(load, ops=()).to_ours(packed).items():
                owner, _, leaf = name.rpartition(".")
                fill(model.module.get_submodule(owner), patch, leaf, Parameter(value))


# ---------------------------------------------------------------- caches: cached against uncached


@cached("llama", "FullCache")
def keys_written_one_place_late(model: Model, patch: pytest.MonkeyPatch) -> None:
    write = FullCache.write

    def late(self: FullCache, k: Tensor, v: Tensor, rows: Rows) -> None:
        write(self, k, v, Rows(rows.lengths, tuple(past + 1 if past else 0 for past in rows.past)))

    patch.setattr(FullCache, "write", late)


@cached("llama", "FullCache")
def stale_lengths(model: Model, patch: pytest.MonkeyPatch) -> None:
    """The new tokens are written and not counted."""
    extend = FullCache.extend
    patch.setattr(FullCache, "extend", lambda self, k, v, rows: replace(extend(self, k, v, rows), lengths=rows.past))


@cached("llama", "SelfView")
def keys_cached_before_they_turn(model: Model, patch: pytest.MonkeyPatch) -> None:
    def unturned(self: Any, attn: Any, x: Tensor, taps: Any) -> Any:
        k, v = attn.project(x, self.rows, taps)
        turned = self.rotate(k) if isinstance(self.cache, NullCache) else k
        return self.cache.extend(self.layer, turned, v, self.rows)

    patch.setattr(attention.SelfView, "keys", unturned)


@cached("gpt2", "Learned")
def positions_restart_at_every_step(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = stack.Embed.forward
    patch.setattr(
        stack.Embed, "forward", lambda self, ids, rows, types: forward(self, ids, replace(rows, past=()), types)
    )


@cached("gpt2", "Learned")
def cached_positions_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = stack.Embed.forward

    def late(self: Any, ids: Tensor, rows: Rows, types: Any) -> Tensor:
        return forward(self, ids, Rows(rows.lengths, tuple(past + 1 if past else 0 for past in rows.past)), types)

    patch.setattr(stack.Embed, "forward", late)


@cached("mistral", "WindowCache")
@cached("qwen2-window", "WindowCache")
def window_cache_one_too_short(model: Model, patch: pytest.MonkeyPatch) -> None:
    init = WindowCache.__init__

    def short(self: WindowCache, layer: Any, *rest: Any) -> None:
        init(self, replace(layer, window=layer.window - 1), *rest)

    patch.setattr(WindowCache, "__init__", short)


@cached("mistral", "WindowCache")
def ring_overwritten_under_a_chunk(model: Model, patch: pytest.MonkeyPatch) -> None:
    def hasty(self: WindowCache, k: Tensor, v: Tensor, rows: Rows) -> SlotKeys:
        self.write(k, v, rows)
        return SlotKeys(self.k, self.v, (self.ring,) * len(rows), self._positions(rows.ends))

    patch.setattr(WindowCache, "extend", hasty)


@cached("llama", "FullCache.take")
def full_keys_stay_when_rows_move(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullCache, "take", lambda self, slots: None)


@cached("mistral", "WindowCache.take")
def window_keys_stay_when_rows_move(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowCache, "take", lambda self, slots: None)


@cached("t5", "CrossCache.filter")
def sources_stay_when_rows_move(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CrossCache, "filter", lambda self, slots: None)


@cached("t5", "T5Buckets")
def cached_distances_from_the_step_s_own_beginning(model: Model, patch: pytest.MonkeyPatch) -> None:
    bias = positions.t5_bias

    def own(weight: Tensor, q_pos: Tensor, k_pos: Tensor, **how: Any) -> Tensor:
        return bias(weight, q_pos - q_pos[..., :1], k_pos, **how)

    patch.setattr(positions, "t5_bias", own)
