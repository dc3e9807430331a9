"""Page sections that show the inside of a model: a matrix with details for each cell, points in a plane, and attention
weights over the patches of an image."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from triptych.errors import InputError
from .sections import Json, Section, fields_of

Detail = Sequence[tuple[str, float]]
DARKEST = 0.85  # how opaque the cover of a patch without weight is


@dataclass(frozen=True, eq=False)
class MatrixSection(Section):
    """Rows by columns of short texts; a chosen cell lists its `details`, names with numbers, where there are any.

    `cells` are [R][C]; `shade` [R][C] says how strong a cell's colour is, in [0, 1].  `about` describes what `details`
    are.  `chosen` is the (row, column) that is open first, by default the last cell of the last row.

    Raises InputError where these have other shapes, or a shade is not finite.
    """

    note: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    shade: Sequence[Sequence[float]]
    details: Sequence[Sequence[Detail]] | None = None
    about: str = ""
    chosen: tuple[int, int] | None = None

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
class PlaneSection(Section):
    """Tokens of one or several texts as points, by layer; each stack is drawn by itself.

    Raises InputError where the points do not fit the tokens and layers, or are not finite.
    """

    note: str
    texts: Sequence[str]
    stacks: Sequence[PlanePoints]

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
            at = np.rint(one.at / furthest * 1000).astype(int).reshape(len(one.layers), -1)
            stacks.append(fields_of(one) | {"at": at.tolist(), "share": [round(float(x), 3) for x in one.share]})
        return {"note": self.note, "texts": list(self.texts), "stacks": stacks}


@dataclass(frozen=True, eq=False)
class PatchWeights:
    """A word, the weight of each patch for it, `[rows, columns]` in [0, 1], and a few words `about` them."""

    word: str
    weights: npt.NDArray[np.float64]
    about: str = ""


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as a PNG file, and the patches of it that each of `words` attends to."""

    name: str
    png: bytes
    words: Sequence[PatchWeights]


@dataclass(frozen=True, eq=False)
class PicturesSection(Section):
    """Images, each once for every word, in which a patch is the darker the less weight it has.

    Raises InputError for weights that are no matrix, or outside [0, 1].
    """

    note: str
    pictures: Sequence[Picture]

    def __post_init__(self) -> None:
        for word in (word for picture in self.pictures for word in picture.words):
            weights = np.asarray(word.weights)
            if weights.ndim != 2 or not weights.size or not (weights.min() >= 0 and weights.max() <= 1):
                raise InputError(
                    f"picture {self.title!r}: the weights of {word.word!r} are {list(weights.shape)}; give a matrix of "
                    "numbers in [0, 1]"
                )

    def shown(self, picture: Picture) -> str:
        """The image as a `data:` URL."""
        return "data:image/png;base64," + base64.b64encode(picture.png).decode("ascii")

    def covers(self, word: PatchWeights) -> list[tuple[int, int, float]]:
        """Column, row and opacity of what covers each patch; the patch with the most weight is not covered."""
        most = max(float(word.weights.max()), 1e-12)
        rows, columns = word.weights.shape
        return [
            (x, y, round(DARKEST * (1 - float(word.weights[y, x]) / most), 3))
            for y in range(rows)
            for x in range(columns)
        ]

    def data(self) -> Json:
        pictures = [
            {
                "name": picture.name,
                "words": [
                    {"word": one.word, "about": one.about, "weights": np.round(one.weights, 4).tolist()}
                    for one in picture.words
                ],
            }
            for picture in self.pictures
        ]
        return {"note": self.note, "pictures": pictures}
