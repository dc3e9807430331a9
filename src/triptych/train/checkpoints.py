"""Training checkpoints: a Hugging Face directory that other tools load, with `train_state/` inside for resuming.

    OUT/step-00000120/config.json, model.safetensors, tokenizer.json, ...
                      train_state/state.json            step, time used, recipe, history
                      train_state/optimizer.safetensors named tensors; of several processes a file each
                      train_state/manifest.json         size and SHA-256 of every other file, written last
    OUT/model/                                          the files of the newest checkpoint without `train_state`

Of a model with an adapter only the adapter is stored, adapter_config.json and adapter_model.safetensors beside the same
`train_state/`.

A checkpoint is built under another name, synced to disk and renamed once, so that a process killed at any moment leaves
the previous checkpoint intact.  No random state is stored: every random number of a step follows from the seed and the
step.  The files of `model/` are links to those of the checkpoint, which take no space, where the disk has links.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from triptych.checkpoints import atomic_write, open_source, read_json
from triptych.checkpoints.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from triptych.checkpoints.header import BESIDE, read_header
from triptych.checkpoints.load_weights import read_weights
from triptych.checkpoints.locate import ADAPTER_CONFIG
from triptych.checkpoints.save import put_in_place, sync_directory, target_of
from triptych.checkpoints.source import is_plain_name
from triptych.errors import CheckpointError, ConfigError, shown
from triptych.nn import Transformer
from triptych.text import Tokenizer, from_directory
from .base_model import StartingModel, unfilled
from .checkpoint_content import (
    OPTIMIZER,
    STATE,
    TRAIN_STATE,
    CheckpointContent,
    SavedState,
    WholeNumber,
    of_disk,
)
from .loop import Progress, Trainer
from .optimizer import Optimizer
from .ranks import Messages, Ranks
from .settings import Config, RecipeSection

S = TypeVar("S", bound=RecipeSection)
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.(building|broken|old)")
_MANIFEST = f"{TRAIN_STATE}/manifest.json"
MODEL = "model"
_MODEL_ASIDE = (f".{MODEL}.building", f".{MODEL}.old")  # where it is built, and where the one before it is until then


@dataclass(frozen=True)
class ValidCheckpoint:
    """One valid checkpoint, and for each newer directory the reason why it is not one."""

    path: Path
    step: int
    skipped: tuple[str, ...] = ()


class Checkpoints:
    """The training checkpoints of one run under `directory`; `save` deletes all but the newest `keep`."""

    def __init__(self, directory: Path | str, keep: int = 2) -> None:
        self.directory, self.keep = Path(directory), keep

    def save(
        self,
        trainer: Trainer,
        hf: Mapping[str, Any] | None,
        tokenizer: Tokenizer | None,
        recipe: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Write the trainer's present state, with `files` beside weights and tokenizer, and renew `model/`.

        Raises CheckpointError, and leaves the checkpoints before it intact.
        """
        return self.write(CheckpointContent.of(trainer, hf, tokenizer, recipe, files or {}))

    def write(self, content: CheckpointContent, messages: Messages | None = None) -> Path:
        """`save` of what `content` holds, in which the processes of a run exchange `messages`."""
        path, build = self.directory / f"step-{content.step:08}", list[Path | None]()
        messages = messages or content.ranks
        messages.on_first(of_disk(path, lambda: build.append(self._begin(path))))
        if messages.any(messages.index == 0 and build != [None]):
            content.write(self._build(path), messages)
        messages.on_first(of_disk(path, lambda: self._end(build[0], path)))
        return path

    def _build(self, path: Path) -> Path:
        """Where the checkpoint `path` is built."""
        return self.directory / f".{path.name}.building"

    def _begin(self, path: Path) -> Path | None:
        """Where to build the checkpoint `path`, None where it is there: a valid one is that from which this run was
        resumed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        return self._build(path) if not path.exists() or why_invalid(path) is not None else None

    def _end(self, build: Path | None, path: Path) -> None:
        """Put what was built in its place, renew `model/`, and delete old checkpoints."""
        if build is not None:
            self._finish(build, path)
        self._renew_model(path)
        for _, old in self._all()[self.keep :]:  # renamed before deletion, so that no half-deleted one is in place
            old.rename(self.directory / f".{old.name}.old")
        self._remove_unfinished()

    def newest(self) -> ValidCheckpoint:
        """The newest valid checkpoint.  Raises CheckpointError, with every reason, when there is none."""
        skipped: list[str] = []
        for step, path in self._all():
            problem = why_invalid(path)
            if problem is None:
                return ValidCheckpoint(path, step, tuple(skipped))
            skipped.append(problem)
        reasons = "; ".join(skipped) or "it holds no step-* directory"
        raise CheckpointError(f"no checkpoint to resume from in {self.directory}: {reasons}")

    def exist(self) -> bool:
        return bool(self._all())

    def check_new_run(self, *, force: bool) -> None:
        """Raises ConfigError for a file in place of the directory, and if it holds something that a new run would
        replace: another run, unless `force` says that it may, or a model that was written by none."""
        out = self.directory
        target_of(out)
        if out.is_file():
            raise ConfigError(f"{out} is a file, and a run needs a directory; give another --out")
        if Checkpoints(out / "checkpoints").exist():
            raise ConfigError(f"{out} holds a run of `triptych quickstart`; give another --out")
        if self.exist() and not force:
            raise ConfigError(
                f"{out} already holds a run; continue it with --resume, delete it and start over with --force, or "
                "give another --out"
            )
        there = [] if self.exist() or not out.is_dir() else os.listdir(out)
        if MODEL in there:
            raise ConfigError(f"{self.model} was written by no run, and this run would replace it; give another --out")
        if others := [name for name in there if name[0] != "." and not name.endswith((".toml", ".log"))]:
            raise ConfigError(f"{out} holds {shown(min(others))} and no run; give a new directory as --out")

    def remove(self) -> None:
        """Delete `model/` and every checkpoint, the oldest first; one that is being deleted has another name already.

        Raises CheckpointError.
        """
        try:
            for path in (self.model, *(path for _, path in reversed(self._all()))):
                if path.exists():
                    path.rename(self.directory / f".{path.name}.old")
            self._remove_unfinished()
        except OSError as error:
            raise CheckpointError(f"cannot delete the run in {self.directory}: {error.strerror or error}") from None

    @property
    def model(self) -> Path:
        """The finished model, or the newest one of a run that goes on."""
        return self.directory / MODEL

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoints on the disk."""
        return sum(file.stat().st_size for _, path in self._all() for file in path.rglob("*") if file.is_file())

    def later(self, step: int) -> int | None:
        """The step of a valid checkpoint after `step`, or None."""
        return next((other for other, path in self._all() if other > step and why_invalid(path) is None), None)

    def _all(self) -> list[tuple[int, Path]]:
        """Step and directory of each checkpoint, valid or not, newest first."""
        named = ((_NAME.fullmatch(path.name), path) for path in self.directory.glob("step-*"))
        return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)

    def _finish(self, build: Path, path: Path) -> None:
        """Write the manifest of the files in `build`, and rename it to `path`."""
        written = sorted(file for file in build.rglob("*") if file.is_file())
        digests = {str(file.relative_to(build)): [file.stat().st_size, _digest(file)] for file in written}
        atomic_write(build / _MANIFEST, json.dumps({"files": digests}, indent=1).encode())
        if path.exists():  # an invalid one
            path.rename(self.directory / f".{path.name}.broken")
        build.rename(path)
        sync_directory(self.directory)

    def _remove_unfinished(self) -> None:
        """Delete what a killed process left half-written or half-deleted."""
        steps = [path.name for path in self.directory.glob(".step-*") if _UNFINISHED.fullmatch(path.name)]
        for name in (*steps, *_MODEL_ASIDE):
            shutil.rmtree(self.directory / name, ignore_errors=True)

    def _renew_model(self, checkpoint: Path) -> None:
        """Put the files of `checkpoint` but its `train_state` in place of those in `model/`."""
        build = self.directory / _MODEL_ASIDE[0]
        shutil.copytree(
            checkpoint, build, ignore=lambda folder, _: [TRAIN_STATE] if Path(folder) == checkpoint else [],
            copy_function=_link_or_copy,
        )  # fmt: skip
        put_in_place(build, self.model)


