"""Generation: requests, sampling, the engine that runs them, the queue before it, speculation, beams."""

from triptych.migration_hints import answer_for
from .beam import Beam, beam_search, check_beam_settings
from .cache_budget import CacheBudget
from .constraints import Constraint, constraint_of
from .draft_model import DraftModel
from .engine import Engine
from .generation import Generation, generate, pieces, score, search
from .prefixes import share_a_beginning
from .request import LiveRow, Output, Request, TokenLogprobs
from .sampling import Rule, Sampling, forbid, sample
from .scheduling import BUDGET, MAX_ROWS, OnProgress, QueueProgress, Scheduler
from .speculation import Drafts, PromptLookup, Speculation
from .step_runner import Executor
from .stops import stop_strings

__all__ = [
    "BUDGET",
    "MAX_ROWS",
    "Beam",
    "CacheBudget",
    "Constraint",
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
    "constraint_of",
    "forbid",
    "generate",
    "pieces",
    "sample",
    "score",
    "search",
    "share_a_beginning",
    "stop_strings",
]  # fmt: skip

answer_for(__name__)
