"""Checks, between steps and at low cost, that a module and its weights are what its program was lowered from.

A hook, a replaced forward, a replaced part, a flag, a spec and any other attribute show in the dictionaries of the
modules and in their classes; replaced parameters in those of parameters, and in where their numbers lie.  All are
compared by loops that run in C.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from itertools import chain
from math import gcd
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakIdKeyDictionary

from triptych.nn.packed_weight import PackedWeight
from triptych.nn.part import Module

_blocks = attrgetter("blocks")
_version = attrgetter("_version", "dtype")
PIECE = 4096  # bytes: vectors, which are most of what is copied, are compared whole
ROW, ROWS = 512, 256  # integers of which one sum is made, and such rows of which one column of sums is made
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = ("_modules", "_parameters")
#: What a call of a module runs of torch's own class; its other functions change when torch first compiles something.
_CALL = itemgetter("__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "__getattr__")
_END = object()  # behind the last of what tables hold, so that one more and one fewer are seen
_EVERYWHERE = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
LOOK_EVERY = 16  # steps, at most, from one look at the module to the next
#: Attributes of every module of torch, compared by what they hold, and the plans, which hold fingerprints themselves.
_NOT_COMPARED = frozenset(vars(nn.Module())) | {"plans"}
#: What parts keep beside their specs in containers: it follows from specs and positions alone.
_DERIVED = frozenset({"prefix", "own_groups", "cross_groups", "tables"})
_WIDEST = 8
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes
_CONSTANTS = (
    bool, int, float, complex, str, bytes, type, Enum, torch.dtype, torch.device, FunctionType, BuiltinFunctionType,
)  # fmt: skip


class ModuleFingerprint:
    """A module and all parts below it, as they are now: which there are, their classes and what these define, hooks,
    training flags, specs and all other attributes.

    Attributes are compared as tuples are: by identity, then by value.  The parts are held, so that no identity is given
    out again; the module itself is not: it keeps what holds its fingerprint, and would never be freed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        every = list(module.modules())
        self.parts, self.classes = every[1:], list(map(type, every))
        self.dicts = list(map(vars, self.parts))
        dicts = [vars(module), *self.dicts]
        self.sizes = list(map(len, dicts))
        tables = [own[key] for own in dicts for key in _TABLES]
        self.views = [table.values() for table in tables if table]  # a view shows what is there when it is read
        self.table_values = [*chain.from_iterable(self.views), _END]
        hooks = [*(own[key] for own in dicts for key in _HOOKS), *_EVERYWHERE]
        self.hooked = any(hooks)
        self.empty = [*hooks, *(table for table in tables if not table)]  # but for hooks, with which nothing is bound
        by_names: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for own in self.dicts:
            by_names.setdefault(tuple(name for name in own if name not in _NOT_COMPARED), []).append(own)
        self.getters = [itemgetter("training", *names) for names in by_names]
        self.groups = list(by_names.values())  # the dictionaries that each of them reads
        self.own_getter = itemgetter("training", *(name for name in dicts[0] if name not in _NOT_COMPARED))
        self.attributes = list(map(list, map(map, self.getters, self.groups))), self.own_getter(dicts[0])
        bases = dict.fromkeys(base for one in dict.fromkeys(self.classes) for base in one.__mro__ if base is not object)
        self.call = _CALL(vars(nn.Module))
        self.class_views = [vars(base).values() for base in bases if base is not nn.Module]
        self.class_values = list(map(list, self.class_views))

    def same(self, module: nn.Module) -> bool:
        """Whether it is of this module, not of one that this is a shallow copy of, and all of it is still so."""
        if self.module() is not module:
            return False
        own = vars(module)
        try:
            return (
                any(self.empty) == self.hooked
                and list(map(len, chain((own,), self.dicts))) == self.sizes
                and list(map(list, map(map, self.getters, self.groups))) == self.attributes[0]
                and self.own_getter(own) == self.attributes[1]
                and all(map(is_, chain(*self.views, (_END,)), self.table_values))
                and list(map(type, chain((module,), self.parts))) == self.classes
                and list(map(list, self.class_views)) == self.class_values
                and _CALL(vars(nn.Module)) == self.call
            )
        except (KeyError, RuntimeError, ValueError):  # an attribute went as another came; arrays that have no one truth
            return False


class ModuleGuard:
    """When the steps of an engine look whether the module is still what they were bound to: in each, and where nothing
    else ran in between in one of LOOK_EVERY, for what other threads change.  A look costs a tenth of a step of a small
    model, as it reads from memory what the weights drove from the caches.

    only_own_code   set before a step by the code that runs it, to promise that no other code ran in this thread since
                    the last step; the step takes it back.
    visits          how often other code may have run.
    """

    def __init__(self) -> None:
        self.only_own_code = False
        self.visits = self._calls = 0
        self._looked_at = -1

    def due(self) -> bool:
        """Whether the call of an executor that asks looks."""
        self._calls += 1
        due = self.visits != self._looked_at or self._calls >= LOOK_EVERY
        if due:
            self._looked_at, self._calls = self.visits, 0
        return due


