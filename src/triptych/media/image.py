"""Images to what a model of them reads: opened, resized and brought to its range.  Needs no torch, and Pillow only to
open a file (`pip install triptych[image]`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ConfigError, InputError, library, said

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MOST = 1 << 27  # pixels of an image; a small file may unpack to any size


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to an image before a model reads it: resized, its middle kept, and
    `((scale * resized) - mean) / std`, channel by channel.

    `resample` is Pillow's number of the filter: 2 bilinear, 3 bicubic; None for images that are not resized, and must
    be `height` x `width`.  `resized` is the size before the middle is cut out: of both sides, or of the shorter one.
    """

    height: int
    width: int
    resample: int | None = 2
    resized: tuple[int, int] | int | None = None  # None: height x width
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @staticmethod
    def of(config: Mapping[str, Any], own: tuple[int, int]) -> Preparation:
        """From a `preprocessor_config.json`, ViT's own values where it is silent; `own` are the model's sides.

        Raises ConfigError for a value that is not understood.
        """
        plain = not config.get("do_normalize", True)
        try:
            resized = _size(config.get("size", own)) if config.get("do_resize", True) else own
            crop = _size(config.get("crop_size", own)) if config.get("do_center_crop", False) else resized
            if isinstance(crop, int):
                raise ValueError(f"images of which the shorter side is {crop} have no size of their own")
            return Preparation(
                height=crop[0],
                width=crop[1],
                resample=int(config.get("resample", 2)) if config.get("do_resize", True) else None,
                resized=None if crop == resized else resized,
                scale=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
                mean=(0.0,) * 3 if plain else _colours(config.get("image_mean", 0.5)),
                std=(1.0,) * 3 if plain else _colours(config.get("image_std", 0.5)),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"preprocessor_config.json: is not understood ({said(error)})") from None

    def __post_init__(self) -> None:
        tall, wide = (self.resized,) * 2 if isinstance(self.resized, int) else self.resized or (self.height, self.width)
        if not 1 <= self.height <= tall <= 1 << 12 or not 1 <= self.width <= wide <= 1 << 12:
            raise ConfigError(f"preprocessor_config.json: size {self.height} x {self.width} is no image this reads")
        finite = np.isfinite([self.scale, *self.mean, *self.std]).all()
        if self.resample not in (None, *range(6)) or len(self.mean) != 3 or len(self.std) != 3 or 0.0 in self.std:
            raise ConfigError("preprocessor_config.json: resample, image_mean or image_std is not understood")
        if not finite:
            raise ConfigError("preprocessor_config.json: rescale_factor, image_mean or image_std is not finite")

    def place(self, width: int, height: int) -> tuple[int, int]:
        """What an image of this width and height is resized to, its width first."""
        if isinstance(self.resized, int):
            short = min(width, height)
            return self.resized * width // short, self.resized * height // short
        tall, wide = self.resized or (self.height, self.width)
        return wide, tall


def _size(given: Any) -> tuple[int, int] | int:
    """Height and width, or of the shorter side alone, in any spelling of `size` or `crop_size`."""
    if isinstance(given, Mapping) and given.keys() == {"shortest_edge"}:
        return int(given["shortest_edge"])
    if isinstance(given, Mapping):
        given = (given["height"], given["width"]) if given.keys() == {"height", "width"} else None
    sides = given if isinstance(given, list | tuple) else (given, given)
    if len(sides) != 2 or not all(type(side) is int for side in sides):
        raise ValueError("a size is neither a number, nor a height and a width, nor a shortest_edge")
    return sides[0], sides[1]


def _colours(given: Any) -> tuple[float, ...]:
    """One number for each of three channels, or the same for all."""
    return tuple(map(float, given)) if isinstance(given, list | tuple) else (float(given),) * 3


def read_image(path: str | Path, how: Preparation) -> NDArray[np.float32]:
    """`[3, H, W]` of an image file, turned as its camera says it was held, as `how` says.

    Raises InputError for a file that is no image, is cut short, or holds more than 134 million pixels.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise InputError(f"{path}: opening an image needs Pillow; pip install triptych[image]") from None
    with Path(path).open("rb") as file, library(lambda problem: InputError(f"{path}: is no sound image ({problem})")):
        try:
            opened = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError:
            raise InputError(f"{path}: is no image of {', '.join(FORMATS)}") from None
        if opened.width * opened.height > MOST:
            raise InputError(f"{path}: {opened.width} x {opened.height} pixels are more than {MOST:,}")
        upright = ImageOps.exif_transpose(opened).convert("RGB")
        if how.resample is not None:
            upright = upright.resize(how.place(*upright.size), Image.Resampling(how.resample))
        elif upright.size != (how.width, how.height):
            raise InputError(
                f"{path}: is {upright.width} x {upright.height}; its model takes {how.width} x {how.height}, unresized"
            )
        left, top = (upright.width - how.width) // 2, (upright.height - how.height) // 2
        small = upright.crop((left, top, left + how.width, top + how.height))
    pixels = np.asarray(small, np.float32) * np.float32(how.scale)
    mean, std = (np.asarray(values, np.float32) for values in (how.mean, how.std))
    return np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1))
