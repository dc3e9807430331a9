"""Labels of whole rows, the likeliest words behind masks, and the batches in which such tasks run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from triptych.arguments import integer
from triptych.errors import InputError
from triptych.nn import Batch, Transformer, flat
from triptych.probe.prompts import check_numbers
from triptych.spec import ClassHeadSpec, MaskedLMHeadSpec
from triptych.text import Encoded
from .model_inputs import TaskModel, Texts

BATCH_TOKENS = 4096  # tokens of one batch, unless a single row is longer


def batches(lengths: Sequence[int], tokens: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """Indices of rows grouped by length, longest first, at most `tokens` tokens a group (one row at the least)."""
    group: list[int] = []
    total = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and total + lengths[i] > tokens:
            yield group
            group, total = [], 0
        group.append(i)
        total += lengths[i]
    if group:
        yield group


@torch.inference_mode()
def head_outputs(module: Transformer, rows: Sequence[Encoded | Tensor]) -> list[Tensor]:
    """The output of the head for each row in fp32: `[C]` of a head over classes, `[T, C]` of one over tokens.

    An encoder-decoder reads each row in its decoder too, shifted one position to the right; where the config names no
    start token, the row's own last token is put first (mBART's language).  Raises InputError for a row that does not
    end with an end-of-text token where an encoder-decoder classifies at that token.
    """
    outputs: dict[int, Tensor] = {}
    lengths = [module.length(row) if isinstance(row, Tensor) else len(row.ids) for row in rows]
    for group in batches(lengths):
        outputs.update(zip(group, _forward(module, [rows[i] for i in group]), strict=True))
    return [outputs[i].float() for i in range(len(rows))]


def _forward(module: Transformer, either: Sequence[Encoded | Tensor]) -> Sequence[Tensor]:
    if pixels := [row for row in either if isinstance(row, Tensor)]:
        inputs, where = module.flat(pixels)
        return list(module.logits(Batch(inputs=inputs, rows=where)))
    rows = [row for row in either if isinstance(row, Encoded)]
    device, ids = module.device, module.spec.ids
    tokens, where = flat([row.ids for row in rows], device)
    types = torch.tensor([kind for row in rows for kind in row.token_types], device=device)
    for i, row in enumerate(rows):
        if module.decoder is not None and isinstance(module.spec.head, ClassHeadSpec) and row.ids[-1] not in ids.eos:
            raise InputError(f"text {i} does not end with an end-of-text token, where this model looks for the label")
    output = module.logits(module.labelled_batch(tokens, where, token_types=types))
    return list(output) if isinstance(module.spec.head, ClassHeadSpec) else where.split(output)


def classify(
    model: TaskModel, texts: Texts, *, second: Sequence[str] | None = None
) -> list[list[tuple[str, float]]]:  # fmt: skip
    """The labels of each text, or image, with their probabilities, best first.

    `second` has the second text of each pair (premise and hypothesis, query and passage).  The probabilities are a
    softmax over the labels; of a model with one label, or whose labels may hold together (`problem_type` of its
    config), a sigmoid of each.  A regression gives its score.

    Raises InputError for a model without a head over classes.
    """
    rows = model.inputs.labelled(texts, second)
    if not isinstance(model.spec.head, ClassHeadSpec):
        raise InputError(f"this {model.spec.family} model has no head over classes, so it cannot classify")
    every = class_probabilities(model, rows)
    return [sorted(zip(model.labels, one, strict=True), key=lambda pair: -pair[1]) for one in every]


def class_probabilities(model: TaskModel, rows: Sequence[Encoded | Tensor]) -> list[list[float]]:
    """What `classify` gives for rows of `ModelInputs.labelled`, in the order of the model's labels."""
    problem = model.inputs.hf.get("problem_type")
    every = []
    for scores in head_outputs(model.module, rows):
        if problem == "multi_label_classification" or (len(scores) == 1 and problem != "regression"):
            scores = scores.sigmoid()
        elif problem != "regression":
            scores = scores.softmax(-1)
        every.append(scores.tolist())
    return every


@torch.inference_mode()
def fill(model: TaskModel, texts: Texts, *, top: int = 5) -> list[list[list[tuple[str, float]]]]:
    """The `top` likeliest tokens at each mask token of each text, as (text of the token, probability), best first:
    `fill(texts)[text][mask][rank]`.

    Raises InputError for a model without a masked-LM head, a tokenizer without a mask token, a text without one, and
    probabilities that are NaN.
    """
    tokenizer, module = model.inputs.words, model.module
    mask_id = tokenizer.mask_id
    if mask_id is None:
        raise InputError("this tokenizer has no mask token, so there is nothing to fill in")
    rows = model.inputs.ids(texts)
    if not isinstance(model.spec.head, MaskedLMHeadSpec):
        raise InputError(f"this {model.spec.family} model has no masked-LM head, so it cannot fill words in")
    integer("top", top, 1)
    for i, row in enumerate(rows):
        if mask_id not in row:
            raise InputError(f"text {i} has no mask token to fill; write {tokenizer.tokens([mask_id])[0]} for a word")
    ids, where = flat(rows, module.device)
    probs = torch.softmax(module.logits(Batch(inputs=ids, rows=where)).float(), dim=-1)
    check_numbers("a probability", [probs])
    answers = []
    for row, p in zip(rows, where.split(probs), strict=True):
        best = [p[i].topk(min(top, p.shape[-1])) for i, token in enumerate(row) if token == mask_id]
        pairs = [zip(one.indices.tolist(), one.values.tolist(), strict=True) for one in best]
        answers.append([[(tokenizer.decode([i]).strip(), p) for i, p in mask] for mask in pairs])
    return answers
