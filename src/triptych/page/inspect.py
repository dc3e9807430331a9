"""Inspection of one text inside a model: attention patterns as maps, the values of other sites in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from triptych.errors import InputError, ProbeError
from triptych.model import Model
from triptych.page import AttentionMap, AttentionSection, Facts, render
from triptych.probe import Read, sites
from triptych.probe.reads_and_edits import matrix
from triptych.probe.sites import match

NEW_TOKENS = 48  # of the target that an encoder-decoder generates where none is given


@dataclass(frozen=True)
class Values:
    """Statistics of the values at one site; `shape` begins with the tokens."""

    site: str
    shape: tuple[int, ...]
    mean: float
    std: float
    least: float
    most: float
    norm: float  # mean length of a token's vector


@dataclass(frozen=True, eq=False)
class Inspection:
    """One text inside a model: `maps` are the attention patterns that were read, `values` the other sites."""

    text: str
    target: str | None
    maps: tuple[AttentionMap, ...]
    values: tuple[Values, ...]

    def page(self, name: str) -> str:
        """The maps as one offline HTML page.  Raises InputError when there are none, or too many for a page."""
        if not self.maps:
            raise InputError("a page shows attention; choose a site that ends in .pattern")
        facts = [("Model", name), ("Text", self.text)] + ([("Target", self.target)] if self.target is not None else [])
        maps = AttentionSection("Attention", "Rows are queries, columns are keys; each row sums to 1.", self.maps)
        return render("Attention", [Facts("What was run", facts), maps])


def inspect_text(
    model: Model,
    text: str,
    *,
    target: str | None = None,
    site: str | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> Inspection:
    """Run `text` and read `site` (a name or glob), by default every attention pattern.

    `layer` and `head` select among them.  An encoder-decoder reads `target` in its decoder, or what it generates.
    Raises ProbeError for a site, layer or head that is not there.
    """
    names = _names(model, site, layer)
    model.check_words("inspect")
    rows = model.ids([text])
    written, targets = _target(model, rows, target)
    heads = None if head is None else [head]
    trace = model.trace(rows, targets, read=[Read(name, heads=heads) for name in names])
    maps, values = [], []
    for name in names:
        (value,) = trace[name]
        if name.endswith(".pattern"):
            queries = targets if targets and not name.startswith("encoder.") else rows
            keys = rows if ".cross." in name else queries
            across, down = _tokens(model, keys[0]), _tokens(model, queries[0])
            maps.append(
                AttentionMap(_stack(model, name), _layer(name), down, across, value.float().cpu().numpy(), heads)
            )
        else:
            values.append(_values(name, value))
    return Inspection(text, written, tuple(maps), tuple(values))


def _names(model: Model, site: str | None, layer: int | None) -> list[str]:
    """The sites that `site` and `layer` name."""
    known = sites(model.spec)
    pattern = site or "*.pattern"
    names = [one.name for one in match(pattern, model.spec, known)]
    if layer is not None:
        names = [name for name in names if f"blocks.{layer}." in name]
    if not names:
        depth = max(len(stack.blocks) for stack in model.spec.stacks.values())
        raise ProbeError(f"no site {pattern!r} in layer {layer}; layers are 0 to {depth - 1}")
    return names


def _target(model: Model, rows: list[list[int]], target: str | None) -> tuple[str | None, list[list[int]] | None]:
    """The text and ids that the decoder beside an encoder reads."""
    if model.spec.layout != "encoder-decoder":
        if target is not None:
            raise InputError(f"a target is for encoder-decoders; this is a {model.spec.layout}")
        return None, None
    start = model.spec.ids.start
    if start is None:
        raise InputError("the config has no decoder_start_token_id, so the decoder has nothing to begin with")
    if target is not None:
        return target, [[start, *model.ids([target])[0]]]
    (written,) = model.generate(rows, max_new_tokens=NEW_TOKENS)
    return written.text, [[start, *written.ids]]


def _stack(model: Model, name: str) -> Literal["encoder", "decoder", "cross"]:
    if ".cross." in name:
        return "cross"
    if model.spec.layout != "encoder-decoder":
        return model.spec.layout
    return "encoder" if name.startswith("encoder.") else "decoder"


def _layer(name: str) -> int:
    return int(name.partition("blocks.")[2].partition(".")[0])


def _tokens(model: Model, ids: Sequence[int]) -> list[str]:
    return [str(i) for i in ids] if model.tokenizer is None else model.tokenizer.tokens(ids)


def _values(name: str, value: Tensor) -> Values:
    x = value.float()
    x = x[x.isfinite()] if name.endswith(".scores") else x  # hidden keys have -inf
    norm = math.nan if matrix(name) else float(x.flatten(1).norm(dim=1).mean())
    spread = float(x.std()) if x.numel() > 1 else 0.0
    return Values(name, tuple(value.shape), float(x.mean()), spread, float(x.min()), float(x.max()), norm)
