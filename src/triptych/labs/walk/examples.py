"""The lectures' worked examples, step by step with their own numbers, compared with the figures they print or, where
they print none, with figures computed independently."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from triptych import families, nn, spec
from triptych.attention import attend, attention_pattern
from triptych.count import count
from triptych.errors import InputError, nearest
from triptych.labs.walk import again
from triptych.labs.walk.attending import Attending
from triptych.labs.walk.steps import Again, Printed, Shown, Step, Walk, number
from triptych.labs.walk.walking import explain
from triptych.model import Model
from triptych.spec.masks import Points

INPUTS, LECTURE, REFERENCE = "Given", "The lecture's figures", "Reference figures"
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip


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


Made = tuple[list[Step], str]


def _matrix(symbol: str, letters: str, values: object, name: str = "") -> Shown:
    return Shown(name or symbol, symbol, letters, torch.as_tensor(np.asarray(values)).to(torch.get_default_dtype()))


def _inputs(meaning: str, *shown: Shown) -> Step:
    return Step(INPUTS, "What is given", ", ".join(one.symbol for one in shown), meaning, shown, lambda g: [
        one.value for one in shown
    ])  # fmt: skip


def _printed(
    of: str,
    symbol: str,
    letters: str,
    values: Sequence[object],
    meaning: str,
    rows: Sequence[int] = (),
    part: str = LECTURE,
) -> Step:
    """Figures that the computed tensor must agree with, in the rows `rows`: the lecture's own, or for a `part` of
    REFERENCE those that the lecture does not print."""
    by = "in the lecture" if part == LECTURE else "for reference"
    title = "As printed" if part == LECTURE else "Computed independently"
    shown = Shown(f"{of} {by}", symbol, letters, torch.tensor(values))
    shown = replace(shown, labels=[str(i) for i in rows]) if rows else shown
    index = torch.tensor(list(rows) or list(range(len(values))))
    return Step(part, title, f"{symbol} = {symbol} {by}", meaning, [shown], lambda g: g[of][index])


def _attention(
    q: Shown, k: Shown, v: Shown, part: str = "Attention", prefix: str = "", **options: object
) -> list[Step]:
    names = [str(i) for i in range(len(k.value))]
    q, k = replace(q, labels=names[: len(q.value)]), replace(k, labels=names)
    return Attending(part=part, prefix=prefix, q=q, k=k, v=v, **options).steps()  # type: ignore[arg-type]


def _four_tokens() -> Made:
    x = _matrix("X", "N D", [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
    w = [
        _matrix("W_Q", "K D", [[1, 0, 1, 0], [0, 1, 0, 1]]),
        _matrix("W_K", "K D", [[0, 1, 1, 0], [1, 0, 0, 1]]),
        _matrix("W_V", "V D", [[1, 1, 0, 0], [0, 0, 1, 1]]),
    ]
    q, k, v = (_matrix(one.symbol[-1], f"N {one.letters[0]}", x.value @ one.value.T) for one in w)
    project = Step(
        "Projections", "Projections", "Q = X W_Qᵀ,  K = X W_Kᵀ,  V = X W_Vᵀ", "Rows of each W are outputs.", [q, k, v],
        lambda g: [again.linear(g["X"], g[one.name], None) for one in w],
    )  # fmt: skip
    every = "All keys are [1, 1], so every query scores all of them alike: each weight a quarter, each output the mean."
    figures = [
        _printed("pattern", "p", "T S", [[0.25] * 4] * 4, every),
        _printed("z", "z", "T V", [[1.0, 1.0]] * 4, "The mean of the four values."),
    ]
    inputs = _inputs("Four tokens of width 4, and three maps to width 2.", x, *w)
    return [inputs, project, *_attention(q, k, v), *figures], "every weight 0.25, every output [1, 1]"


def _two_tokens() -> Made:
    q, k = _matrix("Q", "T K", [[1, 0], [0, 1]]), _matrix("K", "S K", [[1, 0], [1, 1]])
    v = _matrix("V", "S V", [[1, 2], [3, 4]])
    weights, out = [[0.5, 0.5], [0.33024, 0.66976]], [[2, 3], [2.33952, 3.33952]]
    why = "The first query scores both keys alike, the second prefers the second."
    figures = [_printed("pattern", "p", "T S", weights, why), _printed("z", "z", "T V", out, "Mixed in these shares.")]
    return [
        _inputs("Two tokens of width 2.", q, k, v),
        *_attention(q, k, v),
        *figures,
    ], "output [[2, 3], [2.3395, 3.3395]]"


def _one_dimension() -> Made:
    q, k, v = (
        _matrix(name, letters, [[x] for x in values])
        for name, letters, values in (
            ("Q", "T K", [2, 0, 1]),
            ("K", "S K", [1, 3, -1]),
            ("V", "S V", [10, 20, 30]),
        )
    )
    weights = [[0.017980, 0.981690, 0.000329], [1 / 3] * 3, [0.117310, 0.866813, 0.015876]]
    figures = [
        _printed("pattern", "p", "T S", weights, "A query of 0 scores every key 0 and gives all the same weight."),
        _printed("z", "z", "T V", [[19.82349], [20], [18.98566]], "The second is the plain mean of the values."),
    ]
    inputs = _inputs("Three tokens, one number each: attention is then a softmax and a weighted mean.", q, k, v)
    return [inputs, *_attention(q, k, v, scale=1.0), *figures], "output [19.8235, 20, 18.9857]"


def _toy() -> Made:
    draw = np.random.RandomState(0)
    q, k, v = (_matrix(name, letters, draw.randn(4, 8)) for name, letters in (("Q", "T K"), ("K", "S K"), ("V", "S V")))
    first, last = [0.301029, 0.301079, 0.191134, 0.206757], [0.819516, 0.085838, 0.022843, 0.071803]
    out = [-0.047625, -0.102534, -0.363957, -0.107750, -0.207784, 0.405654, 0.424662, 0.167437]
    causal = _attention(q, k, v, "Attention with the causal mask", "causal ", mask=spec.causal())
    masked = [[0.402860, 0.597140, 0, 0]]
    figures = [
        _printed("pattern", "p", "T S", [first, last], "The first and the last query.", [0, 3], REFERENCE),
        _printed("z", "z", "T V", [out], "The first output.", [0], REFERENCE),
        _printed("causal pattern", "p", "T S", masked, "Masked, the second query sees two keys.", [1], REFERENCE),
    ]
    inputs = _inputs("Q, K and V drawn in that order from NumPy's generator seeded with 0.", q, k, v)
    return [
        inputs,
        *_attention(q, k, v),
        *causal,
        *figures,
    ], "the reference weights and outputs, with and without the mask"


def _softmax(scores: Sequence[float], figures: Sequence[float], why: str) -> Made:
    s = _matrix("s", "T S", [scores])
    p = Shown("pattern", "p", "T S", s.value.softmax(-1))
    step = Step("Softmax", "Softmax", "p = exp(s) / Σ exp(s)", why, [p], lambda g: again.softmax(g["s"]))
    expected = _printed("pattern", "p", "T S", [figures], "To the digits shown.", part=REFERENCE)
    return [_inputs("One row of scores.", s), step, expected], ", ".join(map(number, p.value[0].tolist()))


def _sat() -> Made:
    figures = [0.018559, 0.556105, 0.037373, 0.015195, 0.372768]
    return _softmax([0.8, 4.2, 1.5, 0.6, 3.8], figures, "Two high scores share most of it; none is ever quite 0.")


def _sharp() -> Made:
    figures = [0.012128, 9.1e-7, 0.987866, 4.5e-6]
    return _softmax([8.3, -1.2, 12.7, 0.4], figures, "A lead of 4.4 is a factor of e^4.4, about 81.")


def _tie() -> Made:
    s = _matrix("s", "T S", [[8.5, 42, 3.2, 42]])
    sharp, soft = (Shown(name, name, "T S", (s.value / by).softmax(-1)) for name, by in (("p", 1), ("p scaled", 8)))
    steps = [
        _inputs("One row of scores with a tie.", s),
        Step("Softmax", "Softmax", "p = softmax(s)", "Equal scores get equal weights, however large they are.",
             [sharp], lambda g: again.softmax(g["s"])),
        Step("Softmax", "Softmax over √64", "p = softmax(s / √64)", "Divided, the others keep a little.",
             [soft], lambda g: again.softmax(g["s"] / 8)),
        _printed("p", "p", "T S", [[0, 0.5, 0, 0.5]], "The lecture prints [0, .55, 0, .45], which is wrong.",
                 part=REFERENCE),
    ]  # fmt: skip
    return steps, "a tie is a half each; the lecture's .55 and .45 are wrong"


def _block(width: int, heads: int, tokens: int, hidden: spec.MLPSpec | spec.GLUSpec, mask: spec.Mask) -> list[Step]:
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


def _layer(width: int, heads: int, tokens: int) -> Made:
    """Shapes through one attention layer, of all heads together and of each."""
    steps = _block(width, heads, tokens, spec.mlp(width, 1, "relu"), spec.full())
    end = next(i for i, step in enumerate(steps) if step.title == "Output projection")
    each = width // heads
    trace = [(tokens, width), (heads, tokens, each), (heads, tokens, tokens), (tokens, width)]
    shapes = " → ".join(str(shape) for shape in trace)
    return steps[: end + 1], f"{shapes}; each head: Q, K, V {tokens}×{each}, scores {tokens}×{tokens}"


def _swiglu_block() -> Made:
    """L0 exercise 2: multi-head attention, SwiGLU, RMSNorm and residuals."""
    width, tokens, hidden = 256, 16, 683
    steps = _block(width, 8, tokens, spec.glu(width, hidden, "silu"), spec.full())
    end = max(i for i, step in enumerate(steps) if step.title == "Residual")
    inside = steps[: end + 1]
    return inside, f"({tokens}, {width}) in, ({tokens}, {hidden}) inside the MLP, ({tokens}, {width}) out"


def _normal(draw: np.random.Generator, *shapes: tuple[str, str, int, int]) -> list[Shown]:
    """Matrices with independent entries of variance 1: (symbol, letters, rows, columns)."""
    return [
        _matrix(symbol, letters, draw.standard_normal((rows, columns))) for symbol, letters, rows, columns in shapes
    ]


def _cross(queries: int, keys: int) -> Made:
    """Cross-attention: queries from one sequence, keys and values from another."""
    width = 8
    shapes = (("Q", "T K", queries, width), ("K", "S K", keys, width), ("V", "S V", keys, width))
    q, k, v = _normal(np.random.default_rng(0), *shapes)
    inputs = _inputs(f"{queries} target tokens and {keys} source tokens, drawn from NumPy's default_rng(0).", q, k, v)
    return [inputs, *_attention(q, k, v)], f"scores ({queries}, {keys}), output ({queries}, {width})"


def _shapes_of_scores() -> Made:
    own, ((inputs, *cross), _) = _layer(512, 8, 10), _cross(10, 15)
    return [*own[0], replace(inputs, part="Cross-attention"), *cross], "scores 10×10 in each head, and 10×15"


def _entropy() -> Made:
    """L4 exercise 11: the entropy of a row of weights with and without 1/√d."""
    size = 64
    q, k = _normal(np.random.default_rng(0), ("Q", "T K", size, size), ("K", "S K", size, size))
    steps = [_inputs("64 queries and 64 keys of width 64, drawn from NumPy's default_rng(0).", q, k)]
    for name, scale, formula in (
        ("no scale", 1.0, "p = softmax(q kᵀ)"),
        ("1/√d", size**-0.5, "p = softmax(q kᵀ / √64)"),
    ):
        pattern = Shown(f"pattern, {name}", "p", "T S", attention_pattern(q.value, k.value, scale=scale))
        total = Shown(f"row sums, {name}", "Σ p", "T", pattern.value.sum(-1))
        entropy = Shown(f"entropy, {name}", "H", "·", _row_entropy(pattern.value))

        def weights(g: Printed, scale: float = scale, size: int = size) -> list[Tensor]:
            return [again.softmax(g["Q"] @ g["K"].T * scale), torch.ones(size)]

        def mean(g: Printed, of: str = pattern.name) -> Tensor:
            return _row_entropy(g[of])

        steps += [
            Step("Weights", f"Softmax, {name}", formula, "Every row sums to 1.", [pattern, total], weights),
            Step("Entropy", f"Mean entropy, {name}", "H = mean over rows of -Σ p ln p", "In nats.", [entropy], mean),
        ]
    figures = [
        _printed("entropy, no scale", "H", "·", [0.6108], "About an even choice among 1.8 keys.", part=REFERENCE),
        _printed("entropy, 1/√d", "H", "·", [3.6809], "Even weights would have ln 64 = 4.1589.", part=REFERENCE),
    ]
    rounded = [replace(one, again=partial(_rounded, one.again)) for one in figures]
    return [*steps, *rounded], "shape (64, 64), rows sum to 1, entropy 0.6108 nats without 1/√d and 3.6809 with it"


def _rounded(again: Again, g: Printed) -> Tensor:
    """To the four decimals of the figures."""
    exact = again(g)
    assert isinstance(exact, Tensor)
    return exact.mul(1e4).round() / 1e4


def _row_entropy(pattern: Tensor) -> Tensor:
    """Mean over the rows, as a tensor of one number."""
    mean: Tensor = -torch.special.xlogy(pattern, pattern).sum(-1).mean()
    return mean[None]


def _beside_pytorch() -> Made:
    """L0 exercise 3 and L4 exercise 16: each path of `attend` beside PyTorch's kernel, which is forced to be flash."""
    noise = torch.Generator().manual_seed(0)
    q, k, v = (Shown(x, x, f"H {a} {b}", torch.randn(4, 16, 8, generator=noise)) for x, a, b in ("QTK", "KSK", "VSV"))
    steps = [_inputs("Four heads of width 8 on 16 tokens.", q, k, v)]
    for name, mask in (("no mask", spec.full()), ("causal", spec.causal())):
        for path in ("flash", "materialized", "reference"):
            z = attend(q.value[None], k.value[None], v.value[None], mask=mask, path=path)[0]
            shown = Shown(f"z, {path}, {name}", "z", "H T V", z)

            def theirs(g: Printed, causal: bool = name == "causal") -> Tensor:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    z = scaled_dot_product_attention(g["Q"][None], g["K"][None], g["V"][None], is_causal=causal)
                    return z[0]

            why = "Recomputed by torch's scaled_dot_product_attention with only its flash kernel allowed."
            steps.append(Step(f"attend, {name}", path, "z = softmax(q kᵀ / √8 + m) v", why, [shown], theirs))
    return steps, "every path agrees with PyTorch's flash kernel to 1e-5"


