"""Questions whose answers are spans of passages of the plays: who says a line, and where a scene is.

A passage has some speeches in a row by at least three persons.  The line asked for is quoted in the First Folio's
spelling, of a passage in modern spelling, and its words that both spell alike are hidden; both are in small letters but
for the speakers.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from triptych.text import shakespeare
from triptych.text.align import words
from triptych.train import metrics
from .play_scenes import PlayScene, PlaySpeech

Kind = Literal["who", "where"]
ASKED: dict[Kind, str] = {"who": "who says:", "where": "where is the scene ?"}
WORDS = "which words:"
HIDDEN = "_"
SHOWN = 2  # words of a line that are not hidden, at least
FIRST = 4  # words of a line by which it is looked up
PERSONS = 3  # of a passage, at least
WORD = re.compile("[A-Za-z']*[A-Za-z]")


@dataclass(frozen=True)
class Passages:
    """The sizes of a passage: so many speeches, each of at most so many words, and of a quotation, in words."""

    speeches: int = 5
    words: int = 14
    quoted: tuple[int, int] = (4, 7)


@dataclass(frozen=True)
class PlayQuestion:
    """A question of a passage; `answer` stands in `context` from the character `start`.

    parts     the passage in its parts: each the heading of a scene, or a speech after its speaker.
    answers   what each of the parts would answer, "" for none.
    """

    kind: Kind
    question: str
    context: str
    answer: str
    start: int
    parts: tuple[str, ...]
    answers: tuple[str, ...]
    play: str

    @property
    def record(self) -> dict[str, str | int]:
        """The fields of the objective `spans`."""
        return {"question": self.question, "context": self.context, "answer": self.answer, "start": self.start}


def questions(
    plays: dict[str, list[PlayScene]],
    count: int,
    noise: np.random.Generator,
    sizes: Passages,
    kinds: Sequence[Kind],
    hide: float = 1.0,
) -> list[PlayQuestion]:
    """So many new questions, of each kind as many, each from a passage drawn at random; of a line, a word that both
    editions spell alike is hidden with a probability that is drawn for each question, `hide` or more."""
    sources: dict[Kind, list[tuple[list[PlayScene], int]]] = {
        kind: [(scenes, i) for scenes in plays.values() for i in range(kind == "where", len(scenes))] for kind in kinds
    }
    drawn: list[PlayQuestion] = []
    while len(drawn) < count:
        kind = kinds[len(drawn) % len(kinds)]
        scenes, i = sources[kind][int(noise.integers(len(sources[kind])))]
        one = _who(scenes[i], noise, sizes, hide) if kind == "who" else _where(scenes[i - 1], scenes[i], noise, sizes)
        drawn += [one] if one is not None else []
    return drawn


def quotations(
    plays: dict[str, list[PlayScene]], count: int, noise: np.random.Generator, asked: Literal["words", "who"]
) -> list[PlayQuestion]:
    """So many easy questions of two speeches, of which the first words are shown: where the words of one stand, quoted
    as they are, or who says them.  Speakers and words are parts of their own."""
    scenes = [scene for of in plays.values() for scene in of]
    drawn: list[PlayQuestion] = []
    while len(drawn) < count:
        scene, chosen = scenes[int(noise.integers(len(scenes)))], int(noise.integers(2))
        said = {one.speaker: " ".join(one.words[:FIRST]).lower() for one in _drawn(scene, 2, noise)}
        if len(said) == 2:
            parts = [part for who, text in said.items() for part in (f"{who}.", text)]
            answers = [answer for pair in said.items() for answer in pair]
            question = f"{ASKED['who'] if asked == 'who' else WORDS} {parts[2 * chosen + 1]}"
            part = 2 * chosen + (asked == "words")
            drawn.append(_question("who", question, parts, answers, part, scene.play))
    return drawn


def _who(scene: PlayScene, noise: np.random.Generator, sizes: Passages, hide: float) -> PlayQuestion | None:
    """A passage of the scene, and a line of it; None where it has too few persons, or no line of both editions or too
    few words of it that they spell differently."""
    speeches = _drawn(scene, sizes.speeches, noise)
    if len({one.speaker for one in speeches}) < PERSONS:
        return None
    chosen = int(noise.integers(len(speeches)))
    lines = _shared_lines(speeches[chosen])
    if not lines:
        return None
    at, folio = lines[int(noise.integers(len(lines)))]
    quoted = folio.split()[: int(noise.integers(sizes.quoted[0], sizes.quoted[1] + 1))]
    spoken, hide = set(words(" ".join(speeches[chosen].words))), noise.uniform(hide, 1.0)
    hidden = [spoken.issuperset(words(word)) and noise.random() < hide for word in quoted]
    if hidden.count(False) < SHOWN:
        return None
    question = [ASKED["who"], *(HIDDEN if alike else word.lower() for word, alike in zip(quoted, hidden, strict=True))]
    before = max(0, at - int(noise.integers(sizes.words - sizes.quoted[1] + 1)))  # words of the speech before the line
    begins = [before if i == chosen else 0 for i in range(len(speeches))]
    parts = [_shown(one, begin, sizes, str.lower) for one, begin in zip(speeches, begins, strict=True)]
    return _question("who", " ".join(question), parts, [one.speaker for one in speeches], chosen, scene.play)


def _where(before: PlayScene, scene: PlayScene, noise: np.random.Generator, sizes: Passages) -> PlayQuestion | None:
    """Speeches of one scene, and then the heading of the next and speeches of that, each from anywhere in its scene;
    None where the heading names no place."""
    place = re.split(r"[.,;:]", scene.heading)[0].strip()
    if not place or place.lower() == "the same":
        return None
    chosen = int(noise.integers(sizes.speeches))
    speeches = (*_drawn(before, chosen, noise), *_drawn(scene, sizes.speeches - chosen, noise))
    if len({one.speaker for one in speeches}) < PERSONS or len(before.speeches) < chosen:
        return None
    parts = [_shown(one, 0, sizes) for one in speeches]
    answers = [one.speaker for one in speeches]
    parts.insert(chosen, scene.heading.rstrip(".") + ".")
    answers.insert(chosen, place)
    return _question("where", ASKED["where"], parts, answers, chosen, scene.play)


def _question(
    kind: Kind, question: str, parts: Sequence[str], answers: Sequence[str], chosen: int, play: str
) -> PlayQuestion:
    start = sum(len(part) + 1 for part in parts[:chosen])
    return PlayQuestion(kind, question, " ".join(parts), answers[chosen], start, tuple(parts), tuple(answers), play)


def _drawn(scene: PlayScene, count: int, noise: np.random.Generator) -> tuple[PlaySpeech, ...]:
    begin = int(noise.integers(max(1, len(scene.speeches) - count + 1)))
    return scene.speeches[begin : begin + count]


def _shown(speech: PlaySpeech, begin: int, sizes: Passages, spelled: Callable[[str], str] = str) -> str:
    """The speaker, and the words of the speech from `begin` on, `spelled` so."""
    return f"{speech.speaker}. {spelled(' '.join(speech.words[begin : begin + sizes.words]))}"


@cache
def _lines() -> dict[tuple[str, ...], list[tuple[list[str], str]]]:
    """The lines that both editions have, by their first words: the words of the modern one, and the folio."""
    lines: dict[tuple[str, ...], list[tuple[list[str], str]]] = {}
    for folio, modern in (pair for side in shakespeare.parallel_split() for pair in side):
        folded = words(modern)
        lines.setdefault(tuple(folded[:FIRST]), []).append((folded, folio))
    return lines


@cache
def _shared_lines(speech: PlaySpeech) -> list[tuple[int, str]]:
    """The lines of a speech that both editions have: the number of the first word, and the First Folio's spelling."""
    folded = [(at, word) for at, one in enumerate(speech.words) for word in words(one)]
    only = [word for _, word in folded]
    return [
        (folded[i][0], folio)
        for i in range(len(only) - FIRST + 1)
        for line, folio in _lines().get(tuple(only[i : i + FIRST]), ())
        if only[i : i + len(line)] == line
    ]


