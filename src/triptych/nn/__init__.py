"""The parts as modules; `new` makes a fresh model and `empty` one to be filled from a file."""

from triptych.nn.heads import ClassHead, LMHead, MaskedLMHead, Pooling, ReplacedHead, SpanHead, TokenHead
from triptych.nn.inputs import Row, flat
from triptych.nn.kinds import Context, KindState
from triptych.nn.model import Batch, Transformer, empty, finish_loading, new
from triptych.nn.part import Module, assign, build
from triptych.nn.stack import Block, Stack
from triptych.nn.taps import NO_TAPS, Taps

__all__ = [
    "NO_TAPS", "Batch", "Block", "ClassHead", "Context", "KindState", "LMHead", "MaskedLMHead", "Module",
    "Pooling", "ReplacedHead", "Row", "SpanHead", "Stack", "Taps", "TokenHead", "Transformer", "assign", "build",
    "empty", "finish_loading", "flat", "new",
]  # fmt: skip
