"""What the boxes of a drawing and of the live page are called, and what they do; most of it stands in the table of
operations."""

from __future__ import annotations

import re

from triptych import ops
from triptych.draw.graph import START, Box

Words = tuple[str, str]

_HEADS_JOINED = "Joins the heads' results and brings them back to the width of the stream."
LINEAR: dict[str, Words] = {
    "q": ("Queries", "Its vector times the query matrix, split into heads; compared with the keys."),
    "k": ("Keys", "Each token's vector times the key matrix, split into heads; compared with queries."),
    "v": ("Values", "Each token's vector times the value matrix, split into heads; averaged by the weights."),
    "attn.out": ("Output projection", _HEADS_JOINED),
    "cross.out": ("Output projection", _HEADS_JOINED),
    "gate": ("Gate", "One number for every neuron, by which the neuron's value is multiplied after the activation."),
    "up": ("Up projection", "Maps each vector to one number for every neuron of the MLP."),
    "mlp.out": ("Down projection", "Maps the neurons back to the width of the residual stream."),
    "router": ("Router", "Scores the experts; each token is computed by those with the best scores."),
    "logits": (
        "Unembedding", "Compares the vector with every token of the vocabulary: one number, a logit, for each."
    ),
}  # fmt: skip
PARTS: dict[str, tuple[str, str, str]] = {
    "scores": (
        "Scores", "The dot product of this token's query with every key it may see, scaled; then the position's bias "
        "and the mask.", "scale · q kᵀ (+ bias), masked",
    ),
    "softmax": (
        "Softmax", "Turns the scores of each row into weights that are positive and sum to 1.",
        "exp(score) / Σ exp(score)",
    ),
    "mix": ("Weighted sum", "Adds up the values of the tokens, each times its weight.", "Σ weight · v"),
}  # fmt: skip


def words_of(box: Box) -> Words:
    """The title of a box, and what it does."""
    site, weight = box.site or "", box.step.weights.get("weight", "")
    if box.part is not None:
        return PARTS[box.part][:2]
    if box.kind == "module":
        return "Module", f"{box.step.attributes['module']} runs as a module."
    operation = ops.OPERATIONS[box.kind]
    if box.kind == "embedding":
        if "position" in weight:
            return "Position embedding", "Looks up the row of each position."
        if "type" in weight:
            first = "Looks up the row of the token type, first or second sentence; here the first."
            return "Token type embedding", first
        return "Token embedding", "Looks up the row of each token: the same row at every position."
    if box.kind == "linear":
        for leaf, words in LINEAR.items():
            if site == leaf or site.endswith(f".{leaf}"):
                return words
        return f"Linear ({weight.split('.')[-2]})", operation.description
    if box.kind == "rotate":
        return "Rotate queries" if site.endswith("q_rot") else "Rotate keys", operation.description
    if box.kind == "add" and box.layer == START and re.search(r"(^|\.)embed$|^$", site):
        return operation.label, "Adds the embeddings."
    return operation.label, operation.description


def equation_of(box: Box) -> str:
    """What a box computes."""
    return PARTS[box.part][2] if box.part is not None else ops.OPERATIONS[box.kind].equation
