"""Labels and answers in Shakespeare's plays: the kind of play a passage is from, who speaks a speech, and what persons
answer to the speech of another person before it.

A Midsummer Night's Dream is left out, because its text marks speakers in another way.  The kinds of the plays are those
of the First Folio's table of contents, with Troilus and Cressida, which it lacks, among the tragedies, where the volume
has it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from . import shakespeare

COMEDIES = (
    "alls_well_that_ends_well", "as_you_like_it", "comedy_of_errors", "loves_labours_lost", "measure_for_measure",
    "merchant_of_venice", "merry_wives_of_windsor", "much_ado_about_nothing",
    "taming_of_the_shrew", "tempest", "twelfth_night", "two_gentlemen_of_verona", "winters_tale",
)  # fmt: skip
TRAGEDIES = (
    "antony_and_cleopatra", "coriolanus", "cymbeline", "hamlet", "julius_caesar", "lear", "macbeth", "othello",
    "romeo_and_juliet", "timon_of_athens", "titus_andronicus", "troilus_and_cressida",
)  # fmt: skip
#: Plays whose passages are held out: those of `shakespeare.HELD_OUT` and two more of each kind.
HELD_OUT = ("twelfth_night", "as_you_like_it", "measure_for_measure", "julius_caesar", "macbeth", "othello")
#: Persons with many speeches, each in one play: their name -> the play and the mark of the speaker, which the edition
#: shortens for Hamlet.
SPEAKERS = {
    "hamlet": ("hamlet", "Ham"), "iago": ("othello", "IAGO"), "rosalind": ("as_you_like_it", "ROSALIND"),
    "lear": ("lear", "Lear"), "coriolanus": ("coriolanus", "CORIOLANUS"),
}  # fmt: skip
PASSAGE = 80  # words of a passage, at least
SPEECH = 12  # words of a speech, at least; shorter ones tell little
ANSWER = 4  # words of an answer, at least; shorter ones tell little of a person
ASKED = 60  # words of the speech before it, at most: its last ones

LabelKind = Literal["genres", "speakers"]


@dataclass(frozen=True)
class Labelled:
    """A text and its label; `where` is the play and the number of the text in it."""

    text: str
    label: str
    where: str


def labelled(kind: LabelKind, cache: Path | None = None) -> tuple[list[Labelled], list[Labelled]]:
    """Texts to train on and held out.  Of `genres` whole plays are held out; of `speakers`, who each speak in one play
    only, the last fifth of a person's speeches.
    """
    works, train, held = shakespeare.plays(cache), list[Labelled](), list[Labelled]()
    if kind == "speakers":
        for play, mark in SPEAKERS.values():
            spoken = [
                Labelled(text, mark.capitalize(), f"{play}, speech {number}")
                for number, (speaker, text) in enumerate(speeches(works[play].modern), 1)
                if speaker == mark and len(text.split()) >= SPEECH
            ]
            last = len(spoken) - len(spoken) // 5
            train += spoken[:last]
            held += spoken[last:]
        return train, held
    for name in (*COMEDIES, *TRAGEDIES):
        label = "comedy" if name in COMEDIES else "tragedy"
        for number, text in enumerate(_passages(works[name].modern), 1):
            (held if name in HELD_OUT else train).append(Labelled(text, label, f"{name}, passage {number}"))
    return train, held


def _passages(play: str) -> Iterator[str]:
    """Passages of about PASSAGE words, whole speeches without the names before them and without stage directions."""
    words: list[str] = []
    for _, speech in speeches(play):
        words += speech.split()
        if len(words) >= PASSAGE:
            yield " ".join(words[: 2 * PASSAGE])
            words = []


def speeches(play: str) -> Iterator[tuple[str, str]]:
    """Speaker and words of each speech of a cleaned modern play, in order; directions in brackets are left out."""
    play = re.sub(r"\[[^\]]*\]", " ", play)
    for block in re.split(r"\n\s*\n", play):
        first, _, rest = block.strip().partition("\n")
        match = re.fullmatch(r"([A-Z][A-Za-z' ]{1,24})\.", first.strip())
        text = " ".join(rest.split())
        if match is not None and text:
            yield match[1], text


@dataclass(frozen=True)
class Turn:
    """An answer and what it answers; `where` is the play and the number of the speech in it."""

    asked: str
    answer: str
    where: str


def system_message(name: str) -> str:
    """The system message of a conversation as this person."""
    return f"You are {name.capitalize()}, a person in a play by Shakespeare. Answer as {name.capitalize()} does."


def turns(name: str, cache: Path | None = None) -> tuple[list[Turn], list[Turn]]:
    """The turns of a person, a key of SPEAKERS, to train on and held out: the last fifth of them, which are later in
    the play."""
    play, mark = SPEAKERS[name]
    spoken = list(speeches(shakespeare.plays(cache)[play].modern))
    every = [
        Turn(" ".join(asked.split()[-ASKED:]), answer, f"{play}, speech {number}")
        for number, ((other, asked), (speaker, answer)) in enumerate(pairwise(spoken), 2)
        if speaker == mark != other and len(answer.split()) >= ANSWER
    ]
    last = len(every) - len(every) // 5
    return every[:last], every[last:]