def _masks() -> Made:
    n, places = 4, torch.arange(4)
    q, k = Points(places[:, None]), Points(places[None])

    def hidden(mask: spec.Mask, name: str) -> Shown:
        seen = torch.as_tensor(mask.visible(q, k))
        return Shown(name, "m", "T S", torch.zeros(n, n).masked_fill(~seen, -math.inf))

    future = torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)
    column = torch.zeros(n, n, dtype=torch.float64)
    column[:, 3] = -math.inf
    flat = torch.zeros(n, 1)
    pattern = Shown("pattern", "p", "T S", attention_pattern(flat, flat, mask=spec.causal() & spec.keys(3)))
    steps = [
        Step("Masks", "Causal", "m = −∞ where key > query", "Each token sees itself and what came before.",
             [hidden(spec.causal(), "causal")], lambda g: future),
        Step("Masks", "Padding", "m = −∞ where the key is padding", "The last token is padding: its whole column goes.",
             [hidden(spec.keys(3), "padding")], lambda g: column),
        Step("Masks", "Both", "m = causal + padding", "What either hides is hidden.",
             [hidden(spec.causal() & spec.keys(3), "both")], lambda g: g["causal"] + g["padding"]),
        Step("Softmax", "Equal scores", "p = softmax(0 + m)", "With nothing to prefer, each row shares what it sees.",
             [pattern], lambda g: again.softmax(g["both"])),
    ]  # fmt: skip
    return steps, "causal hides the upper triangle, padding a column"


