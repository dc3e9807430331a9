"""The labs on translation: PASS in small, FAIL when what they test is broken and when pairs are shuffled."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab_results import change_values, failed, passes
from triptych.attention import FlatKeys
from triptych.errors import InputError
from triptych.spec import Mask, same_document
from triptych.train.recipe import DataSettings, read_recipe
from triptych.train.sources import FOLDED, Pair
from triptych_lectures import labs
from triptych_lectures.data.second_language import AlignedPair, Link, SecondLanguage
from triptych_lectures.labs import modernize, translation, translators
from triptych_lectures.labs.lab import LabResult, Setup, Size

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source stands beside the target of another sentence."""
    sentences = SecondLanguage.sentences

    def within(links: frozenset[Link], target: tuple[str, ...]) -> frozenset[Link]:
        return frozenset((t, s) for t, s in links if t < len(target))

    def mixed(self: SecondLanguage, seed: int, count: int, clauses: int) -> list[AlignedPair]:
        pairs = sentences(self, seed, count, clauses)
        targets = [pair.target for pair in random.Random(seed).sample(pairs, len(pairs))]
        return [
            replace(pair, target=target, sure=within(pair.sure, target), possible=within(pair.possible, target))
            for pair, target in zip(pairs, targets, strict=True)
        ]

    monkeypatch.setattr(SecondLanguage, "sentences", mixed)


def in_small(name: str, **sizes: Size) -> LabResult:
    return labs.run(name, Setup(seed=1, sizes=sizes))


# ---------------------------------------------------------------- recurrence


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["panels", "word-alignment"])
def test_passes(name: str) -> None:
    passes(in_small(name))


@pytest.mark.heavy
def test_recurrence_passes() -> None:
    result = passes(in_small("recurrence"))
    quality = next(section for section in result.sections if section.kind == "table")
    assert [row[0] for row in quality.rows] == [*translation.RECURRENCE, "word by word"]


@pytest.mark.heavy
def test_recurrence_fails_when_attention_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translators, "additive", lambda q, k, v, **_: torch.zeros_like(q))
    monkeypatch.setitem(translation.RECURRENCE, translation.TRANSFORMER, translation.RECURRENCE[translation.FIXED])
    assert "longest quarter: wrong tokens of the fixed vector, over those of attention" in failed(
        in_small("recurrence")
    )


@pytest.mark.heavy
def test_recurrence_fails_on_shuffled_pairs(shuffled: None) -> None:
    assert "GRU, attention: wrong tokens, over those of word by word" in failed(in_small("recurrence", steps=100))


# ---------------------------------------------------------------- panels


@pytest.mark.heavy
def test_panels_fail_when_the_mask_hides_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose tokens see themselves alone, each a document, knows nothing of the source."""
    plan = FlatKeys.plan

    def hidden(self: FlatKeys, rows: object, mask: Mask, *rest: object) -> object:
        return plan(self, rows, same_document() if rows.documents is not None else mask, *rest)

    monkeypatch.setattr(FlatKeys, "plan", hidden)
    assert failed(in_small("panels")) == {"decoder, prefix mask: wrong tokens, over those of word by word"}


def test_panels_fail_when_the_prefix_mask_is_a_causal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder with this mask translates as well; what it sees of the source is measured beside that."""
    sizes: dict[str, Size] = {"steps": 1, "rows": 2, "train": 200, "held": 8}
    ahead = "prefix mask: change of the first word's vector by words after it"
    assert ahead not in failed(in_small("panels", **sizes))
    monkeypatch.setattr(translators, "same_document", lambda: translators.CAUSAL)
    result = in_small("panels", **sizes)
    assert ahead in failed(result)
    assert "The masks do not differ in what a word of the source sees" in result.meaning


@pytest.mark.heavy
def test_panels_fail_on_shuffled_pairs(shuffled: None) -> None:
    assert {f"{name}: wrong tokens, over those of word by word" for name in translation.PANELS} <= {
        *failed(in_small("panels", steps=60))
    }


# ---------------------------------------------------------------- word-alignment

RATE = "alignment error rate of "


