"""`triptych answer`: a question about a text, answered by a piece of it or in the model's own words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.loading import load_model, read_document
from triptych.errors import InputError

if TYPE_CHECKING:
    from triptych.model import Model


@options.opens
def answer(
    checkpoint: options.Checkpoint,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question about the context.")],
    context: Annotated[
        str,
        typer.Option("--context", metavar="FILE|TEXT", help="Text with the answer: a file, a text, or - for stdin."),
    ],
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="How many spans of the text to show.")] = 1,
    longest: Annotated[
        int, typer.Option("--longest", metavar="N", min=1, help="Most tokens of a piece of the text.")
    ] = 15,
    no_answer: Annotated[
        bool, typer.Option("--no-answer", help="Allow 'no answer' as a result, for models of SQuAD 2.0.")
    ] = False,
    window: options.Window = None,
    overlap: options.Overlap = None,
    max_new_tokens: options.TaskLength = None,
    as_json: options.Json = False,
) -> None:
    """Answer a question from a text: with the likeliest span of it, or with generated text, as the model allows."""
    from triptych.spec import SpanHeadSpec

    if not question.strip():
        raise typer.BadParameter("the question is empty; ask something about the context")
    text = _context(context)
    model = load_model(checkpoint)
    if not isinstance(model.spec.head, SpanHeadSpec) and model.spec.layout != "encoder":
        _answer_in_words(model, question, text, max_new_tokens, as_json)
        return
    with screen.waiting("reading the context"):
        answers = model.answer(
            question, text, longest=longest, top=top, no_answer=no_answer, window=window, overlap=overlap
        )
    empty = answers[0].no_answer
    if as_json:
        rows = [
            {"text": one.text, "score": one.score, "probability": one.probability, "start": one.begin, "end": one.end}
            for one in answers
        ]
        screen.result({"question": question, "results": rows, "no_answer": empty})
        return
    table = screen.table("answer", "score", "characters", right=["score", "characters"])
    for one in answers:
        table.add_row(screen.plain(one.text) or "(no answer)", f"{one.score:.4f}", f"{one.begin:,}-{one.end:,}")
    screen.show(table, screen.plain(question))
    if empty is not None and not no_answer:
        screen.note(f"score of no answer: {empty:.4f}; --no-answer lets it win")


def _context(argument: str) -> str:
    """The context that was given: a file, stdin, or the text itself.  Raises InputError for a file that is missing."""
    if argument == "-" or os.path.exists(argument):
        return read_document(argument)
    if not argument.strip():
        raise typer.BadParameter("the context is empty; give a file or a text", param_hint="--context")
    if not any(c.isspace() for c in argument) and (os.sep in argument or os.path.splitext(argument)[1]):
        raise InputError(f"{argument}: there is no such file, and as a text it is one word; check --context")
    return argument


def _answer_in_words(model: Model, question: str, text: str, max_new_tokens: int | None, as_json: bool) -> None:
    from triptych.tasks import written_answer

    task = written_answer(model.inputs, model.hf or {}, question, text)
    screen.note_on_prompt(task.text)
    with screen.waiting("writing"):
        generation = model.answer_in_words(question, text, **options.chosen(max_new_tokens=max_new_tokens))
    if as_json:
        results = [{"text": generation.text.strip(), "reason": generation.reason}]
        screen.result({"question": question, "prompt": task.text, "results": results})
    else:
        screen.write(generation.text.strip() + "\n")
