"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts in the layers that are not named dense.

Reference: transformers `models/qwen3_moe`.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, names_in, table
from . import decoder, llama, qwen

hf_types = {"qwen3_moe"}
gguf_archs = {"qwen3moe"}
gguf_names = {"qwen3_moe": "qwen3moe"}
ignore = names_in("""
output_router_logits router_aux_loss_coef  # training only
max_window_layers  # from Qwen2; here a window is that of every layer
qkv_bias shared_expert_intermediate_size use_qk_norm  # of another library; the reference reads none
""")
prefix = llama.prefix

weights = qwen.weights + table("""
decoder.blocks.{i}.mlp.router.weight  model.layers.{i}.mlp.gate.weight  blk.{i}.ffn_gate_inp.weight
decoder.blocks.{i}.mlp.experts.{e}.<gate,up,down>.weight  model.layers.{i}.mlp.experts.{e}.<gate,up,down>_proj.weight  blk.{i}.ffn_<gate,up,down>_exps.weight|stacked
""")  # noqa: E501


def config(keys: ConfigKeys) -> spec.ModelSpec:
    keys.assume(num_key_value_heads=4)
    width, act, layers = keys.int("hidden_size"), keys.act("hidden_act", "silu"), keys.count("num_hidden_layers")
    name = "num_local_experts" if "num_local_experts" in keys.data else "num_experts"
    dense = spec.glu(width, keys.int("intermediate_size"), act)
    mixture = spec.moe(
        width,
        keys.int("moe_intermediate_size", default=768),
        act,
        experts=keys.count(name, default=128),
        top_k=keys.count("num_experts_per_tok", default=8),
        normalize=keys.flag("norm_topk_prob"),
    )
    named = keys.ints("mlp_only_layers") if keys.get("mlp_only_layers", None) is not None else ()
    every = keys.count("decoder_sparse_step", default=1)
    mlps = [dense if i in named or (i + 1) % every else mixture for i in range(layers)]
    size, used = keys.optional_int("sliding_window", default=4096), keys.flag("use_sliding_window")
    bias = keys.flag("attention_bias")
    stack = llama.stack(keys, mlp=mlps, windows=size if used else None, bias=bias, head_norm=True)
    return decoder.model(keys, "Qwen3Moe", stack)


def from_gguf(keys: ConfigKeys) -> Values:
    return llama.from_gguf_as(keys, "Qwen3Moe") | {
        "model_type": "qwen3_moe",
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "moe_intermediate_size": keys.int("expert_feed_forward_length"),
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "norm_topk_prob": keys.bool("expert_weights_norm", default=True),
    }


def to_gguf(model: spec.ModelSpec) -> Values:
    mixture = next((part for _, part in model.walk() if isinstance(part, spec.MoESpec)), None)
    if mixture is None:  # every layer is dense, which the format cannot express
        return {}
    return {"expert_feed_forward_length": mixture.expert.up.outputs, "expert_weights_norm": mixture.normalize}
