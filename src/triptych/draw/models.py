"""A whole model as a drawing: its stacks with repeated layers folded, and every kind of block in detail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import prod
from pathlib import Path

from triptych.arguments import checked
from triptych.draw.blocks import AnyBlock, act_box, block_node, conv_box, factor_text, linear_box, norm_box
from triptych.draw.shapes import GAP, PAD, Box, Canvas, Column, Frame, Node, Point, Row, Sum, runs, stack, text_width
from triptych.draw.style import STYLE
from triptych.errors import TriptychError
from triptych.spec import (
    ClassHeadSpec,
    EmbedSpec,
    FramesSpec,
    Head,
    KindSpec,
    LearnedSpec,
    LMHeadSpec,
    MaskedLMHeadSpec,
    ModelSpec,
    PatchesSpec,
    PoolingSpec,
    ReplacedHeadSpec,
    SinusoidalSpec,
    SpanHeadSpec,
    StackSpec,
    TokenHeadSpec,
    TransformSpec,
)
from triptych.spec.masks import mask_text

MARGIN = 24.0
TITLE = 58.0  # height of the title and the line below it
APART = 60.0  # between columns of the overview, and between it and the blocks
IN_A_ROW = 3  # blocks in detail
MOST_KINDS = 6  # of blocks drawn in detail
LONGEST_FOLD = 12  # layers in one repeated group


@dataclass(frozen=True)
class Drawing:
    """An SVG document of `width` by `height` pixels; a notebook shows it as a picture."""

    svg: str = field(repr=False)
    width: int
    height: int

    @checked
    def save(self, path: str | Path) -> None:
        """Write it to a file.  Raises TriptychError where the file system refuses."""
        try:
            Path(path).write_text(self.svg, encoding="utf-8")
        except OSError as error:
            problem = f"cannot write the drawing {path}: {error.strerror}"
            raise TriptychError(f"{problem}; choose another place for it") from None

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True)
class BlockKind:
    """Blocks of one stack that are equal: their layers, a name, and a colour of the style."""

    block: AnyBlock
    kind: KindSpec
    name: str
    stack: str
    layers: tuple[int, ...]
    colour: int


def draw(spec: ModelSpec) -> Drawing:
    """The model as a picture, from its spec alone: inputs, blocks, heads and their shapes.

    Layers that repeat are folded (`× 30`) and each kind of block is drawn once, in detail; of more than `MOST_KINDS`
    kinds the others are only named.  Letters: T tokens, S keys.
    """
    kinds = {name: _block_kinds(spec, name) for name in spec.stacks}
    overview = _overview(spec, kinds)
    blocks = [one for of_stack in kinds.values() for one in of_stack]
    source_width = 0 if spec.encoder is None else spec.encoder.outputs
    panels = [_panel(one, source_width if one.stack == "decoder" else 0) for one in blocks[:MOST_KINDS]]
    title, facts = _title(spec)
    if more := blocks[MOST_KINDS:]:
        facts += f"; of {len(blocks)} kinds of blocks {MOST_KINDS} are shown, not {', '.join(one.name for one in more)}"
    return _assemble(spec, overview, panels, title, facts)


def _title(spec: ModelSpec) -> tuple[str, str]:
    both = spec.layout == "encoder-decoder"
    layers = ", ".join(
        f"{f'{name} of ' if both else ''}{len(one.blocks)} layer{'s' * (len(one.blocks) > 1)} of width {one.width:,}"
        for name, one in spec.stacks.items()
    )
    context = "no limit of positions" if spec.context is None else f"{spec.context:,} positions"
    return (
        f"{spec.family}, {spec.layout}",
        f"{sum(map(prod, spec.shapes().values())):,} parameters, {layers}, {context}",
    )


def _assemble(spec: ModelSpec, overview: Node, panels: Sequence[Node], title: str, facts: str) -> Drawing:
    """The overview on the left, the blocks beside it in rows, their tops aligned."""
    canvas = Canvas()
    rows = [panels[i : i + IN_A_ROW] for i in range(0, len(panels), IN_A_ROW)]
    top = MARGIN + TITLE
    overview.paint(canvas, MARGIN, top + overview.height, overview.width)
    left, y = MARGIN + overview.width + APART, top
    right = left
    for row in rows:
        x = left
        for node in row:
            node.paint(canvas, x, y + node.height, node.width)
            x += node.width + MARGIN
        right, y = max(right, x), y + max(node.height for node in row) + MARGIN
    _draw_ties(spec, canvas)
    _draw_source(spec, canvas)
    width = max(right, 2 * MARGIN + text_width(title, 20), 2 * MARGIN + text_width(facts))
    height = max(top + overview.height, y - MARGIN) + MARGIN
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


# ---------------------------------------------------------------- blocks


def _block_kinds(spec: ModelSpec, stack_name: str) -> list[BlockKind]:
    """The different blocks of a stack in the order of their first layers."""
    own = spec.stacks[stack_name]
    groups: list[tuple[AnyBlock, list[int]]] = []
    for i, block in enumerate(own.blocks):
        same = next((layers for other, layers in groups if other == block), None)
        if same is None:
            groups.append((block, [i]))
        else:
            same.append(i)
    side = f"{stack_name} " if spec.layout == "encoder-decoder" else ""
    before = 0 if stack_name == "encoder" or spec.encoder is None else len(_block_kinds(spec, "encoder"))
    return [
        BlockKind(
            block, own.kinds[block.attn.kind], f"{side}block" + (f" {_letter(n)}" if len(groups) > 1 else ""),
            stack_name, tuple(layers), (before + n) % 5,
        )
        for n, (block, layers) in enumerate(groups)
    ]  # fmt: skip


def _letter(n: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    return (_letter(n // 26 - 1) if n >= 26 else "") + chr(ord("A") + n % 26)


def _panel(one: BlockKind, source_width: int) -> Node:
    name = f"{one.stack}.blocks.{one.layers[0]}"
    node = block_node(one.block, one.kind, name, source_width)
    label = f"{one.name}, {layers_text(one.layers)}"
    enters = Box(
        (f"[T, {one.block.attn.q.inputs:,}]",), "value", f"{name}.in", "the residual stream enters", source=True
    )
    return Frame(label, Column((enters, node)), f"panel colour-{one.colour}", name)


def layers_text(layers: Sequence[int]) -> str:
    """`layer 0`, `layers 0-29`, `13 layers: 0, 2, 4, ... 24`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs(layers)]
    if len(texts) == 1:
        return f"layers {texts[0]}"
    shown = texts if len(texts) <= 4 else [*texts[:3], f"… {texts[-1]}"]
    return f"{len(layers)} layers: {', '.join(shown)}"


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


