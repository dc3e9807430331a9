"""The task of each objective that has records or rows of its own."""

from __future__ import annotations

from collections.abc import Callable

from triptych.checkpoints.header import read_header
from triptych.errors import ConfigError
from triptych.spec import PatchesSpec
from triptych.train.audio_records import TranscriptTask
from triptych.train.caption_task import CaptionTask
from triptych.train.chat_task import ChatTask
from triptych.train.contrastive import ContrastiveTask
from triptych.train.corruption import CorruptionTask, ReplacedTask, refuse_records
from triptych.train.image_labels import ImageLabelTask
from triptych.train.label_tasks import LabelTask, TagTask
from triptych.train.recipe import IMAGE_MODELS, Objective, ObjectiveSettings, Recipe
from triptych.train.sources import FOLDED, SHAKESPEARE
from triptych.train.span_task import SpanTask
from triptych.train.task import ObjectiveTask

_TASKS: dict[Objective, Callable[[Recipe], ObjectiveTask]] = {
    "labels": lambda recipe: (ImageLabelTask if reads_images(recipe) else LabelTask)(recipe),
    "tags": TagTask,
    "spans": SpanTask,
    "contrastive": ContrastiveTask,
    "chat": ChatTask,
    "captions": CaptionTask,
    "corruption": CorruptionTask,
    "replaced": ReplacedTask,
    "transcripts": TranscriptTask,
}
#: The objectives that read a key of `objective`; for all others it must have its default.
_READ_BY: dict[str, tuple[Objective, ...]] = {
    "rate": ("masked", "corruption", "replaced"),
    "commonest": ("masked",),
    "several": ("labels",),
    "smoothing": ("labels", "tags", "spans", "captions"),
    "hidden": ("captions", "seq2seq"),
    "class_weights": ("labels", "tags"),
    "scale": ("contrastive",),
    "span": ("corruption",),
    "generator": ("replaced",),
    "language": ("transcripts",),
    "translate": ("seq2seq",),
}


def read_task(recipe: Recipe) -> ObjectiveTask | None:
    """The task of the recipe's objective with its data read and checked; None for `causal`, `masked` and `seq2seq`.

    Raises ConfigError, TextError and InputError, one line each, for a recipe and data that do not fit.
    """
    _refuse_unread(recipe.objective)
    _refuse_words(recipe)
    make = _TASKS.get(recipe.objective.name)
    if make is not None:
        return make(recipe)
    refuse_records(recipe)
    return None


def reads_images(recipe: Recipe) -> bool:
    """Whether the model of the recipe reads images, by its config."""
    base = recipe.base
    if base is None:
        return recipe.model.get("model_type") in IMAGE_MODELS
    return isinstance(read_header(base.path).spec.reads.embed, PatchesSpec)


def _refuse_words(recipe: Recipe) -> None:
    data, name = recipe.data, recipe.objective.name
    reads = name == "seq2seq" or (name == "contrastive" and data.path in (SHAKESPEARE, FOLDED))
    if data.words is not None and not reads:
        raise ConfigError(
            f"data.words cuts pairs of texts, for seq2seq, and for contrastive on {SHAKESPEARE!r} or {FOLDED!r}; "
            f"objective {name} does not read it here"
        )


def _refuse_unread(settings: ObjectiveSettings) -> None:
    for key, names in _READ_BY.items():
        default = ObjectiveSettings.model_fields[key].default
        if settings.name not in names and getattr(settings, key) != default:
            raise ConfigError(f"objective.{key} is for {', '.join(names)}; objective {settings.name} does not read it")
