"""Training an adapter from a recipe: `[adapter]` beside `model.path`; checkpoints hold the adapter alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from triptych.checkpoints import local_path, open_source
from triptych.checkpoints.adapter_files import adapter_base, read_adapter
from triptych.checkpoints.adapters import AdapterSettings, add_adapter, check_base, save_adapter
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import read_weights
from triptych.errors import TextError
from triptych.nn import Transformer, attach
from triptych.quantize import packing_for
from triptych.text import Tokenizer
from triptych.train.settings import Positive, Rate, Section


class AdapterRecipe(Section):
    """LoRA instead of all weights: `rank`, `alpha`, `targets` and `dropout` are those of `Model.add_adapter`.  Packed
    matrices of the model stay packed; with `dequantize` they are read as plain numbers, which takes more memory and is
    exact."""

    rank: Positive = 8
    alpha: Rate = 16.0
    targets: Literal["all-linear"] | list[str] = "all-linear"
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    dequantize: bool = False


Prepared = tuple[Transformer, Tokenizer, dict[str, Any]]


def with_new_adapter(base: str, settings: AdapterRecipe, seed: int) -> Prepared:
    """The model `base` with a new adapter, its tokenizer and HF config.

    Raises TextError for a model without a tokenizer, InputError for an adapter that cannot be added.
    """
    module, tokenizer, hf = _read_base(base, settings)
    add_adapter(module, AdapterSettings(settings.rank, settings.alpha, settings.targets, settings.dropout, seed))
    return module, tokenizer, hf


def with_saved_adapter(base: str, settings: AdapterRecipe, checkpoint: Path) -> Prepared:
    """The model `base` with the adapter of a training checkpoint.

    Raises CheckpointError where the base is gone or has changed since.
    """
    _, digest = adapter_base(checkpoint)
    check_base(base, digest, checkpoint)
    module, tokenizer, hf = _read_base(base, settings)
    attach(module, read_adapter(checkpoint, module.spec).factors, settings.dropout)
    return module, tokenizer, hf


def save_trained(path: Path, module: Transformer, base: str, files: Mapping[str, bytes | str] | None = None) -> None:
    """Write the adapter of a module whose base the recipe calls `base`.  Raises CheckpointError."""
    save_adapter(path, module, local_path(base), files)


def _read_base(base: str, settings: AdapterRecipe) -> Prepared:
    header = read_header(base)
    source = header.source or open_source(header.path)
    tokenizer = header.tokenizer()
    if tokenizer is None:
        raise TextError(f"{base} holds no tokenizer, which training needs")
    packing = packing_for(source, dequantize=True if settings.dequantize else None)
    module, _ = read_weights(header.spec, source, dequantize=packing.dequantize, packer=packing.packer)
    return module.float(), tokenizer, header.hf