def _cache() -> Made:
    made = count(families.read_config(QWEN3_4B))
    grouped = made.cache_bytes(4096, dtype="fp16")
    alone = count(families.read_config(QWEN3_4B | {"num_key_value_heads": 32})).cache_bytes(4096, dtype="fp16")
    shown = Shown("bytes", "bytes", "· ·", torch.tensor([[grouped, alone]]), columns=["8 groups", "32 heads"])

    def once_more(g: Printed) -> Tensor:
        return torch.tensor([[2 * 36 * groups * 128 * 4096 * 2 for groups in (8, 32)]])

    formula = "2 (K and V) × 36 layers × groups × 128 × 4,096 positions × 2 bytes"
    why = "Grouping keeps a quarter of what a key and value for every head would take."
    expected = _printed("bytes", "bytes", "· ·", [[603_979_776, 2_415_919_104]], "576 MiB, and four times that.")
    return [
        Step("Bytes", "Cache of Qwen3-4B", formula, why, [shown], once_more),
        expected,
    ], f"{grouped:,} bytes, 576 MiB"


def _quadratic() -> Made:
    made = count(families.read_config(QWEN3_4B))
    flops = torch.tensor([[made.flops(t)["scores"] for t in (2048, 32_768)]])
    shown = Shown("flops", "FLOPs", "· T", flops, columns=["2,048", "32,768"])

    def once_more(g: Printed) -> Tensor:
        return torch.tensor([[36 * 32 * (2 * t * t * 128 + 2 * t * t * 128) for t in (2048, 32_768)]])

    ratio = Shown("ratio", "ratio", "·", torch.tensor([flops[0, 1] / flops[0, 0]]))
    short, long = (sum(made.flops(t).values()) - made.flops(t)["scores"] for t in (2048, 32_768))
    linear = Shown("ratio of the rest", "ratio", "·", torch.tensor([long / short]))
    steps = [
        Step("FLOPs", "Scores and sums", "layers × heads × (2 T² K + 2 T² V)", "Every query against every key.",
             [shown], once_more),
        Step("FLOPs", "Ratio", "32,768² / 2,048²", "Sixteen times the tokens, 256 times the work.", [ratio],
             lambda g: g["flops"][0, 1:] / g["flops"][0, :1]),
        Step("FLOPs", "Ratio of everything else", "32,768 / 2,048", "The rest is linear in T.", [linear],
             lambda g: torch.tensor([32_768 / 2048])),
    ]  # fmt: skip
    return steps, "256 for the scores, 16 for everything else"


