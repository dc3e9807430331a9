"""The lectures' worked examples, step by step with their own numbers, compared with the figures they print or, where
they print none, with figures computed independently."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from triptych import families, nn, spec
from triptych.arguments import checked
from triptych.attention import attend, attention_pattern
from triptych.count import count
from triptych.errors import InputError, nearest
from triptych.families.named_configs import NAMED
from triptych.model import Model
from . import examples_by_hand, reference_ops
from .examples_by_hand import REFERENCE, Example, attention_steps, inputs_step, matrices, printed_step
from .forward_steps import explain
from .steps import PrintedTensors, ShownTensor, Walk, WalkStep

QWEN3_4B = dict(NAMED["qwen3-4b"])


@checked
def worked(name: str) -> Walk:
    """A worked example by its name, however dotted or capitalized.  Raises InputError, listing them, for another."""
    known = {_plain(one): one for one in EXAMPLES}
    if _plain(name) not in known:
        raise InputError(f"no example {name!r}{nearest(name, EXAMPLES)}; they are {', '.join(EXAMPLES)}")
    listed = known[_plain(name)]
    subject, make = EXAMPLES[listed]
    steps, outcome = make()
    return Walk(f"{listed}: {subject}", [("Example", listed), ("Shows", subject)], steps, outcome)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _block(width: int, heads: int, tokens: int, hidden: spec.MLPSpec | spec.GLUSpec, mask: spec.Mask) -> list[WalkStep]:
    """The steps of a pre-norm block of random weights, under RMSNorm."""
    norms = spec.NormsSpec(pre=spec.RMSNormSpec(width=width))
    block = spec.BlockSpec(attn=spec.attention(width, heads), mlp=hidden, attn_norm=norms, mlp_norm=norms)
    vocab = 5
    stack = spec.StackSpec(
        embed=spec.EmbedSpec(vocab=vocab, width=width), kinds={"self": spec.KindSpec(mask=mask)}, blocks=(block,)
    )
    head = spec.TokenHeadSpec(classes=spec.LinearSpec(inputs=width, outputs=2))
    model = Model(nn.new(spec.ModelSpec(family="example", encoder=stack, head=head)))
    return list(explain(model, [i % vocab for i in range(tokens)]).steps)


def _layer(width: int, heads: int, tokens: int) -> Example:
    """Shapes through one attention layer, of all heads together and of each."""
    steps = _block(width, heads, tokens, spec.mlp(width, 1, "relu"), spec.full())
    end = next(i for i, step in enumerate(steps) if step.title == "Output projection")
    each = width // heads
    trace = [(tokens, width), (heads, tokens, each), (heads, tokens, tokens), (tokens, width)]
    shapes = " → ".join(str(shape) for shape in trace)
    return steps[: end + 1], f"{shapes}; each head: Q, K, V {tokens}×{each}, scores {tokens}×{tokens}"


def _swiglu_block() -> Example:
    """L0 exercise 2: multi-head attention, SwiGLU, RMSNorm and residuals."""
    width, tokens, hidden = 256, 16, 683
    steps = _block(width, 8, tokens, spec.glu(width, hidden, "silu"), spec.full())
    end = max(i for i, step in enumerate(steps) if step.title == "Residual")
    inside = steps[: end + 1]
    return inside, f"({tokens}, {width}) in, ({tokens}, {hidden}) inside the MLP, ({tokens}, {width}) out"


def _normal(**rows: int) -> list[ShownTensor]:
    """Matrices by their symbols, of so many rows and `width` columns, with independent entries of variance 1."""
    draw, width = np.random.default_rng(0), rows.pop("width")
    return matrices(**{symbol: draw.standard_normal((count, width)) for symbol, count in rows.items()})


def _cross(queries: int, keys: int) -> Example:
    """Cross-attention: queries from one sequence, keys and values from another."""
    width = 8
    given = _normal(Q=queries, K=keys, V=keys, width=width)
    why = f"{queries} target tokens and {keys} source tokens, drawn from NumPy's default_rng(0)."
    return [
        inputs_step(why, *given),
        *attention_steps(given),
    ], f"scores ({queries}, {keys}), output ({queries}, {width})"


def _shapes_of_scores() -> Example:
    own, ((inputs, *cross), _) = _layer(512, 8, 10), _cross(10, 15)
    return [*own[0], replace(inputs, part="Cross-attention"), *cross], "scores 10×10 in each head, and 10×15"


def _entropy() -> Example:
    """L4 exercise 11: the entropy of a row of weights with and without 1/√d."""
    size = 64
    q, k = _normal(Q=size, K=size, width=size)
    steps, figures = [inputs_step("64 queries and 64 keys of width 64, drawn from NumPy's default_rng(0).", q, k)], []
    for name, scale, formula, figure, about in (
        ("no scale", 1.0, "p = softmax(q kᵀ)", 0.6108, "About an even choice among 1.8 keys."),
        ("1/√d", size**-0.5, "p = softmax(q kᵀ / √64)", 3.6809, "Even weights would have ln 64 = 4.1589."),
    ):
        pattern = ShownTensor(f"pattern, {name}", "p", "T S", attention_pattern(q.value, k.value, scale=scale))
        total = ShownTensor(f"row sums, {name}", "Σ p", "T", pattern.value.sum(-1))
        entropy = ShownTensor(f"entropy, {name}", "H", "·", _row_entropy(pattern.value))

        def weights(g: PrintedTensors, scale: float = scale, size: int = size) -> list[Tensor]:
            return [reference_ops.softmax(g["Q"] @ g["K"].T * scale), torch.ones(size)]

        def mean(g: PrintedTensors, of: str = pattern.name) -> Tensor:
            return _row_entropy(g[of])

        steps += [
            WalkStep("Weights", f"Softmax, {name}", formula, "Every row sums to 1.", [pattern, total], weights),
            WalkStep(
                "Entropy", f"Mean entropy, {name}", "H = mean over rows of -Σ p ln p", "In nats.", [entropy], mean
            ),
        ]
        figures.append(printed_step("H", torch.tensor([figure]), about, part=REFERENCE, of=entropy.name, decimals=4))
    return [*steps, *figures], "shape (64, 64), rows sum to 1, entropy 0.6108 nats without 1/√d and 3.6809 with it"


def _row_entropy(pattern: Tensor) -> Tensor:
    """Mean over the rows, as a tensor of one number."""
    mean: Tensor = -torch.special.xlogy(pattern, pattern).sum(-1).mean()
    return mean[None]


def _beside_pytorch() -> Example:
    """L0 exercise 3 and L4 exercise 16: each path of `attend` beside PyTorch's kernel, which is forced to be flash."""
    noise = torch.Generator().manual_seed(0)
    axes = {"Q": "H T K", "K": "H S K", "V": "H S V"}
    q, k, v = (ShownTensor(x, x, letters, torch.randn(4, 16, 8, generator=noise)) for x, letters in axes.items())
    steps = [inputs_step("Four heads of width 8 on 16 tokens.", q, k, v)]
    for name, mask in (("no mask", spec.full()), ("causal", spec.causal())):
        for path in ("flash", "materialized", "reference"):
            z = attend(q.value[None], k.value[None], v.value[None], mask=mask, path=path)[0]
            shown = ShownTensor(f"z, {path}, {name}", "z", "H T V", z)

            def theirs(g: PrintedTensors, causal: bool = name == "causal") -> Tensor:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    z = scaled_dot_product_attention(g["Q"][None], g["K"][None], g["V"][None], is_causal=causal)
                    return z[0]

            why = "Recomputed by torch's scaled_dot_product_attention with only its flash kernel allowed."
            steps.append(WalkStep(f"attend, {name}", path, "z = softmax(q kᵀ / √8 + m) v", why, [shown], theirs))
    return steps, "every path agrees with PyTorch's flash kernel to 1e-5"


