"""The sizes of labs: what is known of each, their values in a run, and how the command line gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.errors import InputError, nearest
from triptych_lectures.labs import lab_class
from triptych_lectures.labs.lab import Lab, Setup, Size


@dataclass(frozen=True)
class SizeRow:
    """One size of a lab: what it is, its default, and its value in a full run."""

    name: str
    about: str
    quick: Size
    full: Size


def size_rows(kind: type[Lab]) -> list[SizeRow]:
    """The sizes of a lab; none for one that has no fields."""
    quick, full = kind.sized(Setup()), kind.sized(Setup(full=True))
    fields = dataclasses.fields(kind)
    return [SizeRow(f.name, f.metadata["about"], getattr(quick, f.name), getattr(full, f.name)) for f in fields]


def size_values(kind: type[Lab], setup: Setup) -> dict[str, Size]:
    """The sizes of a run by name.  Raises InputError for those that the lab cannot have."""
    if setup.sizes and not size_rows(kind):
        raise InputError(f"the lab {kind.name} has no sizes, so --set does not apply to it")
    sized = kind.sized(setup)
    return {row.name: getattr(sized, row.name) for row in size_rows(kind)}


def own_sizes(names: Sequence[str], sizes: Mapping[str, Size], *, full: bool = False) -> dict[str, dict[str, Size]]:
    """For each lab, those of `sizes` that it has.  A single lab must have all of them, of several at least one each.

    Raises InputError for a size that no lab has, and for a value that a lab cannot use.
    """
    if not sizes:
        return {name: {} for name in names}
    labs = [lab_class(name) for name in names]
    if len(labs) == 1:
        size_values(labs[0], Setup(sizes=sizes, full=full))
        return {labs[0].name: dict(sizes)}
    owned = {kind.name: {row.name for row in size_rows(kind)} for kind in labs}
    every = sorted(set().union(*owned.values()))
    for name in sizes:
        if name not in every:
            raise InputError(f"no lab has a size {name!r}{nearest(name, every)}; `triptych lab all --sizes` lists them")
    own = {of: {name: value for name, value in sizes.items() if name in has} for of, has in owned.items()}
    for kind in labs:
        size_values(kind, Setup(sizes=own[kind.name], full=full))
    return own


def shown_size(value: Size) -> str:
    """A size as `--set` reads it: numbers of a tuple are separated by commas."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
