"""Whether a module still does what its program says, looked up at every step without walking it.

A hook, a replaced forward, a replaced part and training mode show in the dictionaries of the modules and in their
classes; replaced parameters in those of parameters, and in where their numbers lie.  All are compared by loops that run
in C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from triptych.nn.weights import PackedWeight

_training = itemgetter("training")
_blocks = attrgetter("blocks")
_calls = attrgetter("forward", "__call__")
_version = attrgetter("_version", "dtype")
PIECE = 4096  # bytes: vectors, which are most of what is copied, are compared whole
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_EVERYWHERE = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


class Structure:
    """The modules below one, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self.names = {id(one): name for name, one in module.named_modules()}
        self.modules = list(module.modules())
        self.dicts = [one.__dict__ for one in self.modules]
        self.hooks = [*(own[key] for own in self.dicts for key in _HOOKS), *_EVERYWHERE]
        self.children = [own["_modules"] for own in self.dicts if own["_modules"]]
        self.parameters = [own["_parameters"] for own in self.dicts if own["_parameters"]]
        self.before = self._now()

    def _now(self) -> tuple[Any, ...]:
        """What `same` compares.  Parts are compared by identity, as modules have no equality of their own; a forward
        that is set on an instance is one entry more in its dictionary, and one that is set on a class, or comes with
        another class of an instance, shows in the classes."""
        classes = list(map(type, self.modules))
        return (
            any(self.hooks),
            any(map(_training, self.dicts)),
            list(map(len, self.dicts)),
            list(chain.from_iterable(map(dict.values, self.children))),
            list(map(id, chain.from_iterable(map(dict.values, self.parameters)))),
            classes,
            list(map(_calls, dict.fromkeys(classes))),
        )

    def same(self) -> bool:
        """Whether all of it is still so."""
        return self._now() == self.before

    def refusal(self) -> str | None:
        """Why these modules cannot be run as their program."""
        if any(_EVERYWHERE):
            return "a hook is registered on all modules"
        for one in self.modules:
            name = self.names[id(one)] or "the model"
            if one.training:
                return f"{name} is in training mode"
            if any(one.__dict__[key] for key in _HOOKS):
                return f"{name} has a hook"
            if "forward" in one.__dict__:
                return f"the forward of {name} is replaced"
        return None


class Contents:
    """The bytes of tensors on the CPU at the beginning, in the middle and at the end of each, to see what torch does
    not count: its fused optimizers and changes through `.data` leave the version of a tensor as it is.

    piece    bytes of each of the three; smaller tensors are read whole.
    """

    def __init__(self, tensors: Sequence[Tensor], piece: int) -> None:
        here = [one for one in tensors if one.device.type == "cpu"]
        self.storages = [one.untyped_storage() for one in here]  # they keep the memory
        self.addresses = list(map(torch.UntypedStorage.data_ptr, self.storages))
        self.views: list[ctypes.Array[ctypes.c_char]] = []
        for tensor in here:
            address = tensor.data_ptr()
            places = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            size = places * tensor.element_size() if tensor.numel() else 0
            starts = (0,) if size <= 3 * piece else (0, size // 2, size - piece)
            length = size if len(starts) == 1 else piece
            self.views += [(ctypes.c_char * length).from_address(address + start) for start in starts]
        self.before = b"".join(self.views)

    def same(self) -> bool:
        """Whether they are what they were; nothing is read of memory that a tensor has given up."""
        addresses = list(map(torch.UntypedStorage.data_ptr, self.storages))
        return addresses == self.addresses and b"".join(self.views) == self.before


class Numbers:
    """Where the numbers of tensors lie; and for those that were copied, whether they were changed since."""

    def __init__(self, shared: list[Tensor], copied: list[Tensor], packed: list[PackedWeight]) -> None:
        self.shared, self.copied, self.packed = shared, copied, packed
        self.before, self.contents = self._now(), Contents(copied, PIECE)

    def _now(self) -> tuple[Any, ...]:
        return (
            list(map(Tensor.data_ptr, self.shared)),
            list(map(Tensor.data_ptr, map(_blocks, self.packed))),
            list(map(Tensor.data_ptr, self.copied)),
            list(map(_version, self.copied)),
        )

    def same(self) -> bool:
        contents = self.contents  # not its `same`: every step asks, and the addresses have been compared
        return self._now() == self.before and b"".join(contents.views) == contents.before
