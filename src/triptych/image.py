"""Images to what a model of them reads: opened, resized and brought to its range.  Needs no torch, and Pillow only to
open a file (`pip install triptych[image]`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ConfigError, InputError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MOST = 1 << 27  # pixels of an image; a small file may unpack to any size


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to an image before a model reads it: `((scale * resized) - mean) / std`, channel by channel.

    `resample` is Pillow's number of the filter: 2 bilinear, 3 bicubic.
    """

    height: int
    width: int
    resample: int = 2
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @staticmethod
    def of(config: Mapping[str, Any], own: tuple[int, int]) -> Preparation:
        """From a `preprocessor_config.json`, ViT's own values where it is silent; `own` are the model's sides.

        Raises ConfigError for a value that is not understood.
        """
        size = config.get("size", {"height": own[0], "width": own[1]})
        sides = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (size, size)
        if not config.get("do_resize", True):
            sides = own
        plain = not config.get("do_normalize", True)
        try:
            return Preparation(
                height=int(sides[0] or 0),
                width=int(sides[1] or 0),
                resample=int(config.get("resample", 2)),
                scale=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
                mean=(0.0,) * 3 if plain else tuple(map(float, config.get("image_mean", (0.5,) * 3))),
                std=(1.0,) * 3 if plain else tuple(map(float, config.get("image_std", (0.5,) * 3))),
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"preprocessor_config.json: is not understood ({error})") from None

    def __post_init__(self) -> None:
        if not 1 <= min(self.height, self.width) <= max(self.height, self.width) <= 1 << 12:
            raise ConfigError(f"preprocessor_config.json: size {self.height} x {self.width} is no image this reads")
        if self.resample not in range(6) or len(self.mean) != 3 or len(self.std) != 3 or 0.0 in self.std:
            raise ConfigError("preprocessor_config.json: resample, image_mean or image_std is not understood")


def read_image(path: str | Path, how: Preparation) -> NDArray[np.float32]:
    """`[3, H, W]` of an image file, as `how` says.

    Raises InputError for a file that is no image, is cut short, or holds more than 134 million pixels.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InputError(f"{path}: opening an image needs Pillow; pip install triptych[image]") from None
    with Path(path).open("rb") as file:
        try:
            with Image.open(file, formats=FORMATS) as opened:
                if opened.width * opened.height > MOST:
                    raise InputError(f"{path}: {opened.width} x {opened.height} pixels are more than {MOST:,}")
                small = opened.convert("RGB").resize((how.width, how.height), Image.Resampling(how.resample))
        except UnidentifiedImageError:
            raise InputError(f"{path}: is no image of {', '.join(FORMATS)}") from None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError(f"{path}: cannot be read as an image ({error})") from None
    pixels = np.asarray(small, np.float32) * np.float32(how.scale)
    mean, std = (np.asarray(values, np.float32) for values in (how.mean, how.std))
    return np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1))
