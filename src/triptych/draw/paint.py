"""SVG of boxes in rows: sizes follow from the texts, values flow downwards, and no line runs through a box."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from .details import Details
from .graph import START, Arrow, Box

FONT = 12.0  # of all texts but the title
LINE = 16.0  # from one line of a text to the next
PAD = 9.0  # between the edge of a box and its text
GAP = 26.0  # between rows, for the arrows
BESIDE = 14.0  # between boxes of a row
HEADS = 30.0  # height of the picture of a layer's heads
LEAST_HEAD = 4.0  # width of one of its squares
STUB = 14.0  # an arrow from outside the picture

# Colours are custom properties, light and dark by the reader's preference.
STYLE = """
.triptych-drawing { --paper: #fbfaf6; --ink: #1f1e1b; --quiet: #5f5b52; --line: #8d887c; --panel: #ffffff;
  --edge: #d5cfc1; --linear: #e3ecf8; --norm: #f4ead0; --act: #e0f1e9; --position: #f1e3f1; --core: #fdeadd;
  --value: #efece4; --even: #2b5ea7; --odd: #c4561a;
  --c0: #2b5ea7; --c1: #c4561a; --c2: #117a5c; --c3: #8b4c8c; --c4: #8a6d0b; }
@media (prefers-color-scheme: dark) { .triptych-drawing { --paper: #121319; --ink: #e9e6dd; --quiet: #aeaa9f;
  --line: #7d7a74; --panel: #191b23; --edge: #3a3e4a; --linear: #1f2f47; --norm: #3a3218; --act: #173428;
  --position: #37233a; --core: #40291c; --value: #262933; --even: #7fb0f5; --odd: #f39a5f;
  --c0: #7fb0f5; --c1: #f39a5f; --c2: #4fc4a0; --c3: #d39ad4; --c4: #d9bf55; } }
.triptych-drawing { font: 12px "Helvetica Neue", Arial, "Liberation Sans", sans-serif; max-width: 100%; height: auto; }
.triptych-drawing text { fill: var(--ink); }
.triptych-drawing .name, .triptych-drawing .label { font-weight: 700; }
.triptych-drawing .quiet { fill: var(--quiet); }
.triptych-drawing .title { font-size: 20px; font-weight: 700; }
.triptych-drawing rect { stroke: var(--edge); fill: var(--panel); }
.triptych-drawing .paper { fill: var(--paper); stroke: none; }
.triptych-drawing .frame, .triptych-drawing .fold { fill: none; stroke: var(--line); stroke-dasharray: 5 3; }
.triptych-drawing .bare { fill: none; stroke: none; }
.triptych-drawing .panel { fill: var(--panel); stroke-width: 2; }
.triptych-drawing .linear { fill: var(--linear); }
.triptych-drawing .norm { fill: var(--norm); }
.triptych-drawing .act { fill: var(--act); }
.triptych-drawing .position { fill: var(--position); }
.triptych-drawing .core { fill: var(--core); }
.triptych-drawing .value { fill: var(--value); }
.triptych-drawing .block { stroke-width: 2; }
.triptych-drawing .colour-0 { stroke: var(--c0); }
.triptych-drawing .colour-1 { stroke: var(--c1); }
.triptych-drawing .colour-2 { stroke: var(--c2); }
.triptych-drawing .colour-3 { stroke: var(--c3); }
.triptych-drawing .colour-4 { stroke: var(--c4); }
.triptych-drawing .query, .triptych-drawing .key { stroke: none; }
.triptych-drawing .even { fill: var(--even); }
.triptych-drawing .odd { fill: var(--odd); }
.triptych-drawing path { fill: none; stroke: var(--line); stroke-width: 1.4; }
.triptych-drawing .head { fill: var(--line); stroke: none; }
.triptych-drawing .tie { stroke-dasharray: 2 4; }
.triptych-drawing .cross { stroke: var(--c1); }
.triptych-drawing .sum { fill: var(--panel); stroke: var(--line); stroke-width: 1.4; }
"""

_NARROW = set("fijlrt.,:;|'()[]/- I")
_WIDE = set("mwMW@%→√·×…")


def text_width(text: str, size: float = FONT) -> float:
    """Pixels that a text takes at most, in any of the fonts that the style names (DejaVu Sans, bold, is the widest)."""
    ems = (0.44 if c in _NARROW else 1.06 if c in _WIDE else 0.82 if c.isupper() else 0.71 for c in text)
    return size * sum(ems)


@dataclass(frozen=True)
class Rectangle:
    """A place on the canvas, in pixels from its top left corner."""

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
    def middle(self) -> float:
        return self.left + self.width / 2


@dataclass
class Canvas:
    """SVG elements in the order of painting."""

    elements: list[str] = field(default_factory=list)

    def path(self, points: Sequence[tuple[float, float]], kind: str = "flow", *, arrow: bool = True) -> None:
        """A line through points, with a head at its end, which points downwards."""
        steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.elements.append(f'<path class="{kind}" d="M{steps}"/>')
        if arrow:
            x, y = points[-1]
            self.elements.append(
                f'<path class="head" d="M{x:.1f} {y:.1f} L{x - 4:.1f} {y - 7:.1f} L{x + 4:.1f} {y - 7:.1f}z"/>'
            )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        self.elements.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(self, place: Rectangle, details: Details) -> None:
        """A rectangle with lines of text and, of an attention, a picture of its heads."""
        part = f' data-part="{escape(details.name)}"' if details.name else ""
        self.elements.append(f"<g{part}><title>{escape(details.note)}</title>")
        self.rectangle(place, details.kind, 5)
        for i, line in enumerate(details.lines):
            self.text(place.middle, place.top + PAD / 2 + (i + 0.75) * LINE, line, "quiet" if i else "name")
        if details.heads is not None:
            self._heads(details.heads, place)
        self.elements.append("</g>")

    def frame(self, place: Rectangle, label: str, kind: str, name: str) -> None:
        """A border with a label in its top left corner."""
        self.elements.append(f'<g data-part="{escape(name)}"><title>{escape(label)}</title>')
        self.rectangle(place, kind, 8)
        self.text(place.left + PAD, place.top + LINE + 2, label, "label", "start")
        self.elements.append("</g>")

    def rectangle(self, place: Rectangle, kind: str, rounded: int = 0) -> None:
        self.elements.append(
            f'<rect class="{kind}" x="{place.left:.2f}" y="{place.top:.1f}" width="{place.width:.2f}" '
            f'height="{place.height:.1f}" rx="{rounded}"/>'
        )

    def _heads(self, heads: tuple[int, int], place: Rectangle) -> None:
        """A square for each query head, and under each group the key/value head that it reads."""
        queries, groups = heads
        step, left, top = (place.width - 2 * PAD) / queries, place.left + PAD, place.bottom - HEADS
        for kind, count, each, down in (("query", queries, 1, 3), ("key", groups, queries // groups, 15)):
            for i in range(count):
                tone = "odd" if i * each // (queries // groups) % 2 else "even"
                where = Rectangle(left + (i * each + 0.1) * step, top + down, (each - 0.2) * step, 9)
                self.rectangle(where, f"{kind} {tone}")


def size_of(details: Details) -> tuple[float, float]:
    """The width and the height that a box needs."""
    squares = details.heads[0] * LEAST_HEAD if details.heads else 0.0
    height = len(details.lines) * LINE + PAD + HEADS * bool(details.heads)
    return max(*map(text_width, details.lines), squares, 2 * PAD) + 2 * PAD, height


@dataclass(eq=False)
class LayerPanel:
    """The boxes of one layer in rows: the residual stream on the left, all else beside it below what it reads."""

    details: Mapping[Box, Details]
    label: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        self.boxes, self.places = list(self.details), dict[Box, Rectangle]()
        sizes = {box: size_of(one) for box, one in self.details.items()}
        rows: dict[int, list[Box]] = {}
        for box in sorted(self.boxes, key=lambda box: box.depth):
            rows.setdefault(box.depth, []).append(box)
        stream = max((sizes[box][0] for box in self.boxes if not box.lane), default=0.0)
        self.stream = PAD + stream / 2 if stream else None
        left = PAD + (stream + 2 * BESIDE if stream else 0.0)
        beside = {depth: [box for box in row if box.lane] for depth, row in rows.items()}
        widths = {depth: sum(sizes[b][0] for b in row) + BESIDE * (len(row) - 1) for depth, row in beside.items()}
        top, wide = LINE + 2 * PAD + GAP, max(0.0, *widths.values())
        for depth, row in rows.items():
            self._place(beside[depth], sizes, left, left + (wide - widths[depth]) / 2, top)
            for box in row:
                if not box.lane:
                    self.places[box] = Rectangle(PAD + (stream - sizes[box][0]) / 2, top, *sizes[box])
            top += max(sizes[box][1] for box in row) + GAP
        self.right = max(place.right for place in self.places.values())
        self.detours = [arrow for box in self.boxes for arrow in box.arrows if self._detours(arrow, box)]
        self.width = max(self.right + 10.0 * len(self.detours), text_width(self.label)) + 2 * PAD
        self.height = top - GAP + PAD

    def _place(
        self, row: Sequence[Box], sizes: Mapping[Box, tuple[float, float]], left: float, x: float, top: float
    ) -> None:
        """The boxes beside the stream from `x` on, or each below the mean of what it reads, where there is room."""
        for box in row:
            width = sizes[box][0]
            above = [self.places[a.source].middle for a in box.arrows if a.source in self.places and a.source.lane]
            own = max(left, sum(above) / len(above) - width / 2 if above else x)
            self.places[box] = Rectangle(own, top, *sizes[box])
            left = own + width + BESIDE
            x += width + BESIDE

    def paint(self, canvas: Canvas, left: float, top: float) -> None:
        own = Canvas()
        for box in self.boxes:
            own.box(self.places[box], self.details[box])
            for i, arrow in enumerate(box.arrows):
                self._arrow(own, box, i, arrow)
        canvas.frame(Rectangle(left, top, self.width, self.height), self.label, self.kind, self.name)
        canvas.elements += [f'<g transform="translate({left:.1f} {top:.1f})"><title>{escape(self.label)}</title>']
        canvas.elements += [*own.elements, "</g>"]

    def _start(self, arrow: Arrow, box: Box) -> tuple[float, float] | None:
        """The point where an arrow begins; None for one that comes from outside and not from the stream."""
        if arrow.source in self.places:
            place = self.places[arrow.source]
            return place.middle, place.bottom
        from_stream = box.entry != "cross_kv" and arrow.key in ("x", "y") and box.layer != START
        return (self.stream, LINE + 2 * PAD) if self.stream is not None and from_stream else None

    def _blocked(self, x: float, top: float, bottom: float) -> bool:
        return any(
            place.left - 2 < x < place.right + 2 and place.top < bottom and place.bottom > top
            for place in self.places.values()
        )

    def _detours(self, arrow: Arrow, box: Box) -> bool:
        """Whether an arrow must run along the right side."""
        start, end = self._start(arrow, box), self.places[box]
        return start is not None and all(self._blocked(x, start[1] + 1, end.top - 1) for x in (start[0], end.middle))

    def _arrow(self, canvas: Canvas, box: Box, number: int, arrow: Arrow) -> None:
        end, start = self.places[box], self._start(arrow, box)
        x = end.middle + (number - (len(box.arrows) - 1) / 2) * 12
        if box.lane == 0 and start is not None and start[0] == self.stream:
            x = end.middle
        level = end.top - GAP / 2
        if start is None:
            canvas.path([(x, end.top - STUB), (x, end.top)])
        elif self._blocked(start[0], start[1] + 1, end.top - 1):
            beside = start[1] + GAP / 2 - 4
            run = self.right + 10 * (self.detours.index(arrow) + 1) if arrow in self.detours else x
            canvas.path([start, (start[0], beside), (run, beside), (run, level + 4), (x, level + 4), (x, end.top)])
        else:
            canvas.path([start, (start[0], level), (x, level), (x, end.top)])
