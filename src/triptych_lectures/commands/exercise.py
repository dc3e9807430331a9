"""`triptych exercise`: variants of the lectures' exercises, their answers, and sheets of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import BadParameter, Exit, Option

from triptych.cli import options, screen
from triptych.errors import counted

if TYPE_CHECKING:
    from triptych_lectures.exercises import Exercise

LARGEST = 1000  # sheets of a class


@options.command
def exercise(
    names: list[str] | None = None,
    *,
    seed: options.Natural = 0,
    answer: list[str] | None = None,
    solutions: bool = False,
    save: Path | None = None,
    class_: Annotated[int | None, Option(min=1, max=LARGEST)] = None,
    out: options.NamedPath | None = None,
    as_json: options.Json = False,
) -> None:
    """Exercises of the lectures with other numbers; with --answer, exit 1 if one is wrong.

    [NAME]...: Exercises, as in L4.7 L2.1, lectures, as in L4, or all; without one, list them.
    --seed N: Seed of the numbers in the exercises.
    --answer TEXT: Check an answer; once for each question, in order.
    --solutions: Show the answers and how to work them out.
    --save FILE: Write a page to read or print, answers folded.
    --class N: Write N different sheets to print, their solutions apart, and a table of all answers.
    --out DIR: With --class: the directory; runs/class by default.
    """
    if class_ is not None:
        _class(names or [], class_, seed, out, as_json, {"--answer": answer, "--solutions": solutions, "--save": save})
        return
    if out is not None:
        raise BadParameter("--out is for --class; use --save FILE for one page")
    if not names:
        for option, value in {"--answer": answer, "--solutions": solutions, "--save": save}.items():
            if value:
                raise BadParameter(f"{option} needs the NAME of an exercise; `triptych exercise` lists them")
        _list(as_json)
        return
    from triptych_lectures import exercises as lectures

    names = lectures.of_lectures(names)
    if answer and len(names) > 1:
        raise BadParameter("--answer is for one exercise, not for several; give one NAME")
    if answer and (save is not None or solutions):
        raise BadParameter(f"--answer checks answers; leave {'--save' if save is not None else '--solutions'} out")
    screen.check_suffix(save)
    drawn = [lectures.variant(name, seed) for name in names]
    if answer:
        _check(drawn[0], answer, as_json)
        return
    if save is not None:
        from triptych.page import write
        from triptych_lectures.exercises.sheet import sheet

        write(save, sheet(drawn, solutions=solutions))
    if as_json:
        screen.result({"exercises": [_data(one, solutions) for one in drawn]})
    elif save is not None:
        screen.show(screen.facts([("page", str(save)), ("exercises", str(len(drawn)))]))
    else:
        for one in drawn:
            _show(one, solutions)


def _class(
    names: list[str], count: int, seed: int, out: Path | None, as_json: bool, others: Mapping[str, object]
) -> None:
    """Write the sheets of a class into a directory."""
    for option, value in others.items():
        if value:
            raise BadParameter(f"--class writes sheets and their solutions; leave {option} out")
    from triptych.checkpoints.save import write_files
    from triptych_lectures.exercises.sheet import OWN, class_files

    folder = out or Path("runs/class")
    files = class_files(names, count, seed)
    write_files(folder, files, OWN, b"triptych exercise")
    if as_json:
        screen.result({"folder": str(folder), "files": sorted(files)})
        return
    rows = [("folder", str(folder)), ("sheets", f"{count:,}, from sheet-{1:0{max(2, len(str(count)))}}.html on")]
    screen.show(screen.facts([*rows, ("solutions", "solutions-*.html"), ("answers", "answers.csv")]))


def _list(as_json: bool) -> None:
    from triptych_lectures.exercises import NAMES

    if as_json:
        screen.result([{"name": name, "title": title} for name, title in NAMES.items()])
        return
    screen.show_rows(("exercise", "about"), NAMES.items())
    screen.note("one of them: triptych exercise L4.7 --seed 3; a sheet: triptych exercise L0 --save sheet.html")
    screen.note("for a class: triptych exercise L0 --class 30 --out sheets")


def _show(one: Exercise, solutions: bool) -> None:
    out = screen.console()
    out.print(f"{one.name}: {one.title}", style="bold", soft_wrap=True)
    out.print(one.statement, soft_wrap=True)
    for i, question in enumerate(one.questions, 1):
        out.print(f"{i}. {question.text}", soft_wrap=True)
        if solutions:
            out.print(f"   {question.answer_text}", style="bold", soft_wrap=True)
            out.print(f"   {question.solution}", soft_wrap=True)
    out.print()


def _data(one: Exercise, solutions: bool) -> dict[str, object]:
    questions = [
        {"text": question.text} | ({"answer": question.answer, "solution": question.solution} if solutions else {})
        for question in one.questions
    ]
    return {"name": one.name, "title": one.title, "seed": one.seed, "given": one.statement, "questions": questions}


def _check(one: Exercise, answers: list[str], as_json: bool) -> None:
    from triptych_lectures.exercises import check

    right = check(one, answers)
    left = len(one.questions) - len(answers)
    if as_json:
        rows = [{"answer": answer, "right": good} for answer, good in zip(answers, right, strict=True)]
        screen.result({"name": one.name, "seed": one.seed, "answers": rows, "not_answered": left})
    else:
        words = (question.verdict(answer) for question, answer in zip(one.questions, answers, strict=False))
        texts = (question.text for question in one.questions)
        screen.show_rows(("", "answer", "question"), zip(words, answers, texts, strict=False))
        open_ones = [f"{i}. {asked.text}" for i, asked in enumerate(one.questions, 1) if i > len(answers)]
        if left > 0:
            screen.note(f"{counted(left, 'question')} not answered: {' '.join(open_ones)}")
        if not all(right):
            screen.note(f"how to work it out: triptych exercise {one.name} --seed {one.seed} --solutions")
    if not all(right):
        raise Exit(1)
