"""Generation: requests, sampling, the engine that runs them, the queue before it, speculation, beams."""

from triptych.generate.beam import Beam, beam_search, check_beam_settings
from triptych.generate.draft_model import DraftModel
from triptych.generate.engine import Engine
from triptych.generate.generation import Generation, generate, pieces, search
from triptych.generate.prefixes import share_a_beginning
from triptych.generate.request import LiveRow, Output, Request, TokenLogprobs
from triptych.generate.sampling import Rule, Sampling, forbid, sample
from triptych.generate.scheduling import BUDGET, MAX_ROWS, OnProgress, QueueProgress, Scheduler
from triptych.generate.speculation import Drafts, PromptLookup, Speculation
from triptych.generate.step_runner import Executor
from triptych.generate.stops import stop_strings
from triptych.migration_hints import answer_for

__all__ = [
    "BUDGET",
    "MAX_ROWS",
    "Beam",
    "DraftModel",
    "Drafts",
    "Engine",
    "Executor",
    "Generation",
    "LiveRow",
    "OnProgress",
    "Output",
    "PromptLookup",
    "QueueProgress",
    "Request",
    "Rule",
    "Sampling",
    "Scheduler",
    "Speculation",
    "TokenLogprobs",
    "beam_search",
    "check_beam_settings",
    "forbid",
    "generate",
    "pieces",
    "sample",
    "search",
    "share_a_beginning",
    "stop_strings",
]  # fmt: skip

answer_for(__name__)
