"""A hash of the content of plain data, tensors and functions: equal for equal content, whichever object holds it."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType

import numpy as np
import torch
from torch import Tensor


def digest(value: object) -> str:
    """16 hexadecimal digits.

    A function counts by its code, its defaults and what its closure holds; names it looks up in its module count as
    names.  An object of another kind has no content that could be compared: it equals nothing, itself included.
    """
    hasher = hashlib.sha256()
    _feed(hasher.update, value, [])
    return hasher.hexdigest()[:16]


def _feed(update: Callable[[bytes], None], value: object, path: list[int]) -> None:
    """Give `update` the bytes of `value`; `path` are the ids of the objects it lies in, against endless recursion."""

    def item(kind: str, *parts: object) -> None:
        update(f"{kind}{len(parts)}(".encode())
        for part in parts:
            _feed(update, part, [*path, id(value)])
        update(b")")

    if id(value) in path:
        update(f"up{len(path) - path.index(id(value))};".encode())
    elif isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        update(f"tensor {data.dtype} {tuple(data.shape)};".encode())
        update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        update(f"array {value.dtype} {value.shape};".encode() + np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        update(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, slice):
        item("slice", value.start, value.stop, value.step)
    elif isinstance(value, Mapping):
        item("map", *(part for pair in value.items() for part in pair))
    elif isinstance(value, Sequence):
        item("list", *value)
    elif isinstance(value, CodeType):
        item("code", value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_freevars)
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        item("function", value.__code__, value.__defaults__, value.__kwdefaults__, cells)
    elif isinstance(value, MethodType):
        item("method", value.__func__, value.__self__)
    elif isinstance(value, partial):
        item("partial", value.func, value.args, value.keywords)
    elif isinstance(value, type):
        update(f"class {value.__module__}.{value.__qualname__};".encode())
    elif is_dataclass(value):
        item("record", type(value), [getattr(value, field.name) for field in fields(value)])
    else:
        update(f"other {uuid.uuid4()};".encode())
