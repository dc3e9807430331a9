"""Sound to what a model of it reads: WAV files, resampling, and Whisper's log-mel frames.  Needs no torch."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from triptych.errors import InputError

Samples = NDArray[np.float32]

RATE = 16_000  # samples a second that Whisper hears
HOP, WINDOW = 160, 400  # samples from one frame to the next, and under one
SLOWEST, FASTEST = 1_000, 1_000_000  # samples a second of any real recording
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
_ZEROS, _BETA, _ROLL = 32, 12.0, 0.96  # of the resampler's kernel: zero crossings a side, Kaiser's beta, pass band
_BLOCK = 4096  # frames transformed at a time


def read_wav(path: str | Path, rate: int = RATE) -> Samples:
    """The sound of a WAV file, `[T]` in [-1, 1] at `rate`: channels averaged, resampled.

    PCM of 8, 16, 24 and 32 bits and floats of 32 and 64.  Raises InputError for a file that is cut short, says
    another length than it has, or is packed in another way.
    """
    path = Path(path)
    raw = path.read_bytes()
    form, data = _chunks(raw, path)
    kind, channels, found, _, align, bits = struct.unpack_from("<HHIIHH", form)
    if kind == EXTENSIBLE and len(form) >= 26:
        kind = int.from_bytes(form[24:26], "little")  # the first bytes of its GUID
    if not 1 <= channels <= 256 or not SLOWEST <= found <= FASTEST:
        raise InputError(f"{path}: {channels} channels at {found} samples a second is no recording")
    if (kind, bits) not in {(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)}:
        raise InputError(f"{path}: encoding {kind} of {bits} bits is not PCM or float; convert it to 16-bit PCM")
    if align != channels * bits // 8 or len(data) % align:
        raise InputError(f"{path}: {len(data)} bytes of sound are not whole blocks of {channels} x {bits} bits")
    if not len(data):
        raise InputError(f"{path}: holds no sound")
    sound = _numbers(data, kind, bits).reshape(-1, channels).mean(axis=1, dtype=np.float64)
    if not np.isfinite(sound).all():
        raise InputError(f"{path}: its samples are not all finite numbers")
    return resample(sound.astype(np.float32), found, rate)


def _chunks(raw: bytes, path: Path) -> tuple[bytes, bytes]:
    """The chunks `fmt ` and `data` of a RIFF file."""
    if raw[8:12] != b"WAVE" or raw[:4] not in (b"RIFF", b"RIFX", b"RF64", b"BW64"):
        raise InputError(f"{path}: is not a WAV file; convert it to one, of 16-bit PCM")
    if raw[:4] != b"RIFF":
        raise InputError(f"{path}: is a WAV file of the kind {raw[:4].decode()}, which is not read; convert it to RIFF")
    end = 8 + int.from_bytes(raw[4:8], "little")
    if end > len(raw):
        raise InputError(
            f"{path}: says it is {end:,} bytes long and is {len(raw):,}; it was cut short or streamed: write it again"
        )
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= end and b"data" not in found:
        name, size = raw[at : at + 4], int.from_bytes(raw[at + 4 : at + 8], "little")
        if at + 8 + size > end:
            raise InputError(f"{path}: its chunk {name!r} says {size:,} bytes, {end - at - 8:,} are left")
        found[name] = raw[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    if len(found.get(b"fmt ", b"")) < 16 or b"data" not in found:
        raise InputError(f"{path}: has no sound, or nothing that says how it is written")
    return found[b"fmt "], found[b"data"]


def _numbers(data: bytes, kind: int, bits: int) -> NDArray[np.floating]:
    """Samples in [-1, 1]; 8-bit ones are unsigned, wider ones are not."""
    if kind == FLOAT:
        return np.frombuffer(data, f"<f{bits // 8}")
    if bits == 8:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if bits == 24:  # as the upper three bytes of 32
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, bits = wide.tobytes(), 32
    return np.frombuffer(data, f"<i{bits // 8}") / np.float64(1 << (bits - 1))


def resample(sound: Samples, old: int, new: int) -> Samples:
    """`[T] -> [ceil(T * new / old)]` by a windowed sinc (Kaiser's window), one filter for each phase between samples.

    Flat to 0.9 of the lower of the two Nyquist frequencies, and under -90 dB from that frequency on.
    """
    if old == new:
        return sound
    up, down = new // math.gcd(new, old), old // math.gcd(new, old)
    cut = _ROLL * min(1.0, up / down)  # of the old Nyquist frequency
    half = math.ceil(_ZEROS / cut)
    padded = np.pad(sound.astype(np.float64), (half, half + 1))
    windows = sliding_window_view(padded, 2 * half + 1)
    out = np.zeros(-(-len(sound) * up // down))
    for phase in range(min(up, len(out))):
        begin, rest = divmod(phase * down, up)
        t = np.arange(-half, half + 1) - rest / up
        kernel = cut * np.sinc(cut * t) * np.i0(_BETA * np.sqrt(np.clip(1 - (t / half) ** 2, 0, 1))) / np.i0(_BETA)
        n = len(out[phase::up])
        out[phase::up] = windows[begin : begin + n * down : down][:n] @ kernel
    return out.astype(np.float32)


def padded(sound: Samples, frames: int) -> Samples:
    """With silence up to so many frames at the end, where it is shorter."""
    return np.pad(sound, (0, max(0, frames * HOP - len(sound))))


def log_mel(sound: Samples, mels: int = 80) -> Samples:
    """Whisper's features (Radford et al. 2022): `[T]` at 16 kHz -> `[T // 160, mels]`.

    Power of a 25 ms Hann window every 10 ms, summed by Slaney's mel filters, as log10, no more than 8 below its
    largest, and brought to about [-1, 1].  Raises InputError for less than a window of sound.
    """
    if len(sound) < WINDOW:
        raise InputError(f"{len(sound)} samples are less than one window of {WINDOW}; pad with silence")
    frames = sliding_window_view(np.pad(sound, WINDOW // 2, mode="reflect"), WINDOW)[::HOP][: len(sound) // HOP]
    hann = np.hanning(WINDOW + 1)[:-1]
    filters = mel_filters(mels)
    found: Samples = np.empty((len(frames), mels), np.float32)
    for at in range(0, len(frames), _BLOCK):
        power = np.abs(np.fft.rfft(frames[at : at + _BLOCK] * hann)) ** 2
        found[at : at + _BLOCK] = np.log10(np.maximum(power @ filters, 1e-10))
    return np.asarray((np.maximum(found, found.max() - 8) + 4) / 4, np.float32)


def mel_filters(mels: int, rate: int = RATE, window: int = WINDOW) -> NDArray[np.float64]:
    """`[window // 2 + 1, mels]`: triangles of equal area, their corners evenly spaced in mel up to the Nyquist
    frequency.  Slaney 1998: linear to 1 kHz at 3 mel for 200 Hz, then 27 mel for each factor of 6.4."""
    top = _mel(rate / 2)
    corners = _hertz(np.linspace(0, top, mels + 2))
    bins = np.linspace(0, rate / 2, window // 2 + 1)[:, None]
    width = np.diff(corners)
    rising, falling = (bins - corners[:-2]) / width[:-1], (corners[2:] - bins) / width[1:]
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (corners[2:] - corners[:-2])


_LINEAR, _KNEE = 200 / 3, 1000.0  # hertz a mel below the knee
_STEP = math.log(6.4) / 27


def _mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < _KNEE else _KNEE / _LINEAR + math.log(hertz / _KNEE) / _STEP


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    knee = _KNEE / _LINEAR
    return np.where(mel < knee, mel * _LINEAR, _KNEE * np.exp(_STEP * np.maximum(mel - knee, 0)))
