"""Tokenizers of every kind, and random Unicode texts, for the tests of the tokenizer of a page."""

import io
import json
import random
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from triptych.text import (
    ENCODER,
    Specials,
    Tokenizer,
    bpe_tokenizer,
    byte_tokenizer,
    character_tokenizer,
    word_tokenizer,
)
from triptych.text.gguf_tokenizer import SPLITS, byte_level_words

DOCS = Path(__file__).parent.parent / "docs"


@cache
def words() -> tuple[str, ...]:
    """The lines of our own documentation."""
    files = sorted(DOCS.rglob("*.md"))
    return tuple(line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line)


# -- texts ------------------------------------------------------------------------------------------------------------

_POOLS = (
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 .,;:!?'\"()[]{}<>#@&*-_/\\|~`^$%+=",
    "'s 't 're 've 'm 'll 'd 'S 'RE 'Ll \u2019s '\u017f '\u212a",
    " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u2028\u2029\u202f\u205f\u3000\ufeff\u200b\u180e",
    "\x00\x01\x02\x07\x08\x0e\x1b\x7f\x80\x84\x9f\xad\u2060\u2061\ufff9\ufffb\ufffd\ufffe\uffff",
    "éèêñçåøæœßẞſıİŁłŒǅǆﬁﬀﬆŉǰΐẖÅΩKℵℓ№™½²³ªºµ…‥⁇％＃ａＺ０｡ｱｶﾞﾟ㌀㍿㎏㏂①⑴⒜Ⓐ🅰𝐀𝒜𝟘ﷺﷲ",
    "αβγδΑΒΣσςΆάᾳᾲᾼῼἀἂ абвгдёйЁЙ ѴѵҐґԱաև აბგႠⴀᲐ",
    "\u0300\u0301\u0302\u0303\u0307\u0308\u0327\u0328\u0323\u0338\u0345\u035c\u0361\u0483\u0489\u0591\u05b0\u05b4"
    "\u064b\u0651\u0670\u0711\u0730\u093c\u094d\u0951\u09bc\u09cd\u0b3e\u0bd7\u0cd5\u0e38\u0e48\u0f39\u0f71\u0f72\u0f74"
    "\u1037\u135d\u1714\u17d2\u1dc0\u20d0\u20dd\u302a\u3099\u309a\ua66f\ua67c\U0001d165\U0001d16d\U000e0100\ufe0f\ufe0e",
    "שלום אבגדה العربية ٠١٢٣ فارسی ܐܒ ހށ \u200e\u200f\u202a\u202b\u202c\u2066\u2069 לֹא ﬡﬣיִﭏ ﺏﻷ",
    "中文漢字龍龜㐀㒸 日本語ひらがなカタカナ ゛゜がガば 한국어 각값가 豈更車 𠀀𠮷𪚥𫝀𬺰𰀀 \u2ffb 々〆〇 。、「」・ー",
    "\u1100\u1161\u11a8\u115f\u1160\ua960\ud7b0\ud7cb\u1112\u1175\uac00\uac01",
    "कखगघक्षक़त्रज्ञ়ািীুে ক্ষড়ঢ় தமிழ்ொௌ తెలుగు ಕನ್ನಡೊೋ മലയാളം ไทยทำ ລາວຳ བོད་ཡིག མ྄ ភាសាខ្មែរ မြန်မာ සිංහලෝ ",
    "😀😃🤖🚀❤️☎️©️®️👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪🇯🇵1️⃣#️⃣🧑🏿‍🚀\u200d\u200c\u20e3🏴󠁧󠁢󠁥󠁮󠁧󠁿©\u200d❤",
    "\u0378\u0530\u0600\u06dd\u070f\u08e2\u0dc7\u110bd\u1ac8\u1add\u1ae5\u20c1\u2e5d\ua7cd\ua7d2\ua7f1\u1c89\u1c8a\u088f"
    "\U00010940\U000105c9\U00016ea0\U00016eb8\U00011de0\U00016d63\U00016d67\U0001c8b0\U0001fae9\U0002fffe\U00030000"
    "\U000323b0\U00033479\U000e0001\U000e0020\U000e01ef\U000e1000\U000f0000\U00100000\U0010fffd\U0010ffff\ue000\uf8ff",
    "▁▂ĠĊģ#　_\u2581\u2581 ##a ##ing <0x0A> <0xE4> <unk> <s> </s> <pad> [CLS] [SEP] [UNK] [MASK] <|endoftext|>",
)  # fmt: skip


