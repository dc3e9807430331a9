"""Opens the weights behind a path, finds the model or adapter of a run, and parses names on the hub.

Errors say why a path cannot be opened.  Names on the hub are `hub:org/name[@revision][:file.gguf]`.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from triptych.errors import CheckpointError, FetchError, shown
from . import gguf_reader, safetensors
from .source import Source, fault, is_plain_name, read_json

PREFIX = "hub:"

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?![.-]))*"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_PART}(?:/{_PART})*))?(?::(?P<file>.+\.gguf))?", re.ASCII
)
# Who owns the models that had no organization in their names: beginning of the name -> organization.
_OWNERS = {
    "gpt2": "openai-community", "openai-gpt": "openai-community", "bert-": "google-bert", "roberta-": "FacebookAI",
    "xlm-": "FacebookAI", "distil": "distilbert", "t5-": "google-t5", "albert-": "albert",
}  # fmt: skip
# Whole names that people use for a model without its organization.
_SHORT = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "bert": "google-bert/bert-base-uncased", "t5": "google-t5/t5-small", "whisper": "openai/whisper-tiny",
    "modernbert": "answerdotai/ModernBERT-base",
}  # fmt: skip


@dataclass(frozen=True)
class HubName:
    """The parts of a well-formed `hub:repo[@revision][:file]`."""

    repo: str  # "org/name"
    revision: str | None = None  # a branch, tag or commit; the main branch when None
    file: str | None = None  # one GGUF of the repository

    def __str__(self) -> str:
        return PREFIX + self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" * bool(self.file))


def parse_name(text: str) -> HubName:
    """Take `text`, with or without its `hub:`, apart; `FetchError` when it is not a well-formed name."""
    match = _NAME.fullmatch(text.removeprefix(PREFIX))
    if match is None or len(text) > 400 or (match["file"] and not is_safe(match["file"])):
        problem = f"{shown(text)} is not hub:org/name, hub:org/name@revision or hub:org/name:file.gguf"
        full = full_name(text.removeprefix(PREFIX))
        raise FetchError(problem + (f"; did you mean {full}?" if full else ""))
    return HubName(match["repo"], match["revision"], match["file"])


def full_name(name: str) -> str | None:
    """`hub:org/name` of a model that is known by a shorter name, `gpt2` or `smollm2`; of `org/name` itself."""
    repo = _SHORT.get(name.lower())
    if repo is None and re.fullmatch(_PART, name, re.ASCII):
        owner = next((owner for start, owner in _OWNERS.items() if name.startswith(start)), None)
        repo = f"{owner}/{name}" if owner else None
    elif re.fullmatch(f"{_PART}/{_PART}", name, re.ASCII):
        repo = name
    return repo and PREFIX + repo


def is_safe(file: str) -> bool:
    """Whether `file` stays below the directory it is joined to, and means itself as a download pattern."""
    parts = file.split("/")
    return not set("[]") & set(file) and all(is_plain_name(part.removeprefix(".")) for part in parts)


_STEP = re.compile(r"step-\d{8}")  # the checkpoints that training writes
ADAPTER_CONFIG = "adapter_config.json"  # what a directory holds that is an adapter of another model
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def model_in_run(path: Path) -> Path:
    """The model of a run directory, or its adapter: its finished `model`, else its newest `step-*`, which `quickstart`
    writes below `checkpoints`; other paths are unchanged."""
    if not os.path.isdir(path) or _has_config(path):
        return path
    if _has_config(path / "model"):
        return path / "model"
    candidates = [*path.glob("step-*"), *path.glob("checkpoints/step-*")]
    steps = [step for step in candidates if _STEP.fullmatch(step.name) and _has_config(step)]
    return max(steps, key=lambda step: step.name, default=path)


def _has_config(path: Path) -> bool:
    return os.path.exists(path / "config.json") or is_adapter(path)


def is_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter and no model."""
    return os.path.isfile(path / ADAPTER_CONFIG) and not os.path.exists(path / "config.json")


def base_of_adapter(path: Path) -> str | None:
    """The base that the adapter in the directory `path` names; None where it names none.

    Raises CheckpointError for a config that cannot be read.
    """
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def open_source(path: str | Path) -> Source:
    """The checked tensors behind `path`: a `.gguf` or `.safetensors` file, a `*.safetensors.index.json`, or a
    directory that holds `model.safetensors` or `model.safetensors.index.json`.

    Raises `CheckpointError` when the path is missing, is a pickle, or breaks its format anywhere.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)
    if path.name.endswith(safetensors.INDEX_SUFFIX):
        return safetensors.open_sharded(path)
    match path.suffix.lower():
        case ".gguf":
            return gguf_reader.GGUFSource(path)
        case ".safetensors":
            return safetensors.open_file(path)
        case suffix if suffix in PICKLES:
            raise _pickle(path)
    if path.name == "config.json" and path.is_file():
        raise fault(path, f"is a config alone; give the directory that holds it, {path.parent}")
    if not path.exists():
        name = full_name(str(path)) or "hub:org/name"
        raise fault(path, f"no such file or directory; to download from the hub, write {name}")
    raise fault(path, "is not a checkpoint; it must be a directory, a .safetensors file or a .gguf file")


def _open_directory(path: Path) -> Source:
    single, index = path / "model.safetensors", path / ("model" + safetensors.INDEX_SUFFIX)
    if single.exists() and index.exists():
        raise fault(path, f"holds both {single.name} and {index.name}; give the path of the one you mean")
    if single.exists():
        return safetensors.open_file(single)
    if index.exists():
        return safetensors.open_sharded(index)
    files = sorted(file for file in path.iterdir() if file.is_file())
    if weights := [file.name for file in files if file.suffix in (".gguf", ".safetensors")]:
        raise fault(path, f"holds no {single.name}; give the path of the file you mean, for example {weights[0]}")
    for file in files:
        if file.suffix in PICKLES:
            raise _pickle(file)
    raise fault(path, f"holds no {single.name} and no {index.name}")


def without_config(path: Path) -> CheckpointError:
    """The error for a directory without a config.json: what a model directory holds, and what beside or below the
    path may have been meant."""
    if is_adapter(path):
        base = base_of_adapter(path)
        which = "its base" if base is None else f"its base, {shown(base)},"
        return fault(path, f"is an adapter, not a model; name {which} and the adapter with --adapter (adapter=)")
    try:
        entries = sorted(path.iterdir())
    except OSError:  # no permission; the message goes without a guess
        entries = []
    files = [entry for entry in entries if entry.suffix.lower() == ".gguf" and os.path.isfile(entry)]
    models = [entry for entry in entries if os.path.isfile(model_in_run(entry) / "config.json")]
    meant = [*files, *models]
    also = (
        f"; did you mean {meant[0]}?" if len(meant) == 1 else f"; give one of those in it, {meant[0]}" if meant else ""
    )
    return fault(path, f"holds no config.json; a model directory holds config.json and model.safetensors{also}")


def _pickle(path: Path) -> CheckpointError:
    if not path.exists():
        return fault(path, "no such file")
    return fault(
        path,
        "is a pickle, which can run any code when opened, so it is never opened here; load it in an environment you "
        "trust with the tool that wrote it, save it as safetensors (model.save_pretrained in transformers), open that",
    )
