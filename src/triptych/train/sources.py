"""From what a recipe names to texts: documents or pairs, for training and held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from triptych.errors import TextError
from triptych.text import corpus, shakespeare
from triptych.train.data import Use, stream
from triptych.train.recipe import Data

SHAKESPEARE = "shakespeare"
Pair = tuple[str, str]
T = TypeVar("T")


def texts(data: Data) -> tuple[list[str], list[str]]:
    """Training and held-out documents.

    Shakespeare holds out whole plays.  Of several documents the last are held out, of one its end, from a line break.
    """
    if data.path == SHAKESPEARE:
        train, held = ([text] for text in shakespeare.split())
    else:
        found = corpus.documents(data.path)
        train, held = _last(found, data) if len(found) > 1 else _end(found[0], data)
    if data.held_out_limit is not None:
        held = _cut(held, data.held_out_limit)
    return train, held


def pairs(data: Data) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out (source, target); of a file, the last are held out.

    Raises TextError naming the line that is not `{"source": text, "target": text}`.
    """
    if data.path == SHAKESPEARE:
        train, held = ([(p.folio, p.modern) for p in side] for side in shakespeare.parallel_split())
    else:
        train, held = _last(_read_pairs(Path(data.path)), data)
    if data.words is not None:
        train, held = pieces(train, 1, data.words), pieces(held, data.words, data.words)
    if data.held_out_limit is not None:  # evenly spaced, for plays stand in order
        held = held[:: max(1, len(held) // data.held_out_limit)][: data.held_out_limit]
    return train, held


def pieces(pairs: Sequence[Pair], least: int, most: int) -> list[Pair]:
    """Runs of `least` to `most` words of those pairs whose sides have equally many; the last run may be shorter.

    Word by word is how far two spellings of one text may be trusted to correspond, and short rows are what a small
    model learns to align first.
    """
    random, found = stream(0, Use.PIECES, 0), []
    for source, target in pairs:
        sides = source.split(), target.split()
        if len(sides[0]) != len(sides[1]):
            continue
        at = 0
        while at < len(sides[0]):
            end = at + int(random.integers(least, most + 1))
            found.append((" ".join(sides[0][at:end]), " ".join(sides[1][at:end])))
            at = end
    return found


def _read_pairs(path: Path) -> list[Pair]:
    text = corpus.documents(path)[0]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            source, target = row["source"], row["target"]
            good = isinstance(source, str) and isinstance(target, str)
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise TextError(f'{path}, line {number}: write each line as {{"source": "...", "target": "..."}}')
        found.append((source, target))
    return found


def _last(items: Sequence[T], data: Data) -> tuple[list[T], list[T]]:
    """The last `held_out` share of the items, at least one, and the others."""
    if len(items) < 2:
        raise TextError(f"{data.path} holds {len(items)} item; two are needed, one to train on and one to hold out")
    held = min(len(items) - 1, max(1, round(data.held_out * len(items))))
    return list(items[:-held]), list(items[-held:])


def _end(text: str, data: Data) -> tuple[list[str], list[str]]:
    at = text.rfind("\n", 0, int(len(text) * (1 - data.held_out))) + 1
    if at == 0:  # a text of one line, or nearly
        at = int(len(text) * (1 - data.held_out))
    if at == 0 or at == len(text):
        raise TextError(f"{data.path} is too short to hold out {data.held_out:.0%} of it; give more text")
    return [text[:at]], [text[at:]]


def _cut(documents: Sequence[str], limit: int) -> list[str]:
    kept: list[str] = []
    for document in documents:
        if limit > 0:
            kept.append(document[:limit])
        limit -= len(document)
    return kept
