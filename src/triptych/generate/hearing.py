"""Sound to text with a Whisper model (Radford et al. 2022, section 3.8).

A long recording goes through the model window by window, 30 s each.  The model writes times between its sentences;
the next window begins where the last whole sentence ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triptych.attention import CrossCache
from triptych.errors import InputError, nearest
from triptych.generate.engine import State, stream
from triptych.generate.sampling import Sampling
from triptych.generate.speech import Words, cut, rules
from triptych.media import audio
from triptych.nn import Transformer
from triptych.spec import Frames
from triptych.text import Tokenizer

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # tried in turn while what comes is poor
REPETITIVE, UNLIKELY, SILENT = 2.4, -1.0, 0.6  # zlib's ratio, mean log-probability, probability of no speech
GUESSED = 0.5  # the temperature from which on text is no help to the window after it


@dataclass(frozen=True)
class Segment:
    """A sentence or so: from when to when it is said, in seconds, and what."""

    start: float
    end: float
    text: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Transcript:
    """What is said in a recording, and in which language: None where the model knows only one."""

    language: str | None
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


@dataclass(frozen=True)
class Hearing:
    """A Whisper that listens: the model, its words, and how it is asked to write."""

    module: Transformer
    tokenizer: Tokenizer
    words: Words
    task: str = "transcribe"
    timed: bool = True
    temperatures: Sequence[float] = TEMPERATURES
    seed: int = 0
    previous: bool = False  # whether each window is told what was said before it

    @property
    def slot(self) -> Frames:
        """The input slot.  Raises InputError for a model that does not hear."""
        slot = self.module.spec.reads.embed
        if self.module.decoder is None or not isinstance(slot, Frames):
            raise InputError(f"a {self.module.spec.family} model does not hear; transcribing needs a Whisper")
        return slot

    @property
    def window(self) -> int:
        """How many frames it hears at once."""
        return self.slot.stride * self.slot.position.length

    def text(self, ids: Sequence[int]) -> str:
        """The words among `ids`, without times."""
        return self.tokenizer.decode([token for token in ids if token < self.words.first_time])

    def remember(self, frames: Tensor) -> CrossCache:
        """One window of frames [T, M], heard."""
        source, rows = self.module.flat([frames])
        return self.module.remember(self.module.encode(source, rows), rows)

    def first(self, cross: CrossCache) -> Tensor:
        """[V]: what it would say first, where it tells the language and whether anybody speaks."""
        return self._state([self.words.start], cross).advance()[0].float()

    def language(self, cross: CrossCache) -> str | None:
        """The likeliest language of a window; None where it knows only one."""
        scores = self.first(cross)
        return max(self.words.languages, key=lambda name: scores[self.words.languages[name]].item(), default=None)

    def prompt(self, language: str | None, said: Sequence[int] = ()) -> list[int]:
        """What the decoder is given to begin with: the newest of what was `said`, as far as half of its context
        holds it, then language and task."""
        named = [] if language is None else [self.words.languages[language], self.words.tasks[self.task]]
        first = [self.words.start, *named, *([] if self.timed else [self.words.untimed])]
        if not said or self.words.before is None:
            return first
        return [self.words.before, *said[1 - self.context // 2 :], *first]

    @property
    def context(self) -> int:
        return self.module.spec.context or 448

    def write(self, cross: CrossCache, prompt: Sequence[int], limit: int | None = None) -> list[int]:
        """The ids of one window, times among them; none where nobody seems to speak.

        Text that repeats itself or is unlikely is written again at the next temperature, the last one is taken.
        """
        return self.tried(cross, prompt, limit)[0]

    def tried(self, cross: CrossCache, prompt: Sequence[int], limit: int | None = None) -> tuple[list[int], float]:
        """`write`, and the temperature at which it was."""
        ids, temperature = list[int](), 0.0
        for temperature in self.temperatures:
            ids, likelihood = self._write(cross, prompt, temperature, limit)
            said = self.text(ids).encode()
            if likelihood >= UNLIKELY and len(said) <= REPETITIVE * len(zlib.compress(said)):
                break
            if likelihood < UNLIKELY and self._silence(cross, prompt) > SILENT:
                return [], temperature
        return ids, temperature

    def _write(
        self, cross: CrossCache, prompt: Sequence[int], temperature: float, limit: int | None
    ) -> tuple[list[int], float]:
        """Ids, and their mean log-probability with the end's."""
        state, rule = self._state(prompt, cross), rules(self.words, len(prompt), timed=self.timed)
        seen: list[Tensor] = []

        def watched(scores: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
            seen.append(rule(scores, rows))
            return seen[-1]

        steps = stream(
            state, max_new_tokens=limit or min(self.context // 2, self.context - len(prompt)), eos=[self.words.end],
            sampling=Sampling(temperature=temperature, seed=self.seed), rule=watched,
        )  # fmt: skip
        ids = [step[0][1] for step in steps]
        told = [float(scores[0].log_softmax(-1)[token]) for scores, token in zip(seen, ids, strict=True)]
        return [token for token in ids if token != self.words.end], sum(told) / len(told)

    def _silence(self, cross: CrossCache, prompt: Sequence[int]) -> float:
        if self.words.silent is None:
            return 0.0
        begun = prompt[: prompt.index(self.words.start) + 1]  # with what was said before
        return float(self._state(begun, cross).advance()[0].float().softmax(-1)[self.words.silent])

    def _state(self, prompt: Sequence[int], cross: CrossCache) -> State:
        assert self.module.decoder is not None
        return State(self.module, [list(prompt)], self.module.decoder.cache(1), cross, [0])


@torch.inference_mode()
def transcribe(
    hearing: Hearing,
    sound: audio.Samples,
    *,
    language: str | None = None,
    on_segment: Callable[[Segment], None] | None = None,
) -> Transcript:
    """What is said in `sound`, `[T]` at 16 kHz; `on_segment` is called as it comes.

    The language is heard in the first window unless given.  Raises InputError for a model that does not hear, and a
    language or task it does not know.
    """
    words, slot = hearing.words, hearing.slot
    if hearing.task not in words.tasks:
        raise InputError(f"task={hearing.task!r} is not one of {', '.join(words.tasks)}")
    if language is not None and language not in words.languages:
        known = ", ".join(sorted(words.languages)) or "none: the model knows only one"
        raise InputError(f"language={language!r} is not one of {known}{nearest(language, words.languages)}")
    silence = hearing.window * audio.HOP  # so that the last window is whole
    frames = torch.from_numpy(audio.log_mel(np.pad(sound, (0, silence)), slot.conv1.inputs))
    return transcribe_frames(hearing, frames, len(frames) - hearing.window, language=language, on_segment=on_segment)


@torch.inference_mode()
def transcribe_frames(
    hearing: Hearing,
    frames: Tensor,
    spoken: int,
    *,
    language: str | None = None,
    limit: int | None = None,
    on_segment: Callable[[Segment], None] | None = None,
) -> Transcript:
    """`transcribe` of mel frames `[spoken + window, M]`, the last window silent; at most `limit` tokens of each."""
    frame, first, stride = audio.HOP / audio.RATE, hearing.words.first_time, hearing.slot.stride
    found: list[Segment] = []
    said: list[int] = []
    sure, at = True, 0
    while at < spoken:
        cross = hearing.remember(frames[at : at + hearing.window])
        language = hearing.language(cross) if language is None else language
        size = min(hearing.window, spoken - at)
        prompt = hearing.prompt(language, said if hearing.previous and sure else ())
        written, temperature = hearing.tried(cross, prompt, limit)
        sure = temperature < GUESSED
        pieces, moved = cut(written, size, first, stride)
        for begin, end, ids in pieces:
            said += ids
            text = hearing.text(ids)
            if not text.strip():
                continue
            start, stop = (round((at + stride * time) * frame, 2) for time in (begin, end))
            found.append(Segment(start, stop, text, tuple(ids)))
            if on_segment is not None:
                on_segment(found[-1])
        at += moved
    return Transcript(language, tuple(found))
