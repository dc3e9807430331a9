"""A small grammar of English words and an invented language that it is translated into, with the true word alignments.

It is no cipher.  A source word has several translations: adjectives and articles agree with their noun in gender and
number, verbs with their subject; some nouns mean one thing beside one class of verbs and another beside the other; and
synonyms share one.  A word becomes none to three words.  The order differs: adjectives follow their noun, verbs end
their clause, some of them split, adverbs move from the front to the verb, and prepositions follow what they govern.

Links are sure or possible, as in Och and Ney 2003: a *sure* one joins a word to what it translates, a *possible* one
to a word that decides its form or that needs it (`did` and the verb, a noun and its article).  Sure ones are both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from triptych.errors import InputError
from triptych.files import tables_of

NOUNS, VERBS, ADJECTIVES, PREPOSITIONS, ADVERBS = (tuple(str(of).split()) for of in tables_of(__file__).values())
ARTICLES = ("the", "a", "some")
MOST_REPEATED = 10  # draws of a sentence that was drawn before, for each sentence asked for
END, START = "<end>", "<start>"
ENDINGS = {(0, False): "a", (0, True): "ai", (1, False): "o", (1, True): "oi"}  # of gender and number

Link = tuple[int, int]  # target word, source word


@dataclass(frozen=True)
class AlignedPair:
    """A sentence, its translation, and the links (target word, source word) between them; `sure` is in `possible`."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    sure: frozenset[Link]
    possible: frozenset[Link]


@dataclass(frozen=True)
class NounEntry:
    """A noun's gender, and the words it becomes beside verbs of each of the two classes."""

    gender: int
    senses: tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class VerbEntry:
    """A verb's stem, its class, and the particle that stands apart from it, where it has one."""

    stem: str
    kind: int
    particle: str | None


class SecondLanguage:
    """A lexicon drawn from `seed`, and the sentences it can write.

    `nouns`, `verbs` and `adjectives` say how many of each there are.  Raises InputError for more than there are words.
    """

    def __init__(self, seed: int = 0, *, nouns: int = 32, verbs: int = 24, adjectives: int = 16) -> None:
        for name, count, words in (
            ("nouns", nouns, NOUNS), ("verbs", verbs, VERBS), ("adjectives", adjectives, ADJECTIVES)
        ):  # fmt: skip
            if not 2 <= count <= len(words):
                raise InputError(f"{name}: {count} must be between 2 and {len(words)}")
        random = np.random.default_rng([seed, 0])
        stems = _stems(random)
        self.nouns = _nouns(NOUNS[:nouns], random, stems)
        self.verbs = {
            verb: VerbEntry(next(stems), i % 2, next(stems) if i % 3 == 1 else None)
            for i, verb in enumerate(VERBS[:verbs])
        }
        self.adjectives = {word: next(stems) for word in ADJECTIVES[:adjectives]}
        self.others = {word: next(stems) for word in (*PREPOSITIONS, *ADVERBS, "and", "the", "a", "object")}

    def sentence(self, random: np.random.Generator, clauses: int) -> AlignedPair:
        """A sentence of so many clauses, joined by `and`."""
        writer = _Writer(self, random)
        for i in range(clauses):
            if i:
                writer.put(self.others["and"], [writer.read("and")])
            writer.clause()
        return writer.pair()

    def sentences(self, seed: int, count: int, clauses: int) -> list[AlignedPair]:
        """`count` sentences, no two with the same source, of 1 to `clauses` clauses, each number equally often.

        Raises InputError where the words do not suffice for so many.
        """
        random = np.random.default_rng([seed, 1])
        pairs: dict[tuple[str, ...], AlignedPair] = {}
        repeated = 0
        while len(pairs) < count:
            pair = self.sentence(random, 1 + len(pairs) % clauses)
            repeated += pair.source in pairs
            pairs.setdefault(pair.source, pair)
            if repeated > MOST_REPEATED * count:
                raise InputError(f"these words give few more than {len(pairs)} sentences; ask for fewer, or more words")
        return list(pairs.values())


class Vocabulary:
    """Words of both languages as ids; the end token is 0 and the one that starts a target 1."""

    def __init__(self, pairs: Iterable[AlignedPair]) -> None:
        words = {word for pair in pairs for word in (*pair.source, *pair.target)}
        self.words = [END, START, *sorted(words)]
        self.number = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def ids(self, words: Iterable[str]) -> list[int]:
        """The ids of a sentence, its end token included."""
        return [*(self.number[word] for word in words), self.number[END]]