def random_texts(count: int, specials: tuple[str, ...] = (), seed: int = 0) -> list[str]:
    """`count` texts: mixtures of scripts, marks, emoji, controls, spaces, unassigned code points, special tokens and
    slices of our documentation; the first ones are empty, a space, and each of the `specials`."""
    draw = random.Random(seed)
    texts = ["", " ", "  ", "\n", "a" * 300, " a" * 200, *specials]
    while len(texts) < count:
        parts: list[str] = []
        pools = draw.choices(_POOLS, k=draw.randint(1, 4))
        for _ in range(draw.randint(1, 12)):
            kind = draw.random()
            if kind < 0.15:
                line = draw.choice(words())
                start = draw.randrange(len(line))
                parts.append(line[start : start + draw.randint(1, 40)])
            elif kind < 0.22 and specials:
                parts.append(draw.choice(specials))
            elif kind < 0.27:
                parts.append(chr(draw.choice((draw.randrange(0x3000), draw.randrange(0xE000, 0x110000)))))
            elif kind < 0.35:
                parts.append(draw.choice("  \t\n\u3000") * draw.randint(1, 4))
            else:
                pool = draw.choice(pools)
                start = draw.randrange(len(pool))
                run = pool[start : start + draw.randint(1, 6)]
                parts.append(run if draw.random() < 0.5 else "".join(draw.choices(pool, k=draw.randint(1, 5))))
        texts.append("".join(parts))
    return texts


# -- tokenizers -------------------------------------------------------------------------------------------------------


def _trained(backend: Backend, trainer: Callable[..., object], **options: object) -> None:
    """Train on our documentation and on random texts, so that characters of all scripts are in the vocabulary."""
    texts = [*words(), *random_texts(1000, seed=1)]
    backend.train_from_iterator(texts, trainer(show_progress=False, **options))


def _split_bpe(name: str) -> Tokenizer:
    """Byte-level BPE with the split of a family, a normalizer, and added tokens of every kind."""
    split = SPLITS[name]
    backend = Backend(models.BPE(ignore_merges=split.whole_words))
    if split.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = byte_level_words(split)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _trained(backend, trainers.BpeTrainer, vocab_size=1200, initial_alphabet=alphabet)
    backend.add_special_tokens([AddedToken("<|endoftext|>"), AddedToken("<s>", normalized=False)])
    backend.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True), AddedToken("the model", single_word=True)])
    backend.add_tokens([AddedToken("<t", normalized=False), AddedToken("Å", normalized=True)])
    special = [("<s>", backend.token_to_id("<s>"))]
    begins = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=special)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begins])
    return Tokenizer(backend, Specials(bos="<s>", eos="<|endoftext|>"))


def _roberta() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _trained(backend, trainers.BpeTrainer, vocab_size=900, initial_alphabet=alphabet, special_tokens=special)
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    backend.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return Tokenizer(backend, Specials(cls="<s>", sep="</s>"))


def _llama(scheme: str | None) -> Tokenizer:
    """BPE over characters with byte fallback, and spaces as marks: by a normalizer, or by Metaspace."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    special = ["<unk>", "<s>", "</s>", *bytes_]
    _trained(backend, trainers.BpeTrainer, vocab_size=1500, special_tokens=special, limit_alphabet=400)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if scheme is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    # The bytes were special tokens of the trainer alone.
    file = json.loads(backend.to_str())
    file["added_tokens"] = [token for token in file["added_tokens"] if token["id"] < 3]
    backend = Backend.from_str(json.dumps(file))
    backend.decoder = decoders.Sequence(after)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    return Tokenizer(backend, Specials(bos="<s>", eos="</s>", unk="<unk>"))


def _bert(lowercase: bool) -> Tokenizer:
    backend = Backend(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _trained(backend, trainers.WordPieceTrainer, vocab_size=4000, limit_alphabet=2000, special_tokens=special)
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    config = {"clean_up_tokenization_spaces": True}
    return Tokenizer(backend, Specials(unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]"), config=config)


@cache
def _pieces() -> list[tuple[str, float]]:
    """A vocabulary of a unigram model."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=800, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(words(), trainer)
    pieces: list[tuple[str, float]] = [tuple(entry) for entry in json.loads(backend.to_str())["model"]["vocab"]]
    known = {piece for piece, _ in pieces}
    every = "".join(_POOLS) + unicodedata.normalize("NFKC", "".join(_POOLS))
    return pieces + [(char, -15.0) for char in sorted(set(every) - known)]


