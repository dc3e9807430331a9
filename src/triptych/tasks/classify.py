"""Labels of whole rows: texts, pairs of texts, images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from triptych.errors import InputError
from triptych.nn import Transformer
from triptych.spec import ClassHeadSpec, ModelSpec, TokenHeadSpec
from triptych.tasks.batching import head_outputs
from triptych.text import Encoded

Label = tuple[str, float]


def label_names(spec: ModelSpec, hf: Mapping[str, Any]) -> list[str]:
    """The names of the classes in the config `hf`; `LABEL_0`, `LABEL_1`, ... where it has none."""
    if not isinstance(spec.head, ClassHeadSpec | TokenHeadSpec):
        return []
    names = hf.get("id2label") or {}
    return [str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(spec.head.classes.outputs)]


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
