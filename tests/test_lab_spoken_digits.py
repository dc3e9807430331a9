"""`lab spoken-digits` on words of tones: it passes, and fails when deaf, with shuffled data, or without its control."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab_results import change_values, failed, passes
from spoken_tones import spoken
from triptych.errors import InputError
from triptych.media.audio import HOP, RATE
from triptych_lectures import labs
from triptych_lectures.data.digit_recordings import DIGITS, HEARD, Clips, SpokenWords
from triptych_lectures.labs import spoken_digits
from triptych_lectures.labs.lab import LabResult, Setup
from triptych_lectures.labs.spoken_digits import DrawnRecordings, best_constant

SIZES = {
    "steps": 130, "control": 130, "rows": 12, "width": 48, "mels": 20, "seconds": 0.7, "digits": 4, "speakers": 12,
    "unheard": 6, "tested": 60, "noise": (25.0, 40.0),
}  # fmt: skip
RIGHT = "words right, of voices, speeds and pitches never heard"
CONTROL = "the same trained on shuffled transcripts, above the best constant text"
LOSS = "loss after as many steps: true transcripts, over shuffled ones"
LOOKS = "strongest attention on the word it writes, less on another one"


@pytest.fixture
def made_of_tones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpokenWords, "cached", lambda: spoken(tmp_path))


def run(seed: int = 0) -> LabResult:
    return labs.run("spoken-digits", Setup(seed=seed, sizes=SIZES))


def heard_clips(sizes: spoken_digits.SpokenDigitsLab) -> tuple[Clips, ...]:
    speakers = HEARD.draw(sizes.speakers, np.random.default_rng(0))
    return tuple(SpokenWords.cached().vocabulary(speakers, DIGITS[: sizes.digits]).values())


@pytest.mark.heavy
def test_passes(made_of_tones: None) -> None:
    result = passes(run())
    assert [section.kind for section in result.sections] == ["table", "table", "attention", "curve"]


@pytest.mark.heavy
def test_fails_when_the_decoder_hears_nothing(made_of_tones: None, monkeypatch: pytest.MonkeyPatch) -> None:
    change_values(monkeypatch, lambda values: 0 * values)
    assert RIGHT in failed(run())


@pytest.mark.heavy
@pytest.mark.parametrize("shuffled", [True, False], ids=["all transcripts", "not even the control"])
def test_fails_when_what_is_shuffled_is_wrong(
    shuffled: bool, made_of_tones: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = DrawnRecordings.draw
    monkeypatch.setattr(DrawnRecordings, "draw", lambda self, *which: draw(replace(self, shuffled=shuffled), *which))
    claims = failed(run())
    assert claims >= {RIGHT, LOOKS} if shuffled else claims == {CONTROL, LOSS}


def test_fails_when_training_heard_the_voices_of_the_test(made_of_tones: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoken_digits, "UNHEARD", HEARD)
    result = labs.run("spoken-digits", Setup(sizes=SIZES | {"steps": 2, "control": 2, "tested": 20}))
    assert "voices, speeds and pitches of these that training has" in failed(result)


def test_shuffled_rows_have_the_sounds_of_others(made_of_tones: None) -> None:
    sizes = spoken_digits.SpokenDigitsLab.sized(Setup(sizes=SIZES))
    digits = spoken_digits.Digits(sizes, heard_clips(sizes), 0)
    data = DrawnRecordings(digits)
    plain, moved = data.draw(0, 129, 6), replace(data, shuffled=True).draw(0, 129, 6)
    assert [one.text for one in moved] == [one.text for one in (*plain[1:], plain[0])]  # type: ignore[attr-defined]
    assert all(np.array_equal(a.frames, b.frames) for a, b in zip(plain, moved, strict=True))  # type: ignore[attr-defined]
    assert [data.words(step) for step in (0, 129)] == [(1, 1), (1, 2)]


def test_a_short_silence_follows_each_sound(made_of_tones: None) -> None:
    sizes = spoken_digits.SpokenDigitsLab.sized(Setup(sizes=SIZES | {"silence": 0.2}))
    heard = heard_clips(sizes)
    digits = spoken_digits.Digits(sizes, heard, 0)
    random = np.random.default_rng(0)
    recordings = digits.recordings(heard, len(heard), random)
    for one, frames in zip(recordings, digits.frames(recordings), strict=True):
        whole = digits.speech.frames(one.sound)
        behind = len(frames) * HOP - len(one.sound)
        assert min(0.2 * RATE, 0.7 * RATE - len(one.sound)) <= behind < 0.2 * RATE + 2 * HOP
        assert len(frames) % 2 == 0
        assert len(whole) == digits.speech.window >= len(frames)
        assert np.allclose(frames, whole[: len(frames)], atol=1e-5)
    rows = DrawnRecordings(digits).draw(0, 129, 6)
    assert len({len(row.frames) for row in rows}) > 1  # type: ignore[attr-defined]


def test_the_best_constant_text_is_found() -> None:
    assert best_constant(["one two", "one two", "three"]) == pytest.approx(1 - 2 / 5)


def test_without_the_synthesizer_the_lab_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="espeak-ng is not installed; on Debian and Ubuntu: apt-get install espeak-ng"):
        labs.run("spoken-digits")
