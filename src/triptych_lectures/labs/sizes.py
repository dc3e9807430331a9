"""What a lab's file declares beside `run`: its sizes, quick and full, what would falsify its claim, and its seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from triptych.errors import InputError, nearest
from triptych_lectures.labs import known
from triptych_lectures.labs.lab import Setup, Size


@dataclass(frozen=True)
class SizeRow:
    """One size of a lab: what it is, its default, and its value in a full run."""

    name: str
    about: str
    quick: Size
    full: Size


@dataclass(frozen=True)
class Declared:
    """`quick` and `full` are instances of the lab's `Sizes`, None where it has none.  `falsified_by` is the lab's
    `FALSIFIED_BY`, and `seeds` its `SEEDS`: how many seeds a recorded result has."""

    name: str
    quick: Any
    full: Any
    falsified_by: str
    seeds: int

    @property
    def rows(self) -> list[SizeRow]:
        if self.quick is None:
            return []
        fields = dataclasses.fields(self.quick)
        return [
            SizeRow(f.name, f.metadata["about"], getattr(self.quick, f.name), getattr(self.full, f.name))
            for f in fields
        ]

    def values(self, setup: Setup) -> dict[str, Size]:
        """The sizes of a run by name.  Raises InputError for those that the lab cannot have."""
        if self.quick is None:
            if setup.sizes:
                raise InputError(f"the lab {self.name} has no sizes, so --set does not apply to it")
            return {}
        sized = setup.sized(self.quick, self.full)
        return {field.name: getattr(sized, field.name) for field in dataclasses.fields(sized)}


def declared(name: str) -> Declared:
    """What the file of a lab declares.  Raises InputError for a lab that is not in `LABS`."""
    module = import_module(f"triptych_lectures.labs.{known(name).replace('-', '_')}")
    quick = module.Sizes() if hasattr(module, "Sizes") else None
    full = getattr(module, "FULL", quick)
    return Declared(name, quick, full, getattr(module, "FALSIFIED_BY", ""), getattr(module, "SEEDS", 1))


def own_sizes(names: Sequence[str], sizes: Mapping[str, Size], *, full: bool = False) -> dict[str, dict[str, Size]]:
    """For each lab, those of `sizes` that it has.  A single lab must have all of them, of several at least one each.

    Raises InputError for a size that no lab has, and for a value that a lab cannot use.
    """
    if not sizes:
        return {name: {} for name in names}
    labs = [declared(name) for name in names]
    if len(labs) == 1:
        labs[0].values(Setup(sizes=sizes, full=full))
        return {labs[0].name: dict(sizes)}
    owned = {lab.name: {row.name for row in lab.rows} for lab in labs}
    every = sorted(set().union(*owned.values()))
    for name in sizes:
        if name not in every:
            raise InputError(f"no lab has a size {name!r}{nearest(name, every)}; `triptych lab all --sizes` lists them")
    own = {lab: {name: value for name, value in sizes.items() if name in has} for lab, has in owned.items()}
    for lab in labs:
        lab.values(Setup(sizes=own[lab.name], full=full))
    return own


def shown_size(value: Size) -> str:
    """A size as `--set` reads it: numbers of a tuple are separated by commas."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
