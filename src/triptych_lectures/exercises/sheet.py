"""Exercises as offline pages: to read, with folded answers, or to print for a class, with solutions apart."""

import csv
import io
import shlex
from collections.abc import Sequence

import numpy as np

from triptych.errors import InputError
from triptych.page import Facts, QuestionItem, QuestionsSection, Section, render
from . import LECTURES, of_lectures, variant
from .exercise import Exercise

COUNTED = "Tokens and places are counted from 1; `--row` and `--position` of the commands count from 0."
OWN = r"(sheet|solutions)-\d+\.html|answers\.csv"  # names of the files of a class
TITLE = "Exercises on attention and transformers"
TRIES = 50  # seeds tried for each sheet: exercises have some variants, not any number
Rows = list[tuple[str, ...]]


def sheet(exercises: Sequence[Exercise], *, solutions: bool = False) -> str:
    """The page, as HTML.  A closed fold is not printed and leaves room to write; `solutions` opens all of them."""
    seeds = sorted({one.seed for one in exercises})
    subtitle = f"Seed {', '.join(map(str, seeds))}{', with solutions' if solutions else ''}"
    return _page([_section(one, answers=True, opened=solutions) for one in exercises], subtitle)


def class_files(names: Sequence[str], count: int, seed: int = 0) -> dict[str, bytes]:
    """Pages and a table for a class, by file name: `count` sheets that differ, their solutions, and `answers.csv`.

    `names` are those of exercises, of lectures, or `all`; without them a sheet has an exercise of each lecture, which
    its seed chooses.  The first sheet is that of `seed`, the others are those of the next seeds that give another one.
    A sheet names its seed and the command that makes it alone, and is the same in any class but for its number.
    Raises InputError where these exercises have too few variants.
    """
    drawn, seen, own = list[list[Exercise]](), set[object](), seed
    while len(drawn) < count:
        one = [variant(name, own) for name in of_lectures(names) or one_of_each_lecture(own)]
        text = tuple((exercise.statement, *(asked.text for asked in exercise.questions)) for exercise in one)
        if text not in seen:
            seen.add(text)
            drawn.append(one)
        own += 1
        if own - seed > TRIES * count:
            raise InputError(
                f"{', '.join(names)} has only {len(drawn)} variants among {own - seed} seeds, too few for {count} "
                "sheets; name more exercises"
            )
    lecture = names[0].upper() if len(names) == 1 and names[0].upper() in LECTURES else ""
    title = f"Exercises of lecture {lecture}" if lecture else TITLE
    files, digits = dict[str, bytes](), max(2, len(str(count)))
    rows: Rows = [("sheet", "seed", "exercise", "number", "question", "answer", "made by")]
    for number, one in enumerate(drawn, 1):
        command = f"triptych exercise {shlex.join([*names, '--class', '1', '--seed', str(one[0].seed)])}"
        made = [("Seed", str(one[0].seed)), ("Made by", command)]
        about, to_fill = (
            Facts(f"Sheet {number}", rows) for rows in (made, [("Name", "_" * 40), ("Date", "_" * 16), *made])
        )
        pages = {
            "sheet": _page([to_fill, *(_section(each, answers=False) for each in one)], f"Sheet {number}", title),
            "solutions": _page(
                [*(_section(each, opened=True) for each in one), about],
                f"Solutions of sheet {number}",
                title,
            ),
        }
        files |= {f"{kind}-{number:0{digits}}.html": page.encode() for kind, page in pages.items()}
        rows += [
            (str(number), str(each.seed), each.name, str(place), asked.text, asked.answer_text, command)
            for each in one for place, asked in enumerate(each.questions, 1)
        ]  # fmt: skip
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    return files | {"answers.csv": table.getvalue().encode()}


def one_of_each_lecture(seed: int) -> list[str]:
    """Five exercises, one that fits each lecture, none of them twice."""
    random, chosen = np.random.default_rng([seed, len(LECTURES)]), list[str]()
    for names in LECTURES.values():
        left = [name for name in names if name not in chosen]
        chosen.append(left[int(random.integers(len(left)))])
    return chosen


def _section(one: Exercise, *, answers: bool = True, opened: bool = False) -> Section:
    items = [
        QuestionItem(asked.text, asked.answer_text, asked.solution) if answers else QuestionItem(asked.text)
        for asked in one.questions
    ]
    return QuestionsSection(f"{one.name}: {one.title}", one.statement, items, open=opened)


def _page(sections: Sequence[Section], subtitle: str, title: str = TITLE) -> str:
    return render(title, sections, subtitle=f"{subtitle}. {COUNTED}")
