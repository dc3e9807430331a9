"""The layout that a model needs for an objective."""

from __future__ import annotations

from triptych.errors import ConfigError
from triptych.spec import ModelSpec
from triptych.train.new_head import ENCODER_DECODERS
from triptych.train.recipe import Objective

LAYOUTS: dict[Objective, str] = {
    "causal": "decoder", "chat": "decoder", "seq2seq": "encoder-decoder", "corruption": "encoder-decoder",
    "captions": "encoder-decoder", "transcripts": "encoder-decoder", "masked": "encoder", "labels": "encoder",
    "tags": "encoder", "spans": "encoder", "contrastive": "encoder", "replaced": "encoder",
}  # fmt: skip


def check_layout(spec: ModelSpec, objective: Objective) -> None:
    """Raises ConfigError for a model of another layout than that of the objective; labels also train the decoder of an
    encoder-decoder."""
    both = objective == "labels" and spec.family in ENCODER_DECODERS
    if spec.layout != LAYOUTS[objective] and not both:
        fitting = next(name for name, layout in LAYOUTS.items() if layout == spec.layout)
        raise ConfigError(
            f"objective {objective} needs the layout {LAYOUTS[objective]}; {spec.family} is of layout {spec.layout}, "
            f"whose objective is {fitting}"
        )
