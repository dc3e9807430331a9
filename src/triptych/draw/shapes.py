"""Boxes, columns and rows whose sizes follow from their texts, painted as SVG; values flow from the bottom to the top.

A node knows the least width and the height it needs, in pixels.  `paint` puts it on a canvas at a left edge and a
bottom edge, at that width or more, and returns the points where lines enter and leave it.  Lines run between nodes and
beside them, never through one, so that no line crosses a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Protocol, runtime_checkable

FONT = 12.0  # of all texts but the title
LINE = 16.0  # from one line of a text to the next
PAD = 9.0  # between the edge of a box and its text
GAP = 22.0  # between nodes of a column, for the arrow
BESIDE = 14.0  # between nodes of a row
SIDE = 26.0  # left and right of a sublayer, for the line that skips it
DOT = 9.0  # radius of the circle where values are added
HEADS = 30.0  # height of the picture of a layer's heads
LEAST_HEAD = 4.0  # width of one of its squares

_NARROW = set("fijlrt.,:;|'()[]/- I")
_WIDE = set("mwMW@%→√·×…")


def text_width(text: str, size: float = FONT) -> float:
    """Pixels that a text takes at most, in any of the fonts that the style names (DejaVu Sans, bold, is the widest)."""
    ems = (0.44 if c in _NARROW else 1.06 if c in _WIDE else 0.82 if c.isupper() else 0.71 for c in text)
    return size * sum(ems)


@dataclass(frozen=True)
class Point:
    """A place on the canvas, in pixels from its top left corner."""

    x: float
    y: float


@dataclass(frozen=True)
class Edge:
    """Where lines meet one side of a node: its points, and from where to where a line may meet it besides.

    Without `arrow` a line goes on at the point, as at a fork, and has no head there.
    """

    points: tuple[Point, ...]
    left: float = 0.0
    right: float = 0.0
    arrow: bool = True

    def reaches(self, x: float) -> bool:
        return self.left < x < self.right


@dataclass(frozen=True)
class Rectangle:
    """The place of a painted node."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def middle(self) -> Point:
        return Point(self.left + self.width / 2, self.top + self.height / 2)


