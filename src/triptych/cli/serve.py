"""`triptych serve`: models behind OpenAI's routes on this machine."""

from __future__ import annotations

from pathlib import Path

from typer import BadParameter

from triptych.errors import InputError
from . import options, screen


def serve(
    models: list[str],
    *,
    host: str = "127.0.0.1",
    port: options.Positive = 8080,
    key: str | None = None,
    max_rows: options.Positive = 32,
    lazy: bool = False,
    inspect: bool = False,
) -> None:
    """Serve models behind the routes of OpenAI's API, until Ctrl-C.

    MODELS...: Directories, .gguf files, hub:org/name, or directories of adapters; requests name them by the last part,
        or as NAME=MODEL.  Adapters of one base share its weights.
    --host HOST: Address to listen on; others than 127.0.0.1 need --key.
    --port N: Port to listen on.
    --key TEXT: Key that every request has to give.
    --max-rows N: Requests of a model that run at once.
    --lazy: Load each model by the first request that names it.
    --inspect: Answer /v1/inspect, and let requests edit values inside the model.
    """
    try:
        import uvicorn

        from triptych.serve.app import Server
    except ImportError as error:
        raise InputError(f"serving needs the extra serve ({error}); run: pip install 'triptych[serve]'") from None
    if host not in ("127.0.0.1", "::1", "localhost") and key is None:
        raise BadParameter(f"--host {host} is reached by others; give --key too")
    from triptych.serve.loading import Loader

    paths: dict[str, str] = {}
    for name, path in map(_named, models):
        if name in paths:
            raise BadParameter(f"two models are named {name}; write NAME=MODEL for one of them")
        paths[name] = path
    loader = Loader(max_rows)
    cards = [loader.card(name, path) for name, path in paths.items()] if lazy else []
    later = {name: loader.later(name, path) for name, path in paths.items()} if lazy else {}
    workers = {} if lazy else {name: loader.worker(name, path) for name, path in paths.items()}
    app = Server(workers, key=key, inspect=inspect, lazy=later, cards=cards).app()
    screen.note(f"serving {', '.join(paths)} on http://{host}:{port}/v1; Ctrl-C ends it")
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


def _named(text: str) -> tuple[str, str]:
    """`NAME=MODEL`, or a model by the last part of its own name."""
    name, equals, path = text.partition("=")
    if equals and name and "/" not in name:
        return name, path
    return Path(text.removeprefix("hub:")).stem if text.endswith(".gguf") else Path(text).name, text
