"""`triptych summarize`, `translate`, `answer` and `caption`: texts that a model writes from others, or from images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.errors import InputError
from . import options, screen
from .loading import load_model, read_document, read_texts

if TYPE_CHECKING:
    from triptych.model import Model

MOST_TOKENS = 64  # of a caption


def summarize(
    checkpoint: options.Checkpoint,
    file: str,
    *,
    max_new_tokens: options.TaskLength = None,
    beams: options.TaskBeams = None,
    as_json: options.Json = False,
) -> None:
    """Summarize a text file, with the settings that the checkpoint has for it.

    FILE: The text file to summarize, or - for stdin.
    """
    from triptych.tasks import summary

    text = read_document(file)
    model = load_model(checkpoint)
    task = summary(model.inputs, text)
    screen.note_on_prompt(task.text)
    with screen.waiting("summarizing"):
        (generation,) = model.summarize([text], **options.chosen(max_new_tokens=max_new_tokens, beams=beams))
    if as_json:
        result = {"text": generation.text.strip(), "reason": generation.reason}
        screen.result({"file": file, "prompt": task.text, **result, "tokens": len(generation.ids)})
    else:
        screen.write(generation.text.strip() + "\n")


def translate(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    *,
    from_: str | None = None,
    to: str | None = None,
    max_new_tokens: options.TaskLength = None,
    beams: options.TaskBeams = None,
    as_json: options.Json = False,
) -> None:
    """Translate texts; for an unknown language, the error lists those that the model knows.

    --from LANGUAGE: The language of the text, as en or en_XX.
    --to LANGUAGE: The language to write, as de or de_DE.
    """
    from triptych.tasks import translation

    inputs = read_texts(texts, lines=True)
    model = load_model(checkpoint)
    writing_tasks = [translation(model.inputs, text, from_, to) for text in inputs]
    settings = options.chosen(max_new_tokens=max_new_tokens, beams=beams)
    with screen.waiting(f"translating {len(inputs):,} texts"):
        generations = model.translate(inputs, from_, to, **settings)
    if as_json:
        rows = [
            {"text": text, "translation": generation.text.strip(), "prompt": of.text, "reason": generation.reason}
            for text, generation, of in zip(inputs, generations, writing_tasks, strict=True)
        ]
        screen.result({"from": from_, "to": to, "results": rows})
        return
    screen.note_on_prompt(writing_tasks[0].text)
    for generation in generations:
        screen.write(generation.text.strip() + "\n")


def answer(
    checkpoint: options.Checkpoint,
    question: str,
    *,
    context: str,
    top: options.Positive = 1,
    longest: options.Positive = 15,
    no_answer: bool = False,
    window: options.Positive | None = None,
    overlap: options.Natural | None = None,
    max_new_tokens: options.TaskLength = None,
    as_json: options.Json = False,
) -> None:
    """Answer a question from a text: with the likeliest span of it, or with generated text, as the model allows.

    QUESTION: The question about the context.
    --context FILE|TEXT: Text with the answer: a file, a text, or - for stdin.
    --top N: How many spans of the text to show.
    --longest N: Most tokens of a piece of the text.
    --no-answer: Allow 'no answer' as a result, for models of SQuAD 2.0.
    """
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
            {"text": span.text, "score": span.score, "probability": span.probability}
            | {"start": span.begin, "end": span.end}
            for span in answers
        ]
        screen.result({"question": question, "results": rows, "no_answer": empty})
        return
    lines = [(span.text or "(no answer)", f"{span.score:.4f}", f"{span.begin:,}-{span.end:,}") for span in answers]
    numbers = ["score", "characters"]
    screen.show_rows(("answer", *numbers), lines, question, right=numbers)
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

    task = written_answer(model.inputs, question, text)
    screen.note_on_prompt(task.text)
    with screen.waiting("writing"):
        generation = model.answer_in_words(question, text, **options.chosen(max_new_tokens=max_new_tokens))
    if as_json:
        results = [{"text": generation.text.strip(), "reason": generation.reason}]
        screen.result({"question": question, "prompt": task.text, "results": results})
    else:
        screen.write(generation.text.strip() + "\n")


def caption(
    checkpoint: options.Checkpoint,
    images: list[Path],
    *,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"Stop after N tokens; by default {MOST_TOKENS}, or fewer with a shorter decoder.",
        ),
    ] = None,
    beams: options.Natural = 0,
    temperature: options.Temperature = 0.0,
    seed: options.Natural = 0,
    as_json: options.Json = False,
) -> None:
    """Write a text for each image, with an encoder of images and a decoder; token ids without a tokenizer.

    IMAGE...: Image files, prepared as the checkpoint says.
    --beams N: Beam search with N beams; 0 is none.
    --seed N: Seed of sampling.
    """
    model = load_model(checkpoint)
    _check_captions(model)
    if max_new_tokens is None:
        context = model.spec.context
        max_new_tokens = MOST_TOKENS if context is None else min(MOST_TOKENS, context - 1)  # one is the start token's
    generations = model.generate(
        images, max_new_tokens=max_new_tokens, beams=beams, temperature=temperature, seed=None if beams else seed
    )
    if as_json:
        rows = [
            {"image": str(image), "text": generation.text, "ids": generation.ids, "reason": generation.reason}
            for image, generation in zip(images, generations, strict=True)
        ]
        screen.result({"results": rows})
        return
    for image, generation in zip(images, generations, strict=True):
        name = f"{screen.plain(str(image))}: " if len(images) > 1 else ""
        text = " ".join(map(str, generation.ids)) if model.tokenizer is None else generation.text.strip()
        screen.write(f"{name}{text}\n")


def _check_captions(model: Model) -> None:
    """Raise InputError for a model that does not read images, or does not write."""
    from triptych.spec import PatchesSpec

    kind = f"of the type vision-encoder-decoder; this {model.spec.family} model"
    if not isinstance(model.spec.reads.embed, PatchesSpec):
        raise InputError(
            f"caption needs a model that reads images and writes text, {kind} does not read images (of LLaVA, Gemma 3 "
            "and Mistral 3 the text model is read; what is missing is an input slot that puts the vectors of an image "
            "between tokens)"
        )
    if model.spec.layout != "encoder-decoder":
        raise InputError(
            f"caption needs a model with a decoder, {kind} has none: triptych classify gives the labels of an image"
        )
