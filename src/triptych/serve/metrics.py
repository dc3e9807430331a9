"""`/metrics`: what the server does, for Prometheus, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import monotonic

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .worker import ModelWorker

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The figures of one server.  Names of models and routes are the only labels besides the status, so that no request
    adds one."""

    def __init__(self, workers: Mapping[str, ModelWorker]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "triptych_requests", "Requests that were answered", ["route", "method", "status"], registry=registry
        )
        self.seconds = Histogram(
            "triptych_request_seconds", "Seconds to the last byte of an answer", ["route"], buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.read = Counter("triptych_prompt_tokens", "Tokens of prompts that were taken", ["model"], registry=registry)
        self.written = Counter("triptych_generated_tokens", "Tokens that were written", ["model"], registry=registry)
        self.first = Histogram(
            "triptych_first_token_seconds", "Seconds from a request to its first token", ["model"], buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.between = Histogram(
            "triptych_between_tokens_seconds", "Seconds between two tokens of a row", ["model"], buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        registry.register(Running(workers))
        for worker in workers.values():
            self.follow(worker)

    def follow(self, worker: ModelWorker) -> None:
        """Count what this worker does from now on."""
        worker.meter = ModelMeter(self, worker.name)

    def routes(self) -> list[Route]:
        async def metrics(request: HttpRequest) -> Response:
            return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

        return [Route("/metrics", metrics)]


class ModelMeter:
    """Counts the tokens of one model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._read, self._written = metrics.read.labels(model), metrics.written.labels(model)
        self._first, self._between = metrics.first.labels(model), metrics.between.labels(model)

    def read(self, prompt: int) -> None:
        self._read.inc(prompt)

    def written(self, count: int, seconds: float, *, first: bool) -> None:
        self._written.inc(count)
        (self._first if first else self._between).observe(seconds)


class Running(Collector):
    """What runs and waits now, read when it is asked for."""

    def __init__(self, workers: Mapping[str, ModelWorker]) -> None:
        self.workers = workers

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("triptych_rows_running", "Rows that are generated now", labels=["model"])
        waiting = GaugeMetricFamily("triptych_rows_waiting", "Rows that wait for a place", labels=["model"])
        held = GaugeMetricFamily("triptych_cache_bytes", "Bytes of keys and values in memory", labels=["model"])
        for name, worker in [*self.workers.items()]:
            if worker.scheduler is not None:
                engine = worker.scheduler.engine
                running.add_metric([name], len(engine.rows))
                waiting.add_metric([name], len(worker.scheduler.waiting))
                held.add_metric([name], engine.cache.nbytes + (0 if engine.cross is None else engine.cross.nbytes))
        yield from (running, waiting, held)


class Counted:
    """Counts requests by their route, as it stands in the table of routes, and by the status of the answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = monotonic(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            self.metrics.requests.labels(route, method, str(status)).inc()
            self.metrics.seconds.labels(route).observe(monotonic() - start)
