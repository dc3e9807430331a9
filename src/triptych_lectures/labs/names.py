"""Names of persons and of places in plays that were never read (named entities; Tjong Kim Sang and De Meulder 2003)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import numpy as np

from triptych.errors import InputError
from triptych.page import Curve, TableSection
from triptych.train import metrics
from triptych.train.labelled import IGNORED
from triptych.train.objectives import Integers
from triptych_lectures.data import play_names as names
from triptych_lectures.data.play_names import OTHER, PERSON, TAGS, NamedWords
from triptych_lectures.data.play_scenes import HELD_OUT, plays
from .bounds import rounded_up
from .lab import Check, Clauses, Lab, LabResult, Sections, Setup, clause, mean_interval, size
from .play_encoders import trained
from .small_models import Points


class Words(NamedTuple):
    """Words of the held-out plays: each with its tag, and whether it was never in training and is both a person's name
    and a place's."""

    words: list[str]
    tags: list[str]
    new: list[bool]
    both: list[bool]


class NamesLab(Lab):
    name = "names"

    width: int = size(64, "width of the encoder, a multiple of 8", multiple=8, full=128)
    layers: int = size(2, "its blocks", full=3)
    tokens: int = size(1000, "tokens of its vocabulary", full=4000)
    steps: int = size(240, "training steps", full=3000)
    rows: int = size(32, "speeches of a training step")
    words: int = size(32, "first words of a speech that are read")
    speeches: int = size(3000, "speeches to train on, evenly spaced among those with a name", full=20_000)
    held: int = size(500, "held-out speeches, evenly spaced among those with a name", full=2000)

    def run(self, setup: Setup) -> LabResult:
        setup.progress("labelling the plays")
        every = {play: names.labelled(play, self.words) for play in plays()}
        train = _spaced([row for play in every if play not in HELD_OUT for row in every[play]], self.speeches)
        sheet = [one for one in names.checked() if one.at < self.words]
        by_hand = list(dict.fromkeys((one.play, one.speech) for one in sheet))
        held = _spaced([row for play in HELD_OUT for row in every[play]], self.held)
        held += [every[play][speech] for play, speech in by_hand]
        if any(every[one.play][one.speech].words[one.at] != one.word for one in sheet):
            raise InputError("play_names_checked.toml: a word does not stand where it says; were the plays changed?")
        setup.progress(f"training an encoder: {self.steps} steps")
        mixed, places = _mixed(held * ORDERS, setup.seed)
        tagged, losses = self._tagged([*train, *_respelled(train, setup.seed)], [*held, *mixed], setup.seed)
        ours, by_place = tagged[: len(held)], dict(zip(places, chain(*tagged[len(held) :]), strict=True))
        orders = np.array([by_place[i] for i in range(len(places))]).reshape(ORDERS, -1)
        setup.progress("the control: tags in a random order")
        control, _ = self._tagged(_shuffled([*train, *_respelled(train, setup.seed)], setup.seed), held, setup.seed)
        setup.progress("what needs no encoder")
        systems = {ENCODER: ours, MIXED: [orders[0].tolist()]} | _baselines(train, held) | {CONTROL: control}
        at = {place: len(held) - len(by_hand) + i for i, place in enumerate(by_hand)}
        by_rules, by_encoder = (
            np.mean([tags[at[one.play, one.speech]][one.at] == one.tag for one in sheet])
            for tags in ([row.tags for row in held], ours)
        )
        words = _words(train, held)
        flat = {name: [tag for row in tags for tag in row] for name, tags in systems.items()}
        scores = {name: Scores.of(words, tags) for name, tags in flat.items()}
        ahead = (np.array(flat[ENCODER]) == words.tags) - (orders == words.tags).mean(0)
        remarks = (
            f"Held out: {', '.join(play.replace('_', ' ') for play in HELD_OUT)}. Persons are those of the lists of"
            " persons and the speakers' marks, places those of headings and titles; other names count as none. Each"
            " speech is trained on a second time with the letters of its names in a random order."
        )
        conclusion = self._conclusion(
            scores, ahead[words.new].tolist(), setup.full, float(by_rules), float(by_encoder), len(sheet)
        )
        return self.result(conclusion, _sections(words, scores, losses), remarks, small=not setup.full)

    def _tagged(self, train: Sequence[NamedWords], held: Sequence[NamedWords], seed: int) -> Tagged:
        """The tags that a new encoder gives the words of `held`; words that it did not read are other."""
        known, new = ([row.record for row in side] for side in (train, held))
        done = trained(known, new, "tags", vars(self), seed, 2 * self.words)
        tags = [[OTHER] * len(row.words) for row in held]
        for example, output in done.rows:
            read = example.head.names(example.head.predicted(output)[example.goal != IGNORED].tolist())
            tags[example.number][: len(read)] = read
        return tags, done.losses

    def _conclusion(
        self,
        scores: Mapping[str, Scores],
        ahead: Sequence[float],
        full: bool,
        by_rules: float,
        by_encoder: float,
        sheet: int,
    ) -> Clauses:
        ours, control, gain, (low, high) = scores[ENCODER], scores[CONTROL], fmean(ahead), mean_interval(ahead)
        passed_over = {ENCODER, MIXED, CONTROL} if full else {ENCODER, MIXED, CONTROL, CAPITAL}
        plain = {name: score for name, score in scores.items() if name not in passed_over}
        both, best = (max(getattr(score, kind) for score in plain.values()) for kind in ("both", "all"))
        new = max(score.new for name, score in plain.items() if name != CAPITAL)
        judged = {name: score for name, score in scores.items() if name not in (MIXED, CONTROL)}
        first_of_new = max(judged, key=lambda name: judged[name].new)
        first_of_all = max(judged, key=lambda name: judged[name].all)
        rivals = "all others" if full else "the commonest answer, the table and the bag of words"
        yield clause(
            f"Of the names that occur in no play it was trained on, the encoder finds persons and places with F1"
            f" {ours.new:.2f}; the commonest answer, the table and the bag of words reach"
            f" {rounded_up(new, '.2f')} at most. Taking every new capital for a person, which needs to know what"
            f" capitals are for, gives {scores[CAPITAL].new:.2f}. Best of all: {first_of_new}.",
            Check("names never in training: F1, above the best of these three", ours.new - new, least=MARGIN),
            instead="On names never in training the encoder is not ahead",
        )
        yield clause(
            f"It reads the words around: {gain:.1%} more of all new words are tagged right in their speech than in"
            f" random orders of all words (95% interval {low:.1%} to {high:.1%}), where F1 is"
            f" {scores[MIXED].new:.2f}.",
            Check("new words right in their speech, less in random orders: low end of the 95% interval", low, 0.001),
            instead="It does not need the words around",
        )
        if full:
            yield clause(
                f"Where a word can be both, as Kent and France, it tells which in {ours.both:.0%} of the cases, the"
                f" best of the others in {both:.0%}.",
                Check("words that are person or place: right, above the best of the others", ours.both - both, MARGIN),
                instead="Where a word can be both the encoder is not ahead",
            )
        yield clause(
            f"Of all names, most of which it was trained on, it finds them with F1 {ours.all:.2f}, a table of each"
            f" word's commonest tag with {plain[TABLE].all:.2f}. Best of all, with {judged[first_of_all].all:.2f}:"
            f" {first_of_all}.",
            Check(f"all names: F1, over the best of {rivals}", ours.all / best, least=1.0 if full else 0.9),
            instead="Over all names the encoder falls behind",
        )
        yield clause(
            f"Control: trained on tags in a random order its F1 of new names is {control.new:.2f}.",
            Check("control: F1 of names never in training", control.new, most=0.1),
            instead="The control learned something",
        )
        yield clause(
            f"The labels come from rules; of {sheet} words that were labelled by hand {by_rules:.0%} agree with"
            f" them, and {by_encoder:.0%} with the encoder.",
            Check("labels set by hand that agree with the rules", by_rules, least=0.9),
            instead="The labels are doubtful",
        )


