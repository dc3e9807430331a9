"""safetensors sources, what a path opens as, and what reading costs; malformed files are refused in one line."""

import contextlib
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import malformed
from triptych.checkpoints import open_source, read_json
from triptych.checkpoints.safetensors import DTYPES, ITEMSIZE
from triptych.errors import CheckpointError

TENSORS = {
    "f64": torch.randn(2, 3, dtype=torch.float64),
    "f32": torch.randn(4, 5),
    "f16": torch.randn(7).half(),
    "bf16": torch.randn(3, 2, 5).bfloat16(),
    "e4m3": torch.randn(11).to(torch.float8_e4m3fn),
    "e5m2": torch.randn(13).to(torch.float8_e5m2),
    "i64": torch.arange(-3, 3),
    "u8": torch.arange(9, dtype=torch.uint8),
    "u16": torch.tensor([0, 1, 40_000, 65_535, 7], dtype=torch.uint16),
    "bool": torch.tensor([True, False, True]),
    "c64": torch.randn(3, dtype=torch.complex64),
    "scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        source = open_source(path)
        assert (source.kind, source.metadata) == ("hf", {"format": "pt"})
        assert set(source.names) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert same_bits(source.read(name), tensor), name
            assert source.infos[name].shape == tuple(tensor.shape)
            assert source.infos[name].nbytes == tensor.numel() * tensor.itemsize == len(source.read_raw(name))


def test_itemsizes_are_torchs() -> None:
    assert {name: getattr(torch, ours).itemsize for name, ours in DTYPES.items()} == ITEMSIZE


def test_read_converts_when_asked(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert same_bits(open_source(tmp_path).read("f16", torch.float32), TENSORS["f16"].float())


def test_a_read_is_a_view_that_outlives_its_source_and_never_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0)}, path)
    before = path.read_bytes()
    source = open_source(path)
    tensor = source.read("a")
    assert tensor.data_ptr() == source.read("a").data_ptr()
    del source
    path.unlink()  # as a save over a loaded checkpoint does
    path.write_bytes(before)
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    tensor.mul_(2)
    assert path.read_bytes() == before


def test_unaligned_data_is_read_right(tmp_path: Path) -> None:
    """Old writers did not pad the header; kernels still get aligned elements."""
    values = np.arange(15, dtype=np.float32)
    header = json.dumps({"a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}).encode()
    header += b" " * ((1 - len(header)) % 4)
    (tmp_path / "old.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    source = open_source(tmp_path / "old.safetensors")
    assert source.infos["a"].offset % 4 == 1
    assert source.read("a").data_ptr() % 4 == 0
    assert source.read("a").flatten().tolist() == values.tolist()


def test_sharded_directory_reads_as_one(tmp_path: Path) -> None:
    sharded = malformed.CONTROLS[1].write(tmp_path)
    (tmp_path / "whole").mkdir()
    whole = malformed.CONTROLS[0].write(tmp_path / "whole")
    for path in (sharded, tmp_path / malformed.INDEX):
        source = open_source(path)
        assert source.infos["a"].file.name == malformed.FIRST
        assert source.infos["b"].file.name == malformed.SECOND
        for name in ("a", "b"):
            assert torch.equal(source.read_raw(name), open_source(whole).read_raw(name))


@pytest.mark.parametrize("name", ["model.bin", "pytorch_model.pt", "x.pth", "y.ckpt", "z.pkl"])
def test_pickles_are_refused_with_how_to_convert(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=rf"{name}: is a pickle.*save it as safetensors"):
            open_source(path)


@pytest.mark.parametrize(
    ("files", "opened", "says"),
    [
        ([], "absent", "no such file or directory"),
        ([], "absent.gguf", "no such file"),
        ([], "absent.bin", "no such file"),
        ([], "", "holds no model.safetensors and no model.safetensors.index.json"),
        (["notes.txt"], "notes.txt", "is not a checkpoint"),
        (["w.gguf"], "", "give the path of the file you mean, for example w.gguf"),
        (["model.safetensors", "model.safetensors.index.json"], "", "holds both"),
    ],
)
def test_other_paths_say_what_to_do(files: list[str], opened: str, says: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=says):
        open_source(tmp_path / opened)


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.gguf")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        open_source(tmp_path / "w.gguf")


def test_read_json_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": {"b": [1, 2.5]}}')
    assert read_json(path) == {"a": {"b": [1, 2.5]}}
    path.write_text('{"a": {"b": 1, "b": 2}}')
    with pytest.raises(CheckpointError, match="has the key 'b' twice"):
        read_json(path)


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    paths = []
    for number, control in enumerate(malformed.CONTROLS):
        (tmp_path / str(number)).mkdir()
        paths.append(str(control.write(tmp_path / str(number))))
    program = (
        "import sys; from triptych.checkpoints import open_source, read_json\n"
        "for path in sys.argv[1:]: assert open_source(path).infos\n"
        "assert not {'torch', 'numpy', 'huggingface_hub'} & sys.modules.keys()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, *paths], check=True, env=environment)


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
