"""Labels of images: fields `image` and `label`, or `labels`, for a model that reads images (ViT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.nn import Transformer
from triptych.spec import PatchesSpec
from triptych.text import Tokenizer
from triptych.train import baselines
from triptych.train.data import Data
from triptych.train.evaluate import HeldOut
from triptych.train.image_records import ReadImages, RecordImage, new_preprocessor, preparation, read_images
from triptych.train.label_tasks import LabelTask, RowJudge
from triptych.train.labelled import HeadLoss, LabelledBatch, LabelledExample
from triptych.train.objectives import Example
from triptych.train.records import DataRecord
from triptych.train.task import JudgedRows, epoch_rows, trained_at


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledImage(LabelledExample):
    """An image with its label.  `ids` are zeros, one for each position of the model: there are no tokens."""

    image: RecordImage
    read: ReadImages

    def collated(self, examples: Sequence[Example], device: torch.device | str) -> LabelledBatch:
        images = tuple(one for one in examples if isinstance(one, LabelledImage))
        patches, rows = self.read([one.image.pixels() for one in images])
        place, first = torch.device(device), np.cumsum([0, *rows.lengths[:-1]])
        return LabelledBatch(
            ids=patches.to(place),
            rows=rows,
            at=torch.from_numpy(first).to(place),
            targets=torch.zeros(len(images), dtype=torch.long, device=place),
            types=None,
            goals=torch.from_numpy(np.concatenate([one.goal for one in images])).to(place),
            examples=images,
            head=self.head,
        )


def labelled_images(
    module: Transformer, images: Sequence[RecordImage], goals: NDArray[np.integer], loss: HeadLoss
) -> list[LabelledImage]:
    """The examples of images with their goals, `[images, 1]` or `[images, C]`, for a model that reads images."""
    positions = module.spec.source_context
    assert positions is not None
    ids, mask = np.zeros(positions, dtype=np.int32), trained_at(positions, 0)
    return [
        LabelledImage(
            ids=ids, targets=ids, trained=mask, goal=goal.astype(np.int64), head=loss, types=ids, number=number,
            image=image, read=module.flat,
        )
        for number, (image, goal) in enumerate(zip(images, goals, strict=True))
    ]  # fmt: skip


class ImageLabelTask(LabelTask):
    """One label of each image, or several, learned by a ViT; a linear model of the pixels stands beside it."""

    reads_text = False
    reads = "image"
    also = ()

    def new(self, hf: dict[str, Any]) -> tuple[Transformer, dict[str, Any]]:
        module, config = super().new(hf)
        slot = module.spec.reads.embed
        assert isinstance(slot, PatchesSpec)
        self.files = new_preprocessor(slot.image)
        return module, config

    def data(self, module: Transformer, tokenizer: Tokenizer, tokens: int) -> tuple[Data, HeldOut]:
        return self.data_without_text(module, tokens)

    def data_without_text(self, module: Transformer, tokens: int) -> tuple[Data, HeldOut]:
        how, data = preparation(module, self.files), self.recipe.data
        train = read_images(self.train, Path(data.path).parent, how)
        held = read_images(self.held, Path(data.held_out_path or data.path).parent, how)
        goals, right, loss = self.goals()

        assert self.labels is not None
        examples = labelled_images(module, held, goals[1], loss)
        thumbnails = [np.stack([image.thumbnail for image in side]) for side in (train, held)]
        guesses = {
            "majority": baselines.majority(right, len(self.held)),
            "linear on pixels": baselines.linear(thumbnails[0], right, thumbnails[1], len(self.labels)),
        }
        judged = JudgedRows.batched(examples, RowJudge(guesses, self.several), tokens, self.recipe.run.device)
        return epoch_rows(labelled_images(module, train, goals[0], loss)), judged

    def _texts(self, record: DataRecord) -> list[str]:
        return []
