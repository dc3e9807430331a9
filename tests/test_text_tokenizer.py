"""Tokenizers: the same ids as transformers, exact ways back, and files that other tools open."""

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import test_text_vocabulary as vocabularies
from cli_models import Captured
from triptych.checkpoints.header import read_header
from triptych.errors import InputError, TextError
from triptych.text import (
    ENCODER,
    SEQ2SEQ,
    RenderedPrompt,
    Specials,
    SpecialsLayout,
    Tokenizer,
    bpe_tokenizer,
    byte_tokenizer,
    character_tokenizer,
    corpus_cuts,
    from_directory,
    sentencepiece_file,
    tokenizer_limits,
    word_tokenizer,
)

ROMEO = "But, soft! what light through yonder window breaks\nIt is the east, and Juliet is the sun.\n" * 7
NASTY = [
    "",
    " ",
    "\n\n  \t x",
    "I'll, you've; don't -- o'er 'tis\n",
    "year 2024, 3.14159 and 1234567",
    "café naïve — “quoted” …",
    "日本語のテキスト 🙂👩‍👩‍👧",
    "\r\nwindows\r\n",
    "é",
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)

MADE = {
    "bytes": byte_tokenizer(),
    "characters": character_tokenizer(ROMEO),
    "bpe": bpe_tokenizer([ROMEO], 300),
    "words": word_tokenizer([ROMEO], 90),
    "seq2seq": bpe_tokenizer([ROMEO], 290, SEQ2SEQ),
    "encoder": byte_tokenizer(ENCODER),
}


# -- new vocabularies -------------------------------------------------------------------------------------------------


@given(TEXTS)
@settings(max_examples=60, deadline=None)
def test_bytes_and_bpe_come_back_exactly(text: str) -> None:
    for made in (MADE["bytes"], MADE["bpe"], MADE["seq2seq"]):
        assert made.decode(made.encode(text)) == text


@given(st.text(st.sampled_from(sorted(set(ROMEO)))))
@settings(max_examples=60, deadline=None)
def test_characters_come_back_exactly_within_their_alphabet(text: str) -> None:
    made = MADE["characters"]
    ids = made.encode(text)
    assert made.decode(ids) == text
    assert len(ids) == len(text)


def test_a_byte_is_its_own_id() -> None:
    made = byte_tokenizer()
    assert made.encode("aé€🙂") == list("aé€🙂".encode())
    assert (made.vocab_size, made.eos_id, made.stop_ids) == (257, 256, frozenset({256}))


def test_a_character_outside_the_alphabet_is_unknown_each_time() -> None:
    made = character_tokenizer("abc\n")
    assert made.encode("a€€b") == [made.encode("a")[0], made.unk_id, made.unk_id, made.encode("b")[0]]
    assert made.vocab_size == 2 + 4
    with pytest.raises(TextError, match="empty"):
        character_tokenizer("")


def test_bpe_learns_merges_and_is_the_same_twice() -> None:
    one, two = bpe_tokenizer([ROMEO], 300), bpe_tokenizer([ROMEO], 300)
    assert one.files() == two.files()
    assert one.vocab_size == 300
    assert len(one.encode(ROMEO)) < len(ROMEO) / 2
    with pytest.raises(TextError, match="has 257 to 1,048,576 tokens, not 200"):
        bpe_tokenizer([ROMEO], 200)


def test_a_new_vocabulary_of_an_impossible_size_is_refused() -> None:
    for make in (bpe_tokenizer, word_tokenizer):
        for size in (-1, 0, 3, 10**10):
            with pytest.raises(TextError, match=f"vocabulary has .* to 1,048,576 tokens, not {size:,}"):
                make([ROMEO], size)


def test_layouts_frame_a_text() -> None:
    encoder, source = byte_tokenizer(ENCODER), byte_tokenizer(SEQ2SEQ)
    assert encoder.encode("a") == [encoder.cls_id, 97, encoder.sep_id]
    assert encoder.encode("a", special=False) == [97]
    assert source.encode("a") == [97, source.eos_id]
    assert encoder.decode(encoder.encode("a")) == "a"
    assert encoder.decode(encoder.encode("a"), skip_special=False) == "[CLS]a[SEP]"
    assert encoder.encode("x[MASK]", special=False) == [ord("x"), encoder.mask_id]


