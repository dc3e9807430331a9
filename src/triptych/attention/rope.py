"""The arithmetic of sinusoidal vectors and of RoPE: its angles, with the scalings that reach longer contexts (YaRN,
Llama 3, LongRoPE and others), and the rotation.  Position biases are in `position_biases.py`."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import has_torch_function_unary

from triptych import ops
from triptych.errors import InputError
from triptych.spec.positions import NTK, Interpolate, Llama3, LongRope, RopeSpec, SinusoidalSpec, YaRN
from .rows import PerToken

PerPair = Float[Tensor, "N half"]


def sinusoidal(positions: PerToken, spec: SinusoidalSpec) -> Float[Tensor, "N D"]:
    """Vaswani et al. 2017, section 3.5: `sin(p / theta^(2i/D))` and `cos` of the same, fp32."""
    return ops.sinusoids(positions, spec.width, spec.theta, spec.layout)


def rope_angles(
    spec: RopeSpec,
    positions: PerToken,
    length: int | PerToken | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[PerPair, PerPair]:
    """cos and sin `[N, width / 2]` with the scaling's attention factor multiplied in.

    length   total length of the row, or of each token's row; needed by LongRope alone, to choose its factors.
    dtype    what angles are computed in: fp32, as models are trained, or fp64.

    Raises InputError for LongRope without a length.
    """
    frequencies = inverse_frequencies(spec, length).to(dtype).to(positions.device)
    angles = positions[:, None].to(dtype) * frequencies
    factor = attention_factor(spec)
    return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies(spec: RopeSpec, length: int | PerToken | None = None) -> Float[Tensor, "*N half"]:
    """Radians per position of each pair, fp64 on the host: `[width / 2]`, `[N, width / 2]` with a length per token."""
    base = _inverse(spec.theta, spec.width)
    match spec.scaling:
        case None:
            return base
        case Interpolate(factor=factor):
            return base / factor
        case NTK(factor=factor):
            return _inverse(spec.theta * factor ** (spec.width / (spec.width - 2)), spec.width)
        case YaRN():
            return _yarn(base, spec, spec.scaling)
        case Llama3():
            return _llama3(base, spec.scaling)
        case LongRope():
            return _longrope(base, spec.scaling, length)


def rotation(
    spec: RopeSpec,
    positions: PerToken,
    length: PerToken | None,
    dtype: torch.dtype,
) -> ops.Rotation:
    """The rotation of tokens at these positions, as `ops.rotate` reads it; `length` as in `rope_angles`.

    Symbolic positions record two operations, one per tensor; the interpreter runs each with numbers."""
    if has_torch_function_unary(positions):
        of = (spec, positions, length, dtype)
        cos, sin = (ops.record(part, *of) for part in (rotation_cos, rotation_sin))
        return ops.Rotation(cos, sin, spec.pairing)
    return rotation_of(*rope_angles(spec, positions, length, dtype), spec.pairing)


@ops.implements("rotation_cos")
def rotation_cos(spec: RopeSpec, positions: Tensor, length: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[N, 1, width], the cosines of `rotation`."""
    return rotation(spec, positions, length, dtype).cos


@ops.implements("rotation_sin")
def rotation_sin(spec: RopeSpec, positions: Tensor, length: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[N, 1, width], the sines of `rotation`, that of the first dimension of each pair negated."""
    return rotation(spec, positions, length, dtype).sin


def attention_factor(spec: RopeSpec) -> float:
    """The factor of cos and sin; 1 unless YaRN or LongRope."""
    match spec.scaling:
        case YaRN(attention_factor=None) as yarn:
            if yarn.mscale and yarn.mscale_all_dim:
                return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
            return _mscale(yarn.factor, 1.0)
        case LongRope(attention_factor=None) as longrope:
            stretch = longrope.max_length / longrope.original_length
            return math.sqrt(1 + math.log(stretch) / math.log(longrope.original_length)) if stretch > 1 else 1.0
        case YaRN(attention_factor=float(factor)) | LongRope(attention_factor=float(factor)):
            return factor
        case _:
            return 1.0


def rotate(x: Float[Tensor, "N H K"], cos: PerPair, sin: PerPair, pairing: str = "half") -> Float[Tensor, "N H K"]:
    """Turn the first `2 * half` dimensions of each head (Su et al. 2021); the rest pass.  In fp32 or better, returned
    in the dtype of `x`.

    pairing   `half` pairs dimension i with i + half; `interleaved` pairs 2i with 2i + 1.
    """
    return ops.rotate(x, rotation_of(cos, sin, pairing))


def rotation_of(cos: PerPair, sin: PerPair, pairing: str) -> ops.Rotation:
    """The data that `ops.rotate` reads, from one cosine and sine per pair."""
    if pairing == "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    else:
        cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    return ops.Rotation(cos.unsqueeze(-2), sin.unsqueeze(-2), pairing)


def _inverse(theta: float, width: int) -> Tensor:
    """`theta^(-2i/width)`, fp64."""
    return torch.pow(theta, -torch.arange(0, width, 2, dtype=torch.float64) / width)


def _yarn(base: Tensor, spec: RopeSpec, yarn: YaRN) -> Tensor:
    """Peng et al. 2023, section 3.2: pairs that turn more than beta_fast times in the original length keep their
    frequency, those that turn less than beta_slow times are interpolated, a ramp between."""

    def pair_turning(times: float) -> float:
        return spec.width * math.log(yarn.original_length / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.width - 1)
    span = high - low or 0.001  # the published code's guard
    interpolated = ((torch.arange(base.shape[0], dtype=torch.float64) - low) / span).clamp(0, 1)
    return base / yarn.factor * interpolated + base * (1 - interpolated)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(base: Tensor, llama: Llama3) -> Tensor:
    """Llama 3.1: by how often a pair turns in the original length, interpolated below low_freq_factor, kept above
    high_freq_factor, blended between."""
    turns = llama.original_length * base / (2 * math.pi)
    unscaled = ((turns - llama.low_freq_factor) / (llama.high_freq_factor - llama.low_freq_factor)).clamp(0, 1)
    return base * unscaled + base / llama.factor * (1 - unscaled)


def _longrope(base: Tensor, longrope: LongRope, length: int | Tensor | None) -> Tensor:
    if length is None:
        raise InputError("longrope: the row's length decides between its short and long factors; give `length`")
    short = base / torch.tensor(longrope.short, dtype=torch.float64)
    long = base / torch.tensor(longrope.long, dtype=torch.float64)
    if isinstance(length, int):
        return long if length > longrope.original_length else short
    return torch.where((length.cpu() > longrope.original_length)[:, None], long, short)
