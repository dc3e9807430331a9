"""`triptych summarize`: a summary of a text file."""

from __future__ import annotations

from typing import Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.loading import load_model, read_document


@options.opens
def summarize(
    checkpoint: options.Checkpoint,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The text file to summarize, or - for stdin.")],
    max_new_tokens: options.TaskLength = None,
    beams: options.TaskBeams = None,
    as_json: options.Json = False,
) -> None:
    """Summarize a text file, with the settings that the checkpoint has for it."""
    from triptych.tasks import summary

    text = read_document(file)
    model = load_model(checkpoint)
    task = summary(model.inputs, model.hf or {}, text)
    screen.note_on_prompt(task.text)
    with screen.waiting("summarizing"):
        (generation,) = model.summarize([text], **options.chosen(max_new_tokens=max_new_tokens, beams=beams))
    if as_json:
        result = {"text": generation.text.strip(), "reason": generation.reason}
        screen.result({"file": file, "prompt": task.text, **result, "tokens": len(generation.ids)})
    else:
        screen.write(generation.text.strip() + "\n")
