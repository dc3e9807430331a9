"""Sequences of spoken digits with their transcripts and times, from the speech synthesizer espeak-ng.

A word is synthesized once for each speaker (a voice at a speed and a pitch) and kept as a WAV file of 16 kHz.  A
recording joins words of one speaker with pauses between them, so that it is known when each word is spoken, and adds
white noise.  Needs no torch.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from triptych.arguments import checked, integer
from triptych.errors import InputError, MissingExecutableError
from triptych.files import tables_of
from triptych.media import audio
from triptych.pip_packages import cache_directory

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SYNTHESIZER, SECONDS = "espeak-ng", 60  # the program, and the most seconds that it may take for a word
QUIET = 0.02  # of the loudest sample: what is below it at both ends of a word is cut off
MARGIN = 160  # samples that stay before and behind a word
DRAWS = 100  # of a recording, until one is short enough
Word = tuple[str, float, float]
"""A spoken word, and the seconds at which it begins and ends."""


@dataclass(frozen=True, order=True)
class Speaker:
    """A voice of espeak-ng (`en-us+f2`: an accent and a variant), words a minute, and a pitch from 0 to 99."""

    voice: str
    speed: int
    pitch: int


@dataclass(frozen=True)
class Range:
    """The voices, speeds and pitches that speakers are drawn from."""

    voices: tuple[str, ...]
    speeds: tuple[int, ...]
    pitches: tuple[int, ...]

    def draw(self, count: int, random: np.random.Generator) -> list[Speaker]:
        """Different speakers, in which the voices occur equally often, up to one."""
        most = len(self.voices) * len(self.speeds) * len(self.pitches)
        if count > most:
            raise InputError(f"{count} different speakers were asked for, and there are {most}; ask for fewer")
        drawn: dict[Speaker, None] = {}
        while len(drawn) < count:
            for voice in random.permutation(np.array(self.voices)):
                drawn[Speaker(str(voice), int(random.choice(self.speeds)), int(random.choice(self.pitches)))] = None
        return list(drawn)[:count]


def _range(accents: Sequence[str], variants: Sequence[str], speeds: Sequence[int], pitches: Sequence[int]) -> Range:
    return Range(tuple(map("+".join, product(accents, variants))), tuple(speeds), tuple(pitches))


#: What is trained on, and what is never heard in training.
HEARD, UNHEARD = (_range(**table) for table in tables_of(__file__).values())

Synthesizer = Callable[[str, Speaker], audio.Samples]
"""A word and a speaker -> the sound `[T]` at 16 kHz."""


def espeak(word: str, speaker: Speaker) -> audio.Samples:
    """A word spoken by espeak-ng: `[T]` at 16 kHz.  Raises MissingProgramError where it is not installed, and
    InputError where it fails."""
    program = shutil.which(SYNTHESIZER)
    if program is None:
        raise MissingExecutableError(
            f"the speech synthesizer {SYNTHESIZER} is not installed; on Debian and Ubuntu: apt-get install espeak-ng"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "word.wav"
        command = [program, "-v", speaker.voice, "-s", str(speaker.speed), "-p", str(speaker.pitch), "-w", str(file)]
        try:
            done = subprocess.run([*command, "--", word], capture_output=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InputError(f"{SYNTHESIZER} did not speak {word!r} with voice {speaker.voice}: {error}") from None
        if done.returncode or not file.exists():
            reason = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
            raise InputError(f"{SYNTHESIZER} did not speak {word!r} with voice {speaker.voice}: {reason}")
        return audio.read_wav(file)


@dataclass(frozen=True, eq=False)
class SpokenWords:
    """Words of speakers, synthesized when they are first asked for and kept as WAV files under `folder`."""

    folder: Path
    synthesizer: Synthesizer = espeak

    @staticmethod
    def cached() -> SpokenWords:
        """By espeak-ng, in the folder where this package keeps what it made or fetched."""
        return SpokenWords(cache_directory() / "espeak-ng-words")

    def __call__(self, word: str, speaker: Speaker) -> audio.Samples:
        """`[T]` at 16 kHz without the silence at both ends.  Raises InputError as the synthesizer does."""
        file = self.folder / f"{speaker.voice}-{speaker.speed}-{speaker.pitch}" / f"{word}.wav"
        if not file.exists():
            sound = _trimmed(self.synthesizer(word, speaker))
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as scratch:  # renamed, so that no half of a file is read
                audio.write_wav(Path(scratch) / file.name, sound)
                (Path(scratch) / file.name).replace(file)
        return audio.read_wav(file)

    def vocabulary(self, speakers: Sequence[Speaker], words: Sequence[str] = DIGITS) -> dict[Speaker, Clips]:
        """Every word of every speaker, in memory."""
        return {speaker: {word: self(word, speaker) for word in words} for speaker in speakers}


Clips = Mapping[str, audio.Samples]
"""The sounds of one speaker's words."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A sound `[T]` at 16 kHz and the words in it with their times."""

    sound: audio.Samples
    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        return " ".join(word for word, _, _ in self.words)


