"""Drawn scenes with captions: two objects, each a colour and a shape, and how they lie to each other.

A scene is "a red square left of a blue circle" or "... above ...": the object that comes first from the left, or from
the top where they lie one above the other, is named first, so that each picture has exactly one caption.  Pairs of a
colour and a shape in `HELD_OUT` are in no scene of the training data, though each of their colours and shapes is.

Everything is a function of a seed.  Needs NumPy alone; PNG files are written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COLOURS = {
    "red": (225, 45, 40), "green": (40, 170, 60), "blue": (45, 85, 230),
    "yellow": (235, 215, 45), "purple": (150, 50, 190), "white": (240, 240, 240),
    "orange": (240, 130, 30), "cyan": (50, 200, 220),
}  # fmt: skip
SHAPES = ("square", "circle", "triangle", "cross", "bar")
RELATIONS = ("left of", "above")
Pair = tuple[str, str]  # a colour and a shape
HELD_OUT: tuple[Pair, ...] = tuple(zip(COLOURS, SHAPES, strict=False))
SIDE = 36  # pixels of an image in height and width
RADII = (4.5, 6.0)  # half the side of an object, in pixels
GROUND = (56, 56, 60)  # the colour behind the objects
NOISE = 10.0
JITTER = 8.0
BRIGHTNESS = (0.6, 1.1)  # standard deviation of what is added to each channel, out of 255

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Drawn:
    """An object: its colour and shape, its centre (y, x) and the half of its side, in pixels."""

    colour: str
    shape: str
    centre: tuple[float, float]
    radius: float

    @property
    def pair(self) -> Pair:
        return self.colour, self.shape

    def mask(self, side: int = SIDE) -> Mask:
        """Which pixels it covers, `[side, side]`."""
        y, x = np.mgrid[:side, :side] + 0.5
        down, right, r = y - self.centre[0], x - self.centre[1], self.radius
        box: Mask = (np.abs(down) <= r) & (np.abs(right) <= r)
        match self.shape:
            case "square":
                return box
            case "circle":
                return np.asarray(down**2 + right**2 <= r**2)
            case "triangle":  # its tip is at the top
                return box & (2 * np.abs(right) <= down + r)
            case "bar":
                return box & (np.abs(down) <= r / 3)
            case _:
                return box & (np.minimum(np.abs(down), np.abs(right)) <= r / 3)

    def patches(self, patch: int, side: int = SIDE) -> Mask:
        """Which patches of `patch` by `patch` pixels it touches, `[(side / patch) ** 2]`, row by row."""
        count = side // patch
        return np.asarray(self.mask(side).reshape(count, patch, count, patch).any((1, 3)).ravel())


@dataclass(frozen=True, eq=False)
class Scene:
    """Two objects in the order of the caption, and the picture, `[side, side, 3]`."""

    objects: tuple[Drawn, Drawn]
    relation: str
    pixels: Pixels

    @property
    def caption(self) -> str:
        first, second = (" ".join(one.pair) for one in self.objects)
        return f"a {first} {self.relation} a {second}"


def draw(random: np.random.Generator, *, held_out: bool = False) -> Scene:
    """A scene without any pair of `HELD_OUT`, or with `held_out` one in which at least one object is such a pair."""
    every = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    seen = [pair for pair in every if pair not in HELD_OUT]
    pairs = [_any(random, every if held_out else seen) for _ in range(2)]
    if held_out:
        pairs[int(random.integers(2))] = _any(random, HELD_OUT)
    relation = RELATIONS[int(random.integers(len(RELATIONS)))]
    return painted(_placed(random, pairs, relation), relation, random)


def painted(objects: tuple[Drawn, Drawn], relation: str, random: np.random.Generator) -> Scene:
    """The picture of two objects, with noise."""
    picture = np.full((SIDE, SIDE, 3), GROUND, np.float64)
    for one in objects:
        picture[one.mask()] = np.array(COLOURS[one.colour]) * random.uniform(*BRIGHTNESS) + random.normal(0, JITTER, 3)
    picture += random.normal(0, NOISE, picture.shape)
    return Scene(objects, relation, picture.round().clip(0, 255).astype(np.uint8))


def scenes(count: int, seed: int, *, held_out: bool = False) -> list[Scene]:
    """`count` scenes, a function of the seed; those with and without `held_out` are drawn independently."""
    random = np.random.default_rng([seed, held_out])
    return [draw(random, held_out=held_out) for _ in range(count)]


def _any(random: np.random.Generator, pairs: Sequence[Pair]) -> Pair:
    return pairs[int(random.integers(len(pairs)))]


def _placed(random: np.random.Generator, pairs: Sequence[Pair], relation: str) -> tuple[Drawn, Drawn]:
    """The objects inside the picture, apart along one axis by more than along the other."""
    axis = 1 if relation == "left of" else 0
    while True:
        radii = random.uniform(*RADII, size=2)
        centres = random.uniform(radii[:, None] + 0.5, SIDE - radii[:, None] - 0.5, size=(2, 2))
        apart = centres[1] - centres[0]
        if apart[axis] >= radii.sum() + 1 and abs(apart[1 - axis]) <= apart[axis] / 2:
            first, second = (
                Drawn(*pair, (float(y), float(x)), float(radius))
                for pair, (y, x), radius in zip(pairs, centres, radii, strict=True)
            )
            return first, second
