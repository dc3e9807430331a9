"""RoPE from a `config.json`: one reader for both layouts of the keys.  Its arithmetic is in attention/rope.py.

Since transformers 5 everything is under `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`, whose
kind was called `type` and later `rope_type`.
"""

import math
from collections.abc import Mapping
from functools import partial

from triptych.mapping import ConfigKeys
from triptych.spec import RopeSpec
from triptych.spec.positions import Interpolate, Llama3, LongRope, Scaling, YaRN

PART, MIN_BASE = "partial_rotary_factor", 2.0  # no base is smaller, and YaRN divides by its logarithm


def rope(
    keys: ConfigKeys,
    head_width: int,
    share: float | None = None,
    base: str = "rope_theta",
    part: str = PART,
) -> RopeSpec:
    """The position part of `keys`, for heads of width K.

    `share` is the default share of a head that is rotated, None where all of it
    is whatever the config has; `base` and `part` are the names of the two keys outside of the table.  Raises
    ConfigError for a scaling that is not understood.
    """
    table, theta = keys.table("rope_parameters"), keys.float(base, default=10_000.0, low=MIN_BASE)  # both count as read
    return _rope(keys, keys.table("rope_scaling") or table, head_width, theta, share, part)


def rope_by_layer_type(keys: ConfigKeys, head_width: int, bases: Mapping[str, float]) -> tuple[RopeSpec, RopeSpec]:
    """The position parts of layers that see everything and of those with a window.

    `bases` has the keys of both bases before transformers 5 with the family's defaults.  Then a scaling, which only
    families with a plain `rope_theta` have, was the first's.
    """
    table = keys.table("rope_parameters") or ConfigKeys({}, f"{keys.where}: rope_parameters")
    full, sliding = table.table("full_attention"), table.table("sliding_attention")
    table.finish()
    old = keys.table("rope_scaling") if "rope_theta" in bases else None
    if old and (full or "rope_type" not in old.data):
        raise keys.error("rope_scaling must have a rope_type, and must not occur together with rope_parameters")
    theta, local = (keys.float(name, default, low=MIN_BASE) for name, default in bases.items())
    return _rope(keys, old or full, head_width, theta), _rope(keys, sliding, head_width, local)


def _rope(
    keys: ConfigKeys, table: ConfigKeys | None, width: int, theta: float, share: float | None = None, part: str = PART
) -> RopeSpec:
    """The part for heads of `width` that `table` describes, and the keys beside the table, in `keys`."""
    scaling = table or ConfigKeys({}, f"{keys.where}: rope_parameters")
    rotated = scaling.float(PART, default=keys.float(part, default=share or 1.0, high=1.0), high=1.0)
    if share is None and rotated != 1.0:
        problem = "the reference of this family rotates whole heads and ignores the key, other programs obey it"
        raise keys.error(f"{PART} {rotated} is not 1: {problem}")
    rope = RopeSpec(
        width=int(width * rotated + 1e-6),  # 49 * (2 / 49) is slightly less than 2
        theta=scaling.float("rope_theta", default=theta, low=MIN_BASE),
        scaling=_scaling(scaling, keys),
    )
    if rope.width < 2 or rope.width % 2:
        raise keys.error(f"rotary width {rope.width} of heads {width} wide must be even and above 0")
    scaling.finish(metadata={"type", "rope_type", "finetuned"})
    return rope


def _scaling(scaling: ConfigKeys, keys: ConfigKeys) -> Scaling | None:
    context, name = keys.optional_int("max_position_embeddings"), "original_max_position_embeddings"
    outer, own = keys.optional_int(name), scaling.optional_int(name)  # read both: some have them without a scaling
    original = outer or own or context
    kind = scaling.str("rope_type", default=scaling.str("type", default="default"))
    if kind == "default":
        return None
    kind = "longrope" if kind == "su" else kind  # its name in the first Phi-3 configs
    above_zero = partial(scaling.float, low=1e-6)
    if kind in ("linear", "dynamic"):
        # Dynamic frequencies change only for rows longer than max_position_embeddings.  Those are refused: keys cached
        # before that length would differ from those of one full forward.
        factor = above_zero("factor")
        return Interpolate(factor=factor) if kind == "linear" else None
    if kind not in ("yarn", "llama3", "longrope"):
        raise scaling.error(f"rope_type {kind[:40]!r} is not default, linear, dynamic, yarn, llama3 or longrope")
    if original is None or original < 2:
        raise scaling.error("needs original_max_position_embeddings, or max_position_embeddings beside it, above 1")
    if kind == "llama3":
        return Llama3(
            factor=above_zero("factor"),
            low_freq_factor=above_zero("low_freq_factor"),
            high_freq_factor=above_zero("high_freq_factor"),
            original_length=original,
        )
    stretch = scaling.optional_float("factor", low=1e-6) or (context or original) / original
    if kind == "yarn":
        return YaRN(
            factor=stretch,
            original_length=original,
            beta_fast=scaling.optional_float("beta_fast", low=1e-6, high=1e6) or 32.0,
            beta_slow=scaling.optional_float("beta_slow", low=1e-6, high=1e6) or 1.0,
            attention_factor=scaling.optional_float("attention_factor"),
            mscale=scaling.optional_float("mscale"),
            mscale_all_dim=scaling.optional_float("mscale_all_dim"),
            truncate=scaling.bool("truncate", default=True),
        )
    attention = scaling.optional_float("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return LongRope(
        short=scaling.floats("short_factor"),
        long=scaling.floats("long_factor"),
        original_length=original,
        max_length=context or original,
        attention_factor=attention,
    )
