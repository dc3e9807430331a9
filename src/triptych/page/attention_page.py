"""The page of one text inside a model: attention, names of heads, lens, other texts beside it, patching, vectors.

`triptych inspect --save`, `triptych heads --save` and notebooks show the same page; a part is there where its numbers
are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from triptych.errors import TriptychError
from triptych.model import Model
from triptych.probe import ROLES, HeadTable, PatchGrid, Read, Trace
from triptych.probe.lenses import layer_sites
from triptych.probe.prompts import ProbedModel, name_tokens
from . import (
    AnyMap,
    AttentionSection,
    ComparisonSection,
    Facts,
    MatrixSection,
    PlanePoints,
    PlaneSection,
    Section,
    Tab,
    TableSection,
    render,
)
from .drawing import shortened
from .inside_sections import Detail
from .inspect import NAMES, Inspection, Values
from .interventions import LENS, lens_matrix, patch_sections

LENS_TOKENS = 64  # positions of a lens in a page; of longer texts the last ones
LENS_TOP = 5
EXACT_TOKENS = 6144  # tokens that patching may run; above, the grid is estimated by one backward pass
MOST_POINTS = 320  # tokens in a plane, of all texts together

ATTENTION = "Rows are queries, columns are keys; each row sums to 1."
NAMED = (
    " Heads are named by the tokens that get most of their weight in this text; the command triptych heads compares "
    "such names with chance."
)
TESTED = (
    " The frame of a head has the colour of the role that names it. A role describes which tokens get its weight; the "
    "tables under Roles show the effect of removing the head."
)
LONG = " Only the largest weights of each query are stored; with --layer and --head, all weights of the selected heads."
PLANE = (
    "Each token's vector after each block, of length 1, in the two directions in which these vectors differ most "
    "(principal components of each layer, rotated to match the layer before). The first token of each text, which "
    "often has a direction of its own, is not used to compute these directions. Choose a word to follow it."
)
COMPARED = (
    "The same head on both texts. The number under a head is the distance between its two patterns: half the sum of "
    "the absolute differences of a query's weights, averaged over the queries; 0 for equal patterns, 1 for patterns "
    "without common keys. For texts of different lengths it is the larger difference in the weight of the first and "
    "of the previous token. Where only the largest weights of a query are stored, it is computed from these."
)

TEXT = "The dog that the boys had seen, and that had run away, sat by the river bank. They called the dog."


def inside_page(
    model: Model,
    inspections: Sequence[Inspection],
    name: str,
    *,
    table: HeadTable | None = None,
    title: str = "Inside a model",
    stage: Callable[[str], None] | None = None,
) -> str:
    """The first inspection as one offline HTML page, with the others, texts of the same model, beside it.

    `table` has the tested roles of the heads, which then stand in place of the names from this text.  What a model or
    text has no place for (a lens without a head over tokens, patching between texts of other lengths) is left out,
    and the page says why.  Raises InputError where there are no maps.
    """
    first = inspections[0]
    maps = [_with_roles(one, table) for one in first.attention]
    note = ATTENTION + (TESTED if table else NAMED) + (LONG if first.largest else "")
    tabs = [Tab("Attention", [AttentionSection("Attention", note, maps)]), _roles(maps, table)]
    left_out: list[tuple[str, str]] = []
    parts = {"Lens": _lens, "Two texts": _comparison, "Patching": _patching, "Vectors": _plane}
    for what, make in parts.items():
        if len(inspections) < 2 and what in ("Two texts", "Patching"):
            continue
        if stage is not None and what != "Two texts":
            stage(what.lower())
        try:
            tabs.append(Tab(what, make(model, inspections)))
        except TriptychError as error:
            left_out.append((what, str(error)))
    tabs.append(Tab("Run", _run(model, inspections, name, left_out, table)))
    return render(title, tabs, subtitle=shortened(" ".join(first.text.split()), 140))


def _with_roles(layer_map: AnyMap, table: HeadTable | None) -> AnyMap:
    if table is None:
        return layer_map
    mains = table.main()
    rows = [mains.get((layer_map.stack, layer_map.layer, head)) for head in layer_map.head_names]
    return replace(layer_map, roles=["" if row is None else _role(row.role, row.offset) for row in rows])


def _role(name: str, offset: int | None) -> str:
    return name + (f" {offset:+d}" if offset else "")


def _roles(maps: Sequence[AnyMap], table: HeadTable | None) -> Tab:
    """All heads of each stack with their names and numbers, and the tested roles where they were measured."""
    sections: list[Section] = []
    stacks = dict.fromkeys(layer_map.stack for layer_map in maps)
    for stack in stacks:
        cells = {}
        of_stack = [layer_map for layer_map in maps if layer_map.stack == stack]
        for layer_map in sorted(of_stack, key=lambda layer_map: len(layer_map.head_names)):
            for i, (head, role) in enumerate(zip(layer_map.head_names, layer_map.roles or repeat(""), strict=False)):
                numbers = [(name, values[i]) for name, values in (layer_map.measures or {}).items()]
                cells[layer_map.layer, head] = (role or "–", 0.5 if role else 0.0, numbers)
        title = "Heads" if len(stacks) == 1 else f"Heads of the {stack}"
        note = "" if sections or table else "; ".join(f"{role}: {reads}" for role, reads in NAMES.items()) + "."
        sections.append(heads_matrix(title, note, cells, "Means over the queries of this text."))
    if table is not None:
        sections = [role_effects(table), best_heads(table), *sections]
    return Tab("Roles", sections)


def heads_matrix(
    title: str, note: str, cells: Mapping[tuple[int, int], tuple[str, float, Detail]], about: str, absent: str = ""
) -> MatrixSection:
    """Layers by heads; `cells` are the text, shade and details of a (layer, head), `absent` the text of one without."""
    layers, heads = (sorted(set(numbers)) for numbers in zip(*cells, strict=True))
    grid = [[cells.get((layer, head), (absent, 0.0, [])) for head in heads] for layer in layers]
    rows, columns = [f"layer {layer}" for layer in layers], [f"head {head}" for head in heads]
    texts, shade, details = ([[cell[part] for cell in row] for row in grid] for part in range(3))
    return MatrixSection(title, note, rows, columns, texts, shade, details, about, (0, 0))  # type: ignore[arg-type]


def _lens(model: Model, inspections: Sequence[Inspection]) -> list[Section]:
    inspection = inspections[0]
    length = len(inspection.target_ids or inspection.ids)
    positions = range(max(0, length - LENS_TOKENS), length)
    lens = model.lens(inspection.ids, top=LENS_TOP, positions=list(positions), target=inspection.target_ids)
    cut = f" These are the last {LENS_TOKENS} of {length:,} tokens." if length > LENS_TOKENS else ""
    return [lens_matrix(lens, "The likeliest token after each block", LENS + cut)]


def _comparison(_: Model, inspections: Sequence[Inspection]) -> list[Section]:
    others = [AttentionSection("Attention", "", one.attention) for one in inspections[1:]]
    return [ComparisonSection("Two texts side by side", COMPARED, [one.text for one in inspections], others)]


def _patching(model: Model, inspections: Sequence[Inspection]) -> list[Section]:
    """What of the first text, put into the second, brings its answer back."""
    (clean, target), (corrupt, other) = ((one.ids, one.target_ids) for one in inspections[:2])
    depth = sum(len(stack.blocks) for stack in model.spec.stacks.values())
    tokens = len(corrupt) + len(other or ())
    answer = None  # the whole distribution; of a decoder what it writes after each text, where these differ
    if model.spec.layout == "decoder":
        first, second = (int(model.logits([ids])[0][-1].argmax()) for ids in (clean, corrupt))
        answer = None if first == second else (first, second)
    estimated = depth * tokens * tokens > EXACT_TOKENS
    grid: PatchGrid = model.patch(clean, corrupt, answer=answer, target=target, gradient=estimated)
    return patch_sections(grid, [("Clean", inspections[0].text), ("Corrupt", inspections[1].text)])


def _plane(model: Model, inspections: Sequence[Inspection]) -> list[Section]:
    stacks = [_points(model, name, inspections) for name in model.spec.stacks]
    return [PlaneSection("Vectors by layer", PLANE, [one.text for one in inspections], [one for one in stacks if one])]


def _points(model: Model, stack: str, inspections: Sequence[Inspection]) -> PlanePoints | None:
    """The tokens of all texts in one stack, in the plane of each of its layers."""
    layers = layer_sites(model.spec, stack)
    of_target = stack == "decoder" and model.spec.layout == "encoder-decoder"
    each = max(4, MOST_POINTS // len(inspections))
    traces: list[Trace] = []
    points: list[tuple[str, int, int]] = []  # token, number of the text, and place in it
    for number, one in enumerate(inspections):
        ids = (one.target_ids or []) if of_target else one.ids
        count = min(each, len(ids))
        at = sorted({round(i * (len(ids) - 1) / max(1, count - 1)) for i in range(count)})
        targets = None if one.target_ids is None else [one.target_ids]
        traces.append(model.trace([one.ids], targets, read=[Read(site, at=at) for site in layers]))
        names = name_tokens(model, ids)
        points += [(names[i], number, i) for i in at]
    if len(points) < 2:
        return None
    tokens, text, place = zip(*points, strict=True)
    vectors = [torch.cat([trace[site][0].float().cpu() for trace in traces]) for site in layers]
    at_layers, share = planes(vectors, torch.tensor(place) > 0)
    short = [site.rpartition("blocks.")[2].removesuffix(".resid_post") for site in layers]
    names = ["embedding", *(f"block {number}" for number in short[1:])]
    return PlanePoints(stack, names, tokens, text, place, at_layers.numpy(), share)


def planes(vectors: Sequence[Tensor], counted: Tensor) -> tuple[Tensor, list[float]]:
    """Vectors [N, D] of each of L layers -> points [L, N, 2] in fp64, and the share of the variance that they show.

    Each layer's vectors are scaled to length 1 and projected on its first two principal components.  Those that are not
    `counted` [N] do not decide the components (unless fewer than three do).  A plane has no direction of its own: each
    is turned or mirrored to come nearest to the one before (orthogonal Procrustes).
    """
    counted = counted if int(counted.sum()) > 2 else torch.ones_like(counted)
    points, share = list[Tensor](), list[float]()
    for layer in vectors:
        x = torch.nn.functional.normalize(layer.double(), dim=-1)
        mean = x[counted].mean(0)
        _, sizes, directions = torch.linalg.svd(x[counted] - mean, full_matrices=False)
        two = torch.zeros(2, x.shape[1], dtype=x.dtype)
        two[: min(2, len(directions))] = directions[:2]
        place = (x - mean) @ two.T
        if points:
            left, _, right = torch.linalg.svd(place.T @ points[-1])
            place = place @ (left @ right)
        points.append(place)
        whole = float(sizes.square().sum())
        share.append(float(sizes[:2].square().sum()) / whole if whole > 0 else 0.0)
    return torch.stack(points), share


def _run(
    model: Model, inspections: Sequence[Inspection], name: str, left_out: Sequence[tuple[str, str]],
    table: HeadTable | None,
) -> list[Section]:  # fmt: skip
    first = inspections[0]
    parameters = sum(p.numel() for p in model.module.parameters())
    facts = [("Model", name), ("Family", f"{model.spec.family}, {model.spec.layout}, {parameters:,} parameters")]
    for number, one in enumerate(inspections):
        label = "Text" if len(inspections) == 1 else f"Text {number + 1}"
        facts.append((label, one.text))
        facts += [(f"{label}, target", one.target)] if one.target is not None else []
    facts.append(("Tokens", " and ".join(f"{len(one.ids):,}" for one in inspections)))
    if table is not None:
        mains = table.main()
        facts += [("Heads", str(len(mains))), ("Named", str(sum(row is not None for row in mains.values())))]
        facts.append(("Seed", str(table.seed)))
    facts += [(f"No {what.lower()}", reason) for what, reason in left_out]
    sections: list[Section] = [Facts("What was run", facts)]
    return sections + ([values_table(first.values)] if first.values else [])


def values_table(values: Sequence[Values]) -> TableSection:
    """Numbers of the sites that are no patterns."""
    header = ("site", "shape", "mean", "std", "min", "max", "norm")
    rows = [
        [one.site, " × ".join(map(str, one.shape)),
         *("–" if x != x else f"{x:,.3f}" for x in (one.mean, one.std, one.least, one.most, one.norm))]
        for one in values
    ]  # fmt: skip
    return TableSection("Values at other sites", header, rows)


# ---------------------------------------------------------------- tested roles


def sample_text(model: ProbedModel) -> str:
    """As many words of TEXT, from the first, as the model reads."""
    spec, words = model.spec, TEXT.split()
    longest = spec.longest_row if spec.encoder is None else spec.source_context
    beginnings = (" ".join(words[:count]) for count in range(len(words), 0, -1))
    return next((text for text in beginnings if longest is None or len(model.ids([text])[0]) <= longest), TEXT)


def role_effects(table: HeadTable) -> TableSection:
    """Each role with its heads, and what is lost without the best of them."""
    together = {one.role: one for one in table.together}
    rows = []
    for role, best in table.roles.items():
        one = together.get(role)
        effect = "–" if one is None else f"{one.effect:.3f}"
        # One other set of as many heads says nothing about chance.
        random = f"{one.random_mean:.3f}" if one is not None and len(one.random) > 1 else "–"
        rows.append([role, ROLES.get(role, "pairs of words"), str(len(best)), effect, random])
    rows += [[role, f"not measured: {reason}", "–", "–", "–"] for role, reason in table.not_measured.items()]
    header = ("role", "reads", "heads", f"without the best, {table.unit}", "without random heads")
    return TableSection("Roles", header, rows)


def best_heads(table: HeadTable) -> TableSection:
    """The best heads of each role with their nulls and effects."""
    rows = []
    for role, best in table.roles.items():
        for row in best[:5]:
            numbers = [f"{x:.2f}" for x in (row.score, row.even, row.threshold)]
            effects = ["–" if x is None else f"{x:.3f}" for x in (row.effect, row.random_effect)]
            rows.append([row.name, _role(role, row.offset), *numbers, *effects])
    header = ("head", "role", "score", "even weights", "threshold", "without it", "without a random head")
    return TableSection("The best heads of each role", header, rows)
