"""T5 in GGUF: architecture `t5`, or `t5encoder` for an encoder alone.

Reference: llama.cpp, its converter's `T5Model` and its graphs.  They support one largest distance, 128, and two MLPs:
ReLU, and GEGLU where there is a gate.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values
from . import gguf_config

archs = {"t5", "t5encoder"}


def arch(model: spec.ModelSpec) -> str:
    return "t5encoder" if model.decoder is None else "t5"


def from_gguf(keys: ConfigKeys) -> Values:
    """The HF keys.  No GGUF key tells whether the head's input is scaled: it is in v1.0, and not in later models, which
    have a gate and a head of their own."""
    alone, heads, layers = keys.str("model_type") == "t5encoder", keys.count("attention.head_count"), "block_count"
    width, gated = keys.int("embedding_length"), keys.has_tensor("enc.blk.0.ffn_gate.weight")
    inner = keys.int("attention.key_length", default=width // heads)
    if keys.count("attention.head_count_kv", default=heads) != heads:
        raise keys.error("attention.head_count_kv differs from attention.head_count, which no T5 has")
    if keys.int("attention.value_length", default=inner) != inner:
        raise keys.error("key and value widths of a head differ, which no T5 does")
    keys.get("context_length", None), keys.get("attention.layer_norm_epsilon", None)  # of the data; a double
    own = keys.has_tensor("output.weight")
    return {
        "model_type": "t5",
        "architectures": ["T5EncoderModel" if alone else "T5ForConditionalGeneration"],
        "d_model": width,
        "d_ff": keys.int("feed_forward_length"),
        "d_kv": inner,
        "num_heads": heads,
        "num_layers": keys.count(layers),
        "num_decoder_layers": None if alone else keys.count("decoder_block_count", default=keys.count(layers)),
        "relative_attention_num_buckets": keys.count("attention.relative_buckets_count"),
        "layer_norm_epsilon": keys.float("attention.layer_norm_rms_epsilon"),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not own,
        "scale_decoder_outputs": not (own and gated),
        "decoder_start_token_id": keys.optional_int("decoder_start_token_id", low=0),
        **({"triptych_pooling": gguf_config.pooling(keys)} if alone else {}),
    }


def to_gguf(model: spec.ModelSpec) -> Values:
    buckets = next(part.buckets for _, part in model.walk() if isinstance(part, spec.T5BucketsSpec))
    metadata: Values = {
        "attention.relative_buckets_count": buckets,
        "context_length": 512,
    }  # required
    if model.decoder is not None:
        metadata |= {"decoder_block_count": len(model.decoder.blocks), "decoder_start_token_id": model.ids.start}
    return metadata
