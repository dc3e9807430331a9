"""Converts GGUF metadata to plain keys, and a spec to GGUF metadata.

All keys are computed from the parts of the spec.  A family with further or other keys has a function
`to_gguf(model) -> dict`, in which a value of None removes a key.  The metadata are then read back and compared
(`difference`): a model whose metadata would give another model is not written.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from triptych.spec import (
    LayerNormSpec,
    LMHeadSpec,
    ModelSpec,
    MoESpec,
    PoolingSpec,
    RMSNormSpec,
    RopeSpec,
    StackSpec,
    masks,
)
from triptych.spec.json import to_json
from triptych.spec.parts import FeedForward
from triptych.spec.positions import Interpolate, Llama3, LongRope, YaRN
from .config_keys import Values

TENSORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")  # divisors of RoPE, beside the metadata
POOLING = {1: "mean", 2: "first"}


def under(
    metadata: Mapping[str, Any],
    arch: str,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], Sequence[float]] | None,
) -> Values:
    """The keys under the architecture's prefix, without the prefix, and the values that only tensors hold."""
    start = f"{arch}."
    keys: Values = {
        name.removeprefix(start): _decimal(value) if isinstance(value, float) else value
        for name, value in metadata.items()
        if name.startswith(start)
    }
    for key, tensor in {"vocab_size": "token_embd.weight", "token_types": "token_types.weight"}.items():
        if tensor in shapes:
            keys[key] = shapes[tensor][0]
    for name in TENSORS:
        if (tensor := f"{name}.weight") in shapes:
            keys[name] = [float(x) for x in (read(tensor) if read else [1.0] * shapes[tensor][0])]
    return keys | {"model_type": arch}


def _decimal(value: float) -> float:
    """The shortest decimal that is stored as the same float32: 1e-5 for 0.0000099999997473787516."""
    single = struct.pack("<f", value)
    shorter = (short for n in range(1, 18) if struct.pack("<f", short := float(f"{value:.{n}g}")) == single)
    return next(shorter, value)  # NaN has bits of its own


Tensors = dict[str, list[float]]  # small ones that complete the metadata: divisors of RoPE
_UNCHANGED = {"dropout", "ids", "init_std", "family"}  # of training, of the tokenizer, and the family's name


def header(model: ModelSpec, arch: str, more: Mapping[str, Any]) -> tuple[Values, Tensors]:
    """The keys under `arch.` and the tensors that hold what no key does; `more` are the keys that the family adds."""
    stack = next(iter(model.stacks.values()))
    positions, tensors = _positions(model, stack)
    keys: Values = {
        "vocab_size": model.vocab,
        "context_length": model.context,
        "embedding_length": stack.width,
        "block_count": len(stack.blocks),
        **_attention(stack),
        **_feed_forward([block.mlp for block in stack.blocks if block.mlp is not None]),
        **positions,
    }
    if isinstance(model.head, LMHeadSpec):
        keys["final_logit_softcapping"] = model.head.softcap
    if model.layout == "encoder":
        head = model.head if isinstance(model.head, PoolingSpec) else PoolingSpec()
        number = next((number for number, mode in POOLING.items() if mode == head.mode), None)
        keys |= {"attention.causal": False, "pooling_type": number, "pooling_normalize": head.normalize or None}
    keys |= more
    return {f"{arch}.{key}": value for key, value in keys.items() if value is not None}, tensors


def _attention(stack: StackSpec) -> Values:
    """Of the first layer; where layers differ, what is read back does too."""
    attn = stack.blocks[0].attn
    even = attn.head_width == attn.value_width == stack.width / attn.heads
    norm = next(part for _, part in stack.walk() if isinstance(part, LayerNormSpec | RMSNormSpec))
    name = "layer_norm_rms_epsilon" if isinstance(norm, RMSNormSpec) else "layer_norm_epsilon"
    return {
        "attention.head_count": attn.heads,
        "attention.head_count_kv": attn.kv_heads if attn.kv_heads != attn.heads else None,
        "attention.key_length": None if even else attn.head_width,
        "attention.value_length": None if even else attn.value_width,
        f"attention.{name}": norm.eps,
        "attn_logit_softcapping": attn.softcap,
    }


