"""The texts a recipe names: documents or pairs, for training and held out."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from triptych.errors import ConfigError, TextError, counted
from triptych.shards.shard_set import holds_shards
from triptych.text import corpus, shakespeare
from .data import RandomUse, random_numbers
from .recipe import DataSettings, Recipe
from .records import SUFFIXES, read_records

SHAKESPEARE = "shakespeare"
FOLDED = "shakespeare:folded"  # pairs in lower case, without punctuation
Pair = tuple[str, str]
LONGEST_WORD = 40  # characters; a text without a space in so many is cut anywhere
T = TypeVar("T")


class Texts(NamedTuple):
    """Documents to train on and held-out ones, and what a user should know of how they were read and divided."""

    train: list[str]
    held_out: list[str]
    notes: list[str]


def texts(data: DataSettings) -> Texts:
    """Training and held-out documents: text files, or the field `text` of the records of a file, each a document.

    Of Shakespeare whole plays are held out; of several documents the last ones; of a single document, and of so few
    that one is more than twice the share, the end of the longest, from the beginning of a line.
    """
    notes: list[str] = []
    if holds_shards(data.path):
        raise ConfigError(f"{data.path} holds shards; write data.shards = {data.path!r} in place of data.path")
    if data.path == SHAKESPEARE:
        train, held_out = ([text] for text in shakespeare.split())
    else:
        if Path(data.path).suffix.lower() in SUFFIXES:
            documents = [one.text("text") for one in read_records(data.path, ("text",), columns=data.columns)]
        else:
            contents = corpus.read_documents(data.path)
            documents = [file.text for file in contents.files]
            notes = [f"{data.path}: skipped {contents.skipped_in_words}"] if contents.skipped else []
        if len(documents) > 1 and round(data.held_out * len(documents)):
            train, held_out = _hold_out_end(documents, data)
            notes += [f"held out for evaluation: the last {len(held_out):,} of {counted(len(documents), 'document')}"]
        else:
            train, held_out = _end_of_longest(documents, data)
            if len(documents) > 1:
                end = f"{len(held_out[0]):,} characters at the end of the longest document"
                notes.append(f"held out for evaluation: {end}")
    if data.held_out_limit is not None:
        held_out = _cut(held_out, data.held_out_limit)
    return Texts(train, held_out, notes)


def pairs(data: DataSettings) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs (source, target); of a file of records, the last ones are held out, or those of
    `data.held_out_path`.

    Raises TextError naming the line of a record without the texts `source` and `target`.
    """
    if data.path in (SHAKESPEARE, FOLDED):
        as_written = shakespeare.fold if data.path == FOLDED else str
        sides = shakespeare.parallel_split()
        train, held_out = ([(as_written(p.folio), as_written(p.modern)) for p in side] for side in sides)
    else:
        train, apart = _read_pairs(data.path, data), data.held_out_path
        train, held_out = _hold_out_end(train, data) if apart is None else (train, _read_pairs(apart, data))
    if data.words is not None:
        train = pieces(train, 1, data.words, across_lines=data.across_lines)
        held_out = pieces(held_out, data.words, data.words, across_lines=data.across_lines)
    return train, limited(held_out, data)


def limited(held_out: list[T], data: DataSettings) -> list[T]:
    """At most `data.held_out_limit` of the held-out records, evenly spaced, for they may be in the order of a text."""
    return held_out if data.held_out_limit is None else spaced(held_out, min(data.held_out_limit, len(held_out)))


def spaced(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, evenly spaced."""
    return [items[i * len(items) // count] for i in range(count)]


def pieces(pairs: Sequence[Pair], least: int, most: int, *, across_lines: bool = False) -> list[Pair]:
    """Pieces of `least` to `most` words of the pairs whose two sides have equally many words; the last piece of a pair
    may be shorter.  With `across_lines` a piece may go on in the next pair, so that long pieces are as common as short
    ones; a pair whose sides have different numbers of words ends a piece.

    The sides are two spellings of one text, so that the n-th word of one corresponds to the n-th of the other.  A small
    model learns to align short rows first.
    """
    random, cut = random_numbers(0, RandomUse.PIECES, 0), []
    for words in _joined(pairs) if across_lines else map(_matched, pairs):
        start = 0
        while start < len(words):
            end = start + int(random.integers(least, most + 1))
            source, target = zip(*words[start:end], strict=True)
            cut.append((" ".join(source), " ".join(target)))
            start = end
    return cut


def _matched(pair: Pair) -> list[Pair]:
    """The n-th words of both sides; none where one side has more words than the other."""
    source, target = (side.split() for side in pair)
    return list(zip(source, target, strict=True)) if len(source) == len(target) else []


def _joined(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """The matched words of each run of consecutive pairs that have some."""
    for some, run in groupby(map(_matched, pairs), key=bool):
        if some:
            yield list(chain.from_iterable(run))


def _read_pairs(path: str, data: DataSettings) -> list[Pair]:
    records = read_records(path, ("source", "target"), columns=data.columns)
    return [(one.text("source", empty=True), one.text("target", empty=True)) for one in records]


def _hold_out_end(items: Sequence[T], data: DataSettings) -> tuple[list[T], list[T]]:
    """The last `held_out` share of the items, at least one, and the others."""
    if len(items) < 2:
        raise TextError(f"{data.path} holds {len(items)} item; give at least two, one to train on and one to hold out")
    count = min(len(items) - 1, max(1, round(data.held_out * len(items))))
    return list(items[:-count]), list(items[-count:])


def _end_of_longest(documents: Sequence[str], data: DataSettings) -> tuple[list[str], list[str]]:
    """The documents without the end of the longest, and this end: the `held_out` share of all characters, cut at the
    beginning of a line, unless more than twice the share would be held out, or of a word."""
    text, total = max(documents, key=len), sum(map(len, documents))
    longest = documents.index(text)
    exact = len(text) - total + int(total * (1 - data.held_out))
    at = text.rfind("\n", 0, max(0, exact)) + 1
    if len(text) - at > 2 * (len(text) - exact):  # the line is longer than what is held out
        at = text.rfind(" ", max(0, exact - LONGEST_WORD), max(0, exact)) + 1 or exact
    if at <= 0 or at == len(text):
        raise TextError(f"{data.path} is too short to hold out {data.held_out:.0%} of it; give more text")
    return [*documents[:longest], text[:at], *documents[longest + 1 :]], [text[at:]]


def _cut(documents: Sequence[str], limit: int) -> list[str]:
    """The documents' first `limit` characters."""
    before = accumulate(map(len, documents), initial=0)
    return [document[: limit - at] for document, at in zip(documents, before, strict=False) if at < limit]


def refuse_records(recipe: Recipe) -> None:
    """Raises ConfigError for keys that only objectives with records or pairs read.

    Plain text may come from a file of records too, whose column of texts `data.columns` names.
    """
    data, name = recipe.data, recipe.objective.name
    from_records, pairs = Path(data.path).suffix.lower() in SUFFIXES, name == "seq2seq"
    unread = {
        "data.columns": bool(data.columns) and not from_records,
        "data.cut_longer": data.cut_longer,
        "data.held_out_path": data.held_out_path is not None and not (pairs and from_records),
    }
    if keys := [key for key, is_set in unread.items() if is_set]:
        reads = f"pairs from {', '.join(SUFFIXES)}, each whole" if pairs else "plain text"
        raise ConfigError(f"objective {name} reads {reads}, and not {' and '.join(keys)}; remove what it does not read")
