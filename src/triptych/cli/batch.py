"""`triptych batch`: a file of requests in OpenAI's batch format, answered without a network."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.errors import InputError
from . import options, screen
from .records import check_out, cluster_of, here, run, show
from .serve import named

if TYPE_CHECKING:
    from triptych.batches.journal import Summary
    from triptych.batches.requests import BatchInput


AT_ONCE = 128  # requests that Ray commits together


def batch(
    requests: options.NamedPath,
    out: options.NamedPath,
    *,
    model: list[str],
    max_rows: options.Positive = 32,
    ray: options.Ray = None,
    actors: options.Actors = None,
    as_json: options.Json = False,
) -> None:
    """Answer the requests of a file, many at once, by the routes of triptych serve; run again, it goes on.

    IN.jsonl: Requests in OpenAI's batch format, one a line: custom_id, method, url, body.
    OUT.jsonl: File of the answers, in the order of the requests.
    --model MODEL: A model, which requests name as those of triptych serve. Repeatable.
    --max-rows N: Requests that run at once.
    """
    try:
        from triptych.batches import requests as runs
    except ImportError as error:
        raise InputError(f"batches need {error.name}; run: pip install -e '.[serve]' in the clone") from None
    check_out(requests, out)
    cluster = cluster_of(ray, actors)
    paths = named(model)
    start = time.perf_counter()
    with runs.BatchInput(requests) as lines:
        if cluster is None:
            summary = _answer(lines, out, paths, max_rows)
        else:
            from triptych.batches.records import Work
            from triptych.batches.works import answering

            models = {name: here(path) for name, path in paths.items()}
            work = Work(answering, {"models": models, "max_rows": max_rows}, AT_ONCE, calls=2)
            summary = run(work, lines, out, cluster)
    show(out, summary, time.perf_counter() - start, as_json=as_json)


def _answer(lines: BatchInput, out: Path, paths: dict[str, str], max_rows: int) -> Summary:
    """Answer what the journal does not have yet, on this machine."""
    from triptych.batches import requests as runs
    from triptych.batches.journal import Journal

    with Journal(out, {"requests": len(lines.places), "digest": lines.digest, "models": paths}) as journal:
        if journal.done:
            screen.note(f"{len(journal.done):,} of {len(lines.places):,} requests were done before")
        from triptych.serve.app import Server
        from triptych.serve.limits import ServerLimits
        from triptych.serve.loading import Loader

        loader, limits = Loader(max_rows), ServerLimits(requests=2 * max_rows)
        wanted = paths if len(journal.done) < len(lines.places) else {}
        workers = {name: loader.worker(name, path) for name, path in wanted.items()}
        try:
            with screen.counting() as bar:
                task = bar.add_task("requests", total=len(lines.places))
                return asyncio.run(
                    runs.run(
                        Server(workers, limits=limits).app(), lines, journal, at_once=limits.requests,
                        progress=lambda done: bar.update(task, completed=done),
                    )
                )  # fmt: skip
        except KeyboardInterrupt:
            screen.note(f"{len(journal.done):,} of {len(lines.places):,} are done; the same command goes on from there")
            raise
        finally:
            for worker in workers.values():
                worker.stop()
