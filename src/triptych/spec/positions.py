"""Position parts, as data.  A position encoding can act in three places; a part uses those it needs:

    embed(positions)                 learned, sinusoidal: added to the token embedding
    rotate(x, positions)             RoPE: turns queries and keys
    bias(q, k, q_pos, k_pos)         ALiBi, T5 buckets, DeBERTa's distances: added to the scores

The arithmetic of each is in `attention/rope.py` and `attention/position_biases.py`; this file is torch-free.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from triptych.errors import ConfigError
from .norms import LayerNormSpec
from .part import Part, Shapes


class LearnedSpec(Part):
    """A table with one vector a position; `offset` rows are skipped at its start (RoBERTa 2, BART 2)."""

    length: int
    width: int
    offset: int = 0

    def tensors(self) -> Shapes:
        return {"weight": (self.length + self.offset, self.width)}


class SinusoidalSpec(Part):
    """Vaswani et al. 2017, section 3.5.  `interleaved`: sin, cos, sin, cos; `halves`: all sines, then all cosines."""

    width: int
    theta: float = 10_000.0
    layout: Literal["interleaved", "halves"] = "interleaved"


@dataclass(frozen=True, kw_only=True)
class Interpolate:
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class NTK:
    """NTK-aware: the base becomes `theta * factor ** (width / (width - 2))`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class YaRN:
    """Peng et al. 2023: interpolate low frequencies, keep high ones, blend between; scale cos and sin by the
    attention factor (`0.1 ln(factor) + 1` when None)."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear blend between the two wavelengths."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"llama3: low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """Ding et al. 2024 (Phi-3): a factor a frequency, `short` up to `original_length` positions and `long` past it;
    cos and sin scaled by `attention_factor` (`sqrt(1 + ln(s)/ln(original_length))`, s = max_length/original_length,
    when None)."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    max_length: int
    attention_factor: float | None = None


Scaling = Interpolate | NTK | YaRN | Llama3 | LongRope


class RopeSpec(Part):
    """Su et al. 2021.  The first `width` of each head's dimensions turn (partial rotary when width < head width).
    `half` pairs dimension i with i + width/2 (HF Llama); `interleaved` pairs 2i with 2i + 1 (the paper, GPT-J)."""

    width: int
    theta: float = 10_000.0
    pairing: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None

    def _agree(self) -> None:
        if self.width % 2 or not self.theta:
            raise ConfigError(f"rope: width {self.width} must be even and theta {self.theta} above 0")
        if isinstance(self.scaling, LongRope):
            short, long, pairs = len(self.scaling.short), len(self.scaling.long), self.width // 2
            if short != pairs or long != pairs:
                raise ConfigError(f"longrope: {short} short and {long} long factors for {pairs} pairs of dimensions")


class AlibiSpec(Part):
    """Press et al. 2021: `-slope[h] * |q_pos - k_pos|`, slopes geometric in the head (their recipe when the number
    of heads is no power of two)."""

    heads: int


class T5BucketsSpec(Part):
    """Raffel et al. 2020: one learned scalar a head and bucket of `k_pos - q_pos`; half the buckets exact, the rest
    logarithmic up to `max_distance`.  Bidirectional: half of them for keys ahead."""

    heads: int
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def tensors(self) -> Shapes:
        return {"weight": (self.buckets, self.heads)}


Term = Literal["c2p", "p2c"]


class DisentangledSpec(Part):
    """He et al. 2021: a table `P` with a vector of the model's width for each distance `d = q_pos - k_pos`, which every
    layer maps to queries and keys (`Attention.pos_q`, `pos_k`) to be scored against those of its tokens:

        bias = scale * (q . pos_k(P[d]) + pos_q(P[d]) . k)        content to position, `c2p`, and `p2c`

    Row `d + span` of `2 * span` is of distance d, the first and last of all beyond.  With a `max_distance`, those up to
    span/2 have a row each and the further ones, up to `max_distance`, share the others logarithmically (v2 and v3).

    Equation 4 of the paper has p2c at `k_pos - q_pos`.  The authors' code has it at the same d, and so has every model.
    """

    width: int
    span: int
    max_distance: int | None = None
    terms: tuple[Term, ...] = ("c2p", "p2c")
    norm: LayerNormSpec | None = None
    dropout: float = 0.0

    def _agree(self) -> None:
        if not self.terms or not set(self.terms) <= set(get_args(Term)):
            raise ConfigError(f"terms of distances must be c2p, p2c or both, not {self.terms!r}")
        near = self.span // 2
        if self.max_distance is not None and not 0 < near < self.max_distance - 1:
            raise ConfigError(f"{self.span} buckets of distances cannot tell those up to {self.max_distance} apart")

    def tensors(self) -> Shapes:
        return {"weight": (2 * self.span, self.width)}


PositionSpec = RopeSpec | AlibiSpec | T5BucketsSpec | DisentangledSpec  # inside attention: the rotate and bias doors
Absolute = LearnedSpec | SinusoidalSpec  # at the input: the embed door
