"""Sabotages of norms, MLPs, blocks and what is read from a checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Identity, ModuleList, Parameter

import triptych
from sabotage import Break, change, changed, fill, filled, of, parity, put, regroup
from triptych import families, spec
from triptych.mapping.tensor_plan import ByHead, RopePermute, TensorLoad
from triptych.model import Model
from triptych.nn import feedforward, linear, stack

# ---------------------------------------------------------------- norms


@parity("llama", "RMSNorm")
def norm_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    """Gemma's (1 + weight) where the weight is the whole factor."""
    change(model, patch, spec.RMSNormSpec, offset=1.0)


changed("norm_by_the_weight_alone", spec.RMSNormSpec, "gemma2", "gemma", offset=0.0)


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


changed("layer_norm_with_another_eps", spec.LayerNormSpec, "gpt2-untied", eps=1e-5)
changed("rms_norm_with_another_eps", spec.RMSNormSpec, "llama-mha", eps=1e-6)
filled("missing_norm_bias", spec.LayerNormSpec, "bert", "gpt2", bias=None)


class Around(torch.nn.Module):
    """The norms around one sublayer, any of them anywhere."""

    def __init__(self, pre: Any = None, post: Any = None) -> None:
        super().__init__()
        self.pre, self.out, self.post = pre or Identity(), Identity(), post or Identity()


def renorm(model: Model, patch: pytest.MonkeyPatch, made: Callable[[Any], Around]) -> None:
    """Other norms around both sublayers of every block, made of those there are."""
    for block in of(model, spec.BlockSpec):
        for slot in ("attn_norm", "mlp_norm"):
            fill(block, patch, slot, made(getattr(block, slot)))


@parity("llama", "Norms.pre")
@parity("gpt2", "Norms.pre")
def pre_norm_applied_as_post_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    renorm(model, patch, lambda norms: Around(post=norms.pre))


@parity("bert", "Norms.post")
def post_norm_applied_as_pre_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    renorm(model, patch, lambda norms: Around(pre=norms.post))