@pytest.mark.parametrize("name", MADE)
def test_transformers_opens_what_we_save(name: str, tmp_path) -> None:
    made = MADE[name]
    made.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # a checkpoint has one beside it
    theirs = [
        AutoTokenizer.from_pretrained(tmp_path),
        PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")),
    ]
    again = from_directory(tmp_path)
    for text in [*NASTY, ROMEO]:
        ours = made.encode(text)
        assert again.encode(text) == ours
        for other in theirs:
            assert other(text).input_ids == ours
    for role in ("eos", "pad", "mask", "cls"):
        assert getattr(theirs[0], f"{role}_token_id") == getattr(made, f"{role}_id") == getattr(again, f"{role}_id")


# -- ids to text ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 299), max_size=40))
@settings(max_examples=80, deadline=None)
def test_a_stream_gives_the_text_of_any_ids(ids: list[int]) -> None:
    made = MADE["bpe"]
    stream = made.stream()
    assert "".join([*map(stream.put, ids), stream.flush()]) == made.decode(ids)


def test_a_stream_waits_for_whole_characters() -> None:
    stream = byte_tokenizer().stream()
    assert [stream.put(byte) for byte in "é🙂!".encode()] == ["", "é", "", "", "", "🙂", "!"]
    assert stream.put(0xF0) + stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.put(ord("a")) == "a"


def test_a_stream_keeps_spaces_that_a_decoder_strips_at_the_start() -> None:
    vocab = {"<unk>": 0, "▁the": 1, "▁sun": 2, "s": 3, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = Tokenizer(backend)
    ids = [1, 2, 3, *(4 + byte for byte in "é".encode()), 1]
    stream = made.stream()
    assert [stream.put(token) for token in ids] == ["the", " sun", "s", "", "é", " the"]
    assert made.tokens(ids) == ["␣the", "␣sun", "s", "<0xC3>", "<0xA9>", "␣the"]


def test_tokens_are_readable() -> None:
    made = byte_tokenizer()
    assert made.tokens([*"a \n\té".encode(), 256, 999]) == [
        *("a", "␣", "⏎", "⇥", "\\xc3", "\\xa9", "<|endoftext|>", "<999>"),
    ]
    words = bpe_tokenizer(["the sun the sun " * 9], 270)
    assert "␣sun" in words.tokens(words.encode("the sun"))


# -- framing ----------------------------------------------------------------------------------------------------------


def test_bos_comes_once() -> None:
    made = byte_tokenizer(SpecialsLayout(Specials(bos="<s>", eos="</s>"), before="bos"))
    bos = made.bos_id
    assert made.encode("hi") == [bos, *b"hi"]
    assert made.encode("<s>hi") == [bos, *b"hi"]
    assert made.encode_batch(["<s>hi", "", "no"]) == [[bos, *b"hi"], [bos], [bos, *b"no"]]
    assert made.encode("hi", special=False) == [*b"hi"]
    assert made.encode(RenderedPrompt("<s>hi")) == [bos, *b"hi"]
    assert made.encode(RenderedPrompt("hi")) == [*b"hi"]  # a template that writes no BOS means none
    both = byte_tokenizer(SpecialsLayout(Specials(bos="<|e|>", eos="<|e|>"), before="bos", after="eos"))
    assert both.encode("") == [256, 256]  # the second is EOS
    assert both.encode("<|e|>hi") == [256, *b"hi", 256]


def test_a_class_token_by_the_name_of_bos_may_come_twice() -> None:
    """As in RoBERTa: a text of an encoder is no prompt, and is read as transformers reads it."""
    made = byte_tokenizer(SpecialsLayout(Specials(bos="<s>", cls="<s>", sep="</s>"), before="cls", after="sep"))
    assert made.encode("<s>hi") == [256, 256, *b"hi", 257]


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"extra_special_tokens": ["<|x|>", "<|y|>"]}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<|x|>"]}),
        ("special_tokens_map.json", {"eos_token": "<|y|>", "additional_special_tokens": ["<|x|>", "<|y|>"]}),
        ("added_tokens.json", {"<|x|>": 257, "<|y|>": 258}),
        ("tokenizer_config.json", {"added_tokens_decoder": {
            "256": {"content": "<|endoftext|>", "lstrip": True, "rstrip": True, "normalized": False, "special": True},
            "257": {"content": "<|x|>", "lstrip": True, "single_word": True, "normalized": True, "special": False}}}),
    ],
)  # fmt: skip
def test_files_beside_a_tokenizer_add_to_it_as_in_transformers(file: str, changes: dict, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    where = tmp_path / file
    config = json.loads(where.read_text()) if where.exists() else {}
    where.write_text(json.dumps(config | changes))
    ours, theirs = from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("a <|x|> b") != byte_tokenizer().encode("a <|x|> b")
    for text in ("a <|x|> b", "<|x|>", "a<|x|>b", " <|y|>  <|endoftext|>  c"):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_id == theirs.eos_token_id


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"257": {"text": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"257": "a"}}),
        ("tokenizer_config.json", {"additional_special_tokens": "<a>"}),
        ("tokenizer_config.json", {"extra_special_tokens": [{"lstrip": True}]}),
        ("tokenizer_config.json", {"chat_template": 3}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": ["x"]}]}),
        ("added_tokens.json", {"a": "b"}),
        ("added_tokens.json", {"a": -1}),
        ("generation_config.json", {"eos_token_id": [1, "2"]}),
        ("special_tokens_map.json", "[" * 100_000),
        ("special_tokens_map.json", {"eos_token": "\ud800"}),
        ("special_tokens_map.json", "x" * 100_000),
        ("tokenizer.json", {"model": "x" * 100_000}),
        ("tokenizer.json", "[" * 100_000),
    ],
)
def test_what_is_malformed_beside_a_tokenizer_is_refused(file: str, content: object, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TextError) as refused:
        from_directory(tmp_path)
    assert str(refused.value).startswith(str(tmp_path))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < len(str(tmp_path)) + 300


