"""The task of each objective that has records or rows of its own."""

from __future__ import annotations

from collections.abc import Callable

from triptych.errors import ConfigError
from triptych.train.label_tasks import LabelTask, TagTask
from triptych.train.recipe import Objective, Recipe
from triptych.train.task import Task

_TASKS: dict[Objective, Callable[[Recipe], Task]] = {
    "labels": LabelTask,
    "tags": TagTask,
}


def read_task(recipe: Recipe) -> Task | None:
    """The task of the recipe's objective with its data read and checked; None for `causal`, `masked` and `seq2seq`.

    Raises ConfigError, TextError and InputError, one line each, for a recipe and data that do not fit.
    """
    make, data = _TASKS.get(recipe.objective.name), recipe.data
    if make is not None:
        return make(recipe)
    if data.columns or data.held_out_path is not None or data.cut_longer:
        raise ConfigError(
            f"objective {recipe.objective.name} reads no records; remove data.columns, data.held_out_path and "
            "data.cut_longer"
        )
    return None
