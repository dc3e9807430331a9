"""Packed weights as objects in the `weight` slot of a `Linear` or a `Table`; random weights are in `transformer.py`.

A dense weight is an ordinary `nn.Parameter`: optimizers and casts treat it as any other, and nothing is added at run
time.  A packed weight is a `PackedWeight`: the blocks of its file, or a layout that native kernels multiply with as it
is.  Where no kernel takes it, a matmul or a lookup unpacks what it uses.  It
follows torch's own protocol for tensor types (`__torch_dispatch__`), so it stands in the same slot under the same
parameter name, and `F.linear`, `F.embedding`, `.to(...)`, `deepcopy`, `state_dict()` and ties need no special case.

`dense(weight)` and `rows(weight, start, stop)` read either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from triptych.errors import InputError

aten = torch.ops.aten


@runtime_checkable
class BlockFormat(Protocol):
    """A layout of packed numbers in blocks of one size."""

    @property
    def elements(self) -> int:
        """Elements of a block."""

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""

    @property
    def band(self) -> int:
        """Rows of the matrix that are stored together, as one row of blocks."""

    def unpack(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """`raw [..., bytes of a row of blocks]`, uint8 -> `[..., elements of a row]` in `dtype`; where several rows are
        stored together, `raw [n, bytes]` -> `[n * band, elements of a row]`."""

    def multiply(self, raw: Tensor, rows: int, x: Tensor) -> Tensor | None:
        """`x [N, columns]`, float32 -> `x @ weight.T [N, rows]`, float32, from the blocks `raw` as they are; None where
        no kernel does that here.  No gradients."""

    @property
    def stored_as(self) -> str | None:
        """The type of GGUF whose blocks hold the numbers exactly: the one they came from, if they did; None where no
        type does."""

    def stored(self, raw: Tensor, rows: int, file: Callable[[], Tensor | None]) -> Tensor | None:
        """The blocks `[rows, bytes of a row]` of that type.  `file` reads those that the file has now: they are used
        where `raw` does not hold all of a block and they are still the ones that were packed, else None."""


def dense(weight: Tensor) -> Tensor:
    """The numbers of a weight as a plain tensor: itself where it is dense, unpacked where it is packed."""
    return weight.dense() if isinstance(weight, PackedWeight) else weight


@runtime_checkable
class DividedWeight(Protocol):
    """A weight of which each process of a run has a part (`torch.distributed.tensor.DTensor`)."""

    def full_tensor(self) -> Tensor: ...
    def to_local(self) -> Tensor: ...


def gathered(weight: Tensor) -> Tensor:
    """A weight as one tensor: itself, or the parts of all processes, each of which must make this call."""
    return weight.full_tensor() if isinstance(weight, DividedWeight) else weight


def own_part(weight: Tensor) -> Tensor:
    """What this process has of a weight: itself, or its part."""
    return weight.to_local() if isinstance(weight, DividedWeight) else weight


def rows(weight: Tensor, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a weight as a plain tensor; of a packed one only these are unpacked."""
    return weight.rows(start, stop) if isinstance(weight, PackedWeight) else weight[start:stop]


class PackedWeight(Tensor):
    """A matrix `[rows, columns]` that is stored as `blocks` uint8 `[rows, bytes of a row]` and computes in `dtype`.

    In a format that stores bands of rows together, `blocks` has a row for each band; `count` is the number of rows of
    the matrix.

    Casting it changes `dtype` and keeps it packed; it stays on the CPU, since no kernel of a GPU reads its blocks and
    unpacking them in each step is slower than a dense weight.  It holds no gradient and refuses every operation that
    would change it in place.  Any operation that has no packed form here sees the unpacked matrix.
    """

    blocks: Tensor
    format: BlockFormat

    @staticmethod
    def __new__(
        cls, blocks: Tensor, format: BlockFormat, dtype: torch.dtype = torch.float32, count: int | None = None
    ) -> PackedWeight:
        if blocks.dim() != 2 or blocks.dtype != torch.uint8 or blocks.shape[1] % format.nbytes:
            problem = f"{blocks.dtype} {list(blocks.shape)} are not rows of blocks of {format.nbytes} bytes"
            raise InputError(f"packed weight: {problem}")
        count = blocks.shape[0] * format.band if count is None else count
        if -(-count // format.band) != blocks.shape[0]:
            raise InputError(f"packed weight: {count} rows are not {blocks.shape[0]} bands of {format.band}")
        shape = (count, blocks.shape[1] // format.nbytes * format.elements)
        weight: PackedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=blocks.device)
        weight.blocks, weight.format = blocks, format
        return weight

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers, `[rows, columns]`, in its own dtype where no other is given."""
        return self.format.unpack(self.blocks, dtype or self.dtype)[: self.shape[0]]

    def rows(self, start: int, stop: int) -> Tensor:
        """The numbers of rows [start, stop)."""
        band = self.format.band
        first = start // band
        return self.format.unpack(self.blocks[first : -(-stop // band)], self.dtype)[start - first * band :][
            : stop - start
        ]

    def with_blocks(self, blocks: Tensor, dtype: torch.dtype | None = None) -> PackedWeight:
        """A weight of the same format and shape with other blocks, computing in `dtype` where one is given."""
        return PackedWeight(blocks, self.format, dtype or self.dtype, self.shape[0])

    # What torch asks of a tensor type made of other tensors.

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As `Tensor`'s, without turning results into packed weights; products by the format's kernel if it has one.

        What a model does with its weights ends here: the first call that goes on to `__torch_dispatch__` makes torch
        import packages that take 35 MB and a second.
        """
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.requires_grad_ and (args[1:] or [True])[0] and kwargs.get("requires_grad", True):
                raise InputError("packed weights are constants; load the model with dequantize=True to train it")
            own_form = _FUNCTION_FORMS.get(func)
            if own_form is not None:
                out = own_form(*args, **kwargs)
                if out is not None:
                    return out
            return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[BlockFormat, torch.dtype, int]]:
        return ["blocks"], (self.format, self.dtype, self.shape[0])

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], how: tuple[BlockFormat, torch.dtype, int], size: object, stride: object
    ) -> PackedWeight:
        return cls(inner["blocks"], *how)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub of this hook lacks the operation
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packed_form = _PACKED_FORMS.get(operation)
        if packed_form is not None and isinstance(args[0], PackedWeight):
            return packed_form(*args, **(kwargs or {}))
        if operation._schema.is_mutable:
            raise InputError(
                f"{operation.name()} would change a packed weight in place; load the model unpacked for it"
            )
        return operation(*pytree.tree_map(_dense_leaf, args), **pytree.tree_map(_dense_leaf, dict(kwargs or {})))


