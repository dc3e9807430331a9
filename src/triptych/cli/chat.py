"""`triptych chat`: turns are read from stdin, answers are streamed, the history is kept in memory."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from triptych.errors import InputError, TextError
from . import options, screen
from .failure import describe_error, print_error
from .loading import check_generates, decode_stdin, load_draft, load_model

if TYPE_CHECKING:
    from triptych.generate import Engine
    from triptych.model import Model

Message = dict[str, str]
COMMANDS = {
    "/help": "list the commands",
    "/reset": "start a new conversation",
    "/exit": "end (also /quit or ctrl-D)",
}


def chat(
    checkpoint: options.Checkpoint,
    *,
    system: str = "",
    show_prompt: bool = False,
    max_new_tokens: options.Positive = 512,
    temperature: options.Temperature = 0.7,
    top_k: options.Natural = 0,
    top_p: options.Share = 0.9,
    min_p: options.Share = 0.0,
    repetition_penalty: float = 1.0,
    seed: options.Natural | None = None,
    stop: list[str] | None = None,
    draft: str | None = None,
    draft_tokens: options.Positive = 4,
    cache: options.CacheOption = "auto",
    as_json: options.Json = False,
) -> None:
    """Hold a conversation; /help lists its commands. Without a terminal, each line of stdin is a turn.

    --system TEXT: System message before the first turn.
    --show-prompt: Show the rendered prompt and its token ids.
    --seed N: The same seed gives the same answers; random if omitted; the seed is printed.
    """
    model = load_model(checkpoint)
    check_generates(model, checkpoint.model)
    settings = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": random.randrange(1 << 31) if seed is None else seed,
        "stop": stop or (),
    }  # fmt: skip
    engine = model.engine(draft=load_draft(checkpoint, draft), draft_tokens=draft_tokens, cache=cache)
    _converse(model, engine, settings, system=system, show_prompt=show_prompt, as_json=as_json)


def _converse(
    model: Model, engine: Engine, settings: dict[str, Any], *, system: str, show_prompt: bool, as_json: bool
) -> None:
    """Answer turns until stdin ends; `engine` keeps the conversation so far, so that a turn computes what is new.

    On a terminal an error ends the turn, elsewhere the conversation.  Raises TextError without a chat template.
    """
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    model.render(
        [*start, {"role": "user", "content": "?"}]
    )  # fails before the first turn if the template is missing or refuses system messages
    interactive = sys.stdin.isatty()
    screen.note(f"seed {settings['seed']}" + ("; /help lists the commands" if interactive else ""))
    messages = list(start)
    for line in _turns(interactive):
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(start)
            screen.note("new conversation")
            continue
        if line.startswith("/") and line[1:].isalpha():  # "/etc/fstab is ..." is for the model
            if line != "/help" and not interactive:
                raise InputError(f"{line} is not a command of chat; use one of {', '.join(COMMANDS)}")
            if line != "/help":
                screen.note(f"{line} is not a command; the commands are:")
            screen.note("\n".join(f"{name:8}{effect}" for name, effect in COMMANDS.items()))
            continue
        messages.append({"role": "user", "content": line})
        try:
            if show_prompt:
                _show_prompt(model, messages)
            reused = _reused(engine)
            messages.append({"role": "assistant", "content": _answer(model, engine, messages, settings, as_json)})
            if show_prompt:
                screen.note(f"{_reused(engine) - reused:,} ids of the prompt were computed in earlier turns")
        except (InputError, TextError) as error:
            if not interactive:
                raise
            print_error(f"{describe_error(error)[1]}; /reset starts a new conversation")
            messages.pop()
        except KeyboardInterrupt:  # stops the answer, not the conversation
            if not interactive:
                raise
            screen.write("\n")
            messages.pop()


def _turns(interactive: bool) -> Iterator[str]:
    """The lines of stdin that are not blank."""
    if interactive:
        import readline  # noqa: F401 - gives input() its line editing and history

    while True:
        try:
            line = input("> ") if interactive else decode_stdin(sys.stdin.buffer.readline())
        except EOFError:
            return
        if not line and not interactive:  # the end of stdin: an empty line ends in a line break
            return
        if line.strip():
            yield line.strip()


def _reused(engine: Engine) -> int:
    return 0 if engine.prefixes is None else engine.prefixes.reused


def _answer(model: Model, engine: Engine, messages: list[Message], settings: dict[str, Any], as_json: bool) -> str:
    pieces = []
    for piece in model.chat(messages, engine=engine, **settings):
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
