"""Writing: what others read back, and what is left when writing fails half-way."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import cli_models
from test_checkpoints_read import TENSORS, same_bits
from triptych.checkpoints import (
    LoadReport,
    atomic_write,
    is_complete,
    open_source,
    write_directory,
)
from triptych.checkpoints import recover as recover_path
from triptych.checkpoints import save as save_module
from triptych.checkpoints.source import LoadedTensor
from triptych.errors import CheckpointError, InputError, TriptychError
from triptych.model import create, load

CONFIG = {"model_type": "llama", "hidden_size": 6, "name": "é"}
OLD = {"a": torch.arange(3.0)}
NEW = {"a": torch.arange(5.0), "b": torch.ones(2, 3)}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_safetensors_reads_what_we_wrote(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", TENSORS, CONFIG, {"tokenizer.json": "{}", "1_Pooling/config.json": b"{}"})
    loaded = load_file(tmp_path / "m" / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert same_bits(loaded[name], tensor), name
    source = open_source(tmp_path / "m")
    assert source.metadata == {"format": "pt"}
    assert all(info.offset % source.read(name).itemsize == 0 for name, info in source.infos.items())
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == CONFIG
    assert (tmp_path / "m" / "1_Pooling" / "config.json").read_bytes() == b"{}"
    assert names(tmp_path) == {"m"}
    assert is_complete(tmp_path / "m")


def test_views_and_parameters_are_stored_as_they_look(tmp_path: Path) -> None:
    whole = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    write_directory(tmp_path / "m", {"t": whole.T, "row": whole[1], "whole": whole}, CONFIG)
    source = open_source(tmp_path / "m")
    assert torch.equal(source.read("t"), whole.detach().T)
    assert source.read("row").tolist() == [4, 5, 6, 7]


def test_large_models_are_sharded_and_read_back(tmp_path: Path) -> None:
    tensors = {f"layer.{k}": torch.full((k + 2, 5), float(k)) for k in range(6)}
    write_directory(tmp_path / "m", iter(tensors.items()), CONFIG, max_shard_bytes=120)
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"model-{k:05}-of-00005.safetensors" for k in range(1, 6)]
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    source = open_source(tmp_path / "m")
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name), tensor)
        assert name in load_file(tmp_path / "m" / index["weight_map"][name])
    # And back to one file: no shard or index of the old one stays.
    write_directory(tmp_path / "m", OLD, CONFIG)
    assert names(tmp_path / "m") == {"config.json", "model.safetensors"}


def test_replacing_keeps_what_is_not_the_checkpoints(tmp_path: Path) -> None:
    target = tmp_path / "m"
    write_directory(target, OLD, CONFIG, {"tokenizer.json": "old"})
    (target / "loss.png").write_bytes(b"png")
    (target / "notes").mkdir()
    (target / "notes" / "a.txt").write_text("mine")
    (target / "link").symlink_to("loss.png")
    loaded = open_source(target).read("a")
    write_directory(target, NEW, CONFIG | {"hidden_size": 7}, {"tokenizer.json": "new"})
    assert open_source(target).read("a").tolist() == [0, 1, 2, 3, 4]
    assert loaded.tolist() == [0, 1, 2]  # what was mapped from the replaced file is as it was
    assert json.loads((target / "config.json").read_text())["hidden_size"] == 7
    assert (target / "tokenizer.json").read_text() == "new"
    assert (target / "loss.png").read_bytes() == (target / "link").read_bytes() == b"png"
    assert (target / "notes" / "a.txt").read_text() == "mine"
    assert names(tmp_path) == {"m"}


@pytest.mark.parametrize("target", ["", ".", "..", "/", "thesis", "../thesis", "thesis/weights"])
def test_folders_of_other_files_are_not_replaced(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is no checkpoint keeps its files, in the same directory; a tokenizer, an adapter or an empty one may
    become a checkpoint."""
    for folder in ("here", "thesis/weights", "here/thesis/weights"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model-a.safetensors").write_text("mine")
    monkeypatch.chdir(tmp_path / "here")
    before = {path: path.stat().st_ino for path in sorted(tmp_path.rglob("*"))}
    with pytest.raises(TriptychError):
        write_directory(target, NEW, CONFIG)
    assert {path: path.stat().st_ino for path in sorted(tmp_path.rglob("*"))} == before
    for kind in ("tokenizer_config.json", "adapter_config.json", None):
        own = tmp_path / f"own-{kind}"
        own.mkdir()
        if kind is not None:
            (own / kind).write_text("{}")
            (own / "model-a.safetensors").write_text("mine")
        write_directory(own, NEW, CONFIG)
        write_directory(own, OLD, CONFIG)
        assert open_source(own).read("a").tolist() == [0, 1, 2]
        assert kind is None or (own / "model-a.safetensors").read_text() == "mine"


def test_a_model_saved_over_another_has_nothing_of_it(tmp_path: Path) -> None:
    """Files of the tokenizer go with the model they belong to; those of nobody, and models in folders below, stay."""
    model = create({**cli_models.LLAMA, "vocab_size": 40})
    model.save(tmp_path / "m")
    model.save(tmp_path / "m" / "below")
    for name in ("chat_template.jinja", "special_tokens_map.json", "README.md"):
        (tmp_path / "m" / name).write_text("{}")
    load(tmp_path / "m").save(tmp_path / "m")
    assert names(tmp_path / "m") > {"chat_template.jinja", "special_tokens_map.json", "README.md", "below"}
    create({**cli_models.LLAMA, "vocab_size": 50}).save(tmp_path / "m")
    assert names(tmp_path / "m") == {"README.md", "below", "config.json", "model.safetensors"}
    assert load(tmp_path / "m" / "below").spec == model.spec


def test_an_adapter_is_not_saved_beside_another_model(tmp_path: Path) -> None:
    model = create({**cli_models.LLAMA, "vocab_size": 40})
    model.save(tmp_path / "other")
    model.add_adapter(2)
    with pytest.raises(InputError, match="holds a model"):
        model.save_adapter(tmp_path / "other")
    model.save_adapter(tmp_path / "adapter")
    model.save_adapter(tmp_path / "adapter")


def test_replacing_without_a_swap_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "_swap", lambda a, b: False)
    write_directory(tmp_path / "m", OLD, CONFIG)
    (tmp_path / "m" / "loss.png").write_bytes(b"png")
    write_directory(tmp_path / "m", NEW, CONFIG)
    assert open_source(tmp_path / "m").names == ["a", "b"]
    assert names(tmp_path) == {"m"}
    assert names(tmp_path / "m") == {"config.json", "loss.png", "model.safetensors"}