MARGIN = 0.05  # by which the encoder must be ahead; two standard errors of a share of 0.8 of 250 names
ENCODER, MIXED, CONTROL = "the encoder", "the encoder, words in a random order", "control: shuffled tags"
CAPITAL = "every new capital a person"
ORDERS = 3  # random orders of the held-out words
TABLE = "search by words: each word's commonest tag"


Tagged = tuple[list[list[str]], Points]  # tags of the words of each row, and the losses of training


class Scores(NamedTuple):
    """F1 of names with their kind, of all and of those never in training, and of the names that can be both the share
    whose kind is right."""

    all: float
    new: float
    both: float

    @staticmethod
    def of(words: Words, tags: Sequence[str]) -> Scores:
        """Those of `tags`, which are in the order of the words."""
        right, guessed = (np.array([TAGS.index(tag) for tag in side]) for side in (words.tags, tags))
        new, both = np.array(words.new), np.array(words.both) & (right != NONE)
        kinds = float((right == guessed)[both].mean()) if both.any() else float("nan")
        return Scores(_f1(right, guessed), _f1(right[new], guessed[new]), kinds)


NONE = TAGS.index(OTHER)


def _f1(right: Integers, guessed: Integers) -> float:
    hits = int(((right == guessed) & (right != NONE)).sum())
    return 2 * hits / max(1, int((right != NONE).sum() + (guessed != NONE).sum()))