def _cache() -> Example:
    groups = (8, 32)
    specs = [families.read_config(QWEN3_4B | {"num_key_value_heads": each}) for each in groups]
    counted = [count(one).cache_bytes(4096, dtype="fp16") for one in specs]
    shown = ShownTensor("bytes", "bytes", "· ·", torch.tensor([counted]), columns=["8 groups", "32 heads"])

    def once_more(g: PrintedTensors) -> Tensor:
        return torch.tensor([[2 * 36 * each * 128 * 4096 * 2 for each in groups]])

    formula = "2 (K and V) × 36 layers × groups × 128 × 4,096 positions × 2 bytes"
    why = "Grouping keeps a quarter of what a key and value for every head would take."
    step = WalkStep("Bytes", "Cache of Qwen3-4B", formula, why, [shown], once_more)
    mebibytes = ShownTensor("MiB", "MiB", "groups ·", shown.value.T / 2**20, shown.columns)
    divided = WalkStep("Bytes", "In MiB", "MiB = bytes / 2²⁰", "", [mebibytes], lambda g: g["bytes"].T / 2**20)
    lecture = "The lecture prints the cache of 8 groups, as 576 MB: they are of 2²⁰ bytes each."
    expected = printed_step("MiB", torch.tensor([[576.0]]), lecture, [0])
    return [step, divided, expected], f"{counted[0]:,} bytes, 576 MiB"


