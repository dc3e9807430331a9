"""Names of models on the hub, `hub:org/name[@revision][:file.gguf]`, and what to write in place of a shorter one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from triptych.checkpoints.source import is_plain_name
from triptych.errors import FetchError, shown

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
