"""Counts the bytes of the tensors that are alive, without asking the system."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, `most` is the largest number of bytes that tensors had together at any time.  Those of `before` do not
    count, and neither do files that are mapped into memory."""

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        construct: Callable[[], None] = super().__init__
        construct()
        self.now = self.most = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it computes with its parts, which come here
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.now -= size
