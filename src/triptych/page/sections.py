"""What a page can hold, as plain data.  Nothing here knows about models: callers pass text and numbers.

Each section checks itself when it is made, so `render` cannot fail on a bad one, and answers `data()`: what goes
into the page as JSON, for its scripts and for whoever wants the numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from triptych.errors import InputError

from .pack import MAX_BYTES, STEPS, pack, packed_bytes

Stack = Literal["encoder", "decoder", "cross"]
Json = dict[str, object]


@dataclass(frozen=True)
class Sample:
    """One text a model wrote; `step` is the training step it was written at, None when there is none."""

    step: int | None
    label: str
    text: str


@dataclass(frozen=True)
class Samples:
    """Texts as cards, ordered by step; those without a step come last, in the order given."""

    title: str
    items: Sequence[Sample]
    kind: ClassVar[str] = "samples"

    @property
    def ordered(self) -> list[Sample]:
        return sorted(self.items, key=lambda item: math.inf if item.step is None else item.step)

    def data(self) -> Json:
        return {"items": [asdict(item) for item in self.ordered]}


@dataclass(frozen=True)
class Curve:
    """Lines over a shared x axis.  `lines` are named horizontal references, such as what guessing scores.

    A y that is not finite (a loss that diverged) leaves a gap in its line.  `log` names the axes whose scale is
    logarithmic; what is not positive there leaves a gap too.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    lines: Mapping[str, float]
    log: Literal["", "x", "y", "xy"] = ""
    kind: ClassVar[str] = "curve"

    def __post_init__(self) -> None:
        for name, points in self.series.items():
            bad = next((x for x, _ in points if not math.isfinite(x)), None)
            if bad is not None:
                raise InputError(f"curve {self.title!r}: series {name!r} has x = {bad}; give a finite x to each point")
        for name, y in self.lines.items():
            if not math.isfinite(y):
                raise InputError(f"curve {self.title!r}: reference line {name!r} is {y}; give a finite height")

    def data(self) -> Json:
        series = {
            name: [(float(x), float(y) if math.isfinite(y) else None) for x, y in points]
            for name, points in self.series.items()
        }
        lines = {name: float(y) for name, y in self.lines.items()}
        return {"x_label": self.x_label, "y_label": self.y_label, "log": self.log, "series": series, "lines": lines}


@dataclass(frozen=True)
class Facts:
    """Names and their values, one a row."""

    title: str
    rows: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "facts"

    def data(self) -> Json:
        return {"rows": list(self.rows)}


NUMERIC = re.compile(r"[-+−]?[\d,.]+(e[-+]?\d+)?\s?(%|[a-zA-Z/]{1,7})?")


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; a column whose every cell reads as a number is set flush right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.header):
                raise InputError(
                    f"table {self.title!r}: row {number} has {len(row)} cells and the header {len(self.header)};"
                    " give each row one cell a column"
                )

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether it holds numbers only."""
        columns = range(len(self.header))
        return [bool(self.rows) and all(NUMERIC.fullmatch(row[column]) for row in self.rows) for column in columns]

    def data(self) -> Json:
        return {"header": list(self.header), "rows": [list(row) for row in self.rows]}


@dataclass(frozen=True)
class Prose:
    """Paragraphs parted by blank lines; one whose lines all start with four spaces is set as typed (commands)."""

    title: str
    text: str
    kind: ClassVar[str] = "prose"

    @property
    def blocks(self) -> list[tuple[bool, str]]:
        """(set as typed?, text) for each paragraph."""
        found = []
        for block in re.split(r"\n\s*\n", self.text.strip("\n")):
            lines = block.split("\n")
            typed = all(line.startswith("    ") for line in lines)
            found.append((typed, "\n".join(line[4:] for line in lines) if typed else " ".join(block.split())))
        return [(typed, text) for typed, text in found if text]

    def data(self) -> Json:
        return {"text": self.text}


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention of one layer: `pattern[h, t, s]` is how much query t draws from key s in head h, [H, T, S].

    `queries` and `keys` are the T and S tokens as text.  `heads` names the H rows where they are a choice among
    the layer's heads; by default they are 0 .. H-1.
    """

    stack: Stack
    layer: int
    queries: Sequence[str]
    keys: Sequence[str]
    pattern: npt.ArrayLike
    heads: Sequence[int] | None = None

    def __post_init__(self) -> None:
        where = f"attention map {self.stack} layer {self.layer}"
        if self.stack not in get_args(Stack):
            raise InputError(f"{where}: no such stack; use one of {', '.join(get_args(Stack))}")
        weights = np.asarray(self.pattern, dtype=np.float32)
        shape = (self.head_names, len(self.queries), len(self.keys)) if weights.ndim == 3 else None
        if shape is None or weights.shape != (len(shape[0]), *shape[1:]) or not weights.size:
            raise InputError(
                f"{where}: the pattern is {list(weights.shape)}; it must be [H, T, S] with"
                f" {len(self.queries)} queries, {len(self.keys)} keys and at least one head"
            )
        if not (weights.min() >= 0 and weights.max() <= 1):  # NaN fails both
            raise InputError(f"{where}: weights must lie in [0, 1]; pass the pattern after softmax, not the scores")
        object.__setattr__(self, "pattern", weights)

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        return np.asarray(self.pattern, dtype=np.float32)

    @property
    def head_names(self) -> list[int]:
        return list(range(len(np.asarray(self.pattern)))) if self.heads is None else list(self.heads)


