"""A forward as a walk: each step with its formula, its numbers, and the check that it follows from those before."""

from __future__ import annotations

from triptych.labs.walk.decoding import explain_cache
from triptych.labs.walk.examples import EXAMPLES, worked
from triptych.labs.walk.steps import TOLERANCE, Excerpt, Shown, Step, Walk
from triptych.labs.walk.walking import explain

__all__ = ["EXAMPLES", "TOLERANCE", "Excerpt", "Shown", "Step", "Walk", "explain", "explain_cache", "worked"]
