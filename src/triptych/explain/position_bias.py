"""What positions add to the scores of an attention layer: buckets, slopes, and distances with queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triptych import ops
from triptych.attention import alibi_slopes, t5_bucket
from triptych.explain import reference_ops
from triptych.explain.attending import Bias
from triptych.explain.expressions import Applied
from triptych.explain.formula import equation
from triptych.explain.stack_run import StackRun
from triptych.explain.steps import Printed, Shown


def position_bias(at: StackRun, value: Applied, q: Shown, k: Shown, k_pos: Tensor) -> Bias:
    """What a bias operation adds to the scores of `q` [H, T, K] and `k` [G, S, K]."""
    step, q_pos = value.step, at.places
    distance = k_pos[None, :] - q_pos[:, None]

    def matrix(name: str, symbol: str, values: Tensor) -> Shown:
        return Shown(f"{at.block}{name}", symbol, "T S", values, at.labels, k.labels, focus=at.focus)

    if step.op == "disentangled_bias":
        return _disentangled(at, value, q, k, k_pos, matrix)
    run, attributes = ops.RUN[step.op], dict(step.attributes)
    if step.op == "alibi_bias":
        slopes = Shown(f"{at.block}slopes", "slope", "H", alibi_slopes(attributes["heads"]))
        apart = matrix("distance", "|q_pos - k_pos|", distance.abs())
        return Bias(
            run(q_pos=q_pos, k_pos=k_pos, **attributes),
            f"s ← s + b,  b = {equation(value, {})}",
            "The further a key, the lower its score, by a slope of each head's own.",
            [slopes, apart],
            lambda g: -g[slopes.name][:, None, None] * g[apart.name],
        )
    name = step.weights["weight"]
    table = at.parameter(name, "W_p", "buckets H")
    bucket = matrix("bucket", "bucket", t5_bucket(distance, buckets=len(table.value), **attributes))
    return Bias(
        run(weight=table.value, q_pos=q_pos, k_pos=k_pos, **attributes),
        f"s ← s + b,  b = {equation(value, {})}",
        "One learned number for each head and bucket of distances; far distances share a bucket.",
        [table, bucket],
        lambda g: g[table.name][g[bucket.name]].permute(2, 0, 1),
    )


def _disentangled(
    at: StackRun, value: Applied, q: Shown, k: Shown, k_pos: Tensor, matrix: Callable[[str, str, Tensor], Shown]
) -> Bias:
    """Disentangled attention: a table of distances that this layer has mapped to queries and keys."""
    row_of, heads = value.inputs["row"], len(q.value)
    assert isinstance(row_of, Applied)
    places = {"longest": at.first + len(at.ids) - 1, "q_pos": at.places, "k_pos": k_pos}
    row = matrix("row", "row", ops.RUN[row_of.op](**places, **row_of.step.attributes))
    vectors = {}
    for key in ("pos_k", "pos_q"):
        if isinstance(one := value.inputs.get(key), Applied):
            vector = at.value(at.sections.entry, one.step.out[0]).transpose(0, 1)
            letters, head = ("G R K", k.head) if key == "pos_k" else ("H R K", at.head)
            vectors[key] = Shown(f"{at.block}{key}", key, letters, vector, head=head)
    words = {"pos_k": q.name, "pos_q": k.name}

    def once_more(g: Printed) -> Tensor:
        terms = []
        for key, vector in vectors.items():
            pairs = reference_ops.grouped(g[vector.name], heads)[:, g[row.name]]  # [H, T, S, K]
            word = reference_ops.grouped(g[words[key]], heads)
            terms.append((pairs * (word[:, :, None] if key == "pos_k" else word[:, None])).sum(-1))
        return torch.stack(terms).sum(0)

    tensors = {key: vector.value.transpose(0, 1) for key, vector in vectors.items()}
    added = ops.RUN[value.op](q=q.value[None], k=k.value[None], row=row.value, **tensors)
    return Bias(
        added[0],
        f"s ← s + b,  b = {equation(value, {'q': 'q', 'k': 'k', 'row': 'row', **{key: key for key in vectors}})}",
        "The layer maps each distance to a query and a key of its own, which meet the keys and queries of tokens.",
        [*vectors.values(), row],
        once_more,
    )
