"""WAV files, resampling, and the log-mel frames that Whisper reads.  Needs no torch.

Resampling is thirty lines of NumPy: soxr and SciPy would be one more dependency of every installation.  The standard
library's `wave` reads no floats.
"""

from __future__ import annotations

import io
import math
import struct
import wave
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from triptych.arguments import checked, integer
from triptych.errors import InputError, first_line
from triptych.files import read_regular

Samples = NDArray[np.float32]
"""Mono sound `[T]`, nominally in [-1, 1]."""

RATE = 16_000  # Whisper's samples per second
HOP, WINDOW = 160, 400  # samples between the starts of two frames, and samples in one frame
MIN_RATE, MAX_RATE = 1_000, 1_000_000  # samples per second
MAX_BYTES = 1 << 31  # of a file
MAX_SAMPLE = 1e6  # of floating-point samples; beyond it later computations overflow
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # format tags
_ZEROS, _BETA, _ROLL = 32, 12.0, 0.96  # the resampler's kernel: zero crossings per side, Kaiser's beta, pass band
_DECODED = 1 << 16  # samples of a channel decoded at a time: as 64-bit numbers a long sound would need much memory
_BLOCK = 256  # frames per Fourier transform, so that what is computed of them stays in the caches


@checked
def read_wav(path: str | Path, rate: int = RATE) -> Samples:
    """The sound of a WAV file: `[T]`, nominally in [-1, 1], at `rate` samples per second, channels averaged.

    Reads PCM of 8, 16, 24 and 32 bits and floats of 32 and 64 bits.

    Raises InputError for a path that is not a regular file, and for a file that is cut short, whose header contradicts
    its length, or that holds another encoding or samples that are not numbers below a million; and for a `rate` that
    no sound has.
    """
    return decode_wav(read_regular(Path(path), MAX_BYTES, InputError), str(path), rate)


