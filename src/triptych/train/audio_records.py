"""Transcripts of sounds: records with a WAV file and its text, for models like Whisper (Radford et al. 2022).

The encoder reads mel frames of the sound, padded with silence to the model's window as `transcribe` pads it.  The
decoder reads Whisper's start tokens and the text, and is trained on the text and its end alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych.attention import Rows
from triptych.checkpoints.source import json_object
from triptych.errors import ConfigError, InputError
from triptych.media import audio
from triptych.nn import Transformer
from triptych.spec import FramesSpec, ModelSpec
from triptych.text import Tokenizer, WhisperTokens, with_whisper_tokens
from . import metrics
from .data import EpochRows
from .evaluate import HeldOut, Score
from .objectives import Device, Example, Ids, TrainingBatch
from .recipe import Recipe
from .records import DataRecord
from .settings import Config
from .task import ObjectiveTask, Prepared, read_split, written

MEMORY = 1 << 30  # bytes of mel frames that stay in memory; the frames of further files are computed each time
GENERATION = "generation_config.json"


@dataclass(frozen=True, eq=False, kw_only=True)
class SpokenExample(Example):
    """A row of the decoder beside its `sound`, mel frames `[T, M]` or the file that they are computed of each time, and
    the transcript as text."""

    sound: Tensor | Path
    speech: Speech
    text: str

    @property
    def frames(self) -> Tensor:
        return self.sound if isinstance(self.sound, Tensor) else self.speech.frames(audio.read_wav(self.sound))

    def sources(self, examples: Sequence[Any], device: Device) -> tuple[Tensor, Rows]:
        frames = [one.frames for one in examples]
        positions = Rows(tuple(len(one) // self.speech.slot.stride for one in frames))
        return torch.cat(frames).to(device, non_blocking=True), positions


@dataclass(frozen=True, eq=False)
class Speech:
    """Settings of a model's rows: its window in frames, its number of mel bands, the ids before and after a text."""

    slot: FramesSpec
    prompt: tuple[int, ...]
    end: int

    @staticmethod
    def of(module: Transformer, tokens: WhisperTokens, language: str | None = None) -> Speech:
        """Raises InputError for a model that reads no sound, and for a language that it does not know or needs."""
        slot = module.spec.reads.embed
        if module.decoder is None or not isinstance(slot, FramesSpec):
            raise InputError(f"a {module.spec.family} model reads no sound; use one of model_type whisper")
        if tokens.languages and language is None:
            raise InputError(f"this model knows {len(tokens.languages)} languages; say which one, such as en")
        return Speech(slot, tuple(tokens.prompt(language)), tokens.end)

    @property
    def window(self) -> int:
        """Frames that the model reads at once, 100 a second."""
        return self.slot.stride * self.slot.position.length

    def frames(self, sound: audio.Samples, silence: float | None = None) -> Tensor:
        """`[T]` at 16 kHz -> `[window, M]`: the sound, and silence up to the window, or up to whole positions of at
        least `silence` seconds of it.  Raises InputError for a sound that is longer than the window."""
        second = audio.RATE // audio.HOP
        if len(sound) >= (self.window + 1) * audio.HOP:
            raise TooLongError(
                f"it lasts {len(sound) / audio.RATE:.2f} s, and the model reads {self.window / second:g} s at once"
            )
        count = self.window
        if silence is not None:
            samples, position = len(sound) + round(silence * audio.RATE), self.slot.stride * audio.HOP
            count = min(count, -(-samples // position) * self.slot.stride)
        return torch.from_numpy(audio.log_mel(audio.padded(sound, count), self.slot.conv1.inputs))

    def row(self, text: Sequence[int]) -> Example:
        """The row of a transcript's ids, trained on these and on the end."""
        ids = np.array([*self.prompt, *text], dtype=np.int32)
        targets = np.array([*self.prompt[1:], *text, self.end], dtype=np.int32)
        return Example(ids, targets, np.arange(len(ids)) >= len(self.prompt) - 1)

    def example(self, text: str, ids: Sequence[int], sound: Tensor | Path) -> SpokenExample:
        """The row of a transcript, as text and as ids, beside its frames or their file."""
        row = self.row(ids)
        return SpokenExample(row.ids, row.targets, row.trained, sound=sound, speech=self, text=text)

    def written(self, module: Transformer, frames: Sequence[Tensor], most: int) -> list[list[int]]:
        """The ids that the model writes for each sound, the likeliest one at a time, at most `most`, without the
        end."""
        results = written(module, self.prompt, frames, most, [self.end])
        return [[token for token in result.ids if token != self.end] for result in results]


class SpokenRows(EpochRows):
    """Sounds with transcripts, every one once an epoch, in a new order each epoch."""

    def targets(self) -> Ids:
        return np.concatenate([example.targets[example.trained] for example in self.examples])


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldSpeech(HeldOut):
    """Held-out sounds, which the model also transcribes: the word error rate, and what the transcript of another
    held-out sound in place of its own has."""

    speech: Speech
    tokenizer: Tokenizer
    most: int

    def finished(self, score: Score, module: Transformer, hits: Sequence[tuple[TrainingBatch, Tensor]]) -> Score:
        frames, texts = list[Tensor](), list[str]()
        for batch, _ in hits:
            assert batch.source is not None
            sounds, rows = batch.source
            frames += sounds.split([self.speech.slot.stride * length for length in rows.lengths])
            texts += [one.text for one in batch.examples if isinstance(one, SpokenExample)]
        transcripts = [self.tokenizer.decode(ids) for ids in self.speech.written(module, frames, self.most)]
        figures = {"word error rate": metrics.word_error_rate(transcripts, texts)}
        guesses = {"another transcript": metrics.word_error_rate([*texts[1:], *texts[:1]], texts)}
        return replace(score, metrics=figures, baselines=guesses)


class TranscriptTask(ObjectiveTask):
    """Fields `audio`, the path of a WAV file from the folder of the records, and `text`, what is said in it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        if recipe.data.cut_longer:
            raise ConfigError(
                "data.cut_longer would cut a transcript and not its sound; use data.drop_longer, or cut the recordings"
            )
        self.train, self.held_out = read_split(recipe.data, ("audio", "text"))
        for record in self.held_out:
            if not metrics.spoken_words(record.text("text")):
                raise record.error("text has no word, and held-out transcripts are scored by words; remove the record")
        self.texts = [record.text("text") for record in self.train]

    def completed(self, tokenizer: Tokenizer) -> Tokenizer:
        self.words = with_whisper_tokens(tokenizer)
        return self.words

    def new(self, hf: Config) -> tuple[ModelSpec, Config]:
        tokens = WhisperTokens.of(self.tokenizer, {}, self.tokenizer.vocab_size)
        start, end = tokens.start, tokens.end
        return super().new(hf | {"decoder_start_token_id": start, "bos_token_id": end, "eos_token_id": end})

    def saved_files(self, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """With a generation config which says that the model writes no times: it was trained without."""
        settings = json_object(files.get(GENERATION, b"{}"), Path(GENERATION))
        return {**files, GENERATION: json.dumps({**settings, "return_timestamps": False}, indent=2).encode()}

    def data(self, module: Transformer, tokens: int) -> Prepared:
        try:
            known = WhisperTokens.of(self.tokenizer, {}, module.spec.vocab)
            speech = Speech.of(module, known, self.objective.language)
        except InputError as error:
            raise ConfigError(f"objective transcripts, objective.language: {error}") from None
        self.left = MEMORY
        sides = zip((self.train, self.held_out), self.folders, strict=True)
        train, held_out = (SpokenRows(tuple(self._rows(*side, speech))) for side in sides)
        for rows, what in ((train, "training"), (held_out, "held-out")):
            if not rows.examples:
                raise InputError(f"every {what} record is longer than the model's window or run.length; raise these")
        plain = HeldOut.of(held_out, train, tokens, device=self.device)
        most = self.length - len(speech.prompt) + 1
        return train, HeldSpeech(plain.batches, plain.commonest, speech=speech, tokenizer=self.tokenizer, most=most)

    def _rows(self, records: Sequence[DataRecord], folder: Path, speech: Speech) -> Iterator[SpokenExample]:
        """Those that fit.  Raises InputError, with file and line, for sounds that cannot be read or are too long."""
        for record in records:
            file, text = folder / record.text("audio").strip(), record.text("text")
            ids = self.tokenizer.encode_corpus(text).tolist()
            try:
                frames = speech.frames(audio.read_wav(file))
                if (length := len(speech.prompt) + len(ids)) > self.length:
                    raise TooLongError(f"its transcript has {length} tokens, more than run.length = {self.length}")
            except TooLongError as error:
                if self.recipe.data.drop_longer:
                    continue
                problem = f"{record.location}: {file.name}: {error}"
                raise InputError(f"{problem}; raise that, or set data.drop_longer = true") from None
            except InputError as error:
                raise InputError(f"{record.location}: {error}") from None
            self.left -= frames.nbytes
            yield speech.example(text, ids, frames if self.left >= 0 else file)


class TooLongError(InputError):
    """A sound or a transcript that is longer than the model or the recipe allows."""
