"""Exercises as one offline page: to read with folded answers, or to print, without them or with them."""

from collections.abc import Sequence

from triptych.page import QuestionItem, QuestionsSection, render
from .exercise import Exercise


def sheet(exercises: Sequence[Exercise], *, solutions: bool = False) -> str:
    """The page, as HTML.  A closed fold is not printed and leaves room to write; `solutions` opens all of them."""
    sections = [
        QuestionsSection(
            f"{one.name}: {one.title}",
            one.statement,
            [QuestionItem(question.text, question.answer_text, question.solution) for question in one.questions],
            open=solutions,
        )
        for one in exercises
    ]
    seeds = sorted({one.seed for one in exercises})
    subtitle = f"Seed {', '.join(map(str, seeds))}{', with solutions' if solutions else ''}"
    return render("Exercises on attention and transformers", sections, subtitle=subtitle)