def _quadratic() -> Example:
    tokens = (2048, 32_768)
    parts = [count(families.read_config(QWEN3_4B)).flops(t) for t in tokens]
    flops = torch.tensor([[one.pop("scores") for one in parts]])
    shown = ShownTensor("flops", "FLOPs", "· T", flops, columns=["2,048", "32,768"])

    def once_more(g: PrintedTensors) -> Tensor:
        return torch.tensor([[36 * 32 * (2 * t * t * 128 + 2 * t * t * 128) for t in tokens]])

    ratio = ShownTensor("ratio", "ratio", "·", torch.tensor([flops[0, 1] / flops[0, 0]]))
    short, long = (sum(one.values()) for one in parts)
    linear = ShownTensor("ratio of the rest", "ratio", "·", torch.tensor([long / short]))
    steps = [
        WalkStep("FLOPs", "Scores and sums", "36 layers × 32 heads × (2 T² K + 2 T² V), K = V = 128",
                 "Every query against every key, in the shapes of Qwen3-4B.", [shown], once_more),
        WalkStep("FLOPs", "Ratio", "32,768² / 2,048²", "Sixteen times the tokens, 256 times the work.", [ratio],
                 lambda g: g["flops"][0, 1:] / g["flops"][0, :1]),
        WalkStep("FLOPs", "Ratio of all other products", "32,768 / 2,048", "They are linear in T.", [linear],
                 lambda g: torch.tensor([32_768 / 2048])),
    ]  # fmt: skip
    return steps, "256 for scores and weighted sums, 16 for all other products"


EXAMPLES: dict[str, tuple[str, Callable[[], Example]]] = {
    "L0.2": ("a block: 8 heads, SwiGLU, RMSNorm, residuals; D 256, T 16", _swiglu_block),
    "L0.2.6": ("attention of four tokens by hand", examples_by_hand.four_tokens),
    "L0.2.7": ("scores in two directions: book and teacher", examples_by_hand.two_directions),
    "L0.3": ("every path of attend beside PyTorch's flash kernel", _beside_pytorch),
    "L0.softmax": ("a softmax with a clear winner", examples_by_hand.clear_winner),
    "L0.2.9": ("the KV cache of Qwen3-4B at 4,096 positions", _cache),
    "L1.sat": ("the attention of “sat”", examples_by_hand.attention_of_sat),
    "L1.tie": ("two equal scores get equal weights", examples_by_hand.equal_scores),
    "L2.example-1": ("attention of two tokens", examples_by_hand.two_tokens),
    "L2.example-2": ("shapes through 2 heads: D 8, T 3", lambda: _layer(8, 2, 3)),
    "L2.example-3": ("the causal mask, padding, and both", examples_by_hand.masks),
    "L2.1": ("practice 1: queries, keys and values of one number", examples_by_hand.one_dimension),
    "L2.2": ("practice 2: shapes through 16 heads: D 1,024, T 128", lambda: _layer(1024, 16, 128)),
    "L4.6": ("shapes of scores: 10 tokens, and 10 over 15", _shapes_of_scores),
    "L4.9": ("attention at 32,768 tokens beside 2,048", _quadratic),
    "L4.11": ("entropy with and without 1/√d at d 64", _entropy),
    "L4.12.3": ("a toy drawn by NumPy, with and without the causal mask", examples_by_hand.drawn_by_numpy),
    "L4.14": ("shapes at every step: D 512, 8 heads, T 16", lambda: _layer(512, 8, 16)),
    "L4.15": ("cross-attention of 5 over 7 tokens, with its map", lambda: _cross(5, 7)),
    "L4.pairs": ("keys and values are paired by position", examples_by_hand.paired_by_position),
    "L4.shapes": ("shapes through 8 heads: D 512, T 10", lambda: _layer(512, 8, 10)),
}
