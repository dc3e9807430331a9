"""Inspection of one text inside a model: attention patterns as maps, the values of other sites in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triptych.attention.statistics import AttentionStatistics, pattern_statistics
from triptych.errors import InputError, ProbeError
from triptych.model import Model
from triptych.page.head_names import TOP, measures, names
from triptych.page.maps import MAX_BYTES, MOST_KEYS, AnyMap, AttentionMap, TopMap, packed_bytes
from triptych.probe import Plan, Read, Statistics, sites
from triptych.probe.prompts import prompt_of
from triptych.probe.reads_and_edits import matrix
from triptych.probe.sites import match
from triptych.spec.model import ModelSpec

NEW_TOKENS = 48  # of the target that an encoder-decoder generates where none is given
WHOLE_BYTES = 12 * 2**20  # of all patterns in a page; where they are larger, each query keeps its largest weights
LONG_TOP = 4  # of these, where the text is longer than
LONG = 1024  # tokens; else twice as many


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
    """One text inside a model: `maps` are the attention patterns that were read, `values` the other sites.

    Where all patterns are together too large for a page, `largest` has the largest weights of each query, and `maps`
    the patterns that were selected.  `ids` are those of the text, `target_ids` all that the decoder beside an encoder
    read.
    """

    text: str
    target: str | None
    maps: tuple[AttentionMap, ...]
    values: tuple[Values, ...]
    largest: tuple[TopMap, ...] = ()
    ids: tuple[int, ...] = ()
    target_ids: tuple[int, ...] | None = None

    @property
    def attention(self) -> tuple[AnyMap, ...]:
        """Everything that a page shows."""
        return (*self.largest, *self.maps)


def check_selection(
    spec: ModelSpec, site: str | None = None, layer: int | None = None, head: int | None = None, *, maps: bool = False
) -> list[str]:
    """The sites that `site` and `layer` name.  Raises ProbeError for those, and heads, that are not there, and
    InputError where `maps` are wanted and none of the sites is a pattern.  Nothing is run."""
    known = sites(spec)
    pattern = site or "*.pattern"
    found = [one.name for one in match(pattern, spec, known)]
    if layer is not None:
        found = [name for name in found if f"blocks.{layer}." in name]
    if not found:
        depth = max(len(stack.blocks) for stack in spec.stacks.values())
        raise ProbeError(f"no site {pattern!r} in layer {layer}; layers are 0 to {depth - 1}")
    Plan.of(spec, [Read(name, heads=None if head is None else [head]) for name in found])
    if maps and not any(name.endswith(".pattern") for name in found):
        raise InputError("a page or picture shows attention; choose a site that ends in .pattern")
    return found


def inspect_text(
    model: Model,
    text: str,
    *,
    target: str | None = None,
    site: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    whole: bool | None = None,
) -> Inspection:
    """Run `text` and read `site` (a name or glob), by default every attention pattern.

    `layer` and `head` select among them.  An encoder-decoder reads `target` in its decoder, or what it generates.
    Patterns that are together larger than a page holds are read as the largest weights of each query, but for those
    that `layer` and `head` select; `whole` True or False asks for the one or the other.

    Raises ProbeError for a site, layer or head that is not there; InputError for a text that is empty, longer than the
    model reads, or whose selected patterns are too large for a page.
    """
    chosen = check_selection(model.spec, site, layer, head)
    model.check_words("inspect")
    prompt_of(model, text)
    rows = model.ids([text])
    if len(rows[0]) > MOST_KEYS:
        raise InputError(f"the text has {len(rows[0]):,} tokens, and at most {MOST_KEYS:,} are shown; shorten it")
    selected = layer is not None or head is not None
    patterns = [name for name in chosen if name.endswith(".pattern")]
    heads = None if head is None else [head]
    written, targets = _target(model, rows, target)
    size = sum(
        packed_bytes(len(heads or ()) or _heads(model.spec, name), *_lengths(name, rows, targets)) for name in patterns
    )
    if whole is None:
        whole = size <= WHOLE_BYTES
    if selected and not whole and size > MAX_BYTES:
        raise InputError(
            f"the selected patterns take {size / 2**20:,.0f} MiB and a page carries at most {MAX_BYTES // 2**20};"
            " choose fewer with --layer and --head (layer=, head=), or none for the largest weights of each query"
        )
    maps: list[AttentionMap] = []
    largest: list[TopMap] = []
    values: list[Values] = []
    if whole or selected:
        trace = model.trace(rows, targets, read=[Read(name, heads=heads) for name in chosen])
        for name in chosen:
            (value,) = trace[name]
            if name.endswith(".pattern"):
                maps.append(_whole_map(model, name, value, rows, targets, heads))
            else:
                values.append(values_of(name, value))
    if not whole:
        every = check_selection(model.spec, site)
        wanted = [name for name in every if name.endswith(".pattern")]
        others = [] if selected else [name for name in chosen if name not in wanted]
        count = LONG_TOP if len(rows[0]) > LONG else 2 * LONG_TOP
        reads = [Read(name, reduce=Statistics(top=count)) for name in wanted]
        trace = model.trace(rows, targets, read=[*reads, *map(Read, others)])
        largest += [_top_map(model, name, trace.statistics(name)[0], rows, targets) for name in wanted]
        values += [values_of(name, trace[name][0]) for name in others]
    decoded = None if targets is None else tuple(targets[0])
    return Inspection(text, written, tuple(maps), tuple(values), tuple(largest), tuple(rows[0]), decoded)


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


def _rows(name: str, rows: list[list[int]], targets: list[list[int]] | None) -> tuple[list[int], list[int]]:
    """The ids of a pattern's queries and keys."""
    queries = targets if targets and not name.startswith("encoder.") else rows
    return queries[0], (rows if ".cross." in name else queries)[0]


