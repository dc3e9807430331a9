"""The lectures' worked examples, walked through with their own numbers and held against the figures they print."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from triptych import families, nn, spec
from triptych.attention import attention_pattern
from triptych.count import count
from triptych.errors import InputError, nearest
from triptych.labs.walk import again
from triptych.labs.walk.attending import Attending
from triptych.labs.walk.steps import Given, Shown, Step, Walk, number
from triptych.labs.walk.walking import explain
from triptych.model import Model
from triptych.spec.masks import Points

GIVEN, LECTURE = "Given", "The lecture's figures"
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
    found = known[_plain(name)]
    what, make = EXAMPLES[found]
    steps, outcome = make()
    return Walk(f"{found}: {what}", [("Example", found), ("Shows", what)], steps, outcome)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


Made = tuple[list[Step], str]


def _matrix(symbol: str, letters: str, values: object, name: str = "") -> Shown:
    return Shown(name or symbol, symbol, letters, torch.as_tensor(np.asarray(values)).to(torch.get_default_dtype()))


def _given(meaning: str, *shown: Shown) -> Step:
    return Step(GIVEN, "What is given", ", ".join(one.symbol for one in shown), meaning, shown, lambda g: [
        one.value for one in shown
    ])  # fmt: skip


def _printed(
    of: str, symbol: str, letters: str, values: Sequence[object], meaning: str, rows: Sequence[int] = ()
) -> Step:
    """The lecture's own figures, which what was computed must come to; `rows` are those it prints."""
    shown = Shown(f"{of} in the lecture", symbol, letters, torch.tensor(values))
    shown = replace(shown, labels=[str(i) for i in rows]) if rows else shown
    index = torch.tensor(list(rows) or list(range(len(values))))
    return Step(LECTURE, "As printed", f"{symbol} = the lecture's {symbol}", meaning, [shown], lambda g: g[of][index])


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
    said = [
        _printed("pattern", "p", "T S", [[0.25] * 4] * 4, every),
        _printed("z", "z", "T V", [[1.0, 1.0]] * 4, "The mean of the four values."),
    ]
    given = _given("Four tokens of width 4, and three maps to width 2.", x, *w)
    return [given, project, *_attention(q, k, v), *said], "every weight 0.25, every output [1, 1]"


def _two_tokens() -> Made:
    q, k = _matrix("Q", "T K", [[1, 0], [0, 1]]), _matrix("K", "S K", [[1, 0], [1, 1]])
    v = _matrix("V", "S V", [[1, 2], [3, 4]])
    weights, out = [[0.5, 0.5], [0.33024, 0.66976]], [[2, 3], [2.33952, 3.33952]]
    why = "The first query scores both keys alike, the second prefers the second."
    said = [_printed("pattern", "p", "T S", weights, why), _printed("z", "z", "T V", out, "Mixed in these shares.")]
    return [_given("Two tokens of width 2.", q, k, v), *_attention(q, k, v), *said], "output [[2, 3], [2.3395, 3.3395]]"


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
    said = [
        _printed("pattern", "p", "T S", weights, "A query of 0 scores every key 0, and draws from all alike."),
        _printed("z", "z", "T V", [[19.82349], [20], [18.98566]], "The second is the plain mean of the values."),
    ]
    given = _given("Three tokens, one number each: what is left of attention is softmax and a mean.", q, k, v)
    return [given, *_attention(q, k, v, scale=1.0), *said], "output [19.8235, 20, 18.9857]"


def _toy() -> Made:
    draw = np.random.RandomState(0)
    q, k, v = (_matrix(name, letters, draw.randn(4, 8)) for name, letters in (("Q", "T K"), ("K", "S K"), ("V", "S V")))
    first, last = [0.301029, 0.301079, 0.191134, 0.206757], [0.819516, 0.085838, 0.022843, 0.071803]
    out = [-0.047625, -0.102534, -0.363957, -0.107750, -0.207784, 0.405654, 0.424662, 0.167437]
    causal = _attention(q, k, v, "Attention with the causal mask", "causal ", mask=spec.causal())
    said = [
        _printed("pattern", "p", "T S", [first, last], "The first and the last query.", rows=[0, 3]),
        _printed("z", "z", "T V", [out], "The first output.", rows=[0]),
        _printed(
            "causal pattern", "p", "T S", [[0.402860, 0.597140, 0, 0]], "Masked, the second query sees two.", rows=[1]
        ),
    ]
    given = _given("Q, K and V drawn in that order from NumPy's generator seeded with 0.", q, k, v)
    return [given, *_attention(q, k, v), *causal, *said], "the lecture's weights and outputs, with and without the mask"


