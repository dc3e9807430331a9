"""Questions whose answers are spans of a passage of a play: who says it, and where the scene is.

The form is that of Rajpurkar et al. 2016.  The plays asked about were never read.  Beside the encoder stand the
commonest answer, a bag of words, and a search for the part of the passage that has the most words of the question, or
the most of its letters, three in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Literal

import numpy as np

from triptych.errors import InputError
from triptych.page import Curve, TableSection
from triptych.train.label_tasks import best_span
from triptych_lectures.data import play_questions
from triptych_lectures.data.play_questions import ASKED, HIDDEN, Kind, Passages, PlayQuestion
from triptych_lectures.data.play_scenes import HELD_OUT, split
from .lab import Check, Conclusion, Lab, LabResult, Sections, Setup, clause, size
from .play_encoders import trained
from .small_models import Points

ENCODER, SEARCH, LETTERS = "the encoder", "search by words", "search by letters"
CONTROL = "control: answers of other questions"
EASY: tuple[Literal["words", "who"], ...] = ("words", "who")  # what is asked of quotations, in this order
EASIER = 0.0  # least share hidden in training of the words of a line that both editions spell alike
MARGIN = 0.1  # by which the encoder must be ahead: more than three standard errors of a share of 0.5 of 300


class QuestionsLab(Lab):
    name = "questions"

    width: int = size(64, "width of the encoder, a multiple of 8", multiple=8)
    layers: int = size(2, "its blocks", full=3)
    heads: int = size(4, "heads of a block", full=1)
    base: float = size(100.0, "base of the rotary positions: the slowest turn by 1 / base a token", full=10_000.0)
    tokens: int = size(1000, "tokens of its vocabulary", full=500)
    steps: int = size(400, "training steps", full=3000)
    easy: int = size(100, "the first of these, for words quoted as they stand; as many for who says them", full=500)
    rows: int = size(10, "questions of a training step", full=32)
    kinds: str = size("where", "kinds of questions: who, where, or both with a comma between", full="who,where")
    trained: int = size(4000, "questions to train on", full=40_000)
    held: int = size(300, "questions on held-out plays", full=600)
    speeches: int = size(4, "speeches of a passage, 3 or more", least=3)
    words: int = size(8, "words of a speech that are shown, 8 or more", least=8, full=10)
    exchanged: float = size(0.3, "share of a training question's words that are exchanged for others", most=1)

    def __post_init__(self) -> None:
        if not set(self.kinds.split(",")) <= set(ASKED):
            raise InputError(f"size kinds: {self.kinds!r} must be who, where or who,where")
        if self._easy and 2 * self.easy >= self.steps:
            raise InputError(f"size easy: {self.easy} must be less than half of steps, {self.steps}")

    @property
    def _kinds(self) -> list[Kind]:
        return [kind for kind in ASKED if kind in self.kinds.split(",")]

    @property
    def _easy(self) -> int:
        """The number of questions of the first steps, which ask where words stand, and of the next, who says them."""
        return self.easy * self.rows if "who" in self._kinds else 0

    def run(self, setup: Setup) -> LabResult:
        setup.progress("reading the plays")
        plays, noise, sizes = split(), np.random.default_rng(setup.seed), Passages(self.speeches, self.words)
        train, held = (
            play_questions.questions(side, count, noise, sizes, self._kinds, hide)
            for side, count, hide in zip(plays, (self.trained, self.held), (EASIER, 1.0), strict=True)
        )
        setup.progress(f"training an encoder: {self.steps} steps")
        easy = [one for asked in EASY for one in play_questions.quotations(plays[0], self._easy, noise, asked)]
        ours, losses = self._answered([*easy, *train], held, setup.seed)
        setup.progress("the control: answers of other questions")
        control, _ = self._answered(_answered_otherwise([*easy, *train], noise), held, setup.seed)
        setup.progress("what is not trained")
        answers = {
            ENCODER: ours,
            "the commonest answer": play_questions.commonest(held),
            "a bag of words": play_questions.by_bag(train, held),
            SEARCH: play_questions.by_search(held),
            LETTERS: play_questions.by_search(held, play_questions.letters),
            CONTROL: control,
        }
        right = {name: {kind: _right(held, own, kind) for kind in self._kinds} for name, own in answers.items()}
        quoted = (
            f" Lines have the First Folio's spelling in small letters; words that the passage spells alike are hidden"
            f" ({HIDDEN}). The first {self.easy} steps ask where words stand that are quoted as they are from two short"
            " speeches, and as many steps after them who says such words."
        )
        remarks = (
            f"Held out: {', '.join(play.replace('_', ' ') for play in HELD_OUT)}.{quoted * ('who' in self._kinds)} A"
            " search takes the first part of the passage with the most words of the question, or three letters in a"
            f" row, and its speaker or, of a heading, its first words. In training {self.exchanged:.0%} of a passage's"
            " words are exchanged for others; where a line is asked for, speakers alone."
        )
        sections = self._sections(held, answers, right, losses)
        return self.result(self._conclusion(right), sections, remarks, small=not setup.full)

    def _answered(self, train: Sequence[PlayQuestion], held: Sequence[PlayQuestion], seed: int) -> Answered:
        """The answers of a new encoder to the questions of `held`."""
        length = 3 * (self.words + 4) * (self.speeches + 1)
        drawn = play_questions.with_other_words(train, np.random.default_rng(seed), self.exchanged)
        known, new = ([one.record for one in side] for side in (drawn, held))
        done = trained(known, new, "spans", vars(self), seed, length, self._easy)
        spans = groupby(done.rows, key=lambda row: row[0].number)
        best = {number: best_span(list(of), held[number].context, may_be_empty=False) for number, of in spans}
        return [best[i].strip(" .,;:") for i in range(len(held))], done.losses

    def _conclusion(self, right: Right) -> Conclusion:
        plain = [name for name in right if name not in (ENCODER, CONTROL)]
        clauses = []
        for kind in self._kinds:
            ours, best = right[ENCODER][kind], {name: right[name][kind] for name in plain}
            rivals = [name for name in plain if kind == "where" or name != LETTERS]
            shown = ", ".join(f"{name} {best[name]:.0%}" for name in plain)
            checks = [
                Check(f"{ASKED[kind]} right answers, above those of {name}", ours - best[name], least=MARGIN)
                for name in rivals
            ]
            statement = f"{QUOTED[kind]}: of the answers on held-out plays {ours:.0%} are right; {shown}."
            clauses.append(clause(statement, *checks, instead=f"{QUOTED[kind]}: the encoder is not ahead"))
        worst = max(right[CONTROL][kind] - max(right[name][kind] for name in plain) for kind in self._kinds)
        clauses.append(
            clause(
                "Control: an encoder trained with the answers of other questions is right no more often than these.",
                Check("control: right answers, above the best of what is not trained", worst, most=0.05),
                instead="The control learned something",
            )
        )
        return tuple(clauses)

    def _sections(
        self, held: Sequence[PlayQuestion], answers: Mapping[str, Sequence[str]], right: Right, losses: Points
    ) -> Sections:
        rows = [[name, *(f"{share:.1%}" for share in of.values())] for name, of in right.items()]
        shown = [
            [one.question, one.context, one.answer, answers[ENCODER][i], answers[SEARCH][i]]
            for i, one in enumerate(held[:8])
        ]
        return (
            TableSection("Right answers on held-out plays", ("", *(ASKED[kind] for kind in self._kinds)), rows),
            TableSection("Questions", ("question", "passage", "right", ENCODER, SEARCH), shown),
            Curve("Training", "step", "nats a question", {ENCODER: losses}, {}),
        )


QUOTED: dict[Kind, str] = {"who": "Who says a line", "where": "Where the scene is"}
Right = Mapping[str, Mapping[Kind, float]]  # the shares of right answers
Answered = tuple[list[str], Points]  # answers to questions, and the losses of training


def _right(held: Sequence[PlayQuestion], answers: Sequence[str], kind: Kind) -> float:
    """The share of the questions of a kind whose answer is the same text."""
    pairs = [(one.answer, text) for one, text in zip(held, answers, strict=True) if one.kind == kind]
    return fmean(text == answer for answer, text in pairs)


def _answered_otherwise(train: Sequence[PlayQuestion], noise: np.random.Generator) -> list[PlayQuestion]:
    """The questions with the answer of another part of the passage, drawn at random."""
    return [play_questions.answered_by(one, int(noise.integers(len(one.parts)))) for one in train]
