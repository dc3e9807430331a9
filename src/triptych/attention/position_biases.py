"""The arithmetic of position biases, which are added to scores: ALiBi, T5's buckets, DeBERTa's
disentangled attention."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import has_torch_function_unary

from triptych import ops
from triptych.errors import InputError
from .rows import PerToken


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
    distance = (q_pos[..., :, None].long() - k_pos[..., None, :].long()).abs().float()
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
        whole = torch.log(torch.tensor((max_distance - 1) / near, dtype=torch.float32))
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
    """The places in `reached_table` of a query's keys.  Padding and empty slots may be further than `longest`; nobody
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
