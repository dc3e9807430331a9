"""The new model that a recipe describes: its tokenizer and its config; and whether a model fits a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triptych import nn
from triptych.errors import ConfigError, nearest
from triptych.families import read_config
from triptych.spec import ModelSpec
from triptych.text import SPEECH, Layout, Tokenizer, from_directory, new_tokenizer
from .new_head import ENCODER_DECODERS, LAYOUTS, check_layout
from .recipe import Recipe
from .settings import Config
from .shard_rows import ShardDocuments


def tokenizer_of(recipe: Recipe, wanted: str, texts: Sequence[str]) -> Tokenizer:
    """The tokenizer `wanted`, which is trained on `texts` where it has a vocabulary of its own."""
    layout = SPEECH if recipe.objective.name == "transcripts" else layout_of(recipe)
    own = new_tokenizer(wanted, texts, layout)
    if own is not None:
        return own
    if Path(wanted).is_dir():
        return from_directory(wanted)
    known = ("byte", "characters", "bpe:4096", "words:4096")
    raise ConfigError(
        f"tokenizer = {wanted!r} is not a directory and not one of {', '.join(known)}{nearest(wanted, known)}"
    )


def smallest(recipe: Recipe) -> ModelSpec:
    """The spec of a new model with the fewest tokens that its tokenizer may have."""
    if recipe.data.shards and recipe.base is None:
        return read_config(completed_config(recipe, ShardDocuments(recipe.data).tokenizer()), where="model")
    if recipe.tokenizer is None:
        return read_config(recipe.model, where="model")
    kind = recipe.tokenizer.partition(":")[0]  # a BPE has all bytes, and words and characters may be few
    fewest = {"bpe": "byte", "words": "characters"}.get(kind, recipe.tokenizer)
    return read_config(completed_config(recipe, tokenizer_of(recipe, fewest, ["a"])), where="model")


def layout_of(recipe: Recipe) -> Layout:
    """The layout of a new model: that of its objective, but of labels also that of an encoder-decoder."""
    both = recipe.objective.name == "labels" and recipe.model.get("model_type") in ENCODER_DECODERS
    return "encoder-decoder" if both else LAYOUTS[recipe.objective.name]


def completed_config(recipe: Recipe, tokenizer: Tokenizer) -> Config:
    """The config, with the vocabulary and the special tokens of the tokenizer where it does not set them."""
    defaults = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "decoder_start_token_id": tokenizer.pad_id if layout_of(recipe) == "encoder-decoder" else None,
    }
    return {key: value for key, value in defaults.items() if value is not None} | recipe.model


def check_fit(recipe: Recipe, module: nn.Transformer, tokenizer: Tokenizer | None, head: type) -> None:
    """Raises ConfigError unless the model has the layout and the `head` of the objective, and enough positions and
    tokens."""
    spec, objective = module.spec, recipe.objective.name
    check_layout(spec, objective)
    if objective in ("seq2seq", "corruption") and not spec.source_vocab:
        raise ConfigError(f"objective {objective} reads text, which a {spec.family} does not; captions reads images")
    if not isinstance(spec.head, head):
        problem = f"needs a {head.__name__}; name the class in model.architectures"
        if recipe.base is not None:
            problem = f"predicts tokens, and {recipe.base.path} has no head that does; take a checkpoint that has one"
        raise ConfigError(f"objective {objective} {problem}")
    if tokenizer is None:
        return
    if tokenizer.vocab_size > spec.vocab:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {spec.vocab}; take both from one checkpoint"
        )
    if spec.context is not None and recipe.run.length > spec.context:
        raise ConfigError(f"run.length = {recipe.run.length} is more than the {spec.context} positions of the model")
    if objective == "masked" and tokenizer.mask_id is None:
        raise ConfigError("objective masked needs a tokenizer with a mask token")
    if spec.layout == "encoder-decoder" and spec.ids.start is None and objective != "labels":
        raise ConfigError(f"objective {objective} needs model.decoder_start_token_id")