def test_a_target_given_as_a_link_is_replaced_behind_it(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", OLD, CONFIG)
    (tmp_path / "latest").symlink_to("m")
    write_directory(tmp_path / "latest", NEW, CONFIG)
    assert (tmp_path / "latest").is_symlink()
    assert open_source(tmp_path / "m").names == ["a", "b"]


@pytest.mark.parametrize("calls", range(5))
@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_the_target_as_it_was(
    calls: int, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses the first, second ... thing forced onto it: weights, config, file, directories."""
    target = tmp_path / "m"
    if exists:
        write_directory(target, OLD, CONFIG)
    real, left = os.fsync, iter([True] * calls)

    def fsync(handle: int) -> None:
        if not next(left, False):
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    if calls == 4:  # the rename is done by then: the new one is in place, whole
        with pytest.raises(CheckpointError, match="No space left on device"):
            write_directory(target, NEW, CONFIG, {"tokenizer.json": "new"})
        assert open_source(target).names == ["a", "b"]
        return
    with pytest.raises(CheckpointError, match=r"cannot write .*/m: No space left on device") as refused:
        write_directory(target, NEW, CONFIG, {"tokenizer.json": "new"})
    assert str(refused.value).isprintable()
    assert names(tmp_path) == ({"m"} if exists else set())
    if exists:
        assert open_source(target).names == ["a"]
        assert is_complete(target)


def test_a_file_size_limit_is_met_while_the_weights_are_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            write_directory(tmp_path / "m", {"a": torch.zeros(9000)}, CONFIG)
        with pytest.raises(CheckpointError, match="File too large"):
            atomic_write(tmp_path / "x", bytes(9000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == set()


def test_an_error_from_the_tensors_leaves_nothing(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_directory(tmp_path / "m", tensors(), CONFIG)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("limit", [1, 1000])
def test_refuses_what_cannot_be_stored(limit: int, tmp_path: Path) -> None:
    twice = [("a", torch.ones(2)), ("b", torch.ones(3)), ("a", torch.ones(4))]
    with pytest.raises(CheckpointError, match="two tensors are called 'a'"):
        write_directory(tmp_path / "m", twice, CONFIG, max_shard_bytes=limit)
    with pytest.raises(CheckpointError, match=r"tensor 'z' of torch.complex128 cannot be stored"):
        write_directory(tmp_path / "m", {"z": torch.zeros(2, dtype=torch.complex128)}, CONFIG)
    for name in ("../x", "/etc/x", "a/../../b", "", ".hidden", "a\\b"):
        with pytest.raises(CheckpointError, match="is not a name for a file"):
            write_directory(tmp_path / "m", OLD, CONFIG, {name: b""})
    assert names(tmp_path) == set()


def test_a_file_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("mine")
    with pytest.raises(CheckpointError, match="Not a directory"):
        write_directory(tmp_path / "m", OLD, CONFIG)
    assert (tmp_path / "m").read_text() == "mine"
    assert names(tmp_path) == {"m"}


KILLED = """
import os, sys, torch
from triptych.checkpoints import save
at, swaps = int(sys.argv[2]), sys.argv[3] == "swap"
steps = iter(range(at))
def counted(real):
    def call(*arguments, **options):
        if next(steps, None) is None:
            os.kill(os.getpid(), 9)
        return real(*arguments, **options)
    return call
if not swaps:
    save._swap = lambda a, b: False
for module, name in ((os, "fsync"), (os, "link"), (save.Path, "rename"), (save.shutil, "rmtree")):
    setattr(module, name, counted(getattr(module, name)))
save.write_directory(sys.argv[1], {"a": torch.arange(5.0), "b": torch.ones(2, 3)}, {"new": True})
"""


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["swap", "two renames"])
@pytest.mark.parametrize("at", range(14))
def test_killed_anywhere_a_whole_checkpoint_is_there(at: int, how: str, tmp_path: Path) -> None:
    target = tmp_path / "m"
    write_directory(target, OLD, CONFIG)
    (target / "loss.png").write_bytes(b"png")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", KILLED, str(target), str(at), how], env=environment)
    assert ended.returncode in (0, -signal.SIGKILL)
    if how == "swap":
        assert is_complete(target)
    recover_path(target)
    assert is_complete(target)
    assert open_source(target).names in (["a"], ["a", "b"])
    assert (target / "loss.png").read_bytes() == b"png"
    assert names(tmp_path) == {"m"}


def test_recover_puts_back_what_was_set_aside(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", OLD, CONFIG)
    (tmp_path / "m").rename(tmp_path / ".m.old")  # killed between the two renames
    (tmp_path / ".m.999999999.tmp").mkdir()  # by a process that is no more
    (tmp_path / f".m.{os.getppid()}.tmp").mkdir()
    recover_path(tmp_path / "m")
    assert is_complete(tmp_path / "m")
    assert names(tmp_path) == {"m", f".m.{os.getppid()}.tmp"}


def test_the_next_write_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    killed = (
        "import os, signal, sys; from triptych.checkpoints.save import replacing\n"
        "with replacing(sys.argv[1]) as file: file.write(b'half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", killed, target], check=False).returncode == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.startswith(".m.gguf.")
    others = {".other.gguf.999999999.tmp", f".m.gguf.{os.getppid()}.tmp", ".m.gguf.notes.tmp"}
    for name in others:  # of another target, of a process that runs, of nobody
        (tmp_path / name).mkdir()
    atomic_write(target, b"whole")
    assert names(tmp_path) == {"m.gguf", *others}


def test_atomic_write_replaces_one_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "new" / "x.json", b"one")
    atomic_write(tmp_path / "new" / "x.json", b"two")
    assert (tmp_path / "new" / "x.json").read_bytes() == b"two"
    assert names(tmp_path / "new") == {"x.json"}


def test_is_complete_is_false_for_anything_less(tmp_path: Path) -> None:
    assert not is_complete(tmp_path / "absent")
    write_directory(tmp_path / "m", OLD, CONFIG)
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not is_complete(tmp_path / "m")
    write_directory(tmp_path / "m", OLD, CONFIG)
    (tmp_path / "m" / "config.json").write_text("{")
    assert not is_complete(tmp_path / "m")


def test_report_says_where_everything_came_from() -> None:
    report = LoadReport(
        (
            LoadedTensor("embed.weight", ("tok.weight",), "m.safetensors", "BF16", (11, 6)),
            LoadedTensor("blocks.0.attn.q.weight", ("wqkv",), "m.safetensors", "F16", (6, 6), "split"),
        ),
        ties={"head.weight": "embed.weight"},
        ignored={"rotary.0.inv_freq": "computed", "rotary.1.inv_freq": "computed", "vision.weight": "of images"},
    )
    text = str(report)
    assert "blocks.0.attn.q.weight  6×6    wqkv          F16        split  m.safetensors" in text
    assert "2 loaded, 1 tied, 3 ignored" in text
    assert "ignored  rotary.0.inv_freq and 1 more: computed\nignored  vision.weight: of images" in text
    restored = json.loads(json.dumps(report.to_dict()))
    assert restored == report.to_dict()
    assert restored["tensors"][1]["sources"] == ["wqkv"]
    assert restored["ties"] == {"head.weight": "embed.weight"}