@checked
def decode_wav(raw: bytes, name: str, rate: int = RATE, longest: float = math.inf) -> Samples:
    """The sound of the content of a WAV file, which errors call `name`.  Raises InputError as `read_wav`, and, before
    anything is decoded, for more than `longest` seconds."""
    _check_rate(rate)
    header, data = _chunks(raw, name)
    encoding, channels, stored_rate, _, align, bits = struct.unpack_from("<HHIIHH", header)
    if encoding == EXTENSIBLE and len(header) >= 26:
        encoding = int.from_bytes(header[24:26], "little")  # the first two bytes of the sub-format GUID
    if not 1 <= channels <= 256 or not MIN_RATE <= stored_rate <= MAX_RATE:
        raise InputError(
            f"{name}: {channels} channels at {stored_rate} samples per second; 1 to 256 channels at {MIN_RATE:,} to "
            f"{MAX_RATE:,} can be read"
        )
    if (encoding, bits) not in {(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)}:
        raise InputError(f"{name}: encoding {encoding} of {bits} bits is not PCM or float; convert it to 16-bit PCM")
    if align != channels * bits // 8 or len(data) % align:
        raise InputError(f"{name}: {len(data)} bytes of sound are not whole blocks of {channels} x {bits} bits")
    if not len(data):
        raise InputError(f"{name}: has no samples")
    seconds = len(data) / align / stored_rate
    if seconds > longest:
        raise InputError(f"{name}: has {seconds:,.1f} seconds of sound, and {longest:,g} are the limit")
    sound: Samples = np.empty(len(data) // align, np.float32)
    for at in range(0, len(sound), _DECODED):
        block = data[at * align : (at + _DECODED) * align]
        samples = _decoded(block, encoding, bits).reshape(-1, channels)
        if not (np.abs(samples) <= MAX_SAMPLE).all():  # False for NaN too
            raise InputError(f"{name}: its samples are not all finite numbers in [-1, 1]; write it again as 16-bit PCM")
        sound[at : at + _DECODED] = samples.mean(axis=1, dtype=np.float64)
    return resample(sound, stored_rate, rate)


def write_wav(path: str | Path, sound: Samples, rate: int = RATE) -> None:
    """Write `sound` [T], clipped to [-1, 1], as PCM of 16 bits at `rate` samples per second.

    Raises InputError where the file cannot be written, and for sounds of several channels, that are not finite, or of a
    rate that no sound has.
    """
    _check_rate(rate)
    _check_sound(sound)
    whole = np.round(np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()
    content = io.BytesIO()
    try:
        with wave.open(content, "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(whole)
        Path(path).write_bytes(content.getbuffer())
    except (OSError, ValueError, struct.error) as error:  # a name that is no path, more than four gigabytes
        raise InputError(f"cannot write {path}: {first_line(error)}") from None


def _check_sound(sound: Samples) -> None:
    """Raise InputError for anything but mono sound in finite floats."""
    if np.asarray(sound).dtype.kind != "f" or np.ndim(sound) != 1 or not np.isfinite(sound).all():
        raise InputError(
            f"a sound is finite floats [T] in [-1, 1], and these are {np.asarray(sound).dtype} "
            f"{list(np.shape(sound))} or not finite; average its channels, and divide integers by their largest"
        )


def _check_rate(rate: int) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InputError(f"a rate of {rate} samples per second is not between {MIN_RATE:,} and {MAX_RATE:,}")


def _chunks(raw: bytes, path: str) -> tuple[bytes, bytes]:
    """The contents of the chunks `fmt ` and `data` of a RIFF file."""
    if raw[8:12] != b"WAVE" or raw[:4] not in (b"RIFF", b"RIFX", b"RF64", b"BW64"):
        raise InputError(f"{path}: is not a WAV file; convert it to one, of 16-bit PCM")
    if raw[:4] != b"RIFF":
        raise InputError(f"{path}: is a WAV file of the kind {raw[:4].decode()}, which is not read; convert it to RIFF")
    end = 8 + int.from_bytes(raw[4:8], "little")
    if end > len(raw):
        raise InputError(
            f"{path}: its header gives {end:,} bytes, and it has {len(raw):,}; it was cut short or streamed: write it "
            "again"
        )
    chunks: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= end and b"data" not in chunks:
        name, size = raw[at : at + 4], int.from_bytes(raw[at + 4 : at + 8], "little")
        if at + 8 + size > end:
            raise InputError(f"{path}: its chunk {name!r} should have {size:,} bytes, and {end - at - 8:,} are left")
        chunks[name] = raw[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    if len(chunks.get(b"fmt ", b"")) < 16 or b"data" not in chunks:
        raise InputError(f"{path}: lacks a chunk 'fmt ' or 'data'; write it again")
    return chunks[b"fmt "], chunks[b"data"]


def _decoded(data: bytes, encoding: int, bits: int) -> NDArray[np.floating]:
    """Samples as numbers, PCM scaled to [-1, 1].  PCM of 8 bits is unsigned, wider PCM is signed."""
    if encoding == FLOAT:
        return np.frombuffer(data, f"<f{bits // 8}")
    if bits == 8:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if bits == 24:  # widened: the upper three bytes of a 32-bit integer
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, bits = wide.tobytes(), 32
    return np.frombuffer(data, f"<i{bits // 8}") / np.float64(1 << (bits - 1))


@checked
def resample(sound: Samples, old: int, new: int) -> Samples:
    """`sound` [T] at `old` samples per second -> [ceil(T * new / old)] at `new` samples per second.

    Interpolation with a sinc under a Kaiser window (Smith, "Digital Audio Resampling"), one filter for each phase
    between two samples.  The response is flat to 0.9 of the lower of the two Nyquist frequencies, and below -90 dB from
    that frequency on.
    """
    _check_sound(sound)
    if old == new:
        return sound
    _check_rate(old)
    _check_rate(new)
    up, down = new // math.gcd(new, old), old // math.gcd(new, old)
    half = len(_kernel(up, down, 0)) // 2
    padded = np.pad(sound.astype(np.float64), (half, half + 1))
    windows = sliding_window_view(padded, 2 * half + 1)
    out = np.zeros(-(-len(sound) * up // down))
    for phase in range(min(up, len(out))):
        begin = phase * down // up
        n = len(out[phase::up])
        out[phase::up] = windows[begin : begin + n * down : down][:n] @ _kernel(up, down, phase)
    return out.astype(np.float32)


@lru_cache(maxsize=512)  # 22,050 -> 16,000 has 320 phases, and a short sound takes less than its filters
def _kernel(up: int, down: int, phase: int) -> NDArray[np.float64]:
    """The filter of one phase between two samples `[2 * half + 1]`, for `up / down` times the old rate."""
    cut = _ROLL * min(1.0, up / down)  # cutoff as a fraction of the old Nyquist frequency
    half = math.ceil(_ZEROS / cut)
    t = np.arange(-half, half + 1) - phase * down % up / up
    kernel: NDArray[np.float64] = cut * np.sinc(cut * t) * np.i0(_BETA * np.sqrt(np.clip(1 - (t / half) ** 2, 0, 1)))
    return kernel / np.i0(_BETA)


def padded(sound: Samples, frames: int) -> Samples:
    """`sound` [T] with zeros at its end up to the length of `frames` frames; unchanged where it is as long already."""
    return np.pad(sound, (0, max(0, integer("frames", frames, 0) * HOP - len(sound))))


@checked
def log_mel(sound: Samples, mels: int = 80) -> Samples:
    """Whisper's features (Radford et al. 2022): `[T]` at 16 kHz -> `[T // 160, mels]`, about in [-1, 1].

    The power spectrum under a Hann window of 25 ms every 10 ms, summed by Slaney's mel filters, as log10, limited from
    below to 8 under its maximum, then shifted and scaled: `(x + 4) / 4`.

    Raises InputError for less sound than one window, and for more bands than there are frequencies.
    """
    _check_sound(sound)
    if not 1 <= mels <= WINDOW // 2:
        raise InputError(f"mels={mels} must be 1 to {WINDOW // 2}, the frequencies of a window")
    if len(sound) < WINDOW:
        raise InputError(f"{len(sound)} samples are less than one window of {WINDOW}; pad with silence")
    frames = sliding_window_view(np.pad(sound, WINDOW // 2, mode="reflect"), WINDOW)[::HOP][: len(sound) // HOP]
    hann = np.hanning(WINDOW + 1)[:-1]
    filters = mel_filters(mels)
    logs: Samples = np.empty((len(frames), mels), np.float32)
    for at in range(0, len(frames), _BLOCK):
        power = np.abs(np.fft.rfft(frames[at : at + _BLOCK] * hann)) ** 2
        logs[at : at + _BLOCK] = np.log10(np.maximum(power @ filters, 1e-10))
    return np.asarray((np.maximum(logs, logs.max() - 8) + 4) / 4, np.float32)


def mel_filters(mels: int, rate: int = RATE, window: int = WINDOW) -> NDArray[np.float64]:
    """Weights `[window // 2 + 1, mels]` that sum the bins of a Fourier transform into mel bands.

    Triangles of equal area whose corners are evenly spaced in mel from 0 to the Nyquist frequency (Slaney 1998,
    Auditory Toolbox): linear up to 1 kHz, 3 mel for 200 Hz, then 27 mel for each factor of 6.4.
    """
    top = _mel(rate / 2)
    corners = _hertz(np.linspace(0, top, mels + 2))
    bins = np.linspace(0, rate / 2, window // 2 + 1)[:, None]
    width = np.diff(corners)
    rising, falling = (bins - corners[:-2]) / width[:-1], (corners[2:] - bins) / width[1:]
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (corners[2:] - corners[:-2])


_LINEAR, _KNEE = 200 / 3, 1000.0  # hertz per mel up to the knee, and the knee in hertz
_STEP = math.log(6.4) / 27


def _mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < _KNEE else _KNEE / _LINEAR + math.log(hertz / _KNEE) / _STEP


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    knee = _KNEE / _LINEAR
    return np.where(mel < knee, mel * _LINEAR, _KNEE * np.exp(_STEP * np.maximum(mel - knee, 0)))
