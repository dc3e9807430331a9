"""Checks of the numbers a person gives: type, range and NaN, in one line."""

from __future__ import annotations

import math
import operator
from numbers import Real

from triptych.errors import InputError, shown


def integer(name: str, value: object, least: int | None = None) -> int:
    """`value` as an int.  Raises InputError for anything else (a bool too), and below `least`."""
    wanted = "an integer" if least is None else f"an integer of at least {least}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what has no __index__ raises here
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise InputError(f"{name}={shown(value)} must be {wanted}")
    return number


def number(name: str, value: object, least: float, most: float, wanted: str) -> float:
    """`value` as a float.  Raises InputError for anything else (NaN and infinity too), and outside `[least, most]`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name}={shown(value)} must be a number {wanted}")
    if not least <= float(value) <= most or math.isinf(value):
        raise InputError(f"{name}={shown(value)} must be {wanted}")
    return float(value)