@dataclass(frozen=True)
class DigitRecorder:
    """How recordings are made: how many words each has, from `words[0]` to `words[1]`, pauses in seconds before,
    between and behind them, and the signal-to-noise ratio in dB of the white noise that is added, each drawn evenly.
    One that lasts longer than `seconds` is drawn again."""

    words: tuple[int, int] = (3, 7)
    pause: tuple[float, float] = (0.02, 0.12)
    noise: tuple[float, float] = (10.0, 30.0)
    seconds: float = 4.8

    def __call__(self, clips: Clips, random: np.random.Generator) -> Recording:
        """One recording of words drawn from `clips`.  Raises InputError where none of them is short enough."""
        names = list(clips)
        for _ in range(DRAWS):
            count = random.integers(self.words[0], self.words[1] + 1)
            one = self._joined(clips, [names[i] for i in random.integers(len(names), size=count)], random)
            if len(one.sound) <= self.seconds * audio.RATE:
                return Recording(with_noise(one.sound, random.uniform(*self.noise), random), one.words)
        raise InputError(f"{DRAWS} recordings all last longer than {self.seconds:g} s; use fewer words or more seconds")

    def _joined(self, clips: Clips, spoken: Sequence[str], random: np.random.Generator) -> Recording:
        """The words one after another, with pauses."""
        pieces, times, at = list[audio.Samples](), list[Word](), 0
        for word in (*spoken, None):
            silence = round(random.uniform(*self.pause) * audio.RATE)
            pieces.append(np.zeros(silence, np.float32))
            at += silence
            if word is not None:
                pieces.append(clips[word])
                times.append((word, at / audio.RATE, (at + len(clips[word])) / audio.RATE))
                at += len(clips[word])
        return Recording(np.concatenate(pieces), tuple(times))


def with_noise(sound: audio.Samples, ratio: float, random: np.random.Generator) -> audio.Samples:
    """`sound` with white Gaussian noise, the mean power of the sound `ratio` dB above that of the noise."""
    scale = np.sqrt(np.mean(np.square(sound, dtype=np.float64)) * 10 ** (-ratio / 10))
    noisy: audio.Samples = (sound + scale * random.standard_normal(len(sound))).astype(np.float32)
    return noisy


@checked
def write_recordings(
    folder: str | Path,
    train: int = 2000,
    held_out: int = 200,
    *,
    speakers: tuple[int, int] = (150, 30),
    recorder: DigitRecorder | None = None,
    spoken: SpokenWords | None = None,
    seed: int = 0,
) -> tuple[Path, Path]:
    """WAV files under `folder` with their records, `train.jsonl` and `held-out.jsonl`, which name `audio` and `text`.

    `speakers` of `HEARD` are in the first, of `UNHEARD` in the second.  Recordings to train on have from one word on:
    from short ones a model learns where to listen.  Raises InputError as `espeak`, and for a folder in use.
    """
    for count in (train, held_out, *speakers):
        integer("train, held_out or speakers", count, 1)
    if (Path(folder) / "train").exists():
        raise InputError(f"{folder} holds recordings already; choose another folder, or remove it")
    random, recorder, spoken = np.random.default_rng(seed), recorder or DigitRecorder(), spoken or SpokenWords.cached()
    short = replace(recorder, words=(1, recorder.words[1]))
    clips = [list(spoken.vocabulary(among.draw(count, random)).values()) for among, count in
             ((HEARD, speakers[0]), (UNHEARD, speakers[1]))]  # fmt: skip
    try:
        return (
            _write(Path(folder), "train", (short(_one(clips[0], random), random) for _ in range(train))),
            _write(Path(folder), "held-out", (recorder(_one(clips[1], random), random) for _ in range(held_out))),
        )
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from None


def _one(clips: Sequence[Clips], random: np.random.Generator) -> Clips:
    return clips[int(random.integers(len(clips)))]


def _write(folder: Path, name: str, recordings: Iterable[Recording]) -> Path:
    """The recordings as `name/*.wav`, and their records."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for i, one in enumerate(recordings):
        audio.write_wav(folder / name / f"{i:05}.wav", one.sound)
        lines.append(json.dumps({"audio": f"{name}/{i:05}.wav", "text": one.text}) + "\n")
    records = folder / f"{name}.jsonl"
    records.write_text("".join(lines), encoding="utf-8")
    return records


def _trimmed(sound: audio.Samples) -> audio.Samples:
    """Without the quiet ends, but for a margin.  Raises InputError for silence."""
    loud = np.flatnonzero(np.abs(sound) > QUIET * np.abs(sound).max(initial=0.0))
    if not len(loud):
        raise InputError("the synthesizer gave silence")
    return sound[max(0, loud[0] - MARGIN) : loud[-1] + MARGIN]
