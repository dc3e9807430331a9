"""Checks of arguments: type, range and NaN, each refused in one line."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import SupportsIndex

import numpy as np
from torch import Tensor

from triptych.errors import InputError, shown


def integer(name: str, value: object, least: int | None = None) -> int:
    """`value` as an int.  Raises InputError for anything else (a bool too), and below `least`."""
    wanted = "an integer" if least is None else f"an integer of at least {least}"
    try:
        number = _index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise InputError(f"{name}={shown(value)} must be {wanted}")
    return number


def number(name: str, value: object, least: float, most: float, wanted: str) -> float:
    """`value` as a float.  Raises InputError for anything else (NaN and infinity too), and outside `[least, most]`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name}={shown(value)} must be a number {wanted}")
    if not least <= float(value) <= most or math.isinf(value):
        raise InputError(f"{name}={shown(value)} must be {wanted}")
    return float(value)


def check_ids(ids: Iterable[object], vocab: int, what: str) -> list[int]:
    """`ids` as integers.  Raises InputError for anything that is no integer in `[0, vocab)`."""
    out = []
    for token in ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids:
        try:
            index = _index(token)
        except TypeError:
            raise InputError(f"{what}: {shown(token)} is no token id; ids are integers") from None
        if not 0 <= index < vocab:
            raise InputError(f"{what}: token id {index} is outside the vocabulary of {vocab}")
        out.append(index)
    return out


def _index(value: object) -> int:
    """`value` as an int.  Raises TypeError for anything else, a bool too."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError
    return operator.index(value)
