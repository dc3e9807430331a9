"""Sets of characters as the `tokenizers` library sees them, for the tokenizer of a page.

The library's crates and a browser follow different versions of Unicode, so a class such as `\\p{L}` does not hold the
same characters in both.  Each class that a tokenizer uses is therefore read from the library itself, by one call over
all characters; of the planes without characters and those for private use the first stands for the others.  A set is
written as a flat list of numbers, first how many code points to skip and then how many belong to it, again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

from tokenizers import Regex, normalizers, pre_tokenizers

Packed = list[int]

#: First code point -> last one, of the planes where all but the last two code points are alike.
_ALIKE = {0xE1000: 0xEFFFD} | {plane << 16: plane << 16 | 0xFFFD for plane in (*range(4, 14), 15, 16)}


def pack(members: Iterable[str]) -> Packed:
    """The set of the characters `members`, in any order, as skips and lengths."""
    packed: Packed = []
    end = 0
    for code in sorted(set(map(ord, members))):
        after = _ALIKE.get(code, code) + 1
        if packed and code == end:
            packed[-1] += after - code
        else:
            packed += [code - end, after - code]
        end = after
    return packed


@cache
def characters(without: str = "") -> str:
    """Every character but surrogates and those in `without`, by code point; one for all that are alike in a plane."""
    codes = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000), *_ALIKE]
    codes += [plane << 16 | low for plane in range(4, 17) for low in (0xFFFE, 0xFFFF)]
    text = "".join(map(chr, sorted(codes)))
    return text.translate(dict.fromkeys(map(ord, without)))


@cache
def of_regex(source: str) -> Packed:
    """The characters that the regular expression `source` matches; it has to match one character at a time."""
    rest = set(normalizers.Replace(Regex(f"(?:{source})+"), "").normalize_str(characters()))
    return pack(char for char in characters() if char not in rest)


@cache
def active_in_unicode_forms() -> Packed:
    """The characters that NFC, NFD, NFKC or NFKD can change, or move, or join with a neighbour.

    They are those with a decomposition, the parts of decompositions, and those with a combining class.  What lies
    between two others is normalized by itself.  A browser that knows more characters leaves those out by this set; the
    behaviour of the characters inside is fixed by the stability policy of Unicode.
    """
    active: set[str] = set()
    for form in (normalizers.NFD(), normalizers.NFKD()):
        for char, result in _results(form, "\n"):
            if result != char:
                active.update(char, result)
    # U+0345 has the highest combining class of all, so every character that has one is moved in front of it.
    active.update(char for char, result in _results(normalizers.NFD(), "\n", "\u0345") if result[0] != "\u0345")
    return pack(active)


@cache
def lowered() -> Packed:
    """The characters with another lower case."""
    return pack(char for char, result in _results(normalizers.Lowercase(), "\n") if result != char)


@cache
def accents(bert: bool) -> Packed:
    """The marks that are removed: by BERT's normalizer, or by `StripAccents`."""
    strip = _bert(strip_accents=True) if bert else normalizers.StripAccents()
    return pack(char for char, result in _results(strip, "\n") if not result)


@cache
def cleaned(bert: bool) -> tuple[Packed, Packed]:
    """What BERT's normalizer, or `Nmt`, removes, and what it turns into spaces."""
    results = list(_results(_bert(clean_text=True) if bert else normalizers.Nmt(), "a"))
    return (
        pack(char for char, result in results if not result),
        pack(char for char, result in results if result == " " != char),
    )


@cache
def ideographs() -> Packed:
    """The characters around which BERT's normalizer puts spaces."""
    apart = _results(_bert(handle_chinese_chars=True), "a")
    return pack(char for char, result in apart if result == f" {char} ")


def _bert(**does: bool) -> normalizers.Normalizer:
    """BERT's normalizer, which does this alone."""
    off = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}
    return normalizers.BertNormalizer(**off | does)


def _results(normalizer: normalizers.Normalizer, separator: str, before: str = "") -> Iterator[tuple[str, str]]:
    """Every character but the `separator`, and what `normalizer` makes of `before` and the character."""
    text = separator.join(before + char for char in characters(separator))
    return zip(characters(separator), normalizer.normalize_str(text).split(separator), strict=True)


