"""The reads that ask for statistics of attention patterns, with the tokens that a user marks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from triptych.arguments import is_integers
from triptych.errors import InputError, shown
from triptych.nn import Row
from triptych.probe import Read, Statistics, sites
from triptych.probe.sites import Selection, Site, in_layers, match
from triptych.tasks.model_inputs import ModelInputs

Marks = Sequence[str | int] | None


def statistics_reads(
    inputs: ModelInputs,
    pattern: str,
    layers: Selection,
    rows: tuple[Sequence[Row], Sequence[Sequence[int]] | None],
    *,
    top: int,
    delimiters: Marks,
    documents: Sequence[Sequence[int]] | None,
) -> list[Read]:
    """One read of `Statistics` for each site that `pattern` names in `layers`.  `rows` are the source's and, beside it,
    the decoder's, whose tokens `documents` label; cross-attention has none, and an encoder beside a decoder neither.

    Raises ProbeError for a site that has no pattern, InputError for marks that do not fit the rows.
    """
    known = sites(inputs.spec)
    chosen = in_layers(match(pattern, inputs.spec, known), layers, pattern)
    first, second = rows
    own = first if second is None else second
    if documents is not None:
        _check_documents(documents, own)
    marked: dict[bool, Statistics] = {}
    for of_source in {_reads_source(site) for site in chosen}:
        keys = first if of_source else own
        labels = None if delimiters is None else _marked(inputs, keys, delimiters)
        marked[of_source] = Statistics(top=top, delimiters=labels, documents=None if of_source else documents)
    return [Read(site.name, reduce=marked[_reads_source(site)]) for site in chosen]


def _reads_source(site: Site) -> bool:
    return site.name.startswith("encoder.") or ".cross." in site.name


def _marked(inputs: ModelInputs, rows: Sequence[Row], delimiters: Marks) -> list[list[int]]:
    wanted = [delimiters] if isinstance(delimiters, str) else delimiters
    if not isinstance(wanted, Sequence) or not all(isinstance(one, str | int) for one in wanted) or not wanted:
        raise InputError(f"delimiters={shown(delimiters)}: give a list of token ids or of texts of tokens")
    texts = {one.strip() for one in wanted if isinstance(one, str)}
    ids = {one for one in wanted if isinstance(one, int)}
    is_one: dict[int, bool] = {}
    marked = []
    for row in rows:
        if isinstance(row, Tensor):
            raise InputError("delimiters are tokens, and this model reads sound or images; leave delimiters= out")
        for token in row:
            if token not in is_one:
                is_one[token] = token in ids or (bool(texts) and inputs.words.decode([token]).strip() in texts)
        marked.append([int(is_one[token]) for token in row])
    return marked


def _check_documents(documents: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
    if not isinstance(documents, Sequence) or not all(map(is_integers, documents)):
        raise InputError(f"documents={shown(documents)}: give a list with one list of integers for each row")
    if len(documents) != len(rows):
        raise InputError(f"documents: labels of {len(documents)} rows for {len(rows)} rows; give one list a row")
    for number, (labels, row) in enumerate(zip(documents, rows, strict=True)):
        if len(labels) != len(row):
            raise InputError(
                f"documents: row {number} has {len(row)} tokens and {len(labels)} labels; give one a token"
            )
