"""Recordings of spoken digits: words, times, pauses, noise, and the files they are kept in."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from spoken_tones import spoken, tones
from triptych.errors import InputError, MissingExecutableError
from triptych.media.audio import RATE, read_wav, write_wav
from triptych_lectures.data import digit_recordings
from triptych_lectures.data import digit_recordings as spoken_digits

SPEAKER = digit_recordings.Speaker("en-us+f2", 160, 50)


def test_nothing_that_is_tested_was_heard() -> None:
    for name in ("voices", "speeds", "pitches"):
        assert not set(getattr(digit_recordings.HEARD, name)) & set(getattr(digit_recordings.UNHEARD, name)), name
    variants = [
        {voice.partition("+")[2] for voice in among.voices}
        for among in (digit_recordings.HEARD, digit_recordings.UNHEARD)
    ]
    assert not variants[0] & variants[1]


def test_speakers_are_different_and_drawn_alike() -> None:
    drawn = digit_recordings.HEARD.draw(70, np.random.default_rng(1))
    assert len(set(drawn)) == 70
    assert drawn == digit_recordings.HEARD.draw(70, np.random.default_rng(1))
    counts = [sum(one.voice == voice for one in drawn) for voice in digit_recordings.HEARD.voices]
    assert max(counts) - min(counts) <= 1
    with pytest.raises(InputError, match="193 different speakers were asked for, and there are 192; ask for fewer"):
        digit_recordings.UNHEARD.draw(193, np.random.default_rng(1))


def test_a_sound_is_written_as_it_is_read(tmp_path: Path) -> None:
    sound = np.array([0, 0.5, -0.25, 2, -2], np.float32)
    write_wav(tmp_path / "a.wav", sound)
    assert np.abs(read_wav(tmp_path / "a.wav") - sound.clip(-1, 1)).max() <= 1e-4
    with pytest.raises(InputError, match="cannot write"):
        write_wav(tmp_path / "no" / "a.wav", sound)


def test_a_word_is_synthesized_once_and_cut_to_its_sound(tmp_path: Path) -> None:
    asked: list[str] = []

    def once(word: str, speaker: digit_recordings.Speaker) -> np.ndarray:
        asked.append(word)
        return tones(word, speaker)

    words = digit_recordings.SpokenWords(tmp_path, once)
    first, again = words("four", SPEAKER), words("four", SPEAKER)
    assert asked == ["four"]
    assert np.array_equal(first, again)
    assert abs(len(first) - 20 * RATE / 160) <= 2 * spoken_digits.MARGIN + 40  # the silences of 0.2 s are gone
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.wav")] == ["en-us+f2-160-50/four.wav"]


def test_silence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the synthesizer gave silence"):
        digit_recordings.SpokenWords(tmp_path, lambda word, speaker: np.zeros(RATE, np.float32))("one", SPEAKER)


def test_words_stand_where_the_times_say(tmp_path: Path) -> None:
    clips = spoken(tmp_path).vocabulary([SPEAKER])[SPEAKER]
    recorder = digit_recordings.DigitRecorder(words=(3, 7), noise=(60.0, 60.0))
    counts, random = set(), np.random.default_rng(0)
    for _ in range(40):
        one = recorder(clips, random)
        counts.add(len(one.words))
        assert one.text.split() == [word for word, _, _ in one.words]
        for word, begin, end in one.words:
            heard = one.sound[round(begin * RATE) : round(end * RATE)]
            assert np.abs(heard - clips[word]).max() < 0.01  # noise of a thousandth
        for (_, _, end), (_, begin, _) in pairwise(one.words):
            assert recorder.pause[0] - 1e-3 <= begin - end <= recorder.pause[1] + 1e-3
    assert counts == {3, 4, 5, 6, 7}


def test_noise_has_the_ratio_that_was_asked_for() -> None:
    sound = np.sin(np.arange(50_000) / 7).astype(np.float32)
    noise = digit_recordings.with_noise(sound, 15.0, np.random.default_rng(0)) - sound
    assert 10 * np.log10(np.square(sound).mean() / np.square(noise).mean()) == pytest.approx(15.0, abs=0.2)


def test_a_recording_that_never_fits_is_one_line(tmp_path: Path) -> None:
    clips = spoken(tmp_path).vocabulary([SPEAKER])[SPEAKER]
    with pytest.raises(InputError, match=r"all last longer than 0.1 s; use fewer words or more seconds"):
        digit_recordings.DigitRecorder(seconds=0.1)(clips, np.random.default_rng(0))


def test_recordings_are_written_with_their_records(tmp_path: Path) -> None:
    recorder = digit_recordings.DigitRecorder(words=(2, 3), noise=(20.0, 20.0))
    files = digit_recordings.write_recordings(
        tmp_path / "data", 30, 10, speakers=(4, 2), recorder=recorder, spoken=spoken(tmp_path), seed=3
    )
    train, held = ([json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files)
    assert (len(train), len(held)) == (30, 10)
    assert {len(one["text"].split()) for one in train} == {1, 2, 3}
    assert {len(one["text"].split()) for one in held} == {2, 3}
    assert len(read_wav(files[1].parent / held[0]["audio"])) < 4.8 * RATE
    again = digit_recordings.write_recordings(
        tmp_path / "again", 30, 10, speakers=(4, 2), recorder=recorder, spoken=spoken(tmp_path), seed=3
    )
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]
    assert (tmp_path / "data/train/00007.wav").read_bytes() == (tmp_path / "again/train/00007.wav").read_bytes()


def test_without_the_synthesizer_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    says = "espeak-ng is not installed; on Debian and Ubuntu: apt-get install espeak-ng"
    with pytest.raises(MissingExecutableError, match=says):
        digit_recordings.espeak("one", SPEAKER)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_the_synthesizer_speaks(tmp_path: Path) -> None:
    words = digit_recordings.SpokenWords(tmp_path)
    slow, fast = (words("seven", replace(SPEAKER, speed=speed)) for speed in (150, 230))
    assert 0.2 * RATE < len(fast) < len(slow) < 1.0 * RATE
    assert set(digit_recordings.DIGITS) == {*words.vocabulary([SPEAKER])[SPEAKER]}
    with pytest.raises(InputError, match="did not speak 'one' with voice xx-nowhere"):
        digit_recordings.espeak("one", replace(SPEAKER, voice="xx-nowhere"))