def _words(train: Sequence[NamedWords], held: Sequence[NamedWords]) -> Words:
    known = {names.stem(word) for row in train for word in row.words}
    words = [word for row in held for word in row.words]
    stems = [names.stem(word) for word in words]
    twofold = names.both()
    return Words(
        words,
        [tag for row in held for tag in row.tags],
        [stem not in known for stem in stems],
        [stem in twofold for stem in stems],
    )


def _baselines(train: Sequence[NamedWords], held: Sequence[NamedWords]) -> dict[str, list[list[str]]]:
    """The tags of the commonest answer, of each word's commonest tag, of a bag of the words around a word with a
    capital, and of the rule that a capital that training never has in small letters begins a person's name."""
    index = {tag: i for i, tag in enumerate(TAGS)}
    goals = [np.array([index[tag] for tag in row.tags]) for row in train]
    table = metrics.commonest_tags([row.words for row in train], goals, [row.words for row in held])
    capitals = [[(row, i) for row in side for i in _capitals(row)] for side in (train, held)]
    around = [[_around(row, i) for row, i in side] for side in (capitals[0][:CAPITALS], capitals[1])]
    right = np.array([index[row.tags[i]] for row, i in capitals[0][:CAPITALS]])
    bag = iter(metrics.bag_of_words(around[0], right, around[1], len(TAGS)).tolist())
    small = {word for row in train for word in row.words if word.islower()}
    return {
        "the commonest answer": [[OTHER] * len(row.words) for row in held],
        TABLE: [[TAGS[i] for i in row.tolist()] for row in table],
        "a bag of words around each capital": [
            [TAGS[next(bag)] if i in set(_capitals(row)) else OTHER for i in range(len(row.words))] for row in held
        ],
        CAPITAL: [
            [PERSON if i in set(_capitals(row)) and names.stem(row.words[i]) not in small else OTHER
             for i in range(len(row.words))] for row in held
        ],
    }  # fmt: skip


CAPITALS = 8000  # words with a capital that the bag of words is fitted to


def _capitals(row: NamedWords) -> list[int]:
    return [i for i, word in enumerate(row.words) if word[:1].isupper() and len(word) >= names.LEAST]


def _around(row: NamedWords, i: int) -> str:
    return " ".join(row.words[max(0, i - 2) : i + 3])


def _respelled(rows: Sequence[NamedWords], seed: int) -> list[NamedWords]:
    """The rows with the letters of each name in a random order, so that its kind must be read from the words around."""
    noise = np.random.default_rng(seed)

    def drawn(word: str, tag: str) -> str:
        return word if tag == OTHER else "".join(noise.permutation(list(word.lower()))).replace("'", "").capitalize()

    return [NamedWords(tuple(map(drawn, row.words, row.tags)), row.tags, row.play) for row in rows]


def _mixed(rows: Sequence[NamedWords], seed: int) -> tuple[list[NamedWords], list[int]]:
    """Rows of the same lengths with the words of all rows in a random order, and the place of each word before."""
    words = [word for row in rows for word in row.words]
    places = np.random.default_rng(seed).permutation(len(words)).tolist()
    drawn = iter(places)
    return [
        NamedWords(tuple(words[next(drawn)] for _ in row.words), (OTHER,) * len(row.words), row.play) for row in rows
    ], places


def _shuffled(rows: Sequence[NamedWords], seed: int) -> list[NamedWords]:
    """The rows with all tags in a random order."""
    tags = np.random.default_rng(seed).permutation([tag for row in rows for tag in row.tags])
    ends = np.cumsum([len(row.words) for row in rows])[:-1]
    return [
        NamedWords(row.words, tuple(own.tolist()), row.play)
        for row, own in zip(rows, np.split(tags, ends), strict=True)
    ]


def _spaced(rows: Sequence[NamedWords], count: int) -> list[NamedWords]:
    """At most so many rows with a name, evenly spaced, as they are in the order of the plays."""
    named = [row for row in rows if set(row.tags) != {OTHER}]
    return [named[i] for i in np.unique(np.linspace(0, len(named) - 1, count).astype(int))]


def _sections(words: Words, scores: Mapping[str, Scores], losses: Points) -> Sections:
    right = np.array(words.tags) != OTHER
    counts = [int(right.sum()), int((right & words.new).sum()), int((right & words.both).sum())]
    header = ("", f"F1 of all {counts[0]:,} names", f"F1 of the {counts[1]:,} never in training",
              f"kind right of the {counts[2]:,} that can be both")  # fmt: skip
    rows = [[name, f"{one.all:.3f}", f"{one.new:.3f}", f"{one.both:.1%}"] for name, one in scores.items()]
    yield TableSection("Names in plays that were held out", header, rows)
    yield Curve("Training", "step", "nats a word", {ENCODER: losses}, {})
