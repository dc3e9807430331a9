"""Transcripts of sounds: records with a WAV file and its text, for models like Whisper (Radford et al. 2022).

The encoder reads mel frames of the sound, padded with silence to the model's window as `transcribe` pads it.  The
decoder reads Whisper's start tokens and the text, and is trained on the text and its end alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych.attention import Rows
from triptych.checkpoints.source import json_object
from triptych.errors import ConfigError, InputError
from triptych.generate import Engine, Request, Scheduler, generate
from triptych.media import audio
from triptych.nn import Transformer
from triptych.spec import FramesSpec
from triptych.text import Tokenizer, WhisperTokens, with_whisper_tokens
from triptych.train import metrics
from triptych.train.data import Data, in_epochs
from triptych.train.evaluate import HeldOut, Score
from triptych.train.objectives import Example, Ids, TrainingBatch
from triptych.train.recipe import Recipe
from triptych.train.records import DataRecord
from triptych.train.task import ObjectiveTask, read_split

MEMORY = 1 << 30  # bytes of mel frames that stay in memory; the frames of further files are computed each time
GENERATION = "generation_config.json"


@dataclass(frozen=True, eq=False, kw_only=True)
class SpokenExample(Example):
    """A row of the decoder beside the mel frames `[T, M]` of its sound, `stride` of which are one position, and the
    transcript as text."""

    frames: Tensor
    stride: int
    text: str

    def collated(self, examples: Sequence[Example], device: torch.device | str) -> SpokenBatch:
        rows = [one for one in examples if isinstance(one, SpokenExample)]
        batch = super().collated(rows, device)
        frames = torch.cat([one.frames for one in rows]).to(device, non_blocking=True)
        return SpokenBatch(
            ids=batch.ids,
            rows=batch.rows,
            at=batch.at,
            targets=batch.targets,
            source=(frames, Rows(tuple(len(one.frames) // self.stride for one in rows))),
            frames=tuple(one.frames for one in rows),
            texts=tuple(one.text for one in rows),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class SpokenBatch(TrainingBatch):
    """Rows with the mel frames of each sound and its transcript."""

    frames: tuple[Tensor, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Speech:
    """How a model's rows are made: its window in frames, its number of mel bands, the ids before and after a text."""

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

    def example(self, text: str, ids: Sequence[int], frames: Tensor) -> SpokenExample:
        """The row of a transcript, as text and as ids, beside its frames."""
        row = self.row(ids)
        return SpokenExample(
            ids=row.ids, targets=row.targets, trained=row.trained, frames=frames, stride=self.slot.stride, text=text
        )

    def written(self, module: Transformer, frames: Sequence[Tensor], most: int) -> list[list[int]]:
        """The ids that the model writes for each sound, the likeliest one at a time, at most `most`, without the
        end."""
        requests = [
            Request(prompt=self.prompt, source=one, max_new_tokens=most, ends=[self.end], number=i)
            for i, one in enumerate(frames)
        ]
        results = generate(Scheduler(Engine(module)), requests, None)
        return [[token for token in result.ids if token != self.end] for result in results]


@dataclass(frozen=True, eq=False)
class SpokenRecord:
    """The transcript of a record, as text and as ids, its sound's file, and the frames where they stay in memory."""

    text: str
    ids: tuple[int, ...]
    file: Path
    in_memory: Tensor | None

    def example(self, speech: Speech) -> SpokenExample:
        frames = speech.frames(audio.read_wav(self.file)) if self.in_memory is None else self.in_memory
        return speech.example(self.text, self.ids, frames)


