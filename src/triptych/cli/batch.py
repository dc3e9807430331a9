"""`triptych batch`: a file of requests in OpenAI's batch format, answered without a network."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

from triptych.errors import InputError
from . import options, screen
from .serve import named


def batch(
    requests: options.NamedPath,
    out: options.NamedPath,
    *,
    model: list[str],
    max_rows: options.Positive = 32,
    as_json: options.Json = False,
) -> None:
    """Answer the requests of a file, many at once, by the routes of triptych serve; run again, it goes on.

    IN.jsonl: Requests in OpenAI's batch format, one a line: custom_id, method, url, body.
    OUT.jsonl: File of the answers, in the order of the requests.
    --model MODEL: A model, which requests name as those of triptych serve. Repeatable.
    --max-rows N: Requests that run at once.
    """
    try:
        from triptych.serve import batch as runs
    except ImportError as error:
        raise InputError(f"batches need {error.name}; run: pip install -e '.[serve]' in the clone") from None
    if out.exists() and requests.exists() and out.samefile(requests):
        raise InputError(f"{out}: is the file of the requests; give another OUT")
    if out.is_dir():
        raise InputError(f"{out}: is a directory; give a file")
    paths = named(model)
    start = time.perf_counter()
    with runs.BatchInput(requests) as lines:
        head = {"requests": len(lines.places), "digest": lines.digest, "models": paths}
        with runs.Journal(out, head) as journal:
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
                    summary = asyncio.run(
                        runs.run(
                            Server(workers, limits=limits).app(), lines, journal, at_once=limits.requests,
                            progress=lambda done: bar.update(task, completed=done),
                        )
                    )  # fmt: skip
            except KeyboardInterrupt:
                screen.note(
                    f"{len(journal.done):,} of {len(lines.places):,} are done; the same command goes on from there"
                )
                raise
            finally:
                for worker in workers.values():
                    worker.stop()
    seconds = time.perf_counter() - start
    if as_json:
        screen.result({"out": str(out), **asdict(summary), "seconds": round(seconds, 3)})
        return
    screen.write(f"{out}: {summary.answered:,} of {summary.requests:,} requests answered in {seconds:.1f} s\n")
    if summary.refused or summary.bad_lines:
        screen.note(f"{summary.refused:,} were refused and {summary.bad_lines:,} lines are no requests; {out} says why")
