"""The invented language, IBM Model 1 and the alignment error rate."""

from collections import defaultdict

import pytest

from triptych.errors import InputError
from triptych_lectures.data.second_language import ADVERBS, AlignedPair, SecondLanguage, Vocabulary
from triptych_lectures.labs.word_alignment import Model1, diagonal, error_rate


@pytest.fixture(scope="module")
def pairs() -> list[AlignedPair]:
    return SecondLanguage(3).sentences(3, 800, 3)


def translations(pairs: list[AlignedPair]) -> dict[str, set[tuple[str, ...]]]:
    """What each source word becomes, by its sure links."""
    of: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for pair in pairs:
        for at, word in enumerate(pair.source):
            of[word].add(tuple(pair.target[t] for t, s in sorted(pair.sure) if s == at))
    return of


def test_the_same_seed_gives_the_same_sentences_and_another_one_others() -> None:
    first, again, other = (SecondLanguage(seed).sentences(seed, 20, 2) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({pair.source for pair in first}) == 20


def test_links_join_words_that_there_are_and_sure_ones_are_possible(pairs: list[AlignedPair]) -> None:
    for pair in pairs:
        assert pair.sure <= pair.possible
        assert all(t < len(pair.target) and s < len(pair.source) for t, s in pair.possible)


def test_a_word_has_several_translations(pairs: list[AlignedPair]) -> None:
    """It is no cipher: articles and adjectives agree, nouns have two senses, verbs follow number and time."""
    of = translations(pairs)
    assert len(of["the"]) == 4
    assert len(of["old"]) == 4
    assert len(of["queen"]) == 2  # by the class of the verb
    assert len(of["king"]) == 1
    assert len(of["see"]) == 4


def test_two_words_share_a_translation(pairs: list[AlignedPair]) -> None:
    of = translations(pairs)
    assert of["sister"] == of["dog"]


def test_a_word_becomes_none_to_three_words(pairs: list[AlignedPair]) -> None:
    lengths = {len(words) for found in translations(pairs).values() for words in found}
    assert lengths == {0, 1, 2, 3}
    assert translations(pairs)["some"] == {()}


def test_the_senses_of_a_noun_follow_the_verb() -> None:
    language = SecondLanguage(0)
    sense = {0: language.nouns["queen"].senses[0], 1: language.nouns["queen"].senses[1]}
    for pair in language.sentences(0, 400, 1):
        verb = next(word for word in pair.source if word in language.verbs)
        kind = language.verbs[verb].kind
        others = {word for other, words in sense.items() if other != kind for word in words}
        if "queen" in pair.source:
            assert set(sense[kind]) <= set(pair.target)
            assert not others & set(pair.target)


def test_words_move(pairs: list[AlignedPair]) -> None:
    """Adjectives follow their noun, verbs end the clause, adverbs stand before the verb, prepositions after."""
    crossing = [
        sum((a[0] < b[0]) != (a[1] < b[1]) and a[1] != b[1] for a in pair.sure for b in pair.sure) for pair in pairs
    ]
    assert sum(count > 0 for count in crossing) / len(pairs) > 0.9
    for pair in SecondLanguage(3).sentences(4, 50, 1):
        if pair.source[0] in ADVERBS:
            assert (len(pair.target) - 2, 0) in pair.sure


def test_some_verbs_split(pairs: list[AlignedPair]) -> None:
    language = SecondLanguage(3)
    split = {verb for verb, entry in language.verbs.items() if entry.particle is not None}
    assert 0 < len(split) < len(language.verbs)
    apart = [
        places
        for pair in pairs
        for s, word in enumerate(pair.source)
        if word in split and (places := sorted(t for t, source in pair.sure if source == s))
    ]
    assert all(len(places) == 2 for places in apart)
    assert any(places[1] - places[0] > 1 for places in apart)


@pytest.mark.parametrize("sizes", [{"nouns": 1}, {"nouns": 33}, {"verbs": 25}, {"adjectives": 0}])
def test_a_lexicon_of_an_impossible_size_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"must be between 2 and \d+"):
        SecondLanguage(0, **sizes)


def test_more_sentences_than_the_words_give_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    language = SecondLanguage(0, nouns=2, verbs=2, adjectives=2)
    only = language.sentences(0, 1, 1)[0]
    monkeypatch.setattr(SecondLanguage, "sentence", lambda self, random, clauses: only)
    with pytest.raises(InputError, match="few more than 1 sentences"):
        language.sentences(0, 5, 1)


def test_ids_of_words(pairs: list[AlignedPair]) -> None:
    vocabulary = Vocabulary(pairs)
    ids = vocabulary.ids(pairs[0].source)
    assert [vocabulary.words[i] for i in ids] == [*pairs[0].source, "<end>"]
    assert vocabulary.words[:2] == ["<end>", "<start>"]


def test_the_error_rate_by_hand() -> None:
    pair = AlignedPair(("a", "b"), ("x", "y", "z"), frozenset({(0, 0), (1, 1)}), frozenset({(0, 0), (1, 1), (2, 1)}))
    assert error_rate([pair.sure], [pair]) == 0.0
    assert error_rate([pair.possible], [pair]) == 0.0  # possible links cost nothing
    assert error_rate([frozenset({(0, 1)})], [pair]) == 1.0
    # A has (0, 0), sure, and (2, 0), wrong; S has two: 1 - (1 + 1) / (2 + 2)
    assert error_rate([frozenset({(0, 0), (2, 0)})], [pair]) == 0.5
    assert diagonal(pair) == {(0, 0), (1, 1), (2, 1)}


def test_model_1_learns_a_lexicon_by_itself() -> None:
    """The example of Brown et al.: words that occur together are told apart by the sentences where one is missing."""

    def pair(source: str, target: str, links: set[tuple[int, int]]) -> AlignedPair:
        return AlignedPair(tuple(source.split()), tuple(target.split()), frozenset(links), frozenset(links))

    pairs = [
        pair("the house", "das haus", {(0, 0), (1, 1)}),
        pair("the book", "das buch", {(0, 0), (1, 1)}),
        pair("a book", "ein buch", {(0, 0), (1, 1)}),
    ]
    model = Model1(pairs, iterations=30)
    assert error_rate([model.links(one) for one in pairs], pairs) == 0.0
    assert model.links(pair("the unknown", "das fremd", set())) == {(0, 0)}
    once = Model1(pairs, iterations=1)
    assert (
        once.lexicon[once.sources["the"], once.targets["das"]]
        < model.lexicon[model.sources["the"], model.targets["das"]]
    )


def test_model_1_beats_the_diagonal_on_the_language(pairs: list[AlignedPair]) -> None:
    model, held = Model1(pairs[:600]), pairs[600:]
    lexicon, straight = (error_rate([links(one) for one in held], held) for links in (model.links, diagonal))
    assert lexicon < 0.5 < straight
