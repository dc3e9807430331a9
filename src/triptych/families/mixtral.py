"""Mixtral (Jiang et al. 2024): Mistral whose MLP is a mixture of experts, the chosen ones' weights summing to 1.

Reference: transformers `models/mixtral`.  In GGUF its architecture is llama, and the experts are one tensor.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, table
from . import decoder, llama

hf_types = {"mixtral"}
gguf_names = {"mixtral": "llama"}
ignore = {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}  # training only
ids, prefix = llama.ids, llama.prefix

weights = llama.weights + table("""
decoder.blocks.{i}.mlp.router.weight  model.layers.{i}.block_sparse_moe.gate.weight  blk.{i}.ffn_gate_inp.weight
decoder.blocks.{i}.mlp.experts.{e}.<gate,up,down>.weight  model.layers.{i}.block_sparse_moe.experts.{e}.<w1,w3,w2>.weight  blk.{i}.ffn_<gate,up,down>_exps.weight|stacked
# Until April 2024 GGUF kept one tensor an expert.
decoder.blocks.{i}.mlp.experts.{e}.<gate,up,down>.weight  -  blk.{i}.ffn_<gate,up,down>.{e}.weight
""")  # noqa: E501


def config(keys: ConfigKeys) -> spec.ModelSpec:
    keys.assume(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    mlp = spec.moe(
        keys.int("hidden_size"),
        keys.int("intermediate_size"),
        keys.act("hidden_act", default="silu"),
        experts=keys.count("num_local_experts", default=8),
        top_k=keys.count("num_experts_per_tok", default=2),
        normalize=True,
    )
    stack = llama.stack(keys, mlp=mlp, windows=keys.optional_int("sliding_window"))
    return decoder.model(keys, "Mixtral", stack)