@dataclass(frozen=True, eq=False)
class Attention:
    """Clickable maps of any number of layers; stacks are offered in the order in which `maps` names them first.

    Raises InputError when a (stack, layer) comes twice or the weights together pass `MAX_BYTES`.
    """

    title: str
    note: str
    maps: Sequence[AttentionMap]
    kind: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        places = [(item.stack, item.layer) for item in self.maps]
        twice = next((place for place in places if places.count(place) > 1), None)
        if twice:
            raise InputError(
                f"attention {self.title!r}: {twice[0]} layer {twice[1]} is given twice; keep one map a layer"
            )
        total = sum(packed_bytes(*item.weights.shape) for item in self.maps)
        if total > MAX_BYTES:
            heads, queries, keys = max((item.weights.shape for item in self.maps), key=math.prod)
            raise InputError(
                f"attention {self.title!r}: {len(self.maps)} layers of up to {heads} heads x {queries} x {keys} weights"
                f" take {total / 2**20:,.0f} MiB and a page carries at most {MAX_BYTES // 2**20};"
                " choose fewer layers, heads or query rows"
            )

    def data(self) -> Json:
        index: dict[tuple[str, ...], int] = {}  # the layers of a stack share their tokens: each list travels once
        maps = [
            {
                "stack": item.stack,
                "layer": item.layer,
                "heads": item.head_names,
                "queries": index.setdefault(tuple(item.queries), len(index)),
                "keys": index.setdefault(tuple(item.keys), len(index)),
                "weights": pack(item.weights),
            }
            for item in self.maps
        ]
        return {"note": self.note, "steps": STEPS, "tokens": [list(tokens) for tokens in index], "maps": maps}


@dataclass(frozen=True)
class Grid:
    """A matrix of which some rows and columns are shown: `rows` are (name, cells), `left_out` says what is not shown.

    `where` is the matrix's full name, `named` whether its columns have names to show, `focus` the row that is followed,
    `gap` the row before which some are left out, `shade` a number in [0, 1] for each cell.
    """

    name: str
    shape: str
    where: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    left_out: str = ""
    named: bool = False
    focus: int | None = None
    gap: int | None = None
    shade: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        for label, cells in self.rows:
            if len(cells) != len(self.columns):
                raise InputError(
                    f"grid {self.name!r}: row {label!r} has {len(cells)} cells and there are {len(self.columns)}"
                    " columns; give each row one cell a column"
                )

    def tint(self, row: int, column: int) -> int:
        """How dark a cell is, from 0 to 9."""
        return 0 if self.shade is None else round(9 * min(max(self.shade[row][column], 0.0), 1.0))


@dataclass(frozen=True)
class Unfolding:
    """One step that opens: what happened, its formula, what it means, its matrices, and how it was checked."""

    number: int
    title: str
    formula: str
    meaning: str
    grids: Sequence[Grid]
    check: str
    open: bool = False


@dataclass(frozen=True)
class Steps:
    """Steps in order; each shows its formula and opens on its numbers."""

    title: str
    items: Sequence[Unfolding]
    kind: ClassVar[str] = "steps"

    def data(self) -> Json:
        return {"items": [asdict(item) for item in self.items]}


@dataclass(frozen=True)
class Criterion:
    """One thing that had to hold: `claim` in words, what was `measured`, and the `bounds` it had to lie in."""

    met: bool
    claim: str
    measured: str
    bounds: str


@dataclass(frozen=True)
class Verdict:
    """PASS or FAIL, what that means in words, and the criteria that decided it."""

    title: str
    passed: bool
    meaning: str
    criteria: Sequence[Criterion]
    kind: ClassVar[str] = "verdict"

    def data(self) -> Json:
        return {
            "passed": self.passed,
            "meaning": self.meaning,
            "criteria": [asdict(criterion) for criterion in self.criteria],
        }


Section = Samples | Curve | Facts | Attention | Table | Prose | Verdict | Steps


@dataclass(frozen=True, eq=False)
class Chapter:
    """Sections that belong together, under one title with a PASS or FAIL beside it; `note` says what they are about.

    On a page of chapters the list of contents at its head shows their notes and verdicts.
    """

    title: str
    note: str
    passed: bool
    sections: Sequence[Section]
    kind: ClassVar[str] = "chapter"

    def data(self) -> Json:
        return {"note": self.note, "passed": self.passed, "sections": list(map(told, self.sections))}


def told(section: Section | Chapter) -> Json:
    """What the page's scripts, and whoever saves its data, get of a section."""
    return {"kind": section.kind, "title": section.title, **section.data()}
