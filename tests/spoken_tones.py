"""Words made of tones, in place of a speech synthesizer: each word two tones, higher for a higher pitch."""

from pathlib import Path

import numpy as np

from triptych.media.audio import RATE, Samples
from triptych_lectures.data.digit_recordings import DIGITS, Speaker, SpokenWords


def tones(word: str, speaker: Speaker) -> Samples:
    """Between silences of a fifth of a second; faster for a faster speaker."""
    place = DIGITS.index(word)
    t = np.arange(int(20 * RATE / speaker.speed)) / RATE
    low, high = (hertz * (1 + speaker.pitch / 1000) for hertz in (300 + 130 * (place % 4), 1200 + 500 * (place // 4)))
    silence = np.zeros(RATE // 5, np.float32)
    sound = 0.3 * np.sin(2 * np.pi * low * t) + 0.3 * np.sin(2 * np.pi * high * t)
    return np.concatenate([silence, sound.astype(np.float32), silence])


def spoken(folder: Path) -> SpokenWords:
    return SpokenWords(folder / "words", tones)
