"""Independent arithmetic: the operations of a program computed again, to check the values of the forward.

Nothing here calls what it checks: norms are not torch's, a rotation is a product of complex numbers, softmax is exp
over its sum, and an operation without a function here is computed by its equation in the table, as it is printed.
Values with heads are `[H, N, K]` here, heads first, as they are printed.
"""

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from triptych import ops
from triptych.errors import InputError


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b"""
    out = torch.einsum("...i,oi->...o", x.to(weight.dtype), weight)
    return out if bias is None else out + bias


def conv1d(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """Every token of `[T, D]` from its neighbours within the kernel, one matrix of `[D, D, kernel]` for each of them;
    zeros beyond the ends."""
    kernel = weight.shape[2]
    padded = torch.nn.functional.pad(x, (0, 0, kernel // 2, kernel // 2))
    shifted = [padded[j : j + len(x) : stride] for j in range(kernel)]
    return bias + sum(torch.einsum("ti,oi->to", shifted[j], weight[..., j]) for j in range(kernel))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    out = centred / ((centred * centred).mean(-1, keepdim=True) + eps) ** 0.5 * weight
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps) ** 0.5 * (weight + offset)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Φ(x), or its tanh form (Hendrycks & Gimpel 2016)."""
    if approximate == "tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Each pair of dimensions of `[H, N, K]` as a complex number, turned by its angle (Su et al. 2021)."""
    half = cos.shape[-1]
    turned = x.clone()
    step, apart = (1, half) if pairing == "half" else (2, 1)
    a = torch.arange(half) * step
    b = a + apart
    z = torch.complex(x[..., a], x[..., b]) * torch.complex(cos, sin)
    turned[..., a], turned[..., b] = z.real, z.imag
    return turned


def softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """exp(s) / Σ exp(s), a head's sink in the sum where it has one; 0 for a query that sees no key."""
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    e = torch.exp(scores - largest)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None] - largest)
    return e / total.masked_fill(total == 0, 1.0)


def split_heads(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.stack(x.split(shape[-1], dim=-1))


def pool(x: Tensor, mode: str) -> Tensor:
    """One vector of one row `[T, D]`."""
    return {"mean": x.sum(0) / len(x), "first": x[0], "last": x[-1]}[mode]


def l2_normalize(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True) ** 0.5


def choice(scores: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts that each token goes to, and their weights."""
    weights, chosen = softmax(scores).topk(top_k)
    return chosen, weights / weights.sum(-1, keepdim=True) if normalize else weights


def grouped(x: Tensor, heads: int) -> Tensor:
    """`[G, S, K]` as each of H heads reads it: head h reads group h·G//H.  A matrix belongs to one head."""
    return x if x.dim() == 2 else x[[h * len(x) // heads for h in range(heads)]]


REFERENCE: dict[str, Callable[..., Tensor]] = {
    "linear": linear, "conv1d": conv1d, "layer_norm": layer_norm, "rms_norm": rms_norm, "rotate": rotate, "pool": pool,
    "split_heads": split_heads, "merge_heads": lambda x: torch.cat(list(x), dim=-1), "gelu": gelu,
    "l2_normalize": l2_normalize, "cast": lambda x, dtype: x,
}  # fmt: skip
"""By the name of an operation in `triptych.ops`."""

_PRINTED = "printed as what it gives these tokens, and not computed again"
_IN_STEPS = "computed again in several steps of its own (`attention_steps.py`, `from_program.py`)"
NOT_REFERENCE: dict[str, str] = {
    **dict.fromkeys(("embedding", "sinusoids", "rotation_cos", "rotation_sin"), _PRINTED),
    **dict.fromkeys(("attend", "extend", "experts", "alibi_bias", "t5_bias", "disentangled_bias"), _IN_STEPS),
    **dict.fromkeys(("reached_table", "reached_row"), _IN_STEPS),
    "patches": "it explains texts and sounds, not images",
}
"""Why an operation has no function here, by its name."""


def run(op: str, tensors: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> Tensor:
    """An operation of a program.  Raises InputError for one that is not recomputed here."""
    operation = ops.OPERATIONS[op]
    arguments = {key: value for key, value in attributes.items() if key in operation.arguments} | dict(tensors)
    if op in REFERENCE:
        return REFERENCE[op](**arguments)
    if (equation := parsed(operation.equation)) is None:
        raise InputError(f"explain does not recompute the operation {op!r}")
    # What `parsed` lets through is arithmetic of these names alone.
    value: Tensor = eval(compile(equation, op, "eval"), {"__builtins__": {}} | _FUNCTIONS | arguments)
    return value


# ---------------------------------------------------------------- equations of the table


def _tanh(x: Tensor) -> Tensor:
    return 1 - 2 / (torch.exp(2 * x) + 1)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "tanh": _tanh, "exp": torch.exp, "σ": lambda x: 1 / (1 + torch.exp(-x)), "max": lambda x, least: x.clamp(min=least),
    "abs": lambda x: torch.maximum(x, -x),
}  # fmt: skip


def parsed(equation: str) -> ast.Expression | None:
    """An equation of the table as a tree of `+ - · / ² | |`, names, numbers and functions of `_FUNCTIONS`; None for one
    that says more."""
    absolute = re.sub(r"\|([^|]+)\|", r"abs(\1)", equation)
    try:
        tree = ast.parse(absolute.replace("·", "*").replace("²", "**2"), mode="eval")
    except SyntaxError:
        return None
    return tree if all(map(_known, ast.walk(tree))) else None


def _known(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
    return isinstance(
        node,
        ast.Expression | ast.BinOp | ast.Name | ast.Constant | ast.operator | ast.UnaryOp | ast.USub | ast.expr_context,
    )
