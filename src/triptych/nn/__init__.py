"""The parts as modules; `new` makes a fresh model and `empty` one to be filled from a file."""

from triptych.migration_hints import answer_for
from .attention_states import Context
from .heads import LMHead, Pooling
from .inputs import InputRow, flat
from .lora import LoraFactors, LoraLinear, attach, detach, factors_of, fresh_factors, with_factors, without_adapter
from .part import NO_TAPS, Module, Taps, assign, build
from .stack import Block, Stack
from .transformer import (
    Adapter,
    Batch,
    NamedWeights,
    Transformer,
    check_weights_fit,
    empty,
    fill,
    finish_loading,
    initial_weights,
    new,
)

__all__ = [
    "NO_TAPS", "Adapter", "Batch", "Block", "Context", "InputRow", "LMHead", "LoraFactors", "LoraLinear",
    "Module", "NamedWeights", "Pooling", "Stack", "Taps", "Transformer",
    "assign", "attach", "build", "check_weights_fit", "detach", "empty", "factors_of", "fill", "finish_loading", "flat",
    "fresh_factors", "initial_weights", "new", "with_factors", "without_adapter",
]  # fmt: skip

answer_for(__name__)
