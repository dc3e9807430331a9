"""Texts as training data: files and folders, and the works of Shakespeare in both spellings."""

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import FetchError, TextError
from triptych.text import align, shakespeare
from triptych.text.corpus import documents, read_text
from triptych.text.shakespeare import HELD_OUT, Play, SpellingPair, clean_folio, clean_modern


@pytest.fixture(scope="module")
def plays() -> dict[str, Play]:
    try:
        return shakespeare.plays()
    except FetchError as error:
        if os.environ.get("TRIPTYCH_REQUIRE_WEIGHTS") == "1":
            raise
        pytest.skip(str(error))


@pytest.mark.weights
def test_all_works_are_there_and_clean(plays: dict[str, Play]) -> None:
    assert len(plays) == 42
    assert sum(play.folio is not None for play in plays.values()) == 35
    leftovers = re.compile(
        r"(?i)gutenberg|\betext|\be-text|copyright|small print|transcrib|http|by william shakespeare"
    )
    for name, play in plays.items():
        for text in (play.modern, play.folio or ""):
            assert not leftovers.search(text), name
            assert "\r" not in text
            assert "\n\n\n" not in text
    assert len(set("".join(play.modern for play in plays.values()))) <= 78
    assert all("PERSONS REPRESENTED" not in play.modern.upper() for play in plays.values())
    assert plays["macbeth"].modern.startswith("ACT I.\n\nSCENE I. An open Place.")
    assert plays["julius_caesar"].modern.endswith("[Exeunt.]\n")
    assert "Now is the Winter of our Discontent,\nMade glorious Summer" in plays["richard_iii"].folio
    assert plays["sonnets"].modern.startswith("I\n\nFrom fairest creatures we desire increase,\n")


@pytest.mark.weights
def test_whole_plays_are_held_out(plays: dict[str, Play]) -> None:
    train, held_out = shakespeare.split()
    assert 4_600_000 < len(train) < 4_650_000
    assert 370_000 < len(held_out) < 390_000
    for name in HELD_OUT:
        assert plays[name].modern in held_out
        assert plays[name].modern[1000:1400] not in train
    assert plays["hamlet"].modern in train


@pytest.mark.weights
def test_editions_are_aligned(plays: dict[str, Play]) -> None:
    pairs = shakespeare.aligned(plays["twelfth_night"])
    assert len(pairs) > 1500
    assert SpellingPair("If Musicke be the food of Loue, play on,", "If music be the food of love, play on,") in pairs
    assert all(6 <= len(re.findall(r"[A-Za-z]+(?:'[A-Za-z]+)*|&", pair.modern)) <= 20 for pair in pairs)
    # Nearly all of the words of a pair are each other's, and hardly a pair is the same in both.
    first, last = pairs[0], pairs[-1]
    assert (first.folio.split()[0], last.modern.split()[-1]) == ("If", "day.")
    same = sum(pair.folio == pair.modern for pair in pairs)
    assert same < 0.05 * len(pairs)
    wrong = [pair for pair in pairs if abs(len(pair.folio) - len(pair.modern)) > 0.3 * len(pair.modern)]
    assert len(wrong) < 0.005 * len(pairs)
    assert shakespeare.aligned(plays["sonnets"]) == []


def test_cleaning() -> None:
    raw = (
        "MACBETH\n\nby William Shakespeare\n\n\n\n\nPersons\n\nDUNCAN, King.\n\nSCENE: Scotland.\n\n\n\nACT I.\n\n"
        "SCENE I.  A heath.   \n\n[Enter HE.}\n\nHE.\n   _Well_ met  @@ *  \n\n\n\nSHE.\nAye.\n\nTHE END\n"
    )
    assert clean_modern(raw) == "ACT I.\n\nSCENE I. A heath.\n\n[Enter HE.]\n\nHE.\nWell met\n\nSHE.\nAye.\n"
    assert clean_modern("SONNET\nby William Shakespeare\n\n\nI\n\nFrom\n") == "I\n\nFrom\n"
    old = "The Tragedie\n\nwith\n\nActus Primus.\n\n  He. C\u00e6sar  &   I\n\n\n\nFINIS. The Tragedie of\nHim.\n"
    assert clean_folio(old) == "Actus Primus.\n\n  He. Caesar & I\n"