def _dense_leaf(x: Any) -> Any:
    return x.dense() if isinstance(x, PackedWeight) else x


def _cast(
    weight: PackedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **layout: object,
) -> Tensor:
    if dtype is not None and not dtype.is_floating_point:
        return weight.dense().to(dtype=dtype, device=device)
    if device is not None and device.type == "cuda":
        raise InputError("packed weights stay on the CPU; load the model with device='cuda', which unpacks them")
    return weight.with_blocks(weight.blocks.to(device=device, non_blocking=non_blocking, copy=True), dtype)


def _lookup(weight: PackedWeight, ids: Tensor, *training_options: object) -> Tensor:
    """Rows `ids` [...] -> [..., columns]; only these, and the bands they are stored in, are unpacked."""
    band = weight.format.band
    if band == 1:
        return weight.format.unpack(weight.blocks[ids], weight.dtype)
    bands, places = (ids // band).flatten().unique(return_inverse=True)
    numbers = weight.format.unpack(weight.blocks[bands], weight.dtype)
    return numbers[places.view(ids.shape) * band + ids % band]


class _Product(torch.autograd.Function):
    """The kernel's product in `dtype`, and the gradient through the unpacked matrix, whose product is in `inner`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: PackedWeight, product: Tensor, dtype: torch.dtype, inner: torch.dtype
    ) -> Tensor:
        ctx.weight, ctx.input_dtype, ctx.inner = weight, x.dtype, inner
        return product.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        matrix = ctx.weight.dense(ctx.inner)
        return (gradient.to(ctx.inner) @ matrix).to(ctx.input_dtype), None, None, None, None


#: torch's `apply` has no annotation.
_product: Callable[[Tensor, PackedWeight, Tensor, torch.dtype, torch.dtype], Tensor] = _Product.apply


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`F.linear` by the kernel of the weight's format; None where it has none for these arguments."""
    if not isinstance(weight, PackedWeight) or input.device.type != "cpu" or weight.blocks.device.type != "cpu":
        return None
    if not input.is_floating_point() or not input.shape or input.shape[-1] != weight.shape[1]:
        return None
    x = input.detach().reshape(-1, weight.shape[1]).float().contiguous()
    product = weight.format.multiply(weight.blocks, weight.shape[0], x)
    if product is None:
        return None
    mixed = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if mixed else input.dtype
    out = product.view(*input.shape[:-1], weight.shape[0])
    if input.requires_grad and torch.is_grad_enabled():
        out = _product(input, weight, out, dtype, dtype if mixed else torch.float32)
    else:
        out = out.to(dtype)
    return out if bias is None else out + bias.to(dtype)


def _embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor | None:  # fmt: skip
    """`F.embedding`, which names all its options; None where one changes the table or its gradient."""
    changed = padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse
    if not isinstance(weight, PackedWeight) or isinstance(ids, PackedWeight) or changed:
        return None
    return _lookup(weight, ids)


def _detached(weight: Tensor) -> Tensor:
    return weight.with_blocks(weight.blocks) if isinstance(weight, PackedWeight) else weight.detach()


#: What has a packed form as a function, before autograd; None from it is torch's own way.
_FUNCTION_FORMS: dict[object, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    Tensor.detach: _detached,
}
_PACKED_FORMS: dict[object, Callable[..., Tensor]] = {
    aten.detach.default: _detached,
    aten.alias.default: _detached,
    aten.clone.default: lambda weight, **layout: weight.with_blocks(weight.blocks.clone()),
    aten._to_copy.default: _cast,
    aten.embedding.default: _lookup,
}