def _feed_forward(mlps: Sequence[FeedForward]) -> Values:
    """The widths of dense layers and of experts."""
    mixture = next((mlp for mlp in mlps if isinstance(mlp, MoESpec)), None)
    dense = next((mlp for mlp in mlps if not isinstance(mlp, MoESpec)), None)
    widest = dense or (mixture and mixture.expert)
    keys: Values = {"feed_forward_length": widest.up.outputs if widest else None}
    if mixture is not None:
        keys |= {"expert_count": mixture.experts, "expert_used_count": mixture.top_k}
    return keys


def _positions(model: ModelSpec, stack: StackSpec) -> tuple[Values, Tensors]:
    """RoPE's width, base and scaling, and the window of layers that have one."""
    keys, tensors = Values(), Tensors()
    for kind in stack.kinds.values():
        position, size = kind.position, _window(kind.mask)
        if size is not None:
            keys["attention.sliding_window"] = size
        if not isinstance(position, RopeSpec):
            continue
        suffix = "_swa" if size is not None and len(stack.kinds) > 1 else ""
        keys[f"rope.freq_base{suffix}"] = position.theta
        if position.width != stack.blocks[0].attn.head_width:
            keys["rope.dimension_count"] = position.width
        if not suffix:
            scaling, tensors = _scaling(model, position)
            keys |= scaling
    return keys, tensors


def _window(mask: masks.Mask) -> int | None:
    """The keys a layer sees, where they are bounded."""
    parts = mask.parts if isinstance(mask, masks.And) else (mask,)
    return next((part.back for part in parts if isinstance(part, masks.Window)), None)


def _scaling(model: ModelSpec, rope: RopeSpec) -> tuple[Values, Tensors]:
    match rope.scaling:
        case Interpolate(factor=factor):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}, {}
        case YaRN(factor=factor, original_length=length):
            kind = {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
            return kind | {"rope.scaling.original_context_length": length}, {}
        case Llama3() as scaling:
            return {}, {"rope_freqs.weight": list(_divisors(rope, scaling))}
        case LongRope() as scaling if scaling.short == scaling.long and scaling.attention_factor == 1.0:
            return {}, {"rope_freqs.weight": list(scaling.short)}
        case LongRope() as scaling:
            factors = {"short": scaling.short, "long": scaling.long}
            tensors = {f"rope_factors_{name}.weight": list(values) for name, values in factors.items()}
            kind = {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": scaling.attention_factor}
            return {**kind, "rope.scaling.original_context_length": scaling.original_length}, tensors
        case _:
            return {}, {}


def _divisors(rope: RopeSpec, scaling: Llama3) -> Iterator[float]:
    """The divisor of each frequency in Llama 3's scaling: 1 for those that turn often, `factor` for the slow ones."""
    for i in range(0, rope.width, 2):
        turns = scaling.original_length * rope.theta ** (-i / rope.width) / (2 * math.pi)
        unscaled = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        unscaled = min(max(unscaled, 0.0), 1.0)
        yield 1 / (unscaled + (1 - unscaled) / scaling.factor)


def difference(model: ModelSpec, read_back: ModelSpec) -> str | None:
    """Where `read_back`, made from GGUF metadata, computes something else than `model`; None where it does not."""
    return _difference(to_json(model), to_json(read_back), "")


def _difference(a: Any, b: Any, where: str) -> str | None:
    if _same_frequencies(a, b):
        return None
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in {**a, **b} if key not in _UNCHANGED]
        differences = (_difference(a.get(key), b.get(key), f"{where}.{key}" if where else key) for key in keys)
        return next(filter(None, differences), None)
    if a == b or _close(a, b):
        return None
    return f"{where} is {_short(a)}, and would be {'lost' if b is None else f'read back as {_short(b)}'}"


def _same_frequencies(a: Any, b: Any) -> bool:
    """Whether these are scalings of RoPE that divide each frequency by the same number at every length.  Read back, a
    formula (Llama 3's) has become its divisors, and the length that separates short from long is not stored."""
    if not (isinstance(a, dict) and isinstance(b, dict) and b.get("part") == "LongRope" and b["short"] == b["long"]):
        return False
    same = a.get("part") == "LongRope" and a["short"] == a["long"] and a.get("attention_factor") == 1.0
    return a.get("part") == "Llama3" or (same and all(map(_close, a["short"], b["short"])))


def _close(a: Any, b: Any) -> bool:
    """Equal but for the float32 that metadata are stored in."""
    return isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("part", "a table"))
    return "absent" if value is None else str(value)[:60]
