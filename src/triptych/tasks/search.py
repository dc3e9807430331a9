"""Search in the files of a folder: passages as vectors, ranked by their cosine to that of the query."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.arguments import integer
from triptych.errors import CheckpointError, InputError, shown
from triptych.nn.packed_weight import PackedWeight
from triptych.pip_packages import cache_directory
from triptych.probe.content_hash import digest
from triptych.text import Tokenizer
from triptych.text.corpus import TextFile, read_folder
from .encode import encode, pooling_of
from .model_inputs import ModelInputs, TaskModel
from .search_index import FORMAT, Embedded, Span, check_place, cut, read_index, write_index

TOKENS, OVERLAP = 128, 32  # of a passage, unless the model reads fewer
AT_ONCE = 256  # passages embedded between two reports of progress

OnEmbedded = Callable[[int, int], None]
"""Called with how many of the new and changed files are embedded, and how many there are."""


@dataclass(frozen=True)
class Hit:
    """A passage with its cosine to the query; `line` and `last_line` are counted from 1."""

    score: float
    file: str
    line: int
    last_line: int
    text: str


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best passages of a folder for a query.

    hits       the best first; equal scores in the order of the files.
    files      how many files were searched, and of how many `passages`; `embedded` of these files were new or changed.
    skipped    reason -> how many files and folders were not read.
    notes      what the user should know: an index that was damaged or cannot be written.
    vectors    [N, D] of the passages, length 1, fp32, and `query_vector` [D]; `ranked` [N] are the passages from the
               best to the worst, and `places` their names, `FILE:LINE`.
    """

    query: str
    hits: tuple[Hit, ...]
    files: int
    passages: int
    embedded: int
    skipped: Mapping[str, int]
    notes: tuple[str, ...]
    index: Path
    vectors: NDArray[np.float32]
    query_vector: NDArray[np.float32]
    ranked: NDArray[np.int64]
    places: tuple[str, ...]

    def plane(self, most: int = 1000) -> tuple[NDArray[np.float64], NDArray[np.int64], float]:
        """The query and the passages as points of a plane.

        The first two principal components of the passages (Pearson 1901), which the query does not decide.  Gives the
        points [1 + M, 2], the query's first; the passages [M] that they stand for, the hits before the others, of
        which only as many are kept, evenly, as `most` allows; and the share of the variance that the plane shows.
        Raises InputError for a `most` below 1.
        """
        integer("most", most, 1)
        vectors = self.vectors.astype(np.float64)
        mean = vectors.mean(0)
        sizes, directions = np.linalg.eigh((vectors - mean).T @ (vectors - mean))
        two = np.pad(directions[:, :-3:-1], ((0, 0), (0, max(0, 2 - len(directions)))))
        two *= np.sign(two[np.abs(two).argmax(0), [0, 1]] + 1e-300)  # a direction and its opposite are one component
        hits, others = self.ranked[: len(self.hits)], np.sort(self.ranked[len(self.hits) :])
        room = max(0, most - len(hits))
        if len(others) > room:
            others = others[np.linspace(0, len(others) - 1, room).round().astype(np.int64)]
        shown_passages = np.concatenate([hits, others])
        points = np.concatenate([self.query_vector[None], vectors[shown_passages]]) - mean
        whole = float(sizes.clip(0).sum())
        return points @ two, shown_passages, float(sizes[-2:].clip(0).sum()) / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class Embedder:
    """Turns texts into vectors: `encode` gives [B, D] for B texts, each of at most `most` tokens without special
    ones (None: any number); `identity` changes whenever it would give other vectors."""

    encode: Callable[[Sequence[str]], Tensor]
    tokenizer: Tokenizer
    identity: str
    most: int | None

    def unit_vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[B, D] of length 1, on the CPU.  Raises InputError where a vector is not finite."""
        vectors: NDArray[np.float32] = self.encode(texts).float().cpu().numpy()
        if not np.isfinite(vectors).all():
            raise InputError("the model gives vectors that are not finite, so nothing can be ranked; check its weights")
        norms = np.sqrt((vectors.astype(np.float64) ** 2).sum(1, keepdims=True))
        return np.asarray(vectors / np.maximum(norms, 1e-30), np.float32)


def identity_of(module: torch.nn.Module, inputs: ModelInputs, settings: object) -> str:
    """A digest of the weights, of the tokenizer, and of what else decides a model's vectors."""
    weights = [
        [name, weight.blocks if isinstance(weight, PackedWeight) else weight.data, str(weight.dtype)]
        for name, weight in module.named_parameters()
    ]
    return digest([inputs.spec, weights, inputs.words.files(), settings])


EmbedFiles = Callable[[Sequence[TextFile], Embedder, int, int, int], Iterator[tuple[int, dict[str, Embedded]]]]
"""Files, the embedder, the tokens of a passage and of an overlap, and the length of a vector -> how many files are
done, and the passages and vectors of some of them, by their SHA-256."""


def search(
    model: TaskModel,
    folder: str | Path,
    query: str,
    *,
    k: int = 5,
    tokens: int | None = None,
    overlap: int | None = None,
    follow_links: bool = False,
    index: Path | None = None,
    on_embedded: OnEmbedded | None = None,
    embed: EmbedFiles | None = None,
) -> SearchResult:
    """The `k` passages of the text files below `folder` nearest to `query`, by the cosine of their vectors.

    A passage has at most `tokens` tokens (128, or what the model reads), of which neighbours share `overlap` (32, or
    half a passage), and ends where a sentence or a line does.  Vectors are pooled as the checkpoint says (`encode`),
    and kept in a safetensors file (`index`, by default in the user's cache): only files whose content is new are
    embedded.  When the work is interrupted, the vectors of finished files are kept.  `embed` embeds them elsewhere than
    in this process (`EmbedFiles`).

    Raises InputError for a model that reads no text, an empty query, settings out of range, and a folder without text;
    TextError without a tokenizer.
    """
    return search_with(
        embedder_of(model), folder, query, k=k, tokens=tokens, overlap=overlap, follow_links=follow_links, index=index,
        on_embedded=on_embedded, embed=embed,
    )  # fmt: skip


