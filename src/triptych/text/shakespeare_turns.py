"""What persons of Shakespeare's plays answer: each of their speeches, with the speech of another person before it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from triptych.text import shakespeare
from triptych.text.shakespeare_labels import PERSONS, speeches

ANSWER = 4  # words of an answer, at least; shorter ones tell little of a person
ASKED = 60  # words of the speech before it, at most: its last ones


def _named(person: str) -> tuple[str, str, str]:
    """Name, play and speaker's mark of one of PERSONS; the edition shortens Hamlet's mark to Ham."""
    play, _, mark = person.partition(": ")
    return (play if play.startswith(mark.lower()) else mark.lower()), play, mark


#: Name of a person -> the play and the mark of the speaker.
SPEAKERS = {name: (play, mark) for name, play, mark in map(_named, PERSONS)}


@dataclass(frozen=True)
class Turn:
    """An answer and what it answers; `where` is the play and the number of the speech in it."""

    asked: str
    answer: str
    where: str


def system_message(name: str) -> str:
    """What a model is told before a conversation as this person."""
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
