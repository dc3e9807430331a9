"""The parts as modules; `new` makes a fresh model and `empty` one to be filled from a file."""

from triptych.nn.heads import LMHead, Pooling
from triptych.nn.inputs import Row, flat
from triptych.nn.kinds import Context
from triptych.nn.lora import LoraFactors, LoraLinear, attach, detach, factors_of, fresh_factors
from triptych.nn.model import Adapter, Batch, Transformer, empty, finish_loading, new
from triptych.nn.part import NO_TAPS, Module, Taps, assign, build
from triptych.nn.stack import Block, Stack

__all__ = [
    "NO_TAPS", "Adapter", "Batch", "Block", "Context", "LMHead", "LoraFactors", "LoraLinear",
    "Module", "Pooling", "Row", "Stack", "Taps", "Transformer",
    "assign", "attach", "build", "detach", "empty", "factors_of", "finish_loading", "flat", "fresh_factors", "new",
]  # fmt: skip
