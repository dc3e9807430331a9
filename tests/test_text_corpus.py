"""Files and folders of text as training data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triptych.errors import TextError
from triptych.text.corpus import documents, read_text


def test_a_folder_in_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "one.md").write_bytes("ö\r\nx\r".encode())
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\n\n")
    (tmp_path / "c").write_text("third")
    (tmp_path / "empty.txt").write_text("\n ")
    (tmp_path / ".git" / "object").write_bytes(b"\xff")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert documents(tmp_path) == ["first\n\n", "ö\nx\n", "third"]
    assert read_text(tmp_path) == "first\n\nö\nx\n\nthird\n"
    assert documents(tmp_path / "c") == ["third"]
    assert documents(str(tmp_path / ".hidden").replace(".hidden", "c")) == ["third"]


@pytest.mark.parametrize(
    ("raw", "at", "byte"),
    [(b"ab\xffc", 2, "ff"), (b"\xef\xbb\xbfab\xe9 z", 5, "e9"), (b"\xc3\xa9\xc3", 2, "c3")],
)
def test_the_first_bad_byte_is_named(tmp_path: Path, raw: bytes, at: int, byte: str) -> None:
    (tmp_path / "latin.txt").write_bytes(raw)
    with pytest.raises(TextError, match=rf"latin\.txt is not UTF-8 at byte {at} \(0x{byte}\)"):
        read_text(tmp_path / "latin.txt")


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no file or folder"):
        documents(tmp_path / "missing")
    (tmp_path / "empty").write_text(" \n")
    for path in (tmp_path, tmp_path / "empty"):
        with pytest.raises(TextError, match="holds no text"):
            documents(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_is_not_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10 << 30)
    problems = {"pipe": "is a pipe or a device", "zeros": "is a pipe or a device", "loop": "cannot be read",
                "sparse": "10,737,418,240 bytes"}  # fmt: skip
    for name, problem in problems.items():
        with pytest.raises(TextError, match=problem) as refused:
            documents(tmp_path / name)
        assert "\n" not in str(refused.value)
