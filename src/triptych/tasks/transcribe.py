"""Sound to text with a Whisper model (Radford et al. 2022, section 3.8).

A long recording goes through the model window by window, 30 s each.  The model writes times between its sentences;
the next window begins where the last complete sentence ended.  The rules of what may follow what are its code's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.arguments import readable
from triptych.attention import CacheType, check_cache_type
from triptych.errors import InputError, shown
from triptych.generate import Engine, LiveRow, Request, Rule, Sampling
from triptych.media import audio
from triptych.nn import Transformer
from triptych.spec import FramesSpec
from triptych.text import Tokenizer, WhisperTokens
from .model_inputs import TaskModel

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # tried in turn while the text is repetitive or unlikely
REPETITIVE, UNLIKELY, SILENT = 2.4, -1.0, 0.6  # zlib's ratio, mean log-probability, probability of no speech
LOUDEST = 10.0  # of samples, nominally in [-1, 1]; integers that were not scaled are beyond
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
    model: TaskModel,
    sound: str | Path | audio.Samples,
    *,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    seed: int = 0,
    previous: bool = False,
    cache: CacheType = "auto",
    on_segment: Callable[[Segment], None] | None = None,
) -> Transcript:
    """The text of a WAV file, or of `[T]` samples at 16 kHz, of any length (Whisper: Radford et al. 2023).

    The language is detected in the first window unless it is given.  `previous` conditions each window of 30 s on the
    text before it: names and sentences stay consistent across windows, and a mistake may be repeated.  `cache` is what
    keys and values are kept in, as in `generate`, those of the sound too.  Without `timestamps` the model writes times
    between its sentences, unless its vocabulary has none or its generation config has `return_timestamps` false.
    `on_segment` is called with each segment as soon as it is written.

    Raises InputError for a model that reads no sound, a file that is no WAV file, samples that are not mono floats
    about in [-1, 1], a language, task or times that the model does not know, and an unknown type of cache.
    """
    windows = transcribed_windows(
        model, sound, language=language, task=task, timestamps=timestamps, temperatures=temperatures, seed=seed,
        previous=previous, cache=cache,
    )  # fmt: skip
    return _collected(windows, language, on_segment)


def transcribed_windows(
    model: TaskModel,
    sound: str | Path | audio.Samples,
    *,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    seed: int = 0,
    previous: bool = False,
    cache: CacheType = "auto",
) -> Iterator[Transcript]:
    """`transcribe` window by window: whenever the next one is asked for, what is written of the next 30 s.  Raises as
    that, before the first."""
    tokenizer, vocab = model.inputs.words, model.spec.vocab
    config = model.inputs.side_file("generation_config.json") or model.inputs.hf
    tokens = WhisperTokens.of(tokenizer, config, vocab)
    check_cache_type(cache)
    if timestamps is None:
        timestamps = tokens.first_time < vocab and config.get("return_timestamps") is not False
    decoder = WhisperDecoder(model.module, tokenizer, tokens, task, timestamps, temperatures, seed, previous, cache)
    samples = audio.read_wav(sound) if isinstance(sound, str | Path) else _samples(sound)
    mels = decoder.slot.conv1.inputs
    if not isinstance(temperatures, Sequence) or not temperatures:
        raise InputError(f"temperatures={shown(temperatures)} must be a list of at least one, such as (0.0,)")
    tokens.prompt(language, task)  # raises for a language or a task that the model does not know
    if timestamps and tokens.first_time >= vocab:
        raise InputError("the vocabulary of this model has no times; use timestamps=False")
    # As transformers: a recording that fits one window is padded as sound, the last window of a longer one as features.
    frames = torch.from_numpy(audio.log_mel(audio.padded(samples, decoder.window), mels))
    return _windows(decoder, frames, len(samples) // audio.HOP, language)


def _samples(sound: Any) -> Any:
    """`sound` `[T]`.  Raises InputError for anything but mono sound in floats, and for values far beyond [-1, 1]."""
    readable(sound, "the sound")
    mono = isinstance(sound, np.ndarray) and sound.ndim == 1 and sound.dtype.kind == "f"
    loudest = np.abs(sound).max(initial=0) if mono else np.nan
    if not 0 <= loudest <= LOUDEST or not sound.size:
        given = f"{sound.dtype} {list(sound.shape)}" if isinstance(sound, np.ndarray) else shown(sound)
        given += f" whose loudest is {loudest:g}" * mono
        raise InputError(
            f"a sound is a WAV file, or mono samples [T] in a NumPy array of floats between -1 and 1, {audio.RATE:,} a "
            f"second, not {given}; average channels, and divide integers by their largest value"
        )
    return sound


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
    """The text of mel frames `[T, M]`, of which the first `length` are of the recording; frames beyond the last
    are zeros.  At most `limit` tokens a window."""
    return _collected(_windows(decoder, frames, length, language, limit), language, on_segment)


def _collected(
    windows: Iterable[Transcript], language: str | None, on_segment: Callable[[Segment], None] | None
) -> Transcript:
    """The transcript of all windows together."""
    every: list[Segment] = []
    for window in windows:
        language = window.language
        for segment in window.segments:
            every.append(segment)
            if on_segment is not None:
                on_segment(segment)
    return Transcript(language, tuple(every))


def _windows(
    decoder: WhisperDecoder, frames: Tensor, length: int, language: str | None, limit: int | None = None
) -> Iterator[Transcript]:
    """The transcript of each window of `transcribe_frames`."""
    frame, first, stride = audio.HOP / audio.RATE, decoder.tokens.first_time, decoder.slot.stride
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
        spoken = list[Segment]()
        for begin, end, piece in pieces:
            written += piece
            text = decoder.text(piece)
            if not text.strip():
                continue
            start, stop = (round((at + stride * time) * frame, 2) for time in (begin, end))
            spoken.append(Segment(start, stop, text, tuple(piece)))
        yield Transcript(language, tuple(spoken))
        at += advance


def rules(tokens: WhisperTokens, prompt_length: int, *, timestamps: bool = True) -> Rule:
    """What may follow in a row whose first `prompt_length` ids are its prompt: no suppressed token, and times only
    where `_restrict_times` allows them."""

    never = torch.tensor([*tokens.suppressed, tokens.no_timestamps])
    not_first = torch.tensor([*tokens.suppressed, tokens.no_timestamps, *tokens.suppressed_first])

    def allowed(scores: Tensor, row: Sequence[int]) -> Tensor:
        new = list(row[prompt_length:])
        scores = scores.float().index_fill(0, (never if new else not_first).to(scores.device), -torch.inf)
        if timestamps:
            _restrict_times(scores, new, tokens)
        else:
            scores[tokens.first_time :] = -torch.inf
        return scores

    return allowed


def _restrict_times(score: Tensor, new: Sequence[int], tokens: WhisperTokens) -> None:
    """Times come in pairs, the end of a sentence and the beginning of the next, except the first and the last; they
    never decrease; and a time is due when all times together are likelier than any single text token.

    `score` [V] is changed in place.
    """
    first = tokens.first_time
    last_is_time = bool(new) and new[-1] >= first
    paired = last_is_time and (len(new) < 2 or new[-2] >= first)
    if paired:
        score[first:] = -torch.inf
    elif last_is_time:
        score[: tokens.end] = -torch.inf
    if times := [token for token in new if token >= first]:
        score[first : times[-1] + (0 if last_is_time and not paired else 1)] = -torch.inf
    if not new:
        score[:first] = -torch.inf
        if tokens.latest_first is not None:
            score[first + tokens.latest_first + 1 :] = -torch.inf
    if score[first:].logsumexp(-1) > score[:first].max():
        score[:first] = -torch.inf


def segments(
    ids: Sequence[int], frames: int, first: int, stride: int = 2
) -> tuple[list[tuple[int, int, list[int]]], int]:
    """The sentences of a window of `frames`, each as (begin, end, ids) in units of 0.02 s, and after how many frames
    the next window begins: at the last pair of times, or at the end of this window where the text ends in a single
    time or has no pair."""
    timed = [token >= first for token in ids]
    ends = [i + 1 for i in range(len(ids) - 1) if timed[i] and timed[i + 1]]
    if not ends:
        times = [token - first for token in ids if token > first]
        return [(0, times[-1] if times else frames // stride, list(ids))], frames
    closed = timed[-2:] == [False, True]
    if closed:
        ends.append(len(ids))
    pieces = [list(ids[a:b]) for a, b in pairwise([0, *ends])]
    sentences = [(piece[0] - first, piece[-1] - first, piece) for piece in pieces]
    return sentences, frames if closed else sentences[-1][1] * stride
