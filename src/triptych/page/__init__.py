"""The one offline page: sections of plain data in, a single self-contained HTML file out.

A section is a frozen dataclass (what it says), a block of `page.html` (how it reads without scripts), and, if it
is interactive, a function in `mounts` of a `.js` file.  A new page is a new list of sections; a new kind of
section is those three pieces.
"""

from __future__ import annotations

from .render import render, write
from .sections import (
    Attention,
    AttentionMap,
    Chapter,
    Criterion,
    Curve,
    Facts,
    Grid,
    Prose,
    Sample,
    Samples,
    Section,
    Steps,
    Table,
    Unfolding,
    Verdict,
)

__all__ = [
    "Attention",
    "AttentionMap",
    "Chapter",
    "Criterion",
    "Curve",
    "Facts",
    "Grid",
    "Prose",
    "Sample",
    "Samples",
    "Section",
    "Steps",
    "Table",
    "Unfolding",
    "Verdict",
    "render",
    "write",
]
