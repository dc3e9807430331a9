"""Sound to text with a Whisper model (Radford et al. 2022, section 3.8).

A long recording goes through the model window by window, 30 s each.  The model writes times between its sentences;
the next window begins where the last complete sentence ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.attention import CacheType
from triptych.errors import InputError
from triptych.generate import Engine, LiveRow, Request, Sampling
from triptych.media import audio
from triptych.nn import Transformer
from triptych.spec import FramesSpec
from triptych.tasks.whisper_tokens import rules, segments
from triptych.text import Tokenizer, WhisperTokens

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # tried in turn while the text is repetitive or unlikely
REPETITIVE, UNLIKELY, SILENT = 2.4, -1.0, 0.6  # zlib's ratio, mean log-probability, probability of no speech
GUESSED = 0.5  # from this temperature on, do not condition the next window on the text


@dataclass(frozen=True)
class Segment:
    """A piece of a transcript, often a sentence; `start` and `end` in seconds from the beginning of the recording."""

    start: float
    end: float
    text: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Transcript:
    """The segments of a recording and its language, None where the model has only one; `.text` is the whole text."""

    language: str | None
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The text of all segments."""
        return "".join(segment.text for segment in self.segments).strip()


@dataclass
class SpeechWindow:
    """An encoded window, and the row that was last written beside it."""

    engine: Engine
    row: LiveRow

    def start(self, request: Request) -> Engine:
        """Begin another text of the same window."""
        self.row = self.engine.restart(self.row, request)
        return self.engine


