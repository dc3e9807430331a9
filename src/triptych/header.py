"""What a checkpoint says about itself before a single weight is read: its config, its spec, its tensors' names.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych import families
from triptych.checkpoints import Source, local_path, open_source, read_json
from triptych.errors import CheckpointError
from triptych.spec import Model, Pooling

if TYPE_CHECKING:
    from triptych.text import Tokenizer


@dataclass(frozen=True, eq=False)
class Header:
    """A checkpoint at `path`: its `spec`, the HF config `hf` it is written back with, and where its tensors lie.

    `source` is None where there is a config and no weights.
    """

    path: Path
    spec: Model
    hf: dict[str, Any]
    source: Source | None

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that came with the checkpoint, None when there is none.  Raises TextError if it is broken."""
        from triptych import text

        if self.source is not None and self.source.kind == "gguf":
            return text.from_gguf(self.source.metadata, str(self.path))
        return text.from_directory(self.path) if (self.path / "tokenizer.json").is_file() else None


def read_header(model: str | Path, *, ignore: Sequence[str] = (), offline: bool = False, bare: bool = False) -> Header:
    """The header of a directory, a `.gguf` file or `hub:org/name`.

    With `bare`, a directory that holds `config.json` and no weights will do, and so will a `.json` file.  Raises
    CheckpointError, ConfigError or FetchError saying what is wrong and where.
    """
    where = local_path(model, offline)
    folder = where.parent if where.suffix == ".safetensors" else where
    config = where if where.suffix == ".json" and not where.is_dir() else folder / "config.json"
    if bare and config.is_file() and (config == where or not _holds_weights(where)):
        hf = read_json(config)
        return Header(where, families.read_config(hf, ignore=ignore, where=str(config)), hf, None)
    source = open_source(where)
    if source.kind == "gguf":
        shapes = {name: info.shape for name, info in source.infos.items()}

        def values(name: str) -> list[float]:
            return source.read(name).tolist()  # type: ignore[no-any-return]

        hf, spec = families.read_gguf(source.metadata, shapes, read=values, ignore=ignore, where=str(where))
    else:
        hf = read_json(config)
        spec = families.read_config(hf, stored=source.names, ignore=ignore, where=str(config))
        spec = _pooled(spec, folder)
    return Header(where, spec, hf, source)


def _holds_weights(directory: Path) -> bool:
    return any(directory.glob("model*.safetensors*"))


def _pooled(spec: Model, where: Path) -> Model:
    """The pooling a sentence-transformers directory declares beside a bare encoder."""
    pooling = where / "1_Pooling" / "config.json"
    if not isinstance(spec.head, Pooling) or not pooling.is_file():
        return spec
    told = read_json(pooling)
    mode = "first" if told.get("pooling_mode_cls_token") else "mean"
    if mode == "mean" and not told.get("pooling_mode_mean_tokens", True):
        raise CheckpointError(f"{pooling}: only mean and first-token pooling are understood")
    return replace(spec, head=replace(spec.head, mode=mode, normalize=_normalizes(where / "modules.json")))


def _normalizes(modules: Path) -> bool:
    """Whether the chain of modules that sentence-transformers lists scales its vectors to length 1."""
    if not modules.is_file():
        return False
    try:
        return any(str(module.get("type", "")).endswith("Normalize") for module in json.loads(modules.read_bytes()))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{modules} is not a JSON list of modules ({type(error).__name__})") from None
