"""Letters, titles and explanations for a reader, by the sites and operations of a step; those of
attention's own steps stand with their numbers in `attention_steps.py`."""

from collections.abc import Sequence

from .expressions import BENDS, NORMS, ComputedValue
from .steps import ShownTensor

SYMBOLS = {
    "in": "h", "q_rot": "q", "k_rot": "k", "gate": "g", "up": "u", "act": "a", "router": "r", "out": "o", "final": "h",
    "resid_mid": "x", "resid_post": "x", "embed": "x", "q": "q", "k": "k", "v": "v", "z": "z",
}  # fmt: skip
AXES = {
    "q": "N H·K", "k": "N G·K", "v": "N G·V", "gate": "N F", "up": "N F", "act": "N F", "router": "N E",
    "q by head": "H T K", "k by head": "G S K", "v by head": "G S V", "q_rot": "H T K", "k_rot": "G S K",
    "z": "H T V", "z side by side": "N H·V",
}  # fmt: skip
SUBLAYERS = {"attn": "attention", "cross": "cross-attention", "mlp": "MLP", "branch": "convolution"}
ADDED = {
    "attn": "what attention computed", "cross": "what was read of the source", "mlp": "what the MLP computed",
    "branch": "what the convolution computed",
}  # fmt: skip
MAPS = {
    "q": "Projections", "k": "Projections", "v": "Projections", "gate": "Widen", "up": "Widen", "router": "Router",
}  # fmt: skip
TITLES = {
    "split_heads": "Heads", "merge_heads": "Concatenation", "rotate": "Rotation", "add": "Residual",
    "conv1d": "Convolution", **dict.fromkeys((*BENDS, "multiply"), "Activation"), **dict.fromkeys(NORMS, "Norm"),
}  # fmt: skip
MEANINGS = {
    "Embedding": "Each id selects its row of a learned table",
    "Norm": "The residual stream itself stays as it is: only what this part reads is brought to one scale.",
    "Final norm": "The vector of every token is brought to one scale before the head reads it.",
    "Projections": "Three linear maps of each token: queries are compared with keys, and values are what is passed on.",
    "Rotation": "Each pair of dimensions turns by position × its own speed, so q·k depends on the distance.",
    "Norm of each head": "The queries and keys of each head are brought to one scale.",
    "Output projection": "One linear map mixes the results of the heads into the width of the residual stream.",
    "Narrow": "Back to the width of the residual stream.",
    "Convolution": "Each token and its neighbours, as they entered the block.",
    "Scale": "Every number is multiplied by a constant.",
}


def leaf(computed: ComputedValue) -> str:
    return computed.name.rpartition(".")[2]


def symbol(computed: ComputedValue) -> str:
    """The letter of a value in formulas."""
    if computed.name.endswith("branch.out"):
        return "c"
    if any(part.op == "add" for part in computed.value.chain()):
        return "x"
    return SYMBOLS.get(leaf(computed).split(" ")[0], "y")


def title(computed: ComputedValue) -> str:
    """By the operations of a step, the innermost first."""
    names = [part.op for part in computed.value.chain() if not part.constant]
    if leaf(computed) == "embed":
        return "Embedding"
    if names[-1] == "linear":
        if leaf(computed) == "out":
            return "Narrow" if computed.name.endswith("mlp.out") else "Output projection"
        return MAPS.get(leaf(computed), "Linear map")
    titles = [TITLES.get(name, name.replace("_", " ").capitalize()) for name in reversed(names)]
    if "conv1d" in names:
        return "Convolution"
    title = " and ".join(dict.fromkeys(titles)).capitalize()
    title = title.replace("Norm and rotation", "Norm of each head and rotation")
    return "Final norm" if leaf(computed) == "final" else title


def meaning(name: str, group: Sequence[ComputedValue], makes: Sequence[ShownTensor], sub: str) -> str:
    """A text of what the step does; `sub` is the sublayer it belongs to."""
    first, last = makes[0].value, makes[-1].value
    if name == "Heads":
        text = f"The same numbers, cut into {len(first)} heads of width {first.shape[-1]}; each attends separately."
        shared = len(first) // len(last)
        return text + (f" Every {shared} of them share one of {len(last)} groups of keys and values." * (shared > 1))
    if name == "Concatenation":
        return f"The heads side by side again, {first.shape[-1]} numbers for each token."
    if name == "Widen":
        return f"To {first.shape[-1]:,} numbers, each token separately."
    if name == "Router":
        return f"A score for each of {first.shape[-1]} experts."
    if name.startswith("Residual"):
        if sum(part.op == "add" for part in group[0].value.chain()) > 1:
            return "Added, not replaced: what the sublayers computed joins what the token already carried."
        return f"Added, not replaced: {ADDED.get(sub, 'this')} joins what the token already carried."
    if name == "Activation":
        gated = any(part.op == "multiply" for part in group[0].value.chain())
        text = "The only nonlinear function of the MLP: the others are linear maps."
        return "The gate decides, number by number, how much of u passes." if gated else text
    if name == "Projections" and sub == "cross":
        return "Queries come from the decoder; keys and values from the encoder's output, once for the whole text."
    if name == "Embedding":
        placed = any("positions" in part.inputs.values() for computed in group for part in computed.value.chain())
        end = ", and a vector for its position is added." if placed else "; positions enter later."
        return MEANINGS[name] + end
    parts = [name] if name in MEANINGS else [part[0].upper() + part[1:] for part in name.split(" and ")]
    return " ".join(MEANINGS[part] for part in parts if part in MEANINGS)
