"""`config.json` as repositories on the Hub carry them, key by key, in the spelling of their day; only sizes are small.

What stands here was written by five years of exporters: leftovers of other libraries, doubles of keys, switches that
the reference never reads.  Each must load, or say in one line why it cannot.
"""

from functools import partial
from typing import Any

V, D, F, L, CONTEXT = 41, 24, 37, 3, 64
_SHORT, _LONG = [1.0, 1.08, 1.31], [1.05, 2.4, 7.9]


def _llama(version: str | None = "4.31.0", **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": D, "initializer_range": 0.3, "intermediate_size": F, "max_position_embeddings": CONTEXT,
        "model_type": "llama", "num_attention_heads": 6, "num_hidden_layers": L, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": version, "use_cache": True,
        "vocab_size": V,
    } | more  # fmt: skip


_gpt2 = partial(dict, {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.3,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": CONTEXT, "n_embd": D, "n_head": 6, "n_layer": L,
    "n_positions": CONTEXT, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": V,
})  # fmt: skip
_neox = partial(dict, {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 32, "initializer_range": 0.3, "intermediate_size": F, "layer_norm_eps": 1e-05,
    "max_position_embeddings": CONTEXT, "model_type": "gpt_neox", "num_attention_heads": 4,
    "num_hidden_layers": L, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
    "use_parallel_residual": True, "vocab_size": V,
})  # fmt: skip
_qwen = partial(dict, {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 38, "eos_token_id": 39,
    "hidden_act": "silu", "hidden_size": D, "initializer_range": 0.3, "intermediate_size": F,
    "max_position_embeddings": CONTEXT, "max_window_layers": L, "model_type": "qwen2", "num_attention_heads": 6,
    "num_hidden_layers": L, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": CONTEXT, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_sliding_window": False, "vocab_size": V,
})  # fmt: skip


def _qwen3(**more: Any) -> dict[str, Any]:
    new = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 10, "model_type": "qwen3",
           "rope_scaling": None, "sliding_window": None, "transformers_version": "4.51.0"}  # fmt: skip
    return _qwen() | new | more


_phi = partial(dict, {
    "_name_or_path": "microsoft/phi-2", "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "hidden_act": "gelu_new",
    "hidden_size": 40, "initializer_range": 0.3, "intermediate_size": F, "layer_norm_eps": 1e-05,
    "max_position_embeddings": CONTEXT, "model_type": "phi", "num_attention_heads": 4, "num_hidden_layers": L,
    "num_key_value_heads": 4, "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1,
    "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.37.0", "use_cache": True, "vocab_size": 51,
})  # fmt: skip
_phi3 = partial(dict, {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu",
    "hidden_size": D, "initializer_range": 0.3, "intermediate_size": F, "max_position_embeddings": CONTEXT,
    "model_type": "phi3", "num_attention_heads": 4, "num_hidden_layers": L, "num_key_value_heads": 4,
    "original_max_position_embeddings": CONTEXT, "pad_token_id": 32, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 9, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True, "vocab_size": V,
})  # fmt: skip
_gemma = partial(dict, {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 1, "head_dim": 10, "hidden_act": "gelu", "hidden_size": D, "initializer_range": 0.3,
    "intermediate_size": F, "max_position_embeddings": CONTEXT, "model_type": "gemma", "num_attention_heads": 6,
    "num_hidden_layers": L, "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.38.0.dev0",
    "use_cache": True, "vocab_size": V,
})  # fmt: skip


def _gemma2(**more: Any) -> dict[str, Any]:
    new = {
        "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma2", "num_key_value_heads": 3, "query_pre_attn_scalar": 17, "sliding_window": 5,
        "torch_dtype": "float32", "transformers_version": "4.42.0.dev0",
    }  # fmt: skip
    return {key: value for key, value in _gemma().items() if key != "rope_scaling"} | new | more


def _gemma3(**more: Any) -> dict[str, Any]:
    new = {
        "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "model_type": "gemma3_text",
        "num_hidden_layers": 7, "query_pre_attn_scalar": 17, "rope_local_base_freq": 10000, "rope_theta": 1000000,
        "sliding_window": 5, "sliding_window_pattern": 6, "transformers_version": "4.50.0.dev0",
    }  # fmt: skip
    return {key: value for key, value in _gemma().items() if key != "hidden_act"} | new | more


def _granite(**more: Any) -> dict[str, Any]:
    return _llama("4.46.0.dev0") | {
        "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
        "attention_multiplier": 0.15625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
        "logits_scaling": 8.0, "mlp_bias": False, "model_type": "granite", "num_key_value_heads": 2,
        "pad_token_id": 0, "residual_multiplier": 0.22, "rope_scaling": None, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    } | more  # fmt: skip


