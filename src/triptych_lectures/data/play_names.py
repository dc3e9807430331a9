"""Names of persons and places in the plays, labelled from what the plays print around their text.

Persons of a play are those of its list of persons and of its speakers' marks.  Places, of all plays together, are those
of the headings of scenes and those after "of", "in", "near" and "at" in the lists of persons ("Duke of Milan").  A word
that is both - Kent is an earl in one play and a county in others - is a place in plays without such a person, and
elsewhere after the words of `PLACE_BEFORE`.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from triptych.files import tables_of
from triptych.text import shakespeare
from .play_scenes import plays

PERSON, PLACE, OTHER = TAGS = ("person", "place", "other")
PLACE_BEFORE = {"in", "to", "at", "from", "into", "through", "near", "towards", "toward", "of", "for", "out"}
NAMED = 0.9  # share of a name's occurrences that have a capital, at least
LEAST = 3  # letters of a name
_TOKEN = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*|[^\sA-Za-z]+")
_CAPITAL = re.compile(r"[A-Z][A-Za-z]+")
_NOBLE = (
    "king|queen|duke|duchess|prince|princess|earl|archbishop|bishop|count|countess|marquess|lord|mayor|governor|knight"
    "|tribune|general|abbot|city|gentlem[ae]n|lords|nobleman|merchant"
)
_OF = re.compile(rf"\b(?i:{_NOBLE}) (?i:of) ([A-Z][A-Za-z]+)")  # "Duke of Albany"
_IN = re.compile(r"\b(?i:in|near|at) ((?:[A-Z][A-Za-z]+,? ?)+)")
_PLAY = re.compile(r"(?m)^ *(ACT|Act|THE PROLOGUE|PROLOGUE|INDUCTION)\b")
_WORDS = tables_of(Path(__file__).with_suffix(""))
TITLES, KINDS = (frozenset(_WORDS[name].split()) for name in ("titles", "kinds"))


@dataclass(frozen=True)
class NamedWords:
    """Words of a speech with their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    play: str

    @property
    def record(self) -> dict[str, list[str]]:
        """The fields of the objective `tags`."""
        return {"words": list(self.words), "tags": list(self.tags)}


def labelled(play: str, most: int) -> list[NamedWords]:
    """The speeches of a play, the first `most` words of each, with the tags that the rules give."""
    tag = _tagger(play)
    spoken = (speech for scene in plays()[play] for speech in scene.speeches)
    cut = (tuple(_TOKEN.findall(" ".join(speech.words)))[:most] for speech in spoken)
    return [NamedWords(words, tuple(tag(words, i) for i in range(len(words))), play) for words in cut if words]


def _tagger(play: str) -> Callable[[Sequence[str], int], str]:
    own, everywhere = persons()[play], places()
    known = everywhere.union(*persons().values())

    def tag(words: Sequence[str], i: int) -> str:
        name = stem(words[i]) if words[i][0].isupper() else ""
        if name not in known:
            return OTHER
        if name in everywhere and (name not in own or (i > 0 and words[i - 1].lower() in PLACE_BEFORE)):
            return PLACE
        return PERSON

    return tag


def stem(word: str) -> str:
    """A word in lower case, without 's."""
    return re.sub("'s?$", "", word.lower())


def both() -> set[str]:
    """Names that are a place and, in at least one play, a person."""
    return places() & set().union(*persons().values())


@cache
def persons() -> dict[str, set[str]]:
    """The names of the persons of each play; a place in a title, as Albany's, where the speaker is called by it."""
    found = {}
    for play, scenes in plays().items():
        marks = {word for scene in scenes for speech in scene.speeches for word in speech.speaker.split()}
        lines = [re.sub(_IN, " ", line) for line in _head(play).splitlines() if not line.upper().startswith("SCENE")]
        listed = {word for line in lines for word in _CAPITAL.findall(re.sub(_OF, " ", line).split(",")[0])}
        titled = {place for line in lines for place in _OF.findall(line)}
        called = {place for place in titled if any(place.upper().startswith(mark.rstrip("'")) for mark in marks)}
        candidates = {word.lower() for word in marks | listed | called} - TITLES - KINDS
        counts = _counts(play)
        found[play] = {word for word in candidates if _is_name(word, counts)}
    return found


@cache
def places() -> set[str]:
    """The names of places, of all plays together."""
    found: set[str] = set()
    for play, scenes in plays().items():
        headings = " ".join(re.sub(r"\b[A-Z]\w*'[sS]?(?=\W)|\b[A-Z]{2,}\b", " ", scene.heading) for scene in scenes)
        headings += " ".join(re.findall(r"(?i)SCENE[:.,\- ]+([^\n]*)", _head(play)))
        shown = {word.lower() for word in _CAPITAL.findall(headings)} - persons()[play]
        listed = [*_OF.findall(_head(play)), *_CAPITAL.findall(" ".join(_IN.findall(_head(play))))]
        found |= shown | {word.lower() for word in listed}
    counts = sum((_counts(play) for play in plays()), Counter[str]())
    return {word for word in found - KINDS - TITLES if _is_name(word, counts)}


def _is_name(word: str, counts: Counter[str]) -> bool:
    """Whether a word has a capital nearly always where a text says it; `counts` are of words as they are written."""
    capital, small = counts[word.capitalize()] + counts[word.upper()], counts[word]
    return len(word) >= LEAST and capital > 0 and capital >= NAMED * (capital + small)


@cache
def _counts(play: str) -> Counter[str]:
    """How often a play says each word, as it is written, without 's."""
    spoken = " ".join(word for scene in plays()[play] for speech in scene.speeches for word in speech.words)
    return Counter(re.findall(r"[A-Za-z]+(?:'(?!s\b)[A-Za-z]+)?", spoken))


@cache
def _head(play: str) -> str:
    """What stands before the first act of a play: the list of persons, and where the scene is."""
    folder = shakespeare.fetch()
    file = next(path for path in (folder / f"{play}_gut.txt", folder / f"tragedy_of_{play}_gut.txt") if path.exists())
    text = file.read_text(encoding="utf-8")
    begin = _PLAY.search(text)
    return text[text.find("Shakespeare") + len("Shakespeare") : begin.start() if begin else 0]


@dataclass(frozen=True)
class CheckedWord:
    """A word that was labelled by hand: its place among the speeches of a play and in its speech."""

    play: str
    speech: int
    at: int
    word: str
    tag: str


def checked() -> list[CheckedWord]:
    """The words of `play_names_checked.toml`."""
    found = []
    for play, lines in tables_of(Path(__file__).with_name("play_names_checked")).items():
        for speech, at, word, tag in map(str.split, lines.splitlines()):
            found.append(CheckedWord(play, int(speech), int(at), word, tag))
    return found
