"""The conversation of `triptych chat`: turns read, answers streamed, history in memory."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from triptych.cli import screen
from triptych.cli.failure import say, told
from triptych.cli.models import decoded
from triptych.errors import InputError, TextError

if TYPE_CHECKING:
    from triptych.model import Model

Message = dict[str, str]


def converse(
    model: Model, how: dict[str, Any], *, system: str, seed: int | None, show_prompt: bool, as_json: bool
) -> None:
    """Answer turn after turn until stdin ends.

    On a terminal an error ends the turn, elsewhere the conversation.  Raises TextError without a chat template.
    """
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    model.render([*start, {"role": "user", "content": "?"}])  # no template, or one without system turns: say so now
    how["seed"] = random.randrange(1 << 31) if seed is None else seed
    person = sys.stdin.isatty()
    screen.note(f"seed {how['seed']}" + ("; /reset forgets, /quit or ctrl-D ends" if person else ""))
    messages = list(start)
    for line in _turns(person):
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(start)
            screen.note("forgotten")
            continue
        messages.append({"role": "user", "content": line})
        try:
            if show_prompt:
                _show_prompt(model, messages)
            messages.append({"role": "assistant", "content": _answer(model, messages, how, as_json)})
        except (InputError, TextError) as error:
            if not person:
                raise
            say(f"{told(error)[1]}; /reset starts over")
            messages.pop()
        except KeyboardInterrupt:  # stops the answer, not the conversation
            if not person:
                raise
            screen.write("\n")
            messages.pop()


def _turns(person: bool) -> Iterator[str]:
    """Lines that hold something, each a turn."""
    if person:
        import readline  # noqa: F401 - gives input() its line editing and history

    while True:
        try:
            line = input("> ") if person else _line()
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _line() -> str:
    raw = sys.stdin.buffer.readline()
    if not raw:
        raise EOFError
    return decoded(raw)


def _answer(model: Model, messages: list[Message], how: dict[str, Any], as_json: bool) -> str:
    pieces = []
    for piece in model.chat(messages, **how):
        pieces.append(piece)
        if not as_json:
            screen.write(piece)
    text = "".join(pieces)
    screen.write(json.dumps({"role": "assistant", "content": text}, ensure_ascii=False) + "\n" if as_json else "\n")
    return text


def _show_prompt(model: Model, messages: list[Message]) -> None:
    prompt = model.render(messages)
    ids = model.ids([prompt])[0]
    screen.note(screen.plain(prompt.text))
    screen.note(f"{len(ids):,} ids: {' '.join(map(str, ids))}")
