"""What a model is given, made into rows it reads: token ids of texts, frames of sound, pixels of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych.checkpoints import read_json
from triptych.errors import InputError, TextError
from triptych.media import audio
from triptych.media.image import Preparation, read_image
from triptych.nn import Row
from triptych.spec import Embed, Frames, Model, Patches
from triptych.text import Encoded, RenderedPrompt, Tokenizer

Texts = Sequence[str | RenderedPrompt | Sequence[int] | Tensor | Path] | Tensor
"""Rows to read: texts or token ids; for other models files, frames of sound `[T, M]` or pixels `[C, H, W]`."""


@dataclass(frozen=True)
class Inputs:
    """The door of a model: its input slot says what it reads, its tokenizer and the files in `path` say how."""

    spec: Model
    tokenizer: Tokenizer | None
    path: Path | None

    def rows(self, given: Texts, mask: Tensor | None = None) -> Sequence[Row]:
        """The rows the model reads: the ids of texts; or frames and pixels, of files or as they are."""
        if self.worded:
            return self.ids(given, mask)
        if mask is not None:
            raise InputError("a mask is for token ids; give frames or images as a list, each of its own length")
        return self._files(given)

    def ids(self, texts: Texts, mask: Tensor | None = None, *, target: bool = False) -> list[list[int]]:
        """Token ids of each row: texts through the tokenizer, lists as they are, `[B, T]` tensors by their mask.

        `target` rows are for the decoder beside an encoder.  Raises InputError for a rectangular tensor that holds the
        pad id and comes without a mask.
        """
        if isinstance(texts, str):
            raise InputError("give a list of texts, not one string: [text]")
        vocab = self.spec.vocab if target else self.spec.source_vocab
        rows = self._unpadded(texts, mask) if isinstance(texts, Tensor) else texts
        return [self._row(i, row, vocab) for i, row in enumerate(rows)]

    def begun(self, prompts: Texts, prefix: str | Sequence[int]) -> tuple[list[list[int]], Sequence[Row] | None]:
        """What the decoder goes on from, and the sources beside it: None for a decoder alone.

        `prefix` is what a decoder beside an encoder begins with, after its start token.
        """
        if self.spec.layout != "encoder-decoder":
            if prefix:
                raise InputError("decoder_prefix is for encoder-decoders; put it at the end of the prompt")
            return self.ids(prompts), None
        if self.spec.ids.start is None:
            raise InputError("the config has no decoder_start_token_id, so the decoder has nothing to begin with")
        head = self.words.encode(prefix, special=False) if isinstance(prefix, str) else list(prefix)
        sources = self.rows(prompts)
        return [[self.spec.ids.start, *head] for _ in sources], sources

    def labelled(self, given: Texts, second: Sequence[str] | None = None) -> Sequence[Encoded | Tensor]:
        """Rows for a head over classes: texts, pairs of them where there is a `second`, or images."""
        if not self.worded:
            return self._files(given)
        if second is None:
            return [Encoded(ids, [0] * len(ids), [], []) for ids in self.ids(given)]
        return [self.words.encode_with_offsets(a, b)[0] for a, b in zip(_strings(given), second, strict=True)]

    def placed(self, texts: Texts) -> list[Encoded]:
        """Texts with the place of each token in them.  Raises InputError for anything but a list of texts."""
        return [self.words.encode_with_offsets(text)[0] for text in _strings(texts)]

    def windows(self, question: str, context: str) -> list[Encoded]:
        """The question beside its context: in windows that overlap by half of their length where the context is longer
        than the model reads at once.

        Raises InputError for a question that leaves no room for it.
        """
        most, overlap, asked = self.spec.context, 0, len(self.ids([question])[0]) + 2  # and what stands between the two
        if most is not None:
            if asked >= most:
                raise InputError(f"the question needs {asked} of the model's {most} positions; shorten it")
            overlap = (most - asked) // 2
        return self.words.encode_with_offsets(question, context, max_length=most, overlap=overlap)

    @property
    def worded(self) -> bool:
        """Whether it reads token ids, not sound or images."""
        return isinstance(self.spec.reads.embed, Embed)

    @property
    def words(self) -> Tokenizer:
        """The tokenizer.  Raises TextError where there is none."""
        if self.tokenizer is None:
            raise TextError(f"{self.path or 'this model'} has no tokenizer; give token ids")
        return self.tokenizer

    def told(self, name: str) -> dict[str, Any]:
        """A small file beside the weights, empty where there is none."""
        file = None if self.path is None else self.path / name
        return read_json(file) if file is not None and file.is_file() else {}

    def _row(self, i: int, row: str | RenderedPrompt | Sequence[int] | Tensor | Path, vocab: int) -> list[int]:
        if isinstance(row, str | RenderedPrompt):
            return self.words.encode(row)
        if isinstance(row, Path) or (isinstance(row, Tensor) and row.is_floating_point()):
            raise InputError(f"row {i}: this model reads texts or token ids, not what this {type(row).__name__} holds")
        ids = [int(token) for token in row]
        for token in ids:
            if not 0 <= token < vocab:
                raise InputError(f"row {i}: token id {token} is outside the vocabulary of {vocab}")
        return ids

    def _unpadded(self, ids: Tensor, mask: Tensor | None) -> list[list[int]]:
        if ids.dim() != 2 or ids.is_floating_point():
            raise InputError(f"ids must be an integer tensor [B, T], not {ids.dtype} {list(ids.shape)}")
        if mask is not None:
            if mask.shape != ids.shape:
                raise InputError(f"mask is {list(mask.shape)} and ids are {list(ids.shape)}")
            return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
        pad = self.spec.ids.pad
        counted = ids[:, 1:] if pad == self.spec.ids.start else ids
        if pad is not None and (n := int((counted == pad).sum())):
            raise InputError(
                f"{n} of {ids.numel()} ids are the pad id {pad} and no mask was given; pass mask=, or rows as lists"
            )
        return ids.tolist()

    def _files(self, given: Any) -> list[Any]:
        """Frames and pixels: what stands under a path opened, the rest as it is, for the input part to judge."""
        if isinstance(given, str | Path):
            raise InputError(f"give a list of files or tensors, not one: [{str(given)!r}]")
        return [self._opened(row) if isinstance(row, str | Path) else row for row in given]

    def _opened(self, path: str | Path) -> Tensor:
        """A WAV file as one window of frames [T, M], or an image as pixels [C, H, W]."""
        slot = self.spec.reads.embed
        if isinstance(slot, Patches):
            how = Preparation.of(self.told("preprocessor_config.json"), slot.image)
            return torch.from_numpy(read_image(path, how))
        assert isinstance(slot, Frames)
        window = slot.stride * slot.position.length
        frames = audio.log_mel(audio.padded(audio.read_wav(path), window), slot.conv1.inputs)
        if len(frames) > window:
            seconds = window * audio.HOP / audio.RATE
            raise InputError(f"{path}: is longer than the {seconds:g} s this model hears at once; use transcribe()")
        return torch.from_numpy(frames)


def _strings(texts: Texts) -> Sequence[str]:
    """Raises InputError for anything but a list of texts: ids have no place in one."""
    if isinstance(texts, str | Tensor) or not all(isinstance(text, str) for text in texts):
        raise InputError("give a list of texts: [text]")
    return texts  # type: ignore[return-value]
