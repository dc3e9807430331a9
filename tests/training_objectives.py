"""Random cases of every objective, by its name: `DRAW[name](seed)`; `training_cases.compare` trains them."""

from __future__ import annotations

from collections.abc import Callable

from training_cases import Case
from training_labels import contrast, labels, replaced, spans, tags
from training_media import captions, image_labels, speech
from training_tokens import corruption, masked, next_token, to_sequence

DRAW: dict[str, Callable[[int], Case]] = {
    "next token": next_token, "masked": masked, "seq2seq": to_sequence, "corruption": corruption, "labels": labels,
    "tags": tags, "spans": spans, "replaced": replaced, "images": image_labels, "speech": speech,
    "contrast": contrast, "captions": captions,
}  # fmt: skip
