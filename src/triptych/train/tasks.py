"""The task of each objective."""

from __future__ import annotations

from triptych.checkpoints.header import read_header
from triptych.errors import ConfigError
from triptych.spec import PatchesSpec
from triptych.train.audio_records import TranscriptTask
from triptych.train.chat_task import ChatTask
from triptych.train.contrastive import ContrastiveTask
from triptych.train.corruption import CorruptionTask, ReplacedTask
from triptych.train.image_tasks import CaptionTask, ImageLabelTask
from triptych.train.label_tasks import LabelTask, TagTask
from triptych.train.recipe import IMAGE_MODELS, Objective, ObjectiveSettings, Recipe
from triptych.train.sources import FOLDED, SHAKESPEARE
from triptych.train.span_task import SpanTask
from triptych.train.task import ObjectiveTask
from triptych.train.text_tasks import CausalTask, MaskedTask, PairsTask

_TASKS: dict[Objective, type[ObjectiveTask]] = {
    "causal": CausalTask, "masked": MaskedTask, "seq2seq": PairsTask, "labels": LabelTask, "tags": TagTask,
    "spans": SpanTask, "contrastive": ContrastiveTask, "chat": ChatTask, "captions": CaptionTask,
    "corruption": CorruptionTask, "replaced": ReplacedTask, "transcripts": TranscriptTask,
}  # fmt: skip
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


def read_task(recipe: Recipe) -> ObjectiveTask:
    """The task of the recipe's objective with its data read and checked.

    Raises ConfigError, TextError and InputError, one line each, for a recipe and data that do not fit.
    """
    settings, data, name = recipe.objective, recipe.data, recipe.objective.name
    for key, names in _READ_BY.items():
        if name not in names and getattr(settings, key) != ObjectiveSettings.model_fields[key].default:
            raise ConfigError(f"objective.{key} is for {', '.join(names)}; objective {name} does not read it")
    cut = name == "seq2seq" or (name == "contrastive" and data.path in (SHAKESPEARE, FOLDED))
    if data.words is not None and not cut:
        raise ConfigError(
            f"data.words cuts pairs of texts, for seq2seq, and for contrastive on {SHAKESPEARE!r} or {FOLDED!r}; "
            f"objective {name} does not read it here"
        )
    return (ImageLabelTask if name == "labels" and _reads_images(recipe) else _TASKS[name])(recipe)


def _reads_images(recipe: Recipe) -> bool:
    """Whether the model of the recipe reads images, by its config."""
    base = recipe.base
    if base is None:
        return recipe.model.get("model_type") in IMAGE_MODELS
    return isinstance(read_header(base.path).spec.reads.embed, PatchesSpec)
