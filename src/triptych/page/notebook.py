"""Shows a trace, head roles, a patching grid, a lens, a logit attribution or a model in a notebook: a page in a
sandboxed frame.

The scripts of the frame run and may save files; they reach neither the notebook nor a network.
"""

from collections.abc import Sequence
from html import escape

import torch

from triptych.errors import TriptychError
from triptych.model.logits_and_traces import ModelInside
from triptych.probe import HeadTable, Lens, LogitAttribution, PatchGrid, Trace
from triptych.probe.sites import sites
from . import (
    AnyMap,
    AttentionMap,
    AttentionSection,
    Facts,
    PlanePoints,
    PlaneSection,
    Section,
    Tab,
    TableSection,
    TopMap,
    render,
)
from .attention_maps import packed_bytes
from .attention_page import ATTENTION, PLANE, best_heads, heads_matrix, planes, role_effects, values_table
from .inspect import WHOLE_BYTES, layer_of, rows_read, stack_of, values_of
from .interventions import lens_page, patch_page

HEIGHT = 760  # pixels of the frame; its corner changes it
LARGEST = 8  # weights of each query where the patterns are too large for a page


def display(shown: object) -> str:
    """The frame; the text of `repr` where there is nothing to draw, or too much."""
    try:
        html = page_of(shown)
    except TriptychError as error:
        return f"<pre>{escape(repr(shown))}\n\n{escape(str(error))}</pre>"
    if html is None:
        return f"<pre>{escape(repr(shown))}</pre>"
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" title="{escape(type(shown).__name__)}" '
        f'style="width:100%;height:{HEIGHT}px;border:1px solid #8884;border-radius:8px;resize:vertical;overflow:auto" '
        f'srcdoc="{escape(html)}"></iframe>'
    )


def page_of(shown: object) -> str | None:
    """The page of a result; None where it has nothing to draw."""
    if isinstance(shown, Trace):
        return trace_page(shown)
    if isinstance(shown, HeadTable):
        return render("Attention heads", [*_grids(shown), role_effects(shown), best_heads(shown)])
    if isinstance(shown, PatchGrid):
        return patch_page(shown, [])
    if isinstance(shown, Lens):
        return lens_page(shown, None, [])
    if isinstance(shown, LogitAttribution):
        return lens_page(None, shown, [])
    return model_page(shown) if isinstance(shown, ModelInside) else None


def trace_page(trace: Trace) -> str | None:
    """The patterns, vectors and other values of the first row of a trace; None where nothing was read."""
    plain = [site for site in trace if ":" not in site]
    dense = [site for site in plain if site.endswith(".pattern") and trace[site][0].dim() == 3]
    size = sum(packed_bytes(*trace[site][0].shape) for site in dense)
    maps: list[AnyMap] = [one for site in dense if (one := _map(trace, site, whole=size <= WHOLE_BYTES)) is not None]
    reduced = dict.fromkeys(site.partition(":")[0] for site in trace if site.endswith(":top_keys"))
    maps += [one for site in reduced if (one := _reduced(trace, site)) is not None]
    points = _points(trace, plain)
    rest = [values_of(site, trace[site][0]) for site in plain if site not in dense and trace[site][0].numel()]
    tabs = [Tab("Attention", [AttentionSection("Attention", ATTENTION, maps)])] if maps else []
    tabs += [Tab("Vectors", [PlaneSection("Vectors by layer", PLANE, _texts(trace), points)])] if points else []
    tabs += [Tab("Values", [values_table(rest)])] if rest else []
    if not tabs:
        return None
    others = f"the first of {len(trace.tokens)} rows" if len(trace.tokens) > 1 else ""
    return render("Trace", tabs, subtitle=" · ".join(part for part in ("".join(_texts(trace))[:140], others) if part))


def _texts(trace: Trace) -> list[str]:
    return trace.texts[:1] or [" ".join(map(str, trace.tokens[0][:40])) if trace.tokens else ""]


def _axes(trace: Trace, site: str, positions: Sequence[int], keys: int) -> tuple[list[str], list[str]]:
    """The queries at `positions` and the first `keys` keys; those behind the text, as generated ones, have numbers."""
    read = (rows[0] if rows else [] for rows in rows_read(site, trace.tokens, trace.targets))
    own, across = (list(map(str, ids)) if trace.tokenizer is None else trace.tokenizer.tokens(ids) for ids in read)
    queries = [own[at] if at < len(own) else str(at) for at in positions]
    return queries, [*across[:keys], *map(str, range(len(across), keys))]


