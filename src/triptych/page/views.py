"""Sections of what else is seen inside a model: matrices whose cells open, and vectors as points in a plane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from triptych.errors import InputError

Json = dict[str, object]
Detail = Sequence[tuple[str, float]]


@dataclass(frozen=True, eq=False)
class MatrixSection:
    """Rows by columns of short texts; a chosen cell lists its `details`, names with numbers, where there are any.

    `cells` are [R][C]; `shade` [R][C] says how strong a cell's colour is, in [0, 1].  `about` describes what `details`
    are.  `chosen` is the (row, column) that is open first, by default the last cell of the last row.

    Raises InputError where these have other shapes, or a shade is not finite.
    """

    title: str
    note: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    shade: Sequence[Sequence[float]]
    details: Sequence[Sequence[Detail]] | None = None
    about: str = ""
    chosen: tuple[int, int] | None = None
    kind: ClassVar[str] = "matrix"

    def __post_init__(self) -> None:
        shape = (len(self.rows), len(self.columns))
        for name, values in (("cells", self.cells), ("shade", self.shade), ("details", self.details)):
            if values is not None and (len(values) != shape[0] or any(len(row) != shape[1] for row in values)):
                raise InputError(f"matrix {self.title!r}: {name} must be {shape[0]} rows of {shape[1]}, as it is named")
        if not all(math.isfinite(x) for row in self.shade for x in row):
            raise InputError(f"matrix {self.title!r}: a shade is not finite; give 0 where there is no value")

    def data(self) -> Json:
        texts: dict[str, int] = {}  # each name of a detail is stored once

        def packed(one: Detail) -> list[float]:
            return [x for name, value in one for x in (texts.setdefault(name, len(texts)), float(f"{value:.4g}"))]

        details = None if self.details is None else [[packed(one) for one in row] for row in self.details]
        return {
            "note": self.note,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "cells": [list(row) for row in self.cells],
            "shade": [[round(9 * min(max(x, 0.0), 1.0)) for x in row] for row in self.shade],
            "details": details,
            "names": list(texts),
            "about": self.about,
            "chosen": list(self.chosen) if self.chosen else [len(self.rows) - 1, len(self.columns) - 1],
        }


@dataclass(frozen=True, eq=False)
class PlanePoints:
    """The tokens of a stack in a plane, layer by layer: `at` is [L, N, 2], and `share` [L] the part of the variance
    that the plane shows.  `text` says which of the section's texts each of the N `tokens` stands in, `place` where.
    The points `named` carry their names however many there are."""

    stack: str
    layers: Sequence[str]
    tokens: Sequence[str]
    text: Sequence[int]
    place: Sequence[int]
    at: npt.NDArray[np.float64]
    share: Sequence[float]
    named: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class PlaneSection:
    """Tokens of one or several texts as points, by layer; each stack is drawn by itself.

    Raises InputError where the points do not fit the tokens and layers, or are not finite.
    """

    title: str
    note: str
    texts: Sequence[str]
    stacks: Sequence[PlanePoints]
    kind: ClassVar[str] = "plane"

    def __post_init__(self) -> None:
        for one in self.stacks:
            shape = (len(one.layers), len(one.tokens), 2)
            if one.at.shape != shape or {len(one.text), len(one.place)} != {len(one.tokens)} or not one.at.size:
                found = list(one.at.shape)
                raise InputError(f"plane {self.title!r}: points of the {one.stack} are {found}, and not {list(shape)}")
            if not np.isfinite(one.at).all():
                raise InputError(f"plane {self.title!r}: a point of the {one.stack} is not finite")

    def data(self) -> Json:
        stacks = []
        for one in self.stacks:
            # Each layer fills the picture: its furthest point is 1000 steps from the centre.
            furthest = np.maximum(np.abs(one.at).max(axis=(1, 2), keepdims=True), 1e-12)
            at = np.rint(one.at / furthest * 1000).astype(int)
            stacks.append({
                "stack": one.stack, "layers": list(one.layers), "tokens": list(one.tokens), "text": list(one.text),
                "place": list(one.place), "at": [layer.ravel().tolist() for layer in at],
                "share": [round(float(x), 3) for x in one.share], "named": list(one.named),
            })  # fmt: skip
        return {"note": self.note, "texts": list(self.texts), "stacks": stacks}
