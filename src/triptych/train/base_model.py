"""The existing model that a recipe trains further: a directory, a run directory, a `.gguf` file or `hub:org/name`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.checkpoints import open_source
from triptych.checkpoints.convert import files_beside
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import read_weights, stores_packed
from triptych.errors import ConfigError, TextError
from triptych.nn import Transformer
from triptych.quantize import packing_for
from triptych.text import Tokenizer
from triptych.train.settings import Section


class BaseSettings(Section):
    """An existing model that is trained further."""

    path: str
    """A model directory, a run directory, a `.gguf` file or `hub:org/name`."""
    dequantize: bool = False
    """Train the packed weights of the file as fp32 numbers, 4 bytes each; without it they
    are refused, unless an adapter is trained, for which they stay packed."""


@dataclass(frozen=True, eq=False)
class Base:
    """Module in fp32, tokenizer (None of a model that reads no text) and HF config of an existing model; `files` are
    those that its copies carry beside weights and config: the tokenizer's, how texts end, how images are prepared."""

    module: Transformer
    tokenizer: Tokenizer | None
    hf: dict[str, Any]
    files: Mapping[str, bytes]


def read_base(settings: BaseSettings, *, packed: bool = False) -> Base:
    """The model at `settings.path`; with `packed`, packed matrices may stay so, since they are not trained themselves.

    Raises ConfigError for packed weights without `settings.dequantize` and `packed`, TextError for a model without a
    tokenizer, and what `triptych.load` raises for a path that cannot be read.
    """
    header = read_header(settings.path)
    source = header.source or open_source(header.path)  # without weights: its error says what is there instead
    if stores_packed(source) and not settings.dequantize and not packed:
        raise ConfigError(
            f"{settings.path} has packed weights, which are not trained; set model.dequantize = true to train all "
            "weights as fp32 numbers, or train an adapter ([adapter]) beside them"
        )
    tokenizer = header.tokenizer()
    if tokenizer is None and header.spec.vocab:
        raise TextError(f"{settings.path} has no tokenizer, so texts cannot be read; add its tokenizer.json")
    packing = packing_for(source, dequantize=None if packed and not settings.dequantize else True)
    module, _ = read_weights(header.spec, source, dequantize=packing.dequantize, packer=packing.packer)
    return Base(module.float(), tokenizer, header.hf, files_beside(header))
