"""Does this model, here, compute what it should?  Every fast path against the plain one, and against transformers.

All of it runs in fp32 on a few short rows.  Differences are max |Δ log-softmax| of words, else max |Δ| of what the head
gives, or of the final hidden states where there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from triptych.check import paths, peer
from triptych.check.case import case_of, max_abs_diff
from triptych.check.report import Finding, Layer, Report
from triptych.errors import InputError
from triptych.generate.arguments import number
from triptych.model import Model, load

PEERS = ("transformers", "none")


def check(
    model: str | Path | Model,
    *,
    against: str | None = None,
    threshold: float = 1e-4,
    offline: bool = False,
    ignore: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Try every path of a model against the plain forward, and the model against a peer.

    `against` is `transformers`, `none`, or None for transformers where it is installed and knows the model.
    `progress` is called with the name of the next comparison.  Raises InputError when a required peer is missing, and
    for a threshold that is not a finite number of at least 0: with NaN every difference would pass.
    """
    number("threshold", threshold, 0, sys.float_info.max, "a finite number of at least 0")
    if against not in (None, *PEERS):
        raise InputError(f"against={against!r} is not one of {', '.join(PEERS)}")
    progress("loading in fp32")
    loaded = (
        model
        if isinstance(model, Model)
        else load(model, dtype=torch.float32, dequantize=True, offline=offline, ignore=ignore)
    )
    case = replace(case_of(loaded, threshold), ignore=tuple(ignore))
    for step in paths.ALL:
        progress((step.__doc__ or "").partition(".")[0].lower())
        step(case)
    if against != "none" and peer.wanted(case, required=against is not None):
        progress("the same rows through transformers")
        peer.against_transformers(case)
    return Report(
        str(loaded.path or "memory"), threshold, tuple(case.findings), tuple(case.layers), tuple(case.skipped)
    )


__all__ = ["PEERS", "Finding", "Layer", "Report", "check", "max_abs_diff"]
