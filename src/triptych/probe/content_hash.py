"""A hash of the content of plain data, tensors and functions: equal for equal content, whichever object holds it."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
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
    _add(value, hasher, ())
    return hasher.hexdigest()[:16]


def _add(value: object, hasher: hashlib._Hash, path: tuple[int, ...]) -> None:
    """`path` are the ids of the objects being added, against endless recursion."""
    data = b""
    parts: tuple[object, ...] = ()
    if id(value) in path:
        text = f"up{len(path) - path.index(id(value))};"
    elif isinstance(value, Tensor):
        text = f"tensor {value.dtype} {tuple(value.shape)};"
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        text, data = f"array {value.dtype} {value.shape};", np.ascontiguousarray(value).tobytes()
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        text = f"{type(value).__name__} {value!r};"
    elif isinstance(value, type):
        text = f"class {value.__module__}.{value.__qualname__};"
    elif parts := _parts(value):
        text = f"{parts[0]}{len(parts) - 1}("
    else:
        text = f"other {uuid.uuid4()};"
    hasher.update(text.encode() + data)
    for part in parts[1:]:
        _add(part, hasher, (*path, id(value)))
    hasher.update(b")" if parts else b"")


def _parts(value: object) -> tuple[object, ...]:
    """The kind of a value that is made of other values, then these; () for a value of another kind."""
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    if isinstance(value, Mapping):
        return "map", *(part for pair in value.items() for part in pair)
    if isinstance(value, Sequence):
        return "list", *value
    if isinstance(value, CodeType):
        return "code", value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_freevars
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return "function", value.__code__, value.__defaults__, value.__kwdefaults__, cells
    if isinstance(value, MethodType):
        return "method", value.__func__, value.__self__
    if isinstance(value, partial):
        return "partial", value.func, value.args, value.keywords
    if is_dataclass(value):
        return "record", type(value), [getattr(value, field.name) for field in fields(value)]
    return ()