def _softmax(scores: Sequence[float], figures: Sequence[float], why: str) -> Made:
    s = _matrix("s", "T S", [scores])
    p = Shown("pattern", "p", "T S", s.value.softmax(-1))
    step = Step("Softmax", "Softmax", "p = exp(s) / Σ exp(s)", why, [p], lambda g: again.softmax(g["s"]))
    said = _printed("pattern", "p", "T S", [figures], "To the digits printed.")
    return [_given("One row of scores.", s), step, said], ", ".join(map(number, p.value[0].tolist()))


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
        _given("One row of scores with a tie.", s),
        Step("Softmax", "Softmax", "p = softmax(s)", "Equal scores get equal weights, however large they are.",
             [sharp], lambda g: again.softmax(g["s"])),
        Step("Softmax", "Softmax over √64", "p = softmax(s / √64)", "Divided, the others keep a little.",
             [soft], lambda g: again.softmax(g["s"] / 8)),
        _printed("p", "p", "T S", [[0, 0.5, 0, 0.5]], "The lecture prints [0, .55, 0, .45]; these are the right ones."),
    ]  # fmt: skip
    return steps, "a tie is a half each; the lecture's .55 and .45 are wrong"


def _layer(width: int, heads: int, tokens: int) -> Made:
    """Shapes through one layer of random weights."""
    norm = spec.RMSNorm(width=width)
    block = spec.Block(
        attn=spec.attention(width, heads), mlp=spec.mlp(width, 1, "relu"), attn_norm=spec.Norms(pre=norm),
        mlp_norm=spec.Norms(pre=norm),
    )  # fmt: skip
    vocab = 5
    stack = spec.Stack(
        embed=spec.Embed(vocab=vocab, width=width), kinds={"self": spec.Kind(mask=spec.full())}, blocks=(block,)
    )
    head = spec.TokenHead(classes=spec.Linear(inputs=width, outputs=2))
    model = Model(nn.new(spec.Model(family="example", encoder=stack, head=head)))
    steps = list(explain(model, [i % vocab for i in range(tokens)]).steps)
    end = next(i for i, step in enumerate(steps) if step.title == "Output projection")
    trace = [(tokens, width), (heads, tokens, width // heads), (heads, tokens, tokens), (tokens, width)]
    return steps[: end + 1], " → ".join(str(shape) for shape in trace)


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

    def once_more(g: Given) -> Tensor:
        return torch.tensor([[2 * 36 * groups * 128 * 4096 * 2 for groups in (8, 32)]])

    formula = "2 (K and V) × 36 layers × groups × 128 × 4,096 positions × 2 bytes"
    why = "Grouping keeps a quarter of what a key and value for every head would take."
    said = _printed("bytes", "bytes", "· ·", [[603_979_776, 2_415_919_104]], "576 MiB, and four times that.")
    return [Step("Bytes", "Cache of Qwen3-4B", formula, why, [shown], once_more), said], f"{grouped:,} bytes, 576 MiB"


def _quadratic() -> Made:
    made = count(families.read_config(QWEN3_4B))
    flops = torch.tensor([[made.flops(t)["scores"] for t in (2048, 32_768)]])
    shown = Shown("flops", "FLOPs", "· T", flops, columns=["2,048", "32,768"])

    def once_more(g: Given) -> Tensor:
        return torch.tensor([[36 * 32 * (2 * t * t * 128 + 2 * t * t * 128) for t in (2048, 32_768)]])

    ratio = Shown("ratio", "ratio", "·", torch.tensor([flops[0, 1] / flops[0, 0]]))
    steps = [
        Step("FLOPs", "Scores and sums", "layers × heads × (2 T² K + 2 T² V)", "Every query against every key.",
             [shown], once_more),
        Step("FLOPs", "Ratio", "32,768² / 2,048²", "Sixteen times the tokens, 256 times the work.", [ratio],
             lambda g: g["flops"][0, 1:] / g["flops"][0, :1]),
    ]  # fmt: skip
    return steps, "256"


EXAMPLES: dict[str, tuple[str, Callable[[], Made]]] = {
    "L0.2.6": ("attention of four tokens by hand", _four_tokens),
    "L0.softmax": ("a softmax with a clear winner", _sharp),
    "L0.2.9": ("the KV cache of Qwen3-4B at 4,096 positions", _cache),
    "L1.sat": ("where “sat” looks", _sat),
    "L1.tie": ("two equal scores, as they should be", _tie),
    "L2.example-1": ("attention of two tokens", _two_tokens),
    "L2.example-2": ("shapes through 2 heads: D 8, T 3", lambda: _layer(8, 2, 3)),
    "L2.example-3": ("the causal mask, padding, and both", _masks),
    "L2.1": ("practice 1: queries, keys and values of one number", _one_dimension),
    "L2.2": ("practice 2: shapes through 16 heads: D 1,024, T 128", lambda: _layer(1024, 16, 128)),
    "L4.12.3": ("a toy drawn by NumPy, with and without the causal mask", _toy),
    "L4.shapes": ("shapes through 8 heads: D 512, T 10", lambda: _layer(512, 8, 10)),
    "L4.9": ("attention at 32,768 tokens beside 2,048", _quadratic),
}
