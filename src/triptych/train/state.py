"""Training checkpoints: a Hugging Face directory other tools load, with `train_state/` inside for going on.

    OUT/step-00000120/config.json, model.safetensors, tokenizer.json, ...
                      train_state/state.json            step, time used, recipe, history
                      train_state/optimizer.safetensors named tensors
                      train_state/manifest.json         size and SHA-256 of every other file, written last

A checkpoint is built under another name, forced to disk and put in place by one rename, so that a process killed at
any moment leaves the last whole one.  No random state is kept: every random number of a step follows from the seed
and the step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from triptych.checkpoints import atomic_write, open_source, read_json, write_directory
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import read_weights, to_checkpoint
from triptych.errors import CheckpointError
from triptych.nn import Transformer
from triptych.text import Tokenizer, from_directory
from triptych.train.loop import Progress, Trainer

VERSION = 1
_NAME = re.compile(r"step-(\d{8})")
_STATE, _OPTIMIZER, _MANIFEST = (f"train_state/{n}" for n in ("state.json", "optimizer.safetensors", "manifest.json"))


@dataclass(frozen=True)
class Saved:
    """One valid checkpoint, and why each newer directory was passed over."""

    path: Path
    step: int
    skipped: tuple[str, ...] = ()


class Checkpoints:
    """The training checkpoints of one run under `directory`, the newest `keep` of them."""

    def __init__(self, directory: Path | str, keep: int = 2) -> None:
        self.directory, self.keep = Path(directory), keep

    def save(
        self, trainer: Trainer, hf: Mapping[str, Any] | None, tokenizer: Tokenizer, recipe: Mapping[str, Any]
    ) -> Path:
        """Write the trainer's present state.  Raises CheckpointError, with what was there before still whole."""
        path = self.directory / f"step-{trainer.at.step:08}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clear_scraps()
            if not path.exists() or fault(path) is not None:  # whole, it is the one this run went on from
                self._build(path, trainer, hf, tokenizer, recipe)
            for _, old in self._all()[self.keep :]:  # renamed first: half of a directory never looks like a checkpoint
                old.rename(self.directory / f".{old.name}.old")
            self._clear_scraps()
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}; older ones are whole") from None
        return path

    def newest(self) -> Saved:
        """The newest valid checkpoint.  Raises CheckpointError, with every reason, when there is none."""
        skipped: list[str] = []
        for step, path in self._all():
            problem = fault(path)
            if problem is None:
                return Saved(path, step, tuple(skipped))
            skipped.append(problem)
        reasons = "; ".join(skipped) or "it holds no step-* directory"
        raise CheckpointError(f"no checkpoint to go on from in {self.directory}: {reasons}")

    def exist(self) -> bool:
        return bool(self._all())

    def _all(self) -> list[tuple[int, Path]]:
        """Newest first."""
        found = ((_NAME.fullmatch(path.name), path) for path in self.directory.glob("step-*"))
        return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)

    def _build(
        self,
        path: Path,
        trainer: Trainer,
        hf: Mapping[str, Any] | None,
        tokenizer: Tokenizer,
        recipe: Mapping[str, Any],
    ) -> None:
        """Write under another name, manifest last, then put in place by one rename."""
        build = self.directory / f".{path.name}.building"
        state = {"version": VERSION, **asdict(trainer.at), "recipe": dict(recipe)}
        files: dict[str, bytes | str] = {
            **tokenizer.files(),
            _STATE: json.dumps(state, allow_nan=False),
            _OPTIMIZER: safetensors.torch.save(trainer.optimizer.state()),
        }
        write_directory(build, *to_checkpoint(trainer.module, hf), files)
        atomic_write(build / _MANIFEST, json.dumps(_manifest(build), indent=1).encode())
        if path.exists():  # left behind broken
            path.rename(self.directory / f".{path.name}.broken")
        build.rename(path)
        _sync_directory(self.directory)

    def _clear_scraps(self) -> None:
        for scrap in self.directory.glob(".*step-*"):
            shutil.rmtree(scrap, ignore_errors=True)


def fault(path: Path) -> str | None:
    """What keeps the directory `path` from being a whole checkpoint, or None."""
    try:
        listed = read_json(path / _MANIFEST)["files"]
        for name, (size, digest) in listed.items():
            file = path / name
            if not file.is_file():
                return f"{path}: {name} is missing"
            if file.stat().st_size != size:
                return f"{path}: {name} has {file.stat().st_size} bytes, not {size}"
            if _digest(file) != digest:
                return f"{path}: the bytes of {name} have changed"
    except CheckpointError as error:
        return str(error)
    except (AttributeError, KeyError, TypeError, ValueError):
        return f"{path}: {_MANIFEST} is not a manifest"
    return None


def read_progress(path: Path) -> tuple[Progress, dict[str, Any]]:
    """Where the run stood at checkpoint `path`, and its recipe."""
    state = read_json(path / _STATE)
    if state.pop("version", None) != VERSION:
        raise CheckpointError(f"{path / _STATE} is of another version of triptych; this one reads version {VERSION}")
    recipe = state.pop("recipe")
    return Progress(**state), recipe


def read_optimizer(path: Path) -> dict[str, Tensor]:
    source = open_source(path / _OPTIMIZER)
    return {name: source.read(name) for name in source.names}


def read_model(path: Path) -> tuple[Transformer, Tokenizer, dict[str, Any]]:
    """Module, tokenizer and HF config of a directory, every number as stored.  Raises TextError without a tokenizer."""
    header = read_header(path)
    assert header.source is not None
    module, _ = read_weights(header.spec, header.source)
    return module, from_directory(path), header.hf


def _sync_directory(path: Path) -> None:
    """Force the renames inside `path` to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _manifest(path: Path) -> dict[str, Any]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {"files": {str(file.relative_to(path)): [file.stat().st_size, _digest(file)] for file in files}}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
