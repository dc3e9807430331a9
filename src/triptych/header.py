"""What a checkpoint is, from its config or header alone: no weights are read and torch is not imported."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych import families
from triptych.checkpoints import Source, open_source, read_json
from triptych.errors import CheckpointError
from triptych.spec import Model


@dataclass(frozen=True)
class Header:
    """A spec, the HF config it came from, and the tensors beside it, if there are any."""

    spec: Model
    hf: dict[str, Any]
    source: Source | None


def read_header(path: str | Path, ignore: Collection[str] = ()) -> Header:
    """The header of a model directory (with or without its weights), a `config.json`, or a `.gguf` file.

    Raises CheckpointError or ConfigError naming what is missing or not understood.
    """
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        source = open_source(path)
        shapes = {name: info.shape for name, info in source.infos.items()}
        hf, spec = families.read_gguf(source.metadata, shapes, ignore=ignore, where=str(path))
        return Header(spec, hf, source)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix.lower() != ".json":
        raise CheckpointError(f"{path}: is not a model directory, a config.json or a .gguf file")
    hf = read_json(config)
    beside = None
    if path.is_dir() and any(path.glob("*.safetensors*")):
        beside = open_source(path)
    stored = None if beside is None else beside.names
    return Header(families.read_config(hf, stored=stored, ignore=ignore, where=str(config)), hf, beside)
