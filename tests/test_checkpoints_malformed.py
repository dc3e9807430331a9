"""Malformed files: every one refused in one line, the sound originals read."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

import malformed
from triptych.checkpoints import open_source
from triptych.errors import CheckpointError

# What the message must name, where a later check would refuse the file too but say less.
SAYS = {
    "safetensors: seven bytes": "7 bytes long",
    "safetensors: header length 2^63": "declares a header of 9223372036854775808 bytes",
    "safetensors: header a list": "not a JSON object",
    "safetensors: header holds NaN": "NaN",
    "safetensors: span is not the shape's": "do not span the 48 bytes of F32 [3, 4]",
    "safetensors: truncated data": "truncated: tensor 'b'",
    "safetensors: tensor twice": "has the key 'a' twice",
    "safetensors: offsets overlap": "tensor 'b' overlaps",
    "safetensors: offsets leave a hole": "tensor 'b' follows unused bytes",
    "sharded: tensor in both shards": "is also in model-00001-of-00002.safetensors",
    "sharded: shard missing": "lists the shard 'model-00002-of-00002.safetensors', which is not there",
    "gguf: 2^63 tensors": "more than the limit",
    "gguf: array of arrays": "array of arrays",
    "gguf: array string of 2^63 bytes": "a string of 9223372036854775808 bytes",
    "gguf: big-endian": "big-endian",
    "gguf: Q4_K row of 100": "rows of 100 are not whole blocks of 256",
    "gguf: tensors overlap": "tensor 'q' overlaps",
}


@pytest.mark.parametrize("case", malformed.CASES, ids=str)
def test_malformed_is_refused_in_one_line(case: malformed.Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        open_source(path)
    message = str(refused.value)
    assert message.isprintable()
    assert len(message) < len(str(tmp_path)) + 300
    assert message.startswith(str(tmp_path))
    assert SAYS.get(case.name, "") in message


@pytest.mark.parametrize("case", malformed.CONTROLS, ids=str)
def test_sound_originals_are_read(case: malformed.Case, tmp_path: Path) -> None:
    source = open_source(case.write(tmp_path))
    for name, info in source.infos.items():
        assert tuple(source.read(name).shape) == info.shape


def test_each_case_changes_one_thing() -> None:
    """No two cases are the same file, so none passes on another's account."""
    seen = [(*sorted(case.build().items()), case.opens) for case in malformed.CASES]
    assert len(set(seen)) == len(seen) >= 40


@pytest.mark.parametrize("control", malformed.CONTROLS, ids=str)
def test_every_truncation_and_random_damage_ends_in_one_error_type(control: malformed.Case, tmp_path: Path) -> None:
    """Whatever happens to a file, opening it and reading all of it either works or raises `CheckpointError`."""
    path = control.write(tmp_path)
    victim = sorted(control.build())[0]
    sound = control.build()[victim]
    dice = random.Random(13)
    damaged = [sound[:end] for end in range(0, len(sound), 5)]
    for _ in range(400):
        copy = bytearray(sound)
        for _ in range(dice.choice((1, 1, 2, 8))):
            copy[dice.randrange(len(copy))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        damaged.append(bytes(copy))
    for content in damaged:
        (tmp_path / victim).write_bytes(content)
        with contextlib.suppress(CheckpointError):
            source = open_source(path)
            for name, info in source.infos.items():
                assert tuple(source.read(name).shape) == info.shape
