"""`triptych inspect`: the contents of a checkpoint, and the attention and activations of a model on a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from triptych.errors import InputError
from . import options, screen
from .loading import base_header, base_of, check_file, header_of, load_measured
from .screen import mib, plain, shape

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

    from triptych.checkpoints.describe import Description, PartLine
    from triptych.model import Model
    from triptych.page import AnyMap, AttentionMap, TopMap
    from triptych.page.inspect import Inspection
    from triptych.spec import ModelSpec

SAVED = (*screen.PAGE, ".svg", ".png", ".json")
MOST_DRAWN = 64  # heads in a picture of matplotlib
TOP_KEYS = 4  # keys listed for each query


def inspect(
    checkpoint: options.Checkpoint,
    text: options.Text = None,
    *,
    site: str | None = None,
    layer: options.Natural | None = None,
    head: options.Natural | None = None,
    target: str | None = None,
    beside: list[str] | None = None,
    save: Path | None = None,
    program: bool = False,
    draw: bool = False,
    as_json: options.Json = False,
) -> None:
    """Show what a checkpoint contains, from its header; with TEXT, the attention and activations on it.

    --site GLOB: Probe sites to read, for example blocks.0.attn.pattern.
    --layer I: Read only this layer.
    --head I: Read only this head.
    --target TEXT: Input of an encoder-decoder's decoder; by default generated.
    --beside TEXT: Another text, shown beside the first in a page. Repeatable.
    --save FILE: Write an offline .html page, an .svg or .png picture, or .json; with --draw the drawing, as .svg.
    --program: Show the forward as a list of operations with shapes.
    --draw: Draw the model as SVG; MODEL may also be config.json or a name that count knows.
    """
    selects = {
        "TEXT": text, "--site": site, "--layer": layer, "--head": head, "--target": target, "--beside": beside or None
    }  # fmt: skip
    named = [name for name, value in selects.items() if value is not None]
    if draw:
        if other := named or ["--program"] * program:
            raise typer.BadParameter(f"--draw shows the model itself, of any text; leave out {other[0]}")
        _draw(checkpoint, save=save, as_json=as_json)
    elif program:
        if named or save is not None:
            raise typer.BadParameter(f"--program shows the forward of any text; leave out {(named or ['--save'])[0]}")
        _show_program(checkpoint, as_json=as_json)
    elif text is None:
        if alone := named or ["--save"] * (save is not None):
            raise typer.BadParameter(f"{alone[0]} needs a TEXT to run the model on")
        _show_header(checkpoint, as_json=as_json)
    else:
        _check_texts(text, beside or [], save)
        inspections = _inspected(checkpoint, [text, *(beside or [])], site, layer, head, target, save)
        if as_json:
            screen.result(_as_json(inspections[0]))
        elif save is None:
            _show_inspection(inspections[0])


def _inspected(
    checkpoint: options.Checkpoint, texts: Sequence[str], site: str | None, layer: int | None, head: int | None,
    target: str | None, save: Path | None,
) -> list[Inspection]:  # fmt: skip
    """What the model does on each text, written to the file where one is named."""
    if save is not None:
        check_file(save, SAVED, "--save")
    from triptych.page.inspect import check_selection, inspect_text

    # The header alone says whether the site, layer and head are there: nothing is loaded for a misspelt one.
    spec = base_header(checkpoint).spec
    check_selection(spec, site, layer, head, maps=save is not None and save.suffix.lower() != ".json")
    model = load_measured(checkpoint)
    with screen.stages() as stage:
        inspections = []
        for number, text in enumerate(texts):
            stage(f"text {number + 1}" if len(texts) > 1 else "reading")
            inspections.append(inspect_text(model, text, target=target, site=site, layer=layer, head=head))
        if save is not None:
            _save(model, inspections, checkpoint.model, save, stage)
    if save is not None:
        screen.note(f"wrote {save}" + ("; open it in a browser" if save.suffix.lower() in screen.PAGE else ""))
    return inspections


def _check_texts(text: str, beside: Sequence[str], save: Path | None) -> None:
    """Raise BadParameter for texts that are empty, or shown beside another without a page."""
    for name, one in (("TEXT", text), *(("--beside", one) for one in beside)):
        if not one.strip():
            raise typer.BadParameter(f"{name} is empty; write a text to run the model on")
    if beside and (save is None or save.suffix.lower() not in screen.PAGE):
        raise typer.BadParameter("--beside shows texts side by side in a page; add --save FILE.html")


def _show_header(checkpoint: options.Checkpoint, *, as_json: bool) -> None:
    from triptych.checkpoints.describe import describe
    from triptych.checkpoints.source import by_reason

    model = base_of(checkpoint.model, shown=True)
    description = describe(model, ignore=checkpoint.ignore or (), offline=checkpoint.offline)
    if as_json:
        screen.result(description.to_dict() | {"sites": _sites(description.spec)})
        return
    out = screen.console()
    screen.show(screen.facts(_summary(description)), description.path)
    out.print()
    out.print(_tree(description.tree))
    out.print()
    out.print(_tensors(description))
    notes = [f"{alias} is {source}" for alias, source in description.ties.items()]
    notes += [f"not read: {line}" for line in by_reason(description.ignored)]
    for line in notes:
        out.print(line)
    out.print("\nsites for --site ({i} is the number of a block):", style="dim")
    out.print("  ".join(_sites(description.spec)))


def _show_program(checkpoint: options.Checkpoint, *, as_json: bool) -> None:
    """The model's forward, lowered from its header alone: no weights are read."""
    from triptych.nn import empty
    from triptych.program import lower

    program = lower(empty(base_header(checkpoint, shown=True).spec))
    if as_json:
        screen.result(program.to_json())
        return
    out = screen.console()
    for name in program.entries:
        out.print(name, style="bold")
        for line in program.lines(name):
            out.print(f"  {plain(line)}", soft_wrap=True, highlight=False)
    for module, reason in program.unlowered.items():
        screen.note(f"{module} runs as a module: {reason}")


