"""Statistics of attention patterns, with the tokens that a user marks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from triptych.arguments import check_ids, is_integers
from triptych.errors import InputError, shown
from triptych.nn import InputRow
from triptych.probe import Edits, Read, Statistics, Trace, sites
from triptych.probe.sites import Selection, Site, in_layers, match
from .model_inputs import ModelInputs, TaskModel, Texts

Marks = Sequence[str | int] | None


def statistics(
    model: TaskModel,
    rows: Texts,
    target: Texts | None = None,
    *,
    site: str = "*.pattern",
    layers: Selection = None,
    heads: Selection = None,
    at: Selection = None,
    items: Selection = None,
    top: int = 4,
    delimiters: Sequence[str | int] | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    edit: Edits = (),
    max_bytes: int | None = None,
) -> Trace:
    """Statistics of the attention weights of each head and query, without storing the weights: memory grows with
    the length of a row and not with its square.

    `.statistics(site)` of the result gives for each row the entropy, effective keys, mean distance, the weight on
    the first and the previous token, the `top` keys, and the weight that each key received
    (`triptych.attention.AttentionStatistics`).  `layers`, `heads`, `items` and `at` select as in `Read`.

    `delimiters` are tokens, as ids or as text (spaces around it do not count), whose weight is summed.  `documents`
    gives each token of each row a label, for the weight on tokens with the query's label; with an encoder-decoder
    they label the rows of the decoder only.  Raises InputError for labels that do not fit, ProbeError as `trace`.
    """
    chosen = in_layers(match(site, model.spec, sites(model.spec)), layers, site)
    first = model.inputs.rows(rows)
    own = first if target is None else model.inputs.ids(target, target=True)
    if documents is not None:
        _check_documents(documents, own)
    marked: dict[bool, Statistics] = {}
    for of_source in {_reads_source(one) for one in chosen}:
        labels = None if delimiters is None else _marked(model.inputs, first if of_source else own, delimiters)
        marked[of_source] = Statistics(top=top, delimiters=labels, documents=None if of_source else documents)
    reads = [Read(one.name, items=items, at=at, heads=heads, reduce=marked[_reads_source(one)]) for one in chosen]
    return model.trace(rows, target, read=reads, edit=edit, max_bytes=max_bytes)


def _reads_source(site: Site) -> bool:
    return site.name.startswith("encoder.") or ".cross." in site.name


def _marked(inputs: ModelInputs, rows: Sequence[InputRow], delimiters: Marks) -> list[list[int]]:
    wanted = [delimiters] if isinstance(delimiters, str) else delimiters
    if not isinstance(wanted, Sequence) or not wanted:
        raise InputError(f"delimiters={shown(delimiters)}: give a list of token ids or of texts of tokens")
    texts = {one.strip() for one in wanted if isinstance(one, str)}
    vocab = max(inputs.spec.vocab, inputs.spec.source_vocab)
    ids = set(check_ids([one for one in wanted if not isinstance(one, str)], vocab, "delimiters"))
    of_tokens = [row for row in rows if not isinstance(row, Tensor)]
    if len(of_tokens) < len(rows):
        raise InputError("delimiters are tokens, and this model reads sound or images; leave delimiters= out")
    if texts:
        spelled = inputs.words.encode_batch([space + text for text in texts for space in ("", " ")], special=False)
        names = {token: inputs.words.decode([token], False).strip() for token in chain(*of_tokens, *spelled)}
        if unknown := texts.difference(names.values()):
            raise InputError(f"delimiters: {shown(min(unknown))} is not one token of this vocabulary; give its tokens")
        ids |= {token for token, name in names.items() if name in texts}
    return [[int(token in ids) for token in row] for row in of_tokens]


def _check_documents(documents: Sequence[Sequence[int]], rows: Sequence[InputRow]) -> None:
    if not isinstance(documents, Sequence) or not all(map(is_integers, documents)):
        raise InputError(f"documents={shown(documents)}: give a list with one list of integers for each row")
    if len(documents) != len(rows):
        raise InputError(f"documents: labels of {len(documents)} rows for {len(rows)} rows; give one list a row")
    for number, (labels, row) in enumerate(zip(documents, rows, strict=True)):
        if len(labels) != len(row):
            raise InputError(
                f"documents: row {number} has {len(row)} tokens and {len(labels)} labels; give one a token"
            )
