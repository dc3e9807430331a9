"""What the lectures' worked examples are made of: given matrices, steps of attention, and the figures to agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from triptych.explain.attending import Attending
from triptych.explain.steps import Shown, Step

INPUTS, LECTURE, REFERENCE = "Given", "The lecture's figures", "Reference figures"
Example = tuple[list[Step], str]
"""The steps of an example, and its outcome in one line."""


def matrix(symbol: str, letters: str, values: object, name: str = "") -> Shown:
    return Shown(name or symbol, symbol, letters, torch.as_tensor(np.asarray(values)).to(torch.get_default_dtype()))


def inputs_step(meaning: str, *shown: Shown) -> Step:
    return Step(INPUTS, "What is given", ", ".join(one.symbol for one in shown), meaning, shown, lambda g: [
        one.value for one in shown
    ])  # fmt: skip


def printed_step(
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


def attention_steps(
    q: Shown, k: Shown, v: Shown, part: str = "Attention", prefix: str = "", **options: object
) -> list[Step]:
    names = [str(i) for i in range(len(k.value))]
    q, k = replace(q, labels=names[: len(q.value)]), replace(k, labels=names)
    return Attending(part=part, prefix=prefix, q=q, k=k, v=v, **options).steps()  # type: ignore[arg-type]  # options of several types
