"""`triptych chat`: turns are read from stdin, answers are streamed, the history is kept in memory."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typer import BadParameter

from triptych.errors import InputError, TextError
from . import options, screen
from .chat_client import RemoteModel
from .failure import describe_error, print_error
from .loading import check_generates, decode_stdin, load_draft, load_model, read_constraint

if TYPE_CHECKING:
    from triptych.generate import Engine
    from triptych.model import Model

Message = Mapping[str, str]
COMMANDS = {
    "/help": "list the commands",
    "/reset": "start a new conversation",
    "/exit": "end (also /quit or ctrl-D)",
}


def chat(
    checkpoint: options.Checkpoint | None = None,
    *,
    url: str | None = None,
    model_: str | None = None,
    key: str | None = None,
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
    schema: options.NamedPath | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    draft: str | None = None,
    draft_tokens: options.Positive = 4,
    cache: options.CacheOption = "auto",
    as_json: options.Json = False,
) -> None:
    """Hold a conversation; /help lists its commands. Without a terminal, each line of stdin is a turn.

    --url URL: Instead of a MODEL, a server with OpenAI's routes, such as http://127.0.0.1:8080/v1.
    --model NAME: Name of the server's model; left out, the only one.
    --key TEXT: Key of the server.
    --system TEXT: System message before the first turn.
    --show-prompt: Show the rendered prompt and its token ids.
    --seed N: The same seed gives the same answers; random if omitted; the seed is printed.
    """
    constraint = read_constraint(schema, regex, choice)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": random.randrange(1 << 31) if seed is None else seed,
        "stop": stop or (),
    }  # fmt: skip
    partner: LocalModel | RemoteModel
    if (checkpoint is None) == (url is None):
        raise BadParameter("give a MODEL, or a server with --url URL" + ("" if url is None else ", and not both"))
    if url is not None:
        local: dict[str, object] = {
            "--show-prompt": show_prompt,
            "--draft": draft,
            "--cache": None if cache == "auto" else cache,
        }
        local |= {"--schema": schema, "--regex": regex, "--choice": choice}
        for option in (name for name, value in local.items() if value):
            raise BadParameter(f"{option} is for a MODEL on this machine, not for a server")
        partner = RemoteModel(url, model_, key, _fields(settings))
    else:
        assert checkpoint is not None
        if model_ is not None or key is not None:
            raise BadParameter("--model and --key are for a server; give --url too")
        model = load_model(checkpoint)
        check_generates(model, checkpoint.model)
        engine = model.engine(draft=load_draft(checkpoint, draft), draft_tokens=draft_tokens, cache=cache)
        partner = LocalModel(model, engine, settings | {"constraint": constraint}, show_prompt)
    _converse(partner, seed=settings["seed"], system=system, as_json=as_json)


def _fields(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as fields of OpenAI's route, which has no others; those that it does not have where they are set."""
    names = {"max_new_tokens": "max_tokens"}
    beyond = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": ()}
    return {names.get(name, name): value for name, value in settings.items() if beyond.get(name) != value}


@dataclass(frozen=True)
class LocalModel:
    """A model of this process, as `RemoteModel` is one of a server; `engine` keeps the conversation so far, so that a
    turn computes what is new."""

    model: Model
    engine: Engine
    settings: dict[str, Any]
    show_prompt: bool

    def check(self, messages: Sequence[Message]) -> None:
        """Raises TextError where the template is missing, or refuses system messages."""
        self.model.render([*messages, {"role": "user", "content": "?"}])

    def stream(self, messages: Sequence[Message]) -> Generator[str]:
        if self.show_prompt:
            _show_prompt(self.model, messages)
        before = _reused(self.engine)
        yield from self.model.chat(messages, engine=self.engine, **self.settings)
        if self.show_prompt:
            screen.note(f"{_reused(self.engine) - before:,} ids of the prompt were computed in earlier turns")


def _converse(partner: LocalModel | RemoteModel, *, seed: int, system: str, as_json: bool) -> None:
    """Answer turns until stdin ends.  On a terminal an error ends the turn, elsewhere the conversation."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    partner.check(start)
    interactive = sys.stdin.isatty()
    screen.note(f"seed {seed}" + ("; /help lists the commands" if interactive else ""))
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
            messages.append({"role": "assistant", "content": _answer(partner, messages, as_json)})
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


def _answer(partner: LocalModel | RemoteModel, messages: list[Message], as_json: bool) -> str:
    pieces = []
    with closing(partner.stream(messages)) as stream:  # of a server, what is stopped here is stopped there
        for piece in stream:
            pieces.append(piece)
            if not as_json:
                screen.write(piece)
    text = "".join(pieces)
    screen.write(json.dumps({"role": "assistant", "content": text}, ensure_ascii=False) + "\n" if as_json else "\n")
    return text


def _show_prompt(model: Model, messages: Sequence[Message]) -> None:
    prompt = model.render(messages)
    ids = model.ids([prompt])[0]
    screen.note(screen.plain(prompt.text))
    screen.note(f"{len(ids):,} ids: {' '.join(map(str, ids))}")
