"""A whole model as a drawing: its stacks with repeated layers folded, and every kind of block in detail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from math import prod
from pathlib import Path

from triptych.arguments import checked
from triptych.errors import TriptychError, shown
from triptych.files import writable_name
from triptych.program.kind_programs import KindProgram, lower_kinds
from triptych.spec import ModelSpec
from triptych.spec.masks import mask_text
from .details import Describer, Details
from .graph import END, START, Box, boxes_of
from .paint import BESIDE, GAP, STYLE, Canvas, LayerPanel, Rectangle, size_of, text_width

MARGIN = 24.0
TITLE = 58.0  # height of the title and the line below it
IN_A_ROW = 3  # panels
MOST_KINDS = 6  # of blocks drawn in detail
LONGEST_FOLD = 12  # layers in one repeated group
_STACKS = {"encoder": "encode", "decoder": "decode"}


@dataclass(frozen=True)
class Drawing:
    """An SVG document of `width` by `height` pixels; a notebook shows it as a picture."""

    svg: str = field(repr=False)
    width: int
    height: int

    @checked
    def save(self, path: str | Path) -> None:
        """Write it to a file.  Raises TriptychError for the name of another kind of file, and where the file system
        refuses."""
        if Path(path).suffix.lower() != ".svg":
            raise TriptychError(f"a drawing is written as SVG; write {Path(path).with_suffix('.svg')}")
        try:
            Path(writable_name(path)).write_text(self.svg, encoding="utf-8")
        except (OSError, ValueError) as error:  # a zero byte, half of a surrogate pair
            problem = getattr(error, "strerror", error)
            raise TriptychError(f"cannot write the drawing {shown(str(path))}: {problem}; choose another") from None

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True)
class BlockKind:
    """Blocks of one stack that are equal: a name, their layers, the first one's number in the program, and a colour."""

    name: str
    stack: str
    number: int
    layers: tuple[int, ...]
    mask: str
    colour: int


@checked
def draw(spec: ModelSpec) -> Drawing:
    """The model as a picture, from its spec alone: inputs, blocks, heads and their shapes, as its program has them.

    Layers that repeat are folded (`× 30`) and each kind of block is drawn once, in detail; of more than `MOST_KINDS`
    kinds the others are only named.  Letters: N tokens of the batch.  Raises ConfigError where the inputs or the head
    cannot be lowered.
    """
    kinds = lower_kinds(spec)
    blocks = list(_block_kinds(spec, kinds))
    title, facts = _title(spec)
    if more := blocks[MOST_KINDS:]:
        facts += f"; of {len(blocks)} kinds of blocks {MOST_KINDS} are shown, not {', '.join(one.name for one in more)}"
    canvas = Canvas()
    left, bottom = _overview(canvas, spec, blocks)
    right, y, panels = left, MARGIN + TITLE, list(_panels(spec, kinds, blocks[:MOST_KINDS]))
    for row in (panels[i : i + IN_A_ROW] for i in range(0, len(panels), IN_A_ROW)):  # their tops aligned
        x = left
        for panel in row:
            panel.paint(canvas, x, y)
            x += panel.width + MARGIN
        right, y = max(right, x), y + max(panel.height for panel in row) + MARGIN
    width = max(right, 2 * MARGIN + text_width(title, 20), 2 * MARGIN + text_width(facts))
    return _document(title, facts, width, max(bottom, y - MARGIN) + MARGIN, canvas)


def _title(spec: ModelSpec) -> tuple[str, str]:
    both = spec.layout == "encoder-decoder"
    layers = ", ".join(
        f"{f'{name} of ' if both else ''}{len(one.blocks)} layer{'s' * (len(one.blocks) > 1)} of width {one.width:,}"
        for name, one in spec.stacks.items()
    )
    context = "no limit of positions" if spec.context is None else f"{spec.context:,} positions"
    parameters = f"{sum(map(prod, spec.shapes().values())):,} parameters"
    return f"{spec.family}, {spec.layout}", f"{parameters}, {layers}, {context}"


def _document(title: str, facts: str, width: float, height: float, canvas: Canvas) -> Drawing:
    body = "\n".join(canvas.elements)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="triptych-drawing" role="img" aria-label="{escape(title)}: '
        f'{escape(facts)}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape(facts)}</desc>\n<style>{STYLE}</style>\n"
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>\n'
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 16}">{escape(title)}</text>\n'
        f'<text class="quiet" x="{MARGIN}" y="{MARGIN + 38}">{escape(facts)}</text>\n{body}\n</svg>\n'
    )
    return Drawing(svg, round(width), round(height))


# ---------------------------------------------------------------- panels


def _block_kinds(spec: ModelSpec, kinds: KindProgram) -> Iterator[BlockKind]:
    """The different blocks of all stacks, in the order of their first layers."""
    before = 0
    for stack, groups in kinds.layers.items():
        own, side = spec.stacks[stack], f"{stack} " if spec.layout == "encoder-decoder" else ""
        for number, layers in enumerate(groups):
            name = f"{side}block" + (f" {_letter(number)}" if len(groups) > 1 else "")
            mask = mask_text(own.kinds[own.blocks[layers[0]].attn.kind].mask)
            yield BlockKind(name, stack, number, tuple(layers), mask, before % 5)
            before += 1


