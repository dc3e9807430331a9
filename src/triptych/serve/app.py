"""The application: routes, keys, limits and the form of errors."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import chat, completions, messages, responses
from .fields import ApiError, Fields
from .worker import ModelWorker

LARGEST_BODY = 16 << 20  # bytes
STALLED = 60.0  # seconds without a step while requests run, after which the server is not healthy
log = logging.getLogger(__name__)


class Server:
    """Models by name, in front of them the routes.  `key` is asked of every request where it is given."""

    def __init__(self, workers: Mapping[str, ModelWorker], *, key: str | None = None) -> None:
        self.workers, self.key = workers, key

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            *completions.routes(self),
            *chat.routes(self),
            *responses.routes(self),
            *messages.routes(self),
        ]

        @asynccontextmanager
        async def lifespan(app: Starlette) -> Any:
            yield
            for worker in self.workers.values():
                worker.stop()

        return Starlette(
            routes=routes,
            lifespan=lifespan,
            max_body_size=LARGEST_BODY,
            middleware=[] if self.key is None else [Middleware(KeyRequired, key=self.key)],
            exception_handlers={ApiError: answered, 404: not_found, 405: not_found, Exception: failed},
        )

    async def health(self, request: HttpRequest) -> Response:
        """Whether tokens come wherever they are waited for."""
        stalled = [name for name, worker in self.workers.items() if not worker.healthy(STALLED)]
        return JSONResponse({"status": "stalled" if stalled else "ok", "stalled": stalled}, 503 if stalled else 200)

    async def models(self, request: HttpRequest) -> Response:
        if "anthropic-version" in request.headers:
            return JSONResponse(messages.models_json([*self.workers]))
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self.workers]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in self.workers:
            raise ApiError(404, f"there is no model {name!r}; GET /v1/models lists them", "model", "model_not_found")
        anthropic = "anthropic-version" in request.headers
        return JSONResponse(messages.model_json(name) if anthropic else self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "triptych"}

    def worker_of(self, fields: Fields) -> ModelWorker:
        """The model that a request names; the only one where it names none."""
        name = fields.get("model")
        if name is None and len(self.workers) == 1:
            return next(iter(self.workers.values()))
        if name not in self.workers:
            raise ApiError(404, f"there is no model {name!r}; GET /v1/models lists them", "model", "model_not_found")
        return self.workers[name]


class KeyRequired:
    """Answers 401 to every request without the key, before anything else is read of it."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            bearer = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(headers.get("x-api-key", bearer).encode(), self.key):
                error = ApiError(401, "give the server's key as Authorization: Bearer KEY")
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


def error_response(error: ApiError, path: str) -> JSONResponse:
    """An error in the form of the API that the route belongs to."""
    if path.startswith(messages.PATH):
        return JSONResponse(messages.error_json(error), error.status)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    details = {"message": error.message, "type": kind, "param": error.field, "code": error.code}
    return JSONResponse({"error": details}, error.status)


async def answered(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def not_found(request: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "this route does not exist" if status == 404 else f"this route has no {request.method}"
    return error_response(ApiError(status, f"{what}; docs/serving.md lists all"), request.url.path)


async def failed(request: HttpRequest, error: Exception) -> Response:
    log.exception("a request failed", exc_info=error)
    return error_response(ApiError(500, "the request failed; the server's log says why"), request.url.path)