# ---------------------------------------------------------------- the overview


def _overview(spec: ModelSpec, kinds: dict[str, list[BlockKind]]) -> Node:
    columns = []
    for name, one in spec.stacks.items():
        top: Node | None = None
        if name == list(spec.stacks)[-1]:
            top = None if spec.head is None else _head_node(spec, spec.head)
        else:
            top = Box(("encoder output", f"[S, {one.outputs:,}]"), "value", "encoder.output")
        final = None if one.final_norm is None else norm_box(one.final_norm, f"{name}.final_norm")
        project = None if one.project is None else linear_box("to the decoder's width", one.project, f"{name}.project")
        column = stack((_input_node(spec, name, one), *_folded(name, one, kinds[name]), final, project, top))
        columns.append(column)
    return columns[0] if len(columns) == 1 else Row(tuple(columns), APART)


def _folded(stack_name: str, one: StackSpec, kinds: Sequence[BlockKind]) -> list[Node]:
    """A box for each layer, groups that repeat once in a frame that says how often."""
    of_layer = {layer: kind for kind in kinds for layer in kind.layers}
    by_name = {kind.name: kind for kind in kinds}
    names = [of_layer[i].name for i in range(len(one.blocks))]
    nodes: list[Node] = []
    for number, (group, repeats) in enumerate(fold(names)):
        place = f"{stack_name}.group.{number}"
        if repeats == 1:
            nodes += [_block_box(by_name[name], place) for name in group]
        else:
            inside = stack([_block_box(by_name[name]) for name in group])
            nodes.append(Frame(f"× {repeats}", inside, "fold", place, f"{repeats} times"))
    return nodes