EXAMPLES: dict[str, tuple[str, Callable[[], Made]]] = {
    "L0.2": ("a block: 8 heads, SwiGLU, RMSNorm, residuals; D 256, T 16", _swiglu_block),
    "L0.2.6": ("attention of four tokens by hand", _four_tokens),
    "L0.3": ("every path of attend beside PyTorch's flash kernel", _beside_pytorch),
    "L0.softmax": ("a softmax with a clear winner", _sharp),
    "L0.2.9": ("the KV cache of Qwen3-4B at 4,096 positions", _cache),
    "L1.sat": ("the attention of “sat”", _sat),
    "L1.tie": ("two equal scores get equal weights", _tie),
    "L2.example-1": ("attention of two tokens", _two_tokens),
    "L2.example-2": ("shapes through 2 heads: D 8, T 3", lambda: _layer(8, 2, 3)),
    "L2.example-3": ("the causal mask, padding, and both", _masks),
    "L2.1": ("practice 1: queries, keys and values of one number", _one_dimension),
    "L2.2": ("practice 2: shapes through 16 heads: D 1,024, T 128", lambda: _layer(1024, 16, 128)),
    "L4.6": ("shapes of scores: 10 tokens, and 10 over 15", _shapes_of_scores),
    "L4.9": ("attention at 32,768 tokens beside 2,048", _quadratic),
    "L4.11": ("entropy with and without 1/√d at d 64", _entropy),
    "L4.12.3": ("a toy drawn by NumPy, with and without the causal mask", _toy),
    "L4.14": ("shapes at every step: D 512, 8 heads, T 16", lambda: _layer(512, 8, 16)),
    "L4.15": ("cross-attention of 5 over 7 tokens, with its map", lambda: _cross(5, 7)),
    "L4.shapes": ("shapes through 8 heads: D 512, T 10", lambda: _layer(512, 8, 10)),
}