def test_spaces_are_taken_back_as_transformers_does(tmp_path: Path) -> None:
    """Where the config asks for it, and never from a BPE."""
    text = "do n't , it 's ' so ' ! we 've . they 're ?"
    for made, cleaned in ((character_tokenizer(text), False), (word_tokenizer([text], 90), True)):
        made.save(tmp_path)
        file = tmp_path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"clean_up_tokenization_spaces": True}))
        ours, theirs = from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert (ours.decode(ids) != made.decode(ids)) == cleaned


def marking_tokenizer() -> Tokenizer:
    """As Llama's: a mark before each text, spaces as marks, no split into words."""
    pieces = ["<unk>", "▁", *sorted(set(ROMEO) - {" ", "\n"}), "th", "▁th", "▁the", "▁s", "un", "is"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "s"), ("u", "n"), ("i", "s")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return Tokenizer(backend)


def longest_encoded(made: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """The ids of a corpus, and the characters of the longest string that was encoded for them."""
    lengths: list[int] = []
    rows = Tokenizer._rows

    def counted(self: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return rows(self, texts, special)

    monkeypatch.setattr(Tokenizer, "_rows", counted)
    ids = made.encode_corpus(text)
    assert ids.dtype == np.int32
    return ids.tolist(), max(lengths)


@pytest.mark.parametrize("lines", ["lines", "one line"])
@pytest.mark.parametrize("name", [*MADE, "marks"])
def test_a_corpus_has_the_ids_of_its_text(name: str, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = marking_tokenizer() if name == "marks" else MADE[name]
    text = (ROMEO + "\n\n".join(NASTY)) * 3 if lines == "lines" else ROMEO.replace("\n", " ") * 20
    whole = made.encode(text, special=False)
    monkeypatch.setattr(corpus_cuts, "PART", 300)
    monkeypatch.setattr("triptych.text.tokenizer._CHARACTERS_AT_ONCE", 1000)
    ids, longest = longest_encoded(made, text, monkeypatch)
    assert ids == whole
    assert longest < 1200 < len(text)
    assert made.encode_corpus("").size == 0


def test_a_tokenizer_of_single_characters_is_cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "acgt" * 5000
    monkeypatch.setattr(corpus_cuts, "PART", 100)
    for made in (byte_tokenizer(), character_tokenizer(text)):
        ids, longest = longest_encoded(made, text, monkeypatch)
        assert ids == made.encode(text, special=False)
        assert longest <= 2 * 200 + 1


def test_a_text_without_a_place_to_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run of one letter may be cut depends on where it began, so it is not."""
    made = bpe_tokenizer(["aaaaaaaa " * 9], 262)
    monkeypatch.setattr(corpus_cuts, "PART", 100)
    assert made.encode_corpus("a" * 1001).tolist() == made.encode("a" * 1001)
    monkeypatch.setattr(corpus_cuts, "MAX_UNCUT", 1000)
    with pytest.raises(TextError, match="1,011 characters from character 100 on without a place to cut") as refused:
        made.encode_corpus("so it is\n" + "a b c d " * 12 + "so it" + "a" * 1001)
    assert "\n" not in str(refused.value)


def test_long_lines_are_counted_as_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ROMEO.replace("\n", " ")
    whole = [bpe_tokenizer([text], 300).files(), word_tokenizer([text], 90).files()]
    monkeypatch.setattr(corpus_cuts, "PART", 50)
    assert max(map(len, corpus_cuts.words_together(text))) < 70
    assert "".join(corpus_cuts.words_together(text)) == text
    assert [bpe_tokenizer([text], 300).files(), word_tokenizer([text], 90).files()] == whole


# -- directories ------------------------------------------------------------------------------------------------------


def test_a_bert_directory_has_transformers_ids(minilm_dir: Path) -> None:
    ours, theirs = from_directory(minilm_dir), AutoTokenizer.from_pretrained(minilm_dir)
    for text in [*NASTY, ROMEO]:  # ROMEO passes the 128 tokens at which this tokenizer.json would cut
        assert ours.encode(text) == theirs(text, truncation=False).input_ids
    assert len(ours.encode(ROMEO)) > 128
    assert (ours.cls_id, ours.sep_id, ours.mask_id, ours.pad_id) == (101, 102, 103, 0)


def test_a_config_adds_tokens_and_a_template_but_no_code(tmp_path) -> None:
    made = byte_tokenizer(SpecialsLayout(Specials(bos="<s>", eos="</s>"), before="bos"))
    made.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {
        "add_bos_token": False,
        "add_eos_token": True,
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "added_tokens_decoder": {"258": {"content": "<end>", "special": True}},
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes {{eos_token}}"}],
        "auto_map": {"AutoTokenizer": "evil.py"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    again = from_directory(tmp_path)
    assert again.encode("a<end>") == [256, 97, 258] == AutoTokenizer.from_pretrained(tmp_path)("a<end>").input_ids
    assert again.stop_ids == {257, 258}
    assert again.chat.render([]).text == "yes </s>"
    assert b"evil" not in again.files()["tokenizer_config.json"]
    (tmp_path / "chat_template.jinja").write_text("file")
    template = from_directory(tmp_path).chat
    assert template.source == "file"
    config["added_tokens_decoder"] = {"300": {"content": "<end>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TextError, match=r"'<end>' the id 300, the vocabulary 258"):
        from_directory(tmp_path)


def test_what_cannot_be_opened_is_named(tmp_path) -> None:
    with pytest.raises(TextError, match=r"no tokenizer in .*tokenizer\.json, or a \.gguf"):
        from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match=r"is not a tokenizer\.json"):
        from_directory(tmp_path)
    byte_tokenizer().save(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TextError, match=r"tokenizer_config\.json"):
            from_directory(tmp_path)
    with pytest.raises(InputError, match="surrogates"):
        byte_tokenizer().encode("\ud800")


SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
              "added_tokens.json", "chat_template.jinja")  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", SIDE_FILES)
def test_what_stands_in_place_of_a_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    file = tmp_path / name

    def sparse() -> None:
        with file.open("wb") as stream:
            stream.truncate(10 << 30)

    ways = {"is a pipe or a device": lambda: os.mkfifo(file), "is a directory": file.mkdir,
            "a pipe or a device": lambda: file.symlink_to("/dev/zero"), "symbolic links": lambda: file.symlink_to(name),
            "No such file": lambda: file.symlink_to("nothing"), "10,737,418,240 bytes": sparse}  # fmt: skip
    for problem, place in ways.items():
        file.unlink(missing_ok=True)
        place()
        with pytest.raises(TextError, match=problem) as refused:
            from_directory(tmp_path)
        assert str(file) in str(refused.value)
        assert "\n" not in str(refused.value)
        if file.is_dir():
            file.rmdir()


@pytest.mark.parametrize("token", [5, True, [], {}, {"lstrip": True}, {"content": 5}, ["<s>"]])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_special_token_that_is_not_a_text_is_refused(token: object, file: str, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    (tmp_path / file).write_text(json.dumps({"bos_token": token}))
    with pytest.raises(TextError, match=r"bos_token is .*, not a token; write its text") as refused:
        from_directory(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_text_needs_no_torch() -> None:
    code = "import sys, triptych.text.shakespeare, triptych.text.corpus; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False)
    assert run.returncode == 0


@pytest.mark.parametrize(
    ("part", "content", "says"),
    [
        ("model", {"type": "WordPiece", "vocab": {"a": 2**31}, "unk_token": "a", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 9}, "not an integer below"),
        ("added_tokens", [{"id": 2**32 - 1, "content": "x", "single_word": False, "lstrip": False, "rstrip": False,
                           "normalized": False, "special": True}], "not an integer below"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////w=="}, "should have 4294967295 bytes"),
        ("normalizer", {"type": "Sequence", "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": "/////w=="}]}, "should have 4294967295 bytes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelled", [False, True])
def test_what_would_end_the_program_is_refused(
    part: str, content: object, says: str, spelled: bool, tmp_path: Path
) -> None:
    """The library asks for room for 2^31 tokens, and is killed; also where every key is written letter by letter."""
    byte_tokenizer().save(tmp_path)
    raw = json.dumps(json.loads((tmp_path / "tokenizer.json").read_text()) | {part: content})
    raw = raw.replace("charsmap", "char\\u0073map") if spelled else raw
    (tmp_path / "tokenizer.json").write_text(raw)
    with pytest.raises(TextError, match=says):
        from_directory(tmp_path)


def test_a_panic_of_the_library_is_one_line(tmp_path: Path, capfd: Captured) -> None:
    """A decoder that takes five spaces off the end of an empty text ends in a panic, which is no `Exception`."""
    byte_tokenizer().save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 5}
    state["decoder"] = {"type": "Sequence", "decoders": [state["decoder"], strip]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    made = from_directory(tmp_path)
    with pytest.raises(TextError, match="cannot decode the ids: ") as refused:
        made.decode([32])
    assert "\n" not in str(refused.value)
    capfd.readouterr()  # what the library itself has to say


# -- pairs of texts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1, 5])
@pytest.mark.parametrize("name", ["encoder", "seq2seq", "words"])
def test_windows_of_a_long_second_text_are_those_of_the_library(name: str, overlap: int) -> None:
    made, question = MADE[name], "light and east"
    reference = Backend.from_str(made.backend.to_str())
    shortest = len(made.encode_with_offsets(question, "")[0].ids)
    for max_length in (shortest + overlap + 1, shortest + 9, shortest + 40, 10_000):
        reference.enable_truncation(max_length, stride=overlap, strategy="only_second")
        row = reference.encode(question, ROMEO)
        windows = made.encode_with_offsets(question, ROMEO, max_length=max_length, overlap=overlap)
        for window, expected in zip(windows, (row, *row.overflowing), strict=True):
            assert window.ids == expected.ids
            assert window.token_types == expected.type_ids
            assert window.offsets == expected.offsets
            assert window.sequence_ids == expected.sequence_ids
    for max_length, shared in ((shortest, 0), (shortest + 5, 5)):
        with pytest.raises(InputError, match="shorten the first text") as refused:
            made.encode_with_offsets(question, ROMEO, max_length=max_length, overlap=shared)
        assert "\n" not in str(refused.value)


def test_windows_in_one_thread_never_truncate_texts_in_another() -> None:
    made, wrong, stop = MADE["encoder"], [], threading.Event()
    whole = made.encode_with_offsets("who", ROMEO)[0]
    alone = made.encode(ROMEO)

    def cut() -> None:
        while not stop.is_set():
            made.encode_with_offsets("who", ROMEO, max_length=30, overlap=2)

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        for _ in range(300):
            if made.encode_with_offsets("who", ROMEO) != [whole]:
                wrong.append("pair")
            if made.encode(ROMEO) != alone:
                wrong.append("text")
    except TextError as error:
        wrong.append(str(error))
    finally:
        stop.set()
        cutter.join()
    assert not wrong


# -- tokenizer and model ----------------------------------------------------------------------------------------------


def test_a_tokenizer_must_fit_the_rows_of_its_model() -> None:
    plain, framed = byte_tokenizer(), byte_tokenizer(ENCODER)
    plain.check_rows(257)
    plain.check_rows(256)  # no text but `<|endoftext|>` gives the id 256, and such a text is refused when it is read
    with pytest.raises(TextError, match="has the token id 255, and the model has rows for 255 tokens") as refused:
        plain.check_rows(255)
    assert "\n" not in str(refused.value)
    framed.check_rows(261)
    with pytest.raises(TextError, match="puts the token id 260 around texts, and the model has rows for 259"):
        framed.check_rows(259)


def test_a_checkpoint_with_the_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 200, "hidden_size": 16,
             "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
             "max_position_embeddings": 64}  # fmt: skip
    byte_tokenizer().save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(llama))
    with pytest.raises(TextError, match="token id 255, and the model has rows for 200") as refused:
        read_header(tmp_path).tokenizer()
    assert str(tmp_path) in str(refused.value)
    (tmp_path / "config.json").write_text(json.dumps(llama | {"vocab_size": 256}))
    assert read_header(tmp_path).tokenizer() is not None


# -- limits -----------------------------------------------------------------------------------------------------------


def replace_step(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(key: str, steps: list[dict[str, object]]) -> dict[str, object]:
    return {"type": "Sequence", key: steps}


def template(*pieces: dict[str, object], ids: int = 1) -> dict[str, object]:
    special = {"x": {"id": "x", "ids": [0] * ids, "tokens": ["x"] * ids}}
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [TEXT_A, TEXT_B], "special_tokens": special}


TEXT_A: dict[str, object] = {"Sequence": {"id": "A", "type_id": 0}}
TEXT_B: dict[str, object] = {"Sequence": {"id": "B", "type_id": 0}}
SPECIAL: dict[str, object] = {"SpecialToken": {"id": "x", "type_id": 0}}
DOUBLE, INSERT = replace_step({"String": "a"}, "aa"), replace_step({"Regex": ""}, "ab")
BYTE_LEVEL: dict[str, object] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
PREPEND: dict[str, object] = {"type": "Prepend", "prepend": "x" * 500}
WORD_PIECE: dict[str, object] = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a",
                                 "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}  # fmt: skip
UNIGRAM: dict[str, object] = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b" * 1025, -1.0]],
                              "byte_fallback": False}  # fmt: skip
#: What a `tokenizer.json` may not do: the part that does it, and the message.
HOSTILE: dict[str, tuple[str, dict[str, object], str]] = {
    "replacements that feed each other": (
        "normalizer", sequence("normalizers", [DOUBLE] * 60), "make 4.61e.18 characters of one"),
    "insertions before every character": ("normalizer", sequence("normalizers", [INSERT] * 9), "characters of one"),
    "nested sequences": (
        "normalizer", sequence("normalizers", [sequence("normalizers", [DOUBLE] * 8)] * 2), "can make 2.62e.05"),
    "text in front of every text": ("normalizer", sequence("normalizers", [PREPEND] * 50), "can add 1e.05"),
    "bytes of bytes": ("pre_tokenizer", sequence("pretokenizers", [BYTE_LEVEL] * 30), "characters of one"),
    "more steps than anyone needs": (
        "normalizer", sequence("normalizers", [{"type": "NFC"}] * 257), "apply 258 steps; 256 is the limit"),
    "a decoder that doubles": ("decoder", sequence("decoders", [DOUBLE] * 60), "its decoders can make 1.15e.18"),
    "a text put twice": (
        "post_processor", sequence("processors", [template(TEXT_A, TEXT_A)] * 40), "repeats a text"),
    "special tokens by the million": (
        "post_processor", template(*[SPECIAL] * 100, TEXT_A, ids=1000), "adds 100,000 tokens"),
    "words of any length": (
        "model", WORD_PIECE | {"max_input_chars_per_word": 2**60}, "max_input_chars_per_word is 1152921504606846976"),
    "a long mark in every piece": (
        "model", WORD_PIECE | {"continuing_subword_prefix": "#" * 1000}, "continuing_subword_prefix has 1,000"),
    "a token of 65,537 characters": (
        "model", WORD_PIECE | {"vocab": {"a": 0, "b" * 65_537: 1}}, "a token of 65,537 characters"),
    "a piece of 1,025 characters": ("model", UNIGRAM, "a token of 1,025 characters; 1,024 is the limit"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_tokenizer_that_could_fill_the_memory_is_refused(case: str, tmp_path: Path) -> None:
    part, content, says = HOSTILE[case]
    byte_tokenizer().save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(state | {part: content}))
    with pytest.raises(TextError, match=says) as refused:
        from_directory(tmp_path)
    assert str(refused.value).startswith(f"the tokenizer in {tmp_path}: ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < len(str(tmp_path)) + 200


def test_a_table_with_a_long_replacement_is_refused() -> None:
    """One letter to 20,000, in a small table that the library reads."""
    units = np.zeros(512, "<u4")
    units[0], units[97] = 256 << 10, (97 | 1 << 8 | (97 ^ 300) << 10)  # the root leads to `a`, which has a value
    units[300] = 1 << 31
    table = struct.pack("<I", units.nbytes) + units.tobytes() + b"x" * 20_000 + b"\0"
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.normalizer = normalizers.Precompiled(table)
    with pytest.raises(TextError, match=r"can make 2e\+04 characters of one"):
        Tokenizer(backend)


def test_the_steps_of_albert_are_within_the_limits() -> None:
    table = sentencepiece_file.parse(vocabularies.trained("unigram", normalization_rule_name="nmt_nfkc_cf")).charsmap
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents(),
         normalizers.Lowercase(), normalizers.Precompiled(table), normalizers.Replace(Regex(" {2,}"), " ")]
    )  # fmt: skip
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    Tokenizer(backend)
    growth = tokenizer_limits.Growth()
    for step in reversed([*tokenizer_limits.steps(backend.normalizer), *tokenizer_limits.steps(backend.pre_tokenizer)]):
        growth.prepend_step(step)
    assert growth.largest == 18 * 2 * 18 * 2 * 2


@given(
    st.lists(
        st.one_of(
            st.builds(normalizers.Replace, st.text("ab", min_size=1, max_size=3), st.text("abc", max_size=3)),
            st.builds(lambda content: normalizers.Replace(Regex("[ab]+"), content), st.text("abc", max_size=2)),
            st.builds(normalizers.Prepend, st.text("ab", min_size=1, max_size=2)),
            st.sampled_from([normalizers.NFKC(), normalizers.Lowercase(), normalizers.ByteLevel()]),
        ),
        max_size=5,
    ),
    st.text("abcﷺÄ ", min_size=1, max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_no_text_grows_beyond_the_bound(steps: list[object], text: str) -> None:
    growth, chain = tokenizer_limits.Growth(), normalizers.Sequence(steps)
    for step in reversed(list(tokenizer_limits.steps(chain))):
        growth.prepend_step(step)
    assert len(chain.normalize_str(text)) <= growth.largest * len(text) + growth.added
