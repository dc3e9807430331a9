"""The one offline page: sections of plain data in, a single self-contained HTML file out.

A section is a frozen dataclass (its content), a macro in `page.html` (its markup without scripts) and, if it is
interactive, a function in `mounts` of a `.js` file.  A new kind of section needs those three.
"""

from __future__ import annotations

from .live_section import LiveSection
from .playground import playground
from .render import render, write
from .sections import (
    AttentionMap,
    AttentionSection,
    Chapter,
    Criterion,
    Curve,
    Facts,
    Grid,
    PlaygroundSection,
    Prose,
    Sample,
    Samples,
    Section,
    Steps,
    TableSection,
    Unfolding,
    VerdictSection,
)
from .tokenizer_data import tokenizer_data

__all__ = [
    "AttentionMap",
    "AttentionSection",
    "Chapter",
    "Criterion",
    "Curve",
    "Facts",
    "Grid",
    "LiveSection",
    "PlaygroundSection",
    "Prose",
    "Sample",
    "Samples",
    "Section",
    "Steps",
    "TableSection",
    "Unfolding",
    "VerdictSection",
    "playground",
    "render",
    "tokenizer_data",
    "write",
]
