"""Llama (Touvron et al. 2023; Llama 3, 2024): pre-norm decoder with RMSNorm, RoPE, grouped heads and SwiGLU.

Reference: transformers `models/llama`.  `decoder` is the whole family tree; mistral and qwen say where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych import spec
from triptych.errors import ConfigError
from triptych.families.keys import Keys
from triptych.families.rope import rope
from triptych.families.weights import table

hf_types = frozenset({"llama"})
gguf_archs = frozenset({"llama"})
ignore = frozenset({"pretraining_tp"})  # slices the matmuls of the reference, same result
prefix = "model."

ROWS = """
decoder.embed.tokens.weight           model.embed_tokens.weight                        token_embd.weight
decoder.blocks.{i}.attn_norm.pre.*    model.layers.{i}.input_layernorm.*               blk.{i}.attn_norm.*
decoder.blocks.{i}.attn.v.*           model.layers.{i}.self_attn.v_proj.*              blk.{i}.attn_v.*
decoder.blocks.{i}.attn.out.*         model.layers.{i}.self_attn.o_proj.*              blk.{i}.attn_output.*
decoder.blocks.{i}.mlp_norm.pre.*     model.layers.{i}.post_attention_layernorm.*      blk.{i}.ffn_norm.*
decoder.blocks.{i}.mlp.gate.*         model.layers.{i}.mlp.gate_proj.*                 blk.{i}.ffn_gate.*
decoder.blocks.{i}.mlp.up.*           model.layers.{i}.mlp.up_proj.*                   blk.{i}.ffn_up.*
decoder.blocks.{i}.mlp.down.*         model.layers.{i}.mlp.down_proj.*                 blk.{i}.ffn_down.*
decoder.final_norm.*                  model.norm.*                                     output_norm.*
head.proj.weight                      lm_head.weight                                   output.weight
-                                     model.layers.{i}.self_attn.rotary_emb.inv_freq   -  # computed from the config
"""
weights = table(
    ROWS
    + """
decoder.blocks.{i}.attn.q.*           model.layers.{i}.self_attn.q_proj.*              blk.{i}.attn_q.*|rope_permute
decoder.blocks.{i}.attn.k.*           model.layers.{i}.self_attn.k_proj.*              blk.{i}.attn_k.*|rope_permute
-                                     -                                                rope_freqs.weight # in config
"""
)


def config(keys: Keys) -> spec.Model:
    bias = keys.bool("attention_bias", default=False)
    return decoder(keys, "Llama", bias=bias, out_bias=bias, mlp_bias=keys.bool("mlp_bias", default=False))


def decoder(
    keys: Keys,
    name: str,
    *,
    bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norm: bool = False,
    windows: tuple[int | None, ...] = (),
) -> spec.Model:
    """The model, of classes `{name}ForCausalLM` and `{name}Model`.  `windows`: visible keys of each layer, None all."""
    width, heads, vocab = keys.int("hidden_size"), keys.count("num_attention_heads"), keys.int("vocab_size")
    layers, eps = keys.count("num_hidden_layers"), keys.float("rms_norm_eps", default=1e-6)
    inner = keys.optional_int("head_dim") or width // heads
    norm, each_head = spec.RMSNorm(width=width, eps=eps), spec.RMSNorm(width=inner, eps=eps) if head_norm else None
    windows = windows or (None,) * layers
    position = rope(keys, inner)
    # The kind most models have alone is called `self`; `window` exists beside it where layers alternate.
    names = {size: "self" if size is None or None not in windows else "window" for size in windows}
    masks = {kind: spec.causal() if size is None else spec.causal() & spec.window(size) for size, kind in names.items()}
    blocks = tuple(
        spec.Block(
            attn=spec.attention(
                width, heads, kv_heads=keys.optional_int("num_key_value_heads"), head_width=inner,
                bias=bias, out_bias=out_bias, q_norm=each_head, k_norm=each_head, kind=names[size],
                dropout=keys.dropout("attention_dropout"),
            ),
            mlp=spec.glu(width, keys.int("intermediate_size"), keys.act("hidden_act", default="silu"), bias=mlp_bias),
            attn_norm=spec.Norms(pre=norm),
            mlp_norm=spec.Norms(pre=norm),
        )
        for size in windows
    )  # fmt: skip
    kinds = {kind: spec.Kind(mask=mask, position=position) for kind, mask in masks.items()}
    embed = spec.Embed(vocab=vocab, width=width)
    lm = keys.architecture({f"{name}ForCausalLM": True, f"{name}Model": False}, default=f"{name}ForCausalLM")
    tied = keys.bool("tie_word_embeddings", default=False) and lm
    return spec.Model(
        family=keys.str("model_type"),
        decoder=spec.Stack(embed=embed, kinds=kinds, blocks=blocks, final_norm=norm),
        head=spec.LMHead(proj=spec.Linear(inputs=width, outputs=vocab)) if lm else None,
        ties={"head.proj.weight": "decoder.embed.tokens.weight"} if tied else {},
        ids=keys.special_ids(vocab),
        context=keys.int("max_position_embeddings"),
        init_std=keys.float("initializer_range", default=0.02),
    )


def from_gguf(keys: Keys) -> Mapping[str, Any]:
    return from_gguf_decoder(keys, "Llama") | {
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias", default=False),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias", default=False),
    }


def from_gguf_decoder(keys: Keys, name: str) -> dict[str, Any]:
    """The HF keys that the whole family tree shares."""
    width, heads = keys.int("embedding_length"), keys.count("attention.head_count")
    inner = keys.int("attention.key_length", default=keys.int("rope.dimension_count", default=width // heads))
    others = keys.int("attention.value_length", default=inner), keys.int("rope.dimension_count", default=inner)
    if others != (inner, inner):
        raise ConfigError(f"{keys.where}: key, value and rotary widths of a head differ, which no {name} does")
    return {
        "architectures": [f"{name}ForCausalLM"],
        "hidden_size": width,
        "intermediate_size": keys.int("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", default=heads),
        "head_dim": inner,
        "hidden_act": "silu",
        "max_position_embeddings": keys.int("context_length"),
        "rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _gguf_rope(keys),
        "tie_word_embeddings": not keys.has_tensor("output.weight", default=False),
    }


def _gguf_rope(keys: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.float("rope.freq_base", default=10_000.0)}
    factors = keys.get("rope_freqs", None)
    kind = keys.choice("rope.scaling.type", {"none": "default", "linear": "linear", "yarn": "yarn"}, default="none")
    keys.get("rope.scaling.finetuned", None)  # says how the model was trained, not what it computes
    if factors is not None:
        # Llama 3's scaling arrives as one divisor a frequency, the same at every length: LongRoPE says just that.
        divisors = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        found |= {"rope_type": "longrope", "original_max_position_embeddings": keys.int("context_length")} | divisors
    elif kind != "default":
        found |= {"rope_type": kind, "factor": keys.float("rope.scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = keys.int("rope.scaling.original_context_length")
    return found