def _draw(checkpoint: options.Checkpoint, *, save: Path | None, as_json: bool) -> None:
    """The model as SVG, from its header alone: into a file, or on stdout."""
    from triptych.draw import draw

    screen.check_suffix(save, (".svg",))
    drawing = draw(header_of(checkpoint.model, checkpoint.ignore or (), offline=checkpoint.offline).spec)
    if save is not None:
        drawing.save(save)
        screen.note(f"wrote {save}; a browser shows it")
    if as_json:
        screen.result({"svg": drawing.svg, "width": drawing.width, "height": drawing.height})
    elif save is None:
        print(drawing.svg, end="")


def _sites(spec: ModelSpec) -> list[str]:
    """The probe sites of a model, with `{i}` for the number of a block."""
    from triptych.probe.sites import sites

    return list(dict.fromkeys(re.sub(r"blocks\.\d+", "blocks.{i}", name) for name in sites(spec)))


def _summary(description: Description) -> list[tuple[str, str]]:
    rows = [
        ("family", f"{description.family}, {description.layout}"),
        ("parameters", f"{description.parameters:,}"),
        ("stored", f"{mib(description.stored_bytes)} in {len(description.tensors):,} tensors"),
        ("vocabulary", f"{description.vocab:,}" if description.vocab else "none"),
        ("context", "no limit" if description.context is None else f"{description.context:,} positions"),
    ]
    if description.tokenizer is None:
        return [*rows, ("tokenizer", "none")]
    specials = ", ".join(
        f"{name} {special['text']} = {special['id']}" for name, special in description.tokenizer["specials"].items()
    )
    chat = "has a chat template" if description.tokenizer["chat_template"] else "no chat template"
    stops = " ".join(map(str, description.tokenizer["stop_ids"])) or "none"
    rows += [("tokenizer", f"{description.tokenizer['tokens']:,} tokens; {chat}; ends generation: {stops}")]
    return [*rows, ("special tokens", specials)] if specials else rows


def _tree(root: PartLine) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    def label(part: PartLine) -> Text:
        return Text.assemble((part.name, "bold"), "  ", (part.text, "dim"))

    def grow(node: Tree, part: PartLine) -> Tree:
        for below in part.below:
            grow(node.add(label(below)), below)
        return node

    return grow(Tree(label(root), guide_style="dim"), root)


