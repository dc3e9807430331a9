"""Steps of a search and of a run of tokenizing, done on a cluster in place of this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triptych.errors import InputError
from triptych.shards.inputs import InputPart
from triptych.shards.manifest import ShardManifest
from triptych.tasks.search import Embedder, EmbedFiles
from triptych.tasks.search_index import Embedded, Span
from triptych.text.corpus import TextFile
from .journal import encoded
from .ray_data import Cluster, run_on_cluster
from .records import Row, Work
from .works import embedding, tokenizing


class RowLines:
    """What `rows` gives, anew for each reading, as lines."""

    def __init__(self, rows: Callable[[], Iterable[Row]]) -> None:
        self.rows, self.count, digest = rows, 0, hashlib.sha256()
        for line in self:
            digest.update(line)
            self.count += 1
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[bytes]:
        return map(encoded, self.rows())


def embed_on_cluster(checkpoint: Mapping[str, Any], index: Path, cluster: Cluster) -> EmbedFiles:
    """Embeds the files of a search with actors of a cluster, which load the same model; what they have done stands
    beside `index` until all is.  Raises InputError for a file that cannot be embedded."""

    def embed(
        files: Sequence[TextFile], embedder: Embedder, tokens: int, overlap: int, width: int
    ) -> Iterator[tuple[int, dict[str, Embedded]]]:
        if not files:
            return
        options = {"checkpoint": checkpoint, "tokens": tokens, "overlap": overlap, "width": width}
        lines = RowLines(lambda: ({"id": one.digest, "text": one.text} for one in files))
        for done, row in enumerate(_results(Work(embedding, options, 16), lines, index, cluster), 1):
            vectors = np.array(row["vectors"], np.float32).reshape(-1, width)
            yield done, {row["id"]: Embedded(tuple(Span(*span) for span in row["spans"]), vectors)}

    return embed


def make_shards_on_cluster(
    cluster: Cluster,
) -> Callable[[Path, ShardManifest, Callable[[], Iterator[InputPart]]], None]:
    """Makes the shards of all parts that are not there, with actors of a cluster.  Raises InputError for texts that
    cannot be read."""

    def make(directory: Path, plan: ShardManifest, parts: Callable[[], Iterator[InputPart]]) -> None:
        work = Work(tokenizing, {"directory": str(directory), "plan": plan.model_dump(mode="json")}, 1)
        lines = RowLines(lambda: ({"id": i, "part": one.to_json()} for i, one in enumerate(parts())))
        if len(lines):
            for _ in _results(work, lines, directory / ".shards", cluster):
                pass

    return make


def _results(work: Work, lines: RowLines, name: Path, cluster: Cluster) -> Iterator[Row]:
    """The results of all lines in their order.  They stand in a file beside `name` only while they are read."""
    out = name.with_name(name.name + ".results.jsonl")
    out.unlink(missing_ok=True)
    run_on_cluster(work, lines, out, cluster)
    try:
        with out.open("rb") as file:
            for row in map(json.loads, file):
                if "error" in row:
                    raise InputError(row["error"])
                yield row
    finally:
        out.unlink()
