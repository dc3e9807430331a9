"""The scores between two words of a text in both directions: what each asks of the other."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from triptych import arguments
from triptych.errors import InputError
from triptych.model import Model
from triptych.probe.role_texts import place, words_of
from .forward_steps import explain
from .steps import PrintedTensors, ShownTensor, Walk, WalkStep, number

COLUMNS = ("q·k", "scaled", "weight")


@arguments.checked
def explain_pair(model: Model, text: str, query: str, key: str, *, layer: int = 0, head: int = 0) -> Walk:
    """A forward as `explain` shows it, with the score of `query` for `key` beside that of `key` for `query`.

    The pair is a step behind the softmax of the first self-attention, in which a word of several tokens stands for its
    last.  A word that occurs more than once is written `bank@2`.  Raises InputError as `explain`, for a word that is
    not in the text, and for one word twice.
    """
    walk = explain(model, text, layer=layer, head=head)
    _, words = words_of(text, model.tokenizer)
    first, second = place(query, words)[-1], place(key, words)[-1]
    if first == second:
        raise InputError(f"{query!r} and {key!r} are the same place of the text; give two words")
    at = next(i for i, step in enumerate(walk.steps) if step.makes[0].name.endswith("attn.pattern"))
    pattern = walk.steps[at].makes[0]
    printed = {shown.name: shown for step in walk.steps[: at + 1] for shown in step.makes}
    under = pattern.name.removesuffix("pattern")
    leaves = [f"{under}{leaf}" for leaf in ("products", "scaled", "pattern")]
    places = (first, second), (second, first)

    def both(values: list[Tensor]) -> Tensor:
        return torch.stack([torch.stack([one[head][pair] for one in values]) for pair in places])

    def again(g: PrintedTensors) -> Tensor:
        return both([g[name] for name in leaves])

    values = both([printed[name].value for name in leaves])
    labels = [f"{query} → {key}", f"{key} → {query}"]
    pair = ShownTensor(f"{under}pair", "s", "pairs ·", values, labels, COLUMNS)
    step = WalkStep(
        walk.steps[at].part, "Two words", "s_ij = q_i · k_j,  s_ji = q_j · k_i",
        _meaning(query, key, values), [pair], again,
    )  # fmt: skip
    (there, _, weight), (back, _, weight_back) = values.tolist()
    outcome = (
        f"{query} → {key}: score {there:.3g}, weight {number(weight)}; {key} → {query}: score {back:.3g}, weight "
        f"{number(weight_back)}; {walk.outcome}"
    )
    return replace(walk, steps=[*walk.steps[: at + 1], step, *walk.steps[at + 1 :]], outcome=outcome)


def _meaning(query: str, key: str, values: Tensor) -> str:
    (there, _, weight), (back, _, weight_back) = values.tolist()
    if abs(there - back) > 1e-4 * max(abs(there), abs(back)):
        text = "The two scores differ: a token asks with its query and answers with its key, which are different maps."
    else:
        text = "The two scores are equal in this run, which the definition does not require."
    for asks, asked, one in ((query, key, weight), (key, query, weight_back)):
        text += f" The mask hides “{asked}” from “{asks}”." * (one == 0)
    return text
