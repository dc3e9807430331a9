"""The operations as functions of tensors.

Where torch has the operation under one name, the function is torch's own and a call costs what torch's does.  Each
function follows torch's override protocol: an argument that has `__torch_function__` (a symbolic value of
`triptych.program`) is handed the call instead, so the same forward that computes also describes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

linear = F.linear
embedding = F.embedding
l2_normalize = F.normalize

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def record(function: Callable[..., Tensor], symbolic: Tensor, *arguments: object) -> Tensor:
    """Let the symbolic value note the call `function(*arguments)` of an operation instead of computing it."""
    value: Tensor = handle_torch_function(function, (symbolic,), *arguments)
    return value


@runtime_checkable
class RowLengths(Protocol):
    """What the operations read of the rows of a flat batch (`triptych.attention.Rows`)."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def starts(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary position encoding (Su et al. 2021) as data, for N tokens.

    cos, sin   [N, 1, width]: `turned = x * cos + partner(x) * sin` on the first `width` dimensions of each head, where
               the sine of the first dimension of a pair is negated.
    pairing    `half` pairs dimension i with i + width/2, `interleaved` 2i with 2i + 1.
    """

    cos: Tensor
    sin: Tensor
    pairing: str


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension (Ba et al. 2016), in fp32 or better."""
    if has_torch_function_unary(x):
        return record(layer_norm, x, x, weight, bias, eps)
    if x.is_cuda and x.dtype is weight.dtype:  # this kernel computes in fp32 itself
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float | None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension (Zhang & Sennrich 2019), in fp32 or
    better."""
    if has_torch_function_unary(x):
        return record(rms_norm, x, x, weight, offset, eps)
    dtype = x.dtype
    plain = dtype is weight.dtype and not offset  # what each layer of most models calls: no casts
    if plain and (
        dtype is torch.float32 or (x.is_cuda and eps is not None)
    ):  # the kernel of a GPU computes in fp32 itself
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(dtype, torch.float32)
    weight = weight.to(wide)
    if offset:
        weight = weight + offset
    return F.rms_norm(x.to(wide), weight.shape, weight, eps).to(dtype)


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Turn the first dimensions of each head of `x` [N, H, K] by the angles of its tokens; the rest pass unchanged.  In
    fp32 or better, returned in the dtype of `x`.  Without a rotation, `x` itself."""
    if rotation is None:
        return x
    if has_torch_function_unary(x):
        return record(rotate, x, x, rotation)
    cos, sin = rotation.cos, rotation.sin
    width = cos.shape[2]
    dtype = x.dtype
    part = x if x.shape[2] == width else x[..., :width]
    wide = part if dtype is cos.dtype or x.is_cuda else part.to(cos.dtype)  # a GPU widens as it multiplies
    if rotation.pairing == "half":
        partner = wide.roll(width // 2, -1)
    else:
        partner = torch.stack((wide[..., 1::2], wide[..., 0::2]), -1).flatten(2)
    turned = wide * cos + partner * sin
    if dtype is not cos.dtype:
        turned = turned.to(dtype)
    return turned if part is x else torch.cat((turned, x[..., width:]), -1)


def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)` (Gemma 2)."""
    if has_torch_function_unary(x):
        return record(softcap, x, x, cap)
    return cap * torch.tanh(x / cap)


def dropout(x: Tensor, rate: float, training: bool, random: torch.Generator | None = None) -> Tensor:
    """In training, zero each number with probability `rate` and divide the rest by `1 - rate` (Srivastava et al. 2014);
    drawn from `random`, torch's global generator when None.  Otherwise `x` itself."""
    if not (training and rate):
        return x
    if random is None:
        return F.dropout(x, rate)
    noise = torch.empty_like(x).bernoulli_(1.0 - rate, generator=random)
    return x * noise.div_(1.0 - rate)


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, lengths: Sequence[int]) -> Tensor:
    """A convolution along each row of `x` [M, inputs], `lengths` tokens each, padded with zeros so that no row sees its
    neighbour in the batch: [M / stride, outputs]."""
    if has_torch_function_unary(x):
        return record(conv1d, x, x, weight, bias, stride, lengths)
    padding = weight.shape[2] // 2
    rows = [F.conv1d(row.T, weight, bias, stride=stride, padding=padding).T for row in x.split(list(lengths))]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def patches(x: Tensor, first: Tensor, weight: Tensor, bias: Tensor, rows: RowLengths) -> Tensor:
    """Patches [P, C * p * p] of images to vectors, each image led by the vector `first` [D]: [N, D]."""
    if has_torch_function_unary(x):
        return record(patches, x, x, first, weight, bias, rows)
    x = F.linear(x, weight.flatten(1), bias).unflatten(0, (len(rows), -1))
    return torch.cat((first.expand(len(rows), 1, -1), x), dim=1).flatten(0, 1)


def sinusoids(positions: Tensor, width: int, theta: float, layout: str) -> Tensor:
    """[N] positions -> [N, width] fp32 (Vaswani et al. 2017, section 3.5): `sin(p / theta^(2i/width))` and `cos` of the
    same, `interleaved` or all sines first."""
    if has_torch_function_unary(positions):
        return record(sinusoids, positions, positions, width, theta, layout)
    inverse = torch.pow(theta, -torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions[:, None].float() * inverse.float().to(positions.device)
    pair = (angles.sin(), angles.cos())
    return torch.stack(pair, -1).flatten(1) if layout == "interleaved" else torch.cat(pair, 1)
