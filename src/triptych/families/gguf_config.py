"""GGUF metadata as HF keys: sizes and RoPE of decoder-only families, and the pooling of encoders."""

from triptych.mapping import ConfigKeys, Values
from triptych.mapping.gguf_metadata import POOLING, TENSORS


def sizes(keys: ConfigKeys) -> Values:
    return {
        "hidden_size": keys.int("embedding_length"),
        "intermediate_size": keys.int("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": keys.count("attention.head_count"),
    }


def header(keys: ConfigKeys, name: str, *, partial: bool = False) -> Values:
    """Sizes and RoPE of a `{name}ForCausalLM`, under the HF names most families use; `partial` as for `_head_width`."""
    return {
        "architectures": [f"{name}ForCausalLM"],
        **sizes(keys),
        "num_key_value_heads": keys.count("attention.head_count_kv", default=keys.count("attention.head_count")),
        "max_position_embeddings": keys.int("context_length"),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
        "rope_parameters": rope(keys),
        **_head_width(keys, partial=partial),
    }


def _head_width(keys: ConfigKeys, *, partial: bool) -> Values:
    """`head_dim`, and with `partial` the share of it that is rotated."""
    default = keys.int("embedding_length") // keys.count("attention.head_count")
    rotary = default if partial else keys.int("rope.dimension_count", default=default)
    inner = keys.int("attention.key_length", default=rotary)
    rotated = keys.int("rope.dimension_count", default=inner)
    if keys.int("attention.value_length", default=inner) != inner or (rotated != inner and not partial):
        raise keys.error("key, value and rotary widths of a head differ, which no such model does")
    return {"head_dim": inner} | ({"partial_rotary_factor": rotated / inner} if partial else {})


def rope(keys: ConfigKeys, theta: float = 10_000.0) -> Values:
    """`rope_parameters`; `theta` is the family's default base."""
    parameters: Values = {"rope_type": "default", "rope_theta": keys.float("rope.freq_base", default=theta)}
    length = keys.get("rope.scaling.original_context_length", None)
    factors, short, long = (keys.get(name, None) for name in TENSORS)
    names = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
    kind = keys.choice("rope.scaling.type", names, default="none")
    keys.get("rope.scaling.finetuned", None)  # about training; changes nothing in the forward
    if factors is not None:
        # Llama 3's scaling is stored as one divisor a frequency, the same at every length: LongRoPE expresses that.
        divisors = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        length = keys.int("context_length")
        parameters |= {"rope_type": "longrope", "original_max_position_embeddings": length} | divisors
    elif short is not None:
        divisors = {"short_factor": short, "long_factor": long}
        parameters |= {"rope_type": "longrope", "original_max_position_embeddings": length} | divisors
        parameters["attention_factor"] = keys.optional_float("rope.scaling.attn_factor")
    elif kind == "linear":
        parameters |= {"rope_type": kind, "factor": keys.float("rope.scaling.factor")}
    elif kind == "yarn":
        factor = keys.float("rope.scaling.factor")
        parameters |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}
    return parameters


def pooling(keys: ConfigKeys) -> Values:
    """`triptych_pooling` of an encoder.  Whether vectors are scaled to length 1 is a key of ours: GGUF has none."""
    if keys.flag("attention.causal"):
        raise keys.error("attention.causal is set, which no encoder is")
    mode = POOLING[keys.int("pooling_type", default=1, low=1, high=len(POOLING))]
    return {"mode": mode, "normalize": keys.flag("pooling_normalize")}
