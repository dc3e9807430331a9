"""`triptych serve`: models behind OpenAI's routes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter

from triptych.errors import InputError
from . import options, screen

if TYPE_CHECKING:
    from triptych.model import Model


def serve(
    models: list[str],
    *,
    host: str = "127.0.0.1",
    port: options.Positive = 8080,
    key: str | None = None,
    max_rows: options.Positive = 32,
    inspect: bool = False,
) -> None:
    """Serve models behind the routes of OpenAI's API, until Ctrl-C.

    MODELS...: Directories, .gguf files or hub:org/name; requests name them by the last part, or as NAME=MODEL.
    --host HOST: Address to listen on; others than 127.0.0.1 need --key.
    --port N: Port to listen on.
    --key TEXT: Key that every request has to give.
    --max-rows N: Requests that run at once.
    --inspect: Answer /v1/inspect, and let requests edit values inside the model.
    """
    try:
        import uvicorn

        from triptych.serve.app import Server
    except ImportError as error:
        raise InputError(f"serving needs the extra serve ({error}); run: pip install 'triptych[serve]'") from None
    if host not in ("127.0.0.1", "::1", "localhost") and key is None:
        raise BadParameter(f"--host {host} is reached by others; give --key too")
    from triptych.serve.worker import ModelWorker

    workers = {}
    for name, path in map(_named, models):
        if name in workers:
            raise BadParameter(f"two models are named {name}; write NAME=MODEL for one of them")
        workers[name] = ModelWorker(_loaded(path), name, max_rows=max_rows)
    screen.note(f"serving {', '.join(workers)} on http://{host}:{port}/v1; Ctrl-C ends it")
    app = Server(workers, key=key, inspect=inspect).app()
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


def _named(text: str) -> tuple[str, str]:
    """`NAME=MODEL`, or a model by the last part of its own name."""
    name, equals, path = text.partition("=")
    if equals and name and "/" not in name:
        return name, path
    return Path(text.removeprefix("hub:")).stem if text.endswith(".gguf") else Path(text).name, text


def _loaded(path: str) -> Model:
    from triptych import load

    return load(path)
