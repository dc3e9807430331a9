"""Counts the cost of a call: FLOPs of its matrix products, bytes read and allocated, and its time.

The counts come from the operations that run, by the shapes they are called with, so they are the same on all machines.
"""

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class ProductCounts:
    """FLOPs of each kind of matrix product, under the name of torch's operation, and the bytes of their operands.

    A multiply and an add are two FLOPs.  The fused kernel is counted with all pairs of its queries and keys.
    """

    flops: Counter[str]
    read: int

    @property
    def total(self) -> int:
        """FLOPs of all products."""
        return self.flops.total()

    @property
    def weights(self) -> int:
        """FLOPs of products with a matrix of weights, which are those of two matrices and no batch."""
        return self.flops["mm"] + self.flops["addmm"]


def products(call: Callable[..., object], inputs: Sequence[Tensor] = ()) -> ProductCounts:
    """What the matrix products of `call(*inputs)` compute and read."""
    counter = FlopCounterMode(display=False, custom_mapping={FUSED: _fused_flops})
    reads = _Reads()
    with reads, counter as flops:
        call(*inputs)
    by_operation = flops.get_flop_counts().get("Global", {})
    return ProductCounts(Counter({kind.__name__: count for kind, count in by_operation.items()}), reads.total)


def _fused_flops(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> int:
    """From the shapes [B, H, T, K], [B, H, S, K] and [B, H, S, V]."""
    return int(2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]))


class _Counter(TorchDispatchMode):
    """Sees every operation of torch that runs inside it."""

    def __init__(self) -> None:
        cast("Callable[[], None]", super().__init__)()  # torch's own has no annotation


class _Reads(_Counter):
    """Adds up the bytes of the operands of matrix products; what is broadcast is read once."""

    PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, FUSED)
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.PRODUCTS:
            self.total += sum(_distinct(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def _distinct(x: Tensor) -> int:
    """Bytes of a tensor, those of an expanded dimension once."""
    return x.itemsize * math.prod(count for count, stride in zip(x.shape, x.stride(), strict=True) if stride)


def shortest_seconds(call: Callable[..., object], inputs: Sequence[Tensor] = (), *, calls: int) -> float:
    """Processor time of the shortest of `calls` calls on one thread, to be shown: no criterion of a lab is a time."""
    threads, shortest = torch.get_num_threads(), math.inf
    torch.set_num_threads(1)
    try:
        for _ in range(calls):
            start = time.thread_time()
            call(*inputs)
            shortest = min(shortest, time.thread_time() - start)
        return shortest
    finally:
        torch.set_num_threads(threads)


def peak_bytes(call: Callable[..., object], inputs: Sequence[Tensor]) -> int:
    """The most bytes of tensors that `call(*inputs)` holds at one time, its result included and `inputs` not.

    Memory that one operation takes and frees inside itself, such as the tiles of a fused kernel, is not counted.
    """
    storages = _Storages(inputs)
    with storages:
        call(*inputs)
    return storages.peak


class _Storages(_Counter):
    """Adds up the storages that operations create, until each is freed."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.live = {x.untyped_storage().data_ptr(): 0 for x in inputs}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()).data_ptr() not in self.live:
                self.live[storage.data_ptr()] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.data_ptr())
        self.peak = max(self.peak, self.now)
        return outputs

    def _freed(self, pointer: int) -> None:
        self.now -= self.live.pop(pointer)


# how many matrix products, each after the one before, stand in a node of autograd's graph
_IN_ONE = {"AddmmBackward0": 1, "MmBackward0": 1, "BmmBackward0": 1, "BaddbmmBackward0": 1, "ConvolutionBackward0": 1}


def longest_chain(out: Tensor) -> int:
    """The most matrix products and convolutions on one path to `out`: each has to wait for the one before it.

    They are counted in autograd's graph: torch's fused attention is two products, one in C of this library none.
    """
    longest: dict[Any, int] = {}
    stack: list[Any] = [out.grad_fn]
    while stack:
        node = stack[-1]
        before = [own for own, _ in node.next_functions if own is not None]
        waiting = [own for own in before if own not in longest]
        if waiting:
            stack += waiting
            continue
        own = 2 if node.name().startswith("ScaledDotProduct") else _IN_ONE.get(node.name(), 0)
        longest[stack.pop()] = own + max((longest[one] for one in before), default=0)
    return longest[out.grad_fn]
