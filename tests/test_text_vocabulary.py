"""Tokenizers built from vocabulary files, against those transformers builds from the same files."""

import io
import json
import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece as spm
import transformers

from triptych.checkpoints.header import read_header
from triptych.errors import TextError
from triptych.text import bpe_tokenizer, from_directory, has_tokenizer
from triptych.text import sentencepiece_file as ours

CORPUS = [
    "the sun and the moon, and the old mill by the river; it's 12 o'clock",
    "She said 1984 was 3.14 times better: naïve café, Ångström, Übermut",
    "日本語のテキスト 中文 한국어 привет мир",
    "leading and trailing, CamelCase and snake_case under https://example.org",
] * 8
NASTY = [
    "", " ", "the sun", " the sun", "   the   sun  ", "It's 12345 o'clock; THEY'LL pay 3.50.", "café Ångström Übermut",
    "日本語のテキスト。中文，한국어", "🙂👩‍👩‍👧 x²", "tab\tand\nline\n\n two", "a\u00a0nbsp ﬁ ｆｕｌｌ",
    "UPPER lower Ünïcode", "under_score/path?x=1", "¿qué? ½ Ⅳ",
]  # fmt: skip
SPECIAL = {"Bert": ["[SEP]", "[MASK]"], "DebertaV2": ["[SEP]", "[MASK]"], "GPT2": ["<|endoftext|>"],
           "Qwen2": ["<|endoftext|>"], "T5": ["</s>", "<extra_id_0>", "<extra_id_99>"], "Gemma": ["<eos>"],
           "Llama": ["</s>"], "Marian": ["</s>"], "Deberta": ["[CLS]", "[MASK]"], "Whisper": ["<|en|>"],
           "GPTNeoX": ["<|padding|>"], "CodeGen": ["<|endoftext|>"], "Roberta": ["<s>", "<mask>"],
           "XLMRoberta": ["<s>", "<mask>"], "MBart50": ["<mask>", "de_DE"]}  # fmt: skip