@dataclass(frozen=True)
class WhisperDecoder:
    """A Whisper model with its vocabulary and the settings of a transcription."""

    module: Transformer
    tokenizer: Tokenizer
    tokens: WhisperTokens
    task: str = "transcribe"
    timestamps: bool = True
    temperatures: Sequence[float] = TEMPERATURES
    seed: int = 0
    previous: bool = False  # condition each window on the text of the windows before it
    cache: CacheType = "auto"

    @property
    def slot(self) -> FramesSpec:
        """The input slot.  Raises InputError for a model that does not read sound."""
        slot = self.module.spec.reads.embed
        if self.module.decoder is None or not isinstance(slot, FramesSpec):
            raise InputError(f"a {self.module.spec.family} model reads no sound; transcribing needs a Whisper model")
        return slot

    @property
    def window(self) -> int:
        """Frames of one window."""
        return self.slot.stride * self.slot.position.length

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without times."""
        return self.tokenizer.decode([token for token in ids if token < self.tokens.first_time])

    def encode_window(self, frames: Tensor) -> SpeechWindow:
        """One window of frames [T, M], encoded."""
        engine = Engine(self.module, cache_type=self.cache)
        (row,) = engine.add(Request(prompt=[self.tokens.start], source=frames, max_new_tokens=1, keep_slot=True))
        return SpeechWindow(engine, row)

    def first_scores(self, window: SpeechWindow, prompt: Sequence[int] = ()) -> Tensor:
        """[V]: logits of the token after `prompt`, which ends in the start token: a language, or no speech."""
        request = Request(prompt=prompt or [self.tokens.start], max_new_tokens=0, keep_slot=True)
        return window.start(request).logits()[0].float()

    def language(self, window: SpeechWindow) -> str | None:
        """The likeliest language of a window; None where the model knows only one."""
        scores, languages = self.first_scores(window), self.tokens.languages
        return max(languages, key=lambda name: scores[languages[name]].item(), default=None)

    def prompt(self, language: str | None, previous: Sequence[int] = ()) -> list[int]:
        """The ids that the decoder continues: the newest of the `previous` text, at most half of the context, then
        language and task."""
        first = self.tokens.prompt(language, self.task, timestamps=self.timestamps)
        if not previous or self.tokens.previous is None:
            return first
        return [self.tokens.previous, *previous[1 - self.context // 2 :], *first]

    @property
    def context(self) -> int:
        return self.module.spec.context or 448

    def write(self, window: SpeechWindow, prompt: Sequence[int], limit: int | None = None) -> tuple[list[int], float]:
        """The ids of one window, times among them, and the temperature they were sampled at; no ids for silence.

        Text that repeats itself or is unlikely is written again at the next temperature; that of the last one is
        taken as it is.
        """
        ids, temperature = list[int](), 0.0
        for temperature in self.temperatures:
            ids, likelihood = self._write(window, prompt, temperature, limit)
            text = self.text(ids).encode()
            if likelihood >= UNLIKELY and len(text) <= REPETITIVE * len(zlib.compress(text)):
                break
            if likelihood < UNLIKELY and self._silence(window, prompt) > SILENT:
                return [], temperature
        return ids, temperature

    def _write(
        self, window: SpeechWindow, prompt: Sequence[int], temperature: float, limit: int | None
    ) -> tuple[list[int], float]:
        """Ids, and the mean log-probability of these and of the end token."""
        rule = rules(self.tokens, len(prompt), timestamps=self.timestamps)
        allowed: list[Tensor] = []

        def recorded(scores: Tensor, row: Sequence[int]) -> Tensor:
            allowed.append(rule(scores, row))
            return allowed[-1]

        request = Request(
            prompt=prompt, max_new_tokens=limit or min(self.context // 2, self.context - len(prompt)),
            ends=[self.tokens.end], sampling=Sampling(temperature=temperature, seed=self.seed), rules=[recorded],
            keep_slot=True,
        )  # fmt: skip
        engine = window.start(request)
        while window.row.reason is None:
            engine.step()
        ids = window.row.new
        total = sum(float(scores[token] - scores.logsumexp(-1)) for scores, token in zip(allowed, ids, strict=True))
        return [token for token in ids if token != self.tokens.end], total / len(ids)

    def _silence(self, window: SpeechWindow, prompt: Sequence[int]) -> float:
        """The probability of no speech, from the first token after the start token."""
        if self.tokens.no_speech is None:
            return 0.0
        start = prompt[: prompt.index(self.tokens.start) + 1]  # the previous text included
        return float(self.first_scores(window, start).softmax(-1)[self.tokens.no_speech])


@torch.inference_mode()
def transcribe(
    decoder: WhisperDecoder,
    sound: audio.Samples,
    *,
    language: str | None = None,
    on_segment: Callable[[Segment], None] | None = None,
) -> Transcript:
    """The text of `sound`, `[T]` at 16 kHz; `on_segment` is called with each segment as soon as it is written.

    The language is detected in the first window where `language` is None.  Raises InputError for a model that reads no
    sound, and for a language or task it does not know.
    """
    tokens, mels = decoder.tokens, decoder.slot.conv1.inputs
    if not decoder.temperatures:
        raise InputError("temperatures is empty; give at least one, such as (0.0,)")
    tokens.prompt(language, decoder.task)  # raises for a language or a task that the model does not know
    if decoder.timestamps and tokens.first_time >= decoder.module.spec.vocab:
        raise InputError("the vocabulary of this model has no times; use timestamps=False")
    # As transformers: a recording that fits one window is padded as sound, the last window of a longer one as features.
    frames = torch.from_numpy(audio.log_mel(audio.padded(sound, decoder.window), mels))
    length = len(sound) // audio.HOP
    return transcribe_frames(decoder, frames, length, language=language, on_segment=on_segment)


@torch.inference_mode()
def transcribe_frames(
    decoder: WhisperDecoder,
    frames: Tensor,
    length: int,
    *,
    language: str | None = None,
    limit: int | None = None,
    on_segment: Callable[[Segment], None] | None = None,
) -> Transcript:
    """`transcribe` of mel frames `[T, M]`, of which the first `length` are of the recording; frames beyond the last
    are zeros.  At most `limit` tokens a window."""
    frame, first, stride = audio.HOP / audio.RATE, decoder.tokens.first_time, decoder.slot.stride
    every: list[Segment] = []
    written: list[int] = []
    reliable, at = True, 0
    while at < length:
        part = frames[at : at + decoder.window]
        window = decoder.encode_window(F.pad(part, (0, 0, 0, decoder.window - len(part))))
        language = decoder.language(window) if language is None else language
        prompt = decoder.prompt(language, written if decoder.previous and reliable else ())
        ids, temperature = decoder.write(window, prompt, limit)
        reliable = temperature < GUESSED
        pieces, advance = segments(ids, min(decoder.window, length - at), first, stride)
        for begin, end, piece in pieces:
            written += piece
            text = decoder.text(piece)
            if not text.strip():
                continue
            start, stop = (round((at + stride * time) * frame, 2) for time in (begin, end))
            every.append(Segment(start, stop, text, tuple(piece)))
            if on_segment is not None:
                on_segment(every[-1])
        at += advance
    return Transcript(language, tuple(every))
