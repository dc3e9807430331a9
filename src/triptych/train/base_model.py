"""The existing model that a recipe trains further, as a whole or by an adapter beside it.

It is a directory, a run directory, a `.gguf` file or `hub:org/name`; checkpoints of a run with `[adapter]` hold the
adapter alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych.checkpoints import open_source
from triptych.checkpoints.adapter_files import adapter_base, read_adapter
from triptych.checkpoints.adapters import check_base
from triptych.checkpoints.convert import files_beside
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import read_weights, stores_packed
from triptych.errors import ConfigError, TextError
from triptych.nn import Transformer, attach
from triptych.quantize import packing_for
from triptych.text import Tokenizer
from .settings import BelowOne, Config, Positive, Rate, RecipeSection


class BaseSettings(RecipeSection):
    """An existing model that is trained further."""

    path: str
    """A model directory, a run directory, a `.gguf` file or `hub:org/name`."""
    dequantize: bool = False
    """Train the packed weights of the file as fp32 numbers, 4 bytes each; without it they
    are refused, unless an adapter is trained, for which they stay packed."""


@dataclass(frozen=True, eq=False)
class StartingModel:
    """Module in fp32, tokenizer (None of a model that reads no text) and HF config of an existing model; `files` are
    those that its copies carry beside weights and config: the tokenizer's, how texts end, how images are prepared."""

    module: Transformer
    tokenizer: Tokenizer | None
    hf: Config
    files: Mapping[str, bytes]


def read_base(settings: BaseSettings, *, packed: bool = False) -> StartingModel:
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
    return StartingModel(module.float(), tokenizer, header.hf, files_beside(header))


class AdapterRecipe(RecipeSection):
    """LoRA (Hu et al. 2021) instead of training all weights.

    Packed matrices of the model stay packed unless `model.dequantize` is true, which takes more memory and makes
    gradients exact.
    """

    rank: Positive = 8
    """The rank of the product that is added to each matrix."""
    alpha: Rate = 16.0
    """The product is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Names of linear maps, such as `["q", "v"]` or `["q_proj", "v_proj"]`, or `all-linear`, those of all blocks."""
    dropout: BelowOne = 0.0
    """Dropout of the input of the product, in training."""
    dora: bool = False
    """Train the norms of the rows of each matrix too (DoRA, Liu et al. 2024)."""
    rank_stabilized: bool = False
    """Multiply the product by alpha / sqrt(rank) (Kalajdzievski 2023)."""


def with_saved_adapter(base: BaseSettings, settings: AdapterRecipe, checkpoint: Path) -> StartingModel:
    """The model `base` with the adapter of a training checkpoint.

    Raises CheckpointError where the base is gone or has changed since.
    """
    _, digest = adapter_base(checkpoint)
    check_base(base.path, digest, checkpoint)
    model = read_base(base, packed=True)
    attach(model.module, read_adapter(checkpoint, model.module.spec).factors, settings.dropout)
    return model
