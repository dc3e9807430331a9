"""The application: routes, keys, limits and the form of errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from triptych import machine
from triptych.errors import shown
from . import (
    chat,
    chat_page,
    completions,
    embeddings,
    inside,
    labelling,
    messages,
    ollama,
    openapi,
    rerank,
    responses,
    tokens,
    transcriptions,
)  # fmt: skip
from .cards import ModelCard, card_of_model
from .errors import error_response
from .fields import ApiError, Fields
from .limits import Limited, ServerLimits, check_key
from .metrics import Counted, Metrics
from .worker import ModelWorker

OTHERS = (embeddings, rerank, labelling, transcriptions, tokens, ollama)  # modules with routes
STALLED = 60.0  # seconds without a step while requests run, after which the server is not healthy
log = logging.getLogger(__name__)


class Server:
    """Models by name, in front of them the routes.  `key` is asked of every request where it is given; `inspect` opens
    `/v1/inspect` and edits inside requests.

    workers   the models that are loaded.
    lazy      what loads each of those that are loaded by the first request that names them, and `cards` what they are.

    Raises InputError for a key that no request could give, or every one does.
    """

    def __init__(
        self, workers: Mapping[str, ModelWorker], *, key: str | None = None, limits: ServerLimits | None = None,
        inspect: bool = False, lazy: Mapping[str, Callable[[], ModelWorker]] = MappingProxyType({}),
        cards: Iterable[ModelCard] = (),
    ) -> None:  # fmt: skip
        check_key(key)
        self.workers, self.lazy = dict(workers), lazy
        self.key, self.limits, self.inspect = key, limits or ServerLimits(), inspect
        self.cards = {card.name: card for card in cards}
        self.cards |= {name: card_of_model(name, worker.model) for name, worker in workers.items()}
        self.names = tuple(self.cards)
        self.loading: dict[str, asyncio.Task[None]] = {}
        self.metrics = Metrics(self.workers)
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
            *(route for module in OTHERS for route in module.routes(self)),
            *self.metrics.routes(),
        ]
        routes += [*openapi.routes(self, routes), *chat_page.routes(self)]

        @asynccontextmanager
        async def lifespan(app: Starlette) -> Any:
            yield
            await asyncio.gather(*self.loading.values(), return_exceptions=True)
            for worker in self.workers.values():
                worker.stop()

        app = Starlette(
            routes=routes,
            lifespan=lifespan,
            middleware=[
                Middleware(Counted, metrics=self.metrics), Middleware(Limited, limits=self.limits, key=self.key)
            ],
            exception_handlers={ApiError: answered, HTTPException: not_served, Exception: failed},
        )  # fmt: skip
        app.state.server = self
        return app

    async def ready(self, name: str | None) -> None:
        """Load the model that a request names, where it is one that is loaded when it is wanted; once, however many
        want it.  Raises ApiError where it cannot be loaded; the next request tries again."""
        known = self.name_of(name)
        if known is None or known not in self.lazy or known in self.workers:
            return
        if known not in self.loading:
            self.loading[known] = asyncio.create_task(self._load(known))
        try:
            await asyncio.shield(self.loading[known])
        except Exception as error:
            log.exception("%s cannot be loaded", known, exc_info=error)
            raise ApiError(503, f"{known} cannot be loaded; the server's log says why") from None

    async def _load(self, name: str) -> None:
        try:
            self.workers[name] = await asyncio.to_thread(self.lazy[name])
        finally:
            del self.loading[name]
        self.metrics.follow(self.workers[name])

    async def health(self, request: HttpRequest) -> Response:
        """Whether tokens come wherever they are waited for."""
        stalled = [name for name, worker in self.workers.items() if not worker.healthy(STALLED)]
        state = {
            "status": "stalled" if stalled else "ok",
            "stalled": stalled,
            "resident_bytes": machine.process_status("VmRSS"),
        }
        return JSONResponse(state, 503 if stalled else 200)

    async def models(self, request: HttpRequest) -> Response:
        if "anthropic-version" in request.headers:
            return JSONResponse(messages.models_json([*self.names]))
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self.names]})

    async def model(self, request: HttpRequest) -> Response:
        name = self.card(request.path_params["name"]).name
        anthropic = "anthropic-version" in request.headers
        return JSONResponse(messages.model_json(name) if anthropic else self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "triptych"}

    def card(self, name: str) -> ModelCard:
        """What a model is.  Raises ApiError where there is none of this name."""
        if name not in self.cards:
            problem = f"there is no model {shown(name)}; GET /v1/models lists them"
            raise ApiError(404, problem, "model", "model_not_found")
        return self.cards[name]

    def name_of(self, name: str | None) -> str | None:
        """The name of a model; of the only one where none is named, and without the tag that Ollama's clients add."""
        if name is None and len(self.names) == 1:
            return self.names[0]
        return name if name is None or name in self.names else name.removesuffix(":latest")

    def worker_of(self, fields: Fields) -> ModelWorker:
        """The model that a request names; the only one where it names none."""
        name = self.name_of(fields.get("model"))
        if name is None:
            raise ApiError(400, f"model is missing; this server has {', '.join(self.names)}", "model")
        return self.workers[self.card(name).name]


async def answered(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def not_served(request: HttpRequest, error: Exception) -> Response:
    """What the framework refuses: a route or a method that is not there, a body that is no form."""
    assert isinstance(error, HTTPException)
    what = {
        404: "this route does not exist; /openapi.json lists all",
        405: f"this route has no {request.method}; /openapi.json lists all",
    }.get(error.status_code, error.detail.rstrip("."))
    response = error_response(ApiError(error.status_code, what), request.url.path)
    response.headers.update(error.headers or {})
    return response


async def failed(request: HttpRequest, error: Exception) -> Response:
    log.exception("a request failed", exc_info=error)
    return error_response(ApiError(500, "the request failed; the server's log says why"), request.url.path)