def _map(trace: Trace, site: str, *, whole: bool) -> AnyMap | None:
    value, positions = trace[site][0].detach().float().cpu().clamp(0, 1), trace.positions(site)[0]
    if len(positions) != value.shape[1] or not value.numel():
        return None  # a mean over positions has no queries
    queries, keys = _axes(trace, site, positions, value.shape[2])
    later = torch.arange(value.shape[2])[None] > torch.tensor(positions)[:, None]
    stack, layer = stack_of(site, causal=not bool(value[:, later].any())), layer_of(site)
    if whole:
        return AttentionMap(stack, layer, queries, keys, value.numpy())
    best = value.topk(min(LARGEST, value.shape[2]))
    return TopMap(stack, layer, queries, keys, best.indices.int().numpy(), best.values.numpy())


def _reduced(trace: Trace, site: str) -> TopMap | None:
    (statistics, *_), positions = trace.statistics(site), trace.positions(f"{site}:top_keys")[0]
    if not statistics.top_keys.numel():
        return None
    queries, keys = _axes(trace, site, positions, statistics.received.shape[-1])
    causal = bool((statistics.top_keys <= torch.tensor(positions)[None, :, None]).all())
    effective, distance = (x.mean(1).tolist() for x in (statistics.effective_keys, statistics.distance))
    measures = {"effective keys": effective, "distance": distance}
    top = statistics.top_weights.float().clamp(0, 1).numpy()
    stack, layer, top_keys = stack_of(site, causal), layer_of(site), statistics.top_keys.int().numpy()
    return TopMap(stack, layer, queries, keys, top_keys, top, measures=measures)


def _points(trace: Trace, plain: Sequence[str]) -> list[PlanePoints]:
    """The residual stream of each stack, where at least two layers of the same positions were read."""
    vectors = [
        site for site in plain if site.endswith((".resid_post", ".resid_pre", "embed")) and trace[site][0].dim() == 2
    ]
    stacks = []
    for stack in dict.fromkeys(stack_of(site, causal=True) for site in vectors):
        names = [site for site in vectors if stack_of(site, causal=True) == stack]
        places = trace.positions(names[0])[0]
        same = [name for name in names if trace.positions(name)[0] == places]
        if len(same) < 2 or len(places) < 2:
            continue
        at, share = planes([trace[name][0].detach().float().cpu() for name in same], torch.tensor(places) > 0)
        tokens = _axes(trace, same[0], places, 0)[0]
        stacks.append(PlanePoints(stack, same, tokens, [0] * len(places), list(places), at.numpy(), share))
    return stacks


def _grids(table: HeadTable) -> list[Section]:
    """All heads of each stack with the role that names them; a head opens its scores in all roles."""
    mains = table.main()
    sections: list[Section] = []
    for stack in dict.fromkeys(at[0] for at in mains):
        cells = {
            at[1:]: ("–" if one is None else one.role, 0.0 if one is None else one.score,
                     [(row.role, row.score) for row in table.of(*at)])
            for at, one in mains.items() if at[0] == stack
        }  # fmt: skip
        about = "Scores from 0 to 1; the table of the best heads has their nulls and effects."
        sections.append(heads_matrix(f"Heads of the {stack}", "", cells, about, absent="–"))
    return sections


def model_page(model: ModelInside) -> str:
    """The page of a model: its facts, and the sites that can be read and changed."""
    spec = model.spec
    parameters = sum(p.numel() for p in model.module.parameters())
    facts = [
        ("Family", f"{spec.family}, {spec.layout}"),
        ("Parameters", f"{parameters:,}"),
        ("Type", str(model.module.dtype).removeprefix("torch.")),
        ("Blocks", ", ".join(f"{len(stack.blocks)} ({name})" for name, stack in spec.stacks.items())),
        ("Vocabulary", f"{spec.vocab:,}" if spec.vocab else "none"),
        ("Context", "no limit" if spec.context is None else f"{spec.context:,} positions"),
        ("From", str(model.path or "memory")),
    ]
    first = [one for one in sites(spec).values() if one.layer in (None, 0)]
    rows = [[one.name, str(one.width), "" if one.heads is None else str(one.heads)] for one in first]
    title = "Sites of the first block; the others have the same"
    return render(
        f"{spec.family} model", [Facts("Model", facts), TableSection(title, ("site", "width", "heads"), rows)]
    )
