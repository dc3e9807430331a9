"""Random cases of objectives that read images and sounds."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from training_cases import Case, case_of, other, vision_case
from training_labels import drawn_loss, has_classes, weighted_loss
from training_tokens import padded_rows, ragged
from triptych.media.image import Preparation
from triptych.train import seq2seq
from triptych.train.audio_records import Speech, SpokenExample
from triptych.train.image_tasks import CaptionExample, RecordImage, labelled_images
from triptych.train.labelled import IGNORED, SeveralLoss


def _images(random: Random, slot: Any, count: int) -> tuple[list[RecordImage], Tensor]:
    """Images of random pixels as records hold them, and as the reference takes them, [B, C, H, W]."""
    numbers = np.random.default_rng(random.randrange(10**6))
    pixels = numbers.normal(size=(count, slot.channels, *slot.image)).astype(np.float32)
    how = Preparation(height=slot.image[0], width=slot.image[1])
    return [RecordImage(Path(), how, one.ravel(), one) for one in pixels], torch.from_numpy(pixels)


def image_labels(seed: int) -> Case:
    random = Random(f"images {seed}")
    reference, module = other("vit", "ForImageClassification", seed, has_classes)
    count = reference.config.num_labels
    images, pixels = _images(random, module.spec.reads.embed, random.randint(4, 7))
    if random.random() < 0.4:
        goals = [[random.randint(0, 1) for _ in range(count)] for _ in images]
        reference.config.problem_type = "multi_label_classification"
        several = labelled_images(module, images, np.array(goals), SeveralLoss(tuple(map(str, range(count)))))
        wanted = torch.tensor(goals).float()
        return case_of(random, reference, module, several, lambda model: model(pixel_values=pixels, labels=wanted).loss)
    right, head = torch.tensor([random.randrange(count) for _ in images]), drawn_loss(random, count)
    examples = labelled_images(module, images, right[:, None].numpy(), head)

    def theirs(model: Any) -> Tensor:
        return weighted_loss(model(pixel_values=pixels).logits, right, head)

    return case_of(random, reference, module, examples, theirs)


def captions(seed: int) -> Case:
    """A ViT read by GPT-2 or BERT."""
    random = Random(f"captions {seed}")
    reference, module = vision_case(seed)
    config, smoothing = reference.config, random.choice([0.0, 0.0, 0.1])
    rows = ragged(random, config.decoder, end=config.eos_token_id)
    images, pixels = _images(random, module.spec.reads.embed, len(rows))
    start = config.decoder_start_token_id
    examples = []
    for row, image in zip(rows, images, strict=True):
        one = seq2seq([0], row, start)
        examples.append(
            CaptionExample(one.ids, one.targets, one.trained, image=image, read=module.flat, smoothing=smoothing)
        )
    goals = padded_rows(rows, IGNORED)[0]

    def theirs(model: Any) -> Tensor:
        out = model(pixel_values=pixels, labels=goals)
        if not smoothing:
            return out.loss
        logits = out.logits.flatten(0, 1)
        return F.cross_entropy(logits, goals.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)

    return case_of(random, reference, module, examples, theirs)


def speech(seed: int) -> Case:
    """Only what follows a drawn prompt is trained, as of transcripts."""
    random = Random(f"speech {seed}")
    reference, module = other("whisper", "ForConditionalGeneration", seed)
    config, slot = reference.config, module.spec.reads.embed
    rows = ragged(random, config, end=config.eos_token_id)
    window = 2 * config.max_source_positions
    numbers = np.random.default_rng(seed)
    frames = [torch.from_numpy(numbers.normal(size=(window, config.num_mel_bins)).astype(np.float32)) for _ in rows]
    skipped = [random.randint(0, len(row) - 1) for row in rows]
    examples = []
    for row, one, skip in zip(rows, frames, skipped, strict=True):
        plain = seq2seq([0], row, config.decoder_start_token_id)
        trained = np.arange(len(row)) >= skip
        examples.append(
            SpokenExample(plain.ids, plain.targets, trained, sound=one, speech=Speech(slot, (), 0), text="")
        )
    goals = [[IGNORED] * skip + row[skip:] for row, skip in zip(rows, skipped, strict=True)]

    def theirs(model: Any) -> Tensor:
        begun = padded_rows([[config.decoder_start_token_id, *row[:-1]] for row in rows], config.pad_token_id)[0]
        features = torch.stack([one.T for one in frames])
        return model(input_features=features, decoder_input_ids=begun, labels=padded_rows(goals, IGNORED)[0]).loss

    return case_of(random, reference, module, examples, theirs)
