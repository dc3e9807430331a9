"""The application: routes, keys, limits and the form of errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import chat, completions, inside, messages, responses
from .errors import error_response
from .fields import ApiError, Fields
from .limits import Limited, Limits
from .worker import ModelWorker

STALLED = 60.0  # seconds without a step while requests run, after which the server is not healthy
log = logging.getLogger(__name__)


class Server:
    """Models by name, in front of them the routes.  `key` is asked of every request where it is given; `inspect` opens
    `/v1/inspect` and edits inside requests."""

    def __init__(
        self, workers: Mapping[str, ModelWorker], *, key: str | None = None, limits: Limits | None = None,
        inspect: bool = False,
    ) -> None:  # fmt: skip
        self.workers, self.key, self.limits, self.inspect = workers, key, limits or Limits(), inspect
        self.inside = ("inside",) if inspect else ("inside_refused",)  # tables of the fields of edits

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            *completions.routes(self),
            *chat.routes(self),
            *responses.routes(self),
            *messages.routes(self),
            *inside.routes(self),
        ]

        @asynccontextmanager
        async def lifespan(app: Starlette) -> Any:
            yield
            for worker in self.workers.values():
                worker.stop()

        return Starlette(
            routes=routes,
            lifespan=lifespan,
            middleware=[Middleware(Limited, limits=self.limits, key=self.key)],
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
