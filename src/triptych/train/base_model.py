"""The existing model that a recipe trains further, as a whole or by an adapter beside it.

It is a directory, a run directory, a `.gguf` file or `hub:org/name`; checkpoints of a run with `[adapter]` hold the
adapter alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from triptych.checkpoints import Source, open_source
from triptych.checkpoints.adapter_files import adapter_base, read_adapter
from triptych.checkpoints.adapters import check_base
from triptych.checkpoints.convert import files_beside
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import StoredWeights, WeightPacker, stores_packed
from triptych.errors import ConfigError, TextError
from triptych.nn import LoraFactors, NamedWeights, Transformer, attach, empty, fill, with_factors
from triptych.quantize import packing_for
from triptych.spec import ModelSpec
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
    """Module, tokenizer (None of a model that reads no text) and HF config of a model to be trained, in fp32.

    files     what its copies carry beside weights and config: the tokenizer's, how texts end, how images are prepared.
    weights   what `Ranks.distribute` fills the module with, which is on the meta device; None where it is filled.
    """

    module: Transformer
    tokenizer: Tokenizer | None
    hf: Config
    files: Mapping[str, bytes]
    weights: NamedWeights | None

    def with_adapter(self, factors: Mapping[str, LoraFactors], dropout: float) -> StartingModel:
        """This model with an adapter of these factors."""
        attach(self.module, factors, dropout)
        if self.weights is None:
            return self
        return replace(self, weights=with_factors(self.weights, factors, torch.float32))


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
    module, weights = unfilled(header.spec, source, dequantize=packing.dequantize, packer=packing.packer)
    if stores_packed(source) and not packing.dequantize:  # packed weights are not divided among processes
        return StartingModel(fill(module, weights), tokenizer, header.hf, files_beside(header), None)
    return StartingModel(module, tokenizer, header.hf, files_beside(header), weights)


def unfilled(
    spec: ModelSpec, source: Source, *, dequantize: bool = True, packer: WeightPacker | None = None
) -> tuple[Transformer, NamedWeights]:
    """The module of `spec` on the meta device, and the weights of `source` in fp32, each read when its turn comes."""
    module = empty(spec)
    stored = StoredWeights(module, source, dequantize=dequantize, packer=packer)
    return module, ((name, weight.float()) for name, weight in stored)


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
    return model.with_adapter(read_adapter(checkpoint, model.module.spec).factors, settings.dropout)