def _lengths(name: str, rows: list[list[int]], targets: list[list[int]] | None) -> tuple[int, int]:
    queries, keys = _rows(name, rows, targets)
    return len(queries), len(keys)


def _heads(spec: ModelSpec, name: str) -> int:
    """How many heads a pattern has."""
    return next(one.heads for one in match(name, spec, sites(spec))) or 1


def _whole_map(
    model: Model, name: str, value: Tensor, rows: list[list[int]], targets: list[list[int]] | None,
    heads: list[int] | None,
) -> AttentionMap:  # fmt: skip
    queries, keys = _rows(name, rows, targets)
    value = value.float().cpu()
    found = pattern_statistics(value, torch.arange(len(queries)), top=min(TOP, len(keys)))
    numbers, roles = _described(model, name, found, queries, keys)
    return AttentionMap(
        _stack(model, name), _layer(name), _tokens(model, queries), _tokens(model, keys), value.numpy(), heads, roles,
        numbers,
    )  # fmt: skip


def _top_map(
    model: Model, name: str, found: AttentionStatistics, rows: list[list[int]], targets: list[list[int]] | None
) -> TopMap:
    queries, keys = _rows(name, rows, targets)
    numbers, roles = _described(model, name, found, queries, keys)
    top = found.top_weights.float().clamp(0, 1)
    return TopMap(
        _stack(model, name), _layer(name), _tokens(model, queries), _tokens(model, keys), found.top_keys.cpu().numpy(),
        top.cpu().numpy(), None, roles, numbers,
    )  # fmt: skip


def _described(
    model: Model, name: str, found: AttentionStatistics, queries: list[int], keys: list[int]
) -> tuple[dict[str, list[float]], list[str]]:
    cross, stack = ".cross." in name, _stack(model, name)
    return measures(found, cross=cross), names(found, queries, keys, cross=cross, causal=stack == "decoder")


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


def values_of(name: str, value: Tensor) -> Values:
    """Numbers of the values at a site, [T, ...]; of scores those of keys that are seen."""
    x = value.float()
    x = x[x.isfinite()] if name.endswith(".scores") else x  # hidden keys have -inf
    norm = math.nan if matrix(name) else float(x.flatten(1).norm(dim=1).mean())
    spread = float(x.std()) if x.numel() > 1 else 0.0
    return Values(name, tuple(value.shape), float(x.mean()), spread, float(x.min()), float(x.max()), norm)
