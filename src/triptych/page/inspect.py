"""Inspection of one text inside a model: attention patterns as maps, the values of other sites in numbers.

Each head has numbers of its weights, and a name where one of them is large.  These names describe one text.  They are
not tested against chance, as those of `triptych.probe` head roles are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triptych.attention.statistics import AttentionStatistics, pattern_statistics
from triptych.errors import InputError, ProbeError
from triptych.model import Model
from triptych.probe import Plan, Read, Statistics, Trace, sites
from triptych.probe.prompts import name_tokens, prompt_of
from triptych.probe.sites import match, matrix
from triptych.spec.model import ModelSpec
from .attention_maps import MAX_BYTES, MOST_KEYS, AnyMap, AttentionMap, StackName, TopMap, packed_bytes

NEW_TOKENS = 48  # of the target that an encoder-decoder generates where none is given
WHOLE_BYTES = 12 * 2**20  # of all patterns in a page; where they are larger, each query keeps its largest weights
LONG_TOP = 4  # of these, where the text is longer than
LONG = 1024  # tokens; else twice as many

MOSTLY = 0.5  # share of a head's weight that gives it a name
REPEATED = 0.4  # the same for repeated tokens, which few queries have
FEWEST = 3  # queries with a repeated token
NEAR = 4  # places from the query that are near
EVEN = 0.6  # effective keys, as a share of those in sight, of a diffuse head
TOP = 16  # keys of each query that names are read from

NAMES = {
    "induction": "the token after an earlier occurrence of the present one",
    "duplicate": "an earlier occurrence of the present token",
    "previous": "the token before",
    "next": "the token after",
    "self": "the token itself",
    "first": "the first token",
    "local": f"tokens at most {NEAR} places away",
    "diffuse": "many keys alike",
}


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
    largest: tuple[TopMap, ...]
    ids: list[int]
    target_ids: list[int] | None

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
    site_names = [named_site.name for named_site in match(pattern, spec, known)]
    if layer is not None:
        site_names = [name for name in site_names if f"blocks.{layer}." in name]
    if not site_names:
        depth = max(len(stack.blocks) for stack in spec.stacks.values())
        raise ProbeError(f"no site {pattern!r} in layer {layer}; layers are 0 to {depth - 1}")
    Plan.of(spec, [Read(name, heads=None if head is None else [head]) for name in site_names])
    if maps and not any(name.endswith(".pattern") for name in site_names):
        raise InputError("a page or picture shows attention; choose a site that ends in .pattern")
    return site_names


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
    heads = None if head is None else [head]
    written, targets = _target(model, rows, target)
    size, known = 0, sites(model.spec)
    for name in chosen:
        if name.endswith(".pattern"):
            queries, keys = (len(read[0]) for read in rows_read(name, rows, targets))
            size += packed_bytes(len(heads or ()) or known[name].heads or 1, queries, keys)
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
    reduced = [] if whole else [name for name in check_selection(model.spec, site) if name.endswith(".pattern")]
    count = LONG_TOP if len(rows[0]) > LONG else 2 * LONG_TOP
    shown = [name for name in chosen if whole or selected or name not in reduced]
    reads = [Read(name, heads=heads) for name in shown]
    reads += [Read(name, reduce=Statistics(top=count)) for name in reduced]
    trace = model.trace(rows, targets, read=reads)
    for name in shown:
        (value,) = trace[name]
        if not name.endswith(".pattern"):
            values.append(values_of(name, value))
            continue
        value = value.float().cpu()
        statistics = pattern_statistics(value, torch.arange(value.shape[1]), top=min(TOP, value.shape[2]))
        maps.append(AttentionMap(pattern=value.numpy(), heads=heads, **_described(model, name, trace, statistics)))
    for name in reduced:
        statistics = trace.statistics(name)[0]
        weights = statistics.top_weights.float().clamp(0, 1).cpu().numpy()
        described = _described(model, name, trace, statistics)
        largest.append(TopMap(top_keys=statistics.top_keys.cpu().numpy(), top_weights=weights, **described))
    decoded = None if targets is None else targets[0]
    return Inspection(text, written, tuple(maps), tuple(values), tuple(largest), rows[0], decoded)


def _target(model: Model, rows: list[list[int]], target: str | None) -> tuple[str | None, list[list[int]] | None]:
    """The text and ids that the decoder beside an encoder reads."""
    if model.spec.layout != "encoder-decoder":
        if target is not None:
            raise InputError(f"a target is for encoder-decoders; this is a {model.spec.layout}")
        return None, None
    start = model.spec.start_id()
    if target is not None:
        return target, [[start, *model.ids([target])[0]]]
    (written,) = model.generate(rows, max_new_tokens=NEW_TOKENS)
    return written.text, [[start, *written.ids]]


def rows_read(site: str, rows: list[list[int]], targets: list[list[int]] | None) -> tuple[list[list[int]], ...]:
    """The rows of which a pattern's queries and keys are tokens."""
    queries = targets if targets and not site.startswith("encoder.") else rows
    return queries, rows if ".cross." in site else queries


