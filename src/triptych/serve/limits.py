"""Limits of what a client may use of the server, and the key, checked before any route reads a request."""

from __future__ import annotations

import asyncio
import hmac
import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.errors import InputError
from .errors import error_response
from .fields import ApiError

OPEN = frozenset({"/health", "/metrics"})  # answered whatever runs
PAGE = "/"  # the chat page, the same file on every server, which asks its reader for the key


@dataclass(frozen=True)
class ServerLimits:
    """Of one server.

    body_bytes     of a request's body.
    body_seconds   within which a body has to arrive.
    send_seconds   within which a client has to take what it is sent.
    requests       that are answered at once, those that wait for a slot included.
    """

    body_bytes: int = 32 << 20
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    requests: int = 512


def of_this_machine(host: str) -> bool:
    """Whether the Host of a request names this machine, or nothing.  A page of another site whose name was made to lead
    here sends that name."""
    return re.fullmatch(r"((localhost|127\.0\.0\.1|\[::1\])(:\d+)?)?", host, re.IGNORECASE) is not None


def check_key(key: str | None) -> None:
    """Raises InputError for a key that no request could give, or every one does: an empty one is what a variable leaves
    that is not set."""
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise InputError("the key must be printable ASCII characters, at least one, without blanks around them")


class Limited:
    """Refuses a request without the key (401) or by another name (403), one too many (503), and a body that is too
    large (413) or too slow (408); closes a connection whose client does not read."""

    def __init__(self, app: ASGIApp, limits: ServerLimits, key: str | None) -> None:
        self.app, self.limits, self.running = app, limits, 0
        self.key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        self.running += 1
        try:
            await self.app(scope, self._limited_receive(receive), self._limited_send(send))
        except ClientDisconnect:  # there is nobody to answer
            pass
        finally:
            self.running -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self.key is not None and scope["path"] != PAGE:
            bearer = re.sub("^bearer +", "", headers.get("authorization", ""), flags=re.IGNORECASE)
            keys = (bearer, headers.get("x-api-key", ""))  # some clients fill the other one with any text
            if not any(hmac.compare_digest(one.encode(), self.key) for one in keys):
                return ApiError(401, "send the server's key as Authorization: Bearer KEY or as x-api-key")
        elif self.key is None and not of_this_machine(headers.get("host", "")):
            problem = "its Host is not this machine: without a key the server answers localhost and 127.0.0.1 alone"
            return ApiError(403, f"the request is refused, since {problem}")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limits.body_bytes:
            return self._too_large()
        if self.running >= self.limits.requests and scope["path"] not in OPEN:
            return ApiError(503, f"the server answers {self.running:,} requests already; try again later")
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.limits.body_bytes:,} bytes")

    def _limited_receive(self, receive: Receive) -> Receive:
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self.limits.body_seconds

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()  # which waits until the client leaves
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {self.limits.body_seconds:g} seconds") from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self.limits.body_bytes:
                raise self._too_large()
            return message

        return limited

    def _limited_send(self, send: Send) -> Send:
        async def limited(message: Message) -> None:
            try:
                async with asyncio.timeout(self.limits.send_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientDisconnect from None

        return limited
