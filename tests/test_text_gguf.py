"""The tokenizer inside a GGUF, against the files and algorithms it was converted from."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

import test_text_vocabulary as files
from triptych.checkpoints.gguf_reader import GGUFSource
from triptych.errors import TextError
from triptych.text import bpe_tokenizer, from_directory, from_gguf, sentencepiece_file, to_gguf
from triptych.text.gguf_tokenizer import SPLITS

CORPUS = [
    "",
    "Hello, world!",
    "She said it's o'er; I'LL go, you've seen THEY'RE late -- don't",
    "café naïve Ångström — “quoted” … ",
    "year 2024, 3.14159, 1234567 and 12,345.67",
    "日本語のテキスト。中文，한국어 🙂👩‍👩‍👧 é",
    "  leading,   inner    and trailing   ",
    "tabs\t\tand\nlines\n\n\nmore \n x\r\nwindows",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start |> <repo_name>",
    "def f(x):\n    return x[0]\n        # deep",
    "https://example.org/a_b?c=d&e=%20#f",
]


@pytest.fixture(scope="module")
def metadata(smollm2_gguf: Path) -> dict[str, Any]:
    return GGUFSource(smollm2_gguf).metadata


def _metadata(**fields: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


# -- byte-level BPE ---------------------------------------------------------------------------------------------------


def test_smollm2_has_the_ids_of_transformers(metadata: dict[str, Any], smollm2_gguf: Path) -> None:
    path = smollm2_gguf
    ours, theirs = from_gguf(metadata), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in CORPUS:
        assert ours.encode(text) == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text), skip_special=False) == text
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.unk_id) == (1, 2, 2, 0)
    assert ours.stop_ids == {2}
    assert ours.vocab_size == 49152


def test_smollm2_splits_digits_first_as_it_was_trained(metadata: dict[str, Any]) -> None:
    """transformers' reader of GGUF leaves out the split at digits, which decides whether spaces before one belong
    together; the published tokenizer and llama.cpp have it."""
    ours = from_gguf(metadata)
    published = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        )
    )
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*CORPUS[:8], "a \n\n 12  345", "x   7", "½  ² 8 Ⅳ"]:
        assert ours.encode(text) == published.encode(text).ids
    assert ours.tokens(ours.encode("a   12")) == ["a", "␣␣␣", "1", "2"]


def test_a_saved_gguf_tokenizer_opens_elsewhere(metadata: dict[str, Any], tmp_path) -> None:
    ours = from_gguf(metadata)
    ours.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), from_directory(tmp_path)
    for text in CORPUS:
        assert ours.encode(text) == theirs(text).input_ids == again.encode(text)
    assert theirs.chat_template == metadata["tokenizer.chat_template"]
    assert (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|im_end|>")


WORDS = "It's 12345 o'clock; THEY'LL pay 3.50 now.\n\n  Naïve   CamelCase/path x²"
#: How each known split cuts WORDS, by hand from the pattern its models were published with.
SPLIT_BY_HAND = {
    "gpt-2": "It|'s| 12345| o|'|clock|;| THEY|'|LL| pay| 3|.|50| now|.|\n\n | Naïve|  | CamelCase|/|path| x|²",
    "smollm": "It|'s| |1|2|3|4|5| o|'|clock|;| THEY|'|LL| pay| |3|.|5|0| now|.|\n\n | Naïve|  | CamelCase|/|path| x|²",
    "llama-bpe": "It|'s| |123|45| o|'clock|;| THEY|'LL| pay| |3|.|50| now|.\n\n| | Naïve|  | CamelCase|/path| x|²",
    "qwen2": "It|'s| |1|2|3|4|5| o|'clock|;| THEY|'LL| pay| |3|.|5|0| now|.\n\n| | Naïve|  | CamelCase|/path| x|²",
    "tekken": "It|'s| |1|2|3|4|5| o|'clock|;| THEY|'LL| pay| |3|.|5|0| now|.\n\n| | Naïve|  | Camel|Case|/path| x|²",
    "gpt-4o": "It's| |123|45| o|'clock|;| THEY'LL| pay| |3|.|50| now|.\n\n| | Naïve|  | Camel|Case|/path| x|²",
}


@pytest.mark.parametrize("pre", SPLIT_BY_HAND)
def test_each_split_cuts_words_as_its_models_do(pre: str) -> None:
    split = SPLITS[pre]
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns])
    assert "|".join(word for word, _ in cut.pre_tokenize_str(WORDS)) == SPLIT_BY_HAND[pre]


def test_every_name_is_one_of_the_splits_tested() -> None:
    tested = {SPLITS[name].patterns for name in SPLIT_BY_HAND}
    assert {split.patterns for split in SPLITS.values()} == tested


def _small(**changes: Any) -> dict[str, Any]:
    made = bpe_tokenizer(["the sun and the moon " * 9], 280)
    vocab = sorted(made.backend.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(made.backend.to_str())["model"]["merges"]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [token for token, _ in vocab],
        "merges": [" ".join(merge) for merge in merges],
        "token_type": [3] + [1] * (len(vocab) - 1),
        "eos_token_id": 0,
    }
    return _metadata(**{key: value for key, value in (fields | changes).items() if value is not None})


def test_an_unknown_split_is_refused_and_can_be_named() -> None:
    for pre, message in (("smolm", "did you mean 'smollm'"), ("default", "'default'"), (None, "'missing'")):
        with pytest.raises(TextError, match=message) as caught:
            from_gguf(_small(pre=pre))
        assert "llama-bpe" in str(caught.value)
    assert from_gguf(_small(pre="default"), pre="gpt-2").encode("the sun") == from_gguf(_small()).encode("the sun")


def test_frames_and_stops() -> None:
    plain = from_gguf(_small(bos_token_id=5))
    assert plain.encode("a") == plain.encode("a", special=False)
    assert from_gguf(_small(bos_token_id=5, add_bos_token=True)).encode("a")[0] == 5
    assert from_gguf(_small(bos_token_id=5, pre="llama-bpe")).encode("a")[0] == 5  # says nothing: Llama 3 means BOS
    assert from_gguf(_small(bos_token_id=5, pre="llama-bpe", add_bos_token=False)).encode("a")[0] != 5
    assert from_gguf(_small(add_eos_token=True)).encode("a")[-1] == 0
    assert from_gguf(_small(eot_token_id=7)).stop_ids == {0, 7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "'rwkv' is not supported; known are gpt2, llama, t5, bert"),
        ({"model": None}, "'missing'"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"token_type": [1, 1]}, "2 entries for 270"),
        ({"merges": ["a b c"]}, "'a b c', which is not a pair"),
        ({"merges": ["a zz"]}, "do not fit together"),
        ({"bos_token_id": 270}, "bos_token_id is 270, but there are 270"),
        ({"tokens": ["a", "a"], "token_type": None}, "'a' twice"),
    ],
)
def test_tables_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TextError, match=message):
        from_gguf(_small(**changes))


def test_llama_3_takes_a_word_that_is_a_token_whole() -> None:
    """`ignore_merges`: without it a token that no merge makes could never come out."""
    tokens = [*_small()["tokenizer.ggml.tokens"], "unmergeable"]
    fields = {"tokens": tokens, "token_type": None}
    assert from_gguf(_small(**fields, pre="llama-bpe")).encode("unmergeable") == [270]
    assert len(from_gguf(_small(**fields, pre="dbrx")).encode("unmergeable")) > 1


# -- SentencePiece ----------------------------------------------------------------------------------------------------

_PIECES = ["▁", "t", "h", "e", "s", "u", "n", "▁t", "he", "▁the", "▁s", "un", "▁sun", "th", "▁th", "su", "en", "sun"]


def _sentencepiece(**changes: Any) -> dict[str, Any]:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *_PIECES, "<end>"]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(rank) for rank in (900, *range(901, 907), *range(len(_PIECES) - 7))] + [0.0],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(_PIECES), 4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _metadata(**(fields | changes))


def _joined(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece BPE as its paper tells it: join the best-scored pair of neighbours until none is a piece."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    score = {t: s for t, s, kind in zip(tokens, metadata["tokenizer.ggml.scores"], kinds, strict=True) if kind == 1}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    bytes_of = [[part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [piece for pieces in bytes_of for piece in pieces]


@pytest.mark.parametrize("text", ["the sun", "thethesun  nuth", "sun sunsun é the", " the", "hens tuns", "een ☉"])
def test_sentencepiece_joins_the_best_pair(text: str) -> None:
    metadata = _sentencepiece()
    made, tokens = from_gguf(metadata), metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in made.encode(text)] == ["<s>", *_joined(text, metadata)]
    assert made.decode(made.encode(text)) == text


def test_sentencepiece_options() -> None:
    bare = from_gguf(_sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert bare.tokens(bare.encode("the sun")) == ["t", "he", "␣sun"]
    assert bare.decode(bare.encode(" the")) == " the"
    assert bare.encode("<end>") == [259 + len(_PIECES)]  # a user-defined token is found in text
    with pytest.raises(TextError, match="scores has 1 entries"):
        from_gguf(_sentencepiece(scores=[0.0]))


# -- unigram ----------------------------------------------------------------------------------------------------------


def _unigram(model: bytes, **changes: Any) -> dict[str, Any]:
    """A SentencePiece file as converters put it into GGUF: with rows for no token, which score -10000."""
    read = sentencepiece_file.parse(model)
    spare = [("[PAD0]", -10000.0, 5), ("[PAD1]", -10000.0, 5)]
    tokens, scores, kinds = zip(*((p.text, p.score, p.kind) for p in read.pieces), *spare, strict=True)
    fields = {"model": "t5", "tokens": list(tokens), "scores": list(scores), "token_type": list(kinds),
              "precompiled_charsmap": list(read.charsmap), "unknown_token_id": read.unk_id, "eos_token_id": 1,
              "padding_token_id": 0}  # fmt: skip
    return _metadata(**(fields | changes))


UNICODE = [
    "   ",
    "\n a  \n b ",
    "zero\u200bwidth \ufeff b",
    "▁a",
    "\u3000full ﬁ Ⅳ ½",
    "é e\u0301 ☉☉ a☉",
    "नमस्ते العربية",
]


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity", "nmt_nfkc_cf"])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_unigram_has_the_ids_of_sentencepiece(prefix: bool, single: bool, rule: str) -> None:
    how = {"add_dummy_prefix": prefix, "remove_extra_whitespaces": single, "normalization_rule_name": rule}
    model = files.trained("unigram", **files.T5, **how)
    theirs = SentencePieceProcessor(model_proto=model)
    fields = _unigram(model, add_space_prefix=prefix, remove_extra_whitespaces=single)
    ours, other = from_gguf(fields), from_gguf(fields | _metadata(remove_extra_whitespaces=not single))
    # The `tokenizers` library replaces CR LF, which is one grapheme, by one space; seen where spaces are counted.
    texts = [*files.NASTY, *UNICODE, *(text.replace("\r\n", "\n") for text in CORPUS[:8]), *files.CORPUS[:4]]
    for text in texts:
        assert ours.encode(text) == [*theirs.encode(text), 1], text
    assert any(other.encode(text) != ours.encode(text) for text in texts)
    assert ours.decode(ours.encode("the sun and")) == "the sun and"
    assert (ours.eos_id, ours.pad_id, ours.unk_id, ours.bos_id) == (1, 0, 2, None)
    again = from_gguf(to_gguf(ours, ours.vocab_size))
    assert all(again.encode(text) == ours.encode(text) for text in texts)


def test_unknown_characters_cost_what_the_lowest_piece_does_and_ten_more() -> None:
    """-1 - (50 + 10) - 1 is above -50 - 50; a row for no token, which scores -10000, must not make it lower."""
    tokens = ["<unk>", "▁", "a", "bc", "b", "c", "a☉b", "[PAD0]"]
    fields = {"model": "t5", "tokens": tokens, "scores": [0, -1, -1, -1, -50, -50, -50, -10000.0],
              "token_type": [2, *[1] * 6, 5], "unknown_token_id": 0, "add_eos_token": False}  # fmt: skip
    assert from_gguf(_metadata(**fields)).encode("a☉bc") == [1, 2, 0, 3]
    fields["token_type"] = [2, *[1] * 7]  # a piece that scores so low does lower it
    assert from_gguf(_metadata(**fields)).encode("a☉bc") == [1, 6, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"precompiled_charsmap": [9, 0, 0, 0, 1]}, "precompiled_charsmap: its table of replacements should have"),
        ({"precompiled_charsmap": ["a"]}, "precompiled_charsmap"),
        ({"unknown_token_id": 10**6}, "unknown_token_id is 1000000, but there are"),
    ],
)
def test_a_malformed_unigram_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TextError, match=message):
        from_gguf(_unigram(files.trained("unigram", **files.T5), **changes))


def test_unigram_finds_its_unknown_by_type() -> None:
    fields = _unigram(files.trained("unigram", **files.T5))
    del fields["tokenizer.ggml.unknown_token_id"]
    assert from_gguf(fields).unk_id == 2
    kinds = [1 if kind == 2 else kind for kind in fields["tokenizer.ggml.token_type"]]
    with pytest.raises(TextError, match="a unigram tokenizer needs"):
        from_gguf(fields | _metadata(token_type=kinds))


# -- there and back ---------------------------------------------------------------------------------------------------

#: What GGUF cannot describe.
UNSUPPORTED = {"Bert no Chinese", "GPT2 prefix", "DebertaV2", "DebertaV2 lower", "Llama plain", "Whisper", "MBart",
          "MBart50"}  # fmt: skip


@pytest.mark.parametrize("case", files.CASES)
def test_a_tokenizer_comes_back_from_gguf(case: str, tmp_path: Path) -> None:
    name, contents, config = files.CASES[case]
    ours = from_directory(files.written(tmp_path, contents(), {"tokenizer_class": f"{name}Tokenizer", **config}))
    if case in UNSUPPORTED:
        with pytest.raises(TextError, match="GGUF cannot describe this tokenizer"):
            to_gguf(ours, ours.vocab_size)
        return
    again = from_gguf(to_gguf(ours, ours.vocab_size + 3))
    tokens = files.SPECIAL.get(name, ["<mask>", "</s>"])
    inside = [f"the {token} sun{token}" for token in tokens] + [tokens[0] * 2]
    for text in [*files.NASTY, *UNICODE, *inside, *files.CORPUS[:4]]:
        assert again.encode(text) == ours.encode(text), text
    assert (again.eos_id, again.pad_id, again.unk_id) == (ours.eos_id, ours.pad_id, ours.unk_id)


def test_a_changed_score_or_replacement_is_another_tokenizer(tmp_path: Path) -> None:
    """Negative control of both ways: nothing of what is written is without effect."""
    ours = from_gguf(_unigram(files.trained("unigram", **files.T5)))
    fields = to_gguf(ours, ours.vocab_size)
    texts = [*files.NASTY, *UNICODE, *files.CORPUS[:4]]
    scores = fields["tokenizer.ggml.scores"]
    for change in ({"scores": scores[:3] + scores[:2:-1]}, {"precompiled_charsmap": ()}, {"add_space_prefix": False},
                   {"remove_extra_whitespaces": False}, {"add_eos_token": False}, {"unknown_token_id": 4}):  # fmt: skip
        other = from_gguf(fields | _metadata(**change))
        assert any(other.encode(text) != ours.encode(text) for text in texts), change


# -- WordPiece --------------------------------------------------------------------------------------------------------


def test_wordpiece_comes_back_from_the_spelling_of_gguf(minilm_dir: Path) -> None:
    bert = from_directory(minilm_dir)
    vocab = sorted(bert.backend.get_vocab(), key=bert.backend.token_to_id)
    special = ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
    spelled = [token if token in special else token[2:] if token.startswith("##") else f"▁{token}" for token in vocab]
    metadata = _metadata(
        model="bert",
        tokens=spelled,
        token_type=[3 if token in special else 1 for token in vocab],
        padding_token_id=0,
        unknown_token_id=100,
        cls_token_id=101,
        seperator_token_id=102,
        mask_token_id=103,
    )
    made = from_gguf(metadata)
    for text in [*CORPUS, "unaffordable ##ing [MASK] electroencephalography"]:
        assert made.encode(text) == bert.encode(text), text
    assert made.specials == bert.specials


def test_wordpiece_needs_its_special_tokens() -> None:
    with pytest.raises(TextError, match=r"no '\[CLS\]'"):
        from_gguf(_metadata(model="bert", tokens=["▁a", "b"]))