def _letter(n: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    return (_letter(n // 26 - 1) if n >= 26 else "") + chr(ord("A") + n % 26)


def _panels(spec: ModelSpec, kinds: KindProgram, blocks: Sequence[BlockKind]) -> Iterator[LayerPanel]:
    """Before the layers, each kind of block, and after the layers, of each stack."""
    describer = Describer(kinds.program, spec.ties)
    for stack in spec.stacks:
        boxes = boxes_of(kinds.program, _STACKS[stack])
        side = f"{stack}, " if spec.layout == "encoder-decoder" else ""
        own: list[tuple[int | str, str, str, str, int]] = [
            (START, f"{side}before the layers", "panel", f"{stack}.embed", 0),
            *((block.number, f"{block.name}, {layers_text(block.layers)}", f"panel colour-{block.colour}",
               f"{stack}.blocks.{block.layers[0]}", block.layers[0]) for block in blocks if block.stack == stack),
            (END, f"{side}after the layers", "panel", f"{stack}.end", 0),
        ]  # fmt: skip
        for layer, label, kind, name, first in own:
            # Names of the first layer of a kind stand in the place of those in the program of kinds.
            prefix, first_prefix, details = f"blocks.{layer}.", f"blocks.{first}.", dict[Box, Details]()
            for box in (box for box in boxes if box.layer == layer):
                drawn = describer.details(box)
                box_name, note = (text.replace(prefix, first_prefix) for text in (drawn.name, drawn.note))
                details[box] = replace(drawn, name=box_name, note=note)
            if details:
                yield LayerPanel(details, label, kind, name)


def layers_text(layers: Sequence[int]) -> str:
    """`layer 0`, `layers 0-29`, `13 layers: 0, 2, 4, ... 24`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda at: at[1] - at[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) == 1:
        return f"layers {texts[0]}"
    shown = texts if len(texts) <= 4 else [*texts[:3], f"… {texts[-1]}"]
    return f"{len(layers)} layers: {', '.join(shown)}"


# ---------------------------------------------------------------- the overview


def fold(names: Sequence[str]) -> list[tuple[tuple[str, ...], int]]:
    """`ABABAC` -> `AB` three times less the last: groups of names with how often each group follows itself."""
    folded, i = [], 0
    while i < len(names):
        best = (1, 1)  # length of the group, repeats
        for length in range(1, min(LONGEST_FOLD, len(names) - i) + 1):
            repeats = 1
            while names[i + repeats * length : i + (repeats + 1) * length] == names[i : i + length]:
                repeats += 1
            if repeats > 1 and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        folded.append((tuple(names[i : i + best[0]]), best[1]))
        i += best[0] * best[1]
    return folded


def _overview(canvas: Canvas, spec: ModelSpec, blocks: Sequence[BlockKind]) -> tuple[float, float]:
    """A column for each stack: a box for each layer, groups that repeat once in a frame that says how often.  Gives the
    left edge of what may stand beside it, and its bottom."""
    left, bottom = MARGIN, 0.0
    for stack, own in spec.stacks.items():
        by_layer = {layer: one for one in blocks if one.stack == stack for layer in one.layers}
        boxes = {
            one.name: Details(
                (one.name, f"mask: {one.mask}"), f"{one.name}: {layers_text(one.layers)}",
                kind=f"block colour-{one.colour}",
            )
            for one in by_layer.values()
        }  # fmt: skip
        column = [("", [Details((f"{stack}, before the layers",), kind="value")])]
        for group, repeats in fold([by_layer[i].name for i in range(len(own.blocks))]):
            named = [boxes[name] for name in group]
            column += [(f"× {repeats}", named)] if repeats > 1 else [("", [box]) for box in named]
        column.append(("", [Details((f"{stack}, after the layers",), kind="value")]))
        width = max(size_of(box)[0] for _, group in column for box in group) + 2 * BESIDE
        bottom = max(bottom, _paint_column(canvas, column, left, width))
        left += width + MARGIN
    return left + MARGIN, bottom


def _paint_column(canvas: Canvas, column: Sequence[tuple[str, Sequence[Details]]], left: float, width: float) -> float:
    """Paint groups of boxes, those with a label in a frame, below each other, and give their bottom."""
    y, middle = MARGIN + TITLE, left + width / 2
    for number, (label, boxes) in enumerate(column):
        sizes = [size_of(box) for box in boxes]
        high = sum(size[1] for size in sizes) + GAP * (len(boxes) - 1) + (GAP + BESIDE if label else 0)
        if number:
            canvas.path([(middle, y - GAP), (middle, y)])
        if label:
            canvas.frame(Rectangle(left, y, width, high), label, "fold", f"group {number}")
        inner = y + (GAP if label else 0)
        for i, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
            if i:
                canvas.path([(middle, inner - GAP), (middle, inner)])
            canvas.box(Rectangle(middle - size[0] / 2, inner, *size), box)
            inner += size[1] + GAP
        y += high + GAP
    return y - GAP
