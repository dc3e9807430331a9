"""Text out of a run: the pieces are the whole, up to the end token or before the first stop string."""

from collections.abc import Sequence
from random import Random

import pytest
import torch

import cli_models
import tiny
from triptych import generate as running
from triptych.errors import TextError
from triptych.generate.stops import StopDetector, before_stop
from triptych.model import Model, load
from triptych.text import DECODER, byte_tokenizer, word_tokenizer

WORDS = ["the old mill stands, where the river bends.", "the ship came in on the evening tide!"]
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


def scripted(script: Sequence[int], prompt: int) -> running.Rule:
    """A rule under which a row says `script` after its first `prompt` ids."""

    def rule(logits: torch.Tensor, row: Sequence[int]) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([script[len(row) - prompt]]), 0.0)

    return rule


def test_a_row_that_ends_keeps_its_half_character(model: Model) -> None:
    script = [*b"Mill", 0xC3, model.end_ids[0]]  # the first of the two bytes of a letter, and no second
    rules = [scripted(script, len(model.ids(["Mill"])[0]))]
    (found,) = model.generate(["Mill"], rules=rules)
    assert found.text == "".join(model.stream("Mill", rules=rules)) == "Mill\N{REPLACEMENT CHARACTER}"
    assert (found.ids, found.reason) == (script, "end")


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_the_newest_ids_find_every_stop_string(kind: str) -> None:
    """Against decoding all ids each time, on random texts with half characters and joined words in them."""
    tokenizer = byte_tokenizer(DECODER) if kind == "bytes" else word_tokenizer(WORDS, 90)
    random, found = Random(0), 0
    for _ in range(60):
        ids = random.choices(range(tokenizer.vocab_size), k=120)
        if kind == "bytes":
            ids = [i for char in random.choices("aé–🙂 .", k=60) for i in char.encode()]
            ids[random.randrange(len(ids))] = 0xC3
        text = tokenizer.decode(ids)
        at = random.randrange(len(text) - 4)
        stop = [text[at : at + random.randrange(1, 5)], "never there"]
        detector = StopDetector(stop, tokenizer.decode)
        for n, token in enumerate(ids, 1):
            expected = before_stop(tokenizer.decode(ids[:n]), stop) is not None
            assert detector.put(token) is expected, (stop, n)
            if expected:
                found += 1
                break
        else:
            pytest.fail("the stop string is in the text")
    assert found == 60


def test_a_stop_string_costs_the_same_at_every_token() -> None:
    tokenizer, decoded = byte_tokenizer(DECODER), 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return tokenizer.decode(ids)

    work = []
    detector = StopDetector(["never there"], decode)
    for _ in range(4):
        begun = decoded
        for token in b"the old mill stands" * 20:
            detector.put(token)
        work.append((decoded - begun) / 380)
    assert max(work[1:]) < 1.2 * work[1]
    assert max(work) < 100  # ids decoded for each id, of a stop string of 11 characters


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
    engine = tiny.engine(tiny.encoder_decoder(), [[0], [0]], [[3, 1, 4], [1, 5]])
    assert not engine.logits().requires_grad
    assert not any(store.k.requires_grad or store.v.requires_grad for store in engine.cross.stores)
