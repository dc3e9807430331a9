"""Images that records name, and the objectives that read them: labels of images, and captions.

An image lies relative to the file of the records and is prepared as the model's files say.  Each is opened before the
first step, so that one that cannot be read ends a run before it begins.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from triptych.attention import Rows
from triptych.checkpoints.source import json_object
from triptych.errors import ConfigError, InputError
from triptych.media.image import Preparation, read_image
from triptych.nn import Transformer
from triptych.spec import ModelSpec, PatchesSpec
from . import metrics
from .data import check, groups, with_hidden_words
from .evaluate import HeldOut, Score
from .label_tasks import LabelTask, judged_classes
from .labelled import HeadLoss, LabelledBatch, LabelledExample
from .objectives import (
    Device,
    Example,
    Integers,
    TrainingBatch,
    collate,
    joined,
    seq2seq,
)
from .recipe import Recipe
from .records import DataRecord
from .settings import Config
from .task import ObjectiveTask, Prepared, epoch_rows, read_split, trained_at

CAPTION_FAMILY = "vision-encoder-decoder"
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


def _images(task: LabelTask | CaptionTask, module: Transformer) -> list[list[RecordImage]]:
    """The images of the field `image` of the records to train on and of those held out, as the model reads them.

    Raises InputError, with the record's file and line, for an image that cannot be read or does not fit.
    """
    how = preparation(module, task.files)

    def read(records: Iterable[DataRecord], folder: Path) -> Iterator[RecordImage]:
        total = 0
        for record in records:
            path = folder / record.text("image").strip()
            try:
                pixels = read_image(path, how)
            except InputError as error:
                raise InputError(f"{record.location}: {error}") from None
            total += pixels.nbytes
            yield RecordImage(path, how, _thumbnail(pixels), pixels if total <= MEMORY else None)

    return [list(read(*side)) for side in zip((task.train, task.held_out), task.folders, strict=True)]


def in_memory(pixels: NDArray[np.uint8], preparation: Preparation) -> RecordImage:
    """An image that is in memory already, `[H, W, 3]`, of the size that the model reads."""
    prepared = np.ascontiguousarray(preparation.normalized(pixels.astype(np.float32)).transpose(2, 0, 1))
    return RecordImage(Path(), preparation, _thumbnail(prepared), prepared)


def preparation(module: Transformer, files: Mapping[str, bytes]) -> Preparation:
    """The preparation of images for `module`, by the `preprocessor_config.json` in `files` where there is one.

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
    config: Config = {
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
    small = F.adaptive_avg_pool2d(torch.from_numpy(pixels), (height, width))
    return small.flatten().numpy()


# ---------------------------------------------------------------- labels


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledImage(LabelledExample):
    """An image with its label.  `ids` are zeros, one for each position of the model: there are no tokens."""

    image: RecordImage
    read: ReadImages

    def collated(self, examples: Sequence[Any], device: Device) -> LabelledBatch:
        patches, rows = self.read([one.image.pixels() for one in examples])
        first = joined([np.cumsum([0, *rows.lengths[:-1]])], device)
        return LabelledBatch(patches.to(device), rows, first, torch.zeros_like(first), examples=tuple(examples))


def labelled_images(
    module: Transformer, images: Sequence[RecordImage], goals: Integers, loss: HeadLoss
) -> list[LabelledImage]:
    """The examples of images with their goals, `[images, 1]` or `[images, C]`, for a model that reads images."""
    positions = module.spec.source_context
    assert positions is not None
    ids, mask = np.zeros(positions, dtype=np.int32), trained_at(positions, 0)
    return [
        LabelledImage(
            ids=ids, targets=ids, trained=mask, goal=goal.astype(np.int64), head=loss, number=number, image=image,
            read=module.flat,
        )
        for number, (image, goal) in enumerate(zip(images, goals, strict=True))
    ]  # fmt: skip


class ImageLabelTask(LabelTask):
    """One label of each image, or several, learned by a ViT; a linear model of the pixels stands beside it."""

    reads = "image"
    also = ()

    def new(self, hf: Config) -> tuple[ModelSpec, Config]:
        spec, config = super().new(hf)
        assert isinstance(spec.reads.embed, PatchesSpec)
        self.files = new_preprocessor(spec.reads.embed.image)
        return spec, config

    def data(self, module: Transformer, tokens: int) -> Prepared:
        train, held_out = _images(self, module)
        goals, right, loss = self.goals()
        thumbnails = [np.stack([image.thumbnail for image in side]) for side in (train, held_out)]
        guesses = {
            "majority": metrics.majority(right, len(self.held_out)),
            "linear on pixels": metrics.linear(thumbnails[0], right, thumbnails[1], len(self.labels)),
        }
        judged = self.judged(
            labelled_images(module, held_out, goals[1], loss), partial(judged_classes, guesses, "macro F1"), tokens
        )
        return epoch_rows(labelled_images(module, train, goals[0], loss)), judged

    def _texts(self, record: DataRecord) -> list[str]:
        return []


# ---------------------------------------------------------------- captions


@dataclass(frozen=True, eq=False, kw_only=True)
class CaptionExample(Example):
    """A caption to write, token by token, and its image.  The share `smoothing` of each target is spread over the
    vocabulary."""

    image: RecordImage
    read: ReadImages
    smoothing: float = 0.0

    def collated(self, examples: Sequence[Example], device: Device) -> TrainingBatch:
        return replace(super().collated(examples, device), smoothing=self.smoothing)

    def sources(self, examples: Sequence[Any], device: Device) -> tuple[Tensor, Rows]:
        patches, rows = self.read([one.image.pixels() for one in examples])
        return patches.to(device), rows


class CaptionTask(ObjectiveTask):
    """Fields `image`, the name of a file, and `text`; a ViT reads the one, and GPT-2 or BERT writes the other."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.train, self.held_out = read_split(recipe.data, ("image", "text"))
        self.texts = [record.text("text") for record in self.train]

    def new(self, hf: Config) -> tuple[ModelSpec, Config]:
        """A fresh model; the vocabulary is the decoder's, and the cross-attention need not be asked for."""
        if hf.get("model_type") != CAPTION_FAMILY or not isinstance(hf.get("decoder"), dict):
            wanted = f'model_type = "{CAPTION_FAMILY}" and the tables model.encoder and model.decoder'
            raise ConfigError(f"objective captions trains a new model with {wanted}")
        vocab = {"vocab_size": hf["vocab_size"]}
        crossed = {"add_cross_attention": True, "is_decoder": True}
        config = {key: value for key, value in hf.items() if key != "vocab_size"} | {"is_encoder_decoder": True}
        config["decoder"] = vocab | crossed | hf["decoder"]
        spec, _ = super().new(config)
        self.files = new_preprocessor(_patches(spec).image)
        return spec, config

    def data(self, module: Transformer, tokens: int) -> Prepared:
        _patches(module.spec)
        words, start = self.tokenizer, module.spec.ids.start
        ends = [one for one in (*module.spec.ids.eos, words.eos_id, words.sep_id) if one is not None]
        assert start is not None
        if not ends:
            raise InputError("neither the config nor the tokenizer has an end token, so no caption would end")
        smoothing = self.objective.smoothing

        def row(record: DataRecord, image: RecordImage) -> CaptionExample | None:
            ids = words.encode(record.text("text"), special=False)
            length = self.row_length(record, len(ids) + 1)
            if length is None:
                return None
            text = seq2seq([0], [*ids[: length - 1], ends[0]], start)
            tokens = (text.ids, text.targets, text.trained)
            return CaptionExample(*tokens, image=image, read=module.flat, smoothing=smoothing)

        sides = zip((self.train, self.held_out), _images(self, module), strict=True)
        train, held_out = (epoch_rows(map(row, *side)) for side in sides)
        check(train, ends[0], ends=True)
        commonest = Counter(self.texts).most_common(1)[0][0]
        guess = sum(record.text("text") == commonest for record in self.held_out) / len(self.held_out)
        batches = tuple(collate(group, self.device) for group in groups(held_out.examples, self.recipe.run.rows))
        train = with_hidden_words(train, self.objective.hidden, words.unk_id)
        return train, HeldOutCaptions(batches, int(np.bincount(train.targets()).argmax()), guess=guess)


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldOutCaptions(HeldOut):
    """Held-out images; `guess` is the share of them that the commonest caption is right for."""

    guess: float

    def finished(self, score: Score, module: Transformer, hits: Sequence[tuple[TrainingBatch, Tensor]]) -> Score:
        """Tokens right, and captions right as a whole: those whose every token ranks first after the right ones before
        it, which are those that greedy decoding writes."""
        whole = [bool(row.all()) for batch, hit in hits for row in batch.rows.split(hit)]
        tokens = float(torch.cat([hit for _, hit in hits]).float().mean())
        figures = {"exact captions": sum(whole) / len(whole), "tokens": tokens}
        return replace(score, metrics=figures, baselines={"commonest caption": self.guess})


def _patches(spec: ModelSpec) -> PatchesSpec:
    """The input slot.  Raises ConfigError for a model that reads no images or writes no text."""
    if not isinstance(spec.reads.embed, PatchesSpec) or spec.layout != "encoder-decoder":
        raise ConfigError(f"objective captions trains models of the type {CAPTION_FAMILY}; this is a {spec.family}")
    return spec.reads.embed
