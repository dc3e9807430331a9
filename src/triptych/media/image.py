"""Reads image files as the pixels that a vision model expects (resized, cropped, normalized), and writes PNG files.

Needs no torch, and Pillow only to open a file (`pip install pillow`).
"""

from __future__ import annotations

import io
import math
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from triptych.arguments import checked
from triptych.errors import ConfigError, InputError, first_line, library, shown
from triptych.files import read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_BYTES = 1 << 29  # of a file
MAX_PIXELS = 1 << 27  # of an image as stored; a small file may unpack to any size
MAX_RESIZED_PIXELS = 1 << 26  # of an image while it is resized
MAX_SIDE = 1 << 12  # of what a model reads
MAX_VALUE = 1e6  # of a normalized pixel
_FILE = "preprocessor_config.json"
_WARNINGS = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The preparation of an image for a model: resized, cropped around its centre to `height` x `width`, and
    normalized by channel, `((scale * pixel) - mean) / std` for pixels from 0 to 255.

    `resample` is Pillow's number of the filter (2 bilinear, 3 bicubic).  None leaves images unresized, and they must be
    `height` x `width`.  `resized` is the size before the crop, as height and width or as the length of the shorter
    side; None means `height` x `width`.

    Raises ConfigError for a size no model reads, and for numbers that normalize pixels to beyond a million.
    """

    height: int
    width: int
    resample: int | None = 2
    resized: tuple[int, int] | int | None = None
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @staticmethod
    def of(config: Mapping[str, object], image: tuple[int, int]) -> Preparation:
        """The preparation that the `preprocessor_config.json` in `config` describes, for a model of images of height
        and width `image`.  Keys that are missing have the values of ViT's image processor in transformers.

        Raises ConfigError for a value that is not understood.
        """
        value = config.get
        raw = not value("do_normalize", True)
        try:
            resized = _size(value("size", image)) if value("do_resize", True) else image
            crop = _size(value("crop_size", image)) if value("do_center_crop", False) else resized
            if isinstance(crop, int):
                raise ValueError(f"images whose shorter side is {crop} differ in size; set crop_size")
            return Preparation(
                height=crop[0],
                width=crop[1],
                resample=int(_number(value("resample", 2))) if value("do_resize", True) else None,
                resized=None if crop == resized else resized,
                scale=_number(value("rescale_factor", 1 / 255)) if value("do_rescale", True) else 1.0,
                mean=(0.0,) * 3 if raw else _channels(value("image_mean", 0.5)),
                std=(1.0,) * 3 if raw else _channels(value("image_std", 0.5)),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{_FILE}: is not understood ({first_line(error)})") from None

    def __post_init__(self) -> None:
        tall, wide = (self.resized,) * 2 if isinstance(self.resized, int) else self.resized or (self.height, self.width)
        if not 1 <= self.height <= tall <= MAX_SIDE or not 1 <= self.width <= wide <= MAX_SIDE:
            raise ConfigError(
                f"{_FILE}: cannot crop {shown(self.height)} x {shown(self.width)} from {shown(tall)} x {shown(wide)}; "
                f"sides are 1 to {MAX_SIDE:,}, and a crop is no larger than the image"
            )
        if self.resample not in (None, *range(6)):
            raise ConfigError(f"{_FILE}: resample is {shown(self.resample)}; Pillow's filters are 0 to 5")
        if len(self.mean) != 3 or len(self.std) != 3:
            raise ConfigError(f"{_FILE}: image_mean and image_std need one number, or one for each of three channels")
        with np.errstate(all="ignore"):
            extremes = self.normalized(np.array([0.0, 255.0], np.float32).repeat(3).reshape(2, 3))
        if not (np.abs(extremes) <= MAX_VALUE).all():  # False for NaN too
            raise ConfigError(
                f"{_FILE}: rescale_factor, image_mean and image_std are not finite, or make pixels larger than "
                f"{MAX_VALUE:,.0f}; real values are near 1/255, 0.5 and 0.5"
            )

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing an image of this width and height."""
        if isinstance(self.resized, int):
            short = min(width, height)
            return self.resized * width // short, self.resized * height // short
        tall, wide = self.resized or (self.height, self.width)
        return wide, tall

    def normalized(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """`[..., 3]` pixels from 0 to 255 -> the values a model reads, `[..., 3]`."""
        mean, std = (np.asarray(values, np.float32) for values in (self.mean, self.std))
        return np.asarray((pixels * np.float32(self.scale) - mean) / std, np.float32)


def _size(value: object) -> tuple[int, int] | int:
    """Height and width, or the length of the shorter side, from any spelling of `size` or `crop_size`."""
    if isinstance(value, Mapping) and value.keys() == {"shortest_edge"}:
        return int(value["shortest_edge"])
    if isinstance(value, Mapping):
        value = (value["height"], value["width"]) if value.keys() == {"height", "width"} else None
    sides = value if isinstance(value, list | tuple) else (value, value)
    if len(sides) != 2 or not all(type(side) is int for side in sides):
        raise ValueError("a size is neither a number, nor a height and a width, nor a shortest_edge")
    return sides[0], sides[1]


def _channels(value: object) -> tuple[float, ...]:
    """A number for each of the three channels, from three numbers or one."""
    return tuple(map(_number, value)) if isinstance(value, list | tuple) else (_number(value),) * 3


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{shown(value)} is not a number")
    return float(value)


@checked
def read_image(path: str | Path, preparation: Preparation) -> NDArray[np.float32]:
    """`[3, H, W]` of an image file, rotated as its EXIF orientation says and prepared as `preparation` says.

    Raises InputError for a path that is not a regular file, for a file that is not an image or is cut short, for more
    than 134 million pixels stored, and for more than 67 million while the image is resized.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise InputError(f"{path}: opening an image needs Pillow; run: pip install pillow") from None
    path = Path(path)
    raw = read_regular(path, MAX_BYTES, InputError)
    with library(lambda problem: InputError(f"{path}: is not a readable image ({problem})")):
        image = _opened(raw, path)
        upright = ImageOps.exif_transpose(_eight_bits(image, path)).convert("RGB")
        if preparation.resample is not None:
            size, old = preparation.resized_size(*upright.size), upright.size
            largest = max(size[0] * size[1], size[0] * old[1])  # Pillow resizes the width first
            if largest > MAX_RESIZED_PIXELS:
                raise InputError(
                    f"{path}: is {old[0]} x {old[1]}, and resizing it to {size[0]} x {size[1]} takes {largest:,} "
                    f"pixels; {MAX_RESIZED_PIXELS:,} is the limit: crop it first"
                )
            upright = upright.resize(size, Image.Resampling(preparation.resample))
        elif upright.size != (preparation.width, preparation.height):
            raise InputError(
                f"{path}: is {upright.width} x {upright.height}; its model takes {preparation.width} x "
                f"{preparation.height}, unresized"
            )
        left, top = (upright.width - preparation.width) // 2, (upright.height - preparation.height) // 2
        cropped = upright.crop((left, top, left + preparation.width, top + preparation.height))
    pixels = np.asarray(cropped, np.float32)
    return np.ascontiguousarray(preparation.normalized(pixels).transpose(2, 0, 1))


def png(pixels: NDArray[np.uint8], palette: NDArray[np.uint8] | None = None) -> bytes:
    """`[H, W, 3]` pixels, or the indices `[H, W]` of rows of a palette `[256, 3]`, as a PNG file.

    One header, one block of rows without filters, one end (PNG, section 5).  Pillow, which pages and pictures do
    without, is an extra.
    """
    if getattr(pixels, "dtype", None) != np.uint8 or pixels.shape[2:] != (3,) * (palette is None) or not pixels.size:
        raise InputError("a picture is pixels [H, W, 3], or indices [H, W] of a palette, of the dtype uint8")
    height, width = pixels.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    form = bytes([8, 2 if palette is None else 3, 0, 0, 0])  # 8 bits of three channels, or of a palette
    header = chunk(b"IHDR", width.to_bytes(4, "big") + height.to_bytes(4, "big") + form)
    colors = b"" if palette is None else chunk(b"PLTE", palette.tobytes())
    body = chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + colors + body


def _opened(raw: bytes, path: Path) -> Image:
    """The image in `raw`, its header read and its size checked, but its pixels not yet unpacked."""
    from PIL import Image, UnidentifiedImageError

    try:
        with _WARNINGS, warnings.catch_warnings():  # the filters of warnings belong to all threads
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is checked next
            image = Image.open(io.BytesIO(raw), formats=FORMATS)
    except UnidentifiedImageError:
        raise InputError(f"{path}: is not an image of the formats {', '.join(FORMATS)}") from None
    if image.width * image.height > MAX_PIXELS:
        raise InputError(f"{path}: {image.width} x {image.height} pixels are more than {MAX_PIXELS:,}")
    if image.format == "PNG" and not _has_all_rows(raw):
        raise InputError(f"{path}: is cut short: it has fewer rows of pixels than its header gives")
    return image


def _eight_bits(image: Image, path: Path) -> Image:
    """The image with 8 bits a channel: Pillow would cut levels of 16 bits off at 255, so that most become white."""
    from PIL import Image as images

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        levels = np.asarray(image).astype(np.float64) * (255 / 65535)
        return images.fromarray(np.round(levels).clip(0, 255).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise InputError(f"{path}: has grey levels of 32 bits; save it with 8 or 16 bits a channel")
    return image


# ---------------------------------------------------------------- PNG files whose pixels end early


def _has_all_rows(raw: bytes) -> bool:
    """Whether the compressed pixels of a PNG are as many as its header gives; Pillow fills missing rows with zeros.

    Rows, filter bytes and the seven passes of interlaced files are as in the PNG specification, sections 7 and 8.
    """
    width, height = int.from_bytes(raw[16:20], "big"), int.from_bytes(raw[20:24], "big")
    depth, color, interlace = raw[24], raw[25], raw[28]
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    passes = [(0, 8, 0, 8), (4, 8, 0, 8), (0, 4, 4, 8), (2, 4, 0, 4), (0, 2, 2, 4), (1, 2, 0, 2), (0, 1, 1, 2)]
    missing = 0
    for left, across, top, down in passes if interlace else [(0, 1, 0, 1)]:
        columns, rows = math.ceil((width - left) / across), math.ceil((height - top) / down)
        missing += rows * (1 + math.ceil(columns * bits / 8)) if columns > 0 and rows > 0 else 0
    unpack = zlib.decompressobj()
    for chunk in _pixel_chunks(raw):
        while chunk and missing > 0:
            missing -= len(unpack.decompress(chunk, 1 << 20))
            chunk = unpack.unconsumed_tail
    return missing - len(unpack.flush()) <= 0


def _pixel_chunks(raw: bytes) -> Iterator[bytes]:
    """The contents of the chunks `IDAT` of a PNG."""
    at = 8
    while at + 8 <= len(raw):
        size = int.from_bytes(raw[at : at + 4], "big")
        if raw[at + 4 : at + 8] == b"IDAT":
            yield raw[at + 8 : at + 8 + size]
        at += 12 + size
