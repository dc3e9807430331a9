"""Pictures under weights: how strongly each patch of an image is attended to, for each of several words."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from triptych.errors import InputError

Json = dict[str, object]
DARKEST = 0.85  # how opaque the cover of a patch without weight is


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
class PicturesSection:
    """Images, each once for every word, in which a patch is the darker the less weight it has.

    Raises InputError for weights that are no matrix, or outside [0, 1].
    """

    title: str
    note: str
    pictures: Sequence[Picture]
    kind: ClassVar[str] = "pictures"

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
