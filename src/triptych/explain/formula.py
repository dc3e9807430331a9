"""What the operations of a step compute, in letters: the equations of the table with the names of what they read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from triptych import ops
from triptych.explain.expressions import Applied

FUNCTIONS = {
    "layer_norm": "norm", "rms_norm": "norm", "rotate": "rotate", "gelu": "gelu", "silu": "silu",
    "l2_normalize": "normalize",
}  # fmt: skip
"""Operations shown as a function, with their equation after it."""
LETTERS = {
    "out": "o", "project": "e", "widen": "e", "tokens": "head", "proj": "head", "classes": "c", "ends": "c", "conv": "c"
}  # fmt: skip
TABLES = {"tokens": "E", "token_types": "S", "position": "P"}


def parameter_symbol(name: str, op: str) -> str:
    """`W_q` for `decoder.blocks.0.attn.q.weight`."""
    module, _, leaf = name.rpartition(".")
    module = module.rpartition(".")[2]
    if op == "embedding":
        return TABLES.get(module, "E")
    if op.endswith("_norm"):
        return "w" if leaf == "weight" else "b"
    return f"{'W' if leaf == 'weight' else 'b'}_{LETTERS.get(module, module[0])}"


def formula(value: Applied, symbols: Mapping[str, str]) -> tuple[str, list[str]]:
    """The expression, and the definitions of the functions it uses.  `symbols` are those of printed values, and may
    hold another text for an operation, by its result."""
    definitions: dict[str, None] = {}

    def text(one: Applied | str) -> str:
        if isinstance(one, str):
            return symbols.get(one, one)
        if one.step.out[0] in symbols:
            return symbols[one.step.out[0]]
        if one.op == "cast":
            return text(one.inputs["x"])
        if one.op == "sinusoids":
            definitions[f"P = {equation(one, {})}"] = None
            return "P"
        if one.op in FUNCTIONS:
            function, sign = FUNCTIONS[one.op], "="
            if one.step.attributes.get("approximate") == "tanh":
                function, sign = f"{function}_tanh", "≈"
            definitions[f"{function}(x) {sign} {equation(one, {'x': 'x'})}"] = None
            return f"{function}({text(one.inputs['x'])})"
        return equation(one, {key: text(argument) for key, argument in one.inputs.items()})

    return text(value), list(definitions)


def equation(value: Applied, inputs: Mapping[str, str]) -> str:
    """The equation of an operation, with what its arguments are here.  Terms of absent or zero arguments are left out,
    and factors of one."""
    operation, step = ops.OPERATIONS[value.op], value.step
    out = operation.equation
    arguments: dict[str, object] = dict(step.attributes) | dict(inputs)
    arguments |= {key: parameter_symbol(name, value.op) for key, name in step.weights.items()}
    for key in operation.arguments:
        if key in value.inputs and key not in inputs:
            continue
        if (argument := arguments.get(key)) is None or argument == 0:
            out = _without_term(out, key)
        elif argument == 1:
            out = re.sub(rf"{_word(key)} ?· ?", "", out)
    bare = value.op in ("add", "embedding")

    def replaced(match: re.Match[str]) -> str:
        argument = arguments.get(match[0])
        if isinstance(argument, str):
            return f"({argument})" if " " in _outside(argument) and not bare else argument
        return f"{argument:g}" if isinstance(argument, int | float) else match[0]

    return re.sub("|".join(map(_word, operation.arguments)), replaced, out)


def _word(name: str) -> str:
    return rf"(?<![A-Za-z_]){name}(?![A-Za-z_])"


def _without_term(text: str, name: str) -> str:
    word = _word(name)
    out = re.sub(rf" \+ [^+(]*{word}[^+)]*|[^+(]*{word}[^+)]* \+ ", "", text)
    return out if out == text else re.sub(r"· \((\w+)\)$", r"· \1", out)


def _outside(text: str) -> str:
    """The text without what stands in parentheses."""
    while text != (shorter := re.sub(r"\([^()]*\)", "", text)):
        text = shorter
    return text