def _tensors(description: Description) -> Table:
    """One row for all tensors whose names differ only by the number of their block or expert."""
    Key = tuple[tuple[str, ...], tuple[int, ...], str, str, str]
    groups: dict[Key, list[tuple[tuple[str, ...], int]]] = {}
    for entry in description.tensors:
        names, numbers = numberless((entry.name, *experts_in_one(entry.becomes)))
        groups.setdefault((names, entry.shape, entry.dtype, entry.op, entry.file), []).append((numbers, entry.nbytes))
    table = screen.table(
        "stored tensor", "becomes", "shape", "dtype", "size", "operation", "file", right=["shape", "size"]
    )
    for (names, sizes, dtype, op, file), members in groups.items():
        every = zip(*(numbers for numbers, _ in members), strict=True)
        for letter, numbers in zip("ie", every, strict=False):
            names = tuple(name.replace(f"{{{letter}}}", ranges({int(x) for x in numbers})) for name in names)
        stored, *becomes = map(plain, names)
        size = mib(sum(nbytes for _, nbytes in members))
        table.add_row(stored, "\n".join(becomes), shape(sizes), dtype, size, op, plain(file))
    return table


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def numberless(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names with `{i}` for the first number they all share and `{e}` for the second, and those numbers."""
    shared: list[str] = []
    for letter, numbers in zip("ie", zip(*map(_NUMBER.findall, names), strict=False), strict=False):
        if len(set(numbers)) > 1:
            break
        shared.append(numbers[0])
        names = tuple(_NUMBER.sub(f"{{{letter}}}", name, count=1) for name in names)
    return names, tuple(shared)


def experts_in_one(names: tuple[str, ...]) -> tuple[str, ...]:
    """`a.0.b`, `a.1.b` -> `a.0-1.b`: what a tensor that holds all experts becomes."""
    groups: dict[str, list[int]] = {}
    for name in names:
        numbers = list(_NUMBER.finditer(name))[-1:]
        start, end = numbers[0].span() if numbers else (len(name), len(name))
        groups.setdefault(f"{name[:start]}{{}}{name[end:]}", []).extend(int(number[0]) for number in numbers)
    return tuple(pattern.format(ranges(numbers)) for pattern, numbers in groups.items())


def ranges(numbers: Collection[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _as_json(inspection: Inspection) -> dict[str, object]:
    """All that was read: of long texts the largest weights of each query."""

    def described(layer_map: AnyMap, weights: dict[str, object]) -> dict[str, object]:
        measures = {name: list(values) for name, values in (layer_map.measures or {}).items()}
        return {
            "stack": layer_map.stack, "layer": layer_map.layer, "heads": layer_map.head_names,
            "names": list(layer_map.roles or ()), "measures": measures, "queries": list(layer_map.queries),
            "keys": list(layer_map.keys), **weights,
        }  # fmt: skip

    maps = [described(layer_map, {"pattern": layer_map.weights.tolist()}) for layer_map in inspection.maps]
    largest = [
        described(layer_map, {"top_keys": layer_map.top_keys.tolist(), "top_weights": layer_map.top_weights.tolist()})
        for layer_map in inspection.largest
    ]
    values = [asdict(value) for value in inspection.values]
    document: dict[str, object] = {"text": inspection.text, "target": inspection.target, "maps": maps, "values": values}
    return document | ({"largest": largest} if largest else {})


def _show_inspection(inspection: Inspection) -> None:
    """Attention and activations as tables."""
    if inspection.target is not None:
        screen.note(f"target: {plain(inspection.target)}")
    for summary in inspection.largest:
        _numbers(summary)
    for layer_map in inspection.maps:
        _map(layer_map)
    if inspection.values:
        _values(inspection)


def _save(model: Model, inspections: Sequence[Inspection], name: str, path: Path, stage: Callable[[str], None]) -> None:
    """The page, picture or numbers, by the ending of `path`."""
    from triptych.page import AttentionSection, write
    from triptych.page.attention_page import inside_page
    from triptych.page.drawing import svg
    from triptych.page.plot import png

    kind, maps = path.suffix.lower(), inspections[0].attention
    if kind == ".json":
        write(path, json.dumps({"made_by": "Triptych", "model": name} | _as_json(inspections[0]), ensure_ascii=False))
    elif kind == ".svg":
        write(path, svg(maps, "Attention", screen.COMMAND.get()))
    elif kind == ".png":
        if sum(len(layer_map.head_names) for layer_map in maps) > MOST_DRAWN or inspections[0].largest:
            raise InputError(
                f"a .png has at most {MOST_DRAWN} heads with all their weights; select them with --layer and --head, or"
                " save an .svg or .html file"
            )
        png(path, AttentionSection("Attention", "", maps))
    else:
        write(path, inside_page(model, inspections, name, stage=stage))


def _map(layer_map: AttentionMap) -> None:
    """For each query the keys with the largest weights, averaged over the heads."""
    names = layer_map.head_names
    heads = f"head {names[0]}" if len(names) == 1 else f"mean of {len(names)} heads"
    lines = []
    for query, row in zip(layer_map.queries, layer_map.weights.mean(axis=0), strict=True):
        best = sorted(range(len(row)), key=lambda s: -row[s])[:TOP_KEYS]
        lines.append((query, "   ".join(f"{layer_map.keys[s]} {row[s]:.0%}" for s in best if row[s] >= 0.005)))
    title = f"{layer_map.stack} layer {layer_map.layer}, {heads}"
    screen.show_rows(("query", "keys with the largest weights"), lines, title)


def _numbers(layer_map: TopMap) -> None:
    """Of a long text: each head with the means over its queries."""
    measures, roles = layer_map.measures or {}, layer_map.roles
    lines = [
        (str(head), (roles[i] if roles else "") or "–", *(f"{values[i]:,.3g}" for values in measures.values()))
        for i, head in enumerate(layer_map.head_names)
    ]
    title = f"{layer_map.stack} layer {layer_map.layer}, means over {len(layer_map.queries):,} queries"
    screen.show_rows(("head", "name", *measures), lines, title, right=list(measures))


def _values(inspection: Inspection) -> None:
    numbers = ["mean", "std", "min", "max", "norm"]
    lines = []
    for value in inspection.values:
        cells = ("" if x != x else f"{x:,.3f}" for x in (value.mean, value.std, value.least, value.most, value.norm))
        lines.append((value.site, shape(value.shape), *cells))
    screen.show_rows(("site", "shape", *numbers), lines, right=["shape", *numbers])
