"""`triptych exercise`: variants of the lectures' exercises, their answers, and sheets of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter, Exit

from triptych.cli import options, screen
from triptych.errors import counted

if TYPE_CHECKING:
    from triptych_lectures.exercises import Exercise

ALL = "all"


@options.command
def exercise(
    names: list[str] | None = None,
    *,
    seed: options.Natural = 0,
    answer: list[str] | None = None,
    solutions: bool = False,
    save: Path | None = None,
    as_json: options.Json = False,
) -> None:
    """Exercises of the lectures with other numbers; with --answer, exit 1 if one is wrong.

    [NAME]...: Exercises, as in L4.7 L5.1, or all; without one, list them.
    --seed N: Seed of the numbers in the exercises.
    --answer TEXT: Check an answer; once for each question, in order.
    --solutions: Show the answers and how to work them out.
    --save FILE: Write a page to read or print, answers folded.
    """
    if not names:
        _list(as_json)
        return
    if answer and (len(names) > 1 or ALL in names):
        raise BadParameter(f"--answer is for one exercise, not for several or {ALL}; give one NAME")
    if answer and (save is not None or solutions):
        raise BadParameter(f"--answer checks answers; leave {'--save' if save is not None else '--solutions'} out")
    screen.check_suffix(save)
    from triptych_lectures import exercises as lectures

    drawn = [lectures.variant(name, seed) for name in (lectures.NAMES if ALL in names else names)]
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


def _list(as_json: bool) -> None:
    from triptych_lectures.exercises import NAMES

    if as_json:
        screen.result([{"name": name, "title": title} for name, title in NAMES.items()])
        return
    screen.show_rows(("exercise", "about"), NAMES.items())
    screen.note("one of them: triptych exercise L4.7 --seed 3; a sheet: triptych exercise all --save sheet.html")


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
        words = ("right" if good else "wrong" for good in right)
        texts = (question.text for question in one.questions)
        screen.show_rows(("", "answer", "question"), zip(words, answers, texts, strict=False))
        if left > 0:
            screen.note(f"{counted(left, 'question')} not answered: {one.questions[len(answers)].text}")
        if not all(right):
            screen.note(f"how to work it out: triptych exercise {one.name} --seed {one.seed} --solutions")
    if not all(right):
        raise Exit(1)