class Manifest(RecipeSection):
    """Size in bytes and SHA-256 of every file of a checkpoint but the manifest itself, by its name."""

    files: dict[str, tuple[WholeNumber, str]]


def why_invalid(path: Path) -> str | None:
    """The reason why the directory `path` is not a valid checkpoint, or None."""
    try:
        _check_files(path)
        progress, _ = read_progress(path)
    except CheckpointError as error:
        return str(error)
    named = _NAME.fullmatch(path.name)
    return f"{path / STATE} is of step {progress.step}" if named and int(named[1]) != progress.step else None


def _check_files(path: Path) -> None:
    """Raises CheckpointError unless the directory holds the files of its manifest, with their sizes and digests."""
    manifest = _validated(Manifest, path / _MANIFEST, "is not a manifest")
    listed = manifest.files.keys()
    adapter = ADAPTER_CONFIG in listed
    model = (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if adapter else ("config.json",)
    absent = [name for name in (*model, STATE) if name not in listed]
    if not fnmatch.filter(listed, f"{TRAIN_STATE}/*.safetensors"):
        absent.append(OPTIMIZER)
    if not adapter and not fnmatch.filter(listed, "model*.safetensors"):
        absent.append("model.safetensors")
    if absent:
        raise CheckpointError(f"{path / _MANIFEST} does not list {absent[0]}")
    for name, (size, digest) in manifest.files.items():
        file = path / name
        if not all(is_plain_name(part) for part in name.split("/")) or not file.is_file():
            raise CheckpointError(f"{path}: {shown(name)} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{path}: {name} has {file.stat().st_size} bytes, not {size}")
        if _digest(file) != digest:
            raise CheckpointError(f"{path}: the bytes of {name} have changed")


def _validated(kind: type[S], file: Path, problem: str) -> S:
    """The JSON object in `file` as a `kind`.  Raises CheckpointError with the first key that does not fit."""
    content = read_json(file)
    try:
        return kind.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{file} {problem}: {shown(key)}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def read_progress(path: Path) -> tuple[Progress, Config]:
    """The progress of the run at the checkpoint `path`, and its recipe.

    Raises CheckpointError for a state that no run of this version writes.
    """
    state = _validated(SavedState, path / STATE, "cannot be resumed from")
    return Progress(state.step, state.elapsed, state.tokens, state.history), state.recipe


def restore_optimizer(path: Path, optimizer: Optimizer, ranks: Ranks) -> None:
    """Set the state of `optimizer` to that of the checkpoint `path`, whatever number of processes wrote it.

    Raises CheckpointError where it does not fit.
    """
    if ranks.count == 1 and (path / OPTIMIZER).is_file():
        source = open_source(path / OPTIMIZER)
        optimizer.restore({name: source.read(name) for name in source.names})
        return
    from .parallel.optimizer_files import read

    read(optimizer, path / TRAIN_STATE, ranks)


def read_model(path: Path) -> tuple[Transformer, Tokenizer | None, Config]:
    """Module, tokenizer and HF config of a directory, in the stored dtype; None for a model that reads no text.

    Raises TextError where any other has no tokenizer."""
    header = read_header(path)
    assert header.source is not None
    module, _ = read_weights(header.spec, header.source)
    return module, from_directory(path) if module.spec.vocab else None, header.hf


def read_checkpoint(path: Path) -> StartingModel:
    """The model of a checkpoint, to be trained further.

    Raises TextError where it reads text and has no tokenizer.
    """
    header = read_header(path)
    assert header.source is not None
    module, weights = unfilled(header.spec, header.source)
    tokenizer = from_directory(path) if header.spec.vocab else None
    return StartingModel(module, tokenizer, header.hf, read_files(path), weights)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def read_files(path: Path) -> dict[str, bytes]:
    """The small files of a checkpoint that say how its model is used, beside its config and tokenizer."""
    return {name: (path / name).read_bytes() for name in BESIDE if (path / name).is_file()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
