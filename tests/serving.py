"""A server in a thread of the test's process, over real sockets."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import uvicorn

from triptych.serve.app import Server


@contextmanager
def running(server: Server) -> Iterator[int]:
    """The port of a server that ends, with its models' threads, at the end of the block."""
    http_server = uvicorn.Server(uvicorn.Config(server.app(), port=0, log_level="critical"))
    thread = threading.Thread(target=http_server.run)
    thread.start()
    while not http_server.started:
        assert thread.is_alive()
    try:
        yield http_server.servers[0].sockets[0].getsockname()[1]
    finally:
        http_server.should_exit = True
        thread.join(60)
        for worker in server.workers.values():
            worker.thread.join(60)
            assert not worker.thread.is_alive()


def ask(
    port: int, route: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout: float = 120
) -> tuple[int, Any]:
    """The status and the JSON of an answer to a POST of `body`, or to a GET without one."""
    data = None if body is None else json.dumps(body).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)) as connection:
        how = {"content-type": "application/json"} | dict(headers or {})
        connection.request("GET" if body is None else "POST", route, data, how)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
