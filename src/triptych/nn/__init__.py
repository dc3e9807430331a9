"""The parts as modules; `new` makes a fresh model and `empty` one to be filled from a file."""

from triptych.migration_hints import answer_for
from triptych.nn.attention_states import Context
from triptych.nn.heads import LMHead, Pooling
from triptych.nn.inputs import InputRow, flat
from triptych.nn.lora import LoraFactors, LoraLinear, attach, detach, factors_of, fresh_factors
from triptych.nn.part import NO_TAPS, Module, Taps, assign, build
from triptych.nn.stack import Block, Stack
from triptych.nn.transformer import Adapter, Batch, Transformer, empty, finish_loading, new

__all__ = [
    "NO_TAPS", "Adapter", "Batch", "Block", "Context", "InputRow", "LMHead", "LoraFactors", "LoraLinear",
    "Module", "Pooling", "Stack", "Taps", "Transformer",
    "assign", "attach", "build", "detach", "empty", "factors_of", "finish_loading", "flat", "fresh_factors", "new",
]  # fmt: skip

answer_for(__name__)