def _block_box(one: BlockKind, name: str = "") -> Box:
    lines = (one.name, f"mask: {mask_text(one.kind.mask)}")
    return Box(lines, f"block colour-{one.colour}", name, f"{one.name}: {layers_text(one.layers)}")


def _input_node(spec: ModelSpec, stack_name: str, one: StackSpec) -> Node:
    """What is read, and how it becomes vectors."""
    name, part = f"{stack_name}.embed", one.embed
    if isinstance(part, EmbedSpec):
        return _embed_node(spec, part, name)
    position = _position_box(part.position, f"{name}.position")
    if isinstance(part, FramesSpec):
        read = Box(("mel frames", f"[frames, {part.conv1.inputs}]"), "value", f"{name}.in", source=True)
        convs = [
            node
            for label in ("conv1", "conv2")
            for node in (
                conv_box(label, getattr(part, label), f"{name}.{label}"),
                act_box("gelu", f"{name}.{label}_act"),
            )
        ]
        return Column((Row((stack((read, *convs)), position)), Sum("positions are added")))
    height, width = part.image
    read = Box(("pixels", f"[{part.channels}, {height}, {width}]"), "value", f"{name}.in", source=True)
    return _patches_node(part, read, position, name)


def _patches_node(part: PatchesSpec, read: Box, position: Box, name: str) -> Node:
    count = part.image[0] // part.patch * (part.image[1] // part.patch)
    numbers = part.channels * part.patch**2
    lines = (f"{count:,} patches of {part.patch} × {part.patch}", f"{numbers:,} → {part.width:,} + bias")
    patches = Box((*lines, "after one learned vector"), "linear", name, f"{name}: weight ({part.width:,}, {numbers:,})")
    return Column((Row((Column((read, patches)), position)), Sum("positions are added")))


def _position_box(position: LearnedSpec | SinusoidalSpec, name: str) -> Box:
    if isinstance(position, SinusoidalSpec):
        return Box(("sinusoidal positions", f"width {position.width:,}"), "position", name, source=True)
    return Box(("learned positions", f"{position.length:,} × {position.width:,}"), "position", name, source=True)


def _embed_node(spec: ModelSpec, part: EmbedSpec, name: str) -> Node:
    shared = _tie(spec, f"{name}.tokens.weight")
    table = (f"{part.vocab:,} × {part.width:,}", *shared)
    read = Box(("token ids", "[T]"), "value", f"{name}.in", source=True)
    tokens: list[Node] = [read, Box(("token embedding", *table), "linear", f"{name}.tokens")]
    if part.scale is not None:
        tokens.append(Box((factor_text(part.scale),), "norm", f"{name}.scale"))
    added: list[Node] = [stack(tokens)]
    if part.position is not None:
        added.append(_position_box(part.position, f"{name}.position"))
    if part.token_types:
        lines = ("token types", f"{part.token_types} × {part.width:,}")
        added.append(Box(lines, "position", f"{name}.token_types", source=True))
    return stack((
        added[0] if len(added) == 1 else Row(tuple(added)),
        None if len(added) == 1 else Sum("embeddings are added"),
        None if part.widen is None else linear_box("widen", part.widen, f"{name}.widen"),
        None if part.norm is None else norm_box(part.norm, f"{name}.norm"),
        None if part.project is None else linear_box("project", part.project, f"{name}.project"),
    ))  # fmt: skip


# ---------------------------------------------------------------- heads


