"""`triptych translate`: texts in another language."""

from __future__ import annotations

from typing import Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.loading import load_model, read_texts


@options.opens
def translate(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="LANGUAGE", help="The language of the text, as en or en_XX.", show_default=False
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--to", metavar="LANGUAGE", help="The language to write, as de or de_DE.", show_default=False),
    ] = None,
    max_new_tokens: options.TaskLength = None,
    beams: options.TaskBeams = None,
    as_json: options.Json = False,
) -> None:
    """Translate texts; for an unknown language, the error lists those that the model knows."""
    from triptych.tasks import translation

    inputs = read_texts(texts, lines=True)
    model = load_model(checkpoint)
    writing_tasks = [translation(model.inputs, model.hf or {}, text, source, target) for text in inputs]
    settings = options.chosen(max_new_tokens=max_new_tokens, beams=beams)
    with screen.waiting(f"translating {len(inputs):,} texts"):
        generations = model.translate(inputs, source, target, **settings)
    if as_json:
        rows = [
            {"text": text, "translation": one.text.strip(), "prompt": of.text, "reason": one.reason}
            for text, one, of in zip(inputs, generations, writing_tasks, strict=True)
        ]
        screen.result({"from": source, "to": target, "results": rows})
        return
    screen.note_on_prompt(writing_tasks[0].text)
    for one in generations:
        screen.write(one.text.strip() + "\n")
