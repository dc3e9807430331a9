"""The scenes of Shakespeare's plays: where each is, and who says what; and the plays that are held out by name.

A Midsummer Night's Dream is left out, because its text marks speakers in another way, and so are the plays that the
First Folio lacks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from triptych.text import shakespeare, shakespeare_labels

HELD_OUT = ("henry_v", "julius_caesar", "lear", "macbeth", "merchant_of_venice", "twelfth_night")
_HEADING = re.compile(r"(?m)^(?:SCENE|Scene) *(?:[IVXL]+|\d+)\b[.\- ]*((?:[^\n]+\n?)*)")


@dataclass(frozen=True)
class PlaySpeech:
    """Who speaks, as the play marks it, in capitals, and the words."""

    speaker: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class PlayScene:
    """A scene of a play: its heading, such as "Elsinore. A room in the Castle.", and its speeches in order."""

    play: str
    heading: str
    speeches: tuple[PlaySpeech, ...]


@cache
def plays() -> dict[str, list[PlayScene]]:
    """The scenes of each play that both editions hold.  Raises FetchError where the texts cannot be had."""
    works = shakespeare.plays()
    names = [name for name, work in works.items() if work.folio is not None and name != "midsummer_nights_dream"]
    return {name: list(_scenes(name, works[name].modern)) for name in names}


def split() -> tuple[dict[str, list[PlayScene]], dict[str, list[PlayScene]]]:
    """The plays to train on and those held out."""
    every = plays()
    return (
        {name: scenes for name, scenes in every.items() if name not in HELD_OUT},
        {name: every[name] for name in HELD_OUT},
    )


def _scenes(play: str, text: str) -> Iterator[PlayScene]:
    found = list(_HEADING.finditer(text))
    for heading, end in zip(found, [*(one.start() for one in found[1:]), len(text)], strict=True):
        spoken = shakespeare_labels.speeches(text[heading.end() : end])
        speeches = tuple(PlaySpeech(who.upper(), tuple(said.split())) for who, said in spoken)
        if speeches:
            yield PlayScene(play, " ".join(heading[1].strip(" []-").split()), speeches)
