"""Letters, titles and explanations for a reader, by the sites and operations of a step; those of
attention's own steps stand with their numbers in `attention_steps.py`.  Fixed ones are in `step_texts.toml`."""

from collections.abc import Mapping, Sequence

from triptych.files import tables_of
from .expressions import BENDS, NORMS, ComputedValue
from .steps import ShownTensor

_TEXTS: Mapping[str, Mapping[str, str]] = tables_of(__file__)
SUBLAYERS, AXES = _TEXTS["sublayers"], _TEXTS["axes"]
TITLES = {
    **_TEXTS["titles"], **dict.fromkeys((*BENDS, "multiply"), "Activation"), **dict.fromkeys(NORMS, "Norm"),
}  # fmt: skip
MEANINGS = _TEXTS["meanings"]


def leaf(computed: ComputedValue) -> str:
    return computed.name.rpartition(".")[2]


def symbol(computed: ComputedValue) -> str:
    """The letter of a value in formulas."""
    if computed.name.endswith("branch.out"):
        return "c"
    if any(part.op == "add" for part in computed.value.chain()):
        return "x"
    return _TEXTS["symbols"].get(leaf(computed).split(" ")[0], "y")


def title(computed: ComputedValue) -> str:
    """By the operations of a step, the innermost first."""
    names = [part.op for part in computed.value.chain() if not part.constant]
    if leaf(computed) == "embed":
        return "Embedding"
    if names[-1] == "linear":
        if leaf(computed) == "out":
            return "Narrow" if computed.name.endswith("mlp.out") else "Output projection"
        return _TEXTS["maps"].get(leaf(computed), "Linear map")
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
        return f"Added, not replaced: {_TEXTS['added'].get(sub, 'this')} joins what the token already carried."
    if name == "Activation":
        gated = any(part.op == "multiply" for part in group[0].value.chain())
        text = "The only nonlinear function of the MLP: the others are linear maps."
        return "The gate decides, number by number, how much of u passes." if gated else text
    if name == "Projections" and sub == "cross":
        return "Queries come from the decoder; keys and values from the encoder's output, once for the whole text."
    if name == "Embedding":
        placed = any("positions" in part.inputs.values() for computed in group for part in computed.value.chain())
        return MEANINGS[name] + (", and a vector for its position is added." if placed else ".")
    parts = [name] if name in MEANINGS else [part[0].upper() + part[1:] for part in name.split(" and ")]
    return " ".join(MEANINGS[part] for part in parts if part in MEANINGS)