class _Writer:
    """A sentence and its translation while they are written, from left to right."""

    def __init__(self, language: SecondLanguage, random: np.random.Generator) -> None:
        self.language, self.random = language, random
        self.source: list[str] = []
        self.target: list[str] = []
        self.sure: set[Link] = set()
        self.possible: set[Link] = set()

    def pair(self) -> AlignedPair:
        links = frozenset(self.sure), frozenset(self.sure | self.possible)
        return AlignedPair(tuple(self.source), tuple(self.target), *links)

    def read(self, word: str) -> int:
        """The index of a new source word."""
        self.source.append(word)
        return len(self.source) - 1

    def put(self, word: str, sure: Iterable[int], possible: Iterable[int] = ()) -> None:
        """A new target word with its links."""
        at = len(self.target)
        self.target.append(word)
        self.sure |= {(at, source) for source in sure}
        self.possible |= {(at, source) for source in possible}

    def clause(self) -> None:
        """The source from left to right, then its translation: subject, particle, object, place, adverb, verb."""
        language, chance = self.language, self.random.random
        adverb = (_any(ADVERBS, self.random),) if chance() < 0.3 else ()
        before = [self.read(word) for word in adverb]
        subject = self._noun_phrase()
        past = [self.read("did")] if chance() < 0.4 else []
        name = _any(tuple(language.verbs), self.random)
        verb, at = language.verbs[name], self.read(name)
        thing = self._noun_phrase() if chance() < 0.7 else None
        place = (_any(PREPOSITIONS, self.random),) if chance() < 0.35 else ()
        governed = [(word, self.read(word), self._noun_phrase()) for word in place]

        subject.write(self, verb.kind)
        if verb.particle is not None:
            self.put(verb.particle, [at])
        if thing is not None:
            thing.write(self, verb.kind)
            self.put(language.others["object"], [], [thing.noun])
        for word, preposition, phrase in governed:
            phrase.write(self, verb.kind)
            self.put(language.others[word], [preposition])
        for word, i in zip(adverb, before, strict=True):
            self.put(language.others[word], [i])
        ending = ("t" if subject.plural else "n") + ("u" if past else "")
        self.put(verb.stem + ending, [at], [*past, subject.noun])

    def _noun_phrase(self) -> _NounPhrase:
        """An article, adjectives and a noun, which the source gets at once."""
        random, language = self.random, self.language
        word = _any(tuple(language.nouns), random)
        article = _any(ARTICLES, random)
        plural = article == "some" or (article == "the" and random.random() < 0.5)
        count = int(random.choice(3, p=(0.45, 0.35, 0.2)))
        adjectives = [str(x) for x in random.choice(list(language.adjectives), count, replace=False)]
        first = self.read(article)
        described = [(adjective, self.read(adjective)) for adjective in adjectives]
        return _NounPhrase(word, plural, article, first, described, self.read(word + "s" * plural))


@dataclass(frozen=True)
class _NounPhrase:
    """A noun with its article and adjectives, and where in the source each of them stands."""

    word: str
    plural: bool
    article: str
    first: int
    adjectives: list[tuple[str, int]]
    noun: int

    def write(self, writer: _Writer, kind: int) -> None:
        """Its translation beside a verb of class `kind`: article, noun, adjectives.  `some` has none."""
        language, entry = writer.language, writer.language.nouns[self.word]
        ending = ENDINGS[entry.gender, self.plural]
        if self.article != "some":
            writer.put(language.others[self.article] + ending, [self.first], [self.noun])
        for i, part in enumerate(entry.senses[kind]):
            writer.put(part + "r" * (self.plural and i == 0), [self.noun])
        for adjective, at in self.adjectives:
            writer.put(language.adjectives[adjective] + ending, [at])


def _nouns(words: Sequence[str], random: np.random.Generator, stems: Iterator[str]) -> dict[str, NounEntry]:
    """Of each eight nouns one becomes three words, two become two, two have two senses, and two are synonyms."""
    entries: dict[str, NounEntry] = {}
    for i, word in enumerate(words):
        place = i % 8
        parts = tuple(next(stems) for _ in range({3: 2, 5: 3, 7: 2}.get(place, 1)))
        other = (next(stems),) if place in (1, 4) else parts
        entry = NounEntry(int(random.integers(2)), (parts, other))
        entries[word] = entries[words[i - 4]] if place == 6 else entry  # a synonym of the noun four before it
    return entries


def _stems(random: np.random.Generator) -> Iterator[str]:
    """Invented words of two syllables that end in a consonant, each once, in a random order."""
    first = [a + b for a, b in product("bdfgklmnprstvz", "aeiou")]
    words = [a + b for a, b in product(first, [x + c for x, c in product(first, "lmsk")])]
    return iter([words[i] for i in random.permutation(len(words))])


def _any(words: tuple[str, ...], random: np.random.Generator) -> str:
    return words[int(random.integers(len(words)))]
