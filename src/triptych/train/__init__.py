"""Training: objectives, data order, optimizers, the loop, its checkpoints, and the recipes that describe a run.

The package itself is a function: `triptych.train(recipe)` trains the model that a recipe describes and returns it.

`recipe` is a .toml file, the name of a recipe that comes with the library, or its tables as dicts; the options
`changes`, `out`, `resume`, `force`, `on_step` and `on_note`, and the errors, are those of `triptych.Model.trained`.
`Model.train()` trains nothing: it switches a model to training mode, as in PyTorch.
"""

import sys
from types import ModuleType
from typing import Any

from triptych import injected_functions
from triptych.migration_hints import answer_for
from triptych.run_lock import Interrupted
from .checkpoints import Checkpoints
from .data import CausalText, Data, MaskedText, Pairs, rows_of_rank
from .evaluate import HeldOut, Score, evaluate
from .job import Job, check_start, prepare, resume, verify_resume
from .loop import Event, Progress, Trainer
from .new_recipe import write_new_recipe
from .objectives import (
    Example,
    ShownRow,
    ShownToken,
    TokenMasking,
    TrainingBatch,
    causal,
    collate,
    loss,
    seq2seq,
    show_batch,
)
from .optimizer import Optimizer, OptimizerSettings, Schedule
from .precision import DivergedError
from .recipe import OBJECTIVES, Recipe, check_recipe, read_recipe
from .settings import RunSettings

__all__ = [
    "OBJECTIVES", "CausalText", "Checkpoints", "Data", "DivergedError", "Event", "Example", "HeldOut", "Interrupted",
    "Job", "MaskedText", "Optimizer", "OptimizerSettings", "Pairs", "Progress", "Recipe", "RunSettings", "Schedule",
    "Score", "ShownRow", "ShownToken", "TokenMasking", "Trainer", "TrainingBatch", "causal", "check_recipe",
    "check_start", "collate", "evaluate", "loss", "prepare", "read_recipe", "resume", "rows_of_rank", "seq2seq",
    "show_batch", "verify_resume", "write_new_recipe",
]  # fmt: skip


class _CallablePackage(ModuleType):
    """The type of this package, whose name is that of the function too."""

    def __call__(self, recipe: Any, **options: Any) -> Any:
        """Train the model of a recipe; see `triptych.Model.trained`."""
        return injected_functions.train(recipe, **options)


sys.modules[__name__].__class__ = _CallablePackage
answer_for(__name__)