@pytest.mark.heavy
def test_word_alignment_fails_when_values_stand_beside_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder finds its words all the same, but what it attends to is no longer where they are."""
    change_values(monkeypatch, lambda values: values.roll(2, 0))
    assert any(claim.startswith(RATE) for claim in failed(in_small("word-alignment")))


def test_word_alignment_fails_without_training() -> None:
    """Heads are chosen on other sentences all the same, so that choosing alone does not reach the bound."""
    result = in_small("word-alignment", steps=1, rows=2, held=60, train=800)
    assert len(failed(result)) == 2
    assert "The strongest weights of no head follow the alignment" in result.meaning
    whole = labs.run("word-alignment", Setup(full=True, sizes={"steps": 1, "rows": 2, "held": 60, "train": 800}))
    assert "error rate of IBM Model 1, less that of this head" in failed(whole)
    assert "They are not better than a lexicon" in whole.meaning


@pytest.mark.heavy
def test_word_alignment_fails_on_shuffled_pairs(shuffled: None) -> None:
    assert any(claim.startswith(RATE) for claim in failed(in_small("word-alignment", steps=60)))


# ---------------------------------------------------------------- modernize

LINES = [
    ("I loue the Queene, and haue giu'n her all", "I love the queen, and have giv'n her all"),
    ("giue me thy hand, deere heart", "Give me thy hand, dear heart"),
    ("the King doth loue", "the King does love"),
]


def test_a_pair_is_folded() -> None:
    from triptych.text.shakespeare import fold

    assert [fold(side) for side in LINES[0]] == [
        "i loue the queene and haue giun her all",
        "i love the queen and have givn her all",
    ]


FOLDED_LINES: list[Pair] = [
    ("i loue the queene and haue giun her all", "i love the queen and have givn her all"),
    ("giue me thy hand deere heart", "give me thy hand dear heart"),
    ("i loue to see the queene", "i love to see the queen"),
]


def test_the_table_has_the_commonest_spelling() -> None:
    table = modernize.spelling_table([*FOLDED_LINES, ("loue", "luve")])
    assert table["loue"] == "love"
    assert table["deere"] == "dear"
    assert "doth" not in table


@pytest.mark.parametrize(
    ("written", "beside"),
    [
        ("give me thy hand", ["give", "me", "thy", "hand"]),
        ("giv me hand", ["giv", "me", "", "hand"]),  # a word left out
        ("give give me thy hand", ["give", "me", "thy", "hand"]),  # a word added
        ("", ["", "", "", ""]),
        ("giveme thy hand", ["giveme", "", "thy", "hand"]),
    ],
)
def test_words_are_laid_beside_those_of_the_modern_line(written: str, beside: list[str]) -> None:
    assert modernize._laid_beside(written.split(), ["give", "me", "thy", "hand"]) == beside


def test_letters_of_aligned_words() -> None:
    held = [("giue thy hand", "give thy hand")]
    copied, right, nothing = (modernize.aligned_words(held, [text]) for text in ("giue thy hand", "give thy hand", ""))
    assert modernize.letters_right(copied) == 1 - 1 / 11
    assert modernize.letters_right(right) == 1.0
    assert modernize.letters_right(nothing) == 0.0
    assert [word.old for word in copied] == ["giue", "thy", "hand"]


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> list[Pair]:
    """Made-up plays in two spellings: u stands for v, and every e at an end is doubled."""
    letters = random.Random(0)
    words = ["".join(letters.choice("aeilnorstv") for _ in range(letters.randint(2, 5))) for _ in range(300)]

    def old(word: str) -> str:
        return word.replace("v", "u") + "e" * word.endswith("e")

    lines = [letters.choices(words, k=6) for _ in range(600)]
    made = [(" ".join(map(old, line)), " ".join(line)) for line in lines]

    def read(data: DataSettings) -> tuple[list[Pair], list[Pair]]:
        assert data.path == FOLDED
        return made[:500], made[500:]

    monkeypatch.setattr(modernize, "pairs", read)
    return made


def modernize_in_small(**sizes: Size) -> LabResult:
    return labs.run("modernize", Setup(sizes={"rows": 48, "width": 48, "held": 120, **sizes}))


@pytest.mark.heavy
def test_modernize_passes(plays: list[Pair]) -> None:
    result = passes(modernize_in_small(steps="250"))
    assert "small version" in result.meaning


def test_modernize_fails_without_training(plays: list[Pair]) -> None:
    result = modernize_in_small(steps="2")
    assert len(failed(result)) == 2
    assert "It garbles words that are spelt alike" in result.meaning


@pytest.mark.heavy
def test_modernize_fails_on_shuffled_pairs(plays: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = modernize.pieces

    def mixed(lines: list[Pair], least: int, most: int, *, across_lines: bool = False) -> list[Pair]:
        cut = pieces(lines, least, most, across_lines=across_lines)
        if lines[0] != plays[0]:
            return cut
        targets = random.Random(0).sample([new for _, new in cut], len(cut))
        return list(zip([old for old, _ in cut], targets, strict=True))

    monkeypatch.setattr(modernize, "pieces", mixed)
    assert len(failed(modernize_in_small(steps="250"))) == 2


def test_whole_lines_are_judged_against_the_table(plays: list[Pair]) -> None:
    result = labs.run(
        "modernize", Setup(full=True, sizes={"steps": "1,2", "rows": 2, "width": 16, "held": 4, "words": "3,6"})
    )
    (curve,) = (section for section in result.sections if section.kind == "curve")
    assert [step for step, _ in curve.series["loss"]] == [1.0, 2.0, 3.0]
    assert {"letters of aligned words right", "the table's wrong letters, over the model's"} <= failed(result)
    assert "A table of each word's commonest modern spelling is better" in result.meaning
    assert "small version" not in result.meaning


def test_a_decoder_is_refused(tmp_path: Path, plays: list[Pair]) -> None:
    import tiny
    from triptych.model import Model
    from triptych.text import character_tokenizer

    Model(tiny.decoder(), character_tokenizer("abc")).save(tmp_path / "m")
    with pytest.raises(InputError, match="needs an encoder-decoder with a tokenizer"):
        labs.run("modernize", Setup(model=str(tmp_path / "m")))


def test_each_part_has_its_steps_and_its_words() -> None:
    with pytest.raises(InputError, match="sizes steps and words: 2 and 1 parts"):
        modernize.ModernizeLab(steps=(1, 2), words=(1,))


@pytest.mark.parametrize(("name", "part"), [("folio.toml", 0), ("folio-lines.toml", 1)])
def test_the_full_run_is_the_recipes_of_the_examples(name: str, part: int) -> None:
    recipe = read_recipe(EXAMPLES / name)
    full = modernize.ModernizeLab.sized(Setup(full=True))
    assert (recipe.run.steps, recipe.run.rows, recipe.run.length) == (full.steps[part], full.rows, modernize.LONGEST)
    assert (recipe.data.path, recipe.data.words) == (FOLDED, full.words[part])
    assert recipe.data.across_lines == (part > 0)
    assert len(full.steps) == 2
    assert recipe.model == (full._config() if part == 0 else {"path": "runs/folio/model"})
    assert recipe.optimizer == (modernize.LATER if part else modernize.FIRST)
