"""Attention and what it stands on: pure functions of tensors, no modules."""

from triptych.attention.caches import Cache, CrossCache, FullCache, LayerSpec, NullCache, WindowCache
from triptych.attention.dispatch import PATHS, attend, why
from triptych.attention.mechanisms import Mechanism, additive, additive_over, dot_product, linear, run_linear
from triptych.attention.positions import (
    alibi_bias,
    alibi_slopes,
    attention_factor,
    disentangled_bias,
    distance_row,
    inverse_frequencies,
    rope_angles,
    rotate,
    sinusoidal,
    t5_bias,
    t5_bucket,
)
from triptych.attention.reference import Hook, attend_reference, attention_pattern, attention_scores
from triptych.attention.request import Request, prepare
from triptych.attention.rows import FlatKeys, Rows, SlotKeys, attend_rows

__all__ = [
    "PATHS",
    "Cache",
    "CrossCache",
    "FlatKeys",
    "FullCache",
    "Hook",
    "LayerSpec",
    "Mechanism",
    "NullCache",
    "Request",
    "Rows",
    "SlotKeys",
    "WindowCache",
    "additive",
    "additive_over",
    "alibi_bias",
    "alibi_slopes",
    "attend",
    "attend_reference",
    "attend_rows",
    "attention_factor",
    "attention_pattern",
    "attention_scores",
    "disentangled_bias",
    "distance_row",
    "dot_product",
    "inverse_frequencies",
    "linear",
    "prepare",
    "rope_angles",
    "rotate",
    "run_linear",
    "sinusoidal",
    "t5_bias",
    "t5_bucket",
    "why",
]