@cache
def charsmap() -> bytes:
    """SentencePiece's own table `nmt_nfkc`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words()), model_writer=model, vocab_size=400, normalization_rule_name="nmt_nfkc",
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    from triptych.text import sentencepiece_file

    return bytes(sentencepiece_file.parse(model.getvalue()).charsmap)


def _t5() -> Tokenizer:
    backend = Backend(models.Unigram(_pieces(), unk_id=2, byte_fallback=False))
    backend.normalizer = normalizers.Precompiled(charsmap())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    special = ("<pad>", "</s>", "<unk>", "<extra_id_0>")
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", pair=None, special_tokens=[("</s>", 1)])
    return Tokenizer(backend, Specials(pad="<pad>", eos="</s>", unk="<unk>"))


def _marian() -> Tokenizer:
    """Unigram with the steps of other SentencePiece models: NFKC, regular expressions, bytes, `first`."""
    pieces = _pieces() + [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    backend = Backend(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    spaces = [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(r" {2,}|[\n\r\t]"), " ")]
    backend.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), *spaces])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("merged_with_previous"), pre_tokenizers.Metaspace("▁", "always")]
    )
    strip = decoders.Replace(Regex(r"\A +| +\z"), "")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_tokens([AddedToken("</s>", normalized=True, single_word=True, lstrip=True)])
    return Tokenizer(backend, Specials(eos="</s>", unk="<unk>"))


def _steps() -> Tokenizer:
    """Steps that no other of these tokenizers has."""
    backend = Backend(models.BPE(unk_token="<unk>", continuing_subword_prefix="##", end_of_word_suffix="</w>"))
    cleaned = [getattr(normalizers, name)() for name in ("Strip", "NFKD", "StripAccents", "Lowercase", "NFC")]
    backend.normalizer = normalizers.Sequence(cleaned)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Whitespace(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex(r"[aeiou]{2}|(?<=z)q++(?>x|xy)z?"), "contiguous"),
            pre_tokenizers.Split("s", "merged_with_next"),
            pre_tokenizers.Split(Regex(r"(?i:TH|[k-m])"), "isolated", invert=True),
            pre_tokenizers.CharDelimiterSplit("-"),
        ]
    )
    affixes = {"continuing_subword_prefix": "##", "end_of_word_suffix": "</w>"}
    _trained(backend, trainers.BpeTrainer, vocab_size=3000, special_tokens=["<unk>"], **affixes)
    backend.decoder = decoders.BPEDecoder("</w>")
    return Tokenizer(backend, Specials(unk="<unk>"))


def _letters() -> Tokenizer:
    return character_tokenizer("\n".join([*words(), *random_texts(40, seed=1)])[-300_000:])


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "characters": _letters,
    "words": lambda: word_tokenizer([*words(), *random_texts(400, seed=1)], 4000, ENCODER),
    "bytes": byte_tokenizer,
    "gpt-2": lambda: bpe_tokenizer(words(), 1000),
    **{name: partial(_split_bpe, name) for name in ("llama3", "qwen2", "tekken", "gpt-4o", "smollm")},
    "roberta": _roberta,
    "llama2": lambda: _llama(None),
    "mistral": lambda: _llama("first"),
    "bert": lambda: _bert(True),
    "bert-cased": lambda: _bert(False),
    "t5": _t5,
    "marian": _marian,
    "other steps": _steps,
}