def stack_of(site: str, causal: bool) -> StackName:
    """The stack that a site is in; where the model has one alone, it is a decoder if it is `causal`."""
    if ".cross." in site:
        return "cross"
    return "decoder" if site.startswith("decoder.") or (causal and not site.startswith("encoder.")) else "encoder"


def layer_of(site: str) -> int:
    return int(site.partition("blocks.")[2].partition(".")[0])


def _described(model: Model, site: str, trace: Trace, statistics: AttentionStatistics) -> dict[str, Any]:
    """What a map says beside its weights."""
    queries, keys = (rows[0] for rows in rows_read(site, trace.tokens, trace.targets))
    stack, cross = stack_of(site, model.spec.layout == "decoder"), ".cross." in site
    return {
        "stack": stack, "layer": layer_of(site),
        "queries": name_tokens(model, queries), "keys": name_tokens(model, keys),
        "roles": names(statistics, queries, keys, cross=cross, causal=stack == "decoder"),
        "measures": measures(statistics, cross=cross),
    }  # fmt: skip


def values_of(name: str, value: Tensor) -> Values:
    """Numbers of the values at a site, [T, ...]; of scores those of keys that are seen."""
    x = value.float()
    x = x[x.isfinite()] if name.endswith(".scores") else x  # hidden keys have -inf
    norm = math.nan if matrix(name) else float(x.flatten(1).norm(dim=1).mean())
    spread = float(x.std()) if x.numel() > 1 else 0.0
    return Values(name, tuple(value.shape), float(x.mean()), spread, float(x.min()), float(x.max()), norm)


# ---------------------------------------------------------------- names of heads


def measures(statistics: AttentionStatistics, *, cross: bool) -> dict[str, list[float]]:
    """Means over the queries, for each head.  Distances between a source and a target mean nothing, so that
    cross-attention has none."""
    rows = _counted(statistics.entropy.shape[1], cross)
    values = {"effective keys": statistics.effective_keys, "first": statistics.first}
    if not cross:
        values |= {"previous": statistics.previous, "distance": statistics.distance}
    return {name: value[:, rows].double().mean(1).tolist() for name, value in values.items()}


def _counted(queries: int, cross: bool) -> slice:
    """The queries of a mean: not the first of self-attention, which often sees itself alone."""
    return slice(0 if cross or queries == 1 else 1, None)


def names(
    statistics: AttentionStatistics, queries: Sequence[int], keys: Sequence[int], *, cross: bool, causal: bool
) -> list[str]:
    """For each head the name of what most of its weight is on, or "".  `queries` and `keys` are token ids."""
    places, weights = statistics.top_keys.long().cpu(), statistics.top_weights.double().cpu()
    query = torch.arange(len(queries))[None, :, None]
    visible = torch.arange(1, len(queries) + 1) if causal else torch.full((len(queries),), len(keys))
    counted = _counted(len(queries), cross)

    def share(chosen: Tensor, rows: Tensor | slice = counted) -> Tensor:
        """[H]: the mean weight of the `rows` queries on the chosen keys."""
        return (weights * chosen).sum(-1)[:, rows].mean(1)

    even = (statistics.effective_keys.cpu() / visible)[:, visible > 2]
    scores = {"first": share(places == 0), "diffuse": even.mean(1) if even.numel() else torch.zeros(len(places))}
    if not cross:
        near = (places - query).abs() <= NEAR
        scores |= {name: share(places == query + by) for name, by in (("previous", -1), ("next", 1), ("self", 0))}
        scores["local"] = share(near) if len(queries) > 4 * NEAR else scores["first"] * 0
        scores |= _repeated(places, queries, share)
    bounds = {"induction": REPEATED, "duplicate": REPEATED, "diffuse": EVEN, "local": 0.8}
    reached = {name: scores[name] >= bounds.get(name, MOSTLY) for name in NAMES if name in scores}
    return [next((name for name, heads in reached.items() if heads[head]), "") for head in range(len(places))]


def _repeated(places: Tensor, ids: Sequence[int], share: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Induction and duplicates, where enough tokens occur again."""
    text = torch.tensor(ids)
    first = {one: at for at, one in reversed(list(enumerate(ids)))}
    again = torch.tensor([first[one] < at for at, one in enumerate(ids)])
    if int(again.sum()) < FEWEST:
        return {}
    earlier = (places >= 0) & (places < torch.arange(len(ids))[None, :, None])

    def same(at: Tensor) -> Tensor:
        return earlier & (text[at.clamp(min=0)] == text[:, None][None])

    return {
        "induction": share(same(places - 1) & (places > 0), again),
        "duplicate": share(same(places), again),
    }
