"""Worked examples of given matrices and masks, and the steps that all worked examples are made of."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triptych import spec
from triptych.attention import attention_pattern
from . import reference_ops
from .attention_steps import AttentionSteps, additive_mask
from .steps import PrintedTensors, ShownTensor, WalkStep, number

INPUTS, LECTURE, REFERENCE = "Given", "The lecture's figures", "Reference figures"
Example = tuple[list[WalkStep], str]
"""The steps of an example, and its outcome in one line."""


AXES = {
    "X": "N D", "W_Q": "K D", "W_K": "K D", "W_V": "V D", "Q": "T K", "K": "S K", "V": "S V", "s": "T S", "p": "T S",
    "z": "T V", "H": "·", "MiB": "· ·",
}  # fmt: skip


def matrix(rows: str) -> Tensor:
    """A matrix from its text: `1/2 0; 0 1` has two rows."""
    return torch.tensor([[float(Fraction(number)) for number in row.split()] for row in rows.split(";")])


def matrices(**values: str | npt.NDArray[np.float64]) -> list[ShownTensor]:
    """Given matrices, as texts or numbers, by their symbols."""
    tensors = {name: matrix(one) if isinstance(one, str) else torch.as_tensor(one) for name, one in values.items()}
    return [ShownTensor(name, name, AXES[name], one.to(torch.get_default_dtype())) for name, one in tensors.items()]


def inputs_step(meaning: str, *shown: ShownTensor) -> WalkStep:
    symbols = ", ".join(one.symbol for one in shown)
    return WalkStep(INPUTS, "What is given", symbols, meaning, shown, lambda g: [one.value for one in shown])


def printed_step(
    symbol: str, values: Tensor, meaning: str, rows: Sequence[int] = (), part: str = LECTURE, of: str = "",
    decimals: int | None = None,
) -> WalkStep:  # fmt: skip
    """Figures that the computed tensor must agree with, in the rows `rows`, rounded to `decimals` where there are any:
    the lecture's own, or for a `part` of REFERENCE those that the lecture does not print.  `of` is the name of the
    tensor, where it is not the usual one."""
    by, of = "in the lecture" if part == LECTURE else "for reference", of or {"p": "pattern"}.get(symbol, symbol)
    if part == LECTURE:
        title, formula = "As printed", f"{symbol} above = {symbol} in the lecture"
    else:
        title, formula = "Compared with figures from elsewhere", f"{symbol} above = these figures"
        meaning += f" These figures were computed without this program; the step fails where {symbol} above differs."
    shown = ShownTensor(f"{of} {by}", symbol, AXES[symbol], values, [str(i) for i in rows])
    index = torch.tensor(list(rows) or list(range(len(values))))

    def again(g: PrintedTensors) -> Tensor:
        return g[of][index] if decimals is None else g[of][index].round(decimals=decimals)

    return WalkStep(part, title, formula, meaning, [shown], again)


def attention_steps(
    qkv: Sequence[ShownTensor], part: str = "Attention", prefix: str = "", **options: object
) -> list[WalkStep]:
    """The steps from Q, K and V to the weighted sum."""
    q, k, v = qkv
    names = [str(i) for i in range(len(k.value))]
    q, k = replace(q, labels=names[: len(q.value)]), replace(k, labels=names)
    return AttentionSteps(part=part, prefix=prefix, q=q, k=k, v=v, **options).steps()  # type: ignore[arg-type]  # options of several types


def four_tokens() -> Example:
    x, *w = matrices(
        X="1 0 1 0; 0 1 0 1; 1 1 0 0; 0 0 1 1", W_Q="1 0 1 0; 0 1 0 1",
        W_K="0 1 1 0; 1 0 0 1", W_V="1 1 0 0; 0 0 1 1",
    )  # fmt: skip
    names = [(one, one.symbol[-1]) for one in w]
    q, k, v = (ShownTensor(name, name, f"N {one.letters[0]}", x.value @ one.value.T) for one, name in names)
    project = WalkStep(
        "Projections", "Projections", "Q = X W_Qᵀ,  K = X W_Kᵀ,  V = X W_Vᵀ", "Rows of each W are outputs.", [q, k, v],
        lambda g: [reference_ops.linear(g["X"], g[one.name], None) for one in w],
    )  # fmt: skip
    every = "All keys are [1, 1], so every query scores all of them alike: each weight a quarter, each output the mean."
    figures = [
        printed_step("p", torch.full((4, 4), 0.25), every),
        printed_step("z", torch.ones(4, 2), "The mean of the four values."),
    ]
    inputs = inputs_step("Four tokens of width 4, and three maps to width 2.", x, *w)
    return [inputs, project, *attention_steps([q, k, v]), *figures], "every weight 0.25, every output [1, 1]"


def two_directions() -> Example:
    """L0 2.7: what “book” asks of “teacher” is not what “teacher” asks of “book”, unless one map makes both."""
    names = ["teacher", "book"]
    x, w_q, w_k = matrices(X="1 0 1 0; 0 1 1 1", W_Q="1 0 1 0; 0 1 0 2", W_K="0 1 0 1; 2 0 1 0")
    x = replace(x, labels=names)
    maps = (("Q", w_q), ("K", w_k))
    q, k = (ShownTensor(name, name, f"{AXES[name][0]} K", x.value @ w.value.T, names) for name, w in maps)
    s = ShownTensor("s", "s", "T S", q.value @ k.value.T, names, names)
    apart = ShownTensor("difference", "s − sᵀ", "T S", s.value - s.value.T, names, names)
    same = ShownTensor("s of one map", "s", "T S", q.value @ q.value.T, names, names)
    steps = [
        inputs_step("Two words of width 4, and a map each for queries and keys.", x, w_q, w_k),
        WalkStep(
            "Two maps", "Queries and keys", "Q = X W_Qᵀ,  K = X W_Kᵀ", "What a word asks, and what it answers with.",
            [q, k], lambda g: [g["X"] @ g[w.name].T for _, w in maps],
        ),
        WalkStep(
            "Two maps", "Scores", "s_ij = q_i · k_j", "A row asks, a column is asked: “teacher” asks “book” in the "
            "first row, “book” asks “teacher” in the second.", [s], lambda g: g["Q"] @ g["K"].T,
        ),
        WalkStep("Two maps", "Asymmetry", "s − sᵀ", "Not 0: the two directions differ.", [apart],
                 lambda g: g["s"] - g["s"].T),
        WalkStep("One map for both", "Scores", "s_ij = q_i · q_j",
                 "The control: with W_K = W_Q each pair has one score, the same in both directions.", [same],
                 lambda g: g["Q"] @ g["Q"].T),
    ]  # fmt: skip
    (_, there), (back, _) = s.value.tolist()
    return steps, f"teacher → book {there:g}, book → teacher {back:g}; with one map for both they are equal"


def paired_by_position() -> Example:
    """Keys and values belong together by their place: both in another order give the same, one alone does not."""
    given = matrices(Q="1 0; 0 2", K="2 0; 0 1; 1 1", V="10 0; 0 10; 5 5")
    order = [2, 0, 1]
    q, k, v = given
    moved_k, moved_v = (replace(one, name=f"{one.name} moved", value=one.value[order]) for one in (k, v))
    kinds = (("as given", k, v), ("both moved", moved_k, moved_v), ("values alone moved", k, moved_v))
    outputs, steps = list[Tensor](), [
        inputs_step("Two queries, and three keys, each with the value at its place.", *given),
        WalkStep(
            "Another order", "Moved", "K and V: rows 3, 1, 2", "The same rows in another order.", [moved_k, moved_v],
            lambda g: [g[one.name][order] for one in (k, v)],
        ),
    ]  # fmt: skip
    for kind, keys, values in kinds:
        pattern = (q.value @ keys.value.T / math.sqrt(2)).softmax(-1)
        z = ShownTensor(f"z, {kind}", "z", "T V", pattern @ values.value)
        outputs.append(z.value)

        def again(g: PrintedTensors, k: str = keys.name, v: str = values.name) -> Tensor:
            return reference_ops.softmax(g["Q"] @ g[k].T / math.sqrt(2)) @ g[v]

        apart = float((z.value - outputs[0]).abs().max())
        why = "The output is the same: the sum has no order." if apart < 1e-5 else (
            f"The output is another, by up to {number(apart)}: each weight meets the value of another token."
        )  # fmt: skip
        steps.append(
            WalkStep(
                "Output", kind.capitalize(), "z = softmax(q kᵀ / √2) v", "" if kind == "as given" else why, [z], again
            )
        )
    return steps, f"both moved: the same output; values alone: another, by up to {number(apart)}"


def two_tokens() -> Example:
    given = matrices(Q="1 0; 0 1", K="1 0; 1 1", V="1 2; 3 4")
    why = "The first query scores both keys alike, the second prefers the second."
    figures = [
        printed_step("p", matrix("0.5 0.5; 0.33024 0.66976"), why),
        printed_step("z", matrix("2 3; 2.33952 3.33952"), "Mixed in these shares."),
    ]
    inputs = inputs_step("Two tokens of width 2.", *given)
    return [inputs, *attention_steps(given), *figures], "output [[2, 3], [2.3395, 3.3395]]"


def one_dimension() -> Example:
    given = matrices(Q="2; 0; 1", K="1; 3; -1", V="10; 20; 30")
    weights = matrix("0.017980 0.981690 0.000329; 1/3 1/3 1/3; 0.117310 0.866813 0.015876")
    figures = [
        printed_step("p", weights, "A query of 0 scores every key 0 and gives all the same weight."),
        printed_step("z", matrix("19.82349; 20; 18.98566"), "The second is the plain mean of the values."),
    ]
    inputs = inputs_step("Three tokens, one number each: attention is then a softmax and a weighted mean.", *given)
    return [inputs, *attention_steps(given, scale=1.0), *figures], "output [19.8235, 20, 18.9857]"


def drawn_by_numpy() -> Example:
    draw = np.random.RandomState(0)
    given = matrices(**{name: draw.randn(4, 8) for name in "QKV"})
    ends = matrix("0.301029 0.301079 0.191134 0.206757; 0.819516 0.085838 0.022843 0.071803")
    out = matrix("-0.047625 -0.102534 -0.363957 -0.107750 -0.207784 0.405654 0.424662 0.167437")
    masked, why = matrix("0.402860 0.597140 0 0"), "Masked, the second query sees two keys."
    steps = [
        inputs_step("Q, K and V drawn in that order from NumPy's generator seeded with 0.", *given),
        *attention_steps(given),
        *attention_steps(given, "Attention with the causal mask", "causal ", mask=spec.causal()),
        printed_step("p", ends, "The first and the last query.", [0, 3], REFERENCE),
        printed_step("z", out, "The first output.", [0], REFERENCE),
        printed_step("p", masked, why, [1], REFERENCE, of="causal pattern"),
    ]
    return steps, "the reference weights and outputs, with and without the mask"


def _softmax(scores: str, figures: str, given: str, why: str, labels: Sequence[str] = ()) -> Example:
    (s,) = (replace(one, columns=labels) for one in matrices(s=scores))
    p = ShownTensor("pattern", "p", "T S", s.value.softmax(-1), columns=labels)
    step = WalkStep("Softmax", "Softmax", "p = exp(s) / Σ exp(s)", why, [p], lambda g: reference_ops.softmax(g["s"]))
    expected = printed_step("p", matrix(figures), "The same weights.", part=REFERENCE)
    (shown,) = expected.makes
    expected = replace(expected, makes=[replace(shown, columns=labels)])
    return [inputs_step(given, s), step, expected], ", ".join(map(number, p.value[0].tolist()))


def attention_of_sat() -> Example:
    """The scores and weights of L1's slide; the lecture's five words are not quoted here."""
    figures = "0.018559 0.556105 0.037373 0.015195 0.372768"
    given = (
        "The query of “sat” has five scores, one for each word of a sentence; the words here are an example with a "
        "subject and a place where the scores are high."
    )
    why = "“cat” (4.2) and “mats” (3.8) share 93% of the weight: who sat, and where. The others keep a little."
    words = ["The", "cat", "sat", "on", "mats"]
    return _softmax("0.8 4.2 1.5 0.6 3.8", figures, given, why, words)


def clear_winner() -> Example:
    figures = "0.012128 9.1e-7 0.987866 4.5e-6"
    why = "A lead of 4.4 is a factor of e^4.4, about 81."
    return _softmax("8.3 -1.2 12.7 0.4", figures, "One row of scores, with four keys.", why)


def equal_scores() -> Example:
    (s,) = matrices(s="8.5 42 3.2 42")
    scales = ("p", 1), ("p scaled", 8)
    sharp, soft = (ShownTensor(name, name, "T S", (s.value / by).softmax(-1)) for name, by in scales)
    steps = [
        inputs_step("One row of scores with a tie.", s),
        WalkStep("Softmax", "Softmax", "p = softmax(s)", "Equal scores get equal weights, however large they are.",
                 [sharp], lambda g: reference_ops.softmax(g["s"])),
        WalkStep("Softmax", "Softmax over √64", "p = softmax(s / √64)", "Divided, the others keep a little.",
                 [soft], lambda g: reference_ops.softmax(g["s"] / 8)),
        WalkStep("Softmax", "Gradient of each weight in its own score", "∂p / ∂s = p (1 − p)",
                 "1/4 is the most it can be: a tie is the least saturated choice between two.",
                 [ShownTensor("gradient", "∂p/∂s", "T S", sharp.value * (1 - sharp.value))],
                 lambda g: g["p"] * (1 - g["p"])),
        printed_step("p", matrix("0 0.5 0 0.5"), "The lecture prints [0, .55, 0, .45], which is wrong.", part=REFERENCE,
                     of="p"),
    ]  # fmt: skip
    return steps, "a tie is a half each; the lecture's .55 and .45 are wrong"


def masks() -> Example:
    n, places = 4, torch.arange(4)
    both = spec.causal() & spec.keys(3)
    causal, padding, hidden = (
        ShownTensor(name, "m", "T S", additive_mask(mask, places, places))
        for name, mask in (("causal", spec.causal()), ("padding", spec.keys(3)), ("both", both))
    )
    future = torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)
    column = torch.zeros(n, n, dtype=torch.float64)
    column[:, 3] = -math.inf
    why = "With nothing to prefer, each row shares what it sees."
    pattern = ShownTensor("pattern", "p", "T S", attention_pattern(torch.zeros(n, 1), torch.zeros(n, 1), mask=both))
    steps = [
        WalkStep("Masks", "Causal", "m = −∞ where key > query", "Each token sees itself and what came before.",
                 [causal], lambda g: future),
        WalkStep("Masks", "Padding", "m = −∞ where the key is padding",
                 "The last token is padding: its whole column goes.", [padding], lambda g: column),
        WalkStep("Masks", "Both", "m = causal + padding", "What either hides is hidden.",
                 [hidden], lambda g: g["causal"] + g["padding"]),
        WalkStep("Softmax", "Equal scores", "p = softmax(0 + m)", why, [pattern],
                 lambda g: reference_ops.softmax(g["both"])),
    ]  # fmt: skip
    return steps, "causal hides the upper triangle, padding a column"