@cache
def trained(algorithm: str, **options: Any) -> bytes:
    """A SentencePiece model of the corpus."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type=algorithm, vocab_size=options.pop("size", 150),
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def bytes_too(**more: Any) -> bytes:
    return trained("bpe", byte_fallback=True, size=420, **more)


def byte_files(*specials: str) -> dict[str, bytes]:
    made = bpe_tokenizer(CORPUS, 330)
    state = json.loads(made.backend.to_str())["model"]
    words = [token for token, _ in sorted(state["vocab"].items(), key=lambda item: item[1])]
    words = [*specials, *(word for word in words if word not in specials)]
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in state["merges"]), ""])
    return {
        "vocab.json": json.dumps({word: index for index, word in enumerate(words)}).encode(),
        "merges.txt": merges.encode(),
    }


def word_files() -> dict[str, bytes]:
    words = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({letter for text in (*CORPUS, *NASTY) for letter in text if not letter.isspace()})
    more = ["the", "sun", "##ing", "river", "cafe", "café", "##s", "angstrom", "Å"]
    return {"vocab.txt": "\n".join(dict.fromkeys([*words, *letters, *(f"##{x}" for x in letters), *more, ""])).encode()}


def numbered_files(*added: str) -> dict[str, bytes]:
    """Of a byte-level BPE, with the older list of tokens that came after it."""
    files = byte_files("<|endoftext|>")
    first = len(json.loads(files["vocab.json"]))
    return {**files, "added_tokens.json": json.dumps({text: first + n for n, text in enumerate(added)}).encode()}


def marian_files() -> dict[str, bytes]:
    source, target = trained("unigram"), trained("unigram", size=120, user_defined_symbols="ß")
    words = ["</s>", "<unk>", *(piece.text for piece in ours.parse(source).pieces[3:]), "ganz", "▁Mühle", ">>de<<"]
    words += ["<pad>"]
    return {
        "source.spm": source,
        "target.spm": target,
        "vocab.json": json.dumps({word: index for index, word in enumerate(words)}).encode(),
    }


DEBERTA = {"unk_piece": "[UNK]", "unk_id": 3, "bos_piece": "[CLS]", "bos_id": 1, "eos_piece": "[SEP]", "eos_id": 2,
           "pad_piece": "[PAD]", "pad_id": 0}  # fmt: skip
GEMMA = {"bos_piece": "<bos>", "eos_piece": "<eos>", "pad_piece": "<pad>", "pad_id": 0, "eos_id": 1, "bos_id": 2,
         "unk_id": 3, "add_dummy_prefix": False}  # fmt: skip
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
LLAMA = {"add_bos_token": True}
WHISPER = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
SPACED = {"__type": "AddedToken", "content": "<|y|>", "lstrip": True, "rstrip": False, "single_word": False,
          "normalized": False, "special": True}  # fmt: skip
#: case -> (class, its files, its config)
CASES: dict[str, tuple[str, Callable[[], dict[str, bytes]], dict[str, Any]]] = {
    "Bert": ("Bert", word_files, {}),
    "Bert cased": ("Bert", word_files, {"do_lower_case": False, "strip_accents": False}),
    "Bert no Chinese": ("Bert", word_files, {"tokenize_chinese_chars": False}),
    "GPT2": ("GPT2", lambda: byte_files("<|endoftext|>"), {}),
    "GPT2 prefix": ("GPT2", lambda: byte_files("<|endoftext|>"), {"add_prefix_space": True}),
    "Roberta": ("Roberta", lambda: byte_files(*FAIRSEQ), {}),
    "Roberta mask": (
        "Roberta",
        lambda: byte_files(*FAIRSEQ),
        {"mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "rstrip": False,
                        "single_word": False, "normalized": False, "special": True}},
    ),
    "Qwen2": ("Qwen2", lambda: byte_files("<|endoftext|>"), {}),
    "T5": ("T5", lambda: {"spiece.model": trained("unigram", **T5)}, {}),
    "T5 few": ("T5", lambda: {"spiece.model": trained("unigram", **T5)}, {"extra_ids": 7}),
    "XLMRoberta": ("XLMRoberta", lambda: {"sentencepiece.bpe.model": trained("unigram")}, {}),
    "Camembert": ("Camembert", lambda: {"sentencepiece.bpe.model": trained("unigram")}, {}),
    "DebertaV2": ("DebertaV2", lambda: {"spm.model": trained("unigram", **DEBERTA)}, {}),
    "DebertaV2 lower": (
        "DebertaV2", lambda: {"spm.model": trained("unigram", **DEBERTA)},
        {"do_lower_case": True, "split_by_punct": True}),
    "Llama": ("Llama", lambda: {"tokenizer.model": bytes_too()}, LLAMA),
    "Llama legacy": ("Llama", lambda: {"tokenizer.model": bytes_too()}, LLAMA | {"legacy": True}),
    "Llama eos": ("Llama", lambda: {"tokenizer.model": bytes_too()}, LLAMA | {"add_eos_token": True}),
    "Llama no prefix": ("Llama", lambda: {"tokenizer.model": bytes_too()}, LLAMA | {"add_prefix_space": False}),
    "Gemma": ("Gemma", lambda: {"tokenizer.model": bytes_too(**GEMMA)}, LLAMA),
    "Llama plain": ("Llama", lambda: {"tokenizer.model": bytes_too(user_defined_symbols="<u>,ab,▁x")}, {}),
    "Marian": ("Marian", marian_files, {"source_lang": "en", "target_lang": "de"}),
    "GPT2 bos": ("GPT2", lambda: byte_files("<|endoftext|>"), {"add_bos_token": True, "add_eos_token": True}),
    "GPT2 extra": (
        "GPT2", lambda: numbered_files("<new>", "<|im|>"),
        {"pad_token": "[PAD]", "additional_special_tokens": ["<|x|>", SPACED, "<|im|>"]}),
    "CodeGen": ("CodeGen", lambda: byte_files("<|endoftext|>"), {}),
    "GPTNeoX": ("GPTNeoX", lambda: byte_files("<|endoftext|>", "<|padding|>"), {}),
    "Deberta": ("Deberta", lambda: byte_files("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"), {}),
    "Whisper": ("Whisper", lambda: numbered_files(*WHISPER), {"additional_special_tokens": list(WHISPER)}),
    "MBart": ("MBart", lambda: {"sentencepiece.bpe.model": trained("unigram")}, {"src_lang": "de_DE"}),
    "MBart50": ("MBart50", lambda: {"sentencepiece.bpe.model": trained("unigram")}, {}),
}  # fmt: skip


def written(path: Path, files: dict[str, bytes], config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_ids_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, files, config = CASES[case]
    path = written(tmp_path / "files", files(), {"tokenizer_class": f"{name}Tokenizer", **config})
    mine, theirs = from_directory(path), getattr(transformers, f"{name}Tokenizer").from_pretrained(path)
    tokens = SPECIAL.get(name, ["<mask>", "</s>"])
    tokens = [*tokens, "<|y|>", "<new>", "[PAD]"] if case == "GPT2 extra" else tokens
    inside = [f"the {token} sun{token}" for token in tokens] + ([] if case == "GPT2 bos" else [tokens[0] * 2])
    for text in [*NASTY, *inside, *CORPUS[:4]]:
        ids = theirs(text).input_ids
        assert mine.encode(text) == ids, text
        assert mine.encode(text, special=False) == theirs(text, add_special_tokens=False).input_ids, text
        for skip in (True, False):
            assert mine.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip), text
        (pair,) = mine.encode_with_offsets(text, "the sun.")
        expected = theirs(text, "the sun.", return_token_type_ids=True)
        assert pair.ids == expected.input_ids, text
        assert pair.token_types == expected.token_type_ids or name == "Marian", text  # which has none
    named = {"bos": mine.bos_id, "eos": mine.eos_id, "pad": mine.pad_id, "unk": mine.unk_id, "mask": mine.mask_id,
             "cls": mine.cls_id, "sep": mine.sep_id}  # fmt: skip
    assert named == {key: getattr(theirs, f"{key}_token_id", None) for key in named}
    assert len({index for text in NASTY for index in mine.encode(text)}) > 40
    mine.save(tmp_path / "saved")
    again = from_directory(tmp_path / "saved")
    assert all(again.encode(text) == mine.encode(text) for text in NASTY)


def test_marian_language_codes_are_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, marian_files(), {"tokenizer_class": "MarianTokenizer"})
    mine = from_directory(path)
    code = mine.backend.token_to_id(">>de<<")
    assert mine.encode(">>de<< the sun") == [code, *mine.encode("the sun")]
    assert mine.decode([mine.backend.token_to_id("▁Mühle"), mine.backend.token_to_id("ganz")]) == "Mühleganz"


def test_the_class_may_be_told_by_the_model(tmp_path: Path) -> None:
    path = written(tmp_path, {"spiece.model": trained("unigram", **T5)}, {})
    with pytest.raises(TextError, match=r"the tokenizer class \'\' is not supported; supported are T5, "):
        from_directory(path)
    (path / "config.json").write_text('{"model_type": "mt5"}')
    assert from_directory(path).encode("the sun")[-1] == 1


def test_a_checkpoint_s_header_finds_the_files(tmp_path: Path) -> None:
    from cli_models import BERT

    path = written(tmp_path, word_files(), {})
    (path / "config.json").write_text(json.dumps(BERT | {"vocab_size": 500}))
    tokenizer = read_header(path).tokenizer()
    assert tokenizer.encode("the sun")[0] == 3
    (path / "vocab.txt").unlink()
    assert not has_tokenizer(path)
    assert read_header(path).tokenizer() is None
    with pytest.raises(TextError, match="no tokenizer in"):
        from_directory(path)


# ---------------------------------------------------------------- malformed files


def field(number: int, wire: int, payload: bytes) -> bytes:
    return (
        bytes([number << 3 | wire]) + payload
        if number < 16
        else bytes([(number & 15) << 3 | wire | 128, number >> 4]) + payload
    )


def sized(number: int, content: bytes) -> bytes:
    return field(number, 2, bytes([len(content)]) + content)


def sized_long(number: int, content: bytes) -> bytes:
    length = bytes([len(content) >> shift & 127 | 128 for shift in range(0, 28, 7)] + [len(content) >> 28])
    return field(number, 2, length + content)


def piece(text: bytes, score: float = -1.0, kind: int = 1) -> bytes:
    return sized(1, sized(1, text) + field(2, 5, struct.pack("<f", score)) + field(3, 0, bytes([kind])))


def model(*pieces: bytes, trainer: bytes = b"", normalizer: bytes = b"") -> bytes:
    return b"".join(pieces) + sized(2, trainer) + sized(3, normalizer)


SOUND = model(piece(b"<unk>", 0, 2), piece(b"<s>", 0, 3), piece("é".encode()), trainer=field(3, 0, b"\1"))
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has no pieces"),
    "text": (b"these are words, not a model", "wire type|needs|ends"),
    "cut in a piece": (SOUND[:12], "needs"),
    "cut in a number": (SOUND + b"\x80", "ends inside a number"),
    "length 2^62": (b"\x0a" + b"\xff" * 8 + b"\x3f", "needs 4611686018427387903 bytes"),
    "a number without end": (b"\xff" * 11, "has no end"),
    "a group": (SOUND + b"\x0b", "wire type 3"),
    "a piece that is a number": (b"\x08\x07", "a number stands where bytes belong"),
    "an empty piece": (model(piece(b"")), "a piece of 0 characters"),
    "a long piece": (b"\x0a\x84\x10\x0a\x81\x10" + b"a" * 2049, "a piece of 2049 characters"),
    "a score without a number": (model(piece(b"a", math.nan)), "the score of 'a' is not finite"),
    "not UTF-8": (model(piece(b"\xff\xfe")), "codec can't decode"),
    "a score of eight bytes": (model(sized(1, sized(1, b"a") + field(2, 1, bytes(8)))), "not a 32-bit number"),
    "algorithm 4": (model(piece(b"a"), trainer=field(3, 0, b"\4")), "algorithm is number 4"),
    "unknown past the end": (model(piece(b"a"), trainer=field(40, 0, b"\5")), "number 5 of 1"),
    "bytes for a number": (model(piece(b"a"), trainer=sized(40, b"x")), "bytes stand where"),
}  # fmt: skip


def test_the_sound_one_is_read() -> None:
    found = ours.parse(SOUND)
    assert [p.text for p in found.pieces] == ["<unk>", "<s>", "é"]
    assert found.of_kind(ours.CONTROL) == ["<s>"]
    assert (found.algorithm, found.unk_id, found.byte_fallback, found.charsmap) == (ours.UNIGRAM, 0, False, b"")
    whole = ours.parse(trained("unigram"))
    theirs = spm.SentencePieceProcessor(model_proto=trained("unigram"))
    assert [p.text for p in whole.pieces] == [theirs.id_to_piece(i) for i in range(len(theirs))]
    assert [p.score for p in whole.pieces] == [theirs.get_score(i) for i in range(len(theirs))]
    assert whole.charsmap
    assert ours.parse(bytes_too()).byte_fallback


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_models_are_refused(case: str, tmp_path: Path) -> None:
    content, says = MALFORMED[case]
    path = written(tmp_path, {"spiece.model": content}, {"tokenizer_class": "T5Tokenizer"})
    with pytest.raises(TextError, match=says) as caught:
        from_directory(path)
    assert str(caught.value).startswith(str(path / "spiece.model"))
    assert "\n" not in str(caught.value)


def test_every_cut_of_a_model_is_read_or_refused(tmp_path: Path) -> None:
    whole, path, refused = trained("unigram"), tmp_path / "x.model", 0
    for end in range(0, len(whole), 1 + len(whole) // 300):
        path.write_bytes(whole[:end])
        try:
            ours.read(path)
        except TextError:
            refused += 1
    assert refused > 100


TABLES = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")


@pytest.mark.parametrize("rule", TABLES)
def test_every_published_table_of_replacements_is_sound(rule: str) -> None:
    assert bool(ours.parse(trained("unigram", normalization_rule_name=rule)).charsmap) == (rule != "identity")


def test_a_table_that_leads_out_of_itself_is_refused() -> None:
    """The library that walks the table does not look where it leads: some of these would stop the program."""
    sound = ours.parse(trained("unigram")).charsmap
    assert ours.parse(model(piece(b"a")) + sized_long(3, sized_long(2, sound))).charsmap == sound
    size = int.from_bytes(sound[:4], "little")
    units = np.frombuffer(sound, "<u4", size // 4, 4).copy()
    first = int(np.flatnonzero((units >> 31 == 0) & (units >> 8 & 1 == 1))[3])  # one that leads to a replacement
    units[first] ^= 1 << 30
    changed = sound[:4] + units.tobytes() + sound[4 + size :]
    broken = {
        "points outside itself": changed,
        "begins outside it": sound[: 4 + size],
        "should have 2147483648 bytes": (1 << 31).to_bytes(4, "little") + sound[4:],
        "should have 0 bytes": bytes(4) + sound[4:],
        "-1 are left": b"abc",
    }
    for says, table in broken.items():
        with pytest.raises(Exception, match=says):
            ours.parse(model(piece(b"a")) + sized_long(3, sized_long(2, table)))


UNFIT: dict[str, tuple[str, dict[str, bytes], str]] = {
    "a unigram for a BPE": ("Llama", {"tokenizer.model": SOUND}, "is a unigram model, its class expects BPE"),
    "a charsmap that is none": (
        "T5", {"spiece.model": model(piece(b"a"), piece(b"b"), piece(b"</s>"), normalizer=sized(2, b"xyz"))},
        "its table of replacements"),
    "a vocabulary with a gap": ("GPT2", {"vocab.json": b'{"a": 0, "b": 2}', "merges.txt": b""}, "are not 0 to 1"),
    "a negative number": ("GPT2", {"vocab.json": b'{"a": -1}', "merges.txt": b""}, "are not 0 to 0"),
    "a huge number": ("GPT2", {"vocab.json": b'{"a": 1e400}', "merges.txt": b""}, "are not 0 to 0"),
    "a list": ("GPT2", {"vocab.json": b"[]", "merges.txt": b""}, "holds a JSON list"),
    "no JSON": ("GPT2", {"vocab.json": b"{", "merges.txt": b""}, "is not JSON"),
    "a bomb": ("GPT2", {"vocab.json": b"[" * 200_000, "merges.txt": b""}, "is not JSON"),
    "a merge of one": ("GPT2", {"vocab.json": b'{"a": 0}', "merges.txt": b"a\n"}, "'a' is not a pair"),
    "a merge into nothing": (
        "GPT2", {"vocab.json": b'{"a": 0, "b": 1}', "merges.txt": b"a b\n"}, "'a b' is not a pair"),
    "no UTF-8": ("Bert", {"vocab.txt": b"\xff\n"}, "is not UTF-8"),
    "no unknown": ("Bert", {"vocab.txt": b"[CLS]\n[SEP]\n"}, r"has no '\[UNK\]'"),
    "an unknown class": ("Bird", {"vocab.txt": b"[CLS]\n"}, "the tokenizer class 'Bird' is not supported"),
    "no separator": ("Roberta", {"vocab.json": b'{"a": 0}', "merges.txt": b""}, "has no '</s>'"),
    "Marian without numbers": ("Marian", {"source.spm": SOUND}, "vocab.json is missing"),
    "Marian without unknown": ("Marian", {"source.spm": SOUND, "vocab.json": b'{"a": 0}'}, "has no '<unk>'"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_files_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    name, files, says = UNFIT[case]
    path = written(tmp_path, files, {"tokenizer_class": f"{name}Tokenizer"})
    with pytest.raises(TextError, match=says) as caught:
        from_directory(path)
    assert "\n" not in str(caught.value)


def refused_counts() -> Sequence[object]:
    return (-1, "many", 1 << 20)


@pytest.mark.parametrize("count", refused_counts())
def test_a_count_of_sentinels_is_judged_first(count: object, tmp_path: Path) -> None:
    files = {"spiece.model": trained("unigram", **T5)}
    with pytest.raises(TextError, match="extra_ids is"):
        from_directory(written(tmp_path, files, {"tokenizer_class": "T5Tokenizer", "extra_ids": count}))
