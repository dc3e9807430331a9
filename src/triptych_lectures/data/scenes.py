"""Drawn scenes with captions: two objects, each with a colour and a shape, and their relative position.

A scene is "a red square left of a blue circle", or "above".  The objects lie in one row or in one column of a grid, and
the one further left, or further up, is named first: each picture has exactly one caption.  Pairs of a colour and a
shape in `HELD_OUT` are in no scene to train on, though each of their colours and shapes is.  All is a function of a
seed, and needs NumPy alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.arguments import checked, integer
from triptych.errors import InputError
from triptych.files import tables_of
from triptych.media.image import png

COLOURS = tables_of(__file__)
SHAPES = ("square", "circle", "triangle", "cross", "bar", "post", "ring", "frame")
RELATIONS = ("left of", "above")
Pair = tuple[str, str]  # a colour and a shape
PAIRS: tuple[Pair, ...] = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
HELD_OUT: tuple[Pair, ...] = tuple(zip(COLOURS, SHAPES, strict=True))[:4]
TRAINED_PAIRS: tuple[Pair, ...] = tuple(pair for pair in PAIRS if pair not in HELD_OUT)
SIDE = 36  # pixels of an image in height and width
CELLS = 3  # rows and columns of places for an object
RADII = (4.0, 5.5)  # half the side of an object, in pixels
GROUND = (16, 16, 18)  # the colour behind the objects
BRIGHTNESS = (0.8, 1.1)  # what the colour of an object is multiplied by
NOISE = 10.0  # standard deviation of what is added to each channel of each pixel, out of 255
TINT = 12.0  # and of what is added to the colour of an object

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

    def mask(self) -> Mask:
        """Which pixels it covers, `[SIDE, SIDE]`."""
        y, x = np.mgrid[:SIDE, :SIDE] + 0.5
        down, right, r = y - self.centre[0], x - self.centre[1], self.radius
        inside = (np.abs(down) <= r) & (np.abs(right) <= r)
        match self.shape:
            case "circle":
                inside = down**2 + right**2 <= r**2
            case "triangle":  # its tip is at the top
                inside &= 2 * np.abs(right) <= down + r
            case "cross":
                inside &= np.minimum(np.abs(down), np.abs(right)) <= r / 3
            case "bar":
                inside &= np.abs(down) <= r / 3
            case "post":
                inside &= np.abs(right) <= r / 3
            case "ring":
                inside = (down**2 + right**2 <= r**2) & (down**2 + right**2 >= (0.55 * r) ** 2)
            case "frame":
                inside &= np.maximum(np.abs(down), np.abs(right)) >= 0.55 * r
        return np.asarray(inside, np.bool_)

    def patches(self, patch: int) -> Mask:
        """Which patches of `patch` by `patch` pixels it touches, `[(SIDE / patch) ** 2]`, row by row."""
        count = SIDE // patch
        return np.asarray(self.mask().reshape(count, patch, count, patch).any((1, 3)).ravel(), np.bool_)


@dataclass(frozen=True, eq=False)
class Scene:
    """Two objects in the order of the caption, and the picture, `[SIDE, SIDE, 3]`."""

    objects: tuple[Drawn, Drawn]
    relation: str
    pixels: Pixels

    @property
    def caption(self) -> str:
        first, second = (" ".join(one.pair) for one in self.objects)
        return f"a {first} {self.relation} a {second}"


@checked
def scenes(count: int, seed: int, *, held_out: bool = False) -> list[Scene]:
    """`count` scenes without any pair of `HELD_OUT`, or with `held_out` scenes in which one object or both are such
    pairs."""
    random = np.random.default_rng([integer("seed", seed, 0), int(held_out)])
    return [_scene(random, held_out=held_out) for _ in range(integer("count", count, 0))]


@checked
def shapes(count: int, seed: int) -> list[tuple[Pixels, str]]:
    """`count` pictures of one object of any colour in any place, and the name of its shape."""
    random, pictures = np.random.default_rng([integer("seed", seed, 0), 2]), list[tuple[Pixels, str]]()
    for _ in range(integer("count", count, 0)):
        radius = float(random.uniform(*RADII))
        y, x = random.uniform(radius, SIDE - radius, size=2).tolist()
        one = Drawn(*_any(random, PAIRS), (y, x), radius)
        pictures.append((painted([one], random), one.shape))
    return pictures


def painted(objects: Sequence[Drawn], random: np.random.Generator) -> Pixels:
    """The picture of the objects, the later ones over the earlier, with noise."""
    picture = np.full((SIDE, SIDE, 3), GROUND, np.float64)
    for one in objects:
        tint = random.normal(0, TINT, 3)
        picture[one.mask()] = np.array(COLOURS[one.colour]) * random.uniform(*BRIGHTNESS) + tint
    picture += random.normal(0, NOISE, picture.shape)
    return np.asarray(picture.round().clip(0, 255), np.uint8)


@checked
def write(folder: str | Path, count: int = 4000, held_out: int = 400, seed: int = 0) -> None:
    """Write `count` scenes and `held_out` others as PNG files into a new folder, with records beside them:
    `captions.jsonl` and `captions-held-out.jsonl` with the fields `image` and `text`, and of as many pictures of one
    object `shapes.jsonl` and `shapes-held-out.jsonl` with the fields `image` and `label`.

    Raises InputError where the folder exists or cannot be written.
    """
    folder = Path(folder)
    seed = integer("seed", seed, 0)
    sides = ("", integer("count", count, 1), seed), ("-held-out", integer("held_out", held_out, 1), seed + 1)
    try:
        folder.mkdir(parents=True)
        for side, many, of in sides:
            drawn = scenes(many, of, held_out=bool(side))
            _write_records(folder, f"captions{side}", "text", [(one.pixels, one.caption) for one in drawn])
            _write_records(folder, f"shapes{side}", "label", shapes(many, of))
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from None


def _write_records(folder: Path, name: str, field: str, pictures: Sequence[tuple[Pixels, str]]) -> None:
    (folder / name).mkdir()
    lines = []
    for i, (pixels, text) in enumerate(pictures):
        image = f"{name}/{i:05}.png"
        (folder / image).write_bytes(png(pixels))
        lines.append(json.dumps({"image": image, field: text}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _scene(random: np.random.Generator, *, held_out: bool) -> Scene:
    pairs = [_any(random, PAIRS if held_out else TRAINED_PAIRS) for _ in range(2)]
    if held_out:
        pairs[int(random.integers(2))] = _any(random, HELD_OUT)
    relation = RELATIONS[int(random.integers(len(RELATIONS)))]
    objects = _placed(random, pairs, relation)
    return Scene(objects, relation, painted(objects, random))


def _any(random: np.random.Generator, pairs: Sequence[Pair]) -> Pair:
    return pairs[int(random.integers(len(pairs)))]


def _placed(random: np.random.Generator, pairs: Sequence[Pair], relation: str) -> tuple[Drawn, Drawn]:
    """The objects in two cells of one row, or of one column where the first is above."""
    line, before, after = int(random.integers(CELLS)), *sorted(random.choice(CELLS, 2, replace=False).tolist())
    cells = [(line, before), (line, after)] if relation == "left of" else [(before, line), (after, line)]
    first, second = (_in_cell(random, *pair, cell) for pair, cell in zip(pairs, cells, strict=True))
    return first, second


def _in_cell(random: np.random.Generator, colour: str, shape: str, cell: tuple[int, int]) -> Drawn:
    """An object anywhere inside a cell, (row, column)."""
    radius, width = float(random.uniform(*RADII)), SIDE / CELLS
    y, x = ((one + 0.5) * width + float(random.uniform(radius - width / 2, width / 2 - radius)) for one in cell)
    return Drawn(colour, shape, (y, x), radius)
