"""The application: routes, keys, limits and the form of errors."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from . import openai
from .fields import ApiError, Fields, read
from .worker import ModelWorker

ADVICE = "x-triptych-without-effect"  # names the fields of a request that have none
LARGEST_BODY = 16 << 20  # bytes
STALLED = 60.0  # seconds without a step while requests run, after which the server is not healthy
Handler = Callable[[HttpRequest], Awaitable[Response]]
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
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
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
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=self.guarded)],
            exception_handlers={ApiError: answered, 404: not_found, 405: not_found, Exception: failed},
        )

    async def guarded(self, request: HttpRequest, handler: Handler) -> Response:
        """The response of a route; 401 without the key."""
        if self.key is not None:
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
            given = request.headers.get("x-api-key", bearer)
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                return error_response(ApiError(401, "give the server's key as Authorization: Bearer KEY"))
        return await handler(request)

    async def health(self, request: HttpRequest) -> Response:
        """Whether tokens come wherever they are waited for."""
        stalled = [name for name, worker in self.workers.items() if not worker.healthy(STALLED)]
        return JSONResponse({"status": "stalled" if stalled else "ok", "stalled": stalled}, 503 if stalled else 200)

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self.workers]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in self.workers:
            raise ApiError(404, f"there is no model {name!r}; GET /v1/models lists them", "model", "model_not_found")
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "triptych"}

    async def completions(self, request: HttpRequest) -> Response:
        fields = await body(request, "sampling", "completions")
        worker = self.worker_of(fields)
        requests = openai.completion_requests(worker, fields)
        return await self._answer(openai.Generation(worker, fields, requests, kind="cmpl"))

    async def chat(self, request: HttpRequest) -> Response:
        fields = await body(request, "sampling", "chat")
        worker = self.worker_of(fields)
        requests = openai.chat_requests(worker, fields)
        return await self._answer(openai.Generation(worker, fields, requests, kind="chatcmpl"))

    def worker_of(self, fields: Fields) -> ModelWorker:
        """The model that a request names; the only one where it names none."""
        name = fields.get("model")
        if name is None and len(self.workers) == 1:
            return next(iter(self.workers.values()))
        if name not in self.workers:
            raise ApiError(404, f"there is no model {name!r}; GET /v1/models lists them", "model", "model_not_found")
        return self.workers[name]

    async def _answer(self, generation: openai.Generation) -> Response:
        headers = {ADVICE: ", ".join(generation.fields.advice)} if generation.fields.advice else {}
        if generation.fields.get("stream"):
            return StreamingResponse(openai.events(generation), media_type="text/event-stream", headers=headers)
        return JSONResponse(await openai.whole(generation), headers=headers)


async def body(request: HttpRequest, *tables: str) -> Fields:
    """The fields of a JSON body.  Raises ApiError for anything else."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise ApiError(415, "send the body as application/json")
    try:
        data = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON") from None
    return read(data, *tables)


def error_response(error: ApiError) -> JSONResponse:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    details = {"message": error.message, "type": kind, "param": error.field, "code": error.code}
    return JSONResponse({"error": details}, error.status)


async def answered(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def not_found(request: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "this route does not exist" if status == 404 else f"this route has no {request.method}"
    return error_response(ApiError(status, f"{what}; docs/serving.md lists all"))


async def failed(request: HttpRequest, error: Exception) -> Response:
    log.exception("a request failed", exc_info=error)
    return error_response(ApiError(500, "the request failed; the server's log says why"))
