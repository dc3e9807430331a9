"""Attention without `nn` modules: kernels, masks, position encodings, the KV cache, and statistics of weights."""

from .cache_steps import NULL_CACHE, CacheStep, KeyStep, KVCache, NullCache, SumPlan
from .caches import Cache
from .cross_cache import CrossCache, CrossKeys, EncoderOutput
from .dispatch import KERNELS, attend, why
from .layer_cache import CachedLayer, CacheType, StoredForm, check_cache_type, stored_form
from .mechanisms import DOT_PRODUCT, LINEAR, AdditiveOver, Mechanism, additive, linear
from .position_biases import (
    alibi_bias,
    alibi_slopes,
    disentangled_bias,
    distance_row,
    t5_bias,
    t5_bucket,
)
from .reference import attend_reference, attention_pattern, attention_scores
from .request import ContentBias, Heads, ScoreBias, prepare
from .rope import attention_factor, inverse_frequencies, rope_angles, rotate, sinusoidal
from .row_plan import (
    AttendPlan,
    FlatKeys,
    KeyLayout,
    RowPlan,
    SlotKeys,
)
from .row_scores import RowScores
from .rows import Rows
from .statistics import AttentionStatistics, KeyLabels, attention_statistics, pattern_statistics

__all__ = [
    "DOT_PRODUCT", "KERNELS", "LINEAR", "NULL_CACHE", "AdditiveOver", "AttendPlan",
    "AttentionStatistics", "Cache", "CacheStep", "CacheType", "CachedLayer", "ContentBias", "CrossCache", "CrossKeys",
    "EncoderOutput", "FlatKeys", "Heads", "KVCache", "KeyLabels", "KeyLayout", "KeyStep", "Mechanism",
    "NullCache", "RowPlan", "RowScores", "Rows", "ScoreBias", "SlotKeys", "StoredForm", "SumPlan",
    "additive", "alibi_bias", "alibi_slopes", "attend", "attend_reference", "attention_factor",
    "attention_pattern", "attention_scores", "attention_statistics", "check_cache_type", "disentangled_bias",
    "distance_row", "inverse_frequencies", "linear", "pattern_statistics", "prepare", "rope_angles",
    "rotate", "sinusoidal", "stored_form", "t5_bias", "t5_bucket", "why",
]  # fmt: skip
