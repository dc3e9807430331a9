"""Text out of a run: the pieces are the whole, up to the end token or before the first stop string."""

from __future__ import annotations

import pytest

import cli_models
import tiny
from triptych import generate as running
from triptych.errors import TextError
from triptych.generate.writing import before_stop
from triptych.model import Model, load

HOW = {"max_new_tokens": 32, "temperature": 1.0, "top_k": 40}
SEEDS = range(5)  # of random bytes: texts with half characters in them, at their ends too


@pytest.fixture(scope="module")
def model() -> Model:
    return load(cli_models.checkpoint("decoder"))


def written(model: Model, seed: int, stop: tuple[str, ...] = ()) -> running.Generation:
    return model.generate(["Mill"], seed=seed, stop=stop, **HOW)[0]


def pieces(model: Model, seed: int, stop: tuple[str, ...] = ()) -> list[str]:
    return list(model.stream("Mill", seed=seed, stop=stop, **HOW))


def plain_pair(text: str) -> str:
    """Two letters that stand side by side in `text`, none of them half a character."""
    return next(text[i : i + 2] for i in range(2, len(text)) if text[i : i + 2].isascii() and len(text[i : i + 2]) == 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_pieces_are_the_text(model: Model, seed: int) -> None:
    whole, said = written(model, seed).text, pieces(model, seed)
    assert "".join(said) == whole
    assert len(said) > 3
    assert any("".join(pieces(model, other)) != whole for other in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stop_string_is_left_out_of_the_text_and_of_every_piece(model: Model, seed: int) -> None:
    whole = written(model, seed).text
    stop = plain_pair(whole)
    cut = written(model, seed, ("not there", stop))
    assert (cut.text, cut.reason) == (whole[: whole.index(stop)], "stop")
    assert "".join(pieces(model, seed, ("not there", stop))) == cut.text


def test_a_row_that_ends_keeps_its_half_character(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    script = [*b"Mill", 0xC3, model.end_ids[0]]  # the first of the two bytes of a letter, and no second
    monkeypatch.setattr("triptych.generate.writing.stream", lambda *_, **__: iter([[(0, token)] for token in script]))
    assert written(model, 0).text == "".join(pieces(model, 0)) == "Mill\N{REPLACEMENT CHARACTER}"
    assert written(model, 0).reason == "end"


def test_the_first_of_several_stop_strings_counts() -> None:
    assert before_stop("one two three", ("three", "two")) == "one "
    assert before_stop("one two three", ("one",)) == ""
    assert before_stop("one two three", ("four",)) is None
    assert before_stop("one two three", ()) is None


def test_without_a_tokenizer_there_is_no_text_to_stop_at() -> None:
    bare = Model(tiny.decoder())
    assert bare.generate([[3, 1, 4]], max_new_tokens=2)[0].text == ""
    with pytest.raises(TextError, match="has no tokenizer"):
        bare.generate([[3, 1, 4]], max_new_tokens=2, stop=["x"])
    with pytest.raises(TextError, match="has no tokenizer"):
        bare.stream([3, 1, 4])


def test_a_run_holds_no_graph_of_its_encoder() -> None:
    state = running.start(tiny.encoder_decoder(), [[0], [0]], sources=[[3, 1, 4], [1, 5]])
    state.advance()
    assert state.cross is not None
    assert not any(store.k.requires_grad or store.v.requires_grad for store in state.cross.stores)
