"""Checks a model on this machine: every fast path against the plain forward, and the outputs against transformers; and
measures the perplexity of its packed forms and cache types.

All of it runs in fp32 on a few short rows.  Differences are max |Δ log-softmax| of words, else max |Δ| of what the head
gives, or of the final hidden states where there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from triptych import nn
from triptych.arguments import checked, number
from triptych.attention import CacheType, check_cache_type
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import stores_packed
from triptych.errors import InputError
from triptych.model import Model, load
from . import paths, peer
from .comparison import Case, Finding, Quality, Report, SiteDifference, case_of, max_abs_diff
from .quality import TEXT, quality, why_not

PEERS = ("transformers", "none")
ModelOrPath = str | Path | Model  # `load` says what is wrong with another


@checked
def check(
    model: ModelOrPath,
    *,
    against: Literal["transformers", "none"] | None = None,
    threshold: float = 1e-4,
    offline: bool = False,
    ignore: Sequence[str] = (),
    quantize: Sequence[str] = (),
    cache: Sequence[CacheType] = (),
    text: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    adapter: str | Path | None = None,
) -> Report:
    """Try every path of a model against the plain forward, and the model against a peer.

    `against` is `transformers`, `none`, or None for transformers where it is installed and knows the model.
    Where the file keeps its matrices packed, or `quantize` names forms to round them to ("int8", "int4"), the
    perplexity of `text` (by default one that comes with the package) is measured for each form, and its divergence from
    fp32.  `cache` names types in which the cache keeps keys and values: they are measured too, beside the cache that
    keeps them as they are computed.  `progress` is called with the name of the next comparison.  With an `adapter` (a
    directory) it is the adapted model, and in transformers the matrices with what the adapter adds.

    Raises InputError when a required peer is missing, for a threshold that is not a finite number of at least 0 (with
    NaN every difference would pass), for an unknown form or type of cache, and for forms of a model that has no file or
    no perplexity.
    """
    number("threshold", threshold, 0, sys.float_info.max, "a finite number of at least 0")
    if adapter is not None and isinstance(model, Model):
        raise InputError("adapter= is for a model that is loaded here; a Model has its own")
    if isinstance(cache, str):
        raise InputError(f"cache={cache!r} must be a list of types, such as ['int8']")
    for one in cache:
        check_cache_type(one)
    progress("loading in fp32")
    loaded = (
        model
        if isinstance(model, Model)
        else load(model, dtype=torch.float32, dequantize=True, offline=offline, ignore=ignore, adapter=adapter)
    )
    case = replace(case_of(loaded, threshold), ignore=tuple(ignore))
    for step in paths.ALL:
        progress((step.__doc__ or "").partition(".")[0].lower())
        step(case)
    if against != "none" and peer.can_compare(case, required=against is not None):
        progress("the same rows through transformers")
        peer.against_transformers(case)
    measured = _qualities(case, quantize, cache, text, offline, progress)
    return Report(
        str(loaded.path or "memory"), threshold, tuple(case.findings), tuple(case.layers), tuple(case.skipped), measured
    )


def _qualities(
    case: Case, quantize: Sequence[str], cache: Sequence[CacheType], text: str | None, offline: bool,
    progress: Callable[[str], None],
) -> tuple[Quality, ...]:  # fmt: skip
    """The quality of fp32, of the file's own packed matrices, of what they are rounded to, and of types of the cache;
    empty where there is nothing but fp32 and no text was given.  What is left out is added to `case.skipped`."""
    path, forms = case.model.path, {"fp32": case.model}
    more: dict[str, dict[str, Any]] = {form: {"quantize": form} for form in quantize}
    if path is not None and stores_packed(read_header(path, ignore=case.ignore, offline=offline).source):
        more = {"packed": {}, **more}
    if not more and not cache and text is None:
        return ()
    why = "the model is not in a file" if path is None and more else why_not(case.model)
    if why is not None:
        if quantize or cache or text is not None:
            raise InputError(f"no perplexity: {why}")
        case.skipped.append(f"perplexity of the packed model: {why}")
        return ()
    for form, options in more.items():
        progress(f"perplexity, {form}")
        other = load(str(path), dtype=torch.float32, offline=offline, ignore=case.ignore, **options)
        if case.model.adapter is not None:
            nn.attach(other.module, nn.factors_of(case.model.module))
        if other.module.has_packed_weights:
            forms[form] = other
        else:
            case.skipped.append(f"perplexity, {form}: {'; '.join(() if other.report is None else other.report.notes)}")
    caches: tuple[CacheType, ...] = ("auto", *cache) if cache else ()
    return quality(forms, TEXT if text is None else text, tuple(dict.fromkeys(caches)))


__all__ = ["PEERS", "Finding", "Quality", "Report", "SiteDifference", "check", "max_abs_diff"]
