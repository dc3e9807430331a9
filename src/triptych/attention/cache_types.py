"""The types in which a cache keeps numbers, and how vectors are written in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.errors import InputError, shown

CacheType = Literal["auto", "fp32", "fp16", "bf16", "int8"]
"""What a cache keeps: "auto", numbers of the dtype that the model computes in; "int8", codes of 8 bits with a scale for
each `GROUP` numbers of a vector."""

GROUP = 32  # numbers that share a scale (`GROUP` of matmul.h)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


def check_cache_type(name: object) -> None:
    """Raises InputError, with the choices, for anything but a `CacheType`."""
    if not isinstance(name, str) or name not in get_args(CacheType):
        raise InputError(f"cache must be one of {list(get_args(CacheType))}, not {shown(name)}")


@dataclass(frozen=True)
class StoredForm:
    """How a store keeps vectors for a model that computes in `computed`: as numbers of `dtype`, or, where that is int8,
    as codes that are followed by the bytes of their scales (bf16).

    A code is the number divided by the scale of its group and rounded to the nearest integer, ties to even.  The scale
    is the largest magnitude of the group divided by 127, rounded to bf16, so that a code times its scale is an exact
    fp32 number.  A group with a number that is not finite gives NaN.
    """

    dtype: torch.dtype
    computed: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether vectors are kept, and given back, as they are."""
        return self.dtype == self.computed

    def length(self, width: int) -> int:
        """Elements of `dtype` that a vector of `width` numbers takes."""
        return width + 2 * -(-width // GROUP) if self.dtype == torch.int8 else width

    def encode(self, x: Tensor) -> Tensor:
        """Vectors [..., K] as they are kept, [..., length(K)]."""
        if self.dtype != torch.int8:
            return x.to(self.dtype)
        width = x.shape[-1]
        groups = F.pad(x.float(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
        scales = (groups.abs().amax(-1) / 127).to(torch.bfloat16)
        codes = (groups / scales.float()[..., None]).round().clamp(-127, 127).nan_to_num(0.0)
        codes = codes.flatten(-2)[..., :width].to(torch.int8)
        return torch.cat((codes, scales.view(torch.int8)), -1)

    def decode(self, stored: Tensor, width: int) -> Tensor:
        """What `encode` gave, or a part of it, [..., length(K)] -> vectors of `width` numbers, [..., K]."""
        if self.dtype != torch.int8:
            return stored.to(self.computed)
        scales = stored[..., width:].contiguous().view(torch.bfloat16).float()
        codes: Tensor = F.pad(stored[..., :width].float(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
        numbers = (codes * scales[..., None]).flatten(-2)
        return numbers[..., :width].to(self.computed)


def stored_form(name: CacheType, computed: torch.dtype) -> StoredForm:
    """The form of a cache type for a model that computes in `computed`.  Raises InputError as `check_cache_type`."""
    check_cache_type(name)
    return StoredForm(_DTYPES.get(name, computed), computed)