@dataclass(frozen=True, eq=False)
class SpokenRows:
    """Sounds with transcripts, every one once an epoch, in a new order each epoch."""

    speech: Speech
    records: tuple[SpokenRecord, ...]

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        return [record.example(self.speech) for record in in_epochs(self.records, seed, step, rows)]

    def held(self) -> Iterator[Example]:
        return (record.example(self.speech) for record in self.records)

    def targets(self) -> Ids:
        return np.concatenate([np.array([*record.ids, self.speech.end], dtype=np.int32) for record in self.records])


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldSpeech(HeldOut):
    """Held-out sounds, which the model also transcribes: the word error rate, and what the transcript of another
    held-out sound in place of its own has."""

    speech: Speech
    tokenizer: Tokenizer
    most: int

    def of_batches(self, batches: tuple[TrainingBatch, ...]) -> HeldSpeech:
        return replace(self, batches=batches, characters=None, bytes=None)

    def measured(self, module: Transformer, batches: Iterable[TrainingBatch]) -> Score:
        every = [batch for batch in batches if isinstance(batch, SpokenBatch)]
        score = super().measured(module, every)
        texts = [text for batch in every for text in batch.texts]
        frames = [one for batch in every for one in batch.frames]
        written = [self.tokenizer.decode(ids) for ids in self.speech.written(module, frames, self.most)]
        name = "word error rate"
        figures = {name: metrics.word_error_rate(written, texts)}
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
        self.train, self.held = read_split(recipe.data, ("audio", "text"))
        for record in self.held:
            if not metrics.spoken_words(record.text("text")):
                raise record.error("text has no word, and held-out transcripts are scored by words; remove the record")
        self.texts = [record.text("text") for record in self.train]
        self.tokens: WhisperTokens | None = None

    def completed(self, tokenizer: Tokenizer) -> Tokenizer:
        tokenizer = with_whisper_tokens(tokenizer)
        self.tokens = WhisperTokens.of(tokenizer, {}, tokenizer.vocab_size)
        return tokenizer

    def new(self, hf: dict[str, Any]) -> tuple[Transformer, dict[str, Any]]:
        assert self.tokens is not None
        start, end = self.tokens.start, self.tokens.end
        return super().new(hf | {"decoder_start_token_id": start, "bos_token_id": end, "eos_token_id": end})

    def saved_files(self, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """With a generation config which says that the model writes no times: it was trained without."""
        settings = json_object(files.get(GENERATION, b"{}"), Path(GENERATION))
        return {**files, GENERATION: json.dumps({**settings, "return_timestamps": False}, indent=2).encode()}

    def data(self, module: Transformer, tokenizer: Tokenizer, tokens: int) -> tuple[Data, HeldOut]:
        run, speech = self.recipe.run, self._speech(module, tokenizer)
        memory = MemoryLeft(MEMORY)
        paths = self.recipe.data.path, self.recipe.data.held_out_path or self.recipe.data.path
        train, held = (
            SpokenRows(speech, tuple(self._records(side, Path(path).parent, speech, tokenizer, memory)))
            for side, path in zip((self.train, self.held), paths, strict=True)
        )
        for rows, what in ((train, "training"), (held, "held-out")):
            if not rows.records:
                raise InputError(f"every {what} record is longer than the model's window or run.length; raise these")
        plain = HeldOut.of(held, train, tokens, device=run.device)
        most = run.length - len(speech.prompt) + 1
        return train, HeldSpeech(plain.batches, plain.commonest, speech=speech, tokenizer=tokenizer, most=most)

    def _speech(self, module: Transformer, tokenizer: Tokenizer) -> Speech:
        language = self.recipe.objective.language
        try:
            return Speech.of(module, WhisperTokens.of(tokenizer, {}, module.spec.vocab), language)
        except InputError as error:
            raise ConfigError(f"objective transcripts, objective.language: {error}") from None

    def _records(
        self, records: Sequence[DataRecord], folder: Path, speech: Speech, tokenizer: Tokenizer, memory: MemoryLeft
    ) -> Iterator[SpokenRecord]:
        """Those that fit.  Raises InputError, with file and line, for sounds that cannot be read or are too long."""
        run = self.recipe.run
        for record in records:
            file, text = folder / record.text("audio").strip(), record.text("text")
            ids = tuple(int(i) for i in tokenizer.encode_corpus(text))
            try:
                frames = speech.frames(audio.read_wav(file))
                if len(speech.prompt) + len(ids) > run.length:
                    length = len(speech.prompt) + len(ids)
                    raise TooLongError(f"its transcript has {length} tokens, more than run.length = {run.length}")
            except TooLongError as error:
                if self.recipe.data.drop_longer:
                    continue
                problem = f"{record.where}: {file.name}: {error}"
                raise InputError(f"{problem}; raise that, or set data.drop_longer = true") from None
            except InputError as error:
                raise InputError(f"{record.where}: {error}") from None
            yield SpokenRecord(text, ids, file, frames if memory.takes(frames.nbytes) else None)


@dataclass
class MemoryLeft:
    """How many bytes are left for what stays in memory."""

    left: int

    def takes(self, size: int) -> bool:
        """Whether there is room for `size` bytes, which are then taken."""
        self.left -= size
        return self.left >= 0


class TooLongError(InputError):
    """A sound or a transcript that is longer than the model or the recipe allows."""
