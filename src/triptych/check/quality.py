"""What packing costs in quality: the perplexity of a text under a model and its packed forms, and the divergence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.check.case import run
from triptych.errors import InputError
from triptych.model import Model
from triptych.spec import LMHeadSpec

WINDOW = 256  # tokens of a row; a shorter context shortens it
MOST = 2048  # tokens of a text that are read
#: What is measured where no text is given, written for this purpose.
TEXT = """\
The ferry leaves the north pier at seven in the morning, and by then the queue of vans reaches the fish market. Anna
counts them from her kitchen window while the coffee boils: eleven today, two more than yesterday. Her brother drives
the third one. He sells bread on the island, and comes back at noon with empty crates and news of who is ill, who is
building, and whose boat needs a new engine.

In winter there are days when no ship can leave. Then the island is on its own, and people bake for each other. The
teacher keeps a list on the door of the school, with what every house can spare: flour, candles, a spare battery, an
hour of work. Nobody has ever taken more than they gave, she says, although nobody has ever checked either.

To estimate how much bread will be sold, he writes down the weather, the day of the week and the number of guests in the
two hotels. A warm Saturday in July means three hundred loaves; a wet Tuesday in March means forty. After ten years the
notebook knows the island better than he does. It was wrong only once, on the day of the wedding, because everyone had
been invited and no one had thought of telling the baker.
"""


@dataclass(frozen=True)
class Quality:
    """One form of a model on a text.  `kl` is the mean divergence of its predictions from those of the first form, in
    nats a token; None for the first itself."""

    form: str
    perplexity: float
    kl: float | None
    tokens: int  # that were predicted


def quality(models: Mapping[str, Model], text: str = TEXT) -> tuple[Quality, ...]:
    """The perplexity of `text`, read in rows of 256 tokens and 2,048 at most, under each form of one model, and the
    mean of KL(first || form) over its tokens.

    Raises InputError where the model does not predict next tokens, has no tokenizer, or the text has fewer than two
    tokens.
    """
    first, *_ = models.values()
    if (why := why_not(first)) is not None:
        raise InputError(f"no perplexity: {why}")
    ids = first.ids([text])[0][:MOST]
    if len(ids) < 2:
        raise InputError(f"a perplexity needs a text of two tokens or more; this one has {len(ids)}")
    width = min(WINDOW, first.spec.context or WINDOW)
    rows = [ids[start : start + width] for start in range(0, len(ids), width)]
    rows = [row for row in rows if len(row) > 1]
    loss, divergence = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0)
    for row in rows:
        reference: Tensor | None = None
        for form, model in models.items():
            (scores,) = run(model, [row], None)
            scores = scores[:-1]
            loss[form] -= float(scores.gather(1, torch.tensor(row[1:], device=scores.device)[:, None]).sum())
            reference = scores if reference is None else reference
            divergence[form] += float((reference.exp() * (reference - scores)).sum())
    tokens = sum(len(row) - 1 for row in rows)
    names = list(models)
    return tuple(
        Quality(form, math.exp(loss[form] / tokens), None if form == names[0] else divergence[form] / tokens, tokens)
        for form in names
    )


def why_not(model: Model) -> str | None:
    """Why a model has no perplexity; None where it has one."""
    if model.spec.layout != "decoder" or not isinstance(model.spec.head, LMHeadSpec):
        return f"this {model.spec.family} {model.spec.layout} does not predict the next token"
    return "the model has no tokenizer" if model.tokenizer is None else None