def refusal(module: nn.Module) -> str | None:
    """The reason why a module cannot be run as its program; None where it can."""
    if any(_EVERYWHERE):
        return "a hook is registered on all modules"
    for path, part in module.named_modules():
        name = path or "the model"
        if part.training:
            return f"{name} is in training mode"
        if any(vars(part)[key] for key in _HOOKS):
            return f"{name} has a hook"
        if "forward" in vars(part):
            return f"the forward of {name} is replaced"
    return None


def unseen_changes(module: nn.Module) -> str | None:
    """An attribute that a fingerprint cannot watch: one that may change in place.  None where there is none."""
    for path, part in module.named_modules():
        derived = _DERIVED if isinstance(part, Module) else frozenset[str]()
        for key, value in vars(part).items():
            if key not in _NOT_COMPARED and key not in derived and not _constant(value):
                return f"{path or 'the model'} keeps a {type(value).__name__} in {key!r}, which may change in place"
    return None


def _constant(value: object) -> bool:
    """Whether a value cannot change in place."""
    if isinstance(value, tuple | frozenset):
        return all(map(_constant, value))
    frozen = is_dataclass(value) and type(value).__hash__ not in (None, object.__hash__)
    return value is None or frozen or isinstance(value, _CONSTANTS)


class WeightVersions:
    """The addresses of the numbers of tensors; and for those that were copied, whether they were changed since.

    Torch's fused optimizers and changes through `.data` leave the version of a tensor as it is.  They are seen in the
    bytes of copied tensors on the CPU, `piece` at the beginning, in the middle and at the end; smaller ones are read
    whole, and nothing of memory that a tensor has given up.
    """

    def __init__(
        self, shared: list[Tensor], copied: list[Tensor], packed: list[PackedWeight], piece: int = PIECE
    ) -> None:
        self.shared, self.copied, self.packed = shared, copied, packed
        here = [one for one in copied if one.device.type == "cpu"]
        self.storages = [one.untyped_storage() for one in here]  # they keep the memory
        self.views: list[ctypes.Array[ctypes.c_char]] = []
        for tensor in here:
            places = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            size = places * tensor.element_size() if tensor.numel() else 0
            starts = (0,) if size <= 3 * piece else (0, size // 2, size - piece)
            length = size if len(starts) == 1 else piece
            self.views += [(ctypes.c_char * length).from_address(tensor.data_ptr() + start) for start in starts]
        self.old_versions, self.contents = self._current_versions(), b"".join(self.views)

    def _current_versions(self) -> tuple[Any, ...]:
        return (
            list(map(Tensor.data_ptr, self.shared)),
            list(map(Tensor.data_ptr, map(_blocks, self.packed))),
            list(map(Tensor.data_ptr, self.copied)),
            list(map(_version, self.copied)),
        )

    def same(self) -> bool:
        """Whether they are what they were."""
        return self._current_versions() == self.old_versions and b"".join(self.views) == self.contents


def versions(module: nn.Module) -> list[Any]:
    """How often torch has counted a change of each parameter, of packed ones their blocks, and its dtype."""
    return [_version(_blocks(one) if isinstance(one, PackedWeight) else one) for one in module.parameters()]


def checksums(module: nn.Module) -> list[Tensor]:
    """Sums over all bytes of the parameters and buffers of a module, of packed ones their blocks.

    A tensor is taken as a table of integers, of whose rows and columns sums are made modulo 2^64: they change with any
    one number, and with rows, columns or numbers that change places.  All weights are read, twice, the second time from
    the caches of the processor: that takes about as long as one decoding step, and 1% of their memory, once for all
    engines of modules that share a tensor.
    """
    sums: list[Tensor] = []
    for tensor in (*module.parameters(), *module.buffers()):
        now, known = _sums_of(tensor), _known_sums.get(tensor)
        if known is None or not equal(known, now):
            known = _known_sums[tensor] = now
        sums += known
    return sums


_known_sums: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the newest sums of each tensor, in any thread


def _sums_of(tensor: Tensor) -> list[Tensor]:
    numbers = tensor.blocks if isinstance(tensor, PackedWeight) else tensor.detach()
    raw = numbers.contiguous().reshape(-1).view(torch.uint8)
    integers = raw[: raw.numel() // _WIDEST * _WIDEST].view(_INTEGERS[gcd(_WIDEST, raw.data_ptr())])
    whole = integers.numel() // ROW * ROW
    sums: list[Tensor] = []
    for piece in integers[:whole].view(-1, ROW).split(ROWS):
        sums += [piece.sum(1), piece.sum(0)]
    return [*sums, integers[whole:].clone(), raw[raw.numel() // _WIDEST * _WIDEST :].clone()]


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two lists of checksums are of the same bytes."""
    return len(first) == len(second) and all(map(torch.equal, first, second))