@parity("bart", "Norms.post")
def post_norm_left_out(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in model.module.decoder.blocks:
        fill(block, patch, "cross_norm", Around())


@parity("gemma2", "Norms.out")
@parity("gemma3", "Norms.out")
def missing_norm_of_what_a_sublayer_gives(model: Model, patch: pytest.MonkeyPatch) -> None:
    renorm(model, patch, lambda norms: Around(pre=norms.pre))


@parity("gemma2", "Norms.out")
def output_norm_applied_as_post_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    renorm(model, patch, lambda norms: Around(pre=norms.pre, post=norms.out))


@parity("granite", "Scale", "Norms.out")
def missing_factor_of_what_a_sublayer_gives(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, spec.NormsSpec, "out", Identity())


@parity("granite", "Scale.factor")
def factor_applied_after_the_sum(model: Model, patch: pytest.MonkeyPatch) -> None:
    for norms in of(model, spec.NormsSpec):
        fill(norms, patch, "post", norms.out)
        fill(norms, patch, "out", Identity())


@parity("llama", "Block.mlp_norm")
def norms_of_attention_and_mlp_swapped(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in of(model, spec.BlockSpec):
        first, second = block.attn_norm, block.mlp_norm
        fill(block, patch, "attn_norm", second)
        fill(block, patch, "mlp_norm", first)


@parity("t5", "Block.cross_norm")
def missing_cross_norm(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in model.module.decoder.blocks:
        fill(block, patch, "cross_norm", Around())


filled("missing_final_norm", spec.StackSpec, "t5", "llama", final_norm=None)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


# ---------------------------------------------------------------- MLP, linear, block


@parity("llama", "GLU")
@parity("phi3", "GLU")
def swapped_gate_and_up(model: Model, patch: pytest.MonkeyPatch) -> None:
    for mlp in of(model, spec.GLUSpec):
        gate, up = mlp.gate, mlp.up
        fill(mlp, patch, "gate", up)
        fill(mlp, patch, "up", gate)


changed("gelu_for_silu", spec.GLUSpec, "llama", slot="GLU.act:silu", act="gelu")
changed("silu_for_gelu_in_a_gate", spec.GLUSpec, "modernbert", slot="GLU.act:gelu", act="silu")


@parity("modernbert", "Norms.pre")
def first_layer_normed_twice(model: Model, patch: pytest.MonkeyPatch) -> None:
    first, second = model.module.encoder.blocks[:2]
    fill(first, patch, "attn_norm", second.attn_norm)


changed("exact_gelu_for_the_tanh_one_in_a_gate", spec.GLUSpec, "t5-gated", slot="GLU.act:gelu_tanh", act="gelu")
changed("exact_gelu_for_the_tanh_one", spec.MLPSpec, "gpt2-unscaled", slot="MLP.act:gelu_tanh", act="gelu")
changed("tanh_gelu_for_the_exact_one", spec.MLPSpec, "bert", slot="MLP.act:gelu", act="gelu_tanh")
changed("gelu_for_silu_without_a_gate", spec.MLPSpec, "marian", slot="MLP.act:silu", act="gelu")
changed("gelu_for_relu", spec.MLPSpec, "t5", slot="MLP.act:relu", act="gelu")


@parity("mixtral", "MoE.top_k")
@parity("qwen3-moe", "MoE.top_k")
def one_expert_too_few(model: Model, patch: pytest.MonkeyPatch) -> None:
    for mixture in of(model, spec.MoESpec):
        patch.setattr(mixture, "spec", replace(mixture.spec, top_k=mixture.spec.top_k - 1))


changed("weights_of_experts_not_normalized", spec.MoESpec, "qwen3-moe-normed", "mixtral", normalize=False)
changed("weights_of_experts_normalized", spec.MoESpec, "qwen3-moe", slot="MoE", normalize=True)


@parity("mixtral", "MoE.experts")
def experts_in_reverse(model: Model, patch: pytest.MonkeyPatch) -> None:
    for mixture in of(model, spec.MoESpec):
        fill(mixture, patch, "experts", ModuleList(reversed(mixture.experts)))


@parity("mixtral", "MoE")
def every_expert_weighs_the_same(model: Model, patch: pytest.MonkeyPatch) -> None:
    for mixture in of(model, spec.MoESpec):
        patch.setattr(mixture.router, "forward", _signs(mixture.router.forward))


def _signs(score: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Scores whose two largest are equal: the same experts, the same weights."""
    return lambda x: torch.where(score(x) >= score(x).topk(2).values[:, 1:], 1.0, 0.0)


@parity("qwen3-moe", "MoE")
def outputs_of_experts_go_to_the_next_token(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = feedforward.MoE.forward
    patch.setattr(feedforward.MoE, "forward", lambda self, x, ctx, taps: forward(self, x, ctx, taps).roll(1, 0))


def _missing_bias(place: str) -> Break:
    def missing(model: Model, patch: pytest.MonkeyPatch) -> None:
        for name, module in model.module.named_modules():
            if name.endswith(place):
                fill(module, patch, "bias", None)

    missing.__name__ = f"missing_bias_of_{place}"
    return missing


for _place in ("q", "k", "v", "out", "gate", "up", "down"):
    parity("llama-biased", "Linear.bias")(_missing_bias(_place))
parity("gptj", "Linear.bias")(_missing_bias("proj"))


@parity("gpt2", "Linear")
def square_matrix_not_transposed(model: Model, patch: pytest.MonkeyPatch) -> None:
    for attn in of(model, spec.AttentionSpec):
        fill(attn.out, patch, "weight", Parameter(attn.out.weight.detach().T))


@parity("llama", "Block", "Block.mlp")
def attention_and_mlp_in_parallel(model: Model, patch: pytest.MonkeyPatch) -> None:
    def parallel(self: Any, x: Tensor, ctx: Any, layer: int, taps: Any) -> Tensor:
        seen = self.attn(self.attn_norm.pre(x), ctx.own[layer], layer, taps)
        return x + seen + self.mlp(self.mlp_norm.pre(x), ctx, taps)

    patch.setattr(stack.Block, "forward", parallel)


@parity("gpt-neox", "ParallelBlock")
@parity("gptj", "ParallelBlock")
def attention_and_mlp_in_turn(model: Model, patch: pytest.MonkeyPatch) -> None:
    def in_turn(self: Any, x: Tensor, ctx: Any, layer: int, taps: Any) -> Tensor:
        seen = self.attn_norm.pre(self.norm(x))
        x = x + self.attn(seen, ctx.own[layer], layer, taps)
        return x + self.mlp(self.mlp_norm.pre(self.norm(x)), ctx, taps)

    patch.setattr(stack.ParallelBlock, "forward", in_turn)


@parity("gpt-neox", "ParallelBlock")
def the_mlp_reads_what_attention_reads(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in of(model, spec.ParallelBlockSpec):
        fill(block, patch, "mlp_norm", block.attn_norm)


@parity("gptj", "ParallelBlock.norm")
@parity("phi", "ParallelBlock.norm")
def the_mlp_reads_the_stream_itself(model: Model, patch: pytest.MonkeyPatch) -> None:
    for block in of(model, spec.ParallelBlockSpec):
        norm = block.norm
        fill(block, patch, "norm", Identity())
        fill(block, patch, "attn_norm", Around(pre=norm))


@parity("llama", "Stack")
def blocks_in_reverse(model: Model, patch: pytest.MonkeyPatch) -> None:
    for stacked in of(model, spec.StackSpec):
        fill(stacked, patch, "blocks", ModuleList(reversed(stacked.blocks)))
        regroup(stacked, patch)


# ---------------------------------------------------------------- checkpoints


@parity("gpt2", "Attention")
def qkv_split_in_the_wrong_order(model: Model, patch: pytest.MonkeyPatch) -> None:
    split = TensorLoad.to_ours
    patch.setattr(TensorLoad, "to_ours", lambda self, x: split(replace(self, ours=self.ours[::-1]), x))
    patch.setattr(model, "module", triptych.load(model.path).module)


@parity("gpt-neox", "Attention")
def rows_of_a_fused_matrix_in_thirds(model: Model, patch: pytest.MonkeyPatch) -> None:
    """q, k and v of GPT-NeoX go head by head."""
    patch.setattr(ByHead, "to_ours", lambda self, x: x)
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
