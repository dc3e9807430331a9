"""A page without a model: attention of matrices that the reader edits, every number shown and computed again."""

from __future__ import annotations

from triptych.attention import attention_pattern
from triptych.explain.examples import worked
from triptych.page.maps import Json
from triptych.page.render import render
from triptych.page.sections import PlaygroundSection, Prose

#: The lectures' worked examples (`triptych explain --example`) that give or compute Q, K and V of a printable size.
EXAMPLES = ("L2.example-1", "L2.1", "L0.2.6", "L4.12.3", "L4.15")
_TEXT = """\
Each number of Q, K and V can be changed, and all results below are computed again at once. Weights are the softmax of \
the scores over the keys, and each row of the output is the weighted sum of the values. With the causal mask the \
queries are at the last positions, and a query sees the keys up to its own position.

The additive score of Bahdanau et al. (2015) is computed from the same vectors: w · tanh(W_q q + W_k k). It is not \
divided by √d. It begins with the identity for both matrices and ones for w; these can be changed as well."""


def playground() -> str:
    """One offline HTML page in which Q, K and V, the mask, the scale and the temperature are edited by hand.

    Its examples are those of the lectures, with the numbers that `triptych.explain.worked` has.
    """
    examples = [_example(name) for name in EXAMPLES]
    sections = (Prose("What it shows", _TEXT), PlaygroundSection("Attention by hand", examples))
    return render("Attention by hand", sections, subtitle="A playground without a model")


def _example(name: str) -> Json:
    """The rows of Q, K and V of a worked example, and whether its weights are those with the scale 1/√d."""
    walk = worked(name)
    made = [one for step in walk.steps for one in step.makes]
    values = {one.symbol: one.value for one in reversed(made)}  # the first of each symbol
    q, k = values["Q"], values["K"]
    pattern = values["p"].reshape(len(q), len(k)).to(q.dtype)
    scaled = bool(pattern.allclose(attention_pattern(q, k), atol=1e-6))
    rows = {symbol: values[symbol].tolist() for symbol in "QKV"}
    return {"name": name, "about": walk.title, "scaled": scaled, **rows}