def _head_node(spec: ModelSpec, head: Head) -> Node:
    """What the last hidden vectors become."""
    tie = _tie(spec, "head.proj.weight")
    match head:
        case LMHeadSpec():
            scale = None if head.scale is None else Box((factor_text(head.scale),), "norm", "head.scale")
            cap = (
                None if head.softcap is None else Box((f"logits capped at ± {head.softcap:g}",), "act", "head.softcap")
            )
            before = () if head.transform is None else _transform_nodes(head.transform)
            return stack((*before, scale, linear_box("logits of the next token", head.proj, "head.proj", *tie), cap))
        case MaskedLMHeadSpec():
            logits = linear_box("logits of each token", head.proj, "head.proj", *tie)
            return stack((*_transform_nodes(head.transform), logits))
        case ReplacedHeadSpec():
            score = linear_box("a score a token: replaced or not", head.proj, "head.proj")
            return stack((*_transform_nodes(head.transform), score))
        case ClassHeadSpec():
            pooled = {"first": "the first token", "last": "the last token", "mean": "the mean of the tokens"}[head.pool]
            labels = linear_box("labels of the row", head.classes, "head.classes")
            return stack((Box((pooled,), "core", "head.pool"), *_transform_nodes(head.transform), labels))
        case TokenHeadSpec():
            labels = linear_box("labels of each token", head.classes, "head.classes")
            return stack((*_transform_nodes(head.transform), labels))
        case SpanHeadSpec():
            ends = linear_box("start and end of an answer", head.ends, "head.ends")
            return stack((*_transform_nodes(head.transform), ends))
        case PoolingSpec():
            return _pooling_node(head)


def _pooling_node(head: PoolingSpec) -> Node:
    pooled = Box(("the mean of the tokens" if head.mode == "mean" else "the first token",), "core", "head.pool")
    nodes: list[Node] = [pooled]
    if head.mode == "dense" and head.dense is not None:
        nodes += [linear_box("dense", head.dense, "head.dense"), act_box(head.act, "head.act")]
    if head.normalize:
        nodes.append(Box(("scaled to length 1",), "norm", "head.normalize"))
    return stack(nodes)


def _transform_nodes(part: TransformSpec | None) -> list[Node]:
    if part is None:
        return []
    nodes: list[Node] = [
        linear_box("dense", part.dense, "head.transform.dense"),
        act_box(part.act, "head.transform.act"),
    ]
    return nodes if part.norm is None else [*nodes, norm_box(part.norm, "head.transform.norm")]


# ---------------------------------------------------------------- lines between columns


def _tie(spec: ModelSpec, name: str) -> tuple[str, ...]:
    """A line for a weight that is another's."""
    source = spec.ties.get(name)
    return () if source is None else (f"weight tied to {source.removesuffix('.weight')}",)


def _draw_ties(spec: ModelSpec, canvas: Canvas) -> None:
    """A dashed line from the token embedding to a head of the same column that shares its weight."""
    source, head = spec.ties.get("head.proj.weight", "").removesuffix(".weight"), "head.proj"
    last = list(spec.stacks)[-1]
    if not source.startswith(f"{last}.") or source not in canvas.places:
        return
    below, above = canvas.places[source], canvas.places[head]
    x, level = above.left - PAD - 3, below.middle.y
    canvas.path(
        [Point(below.left, level), Point(x, level), Point(x, above.middle.y), Point(above.left, above.middle.y)], "tie"
    )


def _draw_source(spec: ModelSpec, canvas: Canvas) -> None:
    """From the encoder's output to every group of the decoder's layers."""
    if spec.layout != "encoder-decoder":
        return
    start, number = canvas.places["encoder.output"], 0
    x = start.right + APART / 2
    while place := canvas.places.get(f"decoder.group.{number}"):
        level = place.bottom - GAP
        canvas.path(
            [Point(start.right, start.middle.y), Point(x, start.middle.y), Point(x, level), Point(place.left, level)],
            "cross",
        )
        number += 1
