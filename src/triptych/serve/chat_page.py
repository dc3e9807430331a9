"""The chat page at the root of a server: one file that talks to the routes beside it, and to nothing else."""

from __future__ import annotations

import re
from functools import cache
from html import unescape
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from .app import Server

NOTE = (
    "`Enter` sends, `Shift+Enter` begins a line, `Escape` stops the answer. Point at a token of an answer, or move to "
    "it with the arrow keys, to see how likely it was and what else the model could have written there."
)


def routes(server: Server) -> list[Route]:
    async def chat(request: HttpRequest) -> Response:
        html, policy = page(key=server.key is not None, inspect=server.inspect)
        headers = {
            "content-security-policy": f"{policy}; frame-ancestors 'none'", "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer", "cache-control": "no-cache",
        }  # fmt: skip
        return Response(html, media_type="text/html", headers=headers)

    return [Route("/", chat)]


@cache
def page(*, key: bool, inspect: bool) -> tuple[bytes, str]:
    """The page, and its policy of what it may load and run; the one of a server with a `key` asks for that first."""
    from triptych.page import render  # for the first who opens it
    from triptych.page.sections import ChatSection

    html = render(
        "Chat", [ChatSection("Conversation", NOTE, key, inspect)], subtitle="with a model that this server runs"
    )
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    return html.encode(), unescape(policy[1])
