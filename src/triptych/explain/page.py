"""Offline pages: the steps of a forward, and attention of matrices that the reader edits, without a model."""

import re

from triptych.attention import attention_pattern
from triptych.errors import InputError
from triptych.page import (
    AttentionMap,
    Facts,
    Grid,
    PlaygroundSection,
    Prose,
    Section,
    StepsSection,
    TextAttentionSection,
    Unfolding,
    WordStates,
    render,
)
from triptych.page.attention_maps import StackName
from .examples import worked
from .steps import ShownTensor, Walk, name_of, number

#: The lectures' worked examples (`triptych explain --example`) that give or compute Q, K and V of a printable size.
EXAMPLES = ("L2.example-1", "L2.1", "L0.2.6", "L4.12.3", "L4.15")
_TEXT = """\
Each number of Q, K and V can be changed, and all results below are computed again at once. Weights are the softmax of \
the scores over the keys, and each row of the output is the weighted sum of the values. With the causal mask the \
queries are at the last positions, and a query sees the keys up to its own position.

The additive score of Bahdanau et al. (2015) is computed from the same vectors: w · tanh(W_q q + W_k k). It is not \
divided by √d. It begins with the identity for both matrices and ones for w; these can be changed as well."""

_OVER_A_TEXT = """\
The attention of the words that you write, matrix by matrix. All weights and all vectors of words are random numbers, \
so that a pattern has no meaning: what is seen is what the sizes, the temperature and the mask do. Equal words have \
equal vectors, and there are no positions. The page that triptych page writes shows the same of a trained model, with \
its own weights."""


def maps(walk: Walk) -> list[AttentionMap]:
    """The attention map of the head that each softmax of a walk shows.  Raises InputError where it has none."""
    drawn = []
    for step in walk.steps:
        for shown in step.makes:
            if not shown.name.endswith("pattern"):
                continue
            weights = (shown.value if shown.value.dim() == 3 else shown.value[None])[[shown.head]].float().numpy()
            queries, keys = (list(names) for names in (shown.labels, shown.columns))
            queries, keys = (
                names or list(map(str, range(count)))
                for names, count in zip((queries, keys), weights.shape[1:], strict=True)
            )
            block = re.search(r"blocks\.(\d+)\.", shown.name)
            crossed = "cross" in shown.name or (block is None and len(queries) != len(keys))
            stack: StackName = "cross" if crossed else "encoder" if "encoder" in shown.name else "decoder"
            drawn.append(AttentionMap(stack, int(block[1]) if block else 0, queries, keys, weights, [shown.head]))
    if not drawn:
        raise InputError(f"{walk.title} has no attention map to draw; save an .html page instead")
    return drawn


def sections(walk: Walk) -> list[Section]:
    """The sections of a page: what was run, then each part of the model with its steps."""
    parts: dict[str, list[Unfolding]] = {}
    for place, (step, error) in enumerate(zip(walk.steps, walk.errors, strict=True), 1):
        grids = [_grid(one) for one in (*step.uses, *step.makes)]
        difference = f"largest difference {error:.1e}" if error else "no difference"
        check = f"Recomputed from the tensors above: {difference}."
        parts.setdefault(step.part, []).append(
            Unfolding(place, step.title, step.formula, step.meaning, grids, check, open=place == 1)
        )
    facts = [*walk.facts, ("Result", walk.outcome), ("Check", walk.verdict)]
    return [Facts("What was run", facts), *(StepsSection(part, items) for part, items in parts.items())]


def _grid(shown: ShownTensor) -> Grid:
    """A tensor as a page prints it."""
    part = shown.excerpt()
    shade = [part.with_gap(row, 0.0) for row in part.values] if shown.name.endswith("pattern") else None
    cells = [part.with_gap([number(x) for x in row], "…") for row in part.values]
    rows, columns = list(zip(part.rows, cells, strict=True)), part.with_gap(part.columns, "…")
    named = bool(shown.columns)
    return Grid(
        name_of(shown), shown.shape, shown.name, columns, rows, part.left_out, named, part.focus, part.gap, shade
    )


def playground() -> str:
    """One offline HTML page in which Q, K and V, the mask, the scale and the temperature are edited by hand.  Below,
    attention with random weights runs over words, with sizes and a mask that are chosen, and the stored states of one
    word in many sentences move through the layers of a pretrained model.

    Its examples are those of the lectures, with the numbers that `triptych.explain.worked` has.
    """
    examples = [_example(name) for name in EXAMPLES]
    sections = (
        Prose("What it shows", _TEXT),
        PlaygroundSection("Attention by hand", examples),
        TextAttentionSection(
            "Attention over a text", _OVER_A_TEXT, "she sat by the river bank and the bank was green",
            "he took money from the bank",
        ),
        WordStates("One word in many sentences"),
    )  # fmt: skip
    return render("Attention by hand", sections, subtitle="A playground without a model")


def _example(name: str) -> dict[str, object]:
    """The rows of Q, K and V of a worked example, and whether its weights are those with the scale 1/√d."""
    walk = worked(name)
    printed = [tensor for step in walk.steps for tensor in step.makes]
    values = {tensor.symbol: tensor.value for tensor in reversed(printed)}  # the first of each symbol
    q, k = values["Q"], values["K"]
    pattern = values["p"].reshape(len(q), len(k)).to(q.dtype)
    scaled = bool(pattern.allclose(attention_pattern(q, k), atol=1e-6))
    rows = {symbol: values[symbol].tolist() for symbol in "QKV"}
    return {"name": name, "about": walk.title, "scaled": scaled, **rows}
