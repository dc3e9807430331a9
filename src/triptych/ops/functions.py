"""The functions of the operations in `table.py`: norms, rotations, convolutions, pooling and others.

Where torch has the operation under one name, the function is torch's own and a call costs what torch's does.  Each
function follows torch's override protocol: an argument that has `__torch_function__` (a symbolic value of
`triptych.program`) is handed the call instead, so the same forward that computes also describes itself.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function_unary

from . import native_training
from .noise import Noise
from .recording import NamedCall, NotLowerable, implements, record, recorded_as

linear = implements("linear")(F.linear)
embedding = implements("embedding")(F.embedding)
implements("relu")(F.relu)
implements("silu")(F.silu)
implements("tanh")(torch.tanh)
implements("scale")(operator.mul)
implements("shift")(operator.add)
implements("multiply")(operator.mul)
implements("add")(operator.add)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a program names: `float32` for `torch.float32`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@runtime_checkable
class RowLengths(Protocol):
    """The lengths and starts of the rows of a flat batch (`triptych.attention.Rows`)."""

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


@implements("layer_norm")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension (Ba et al. 2016), in fp32 or better."""
    if has_torch_function_unary(x):
        return record(layer_norm, x, weight, bias, eps)
    if x.is_cuda and x.dtype is weight.dtype:  # this kernel computes in fp32 itself
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias, eps).to(x.dtype)


@implements("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float | None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension (Zhang & Sennrich 2019), in fp32 or
    better."""
    if has_torch_function_unary(x):
        return record(rms_norm, x, weight, offset, eps)
    large = x.requires_grad and x.numel() >= native_training.FEWEST
    if large and (y := native_training.normed(x, weight, offset, eps)) is not None:
        return y
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
        return record(rotate, x, rotation)
    cos, sin = rotation.cos, rotation.sin
    large = x.requires_grad and rotation.pairing == "half" and x.numel() >= native_training.FEWEST
    if large and (y := native_training.rotated(x, cos, sin)) is not None:
        return y
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


@implements("softcap")
def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)` (Gemma 2)."""
    if has_torch_function_unary(x):
        return record(softcap, x, cap)
    return cap * torch.tanh(x / cap)


def dropout(x: Tensor, rate: float, training: bool, random: Noise | None = None) -> Tensor:
    """In training, zero each number with probability `rate` and divide the rest by `1 - rate` (Srivastava et al. 2014);
    drawn from `random`, torch's global generator when None.  Otherwise `x` itself."""
    if not (training and rate):
        return x
    if random is None:
        return F.dropout(x, rate)
    return x * random.kept(x, rate)


@implements("conv1d")
def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, lengths: Sequence[int]) -> Tensor:
    """A convolution along each row of `x` [M, inputs], `lengths` tokens each, padded with zeros so that no row sees its
    neighbour in the batch: [M / stride, outputs]."""
    if has_torch_function_unary(x):
        return record(conv1d, x, weight, bias, stride, lengths)
    padding = weight.shape[2] // 2
    rows = [F.conv1d(row.T, weight, bias, stride=stride, padding=padding).T for row in x.split(list(lengths))]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


@implements("patches")
def patches(x: Tensor, first: Tensor, weight: Tensor, bias: Tensor, rows: RowLengths) -> Tensor:
    """Patches [P, C * p * p] of images to vectors, each image led by the vector `first` [D]: [N, D]."""
    if has_torch_function_unary(x):
        return record(patches, x, first, weight, bias, rows)
    x = F.linear(x, weight.flatten(1), bias).unflatten(0, (len(rows), -1))
    return torch.cat((first.expand(len(rows), 1, -1), x), dim=1).flatten(0, 1)


