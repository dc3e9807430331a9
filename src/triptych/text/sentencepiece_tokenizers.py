"""Tokenizers of SentencePiece models, each built as its class in transformers does: see `tokenizer_directory`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from triptych.errors import TextError
from . import sentencepiece_file as sentencepiece
from .sentencepiece_file import Pieces
from .side_files import read_vocab_json
from .specials import Specials

_OUTER_SPACES = r"\A +| +\z"  # `^` and `$` would match at line ends
_Entries = list[tuple[str, float]]


@dataclass(frozen=True)
class TokenizerFiles:
    """The sources of a tokenizer: vocabulary files, the `tokenizer_config.json` beside them, special tokens."""

    paths: tuple[Path, ...]
    config: Mapping[str, object]
    specials: Specials


def _unigram(entries: _Entries, pieces: Pieces, unk: int) -> Backend:
    """The unigram model of `entries`, with the control and user-defined pieces as added tokens."""
    backend = Backend(models.Unigram(entries, unk_id=unk))
    _mark_pieces(backend, pieces)
    return backend


def _mark_pieces(backend: Backend, pieces: Pieces) -> None:
    control = pieces.of_kind(sentencepiece.CONTROL)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    backend.add_tokens([AddedToken(text, normalized=False) for text in pieces.of_kind(sentencepiece.USER_DEFINED)])


def _entries(pieces: Pieces, first: int = 0) -> _Entries:
    return [(piece.text, piece.score) for piece in pieces.pieces[first:]]


def _read(files: TokenizerFiles, algorithm: int = sentencepiece.UNIGRAM) -> Pieces:
    file = files.paths[0]
    pieces = sentencepiece.read(file)
    if pieces.algorithm != algorithm:
        names = {sentencepiece.UNIGRAM: "unigram", sentencepiece.BPE: "BPE"}
        raise TextError(f"{file} is a {names[pieces.algorithm]} model, its class expects {names[algorithm]}")
    return pieces


def _by_words(backend: Backend, pieces: Pieces) -> Backend:
    """Normalize by the charsmap of the model, split at white space, and put the mark `▁` before each word."""
    if pieces.charsmap:
        backend.normalizer = normalizers.Precompiled(pieces.charsmap)
    return _marked(backend, [pre_tokenizers.WhitespaceSplit()])


def _marked(backend: Backend, first: Sequence[pre_tokenizers.PreTokenizer] | None = None) -> Backend:
    """Put the mark `▁` before each word, in a sequence after the steps `first` where these are given."""
    mark = pre_tokenizers.Metaspace()  # by default the mark is `▁`, and stands before the first word too
    backend.pre_tokenizer = mark if first is None else pre_tokenizers.Sequence([*first, mark])
    backend.decoder = decoders.Metaspace()
    return backend


def t5(files: TokenizerFiles) -> Backend:
    """The sentinels `<extra_id_99>` ... `<extra_id_0>` follow the pieces."""
    pieces, count = _read(files), files.config.get("extra_ids", 100)
    if type(count) is not int or not 0 <= count <= 1 << 16:
        raise TextError(f"{files.paths[0].parent}: extra_ids is {count!r}, not a number of sentinels (0 to {1 << 16})")
    extra = [f"<extra_id_{i}>" for i in reversed(range(count))]
    backend = _unigram(_entries(pieces) + [(text, 0.0) for text in extra], pieces, pieces.unk_id)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in extra])
    return _by_words(backend, pieces)


def xlm_roberta(files: TokenizerFiles) -> Backend:
    pieces = _read(files)
    return _by_words(_fairseq(files, pieces, files.specials.bos), pieces)


def camembert(files: TokenizerFiles) -> Backend:
    pieces, special = _read(files), files.specials
    head = [("<s>NOTUSED", 0.0), (str(special.pad), 0.0), ("</s>NOTUSED", 0.0), (str(special.unk), 0.0)]
    entries = [*head, ("<unk>NOTUSED", -100.0), *_entries(pieces, 1), (str(special.mask), 0.0)]
    return _by_words(_unigram(entries, pieces, 3), pieces)


_CODES_25 = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_CODES_52 = (
    f"{_CODES_25} af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX "
    "sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)


def mbart(files: TokenizerFiles) -> Backend:
    """As XLM-R, with the codes of 25 languages before the mask token; transformers ignores the charsmap here."""
    pieces = _read(files)
    return _by_words(_fairseq(files, pieces, files.specials.bos, _CODES_25), replace(pieces, charsmap=b""))


def mbart50(files: TokenizerFiles) -> Backend:
    """As MBart, with 52 languages; runs of spaces become one, other white space stays."""
    pieces = _read(files)
    backend = _fairseq(files, pieces, files.specials.cls, _CODES_52)
    if not isinstance(files.config.get("mask_token"), Mapping):  # an entry has its own lstrip
        backend.add_special_tokens([AddedToken(str(files.specials.mask), lstrip=True, normalized=False)])
    table = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    backend.normalizer = normalizers.Sequence([*table, normalizers.Replace(Regex(" {2,}"), " ")])
    return _marked(backend)


def _fairseq(files: TokenizerFiles, pieces: Pieces, first: str | None, codes: str = "") -> Backend:
    """fairseq's four special tokens replace the first three pieces; codes of languages precede the mask token."""
    special, languages = files.specials, codes.split()
    head = [(str(text), 0.0) for text in (first, special.pad, special.eos, special.unk)]
    tail = [(text, 0.0) for text in (*languages, str(special.mask))]
    backend = _unigram([*head, *_entries(pieces, 3), *tail], pieces, 3)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in languages])
    return backend