@cache
def white_space() -> Packed:
    """What the library takes for white space outside regular expressions."""
    split = pre_tokenizers.WhitespaceSplit().pre_tokenize_str(characters())
    rest = {char for piece, _ in split for char in piece}
    return pack(char for char in characters() if char not in rest)


@cache
def set_apart(step: str) -> Packed:
    """The characters that the pre-tokenizer `Punctuation`, `Digits` or `BertPreTokenizer` splits from a letter."""
    split: pre_tokenizers.PreTokenizer = getattr(pre_tokenizers, step)()
    pieces = (piece for piece, _ in split.pre_tokenize_str("".join("a" + char for char in characters())))
    return pack(piece for piece in pieces if len(piece) == 1 and piece != "a")


@cache
def words_and_others() -> tuple[Packed, Packed]:
    """The characters of words, as `Whitespace` and added tokens that stand alone see them; what is no white space."""
    split = pre_tokenizers.Whitespace().pre_tokenize_str("".join("a" + char for char in characters()))
    alone = {piece for piece, _ in split if len(piece) == 1 and piece != "a"}
    seen = {char for piece, _ in split for char in piece}
    return pack(seen - alone), pack(alone)


def _one_for_each_cluster() -> normalizers.Normalizer:
    """A normalizer that writes `b` for each grapheme cluster of up to 5 bytes, and for each character of a longer one.

    Its compiled table replaces whatever begins with any byte; a line break stays.  The library has no other way to ask
    where a cluster ends.  (See `sentencepiece_file.check_charsmap` for the format.)
    """
    units = [0] * 1024
    units[0] = 256 << 10
    for byte in range(1, 256):
        at, leaf = 256 ^ byte, 512 if byte == 10 else 513
        units[at] = (at ^ leaf) << 10 | 1 << 8 | byte
    units[512], units[513] = 0, 2  # where the replacements begin
    table = b"".join(unit.to_bytes(4, "little") for unit in units)
    return normalizers.Precompiled(len(table).to_bytes(4, "little") + table + b"\n\0b\0")


@cache
def clusters() -> dict[str, Packed]:
    """The classes of characters on which the ends of grapheme clusters depend, as far as a compiled table sees them.

    Clusters of more than 5 bytes are replaced character by character, so a difference matters only in shorter ones:
    `extend` (joins what is before it), `prepend` (what is behind it), `control`, `pictograph` (joined by U+200D), and
    for Indic conjuncts `consonant`, `linker` and `conjunct` (what may stand beside a linker).
    """
    counted = _one_for_each_cluster()
    rest = characters("\0\n\r")

    def joined(before: str, after: str, count: int) -> set[str]:
        lines = counted.normalize_str("\n".join(before + char + after for char in rest)).split("\n")
        return {char for char, line in zip(rest, lines, strict=True) if len(line) == count}

    extend = joined("a", "", 1)
    short = set(filter(lambda char: char < "\U00010000", rest))  # a longer character and a mark have 6 bytes
    control = joined("", "\u0301", 2) & short - extend
    virama = "\u0915\u094d"
    return {
        "extend": pack(extend),
        "prepend": pack(joined("", "a", 1)),
        "control": pack(control | set("\0\n\r")),
        "pictograph": pack(joined("\u00a9\u200d", "", 3) - extend),
        "consonant": pack(joined(virama, "\u0301", 4) & short - extend - control),
        "linker": pack(joined("\u0915", "\u0937\u0301", 4) & extend),
        "conjunct": pack(joined(virama, "\u0937\u0301", 5) & extend),
    }


SETS: dict[str, Callable[[], Packed]] = {
    "unicode": active_in_unicode_forms, "lowered": lowered, "white space": white_space, "ideographs": ideographs,
    "word": lambda: words_and_others()[0], "other": lambda: words_and_others()[1],
    **{name: partial(set_apart, name) for name in ("Punctuation", "Digits", "BertPreTokenizer")},
    **{f"accents {bert}": partial(accents, bert) for bert in (False, True)},
    "removed False": lambda: cleaned(False)[0], "spaces False": lambda: cleaned(False)[1],
    "removed True": lambda: cleaned(True)[0], "spaces True": lambda: cleaned(True)[1],
}  # fmt: skip
"""What the steps of a tokenizer name."""
