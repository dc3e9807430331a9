"""The arithmetic of position encodings: sinusoidal vectors, the angles of RoPE with the scalings that reach longer
contexts, and biases of scores (ALiBi, T5's buckets, DeBERTa's disentangled attention)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import has_torch_function_unary

from triptych import ops
from triptych.attention.rows import PerToken
from triptych.errors import InputError
from triptych.spec.positions import NTK, Interpolate, Llama3, LongRope, RopeSpec, SinusoidalSpec, YaRN

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
    """What cos and sin are multiplied by; 1 unless YaRN or LongRope."""
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


def alibi_slopes(heads: int) -> Float[Tensor, " H"]:
    """Press et al. 2021: `2^(-8i/H)` for H a power of two; otherwise those of the power below, then every other one
    of the power above."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)][: heads - power]
    return torch.tensor(slopes, dtype=torch.float32)


@ops.implements("alibi_bias")
def alibi_bias(heads: int, q_pos: Int[Tensor, "... T"], k_pos: Int[Tensor, "... S"]) -> Float[Tensor, "*B H T S"]:
    """`-slope[h] * |q_pos - k_pos|`, fp32: `[H, T, S]`, or `[B, H, T, S]` for positions `[B, T]`, `[B, S]`."""
    if has_torch_function_unary(q_pos):
        return ops.record(alibi_bias, heads, q_pos, k_pos)
    distance = (q_pos[..., :, None] - k_pos[..., None, :]).abs().float()
    return -alibi_slopes(heads).to(q_pos.device)[:, None, None] * distance[..., None, :, :]


def t5_bucket(
    relative: Int[Tensor, ...], *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Int[Tensor, ...]:
    """The bucket of `k_pos - q_pos` (Raffel et al. 2020): half of them exact, the rest logarithmic up to
    `max_distance` and shared beyond.  Bidirectional: the upper half for keys ahead; otherwise those share bucket 0.

    Raises InputError for too few buckets, and for a distance for which the formula gives none.
    """
    most = buckets
    if bidirectional:
        buckets //= 2
        ahead = (relative > 0).long() * buckets
        distance = relative.abs()
    else:
        ahead = torch.zeros_like(relative, dtype=torch.long)
        distance = (-relative).clamp(min=0)
    exact = buckets // 2
    if exact < 1:
        raise InputError(f"t5 buckets: {most} are too few; the nearest distance needs a bucket of its own")
    if max_distance == exact:
        far = torch.full_like(distance, -(1 << 40))
    else:
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
        far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    bucket = ahead + torch.where(distance < exact, distance, far)
    # Where even the largest distance has a bucket of its own, the formula divides by a logarithm of zero or less: it
    # holds for shorter distances, and gives some longer ones a bucket, as in transformers.
    if max_distance <= exact and (bucket < 0).any():
        furthest = int(distance[bucket < 0].min())
        problem = f"a distance of {furthest} has no bucket: {exact} have one each, and the largest is {max_distance}"
        raise InputError(f"t5 buckets: {problem}; shorten the text")
    return bucket


@ops.implements("t5_bias")
def t5_bias(
    weight: Float[Tensor, "buckets H"],
    q_pos: Int[Tensor, "... T"],
    k_pos: Int[Tensor, "... S"],
    *,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Float[Tensor, "*B H T S"]:
    """The learned scalar of each head and bucket: `[H, T, S]`, or `[B, H, T, S]` for positions `[B, T]`, `[B, S]`."""
    if has_torch_function_unary(q_pos):
        return ops.record(t5_bias, weight, q_pos, k_pos, max_distance, bidirectional)
    relative = k_pos[..., None, :] - q_pos[..., :, None]
    bucket = t5_bucket(relative, buckets=weight.shape[0], max_distance=max_distance, bidirectional=bidirectional)
    return torch.nn.functional.embedding(bucket, weight).movedim(-1, -3)


def distance_row(distance: Int[Tensor, ...], *, span: int, max_distance: int | None = None) -> Int[Tensor, ...]:
    """The row of `Disentangled`'s table that holds `q_pos - k_pos`: `distance + span` within the `2 * span` rows (He et
    al. 2021, equation 3).  With `max_distance`, what is beyond span/2 becomes logarithmic first, in fp32 as models are
    trained."""
    if max_distance is not None:
        near = span // 2
        whole = torch.log(torch.tensor((max_distance - 1) / near))
        growth = torch.log(distance.abs().clamp(min=near).float() / near) / whole
        far = (near + (growth * (near - 1)).ceil().long()) * distance.sign()
        distance = torch.where(distance.abs() <= near, distance, far)
    return (distance + span).clamp(0, 2 * span - 1)


@ops.implements("reached_table")
def reached_table(
    weight: Float[Tensor, "R D"], positions: PerToken, longest: int, span: int, max_distance: int | None = None
) -> Float[Tensor, "R2 D"]:
    """The rows of `Disentangled`'s table that distances of at most `longest` reach; `positions` are those of the rows'
    tokens."""
    if has_torch_function_unary(positions):
        return ops.record(reached_table, weight, positions, longest, span, max_distance)
    first, last = distance_row(torch.tensor([-longest, longest]), span=span, max_distance=max_distance).tolist()
    return weight[first : last + 1]


@ops.implements("reached_row")
def reached_row(
    q_pos: Int[Tensor, "... T"], k_pos: Int[Tensor, "... S"], longest: int, span: int, max_distance: int | None = None
) -> Int[Tensor, "... T S"]:
    """Where in `reached_table` a query finds each key.  Padding and empty slots may be further than `longest`; nobody
    sees them."""
    if has_torch_function_unary(q_pos):
        return ops.record(reached_row, q_pos, k_pos, longest, span, max_distance)
    distance = (q_pos[..., :, None] - k_pos[..., None, :]).clamp(-longest, longest)
    first = distance_row(torch.tensor([-longest], device=q_pos.device), span=span, max_distance=max_distance)
    return distance_row(distance, span=span, max_distance=max_distance) - first


@ops.implements("disentangled_bias")
def disentangled_bias(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    row: Int[Tensor, "... T S"],
    *,
    pos_q: Float[Tensor, "R H K"] | None = None,
    pos_k: Float[Tensor, "R G K"] | None = None,
) -> Float[Tensor, "B H T S"]:
    """`q . pos_k[row] + pos_q[row] . k` of every pair (He et al. 2021), unscaled; `row` is `[T, S]` or `[B, T, S]`.

    A term without its vectors is left out; one must be there.
    """
    if has_torch_function_unary(q):
        return ops.record(disentangled_bias, q, k, row, pos_q, pos_k)
    shape = (*q.shape[:3], k.shape[2])
    row, shared = row[..., None, :, :].expand(shape), q.shape[1] // k.shape[1]
    terms = []
    if pos_k is not None:
        terms.append((q @ pos_k.repeat_interleave(shared, 1).permute(1, 2, 0)).gather(-1, row))
    if pos_q is not None:
        terms.append((k.repeat_interleave(shared, 1) @ pos_q.permute(1, 2, 0)).gather(-1, row.mT).mT)
    return sum(terms[1:], terms[0])
