"""`triptych inspect`: the contents of a checkpoint, and the attention and activations of a model on a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.screen import mib, plain, shape
from triptych.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

    from triptych.checkpoints.describe import Description, PartLine
    from triptych.page import AttentionMap
    from triptych.page.inspect import Inspection
    from triptych.spec import ModelSpec

PAGE_OR_PICTURE = (".html", ".htm", ".png")
TOP_KEYS = 4  # keys listed for each query


@options.opens
def inspect(
    checkpoint: options.Checkpoint,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="Text to run the model on.", show_default=False)
    ] = None,
    site: Annotated[
        str | None,
        typer.Option("--site", metavar="GLOB", help="Probe sites to read, for example blocks.0.attn.pattern."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", metavar="I", min=0, help="Read only this layer.", show_default=False)
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="I", min=0, help="Read only this head.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TEXT", help="Input of an encoder-decoder's decoder; by default generated."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the attention to an offline .html page or a .png picture, with --draw the drawing to an .svg.",
        ),
    ] = None,
    program: Annotated[
        bool, typer.Option("--program", help="Show the forward as a list of operations with shapes.")
    ] = False,
    draw: Annotated[
        bool,
        typer.Option("--draw", help="Draw the model as SVG; MODEL may also be config.json or a name that count knows."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show what a checkpoint contains, from its header; with TEXT, the attention and activations on it."""
    if draw:
        selects = {"TEXT": text, "--site": site, "--layer": layer, "--head": head, "--target": target}
        if other := [name for name, value in selects.items() if value is not None] or ["--program"] * program:
            raise typer.BadParameter(f"--draw shows the model itself, of any text; leave out {other[0]}")
        _draw(checkpoint, save=save, as_json=as_json)
        return
    need_text = {"--site": site, "--layer": layer, "--head": head, "--target": target, "--save": save}
    if program:
        if text is not None or any(value is not None for value in need_text.values()):
            raise typer.BadParameter("--program shows the forward of any text; leave out TEXT and what selects of it")
        _show_program(checkpoint, as_json=as_json)
        return
    if text is None:
        if alone := [name for name, value in need_text.items() if value is not None]:
            raise typer.BadParameter(f"{alone[0]} needs a TEXT to run the model on")
        _show_header(checkpoint.model, ignore=checkpoint.ignore or (), offline=checkpoint.offline, as_json=as_json)
        return
    if save is not None:
        screen.check_suffix(save, PAGE_OR_PICTURE, "--save")
    from triptych.cli.loading import load_model
    from triptych.page.inspect import inspect_text

    model = load_model(checkpoint)
    inspection = inspect_text(model, text, target=target, site=site, layer=layer, head=head)
    _show_inspection(inspection, checkpoint.model, save=save, as_json=as_json)


def _show_header(model: str, *, ignore: Sequence[str], offline: bool, as_json: bool) -> None:
    from triptych.checkpoints.describe import describe
    from triptych.checkpoints.load_report import by_reason

    description = describe(model, ignore=ignore, offline=offline)
    if as_json:
        screen.result(description.to_dict() | {"sites": _sites(description.spec)})
        return
    out = screen.console()
    screen.show(screen.facts(_summary(description)), plain(description.path))
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
    from triptych.checkpoints.header import read_header
    from triptych.nn import empty
    from triptych.program import lower

    header = read_header(checkpoint.model, ignore=checkpoint.ignore or (), offline=checkpoint.offline)
    program = lower(empty(header.spec))
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
    from triptych.cli.loading import header_of
    from triptych.draw import draw

    if save is not None:
        screen.check_suffix(save, (".svg",), "--save")
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
        f"{name} {plain(one['text'])} = {one['id']}" for name, one in description.tokenizer["specials"].items()
    )
    chat = "has a chat template" if description.tokenizer["chat_template"] else "no chat template"
    stops = " ".join(map(str, description.tokenizer["stop_ids"])) or "none"
    rows += [("tokenizer", f"{description.tokenizer['tokens']:,} tokens; {chat}; ends generation: {stops}")]
    return [*rows, ("special tokens", specials)] if specials else rows


def _tree(root: PartLine) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    def label(one: PartLine) -> Text:
        return Text.assemble((one.name, "bold"), "  ", (one.text, "dim"))

    def grow(node: Tree, one: PartLine) -> Tree:
        for below in one.below:
            grow(node.add(label(below)), below)
        return node

    return grow(Tree(label(root), guide_style="dim"), root)


def _tensors(description: Description) -> Table:
    """One row for all tensors whose names differ only by the number of their block or expert."""
    Key = tuple[tuple[str, ...], tuple[int, ...], str, str, str]
    groups: dict[Key, list[tuple[tuple[str, ...], int]]] = {}
    for one in description.tensors:
        names, numbers = numberless((one.name, *experts_in_one(one.becomes)))
        groups.setdefault((names, one.shape, one.dtype, one.op, one.file), []).append((numbers, one.nbytes))
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


def _show_inspection(inspection: Inspection, name: str, *, save: Path | None, as_json: bool) -> None:
    """Attention and activations: written to `save`, or as tables."""
    if save is not None:
        _save(inspection, name, save)
    if as_json:
        maps = [
            {"stack": m.stack, "layer": m.layer, "heads": m.head_names, "queries": list(m.queries),
             "keys": list(m.keys), "pattern": m.weights.tolist()}
            for m in inspection.maps
        ]  # fmt: skip
        values = [asdict(one) for one in inspection.values]
        screen.result({"text": inspection.text, "target": inspection.target, "maps": maps, "values": values})
    elif save is None:
        if inspection.target is not None:
            screen.note(f"target: {plain(inspection.target)}")
        for one in inspection.maps:
            _map(one)
        if inspection.values:
            _values(inspection)


def _save(inspection: Inspection, name: str, path: Path) -> None:
    from triptych.page import AttentionSection, write
    from triptych.page.plot import png

    if path.suffix.lower() == ".png":
        if not inspection.maps:
            raise InputError("a picture shows attention; choose a site that ends in .pattern")
        png(path, AttentionSection("Attention", "", inspection.maps))
        screen.note(f"wrote {path}")
    else:
        write(path, inspection.page(name))
        screen.note(f"wrote {path}; open it in a browser")


def _map(one: AttentionMap) -> None:
    """For each query the keys with the largest weights, averaged over the heads."""
    heads = f"head {one.head_names[0]}" if len(one.head_names) == 1 else f"mean of {len(one.head_names)} heads"
    table = screen.table("query", "keys with the largest weights")
    for query, row in zip(one.queries, one.weights.mean(axis=0), strict=True):
        best = sorted(range(len(row)), key=lambda s: -row[s])[:TOP_KEYS]
        keys = "   ".join(f"{plain(one.keys[s])} {row[s]:.0%}" for s in best if row[s] >= 0.005)
        table.add_row(plain(query), keys)
    screen.show(table, f"{one.stack} layer {one.layer}, {heads}")


def _values(inspection: Inspection) -> None:
    numbers = ["mean", "std", "min", "max", "norm"]
    table = screen.table("site", "shape", *numbers, right=["shape", *numbers])
    for one in inspection.values:
        cells = ("" if x != x else f"{x:,.3f}" for x in (one.mean, one.std, one.least, one.most, one.norm))
        table.add_row(one.site, shape(one.shape), *cells)
    screen.show(table)
