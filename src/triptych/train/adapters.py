"""Training an adapter from a recipe: `[adapter]` beside `model.path`; checkpoints hold the adapter alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from triptych.checkpoints import local_path
from triptych.checkpoints.adapter_files import adapter_base, read_adapter
from triptych.checkpoints.adapters import AdapterSettings, add_adapter, check_base, save_adapter
from triptych.nn import Transformer, attach
from triptych.train.base_model import Base, BaseSettings, read_base
from triptych.train.settings import Positive, Rate, Section


class AdapterRecipe(Section):
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
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout of the input of the product, in training."""


def with_new_adapter(base: BaseSettings, settings: AdapterRecipe, seed: int) -> Base:
    """The model `base` with a new adapter.

    Raises TextError for a model without a tokenizer, InputError for an adapter that cannot be added.
    """
    model = read_base(base, packed=True)
    add_adapter(model.module, AdapterSettings(settings.rank, settings.alpha, settings.targets, settings.dropout, seed))
    return model


def with_saved_adapter(base: BaseSettings, settings: AdapterRecipe, checkpoint: Path) -> Base:
    """The model `base` with the adapter of a training checkpoint.

    Raises CheckpointError where the base is gone or has changed since.
    """
    _, digest = adapter_base(checkpoint)
    check_base(base.path, digest, checkpoint)
    model = read_base(base, packed=True)
    attach(model.module, read_adapter(checkpoint, model.module.spec).factors, settings.dropout)
    return model


def save_trained(path: Path, module: Transformer, base: str, files: Mapping[str, bytes | str] | None = None) -> None:
    """Write the adapter of a module whose base the recipe calls `base`.  Raises CheckpointError."""
    save_adapter(path, module, local_path(base), files)
