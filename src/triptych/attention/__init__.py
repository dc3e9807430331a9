"""Attention and what it stands on: pure functions of tensors, no modules."""

from triptych.attention.dispatch import PATHS, attend, why
from triptych.attention.reference import Hook, attend_reference, attention_pattern, attention_scores
from triptych.attention.request import Request, prepare

__all__ = [
    "PATHS",
    "Hook",
    "Request",
    "attend",
    "attend_reference",
    "attention_pattern",
    "attention_scores",
    "prepare",
    "why",
]
