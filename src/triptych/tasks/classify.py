"""Labels of whole rows: texts, pairs of texts, images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from triptych.errors import InputError
from triptych.nn import Transformer
from triptych.spec import ClassHeadSpec
from triptych.tasks.batching import head_outputs
from triptych.text import Encoded

Label = tuple[str, float]


def classify(
    module: Transformer, rows: Sequence[Encoded | Tensor], labels: Sequence[str], *, problem: str | None = None
) -> list[list[Label]]:
    """Every label of each row (a text, or the pixels of an image) with its probability, best first.

    The probabilities of a row add up to 1 (softmax).  Where there is one label, or `problem` is
    `multi_label_classification`, each label has its own (sigmoid); with `regression` it is the score itself.  Raises
    InputError for a model without a head over classes.
    """
    if not isinstance(module.spec.head, ClassHeadSpec):
        raise InputError(f"this {module.spec.family} model has no head over classes, so it cannot classify")
    ranked = []
    for scores in head_outputs(module, rows):
        if problem == "multi_label_classification" or (len(labels) == 1 and problem != "regression"):
            scores = scores.sigmoid()
        elif problem != "regression":
            scores = scores.softmax(-1)
        ranked.append(sorted(zip(labels, scores.tolist(), strict=True), key=lambda pair: -pair[1]))
    return ranked
