"""Images that records name: files relative to the file of the records, prepared as the model's files say.

Each image is opened before the first step, so that one that cannot be read ends a run before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.attention import Rows
from triptych.checkpoints.source import json_object
from triptych.errors import ConfigError, InputError
from triptych.media.image import Preparation, read_image
from triptych.nn import Transformer
from triptych.spec import PatchesSpec
from triptych.train.records import DataRecord

PREPROCESSOR = "preprocessor_config.json"
MEMORY = 1 << 30  # bytes of prepared images that stay in memory; others are opened again for each step
THUMBNAIL = 32  # the largest side of the copy that the linear baseline reads

ReadImages = Callable[[Sequence[Tensor]], tuple[Tensor, Rows]]
"""Pixels `[C, H, W]` -> the patches of all images, and where the positions of each lie."""


@dataclass(frozen=True, eq=False)
class RecordImage:
    """The image of a record: its file, how it is prepared, its pixels `[3, H, W]` where they stay in memory, and a copy
    averaged to at most `THUMBNAIL` pixels a side, `[3 * h * w]`."""

    path: Path
    preparation: Preparation
    thumbnail: NDArray[np.float32]
    in_memory: NDArray[np.float32] | None = None

    def pixels(self) -> Tensor:
        return torch.from_numpy(read_image(self.path, self.preparation) if self.in_memory is None else self.in_memory)


def read_images(records: Sequence[DataRecord], beside: Path, preparation: Preparation) -> list[RecordImage]:
    """The image of the field `image` of each record; names that are not absolute are relative to the folder `beside`.

    Raises InputError, with the record's file and line, for an image that cannot be read or does not fit.
    """
    images, total = list[RecordImage](), 0
    for record in records:
        path = beside / record.text("image").strip()
        try:
            pixels = read_image(path, preparation)
        except InputError as error:
            raise InputError(f"{record.where}: {error}") from None
        total += pixels.nbytes
        images.append(RecordImage(path, preparation, _thumbnail(pixels), pixels if total <= MEMORY else None))
    return images


def in_memory(pixels: NDArray[np.uint8], preparation: Preparation) -> RecordImage:
    """An image that is in memory already, `[H, W, 3]`, of the size that the model reads."""
    prepared = np.ascontiguousarray(preparation.normalized(pixels.astype(np.float32)).transpose(2, 0, 1))
    return RecordImage(Path(), preparation, _thumbnail(prepared), prepared)


def preparation(module: Transformer, files: Mapping[str, bytes]) -> Preparation:
    """How images become the input of `module`, by the `preprocessor_config.json` in `files` where there is one.

    Raises ConfigError for a model of other than three channels, and for a file that prepares another size;
    CheckpointError for one that is not JSON.
    """
    slot = module.spec.reads.embed
    assert isinstance(slot, PatchesSpec)
    if slot.channels != 3:
        raise ConfigError(f"the model reads images of {slot.channels} channels, and image files have 3")
    of_file = Preparation.of(json_object(files.get(PREPROCESSOR, b"{}"), Path(PREPROCESSOR)), slot.image)
    if (of_file.height, of_file.width) != slot.image:
        raise ConfigError(
            f"{PREPROCESSOR} prepares images of {of_file.height} x {of_file.width} pixels, and the model reads "
            f"{slot.image[0]} x {slot.image[1]}"
        )
    return of_file


def new_preprocessor(size: tuple[int, int]) -> dict[str, bytes]:
    """The file that says how images of any size become the height and width `size` of a new model: resized and
    normalized to [-1, 1], as ViT's are."""
    config: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size[0], "width": size[1]},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return {PREPROCESSOR: json.dumps(config, indent=2).encode()}


def _thumbnail(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """The means of about equal rectangles of the image, at most `THUMBNAIL` in height and width."""
    height, width = (min(THUMBNAIL, side) for side in pixels.shape[1:])
    small = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(pixels), (height, width))
    return np.asarray(small.flatten().numpy(), np.float32)
