"""Generation: requests, sampling, the engine that runs them, beams."""

from triptych.generate.beam import Beam, beam_search, check_beam_settings
from triptych.generate.engine import Engine, Executor
from triptych.generate.generation import Generation, generate, pieces, search
from triptych.generate.request import LiveRow, Output, Request, TokenLogprobs
from triptych.generate.rules import Rule, forbid
from triptych.generate.sampling import Sampling, sample
from triptych.generate.stops import stop_strings

__all__ = [
    "Beam", "Engine", "Executor", "Generation", "LiveRow", "Output", "Request", "Rule", "Sampling", "TokenLogprobs",
    "beam_search", "check_beam_settings", "forbid", "generate", "pieces", "sample", "search", "stop_strings",
]  # fmt: skip
