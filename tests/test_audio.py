"""Sound: WAV files of every kind, resampling, and mel frames against the reference's extractor."""

import struct
from pathlib import Path

import numpy as np
import pytest

from triptych.errors import InputError
from triptych.media.audio import FLOAT, PCM, log_mel, mel_filters, read_wav, resample


def wav(
    sound: np.ndarray, rate: int = 16_000, kind: int = PCM, bits: int = 16, *, size: int | None = None, riff: int = 0
) -> bytes:
    """A file of `sound` [T, C] in [-1, 1]; `size` and `riff` make it lie."""
    channels = sound.shape[1]
    if kind == FLOAT:
        data = sound.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = np.round(sound * 127 + 128).astype(np.uint8).tobytes()
    else:
        whole = np.round(sound * ((1 << (bits - 1)) - 1)).astype("<i8")
        data = whole.view(np.uint8).reshape(*whole.shape, 8)[..., : bits // 8].tobytes()
    align = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * align, align, bits)
    told = len(data) if size is None else size
    body = b"WAVE" + b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", 16) + form
    body += b"data" + struct.pack("<I", told) + data + b"\0" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body) + riff) + body


def tone(hertz: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "bits", "within"),
    [(PCM, 8, 1e-2), (PCM, 16, 1e-4), (PCM, 24, 1e-6), (PCM, 32, 1e-7), (FLOAT, 32, 1e-7), (FLOAT, 64, 1e-7)],
)
def test_every_encoding_is_the_same_sound(kind: int, bits: int, within: float, tmp_path: Path) -> None:
    left, right = tone(440, 16_000), tone(650, 16_000)
    path = tmp_path / "a.wav"
    path.write_bytes(wav(np.stack((left, right), 1), kind=kind, bits=bits))
    found = read_wav(path)
    assert found.dtype == np.float32
    assert np.abs(found - (left + right) / 2).max() <= within


def test_extensible_files_are_read(tmp_path: Path) -> None:
    plain = wav(tone(440, 16_000)[:, None])
    at = plain.index(b"fmt ")
    form = plain[at + 8 : at + 24]
    wide = struct.pack("<H", 0xFFFE) + form[2:] + struct.pack("<HHI", 22, 16, 0) + struct.pack("<H", PCM) + b"\0" * 14
    body = plain[8:at] + b"fmt " + struct.pack("<I", len(wide)) + wide + plain[at + 24 :]
    (tmp_path / "a.wav").write_bytes(plain)
    (tmp_path / "b.wav").write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    assert np.array_equal(read_wav(tmp_path / "a.wav"), read_wav(tmp_path / "b.wav"))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 16_001])
def test_any_rate_is_the_same_sound(rate: int) -> None:
    for hertz in (97.0, 1_000.0, 3_400.0):
        found, expected = resample(tone(hertz, rate), rate, 16_000), tone(hertz, 16_000)
        assert abs(len(found) - len(expected)) <= 1
        inside = slice(200, len(expected) - 200)  # the ends hear the silence around
        assert np.abs(found[inside] - expected[inside]).max() < 2e-5


@pytest.mark.parametrize("rate", [44_100, 48_000, 96_000])
def test_what_16_khz_cannot_hold_is_silenced(rate: int) -> None:
    found = resample(tone(9_500, rate), rate, 16_000)
    assert np.abs(found[400:-400]).max() < 1e-5
    assert np.abs(tone(9_500, rate)[:: rate // 16_000]).max() > 0.4  # dropping samples would fold it back


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ({"riff": 100}, "its header gives"),
        ({"size": 4_000_000_000}, "'data' should have 4,000,000,000"),
        ({"size": 0}, "has no samples"),
        ({"size": 1001}, "not whole blocks"),
        ({"rate": 1}, "1 channels at 1 samples per second; 1 to 256 channels"),  # each would become sixteen thousand
    ],
)
def test_a_header_that_cannot_be_is_refused(lie: dict[str, int], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav(tone(440, 16_000)[:, None], **lie))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=problem) as refused:
        read_wav(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [b"RIFX", b"RF64", b"BW64"])
def test_other_kinds_of_wav_are_named(kind: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(kind + wav(tone(440, 16_000)[:, None])[4:])
    with pytest.raises(InputError, match=f"of the kind {kind.decode()}, which is not read; convert it to RIFF"):
        read_wav(path)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_channels_are_averaged_and_other_chunks_passed_by(channels: int, tmp_path: Path) -> None:
    """An odd chunk before the sound, one behind it, and bytes after the end."""
    path, sound = tmp_path / "a.wav", np.stack([tone(200.0 + 90 * c, 16_000) for c in range(channels)], 1)
    whole = wav(sound, bits=24) + b"LIST" + struct.pack("<I", 5) + b"abcde\0"
    path.write_bytes(whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:] + b"junk")
    assert np.abs(read_wav(path) - sound.mean(axis=1)).max() <= 1e-6


def test_no_file_breaks_the_reader(tmp_path: Path) -> None:
    """Every prefix, and every byte of the header changed: a sound or an InputError."""
    whole, path = wav(tone(440, 16_000, 0.01)[:, None]), tmp_path / "a.wav"
    cut = [whole[:n] for n in range(len(whole))]
    changed = [whole[:i] + bytes([value]) + whole[i + 1 :] for i in range(64) for value in (0, 1, 255)]
    refused = 0
    for raw in (*cut, *changed, b"OggS" + whole):
        path.write_bytes(raw)
        try:
            assert np.isfinite(read_wav(path)).all()
        except InputError:
            refused += 1
    assert refused >= len(cut)
    path.write_bytes(wav(np.full((90, 1), np.nan), kind=FLOAT, bits=32))
    with pytest.raises(InputError, match="finite"):
        read_wav(path)


@pytest.mark.parametrize("mels", [80, 128])
def test_frames_are_the_reference_s(mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=mels)
    rng = np.random.default_rng(0)
    sound = (tone(440, 16_000, 2.0) + 0.05 * rng.standard_normal(32_000)).astype(np.float32)
    expected = extractor(sound, sampling_rate=16_000, return_tensors="np")["input_features"][0].T
    found = log_mel(np.pad(sound, (0, 480_000 - len(sound))), mels)
    assert found.shape == expected.shape == (3000, mels)
    assert np.abs(found - expected).max() <= 1e-4
    assert np.abs(np.roll(found, 1, axis=0) - expected).max() > 0.1
    assert np.abs(mel_filters(mels) - extractor.mel_filters).max() < 1e-9
    with pytest.raises(InputError, match="less than one window"):
        log_mel(sound[:399], mels)


@pytest.mark.parametrize("value", [1e308, -1e308, 1e39, 2e6, np.inf])
def test_samples_that_overflow_later_are_refused(value: float, tmp_path: Path) -> None:
    path, sound = tmp_path / "a.wav", np.zeros((900, 1))
    sound[7] = value
    path.write_bytes(wav(sound, kind=FLOAT, bits=64))
    with pytest.raises(InputError, match=r"not all finite numbers in \[-1, 1\]"):
        read_wav(path)
    sound[7] = 1.5  # a little too loud is still sound
    path.write_bytes(wav(sound, kind=FLOAT, bits=64))
    assert read_wav(path)[7] == 1.5
