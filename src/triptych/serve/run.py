"""Runs an application on a socket until a signal, and lets what runs end first."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from triptych.errors import InputError

if TYPE_CHECKING:
    from .worker import ModelWorker

CUT = 2.0  # seconds in which the requests that were cut still receive the error that says so


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host`, before a model is loaded for it.  Raises InputError where there can be none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "is in use; give another one with --port",
            errno.EACCES: "needs more rights; give one above 1023 with --port",
        }.get(error.errno or 0, f"cannot be listened on ({error.strerror or error}); give another --host or --port")
        raise InputError(f"port {port} of {host} {reason}") from None
    return listening


class Stopping(uvicorn.Server):
    """A server that on SIGINT or SIGTERM takes no more connections, and lets the requests that run end for `grace`
    seconds; those that still run then are cut.  A second SIGINT ends it at once.

    cut   the requests that were cut.
    """

    def __init__(
        self, app: ASGIApp, workers: Callable[[], Iterable[ModelWorker]], *, grace: float, note: Callable[[str], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="critical", access_log=False, timeout_graceful_shutdown=int(grace + CUT))
        )
        self.workers, self.grace, self.note, self.cut = workers, grace, note, 0

    def run_on(self, listening: socket.socket) -> None:
        """Serve until a signal.  To be called in the main thread."""
        signal.signal(signal.SIGTERM, lambda *_: None)  # which the base class raises again when all has ended
        with suppress(KeyboardInterrupt):
            asyncio.run(self.serve([listening]))
        if self.cut:
            self.note(f"stopped; {self.cut} of the requests did not end within {self.grace:g} s and were cut")
        else:
            self.note("stopped; every request has ended" if not self.force_exit else "stopped at once")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = sum(len(worker.rows) for worker in self.workers())
        if running:
            self.note(f"stopping; {running} requests run, and have {self.grace:g} s")
        limit = asyncio.get_running_loop().call_later(self.grace, self._cut)
        await super().shutdown(sockets)
        limit.cancel()

    def _cut(self) -> None:
        for worker in self.workers():
            self.cut += len(worker.rows)
            worker.cut()
