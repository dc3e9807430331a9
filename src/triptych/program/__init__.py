"""A forward as a program: a flat list of operations, lowered once from the parts' own forwards.

`lower(module)` runs the forwards on symbolic values and records what they call; `interpret` runs the record on tensors.
"""

from .interpreter import interpret, interpret_logits, interpret_value
from .lower import lower
from .program import Entry, Instruction, Program

__all__ = ["Entry", "Instruction", "Program", "interpret", "interpret_logits", "interpret_value", "lower"]