@implements("sinusoids")
def sinusoids(positions: Tensor, width: int, theta: float, layout: str) -> Tensor:
    """[N] positions -> [N, width] fp32 (Vaswani et al. 2017, section 3.5): `sin(p / theta^(2i/width))` and `cos` of the
    same, `interleaved` or all sines first."""
    if has_torch_function_unary(positions):
        return record(sinusoids, positions, width, theta, layout)
    inverse = torch.pow(theta, -torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions[:, None].float() * inverse.float().to(positions.device)
    pair = (angles.sin(), angles.cos())
    return torch.stack(pair, -1).flatten(1) if layout == "interleaved" else torch.cat(pair, 1)


@implements("l2_normalize")
def l2_normalize(x: Tensor) -> Tensor:
    """`x / |x|` over the last dimension."""
    return F.normalize(x, dim=-1)


@implements("split_heads")
def split_heads(x: Tensor, shape: Sequence[int]) -> Tensor:
    """[N, heads * width] as [N, heads, width]; `shape` is (-1 or N, heads, width)."""
    return x.view(x.shape[0], *shape[1:])


@implements("merge_heads")
def merge_heads(x: Tensor) -> Tensor:
    """[N, heads, width] as [N, heads * width]."""
    return x.flatten(1)


@implements("cast")
def cast(x: Tensor, dtype: str) -> Tensor:
    """x in another dtype."""
    return x.to(dtype_of(dtype))


@implements("rotate")
def turned(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """`rotate` with the rotation's tensors apart."""
    return rotate(x, Rotation(cos, sin, pairing))


@implements("gelu")
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """`x Φ(x)`, or with `approximate="tanh"` its tanh form (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate=approximate)


# -- calls of torch that are recorded as an operation, where their arguments are not those of the operation's function


recorded_as(F.gelu)(lambda x, approximate="none": ("gelu", {"x": x, "approximate": approximate}))
recorded_as(F.relu)(lambda x, inplace=False: ("relu", {"x": x}))
recorded_as(F.silu)(lambda x, inplace=False: ("silu", {"x": x}))
recorded_as(F.embedding)(lambda ids, weight, *options, **named: ("embedding", {"ids": ids, "weight": weight}))


@recorded_as(F.normalize)
def _l2_normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: object = None) -> NamedCall:
    if (p, dim, eps) != (2.0, -1, 1e-12):
        raise NotLowerable(f"normalize by the {p}-norm of dimension {dim} is no operation of the table (triptych.ops)")
    return "l2_normalize", {"x": x}


@recorded_as(rotate)
def _rotate(x: Tensor, rotation: Rotation) -> NamedCall:
    return "rotate", {"x": x, "cos": rotation.cos, "sin": rotation.sin, "pairing": rotation.pairing}


@recorded_as(Tensor.mul, Tensor.__rmul__)
def _product(x: Tensor, y: Tensor | float) -> NamedCall:
    return ("multiply", {"x": x, "y": y}) if isinstance(y, Tensor) else ("scale", {"x": x, "factor": y})


@recorded_as(Tensor.add, Tensor.__radd__)
def _sum(x: Tensor, y: Tensor | float) -> NamedCall:
    return ("add", {"x": x, "y": y}) if isinstance(y, Tensor) else ("shift", {"x": x, "offset": y})


@recorded_as(Tensor.view)
def _view(x: Tensor, *shape: int) -> NamedCall:
    if len(shape) != 3:
        raise NotLowerable(f"view{shape} does not split [N, heads * width]")
    return "split_heads", {"x": x, "shape": shape}


@recorded_as(Tensor.flatten)
def _flatten(x: Tensor, *dims: int) -> NamedCall:
    if dims != (1,):
        raise NotLowerable(f"flatten{dims} does not merge heads")
    return "merge_heads", {"x": x}


@recorded_as(Tensor.to)
def _to(x: Tensor, dtype: Any) -> NamedCall:
    if not isinstance(dtype, torch.dtype):
        raise NotLowerable(f"to({dtype}) is no cast to a dtype")
    return "cast", {"x": x, "dtype": dtype}


@implements("pool")
def pool(x: Tensor, rows: RowLengths, mode: str) -> Tensor:
    """[N, D] -> [B, D]: the `mean` of the vectors of all of a row's tokens, special ones included, the `first` or the
    `last`."""
    if has_torch_function_unary(x):
        return record(pool, x, rows, mode)
    if mode == "mean":
        return torch.stack([row.mean(0) for row in x.split(list(rows.lengths))])
    if mode == "first":
        return x[list(rows.starts)]
    return x[[start + length - 1 for start, length in zip(rows.starts, rows.lengths, strict=True)]]
