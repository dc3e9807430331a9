"""What a directory of shards holds.  `plan.json` says of what a run makes shards, and is replaced by `manifest.json`,
which lists them, when the last one is there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from triptych.checkpoints import atomic_write, read_json
from triptych.errors import CheckpointError, TextError, shown
from triptych.text import Tokenizer, from_directory

PLAN, MANIFEST, TOKENIZER = "plan.json", "manifest.json", "tokenizer"
_SENTINEL = re.compile(r"<extra_id_\d+>")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InputEntry(_Table):
    """One input: a file with its size in bytes and the time of its last change, or a data set of the hub."""

    path: str
    size: int = 0
    changed: int = 0


class ShardEntry(_Table):
    """One shard; `size` are the bytes of its file, `text_bytes` those of the texts in UTF-8, and `empty` counts the
    documents that were left out because they have no token."""

    name: str
    documents: int
    tokens: int
    text_bytes: int
    empty: int
    size: int
    sha256: str


class ShardManifest(_Table):
    """The tokenizer (its hash, its size, and what it was made from), how the inputs are read, the inputs, and the
    shards; of a plan there are none yet."""

    version: Literal[1] = 1
    tokenizer: str
    vocab_size: int
    tokenizer_from: str
    field: str
    separator: str | None
    shard_bytes: int
    inputs: list[InputEntry]
    shards: list[ShardEntry] = []

    @property
    def run(self) -> str:
        """A hash of all that decides which tokens the shards have; each shard holds it."""
        decides = self.model_dump(exclude={"shards", "tokenizer_from"})
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    @property
    def documents(self) -> int:
        return sum(one.documents for one in self.shards)

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.shards)

    @property
    def text_bytes(self) -> int:
        return sum(one.text_bytes for one in self.shards)

    def write(self, path: Path) -> None:
        """Replace the file `path`, on the disk when this returns."""
        atomic_write(path, self.model_dump_json(indent=1).encode() + b"\n")


def read_manifest(path: Path) -> ShardManifest:
    """The manifest or plan in the file `path`.  Raises TextError where it is none."""
    try:
        return ShardManifest.model_validate_json(json.dumps(read_json(path)), strict=True)
    except CheckpointError as error:
        raise TextError(str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise TextError(f"{path}: is no manifest of shards: {shown(key)}: {first['msg']}") from None


def differences(plan: ShardManifest, other: ShardManifest) -> Sequence[str]:
    """What of two plans is not the same, in words."""
    found = []
    if plan.tokenizer != other.tokenizer:
        found.append(f"the tokenizer has the hash {other.tokenizer[:12]}, and it was {plan.tokenizer[:12]}")
    for name in ("field", "separator", "shard_bytes"):
        if (now := getattr(other, name)) != (before := getattr(plan, name)):
            found.append(f"{name} is {now!r}, and it was {before!r}")
    before, now = ({one.path: one for one in side.inputs} for side in (plan, other))
    if before.keys() == now.keys():
        found += [f"{path} has changed since" for path in before if before[path] != now[path]]
    else:
        found.append(f"the inputs are others ({shown(min(before.keys() ^ now.keys()))})")
    return found or ["the inputs have another order"]


def fingerprint(tokenizer: Tokenizer) -> str:
    """The SHA-256 of what decides the ids of a text: normalizer, split into words, model, and added tokens.

    The tokens `<extra_id_N>`, which a new model for objective corruption gets, are not counted: no text has them.
    It is that of the tokenizer saved and loaded again: one from a GGUF file has the hash of its copy in a directory.
    """
    with TemporaryDirectory() as folder:
        tokenizer.save(folder)
        state = json.loads(from_directory(folder).backend.to_str())
    decides = {name: state.get(name) for name in ("normalizer", "pre_tokenizer", "model")}
    decides["added_tokens"] = [
        token for token in state.get("added_tokens") or () if not _SENTINEL.fullmatch(token["content"])
    ]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
