"""Offline pages: sections of plain data, rendered as one HTML file that loads nothing else.

A section is a frozen dataclass (its content), a macro in `page.html` (its markup without scripts) and, if it is
interactive, a function in `mounts` of a `.js` file.  A new kind of section needs those three.
"""

from .attention_maps import AnyMap, AttentionMap, AttentionSection, ComparisonSection, TopMap
from .inside_sections import MatrixSection, PatchWeights, Picture, PicturesSection, PlanePoints, PlaneSection
from .render import render, write
from .sections import (
    Chapter,
    Criterion,
    Curve,
    Facts,
    Grid,
    PlaygroundSection,
    ProgramSection,
    Prose,
    QuestionItem,
    QuestionsSection,
    Sample,
    Samples,
    Section,
    Statement,
    StepsSection,
    Tab,
    TableSection,
    TextAttentionSection,
    Unfolding,
    VerdictSection,
)
from .tokenizer_data import tokenizer_data
from .word_states import WordStates

__all__ = [
    "AnyMap",
    "AttentionMap",
    "AttentionSection",
    "Chapter",
    "ComparisonSection",
    "Criterion",
    "Curve",
    "Facts",
    "Grid",
    "MatrixSection",
    "PatchWeights",
    "Picture",
    "PicturesSection",
    "PlanePoints",
    "PlaneSection",
    "PlaygroundSection",
    "ProgramSection",
    "Prose",
    "QuestionItem",
    "QuestionsSection",
    "Sample",
    "Samples",
    "Section",
    "Statement",
    "StepsSection",
    "Tab",
    "TableSection",
    "TextAttentionSection",
    "TopMap",
    "Unfolding",
    "VerdictSection",
    "WordStates",
    "render",
    "tokenizer_data",
    "write",
]
