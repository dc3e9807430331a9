"""`triptych serve`: models behind OpenAI's routes on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from typer import BadParameter

from triptych.errors import InputError
from . import options, screen


def serve(
    models: list[str],
    *,
    host: str = "127.0.0.1",
    port: options.Port = 8080,
    key: str | None = None,
    max_rows: options.Positive = 32,
    lazy: bool = False,
    inspect: bool = False,
    grace: options.Natural = 30,
    as_json: options.Json = False,
) -> None:
    """Serve models behind the routes of OpenAI's API and a chat page, until Ctrl-C.

    MODELS...: Directories, .gguf files, hub:org/name, or directories of adapters; requests name them by the last part,
        or as NAME=MODEL.  Adapters of one base share its weights.
    --host HOST: Address to listen on; others than 127.0.0.1 need --key.
    --port N: Port to listen on.
    --key TEXT: Key that every request has to give.
    --max-rows N: Requests of a model that run at once.
    --lazy: Load each model by the first request that names it.
    --inspect: Answer /v1/inspect, and let requests edit values inside the model.
    --grace N: Seconds that running requests have to end after Ctrl-C or SIGTERM.
    """
    try:
        from triptych.serve.limits import check_key
        from triptych.serve.run import Stopping, listen
    except ImportError as error:
        raise InputError(f"serving needs {error.name}; run: pip install -e '.[serve]' in the clone") from None
    if host not in ("127.0.0.1", "::1", "localhost") and key is None:
        raise BadParameter(f"--host {host} is reached by others; give --key too")
    check_key(key)
    paths = named(models)
    with listen(host, port) as listening:  # before the library is imported and the models are loaded
        from triptych.serve.app import Server
        from triptych.serve.loading import Loader

        loader = Loader(max_rows)
        cards = [loader.card(name, path) for name, path in paths.items()] if lazy else []
        later = {name: loader.later(name, path) for name, path in paths.items()} if lazy else {}
        workers = {} if lazy else {name: loader.worker(name, path) for name, path in paths.items()}
        server = Server(workers, key=key, inspect=inspect, lazy=later, cards=cards)
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if as_json:
            screen.result({"url": f"{at}/v1", "page": f"{at}/", "models": [*paths]})
            sys.stdout.flush()  # for who waits for it
        screen.note(f"serving {', '.join(paths)} on {at}/v1, with a chat page at {at}/")
        Stopping(server.app(), lambda: server.workers.values(), grace=grace, note=screen.note).run_on(listening)


def named(models: list[str]) -> dict[str, str]:
    """The models by the names that requests give them.  Raises BadParameter for two of one name."""
    paths: dict[str, str] = {}
    for name, path in map(_named, models):
        if name in paths:
            raise BadParameter(f"two models are named {name}; write NAME=MODEL for one of them")
        paths[name] = path
    return paths


def _named(text: str) -> tuple[str, str]:
    """`NAME=MODEL`, or a model by the last part of its own name."""
    name, equals, path = text.partition("=")
    if equals and name and "/" not in name:
        return name, path
    return Path(text.removeprefix("hub:")).stem if text.endswith(".gguf") else Path(text).name, text
