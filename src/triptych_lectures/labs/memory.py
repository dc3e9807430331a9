"""Measuring the memory that a call takes: the tensors between its operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(call: Callable[..., object], inputs: Sequence[Tensor]) -> int:
    """The most bytes of tensors that `call(*inputs)` holds at one time, its result included and `inputs` not.

    Memory that one operation takes and frees inside itself, such as the tiles of a fused kernel, is not counted.
    """
    storages = _Storages(inputs)
    with storages:
        call(*inputs)
    return storages.peak


class _Storages(TorchDispatchMode):
    """Adds up the storages that operations create, until each is freed."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own constructor has no annotation
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
