"""The probability of a text: the product of the probabilities that a decoder gives each token after those before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from triptych import arguments
from triptych.errors import InputError
from triptych.model import Model
from triptych.probe.prompts import name_tokens
from triptych.spec import LMHeadSpec
from . import reference_ops
from .forward_steps import checked
from .steps import PrintedTensors, ShownTensor, Walk, WalkStep

MOST = 128  # tokens: each prefix is a forward of its own
LEAST = 700  # nats: the product of so many would be 0 in float64
PREDICTED, JOINED = "Each token after those before it", "The whole text"


@arguments.checked
def explain_probability(model: Model, text: str | Sequence[int]) -> Walk:
    """The factorization P(x) = Π P(x_t | x_<t) of a text (or ids), token by token.

    The logits of one forward are compared with those of a forward of each prefix alone, which agree only where no token
    sees a later one.  The first token is given: nothing stands before it.

    Raises InputError for a model that is no decoder with a language-model head, for a text of one token or of more than
    128, and as `explain`.
    """
    if model.spec.layout != "decoder" or not isinstance(model.spec.head, LMHeadSpec):
        raise InputError(
            f"this {model.spec.layout} does not predict each token from those before it, so its texts have no such "
            "product; give a decoder"
        )
    ids, _ = checked(model, text, 0, 0)
    if not 2 <= len(ids) <= MOST:
        raise InputError(f"the text has {len(ids)} token{'s' * (len(ids) != 1)}; give one of 2 to {MOST}")
    logits = model.logits([ids])[0][:-1].cpu()
    p = logits.double().softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    nats = float(-p.log().sum())
    each = nats / len(p)
    size = f"{float(p.prod()):.3g}" if nats < LEAST else f"e^−{nats:.0f}"
    outcome = (
        f"P = {size} after the first token: {len(p)} tokens of {each:.3f} nats each, perplexity {np.exp(each):.2f}"
    )
    facts = [("Model", model.spec.family), ("Text", text if isinstance(text, str) else " ".join(map(str, text)))]
    return Walk("The probability of a text", facts, _steps(model, ids, logits, p), outcome)


def _steps(model: Model, ids: Sequence[int], logits: Tensor, p: Tensor) -> list[WalkStep]:
    """From the tokens to their product; `logits` are those after each token but the last, and `p` is the probability of
    each but the first."""
    names, rows = name_tokens(model, ids), torch.tensor(ids)
    shown_ids = ShownTensor("ids", "ids", "N", rows, columns=names)
    after = [f"… {name}" for name in names[:-1]]
    predicted = ShownTensor("logits", "l", "N V", logits, after)
    columns = ["p", "−ln p"]
    chances = ShownTensor("p", "p", "N ·", torch.stack([p, -p.log()], 1), names[1:], columns, whole=True)
    nats = -p.log().sum()
    totals = torch.stack([p.prod(), nats, nats / len(p), (nats / len(p)).exp()])[None]
    joined = ShownTensor("P", "P", "· ·", totals, columns=["Π p", "−Σ ln p", "mean", "exp mean"])
    return [
        WalkStep(
            PREDICTED, "Tokens", "x = tokenize(text)", "The first one is given.", [shown_ids], lambda g: rows
        ),
        WalkStep(
            PREDICTED, "Logits", "l_t of the text = l_t of the tokens up to t alone",
            "One forward gives a prediction after every token; it is the same without the tokens that follow.",
            [predicted], lambda g: torch.stack([model.logits([ids[:t]])[0][-1].cpu() for t in range(1, len(ids))]),
        ),
        WalkStep(
            PREDICTED, "Probabilities", "p_t = softmax(l_(t−1))[x_t]",
            "What the softmax after the tokens before it gives the token that is there." + _likeliest(p, names[1:]),
            [chances], lambda g: _of_tokens(g, ids),
        ),
        WalkStep(
            JOINED, "Product", "P(x) = Π p_t,  −ln P(x) = Σ −ln p_t",
            "All multiplied; in logarithms a sum. Its mean is the loss of the text, and exp of that its perplexity.",
            [joined], _summed,
        ),
    ]  # fmt: skip


def _likeliest(p: Tensor, names: Sequence[str]) -> str:
    """The tokens that were predicted best and worst, in words."""
    high, low = int(p.argmax()), int(p.argmin())
    if high == low:
        return ""
    return f" Best predicted is “{names[high]}” ({float(p[high]):.3g}), worst “{names[low]}” ({float(p[low]):.3g})."


def _of_tokens(g: PrintedTensors, ids: Sequence[int]) -> Tensor:
    every = reference_ops.softmax(g["logits"])
    p = torch.stack([every[place, token] for place, token in enumerate(ids[1:])])
    return torch.stack([p, -p.log()], 1)


def _summed(g: PrintedTensors) -> Tensor:
    """The product as the exponential of the sum of logarithms."""
    nats = g["p"][:, 1].sum()
    each = nats / len(g["p"])
    return torch.stack([(-nats).exp(), nats, each, each.exp()])[None]
