"""What a server says of a model that it has, loaded or not: its kind, its sizes, and what it can be asked for."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from triptych.checkpoints import open_source
from triptych.checkpoints.adapter_files import base_digest
from triptych.errors import TextError, TriptychError
from triptych.model import Model
from triptych.spec import ModelSpec, PoolingSpec
from triptych.text import ChatTemplate, Tokenizer, WhisperTokens
from .abilities import abilities
from .fields import ApiError
from .thinking import thinks
from .tools import form_of


@dataclass(frozen=True, eq=False)
class ModelCard:
    """A model by its name.

    path, adapter   where it came from, which is never in a response.
    mask            what is written for a word that it fills in.
    languages       those that it hears.
    tokenizer       whose template renders its conversations.
    """

    name: str
    spec: ModelSpec
    able: tuple[str, ...]
    path: Path | None = None
    adapter: Path | None = None
    mask: str | None = None
    languages: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None

    @property
    def template(self) -> ChatTemplate | None:
        return None if self.tokenizer is None else self.tokenizer.chat

    @cached_property
    def tools(self) -> bool:
        """Whether its template shows how calls of tools are written."""
        try:
            return self.template is not None and form_of(self.template) is not None
        except ApiError:
            return False

    @cached_property
    def least_prompts(self) -> tuple[int, int]:
        """Tokens of the prompt of one message of the user without a text, and what each further message adds to it; 1
        and 0 where the template refuses such a conversation, and beside an encoder, which reads it."""
        if self.tokenizer is None or self.template is None or self.spec.layout != "decoder":
            return 1, 0
        empty = [{"role": role, "content": ""} for role in ("user", "assistant", "user")]
        try:
            one, three = (len(self.tokenizer.encode(self.template.render(empty[:count]))) for count in (1, 3))
        except TriptychError:
            return 1, 0
        return max(one, 1), max((three - one) // 2, 0)

    @cached_property
    def parameters(self) -> int:
        return sum(map(math.prod, self.spec.shapes().values()))

    @property
    def files(self) -> list[Path]:
        """The files of the weights; none of a model that came from no file."""
        try:
            source = None if self.path is None else open_source(self.path)
        except TriptychError:
            source = None
        return [] if source is None else sorted({info.file for info in source.infos.values()})

    @cached_property
    def digest(self) -> str:
        """Hexadecimal, of the files of the weights and of which adapter they have."""
        files = f"{self.spec.family} {self.name}" if not self.files else base_digest(open_source(str(self.path)))
        return hashlib.sha256(f"{files} {self.adapter}".encode()).hexdigest()

    @cached_property
    def described(self) -> dict[str, Any]:
        """An entry of Ollama's list."""
        files = self.files
        changed = max((file.stat().st_mtime for file in files), default=0.0)
        return {
            "name": self.name, "model": self.name, "digest": self.digest, "details": self.details,
            "modified_at": datetime.fromtimestamp(changed, UTC).isoformat(),
            "size": sum(file.stat().st_size for file in files),
        }  # fmt: skip

    @property
    def details(self) -> dict[str, Any]:
        family, gguf = self.spec.family, self.path is not None and self.path.suffix == ".gguf"
        return {
            "parent_model": "", "format": "gguf" if gguf else "safetensors", "family": family, "families": [family],
            "parameter_size": _count(self.parameters), "quantization_level": "",
        }  # fmt: skip

    @property
    def shown(self) -> dict[str, Any]:
        """The details that Ollama's clients choose models by."""
        family, stack = self.spec.family, self.spec.decoder or self.spec.reads
        info = {
            "general.architecture": family, "general.parameter_count": self.parameters,
            f"{family}.block_count": len(stack.blocks), f"{family}.embedding_length": stack.outputs,
            f"{family}.vocab_size": self.spec.vocab,
        }  # fmt: skip
        if self.spec.longest_row is not None:
            info[f"{family}.context_length"] = self.spec.longest_row
        kinds = {
            "completion": "completions" in self.able,
            "tools": self.tools,
            "thinking": "chat" in self.able and thinks(self.tokenizer),
            "embedding": isinstance(self.spec.head, PoolingSpec),
        }
        return {
            "license": "", "modelfile": "", "parameters": "", "template": "", "details": self.details,
            "model_info": info, "capabilities": [kind for kind, able in kinds.items() if able],
            "modified_at": self.described["modified_at"],
        }  # fmt: skip


def _count(number: int) -> str:
    """A count of parameters as it is written in the names of models."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return str(number)


def card_of(
    name: str, spec: ModelSpec, tokenizer: Tokenizer | None, path: Path | None, adapter: Path | None = None
) -> ModelCard:
    mask = None if tokenizer is None or tokenizer.mask_id is None else tokenizer.tokens([tokenizer.mask_id])[0]
    able, languages = tuple(abilities(spec, tokenizer)), tuple[str, ...]()
    if tokenizer is not None and "transcriptions" in able:
        with suppress(TextError):
            languages = tuple(WhisperTokens.of(tokenizer, {}, spec.vocab).languages)
    return ModelCard(name, spec, able, path, adapter, mask, languages, tokenizer)


def card_of_model(name: str, model: Model) -> ModelCard:
    return card_of(name, model.spec, model.tokenizer, model.path)
