"""Texts of images, learned by a decoder that reads an encoder of images: fields `image` and `text`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from triptych import nn
from triptych.errors import ConfigError, InputError
from triptych.families import read_config
from triptych.nn import Transformer
from triptych.spec import PatchesSpec
from triptych.text import Tokenizer
from triptych.train.data import Data, EpochRows, check, with_hidden_words
from triptych.train.evaluate import HeldOut, Score
from triptych.train.image_records import ReadImages, RecordImage, new_preprocessor, preparation, read_images
from triptych.train.labelled import exact
from triptych.train.objectives import Example, TrainingBatch, collate, final, seq2seq, token_batch
from triptych.train.recipe import Recipe
from triptych.train.records import DataRecord
from triptych.train.task import Fitter, ObjectiveTask, epoch_rows, read_split

FAMILY = "vision-encoder-decoder"


@dataclass(frozen=True, eq=False, kw_only=True)
class CaptionExample(Example):
    """A caption to write, token by token, and its image.  The share `smoothing` of each target is spread over the
    vocabulary."""

    image: RecordImage
    read: ReadImages
    smoothing: float = 0.0

    def collated(self, examples: Sequence[Example], device: torch.device | str) -> CaptionBatch:
        images = [one.image.pixels() for one in examples if isinstance(one, CaptionExample)]
        patches, rows = self.read(images)
        words = token_batch(examples, device)
        return CaptionBatch(
            words.ids, words.rows, words.at, words.targets, (patches.to(device), rows), smoothing=self.smoothing
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class CaptionBatch(TrainingBatch):
    """Captions and the patches of their images, with the smoothing of the loss."""

    smoothing: float

    def nats(self, module: Transformer, max_logits: int, random: torch.Generator | None) -> Tensor:
        if not self.smoothing:
            return super().nats(module, max_logits, random)
        logits = exact(module.unembed(final(module, self, random), self.rows))
        return F.cross_entropy(logits, self.targets, reduction="sum", label_smoothing=self.smoothing)


class CaptionTask(ObjectiveTask):
    """Fields `image`, the name of a file, and `text`; a ViT reads the one, and GPT-2 or BERT writes the other."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.train, self.held = read_split(recipe.data, ("image", "text"))
        self.texts = [record.text("text") for record in self.train]

    def new(self, hf: dict[str, Any]) -> tuple[Transformer, dict[str, Any]]:
        """A fresh model; the vocabulary is the decoder's, and the cross-attention need not be asked for."""
        if hf.get("model_type") != FAMILY or not isinstance(hf.get("decoder"), dict):
            raise ConfigError(
                f'objective captions trains a new model with model_type = "{FAMILY}" and the tables model.encoder and '
                "model.decoder"
            )
        vocab = {"vocab_size": hf["vocab_size"]}
        crossed = {"add_cross_attention": True, "is_decoder": True}
        config = {key: value for key, value in hf.items() if key != "vocab_size"} | {"is_encoder_decoder": True}
        config["decoder"] = vocab | crossed | hf["decoder"]
        module = nn.new(read_config(config, where="model"), self.recipe.run.seed)
        self.files = new_preprocessor(_patches(module).image)
        return module, config

    def data(self, module: Transformer, tokenizer: Tokenizer, tokens: int) -> tuple[Data, HeldOut]:
        _patches(module)
        how = preparation(module, self.files)
        data = self.recipe.data
        sides = (self.train, data.path), (self.held, data.held_out_path or data.path)
        train, held = (
            self._rows(records, read_images(records, Path(file).parent, how), module, tokenizer)
            for records, file in sides
        )
        check(train, _end(module, tokenizer), ends=True)
        commonest = Counter(self.texts).most_common(1)[0][0]
        guess = sum(record.text("text") == commonest for record in self.held) / len(self.held)
        rows = self.recipe.run.rows
        groups = [held.examples[i : i + rows] for i in range(0, len(held.examples), rows)]
        batches = tuple(collate(group, self.recipe.run.device) for group in groups)
        train = with_hidden_words(train, self.recipe.objective.hidden, tokenizer.unk_id)
        return train, HeldOutCaptions(batches, int(np.bincount(train.targets()).argmax()), guess=guess)

    def _rows(
        self, records: Sequence[DataRecord], images: Sequence[RecordImage], module: Transformer, tokenizer: Tokenizer
    ) -> EpochRows:
        fit, end, start = Fitter(self.recipe, tokenizer), _end(module, tokenizer), module.spec.ids.start
        assert start is not None
        smoothing = self.recipe.objective.smoothing

        def row(record: DataRecord, image: RecordImage) -> CaptionExample | None:
            ids = [*tokenizer.encode(record.text("text"), special=False), end]
            if len(ids) > fit.limit and not fit.cut:
                fit.refuse(record, len(ids))
                return None
            text = seq2seq([0], [*ids[: fit.limit - 1], end] if len(ids) > fit.limit else ids, start)
            return CaptionExample(
                text.ids, text.targets, text.trained, image=image, read=module.flat, smoothing=smoothing
            )

        return epoch_rows(row(*one) for one in zip(records, images, strict=True))


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldOutCaptions(HeldOut):
    """Held-out images; `guess` is the share of them that the commonest caption is right for."""

    guess: float

    def of_batches(self, batches: tuple[TrainingBatch, ...]) -> HeldOutCaptions:
        return HeldOutCaptions(batches, self.commonest, guess=self.guess)

    def measured(self, module: Transformer, batches: Iterable[TrainingBatch]) -> Score:
        """Tokens right, and captions right as a whole: those whose every token ranks first after the right ones before
        it, which are those that greedy decoding writes."""
        nats, right, commonest, whole = 0.0, list[Tensor](), 0, 0
        for batch in batches:
            logits = exact(module.unembed(final(module, batch), batch.rows))
            nats += float(F.cross_entropy(logits, batch.targets, reduction="sum"))
            right += batch.rows.split(logits.argmax(-1) == batch.targets)
            commonest += int((batch.targets == self.commonest).sum())
        whole = sum(bool(row.all()) for row in right)
        flat = torch.cat(right)
        figures = {"exact captions": whole / len(right), "tokens": float(flat.float().mean())}
        return Score(
            nats, len(flat), int(flat.sum()), commonest, metrics=figures, baselines={"commonest caption": self.guess}
        )


def _patches(module: Transformer) -> PatchesSpec:
    """The input slot.  Raises ConfigError for a model that reads no images or writes no text."""
    spec = module.spec
    if not isinstance(spec.reads.embed, PatchesSpec) or spec.layout != "encoder-decoder":
        raise ConfigError(f"objective captions trains models of the type {FAMILY}; this is a {spec.family}")
    return spec.reads.embed


def _end(module: Transformer, tokenizer: Tokenizer) -> int:
    """The token that ends a caption.  Raises InputError where neither the config nor the tokenizer has one."""
    known = (*module.spec.ids.eos, tokenizer.eos_id, tokenizer.sep_id)
    end = next((one for one in known if one is not None), None)
    if end is None:
        raise InputError("neither the config nor the tokenizer has an end token, so no caption would end")
    return end
