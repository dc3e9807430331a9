"""The parts as modules; `new` makes a fresh model and `empty` one to be filled from a file."""

from triptych.nn.heads import ClassHead, LMHead, MaskedLMHead, Pooling, ReplacedHead, SpanHead, TokenHead
from triptych.nn.inputs import Row, flat
from triptych.nn.model import Transformer, empty, finish, new
from triptych.nn.part import Module, assign, build
from triptych.nn.stack import Block, Context, Stack
from triptych.nn.taps import NO_TAPS, Taps

__all__ = [
    "NO_TAPS", "Block", "ClassHead", "Context", "LMHead", "MaskedLMHead", "Module", "Pooling", "ReplacedHead", "Row",
    "SpanHead", "Stack", "Taps", "TokenHead", "Transformer", "assign", "build", "empty", "finish", "flat", "new",
]  # fmt: skip
