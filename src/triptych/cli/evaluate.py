"""`triptych eval`: the perplexity of a text of one's own, and lm-eval's tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typer import BadParameter

from triptych.errors import InputError
from . import options, screen
from .loading import load_model, read_document
from .options import Checkpoint

if TYPE_CHECKING:
    from triptych.evaluate import Perplexity
    from triptych.evaluate.lm_eval_tasks import TaskResults

MAX_ROWS, THEIR_ROWS = 32, 8  # requests at once, unless given: here, and by lm-eval's own adapter


def eval_(
    checkpoint: Checkpoint,
    *,
    data: str | None = None,
    source: str | None = None,
    window: options.Positive | None = None,
    overlap: options.Natural = 0,
    tasks: list[str] | None = None,
    include_path: options.NamedPath | None = None,
    num_fewshot: options.Natural | None = None,
    limit: float | None = None,
    max_length: options.Positive | None = None,
    chat_template: bool = False,
    against: Literal["transformers"] | None = None,
    samples: options.NamedPath | None = None,
    batch_size: options.Positive | None = None,
    as_json: options.Json = False,
) -> None:
    """Measure the perplexity of a text of your own, or run lm-eval's tasks from local files.

    --data FILE: Text whose perplexity is measured, - for stdin; of an encoder the pseudo-perplexity.
    --source FILE: Of an encoder-decoder, the sources: one a line, for each line of --data.
    --window N: Tokens read at once of a long text; by default what the model reads, at most 2,048, of an encoder 128.
    --overlap N: Tokens that a window reads again from the one before, as context.
    --tasks NAMES: Tasks of lm-eval: names below --include-path or YAML files, with commas between; hub:NAME is one that
        lm-eval brings and may use the network. Repeatable.
    --include-path DIR: Folder of the YAML files of tasks.
    --num-fewshot N: Examples before each question; by default what the task says.
    --limit N: Documents of each task; below 1, their share.
    --max-length N: Tokens that the model reads at most; by default what its config says.
    --chat-template: Ask as a chat.
    --against: Run lm-eval's own adapter on the same weights too, and show the largest difference.
    --samples FILE: Write each document with what was asked and answered, as lines of JSON.
    --batch-size N: Requests that run at once; by default 32, and 8 of --against.
    """
    if (data is None) == (not tasks):
        raise BadParameter("give --data FILE for a perplexity, or --tasks NAMES for tasks of lm-eval")
    of_tasks = {
        "--include-path": include_path, "--num-fewshot": num_fewshot, "--limit": limit, "--max-length": max_length,
        "--chat-template": chat_template or None, "--against": against, "--samples": samples,
    }  # fmt: skip
    of_data = {"--source": source, "--window": window, "--overlap": overlap or None}
    for name, value in (of_data if tasks else of_tasks).items():
        if value is not None:
            raise BadParameter(f"{name} is for {'--data' if tasks else '--tasks'}, which is not given")
    if data is not None:
        measured = _perplexity(checkpoint, data, source, window, overlap, batch_size or MAX_ROWS)
        _show_perplexity(measured, checkpoint.model, as_json=as_json)
        return
    try:
        from triptych.evaluate.lm_eval_tasks import run_tasks
    except ImportError as error:
        raise InputError(f"tasks need {error.name}; run: pip install -e '.[eval]' in the clone") from None
    if samples is not None:
        screen.check_suffix(samples, (".jsonl",), "--samples")
    model = load_model(checkpoint)
    with screen.counting() as bar:
        task = bar.add_task("tasks", total=None)
        results = run_tasks(
            model, tasks or (), include_path=include_path, num_fewshot=num_fewshot,
            limit=int(limit) if limit is not None and limit >= 1 else limit, max_length=max_length,
            apply_chat_template=chat_template, against=against, max_rows=batch_size or MAX_ROWS,
            batch_size=batch_size or THEIR_ROWS,
            on_progress=lambda kind, done, total: bar.update(task, description=kind, completed=done, total=total),
        )  # fmt: skip
    if samples is not None:
        _write_samples(samples, results)
    _show_tasks(results, as_json=as_json)


def _perplexity(
    checkpoint: Checkpoint, data: str, source: str | None, window: int | None, overlap: int, max_rows: int
) -> Perplexity:
    text = read_document(data)
    sources = None if source is None else read_document(source).splitlines()
    if sources is not None and len(lines := text.splitlines()) != len(sources):
        raise InputError(f"{data} has {len(lines):,} lines and {source} has {len(sources):,}; give one source a line")
    model = load_model(checkpoint)
    if model.spec.layout == "encoder-decoder" and sources is None:
        raise InputError("an encoder-decoder scores targets beside their sources; give --source FILE, one a line")
    from triptych.evaluate import perplexity

    with screen.counting() as bar:
        task = bar.add_task("tokens", total=None)
        return perplexity(
            model, text if sources is None else text.splitlines(), sources=sources, window=window, overlap=overlap,
            max_rows=max_rows, on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip


def _show_perplexity(measured: Perplexity, model: str, *, as_json: bool) -> None:
    if as_json:
        screen.result(measured.to_dict())
        return
    one = measured
    rows = [
        ("token", f"{one.by_token:,.4f}", f"{one.tokens:,}"),
        ("word", f"{one.by_word:,.4f}", f"{one.words:,}"),
        ("byte", f"{one.by_byte:,.4f}", f"{one.bytes:,}"),
    ]
    screen.show_rows([f"{one.kind} by", "", "count"], rows, model, right=["", "count"])
    left_out = one.text_tokens - one.tokens
    out = screen.console()
    out.print(f"{one.bits_per_byte:.4f} bits per byte; log-likelihood {one.nats:,.2f} nats")
    if one.window is not None:
        out.print(f"windows of {one.window:,} tokens, of which {one.overlap:,} are only read again", style="dim")
    if left_out:
        out.print(f"{left_out:,} of {one.text_tokens:,} tokens are not scored: nothing stands before them", style="dim")


def _show_tasks(results: TaskResults, *, as_json: bool) -> None:
    if as_json:
        screen.result(results.to_dict())
        return
    both = results.their_seconds is not None
    columns = ["task", "shots", "documents", "metric", "value", "± error", *(["transformers"] if both else [])]
    rows = [
        [
            one.task, "" if one.shots is None else str(one.shots), f"{one.samples:,}",
            one.metric if one.filter == "none" else f"{one.metric} ({one.filter})", f"{one.value:.4f}",
            "" if one.error is None else f"{one.error:.4f}",
            *([] if not both else ["" if one.their_value is None else f"{one.their_value:.4f}"]),
        ]
        for one in results.metrics
    ]  # fmt: skip
    screen.show_rows(columns, rows, right=[name for name in columns if name not in ("task", "metric")])
    out = screen.console()
    out.print(f"{results.seconds:.1f} s" + (f", and {results.their_seconds:.1f} s by transformers" if both else ""))
    if (difference := results.difference) is not None:
        out.print(
            f"largest difference of {difference.requests:,} requests: {difference.log_likelihood:.2e} nats; "
            f"{difference.other_greedy:,} greedy flags and {difference.other_texts:,} of {difference.texts:,} texts "
            "differ"
        )


def _write_samples(path: Path, results: TaskResults) -> None:
    """lm-eval's samples, one document a line, whole or not at all."""
    rest = path.with_name(f".{path.name}.part")
    try:
        with rest.open("w", encoding="utf-8") as file:
            for task, samples in results.results.get("samples", {}).items():
                for sample in samples:
                    file.write(json.dumps({"task": task, **sample}, ensure_ascii=False, default=str) + "\n")
        rest.replace(path)
    finally:
        rest.unlink(missing_ok=True)
    screen.note(f"wrote {path}")