MODERN = """\
ACT I.

[Enter HE and SHE.]

HE.
I have a heart and love to give thee now,
[Aside.] Upon my life, and never was in doubt.
How now, my lord! what ails thee in this hour?

SHE.
Nothing at all was printed here before.

HE.
I would the sun were up and day begun; and so
Say I.

SHE.
Yes, but what is one man in this,
where two men speak in the old book?
"""
FOLIO = """\
Enter He and She.

  He. I haue a heart & loue to giue thee now:
Vpon my life, & neuer was in doubt.
Enter a
Seruant.

How now my Lord, what ayles thee in this houre?
   She. Something quite other stood
   He. I would the Sunne were vp and daie begunne, & so say I
  She. Yes, but what is one man in this,
where two men
  He. speake in the old booke?
"""


def test_passages_are_lines_of_one_speech_in_both() -> None:
    assert align.passages(FOLIO, MODERN) == [
        ("I haue a heart & loue to giue thee now:", "I have a heart and love to give thee now,"),
        ("Vpon my life, & neuer was in doubt.", "Upon my life, and never was in doubt."),
        ("How now my Lord, what ayles thee in this houre?", "How now, my lord! what ails thee in this hour?"),
        ("I would the Sunne were vp and daie begunne, & so", "I would the sun were up and day begun; and so"),
        ("Yes, but what is one man in this,", "Yes, but what is one man in this,"),
    ]


WORDS = st.lists(st.sampled_from("abcdefghij"), max_size=30)


@given(WORDS, WORDS, WORDS)
def test_partners_are_equal_and_never_cross(a: list[str], b: list[str], moved: list[str]) -> None:
    for one, other in ((a, b), (moved + a + b, a + b + moved), (a + moved, b + moved)):
        partner = align.align(one, other)
        pairs = [(i, j) for i, j in enumerate(partner) if j is not None]
        assert all(one[i] == other[j] for i, j in pairs)
        assert all(j < k for (_, j), (_, k) in pairwise(pairs))
    assert align.align(a, a) == list(range(len(a)))
    assert align.align([*"xyz", *a], a)[3:] == list(range(len(a)))


def test_a_moved_passage_does_not_cost_the_longer_one() -> None:
    assert align.align([*"abcdefg", *"uvwxyz"], [*"uvwxyz", *"abcdefg"]) == [*range(6, 13), *[None] * 6]
    assert align.align([*"ab", "q", *"cd"], [*"ab", *"rs", *"cd"]) == [0, 1, None, 4, 5]


@pytest.mark.weights
def test_the_alignment_is_kept(plays: dict[str, Play], monkeypatch: pytest.MonkeyPatch) -> None:
    train, held_out = shakespeare.parallel_split()
    assert len(train) > 60_000
    assert 5_500 < len(held_out) < 7_000
    assert held_out[-1] == shakespeare.aligned(plays["twelfth_night"])[-1]
    monkeypatch.setattr(align, "passages", lambda *_: pytest.fail("aligned again"))
    assert shakespeare.parallel_split() == (train, held_out)


def test_a_folder_in_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "one.md").write_bytes("ö\r\nx\r".encode())
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\n\n")
    (tmp_path / "c").write_text("third")
    (tmp_path / "empty.txt").write_text("\n ")
    (tmp_path / ".git" / "object").write_bytes(b"\xff")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert documents(tmp_path) == ["first\n\n", "ö\nx\n", "third"]
    assert read_text(tmp_path) == "first\n\nö\nx\n\nthird\n"
    assert documents(tmp_path / "c") == ["third"]
    assert documents(str(tmp_path / ".hidden").replace(".hidden", "c")) == ["third"]


@pytest.mark.parametrize(
    ("raw", "at", "byte"),
    [(b"ab\xffc", 2, "ff"), (b"\xef\xbb\xbfab\xe9 z", 5, "e9"), (b"\xc3\xa9\xc3", 2, "c3")],
)
def test_the_first_bad_byte_is_named(tmp_path: Path, raw: bytes, at: int, byte: str) -> None:
    (tmp_path / "latin.txt").write_bytes(raw)
    with pytest.raises(TextError, match=rf"latin\.txt is not UTF-8 at byte {at} \(0x{byte}\)"):
        read_text(tmp_path / "latin.txt")


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no file or folder"):
        documents(tmp_path / "missing")
    (tmp_path / "empty").write_text(" \n")
    for path in (tmp_path, tmp_path / "empty"):
        with pytest.raises(TextError, match="holds no text"):
            documents(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_is_not_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10 << 30)
    problems = {"pipe": "is a pipe or a device", "zeros": "is a pipe or a device", "loop": "cannot be read",
                "sparse": "10,737,418,240 bytes"}  # fmt: skip
    for name, problem in problems.items():
        with pytest.raises(TextError, match=problem) as refused:
            documents(tmp_path / name)
        assert "\n" not in str(refused.value)
