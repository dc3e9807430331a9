"""`triptych explain`: the steps of a forward, each with its equation, its numbers, and a second computation of them.

Which steps there are, their order and their equations come from the program of the model (`triptych.program`).
"""

from .decoding import explain_cache
from .examples import EXAMPLES, worked
from .forward_steps import explain
from .pairs import explain_pair
from .probability import explain_probability
from .steps import TOLERANCE, ShownTensor, Walk, WalkStep

__all__ = [
    "EXAMPLES",
    "TOLERANCE",
    "ShownTensor",
    "Walk",
    "WalkStep",
    "explain",
    "explain_cache",
    "explain_pair",
    "explain_probability",
    "worked",
]