def deberta(files: TokenizerFiles) -> Backend:
    """Runs of white space become one space; transformers ignores the charsmap here."""
    pieces = _read(files)
    backend = _unigram(_entries(pieces), pieces, pieces.unk_id)
    lower = [normalizers.Lowercase()] if files.config.get("do_lower_case", False) else []
    spaces = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC(), normalizers.Strip(left=False)]
    backend.normalizer = normalizers.Sequence([*lower, *spaces])
    punctuation = [pre_tokenizers.Punctuation(behavior="isolated")] if files.config.get("split_by_punct", False) else []
    return _marked(backend, punctuation)


def marian(files: TokenizerFiles) -> Backend:
    """The source model splits texts, and `vocab.json` has the ids of the pieces of both languages.

    A piece that only the target model has scores below all others, so that no source text is split into it.  A piece
    without an id is not used; transformers would split it off and give it the id of the unknown token.
    """
    if files.config.get("separate_vocabs"):
        raise TextError(f"{files.paths[1].parent}: separate_vocabs is set; only a shared vocabulary is supported")
    pieces, ids, unk = _read(files), read_vocab_json(files.paths[1]), files.specials.unk
    scores = {piece.text: piece.score for piece in pieces.pieces if piece.kind == sentencepiece.NORMAL}
    below = min(scores.values(), default=0.0) - 1000.0
    order = sorted(ids, key=lambda piece: ids[piece])
    if unk not in ids:
        raise TextError(f"{files.paths[1]} has no {unk!r}")
    backend = Backend(models.Unigram([(piece, scores.get(piece, below)) for piece in order], unk_id=ids[unk]))
    codes = [word for word in order if word.startswith(">>") and word.endswith("<<")]
    backend.add_tokens([AddedToken(code, normalized=False) for code in codes])
    # SentencePiece looks up sequences of any length in its table, `Precompiled` a letter with at most one mark.  After
    # NFC both find the same replacements.
    table = [normalizers.NFC(), normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    spaces = [normalizers.Replace(Regex(_OUTER_SPACES), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence([*table, *spaces])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    named = dict.fromkeys(files.specials.named().values())
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace(text, f"{text} ") for text in named),  # the piece that follows has none
            decoders.Replace("▁", " "),
            decoders.Fuse(),
            *(decoders.Replace(f"{text}  ", f"{text} ") for text in named),
            decoders.Replace(Regex(_OUTER_SPACES), ""),
        ]
    )
    return backend


def _bpe(pieces: Pieces, unk: str | None) -> Backend:
    """A BPE whose merges are all pairs of pieces that join into a third, ordered by the id of the third."""
    ids = {piece.text: index for index, piece in enumerate(pieces.pieces)}
    ranked = []
    for piece, index in ids.items():
        ways = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = sorted(((ids[a], ids[b]), a, b) for a, b in ways if a in ids and b in ids)
        ranked += [(index, len(a), len(b), n, (a, b)) for n, (_, a, b) in enumerate(known)]
    merges = [pair for *_, pair in sorted(ranked)]
    backend = Backend(models.BPE(vocab=ids, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    _mark_pieces(backend, pieces)
    return backend


def llama(files: TokenizerFiles) -> Backend:
    """A space is put before the text unless `add_prefix_space` is off, with `legacy` also behind a special token."""
    backend = _bpe(_read(files, sentencepiece.BPE), None)
    prefix = files.config.get("add_prefix_space") in (None, True)
    scheme = "never" if not prefix else "always" if files.config.get("legacy", False) else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = bytes_to_text(prefix=prefix)
    return backend


def gemma(files: TokenizerFiles) -> Backend:
    backend = _bpe(_read(files, sentencepiece.BPE), files.specials.unk)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = bytes_to_text(prefix=False)
    return backend


def bytes_to_text(*, prefix: bool) -> decoders.Decoder:
    """The decoder of a BPE whose unknown characters are pieces of one byte; `prefix` is the space before a text."""
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