_LLAMA_3 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 38, "eos_token_id": [36, 37, 39],
    "mlp_bias": False, "num_key_value_heads": 2, "pretraining_tp": 1, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
             "rope_type": "llama3"}  # fmt: skip
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2,
            "rope_theta": 10000.0, "sliding_window": 5, "torch_dtype": "bfloat16"}  # fmt: skip
_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 12, "norm_topk_prob": True,
        "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": False,
        "router_aux_loss_coef": 0.001}  # fmt: skip

UNREAD_THERE = {"Phi-3-mini-128k"}  # loads here alone

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(),
    "gpt2-medium": _gpt2(n_special=0, predict_special_tokens=True),
    "gpt2-xl": _gpt2(n_special=0, predict_special_tokens=True, output_past=True),
    "distilgpt2": _gpt2(
        _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, transformers_version="4.0.0"
    ),
    "DialoGPT-small": {key: value for key, value in _gpt2().items() if key != "task_specific_params"}
    | {"task_specific_params": {"conversational": {"max_length": 1000}}},
    "stanford-crfm-gpt2": _gpt2(
        reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True, gradient_checkpointing=False, n_inner=None,
        scale_attn_weights=True, torch_dtype="float32", use_cache=False, transformers_version="4.12.0.dev0",
    ),
    "pythia-70m": _neox(),
    "pythia-of-4.43": _neox(attention_bias=True, attention_dropout=0.0, classifier_dropout=0.1, hidden_dropout=0.0,
                            partial_rotary_factor=0.25, rope_scaling=None, rope_theta=10000),
    "gpt-neox-20b": _neox(attention_probs_dropout_prob=0, hidden_dropout_prob=0, hidden_act="gelu_fast"),
    "dolly-v2-3b": _neox(rotary_emb_base=5000, custom_pipelines=None, rotary_pct=1.0, use_cache=False),
    "redpajama-3b": _neox(use_parallel_residual=False, rotary_pct=1.0),
    "gpt-j-6b": {
        "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
        "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False,
        "initializer_range": 0.3, "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 32, "n_head": 4,
        "n_inner": None, "n_layer": L, "n_positions": CONTEXT, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 6,
        "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
        "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0",
        "use_cache": True, "vocab_size": V,
    },
    "huggyllama/llama-7b": _llama("4.28.1", max_sequence_length=CONTEXT, pad_token_id=0, rms_norm_eps=1e-06),
    "Llama-2-7b": _llama(_name_or_path="meta-llama/Llama-2-7b-hf", num_key_value_heads=6, pretraining_tp=1,
                         rope_scaling=None),
    "CodeLlama-7b": _llama("4.33.0.dev0", num_key_value_heads=6, pretraining_tp=1, rope_scaling=None,
                           rope_theta=1000000, torch_dtype="bfloat16"),
    "Llama-3.1-8B": _llama("4.43.0.dev0", **_LLAMA_3, rope_scaling=LLAMA_31),
    "Llama-3.2-1B": _llama("4.45.0.dev0", **_LLAMA_3 | {"tie_word_embeddings": True}, head_dim=10,
                           rope_scaling=LLAMA_31 | {"factor": 32.0}),
    "unsloth/Llama-3.2-1B": _llama("4.47.1", **_LLAMA_3, head_dim=10, rope_scaling=LLAMA_31, unsloth_fixed=True,
                                   unsloth_version="2024.9.post1", pad_token_id=40),
    "TinyLlama": _llama("4.35.0", attention_bias=False, num_key_value_heads=2, pretraining_tp=1, rope_scaling=None,
                        rope_theta=10000.0),
    "SmolLM2-135M-Instruct": _llama(
        "4.42.3", attention_bias=False, attention_dropout=0.0, is_llama_config=True, mlp_bias=False,
        num_key_value_heads=3, pad_token_id=2, pretraining_tp=1, rope_interleaved=False, rope_scaling=None,
        rope_theta=100000, tie_word_embeddings=True,
        **{"transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
    ),
    "Yi-6B": _llama("4.34.0", num_key_value_heads=2, pad_token_id=0, pretraining_tp=1, rope_scaling=None,
                    rope_theta=5000000.0),
    "deepseek-llm-7b": _llama("4.33.1", attention_bias=False, bos_token_id=100000, eos_token_id=100001,
                              num_key_value_heads=6, pretraining_tp=1, rope_scaling=None, rope_theta=10000.0),
    "deepseek-coder-6.7b": _llama("4.33.1", num_key_value_heads=6, pretraining_tp=1, rope_theta=100000,
                                  rope_scaling={"factor": 4.0, "type": "linear"}),
    "vicuna-16k": _llama("4.31.0", pretraining_tp=1, max_sequence_length=CONTEXT, num_key_value_heads=6,
                         rope_scaling={"factor": 8.0, "type": "linear"}),
    "DeepSeek-R1-Distill-Llama": _llama("4.43.0.dev0", **_LLAMA_3, rope_scaling=LLAMA_31),
    "dynamic-ntk": _llama("4.34.0", num_key_value_heads=6, rope_scaling={"factor": 2.0, "type": "dynamic"}),
    "yarn-llama-2": _llama(
        "4.31.0", num_key_value_heads=6, pretraining_tp=1,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 16, "type": "yarn", "finetuned": True},
    ),
    "Mistral-7B-v0.1": _llama("4.34.0.dev0", **_MISTRAL),
    "Mistral-7B-v0.3": _llama("4.42.0.dev0", **_MISTRAL | {"sliding_window": None}, attention_dropout=0.0),
    "Mistral-Nemo": _llama("4.43.0.dev0", **_MISTRAL | {"sliding_window": None, "rope_theta": 1e6},
                           attention_dropout=0.0, head_dim=10),
    "zephyr-7b": _llama("4.35.0", **_MISTRAL, _name_or_path="mistralai/Mistral-7B-v0.1", pad_token_id=2),
    "Mixtral-8x7B": _llama(
        "4.36.0.dev0", **_MISTRAL | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        | {"sliding_window": None, "rope_theta": 1000000.0, "intermediate_size": 20}, attention_dropout=0.0,
        num_experts_per_tok=2, num_local_experts=8, output_router_logits=False, router_aux_loss_coef=0.02,
    ),
    "Qwen1.5-0.5B": _qwen(transformers_version="4.37.0", max_window_layers=2),
    "Qwen2-0.5B": _qwen(),
    "Qwen2.5-7B": _qwen(tie_word_embeddings=False, use_mrope=False, transformers_version="4.43.1"),
    "Qwen2.5-7B-Instruct-yarn": _qwen(rope_scaling={"factor": 4.0, "original_max_position_embeddings": 16,
                                                    "type": "yarn"}),
    "Qwen2.5-7B-Instruct-1M": _qwen(dual_chunk_attention_config={
        "chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}),
    "Qwen3-0.6B": _qwen3(),
    "Qwen3-4B-yarn": _qwen3(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "Qwen3-30B-A3B": _qwen3(**_MOE, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=8),
    "phi-1_5": _phi(_name_or_path="microsoft/phi-1_5", num_key_value_heads=None, partial_rotary_factor=0.6),
    "phi-2": _phi(),
    "Phi-3-mini-4k": _phi3(),
    "Phi-3-mini-128k": _phi3(original_max_position_embeddings=13, sliding_window=CONTEXT,
                             rope_scaling={"long_factor": _LONG, "short_factor": _SHORT, "type": "su"}),
    "Phi-3.5-mini": _phi3(original_max_position_embeddings=13, sliding_window=CONTEXT,
                          rope_scaling={"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"}),
    "Phi-3-medium": _phi3(num_key_value_heads=2, sliding_window=5),
    "phi-4": {key: value for key, value in _phi3(sliding_window=None, rope_theta=250000, num_key_value_heads=2,
              _name_or_path="microsoft/phi-4", transformers_version="4.47.0").items() if key != "resid_pdrop"},
    "Phi-4-mini": _phi3(
        hidden_size=32, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
        num_key_value_heads=2, original_max_position_embeddings=13, partial_rotary_factor=0.75,
        rope_scaling={"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"}, sliding_window=262144,
        tie_word_embeddings=True, transformers_version="4.45.0",
    ),
    "gemma-2b": _gemma(),
    "gemma-1.1-7b": _gemma(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
                           num_key_value_heads=6),
    "gemma-2-2b": _gemma2(),
    "gemma-2-9b": _gemma2(query_pre_attn_scalar=10, sliding_window_size=4096),
    "gemma-3-1b": _gemma3(),
    "gemma-3-270m": _gemma3(
        _sliding_window_pattern=6, layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        use_bidirectional_attention=False, transformers_version="4.55.0.dev0",
    ),
    "starcoder2-3b": {
        "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
        "attention_softmax_in_fp32": True, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": D, "initializer_range": 0.3, "intermediate_size": F,
        "layer_norm_epsilon": 1e-05, "max_position_embeddings": CONTEXT, "mlp_type": "default",
        "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 6,
        "num_hidden_layers": L, "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 5,
        "torch_dtype": "bfloat16", "transformers_version": "4.37.0.dev0", "use_bias": True, "use_cache": True,
        "vocab_size": V,
    },
    "granite-3.0-2b": _granite(),
    "granite-3.1-8b": _granite(tie_word_embeddings=False, rope_theta=5000000.0),
}  # fmt: skip
