"""Perplexity of a text of one's own: the values are those of plain forwards, and each token is scored once."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cli_models
from cli_models import Captured, checkpoint, refused, said
from triptych.errors import InputError, TextError
from triptych.evaluate import Perplexity, perplexity, windows
from triptych.model import Model, create, load
from triptych.text import DECODER, Tokenizer, byte_tokenizer, word_tokenizer

TEXT = "the ship came in on the evening tide\nthe old mill stands where the river bends\n" * 2 + "é ü"


def by_hand(model: Model, rows: list[tuple[list[int], list[int]]], sources: list[str] | None = None) -> float:
    """The sum of log P of what is scored in each row, by plain forwards."""
    total = 0.0
    for i, (before, part) in enumerate(rows):
        ids = [[*before, *part[:-1]]]
        logits = model.logits(ids)[0] if sources is None else model.logits([sources[i]], ids)[0]
        scores = logits[len(before) - 1 :].double().log_softmax(-1)
        total += float(scores.gather(-1, torch.tensor(part)[:, None]).sum())
    return total


@given(st.integers(0, 40), st.integers(1, 12), st.data(), st.sampled_from([None, 99]))
def test_windows_score_each_id_once(count: int, window: int, data: st.DataObject, first: int | None) -> None:
    overlap = data.draw(st.integers(0, window - 1))
    ids = list(range(count))
    parts = list(windows(ids, first, window, overlap))
    scored = [i for _, part in parts for i in part]
    assert scored == ids[first is None :]
    for i, (before, part) in enumerate(parts):
        assert part
        assert len(before) + len(part) <= window + 1
        if i:
            assert len(before) >= overlap + 1
            assert [*before, *part] == list(range(part[0] - len(before), part[-1] + 1))
            assert len(before) + len(part) == window + 1  # as much context as fits
    if parts and first is not None:
        assert parts[0][0] == [first]


@pytest.mark.parametrize(("window", "overlap"), [(None, 0), (20, 0), (20, 7), (16, 15)])
def test_a_decoder_is_scored_as_by_plain_forwards(window: int | None, overlap: int) -> None:
    model = load(checkpoint("decoder"))
    words = model.inputs.words
    ids, first = words.encode(TEXT, special=False), words.bos_id if words.bos_id is not None else words.eos_id
    seen: list[tuple[int, int]] = []
    measured = perplexity(
        model, TEXT, window=window, overlap=overlap, max_rows=3, on_progress=lambda *at: seen.append(at)
    )
    width = window or cli_models.CONTEXT
    nats = by_hand(model, list(windows(ids, first, width, overlap)))
    assert measured.nats == pytest.approx(nats, rel=1e-5)
    assert measured == Perplexity(
        "perplexity", measured.nats, len(ids), len(ids), len(TEXT.split()), len(TEXT.encode()), width, overlap
    )
    assert measured.by_token == pytest.approx(math.exp(-nats / len(ids)), rel=1e-4)
    assert measured.by_byte == pytest.approx(math.exp(-nats / len(TEXT.encode())), rel=1e-4)
    assert math.log(measured.by_word) * measured.words == pytest.approx(-nats, rel=1e-4)
    assert measured.bits_per_byte == pytest.approx(math.log2(measured.by_byte))
    assert seen[-1] == (len(ids), len(ids))
    wrong = by_hand(model, list(windows(ids[::-1], first, width, overlap)))  # the control: another order of the ids
    assert abs(wrong - nats) > 1e-3 * abs(nats)


def test_texts_are_scored_each_by_itself() -> None:
    model = load(checkpoint("decoder"))
    texts = TEXT.splitlines()
    together, each = perplexity(model, texts), [perplexity(model, text) for text in texts]
    assert together.nats == pytest.approx(sum(one.nats for one in each), rel=1e-6)
    assert together.tokens == sum(one.tokens for one in each)
    assert abs(perplexity(model, TEXT.replace("\n", "")).nats - together.nats) > 1e-2


def test_the_first_token_is_not_scored_where_nothing_can_stand_before_it() -> None:
    plain = byte_tokenizer(DECODER)
    tokenizer = Tokenizer(plain.backend)
    model = create({"vocab_size": plain.vocab_size} | cli_models.LLAMA, tokenizer)
    measured = perplexity(model, "éa b")
    ids = tokenizer.encode("éa b", special=False)
    assert measured.nats == pytest.approx(by_hand(model, [(ids[:1], ids[1:])]), rel=1e-5)
    assert (measured.tokens, measured.text_tokens) == (len(ids) - 1, len(ids))
    with pytest.raises(InputError, match="no token to score"):
        perplexity(model, "a")


def test_an_encoder_decoder_scores_targets_beside_their_sources() -> None:
    model = load(checkpoint("encoder-decoder"))
    sources, targets = TEXT.splitlines(), TEXT.splitlines()[::-1]
    measured = perplexity(model, targets, sources=sources)
    start, ids = model.spec.start_id(), model.ids(targets, target=True)
    assert measured.nats == pytest.approx(by_hand(model, [([start], row) for row in ids], sources), rel=1e-5)
    assert measured.tokens == sum(map(len, ids)) > sum(len(text.encode()) for text in targets)  # and the end of each
    other = perplexity(model, targets, sources=sources[1:] + sources[:1])
    assert abs(other.nats - measured.nats) > 2e-5 * abs(measured.nats)


@pytest.mark.parametrize(("window", "overlap"), [(None, 0), (12, 3)])
def test_an_encoder_has_a_pseudo_perplexity(window: int | None, overlap: int) -> None:
    model = load(checkpoint("encoder"))
    words = model.inputs.words
    text = " ".join(TEXT.split())
    measured = perplexity(model, text, window=window, overlap=overlap)
    limit = window or cli_models.CONTEXT
    total, count = 0.0, 0
    for i, row in enumerate(words.encode_with_offsets(text, max_length=limit, overlap=overlap)):
        inside = [at for at, sequence in enumerate(row.sequence_ids) if sequence is not None]
        for at in inside[overlap if i else 0 :]:
            masked = [*row.ids[:at], words.mask_id, *row.ids[at + 1 :]]
            total += float(model.logits([masked])[0][at].double().log_softmax(-1)[row.ids[at]])
            count += 1
    assert (measured.kind, measured.tokens) == ("pseudo-perplexity", count)
    assert measured.tokens == len(words.encode(text, special=False))
    assert measured.nats == pytest.approx(total, rel=1e-5)
    plain = float(sum(model.logits([row.ids])[0].double().log_softmax(-1)[at, row.ids[at]]
                      for row in words.encode_with_offsets(text, max_length=limit)
                      for at in range(1, len(row.ids) - 1)))  # fmt: skip
    assert abs(plain - total) > 1e-2  # the control: nothing is masked


def test_what_has_no_perplexity_is_said(unchecked: None) -> None:
    decoder, encoder, both = map(load, map(checkpoint, ("decoder", "encoder", "encoder-decoder")))
    for wrong, message in (
        (lambda: perplexity(decoder, ""), "text 0 is empty"),
        (lambda: perplexity(decoder, []), "there is no text"),
        (lambda: perplexity(decoder, ["a", " \n"]), "text 1 is empty"),
        (lambda: perplexity(decoder, ["a", 5]), "must be strings|text"),
        (lambda: perplexity(decoder, "a b", window=0), "window"),
        (lambda: perplexity(decoder, "a b", window=73), "the model reads at most 72"),
        (lambda: perplexity(decoder, "a b", window=8, overlap=8), "leaves nothing of window=8"),
        (lambda: perplexity(decoder, "a b", overlap=-1), "overlap"),
        (lambda: perplexity(decoder, "a b", max_rows=0), "max_rows"),
        (lambda: perplexity(decoder, ["a"], sources=["b"]), "reads no sources"),
        (lambda: perplexity(encoder, ["a"], sources=["b"]), "reads no sources"),
        (lambda: perplexity(both, "a"), "give sources, one for each text"),
        (lambda: perplexity(both, ["a"], sources=["b", "c"]), "2 sources and 1 text"),
        (lambda: perplexity(both, ["a"], sources=["b"], window=8), "leave window and overlap out"),
        (lambda: perplexity("model", "a"), "model"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()
    bare = create(cli_models.BERT | {"architectures": ["BertModel"], "vocab_size": 90},
                  word_tokenizer(cli_models.WORDS, 90))  # fmt: skip
    with pytest.raises(InputError, match="no head that predicts tokens"):
        perplexity(bare, "a")
    with pytest.raises(TextError, match="no tokenizer"):
        perplexity(Model(decoder.module), "a")


@pytest.mark.parametrize("layout", ["decoder", "encoder", "encoder-decoder"])
def test_weights_that_are_no_numbers_are_said(layout: str) -> None:
    model = load(checkpoint(layout))
    with torch.no_grad():
        next(p for name, p in model.module.named_parameters() if "mlp" in name)[:] = math.nan
    with pytest.raises(InputError, match=r"not finite|are NaN"):
        perplexity(model, ["the mill"], sources=["the mill"] if layout == "encoder-decoder" else None)


# ---------------------------------------------------------------- the command


def test_the_command_measures_a_file(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    argv = ["eval", str(checkpoint("decoder")), "--data", str(tmp_path / "text.txt"), "--window", "20"]
    out, _ = said(argv, capsys)
    measured = perplexity(load(checkpoint("decoder")), TEXT, window=20)
    for figure in (f"{measured.by_token:,.4f}", f"{measured.words}", f"{measured.bits_per_byte:.4f} bits per byte"):
        assert figure in out
    answer = json.loads(said([*argv, "--overlap", "5", "--json"], capsys)[0])
    other = perplexity(load(checkpoint("decoder")), TEXT, window=20, overlap=5)
    assert answer == pytest.approx(other.to_dict())


def test_the_command_reads_sources_line_by_line(tmp_path: Path, capsys: Captured) -> None:
    lines = TEXT.splitlines()
    (tmp_path / "target.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "source.txt").write_text("\n".join(lines[::-1]), encoding="utf-8")
    model = str(checkpoint("encoder-decoder"))
    argv = ["eval", model, "--data", str(tmp_path / "target.txt"), "--source", str(tmp_path / "source.txt"), "--json"]
    answer = json.loads(said(argv, capsys)[0])
    assert answer["nats"] == pytest.approx(perplexity(load(model), lines, sources=lines[::-1]).nats)
    assert (answer["window"], answer["tokens"]) == (None, answer["text_tokens"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "give --data FILE for a perplexity, or --tasks NAMES"),
        (["--data", "{text}", "--tasks", "a"], 2, "give --data FILE for a perplexity, or --tasks NAMES"),
        (["--data", "nowhere.txt"], 1, "nowhere.txt"),
        (["--data", "{empty}"], 1, "empty.txt: holds no text"),
        (["--data", "{text}", "--limit", "5"], 2, "--limit is for --tasks"),
        (["--data", "{text}", "--source", "{two}"], 1, "one source a line"),
        (["--data", "{two}", "--source", "{two}"], 1, "reads no sources"),
        (["--data", "{text}", "--window", "100"], 1, "--window 100, and the model reads at most 72"),
        (["--data", "{text}", "--window", "8", "--overlap", "9"], 1, "leaves nothing of --window 8 to score"),
        (["--data", "{text}", "--batch_size", "4"], 2, "write --batch-size"),
        (["--data", "{text}", "--max-rows", "4"], 2, "write --batch-size"),
        (["--tasks", "a", "--num_fewshot", "4"], 2, "write --num-fewshot"),
        (["--tasks", "a", "--include_path", "."], 2, "write --include-path"),
        (["--model_args", "pretrained=gpt2", "--tasks", "a"], 2, "write MODEL without an option"),
        (["--tasks", "a", "--window", "5"], 2, "--window is for --data"),
    ],
)
def test_what_the_command_refuses(
    options: list[str], code: int, message: str, tmp_path: Path, capsys: Captured, unchecked: None
) -> None:
    files = {"text": "the ship", "empty": " \n", "two": "a\nb\n"}
    for name, content in files.items():
        (tmp_path / f"{name}.txt").write_text(content, encoding="utf-8")
    named = {name: str(tmp_path / f"{name}.txt") for name in files}
    assert message in refused(["eval", str(checkpoint("decoder")), *(o.format(**named) for o in options)], capsys, code)