@dataclass
class Canvas:
    """SVG elements in the order of painting, and the places of nodes that have a name."""

    elements: list[str] = field(default_factory=list)
    places: dict[str, Rectangle] = field(default_factory=dict)

    def add(self, element: str) -> None:
        self.elements.append(element)

    def path(self, points: Sequence[Point], kind: str = "flow", *, arrow: bool = True) -> None:
        """A line through points, with a head at its end."""
        steps = " L".join(f"{p.x:.1f} {p.y:.1f}" for p in points)
        self.add(f'<path class="{kind}" d="M{steps}"/>')
        if arrow:
            (before, end), size = points[-2:], 4.0
            back = Point(_sign(before.x - end.x) * 1.7 * size, _sign(before.y - end.y) * 1.7 * size)
            across = Point(size if back.y else 0.0, size if back.x else 0.0)
            one, two = (Point(end.x + back.x + k * across.x, end.y + back.y + k * across.y) for k in (1, -1))
            corners = " L".join(f"{p.x:.1f} {p.y:.1f}" for p in (end, one, two))
            self.add(f'<path class="head" d="M{corners}z"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        self.add(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def connect(self, below: Edge, above: Edge) -> None:
        """Arrows from each point that leaves `below` to each that enters `above`."""
        starts, ends = below.points, above.points
        if not starts or not ends:
            return
        if len(starts) == 1 and all(below.reaches(end.x) or end.x == starts[0].x for end in ends):
            pairs = [(Point(end.x, starts[0].y), end) for end in ends]
        elif len(ends) == 1 and all(above.reaches(start.x) or start.x == ends[0].x for start in starts):
            pairs = [(start, Point(start.x, ends[0].y)) for start in starts]
        else:
            level = (max(end.y for end in ends) + min(start.y for start in starts)) / 2
            for start in starts:
                self.path([start, Point(start.x, level)], arrow=False)
            xs = [point.x for point in (*starts, *ends)]
            self.path([Point(min(xs), level), Point(max(xs), level)], arrow=False)
            pairs = [(Point(end.x, level), end) for end in ends]
        for start, end in pairs:
            self.path([start, end], arrow=above.arrow)


@runtime_checkable
class Node(Protocol):
    """A part of the drawing that can be put somewhere."""

    @property
    def width(self) -> float: ...

    @property
    def height(self) -> float: ...

    def paint(self, canvas: Canvas, left: float, bottom: float, width: float) -> tuple[Edge, Edge]:
        """Paint; the edges where lines enter at the bottom and leave at the top."""
        ...


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text, the first in bold.

    `kind` is its class in the style, `name` the part that it shows, `note` what is shown when the pointer rests on it,
    and `heads` (H, G) asks for a picture of H query heads above the G key/value heads that they read.
    """

    lines: tuple[str, ...]
    kind: str = "box"
    name: str = ""
    note: str = ""
    heads: tuple[int, int] | None = None
    source: bool = False  # nothing enters it

    @property
    def width(self) -> float:
        squares = self.heads[0] * LEAST_HEAD if self.heads else 0.0
        return max(*map(text_width, self.lines), squares, 2 * PAD) + 2 * PAD

    @property
    def height(self) -> float:
        return len(self.lines) * LINE + PAD + (HEADS if self.heads else 0.0)

    def paint(self, canvas: Canvas, left: float, bottom: float, width: float) -> tuple[Edge, Edge]:
        top, middle = bottom - self.height, left + width / 2
        canvas.places[self.name] = Rectangle(left, top, width, self.height)
        part = f' data-part="{escape(self.name)}"' if self.name else ""
        canvas.add(f"<g{part}>")
        canvas.add(f"<title>{escape(self.note or ': '.join(self.lines[:2]))}</title>")
        canvas.add(
            f'<rect class="{self.kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{self.height:.1f}"'
            ' rx="5"/>'
        )
        for i, line in enumerate(self.lines):
            canvas.text(middle, top + PAD / 2 + (i + 0.75) * LINE, line, "quiet" if i else "name")
        if self.heads:
            _paint_heads(canvas, self.heads, left + PAD, bottom - HEADS, width - 2 * PAD)
        canvas.add("</g>")
        entry = () if self.source else (Point(middle, bottom),)
        return Edge(entry, left, left + width), Edge((Point(middle, top),), left, left + width)


def _paint_heads(canvas: Canvas, heads: tuple[int, int], left: float, top: float, width: float) -> None:
    """A square for each query head, and under each group the key/value head that it reads."""
    queries, groups = heads
    each, step = queries // groups, width / queries
    for h in range(queries):
        tone = "even" if h // each % 2 == 0 else "odd"
        canvas.add(
            f'<rect class="query {tone}" x="{left + h * step + step * 0.1:.2f}" y="{top + 3:.1f}"'
            f' width="{step * 0.8:.2f}" height="9"/>'
        )
    for g in range(groups):
        tone = "even" if g % 2 == 0 else "odd"
        canvas.add(
            f'<rect class="key {tone}" x="{left + g * each * step + step * 0.1:.2f}" y="{top + 15:.1f}"'
            f' width="{(each - 0.2) * step:.2f}" height="9"/>'
        )


@dataclass(frozen=True)
class Sum:
    """The circle where values are added."""

    note: str = "the sum of what enters"

    @property
    def width(self) -> float:
        return 2 * DOT

    @property
    def height(self) -> float:
        return 2 * DOT

    def paint(self, canvas: Canvas, left: float, bottom: float, width: float) -> tuple[Edge, Edge]:
        x, y, arm = left + width / 2, bottom - DOT, DOT - 4
        canvas.add(f'<g><title>{escape(self.note)}</title><circle class="sum" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"/>')
        canvas.add(
            f'<path class="flow" d="M{x - arm:.1f} {y:.1f} H{x + arm:.1f} M{x:.1f} {y - arm:.1f} V{y + arm:.1f}"/></g>'
        )
        return Edge((Point(x, bottom),)), Edge((Point(x, bottom - 2 * DOT),))


@dataclass(frozen=True)
class Start:
    """A point from which a value goes to several nodes."""

    width: float = 0.0
    height: float = 0.0

    def paint(self, canvas: Canvas, left: float, bottom: float, width: float) -> tuple[Edge, Edge]:
        edge = Edge((Point(left + width / 2, bottom),), arrow=False)
        return edge, edge


@dataclass(frozen=True)
class Column:
    """Nodes above each other, the first at the bottom, with an arrow from each to the next."""

    nodes: tuple[Node, ...]

    @property
    def width(self) -> float:
        return max(node.width for node in self.nodes)

    @property
    def height(self) -> float:
        return sum(node.height for node in self.nodes) + GAP * (len(self.nodes) - 1)

    def paint(self, canvas: Canvas, left: float, bottom: float, width: float) -> tuple[Edge, Edge]:
        entry, last = Edge(()), Edge(())
        for i, node in enumerate(self.nodes):
            enters, leaves = node.paint(canvas, left, bottom, width)
            canvas.connect(last, enters)
            entry, last = (enters, leaves) if i == 0 else (entry, leaves)
            bottom -= node.height + GAP
        return entry, last


@dataclass(frozen=True)
class Row:
    """Nodes side by side, on one bottom line."""

    nodes: tuple[Node, ...]
    gap: float = BESIDE

    @property
    def width(self) -> float:
        return sum(node.width for node in self.nodes) + self.gap * (len(self.nodes) - 1)

    @property
    def height(self) -> float:
        return max(node.height for node in self.nodes)

    def paint(self, canvas: Canvas, left: float, bottom: float, width: float) -> tuple[Edge, Edge]:
        more = (width - self.width) / len(self.nodes)
        enter: list[Point] = []
        leave: list[Point] = []
        for node in self.nodes:
            enters, leaves = node.paint(canvas, left, bottom, node.width + more)
            enter += enters.points
            leave += leaves.points
            left += node.width + more + self.gap
        return Edge(tuple(enter)), Edge(tuple(leave))


@dataclass(frozen=True)
class Frame:
    """A node inside a border with a label in the top left corner; its line leaves beside the label."""

    label: str
    node: Node
    kind: str = "frame"
    name: str = ""
    note: str = ""

    @property
    def width(self) -> float:
        return max(self.node.width, 2 * text_width(self.label) + PAD) + 2 * PAD

    @property
    def height(self) -> float:
        return self.node.height + LINE + 3 * PAD

    def paint(self, canvas: Canvas, left: float, bottom: float, width: float) -> tuple[Edge, Edge]:
        top = bottom - self.height
        canvas.places[self.name] = Rectangle(left, top, width, self.height)
        part = f' data-part="{escape(self.name)}"' if self.name else ""
        canvas.add(f"<g{part}><title>{escape(self.note or self.label)}</title>")
        canvas.add(
            f'<rect class="{self.kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{self.height:.1f}"'
            ' rx="8"/>'
        )
        canvas.text(left + PAD, top + LINE + 2, self.label, "label", "start")
        canvas.add("</g>")
        return self.node.paint(canvas, left + PAD, bottom - PAD, width - 2 * PAD)


@dataclass(frozen=True)
class Residual:
    """A sublayer, and the line that passes it by and is added to what it gives."""

    node: Node

    @property
    def width(self) -> float:
        return self.node.width + 2 * SIDE

    @property
    def height(self) -> float:
        return self.node.height + 1.5 * GAP + GAP + 2 * DOT

    def paint(self, canvas: Canvas, left: float, bottom: float, width: float) -> tuple[Edge, Edge]:
        middle, top = left + width / 2, bottom - self.height
        start = Edge((Point(middle, bottom),), arrow=False)
        enters, leaves = self.node.paint(canvas, left + SIDE, bottom - 1.5 * GAP, width - 2 * SIDE)
        canvas.connect(start, enters)
        enter, leave = Sum("residual: the input of the sublayer is added to its output").paint(
            canvas, left, top + 2 * DOT, width
        )
        canvas.connect(leaves, enter)
        fork, x, level = bottom - 0.5 * GAP, left + SIDE / 2, top + DOT
        canvas.path([Point(middle, fork), Point(x, fork), Point(x, level), Point(middle - DOT, level)], "flow skip")
        return start, leave


def stack(nodes: Sequence[Node | None]) -> Node:
    """A column of the nodes that there are, or the only one."""
    there = tuple(node for node in nodes if node is not None)
    return there[0] if len(there) == 1 else Column(there)


def _sign(value: float) -> float:
    return 0.0 if abs(value) < 0.05 else 1.0 if value > 0 else -1.0


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and last of each run of successive numbers."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1]
            start = i
