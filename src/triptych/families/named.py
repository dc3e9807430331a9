"""Configs of models that the lectures name, in HF's own keys: enough to count one, or to create it at random.

Sources: the papers of GPT-3 (Brown et al. 2020, table 2.1) and of the Transformer (Vaswani et al. 2017, table 3, with a
shared vocabulary of 37,000), and the configs that were published with the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _transformer(width: int, heads: int, hidden: int) -> dict[str, Any]:
    """The encoder-decoder of Vaswani et al. 2017, as Marian builds it."""
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", 6), ("attention_heads", heads), ("ffn_dim", hidden))
    }
    return {"model_type": "marian", "d_model": width, "vocab_size": 37_000, "max_position_embeddings": 512,
            "activation_function": "relu", "dropout": 0.1, "scale_embedding": True, "pad_token_id": 0,
            "eos_token_id": 1, "decoder_start_token_id": 0, **sides}  # fmt: skip


NAMED: Mapping[str, Mapping[str, Any]] = {
    "bert-base": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 30_522, "hidden_size": 768,
        "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512,
        "type_vocab_size": 2,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    },
    "gpt3-175b": {
        "model_type": "gpt2", "vocab_size": 50_257, "n_embd": 12_288, "n_layer": 96, "n_head": 96, "n_positions": 2048,
    },
    "transformer-base": _transformer(512, 8, 2048),
    "transformer-big": _transformer(1024, 16, 4096) | {"dropout": 0.3},
    "t5-base": {
        "model_type": "t5", "vocab_size": 32_128, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12,
        "num_heads": 12, "relative_attention_num_buckets": 32, "decoder_start_token_id": 0, "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "llama-7b": {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen2.5-72b": {
        "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "bos_token_id": 151_643, "eos_token_id": 151_645,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "tie_word_embeddings": True,
        "bos_token_id": 151_643, "eos_token_id": 151_645,
    },
}  # fmt: skip