def answered_by(one: PlayQuestion, part: int) -> PlayQuestion:
    """The same question with the answer of this part of the passage."""
    return _question(one.kind, one.question, one.parts, one.answers, part, one.play)


def with_other_words(train: Sequence[PlayQuestion], noise: np.random.Generator, share: float) -> list[PlayQuestion]:
    """The questions with this share of the different words of each passage exchanged for others of the same form: in
    capitals, with one capital, or without.  There are few scenes, and their places would be learned by heart.  Where a
    line is asked for, all words in capitals are exchanged, which are the speakers, and no others."""
    pools: dict[tuple[bool, bool], list[str]] = {}
    for word in sorted({word for one in train for word in WORD.findall(one.context)}):
        pools.setdefault(_form(word), []).append(word)

    def exchanged(one: PlayQuestion) -> PlayQuestion:
        others: dict[str, str] = {}

        def other(match: re.Match[str]) -> str:
            word, pool = match[0], pools[_form(match[0])]
            stays = not word[1:].isupper() if one.kind == "who" else noise.random() >= share
            return others.setdefault(word, word if stays else pool[int(noise.integers(len(pool)))])

        answers = [WORD.sub(other, answer) for answer in one.answers]
        rests = [WORD.sub(other, part[len(old) :]) for part, old in zip(one.parts, one.answers, strict=True)]
        parts = [answer + rest for answer, rest in zip(answers, rests, strict=True)]
        return _question(one.kind, one.question, parts, answers, _part(one), one.play)

    return list(map(exchanged, train))


def _form(word: str) -> tuple[bool, bool]:
    return word[0].isupper(), word[1:].isupper()


def letters(text: str) -> list[str]:
    """Every three characters in a row of its words, with their ends."""
    return [word[i : i + 3] for word in (f"^{one}$" for one in words(text)) for i in range(len(word) - 2)]


def by_search(held: Sequence[PlayQuestion], pieces: Callable[[str], Iterable[str]] = words) -> list[str]:
    """A search: the answer of the part with the most different pieces of the question, the first of several."""
    answers = []
    for one in held:
        wanted = set(pieces(one.question.removeprefix(ASKED["who"])))
        answers.append(one.answers[int(np.argmax([len(wanted.intersection(pieces(part))) for part in one.parts]))])
    return answers


def commonest(held: Sequence[PlayQuestion]) -> list[str]:
    """The answer that the most parts of the passage have, the first of several."""
    return [Counter(one.answers).most_common(1)[0][0] for one in held]


def by_bag(train: Sequence[PlayQuestion], held: Sequence[PlayQuestion]) -> list[str]:
    """A bag of words: which part of the passage answers, the first, the second and so on, as a logistic regression on
    the words of the question and of the passage has it, fitted to the training questions."""
    texts = [[f"{one.kind} {one.question} {one.context}" for one in side] for side in (train, held)]
    right = np.array([_part(one) for one in train])
    count = int(right.max()) + 1
    guesses = metrics.bag_of_words(texts[0], right, texts[1], count)
    return [one.answers[min(int(guess), len(one.answers) - 1)] for one, guess in zip(held, guesses, strict=True)]


def _part(one: PlayQuestion) -> int:
    """The number of the part in which the answer stands."""
    ends = np.cumsum([len(part) + 1 for part in one.parts])
    return int(np.searchsorted(ends, one.start, side="right"))
