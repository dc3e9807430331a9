"""The labs that read plays: their questions and labels, what stands beside the encoder, and what makes them FAIL."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Literal

import numpy as np
import pytest

from lab_results import failed
from triptych.errors import FetchError, InputError
from triptych.text.align import words
from triptych.train.data import EpochRows
from triptych.train.labelled import LabelledExample
from triptych.train.objectives import Example
from triptych_lectures import labs
from triptych_lectures.data import play_names, play_questions, play_scenes
from triptych_lectures.data.play_names import NamedWords
from triptych_lectures.data.play_questions import ASKED, HIDDEN, Passages, PlayQuestion
from triptych_lectures.data.play_scenes import PlayScene, PlaySpeech
from triptych_lectures.labs import names, questions
from triptych_lectures.labs.lab import Setup
from triptych_lectures.labs.play_encoders import trained


def speech(speaker: str, text: str) -> PlaySpeech:
    return PlaySpeech(speaker, tuple(text.split()))


SCENES = [
    PlayScene("a_play", "London. A street.", tuple(speech(who, f"{who.lower()} speaks of rain") for who in "ABC")),
    PlayScene(
        "a_play", "York. Before the castle.", tuple(speech(who, f"{who.lower()} speaks of snow") for who in "DEF")
    ),
]


def asked(question: str, parts: Sequence[str], answers: Sequence[str], part: int) -> PlayQuestion:
    return play_questions._question("who", question, parts, answers, part, "a_play")


FIRE = ("A. the fire burns", "B. the snow falls", "A. the wind")
WHO = asked(f"{ASKED['who']} snow {HIDDEN} falls", FIRE, ("A", "B", "A"), 1)


# ---------------------------------------------------------------- questions, without the texts


def test_a_heading_stands_between_the_speeches_of_two_scenes() -> None:
    made = play_questions.questions({"a_play": SCENES}, 20, np.random.default_rng(0), Passages(4, 8), ["where"])
    assert {one.answer for one in made} == {"York"}
    for one in made:
        assert one.context[one.start :].startswith("York. Before the castle.")
        before, after = one.context.split("York.")
        assert "snow" not in before
        assert "rain" not in after


def test_the_search_takes_the_part_with_most_words_of_the_question() -> None:
    assert play_questions.by_search([WHO]) == ["B"]
    assert play_questions.commonest([WHO]) == ["A"]


def test_a_search_by_letters_sees_other_spellings() -> None:
    spelled = asked(f"{ASKED['who']} {HIDDEN} snowe fallen", FIRE, ("A", "B", "A"), 1)
    assert play_questions.by_search([spelled]) == ["A"]
    assert play_questions.by_search([spelled], play_questions.letters) == ["B"]


def test_other_words_have_the_same_form_and_the_answer_stays_in_its_place() -> None:
    noise = np.random.default_rng(0)
    train = play_questions.questions({"a_play": SCENES}, 40, noise, Passages(4, 8), ["where"])
    assert play_questions.with_other_words(train, noise, 0.0) == train
    others = play_questions.with_other_words(train, noise, 1.0)
    assert len({one.answer for one in others}) > 1
    for one, other in zip(train, others, strict=True):
        assert other.context[other.start :].startswith(f"{other.answer}. ")
        assert play_questions._part(other) == play_questions._part(one)
        for old, new in zip(one.context.split(), other.context.split(), strict=True):
            assert (old[0].isupper(), old[1:].isupper()) == (new[0].isupper(), new[1:].isupper())


def test_of_a_line_only_speakers_are_exchanged() -> None:
    capitals = asked(WHO.question, ("ANN. the fire", "BOB. the snow falls", "ANN. a wind"), ("ANN", "BOB", "ANN"), 1)
    (other,) = play_questions.with_other_words([capitals], np.random.default_rng(1), 1.0)
    assert (other.question, other.context.lower().split()[1:3]) == (capitals.question, ["the", "fire"])
    assert {*other.answers} <= {"ANN", "BOB"}


@pytest.mark.parametrize("answer", ["words", "who"])
def test_a_quotation_is_answered_by_its_words_or_their_speaker(answer: Literal["words", "who"]) -> None:
    scene = PlayScene(
        "a_play", "", tuple(speech(who, f"{who.lower()} speaks of rain") for who in ("ANN", "BOB", "CAT"))
    )
    easy = play_questions.quotations({"a_play": [scene]}, 30, np.random.default_rng(2), answer)
    others = play_questions.with_other_words(easy, np.random.default_rng(0), 1.0)
    for one in [*easy, *others]:
        quoted = one.question.removeprefix(ASKED["who"]).removeprefix(play_questions.WORDS).strip()
        assert one.context[one.start :].startswith(one.answer)
        assert one.context.count(quoted) == 1
        asked = quoted if answer == "words" else one.context[: one.context.index(quoted)].split()[-1].rstrip(".")
        assert one.answer == asked
    assert [one.question for one in easy] == [one.question for one in others]
    assert [one.context for one in easy] != [one.context for one in others]
    assert {play_questions._part(one) for one in easy} == ({1, 3} if answer == "words" else {0, 2})


def test_easy_records_are_read_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[int]] = []
    whole = EpochRows.draw

    def draw(self: EpochRows, seed: int, step: int, rows: int) -> list[Example]:
        examples = whole(self, seed, step, rows)
        drawn.append([one.number for one in examples if isinstance(one, LabelledExample)])
        return examples

    monkeypatch.setattr(EpochRows, "draw", draw)
    records = [one.record for one in play_questions.quotations({"a_play": SCENES}, 16, np.random.default_rng(0), "who")]
    sizes = {"width": 8, "layers": 1, "heads": 1, "tokens": 300, "steps": 7, "rows": 2}
    trained(records, records[:2], "spans", sizes, 0, 64, easy=6)
    assert len(drawn) == 7
    assert sorted(chain(*drawn[:3])) == list(range(6))
    assert sorted(chain(*drawn[3:6])) == list(range(6, 12))
    assert min(chain(*drawn[6:])) >= 12


def test_words_are_asked_for_in_some_of_the_steps() -> None:
    with pytest.raises(InputError, match="size easy: 200 must be less than half of steps, 400"):
        labs.run("questions", Setup(sizes={"kinds": "who", "easy": 200}))


def test_an_exchanged_answer_stands_where_it_says() -> None:
    other = play_questions.answered_by(WHO, 2)
    assert (other.answer, other.context[other.start :]) == ("A", "A. the wind")


# ---------------------------------------------------------------- questions, of the plays


@pytest.fixture(scope="module")
def texts() -> None:
    try:
        play_scenes.plays()
    except FetchError as error:
        pytest.skip(str(error))


@pytest.mark.weights
def test_questions_of_plays_are_as_they_say(texts: None) -> None:
    train, held_out = play_scenes.split()
    assert set(held_out) == set(play_scenes.HELD_OUT)
    assert not set(train) & set(held_out)
    sizes = Passages(4, 10)
    made = play_questions.questions(held_out, 60, np.random.default_rng(3), sizes, ["who", "where"])
    assert Counter(one.kind for one in made) == {"who": 30, "where": 30}
    for one in made:
        assert one.context[one.start : one.start + len(one.answer)] == one.answer
        assert one.play in held_out
        speakers = {part.partition(".")[0] for part in one.parts if part.partition(".")[0].isupper()}
        assert len(speakers) >= play_questions.PERSONS
        if one.kind == "who":
            quoted = one.question.removeprefix(ASKED["who"]).split()
            assert len(quoted) - quoted.count(HIDDEN) >= play_questions.SHOWN
            assert not set(words(" ".join(quoted))) <= set(words(one.parts[play_questions._part(one)]))
    assert any(set(words(one.question)) - set(words(one.context)) - {"who", "says"} for one in made)  # other spelling


@pytest.mark.weights
def test_labels_of_names_agree_with_those_set_by_hand(texts: None) -> None:
    sheet = play_names.checked()
    assert len(sheet) == 200
    assert {one.play for one in sheet} <= set(play_scenes.HELD_OUT)
    rows = {play: play_names.labelled(play, 32) for play in play_scenes.HELD_OUT}
    assert all(rows[one.play][one.speech].words[one.at] == one.word for one in sheet)
    assert sum(rows[one.play][one.speech].tags[one.at] == one.tag for one in sheet) >= 180


@pytest.mark.weights
def test_a_word_can_be_a_person_and_a_place(texts: None) -> None:
    assert {"kent", "france", "york"} <= play_names.both()
    tag = play_names._tagger("lear")
    assert tag(("Good", "Kent", "!"), 1) == play_names.PERSON
    assert tag(("Earl", "of", "Kent"), 2) == play_names.PLACE
    assert play_names._tagger("hamlet")(("Kent", "!"), 0) == play_names.PLACE
    assert tag(("Good", "king", "!"), 1) == play_names.OTHER


# ---------------------------------------------------------------- names, without the texts

ROW = NamedWords(("Hail", ",", "Kent", "of", "Dover"), ("other", "other", "person", "other", "place"), "a_play")


def test_scores_are_of_names_and_their_kinds() -> None:
    some = names.Words(
        list(ROW.words), list(ROW.tags), new=[False] * 4 + [True], both=[False, False, True, False, False]
    )
    wrong_kind = names.Scores.of(some, ["other", "other", "place", "other", "place"])
    assert wrong_kind == names.Scores(0.5, 1.0, 0.0)
    assert names.Scores.of(some, ROW.tags) == names.Scores(1.0, 1.0, 1.0)
    assert names.Scores.of(some, ["person"] * 5).all == pytest.approx(2 / 7)


def test_respelled_names_keep_their_letters_and_tags() -> None:
    (row,) = names._respelled([ROW], seed=1)
    assert row.tags == ROW.tags
    assert row.words[3] == "of"
    assert sorted(row.words[2].lower()) == sorted("kent")
    assert row.words[4][0].isupper()


def test_the_baselines_see_what_they_say() -> None:
    row = NamedWords(("my", "lord", "Bohun"), ("other", "other", "person"), "a_play")
    held = NamedWords(("Kent", "Lord", "Ross"), ("person", "other", "person"), "a_play")
    found = names._baselines([ROW, row], [held])
    assert found[names.TABLE] == [["person", "other", "other"]]
    assert found[names.CAPITAL] == [["person", "other", "person"]]  # "lord" has small letters elsewhere


def test_names_found_without_the_words_around_fail_and_the_control_is_its_number() -> None:
    low = names.Scores(0.1, 0.08, 0.1)
    scores = dict.fromkeys((names.ENCODER, names.MIXED, names.CAPITAL, names.TABLE, names.CONTROL), low)
    _, around, _, of_control, _ = names.NamesLab()._conclusion(scores, [1.0, -1.0] * 50, False, 0.9, 0.9, 200)
    assert around.text.startswith("It does not need the words around")
    assert of_control.held
    assert "0.08" in of_control.text


# ---------------------------------------------------------------- verdicts


@pytest.mark.weights
@pytest.mark.parametrize("answers", ["right", "search"])
def test_questions_pass_only_where_the_encoder_is_ahead(
    answers: str, texts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that is right passes, and one that answers as the search does fails."""
    given = iter([True, False])

    def stub(
        self: questions.QuestionsLab, train: object, held: Sequence[PlayQuestion], seed: int
    ) -> questions.Answered:
        if not next(given):  # the control
            return [""] * len(held), []
        found = [one.answer for one in held] if answers == "right" else play_questions.by_search(held)
        return found, [(1.0, 1.0)]

    monkeypatch.setattr(questions.QuestionsLab, "_answered", stub)
    result = labs.run("questions", Setup(sizes={"trained": 200, "held": 40}))
    assert result.passed is (answers == "right")
    if answers == "search":
        assert any(claim.endswith("search by words") for claim in failed(result))
        assert "the encoder is not ahead" in result.meaning


@pytest.mark.heavy
@pytest.mark.weights
def test_questions_fail_on_exchanged_answers(texts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = questions.QuestionsLab._answered

    def exchanged(
        self: questions.QuestionsLab, train: Sequence[PlayQuestion], held: Sequence[PlayQuestion], seed: int
    ) -> questions.Answered:
        return answered(self, questions._answered_otherwise(train, np.random.default_rng(9)), held, seed)

    monkeypatch.setattr(questions.QuestionsLab, "_answered", exchanged)
    assert not labs.run("questions").passed


@pytest.mark.heavy
@pytest.mark.weights
def test_names_fail_on_shuffled_tags(texts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tagged = names.NamesLab._tagged

    def shuffled(
        self: names.NamesLab, train: Sequence[NamedWords], held: Sequence[NamedWords], seed: int
    ) -> names.Tagged:
        return tagged(self, names._shuffled(train, seed), held, seed)

    monkeypatch.setattr(names.NamesLab, "_tagged", shuffled)
    assert "names never in training: F1, above the best of these three" in failed(labs.run("names"))
