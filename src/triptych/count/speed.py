"""The speed that a machine allows a model: a roofline (Williams et al. 2009) from the counts alone.

A forward reads its weights and cache and computes its matmuls, and takes at least as long as the slower of both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from triptych.count.counts import Count


@dataclass(frozen=True)
class Prediction:
    """The most tokens a second that one row can read and then decode, and FLOPs per byte of memory read.

    The intensity of a machine is its FLOPs a second over the bytes it reads a second: work of less intensity waits for
    memory, work of more for arithmetic.
    """

    prefill: float
    decode: float | None
    prefill_intensity: float
    decode_intensity: float | None
    machine_intensity: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def predict(
    count: Count, positions: int, *, read: float, flops: float, dtype: str = "bf16", cache_dtype: str = "fp16",
    source: int = 0,
) -> Prediction:  # fmt: skip
    """A prompt of `positions` tokens read at once, and one more token decoded after them.

    read    bytes that the machine reads in a second.
    flops   matmul FLOPs that it computes in a second.

    Raises InputError for a dtype that is not in `DTYPES`.
    """
    step_weights = count.step_bytes(dtype)
    # The tokens of a prompt go through different experts, so all of them are read.
    prompt_bytes = step_weights + count.weight_bytes(dtype) * (count.total - count.active) // count.total
    prompt_flops = count.prefill_flops(positions, source=source)
    prefill = positions / max(prompt_bytes / read, prompt_flops / flops)
    if count.spec.decoder is None:
        return Prediction(prefill, None, prompt_flops / prompt_bytes, None, flops / read)
    cache = count.cache_bytes(positions, dtype=cache_dtype, source=source)
    step_bytes, step_flops = step_weights + cache, count.decode_flops(positions, source=source)
    decode = 1 / max(step_bytes / read, step_flops / flops)
    return Prediction(prefill, decode, prompt_flops / prompt_bytes, step_flops / step_bytes, flops / read)