def embedder_of(model: TaskModel) -> Embedder:
    """The vectors of `search`.  Raises InputError for a model that reads no text, TextError without a tokenizer."""
    model.check_words("search()")
    inputs = model.inputs
    tokenizer, settings = inputs.words, inputs.sentence_settings
    lengths = [n for n in (settings.max_seq_length, model.spec.context) if n is not None]
    most = min(lengths) - len(tokenizer.encode("")) if lengths else None
    if most is not None and most < 1:
        raise InputError(f"the model reads {min(lengths)} tokens at once, which leaves none for a passage")
    identity = identity_of(model.module, inputs, [settings, pooling_of(model.module)])
    return Embedder(partial(encode, model), tokenizer, identity, most)


def search_with(
    embedder: Embedder, folder: str | Path, query: str, *, k: int = 5, tokens: int | None = None,
    overlap: int | None = None, follow_links: bool = False, index: Path | None = None,
    on_embedded: OnEmbedded | None = None, embed: EmbedFiles | None = None,
) -> SearchResult:  # fmt: skip
    """`search` with any vectors.  The index in the user's cache has a name made of the folder, the model and the
    settings."""
    if not isinstance(query, str) or not query.strip():
        raise InputError(f"the query is {shown(query)}; give the words to search for")
    if not (embed is None or callable(embed)):
        raise InputError(f"embed is {shown(embed)}, no function; leave it out to embed the files in this process")
    integer("k", k, 1)
    tokens, overlap = _sizes(embedder.most, tokens, overlap)
    contents = read_folder(folder, follow_links=follow_links)
    if not contents.files:
        skipped = f" (skipped: {contents.skipped_in_words})" if contents.skipped else ""
        raise InputError(f"{folder}: no text files to search{skipped}")
    wanted = embedder.unit_vectors([query])[0]
    key = json.dumps([FORMAT, os.fsencode(os.path.realpath(folder)).hex(), embedder.identity, tokens, overlap])
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    file = index or cache_directory() / "search" / name
    notes: list[str] = []
    try:
        known = read_index(file, len(wanted))
    except CheckpointError as error:
        if index is not None:
            check_place(file)
        known = {}
        notes.append(f"the index is damaged and was made anew: {error}")
    new = list({one.digest: one for one in contents.files if one.digest not in known}.values())
    parts = {one.digest: known[one.digest] for one in contents.files if one.digest in known}
    try:
        for done, embedded in (embed or embedded_files)(new, embedder, tokens, overlap, len(wanted)):
            parts |= embedded
            if on_embedded is not None:
                on_embedded(done, len(new))
    finally:  # an interrupted search keeps the files that are done
        if parts.keys() != known.keys():
            try:
                write_index(file, parts, len(wanted))
            except CheckpointError as error:  # the search goes on
                notes.append(f"the index was not kept: {error}")
    passages = [(one, span) for one in contents.files for span in parts[one.digest].spans]
    if not passages:
        raise InputError(f"{folder}: the files have no words that this tokenizer knows")
    vectors = np.concatenate([parts[one.digest].vectors for one in contents.files])
    scores = vectors.astype(np.float64) @ wanted.astype(np.float64)
    ranked = np.argsort(-scores, kind="stable")
    hits = []
    for i in ranked[:k].tolist():
        one, span = passages[i]
        hits.append(Hit(float(scores[i]), one.name, span.line, span.last_line, one.text[span.begin : span.end]))
    places = tuple(f"{one.name}:{span.line}" for one, span in passages)
    return SearchResult(
        query, tuple(hits), len(contents.files), len(passages), len(new), contents.skipped, tuple(notes), file, vectors,
        wanted, ranked, places,
    )  # fmt: skip


def _sizes(most: int | None, tokens: int | None, overlap: int | None) -> tuple[int, int]:
    """Tokens of a passage and of the overlap.  Raises InputError for sizes out of range."""
    size = min(TOKENS, most or TOKENS) if tokens is None else integer("tokens", tokens, 1)
    if most is not None and size > most:
        raise InputError(f"tokens={size}, and the model reads at most {most} of a passage")
    shared = min(OVERLAP, size // 2) if overlap is None else integer("overlap", overlap, 0)
    if 2 * shared > size:
        raise InputError(f"overlap={shared} is more than half of a passage of {size} tokens")
    return size, shared


def embedded_files(
    new: Sequence[TextFile], embedder: Embedder, tokens: int, overlap: int, width: int
) -> Iterator[tuple[int, dict[str, Embedded]]]:
    """The passages of files and their vectors, some files at a time: how many are done, and these by their SHA-256."""
    group: dict[str, list[Span]] = {}
    texts: list[str] = []
    for done, one in enumerate(new, 1):
        spans = group[one.digest] = cut(one.text, embedder.tokenizer, tokens, overlap)
        texts += [one.text[span.begin : span.end] for span in spans]
        if len(texts) >= AT_ONCE or done == len(new):
            vectors = embedder.unit_vectors(texts) if texts else np.zeros((0, width), np.float32)
            own = np.split(vectors, np.cumsum([len(spans) for spans in group.values()])[:-1])
            yield done, {name: Embedded(tuple(group[name]), part) for name, part in zip(group, own, strict=True)}
            group, texts = {}, []
