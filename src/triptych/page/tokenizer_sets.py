"""Sets of characters as the `tokenizers` library sees them, for the tokenizer of a page.

The library's crates and a browser follow different versions of Unicode, so a class such as `\\p{L}` does not hold the
same characters in both.  Each class that a tokenizer uses is therefore read from the library itself, by one call over
all characters; of the planes without characters and those for private use the first stands for the others.  A set is
written as a flat list of numbers, first how many code points to skip and then how many belong to it, again and again.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

from tokenizers import Regex, normalizers, pre_tokenizers

Packed = list[int]

_SEPARATOR = "\u2603"  # no normalizer changes it, or another character into it

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


def _results(normalizer: normalizers.Normalizer, before: str = "") -> Iterator[tuple[str, str]]:
    """Every character but the separator, and what `normalizer` makes of `before` and the character."""
    each = characters(_SEPARATOR)
    text = _SEPARATOR.join(before + char for char in each)
    return zip(each, normalizer.normalize_str(text).split(_SEPARATOR), strict=True)


@cache
def changes(step: str) -> dict[str, str]:
    """The characters that a normalizer changes, or BERT's with the option `step` alone, and what it makes of them."""
    bert = dict.fromkeys(("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"), False) | {step: True}
    normalizer = normalizers.BertNormalizer(**bert) if step.islower() else getattr(normalizers, step)()
    return {char: result for char, result in _results(normalizer) if result != char}


def changed(step: str, to: str | None = None) -> Packed:
    """The characters that `step` changes, or those that it changes to `to`."""
    return pack(char for char, result in changes(step).items() if to is None or result == to)


def active_in_unicode_forms() -> Packed:
    """The characters that NFC, NFD, NFKC or NFKD can change, or move, or join with a neighbour.

    They are those with a decomposition, the parts of decompositions, and those with a combining class.  What lies
    between two others is normalized by itself.  A browser that knows more characters leaves those out by this set; the
    behaviour of the characters inside is fixed by the stability policy of Unicode.
    """
    active = {part for form in ("NFD", "NFKD") for char, result in changes(form).items() for part in char + result}
    # U+0345 has the highest combining class of all, so every character that has one is moved in front of it.
    moved = {char for char, result in _results(normalizers.NFD(), "\u0345") if result[0] != "\u0345"}
    return pack(active | moved)


def _pieces(step: str) -> list[str]:
    """What a pre-tokenizer makes of every character, each behind a letter."""
    split: pre_tokenizers.PreTokenizer = getattr(pre_tokenizers, step)()
    return [piece for piece, _ in split.pre_tokenize_str("".join("a" + char for char in characters()))]


def white_space() -> Packed:
    """What the library takes for white space outside regular expressions."""
    return pack(set(characters()).difference(*_pieces("WhitespaceSplit")))


def set_apart(step: str) -> Packed:
    """The characters that the pre-tokenizer `step` splits from a letter."""
    return pack(piece for piece in _pieces(step) if len(piece) == 1 and piece != "a")


def words() -> Packed:
    """The characters of words, as `Whitespace` and added tokens that stand alone see them."""
    return pack(char for piece in _pieces("Whitespace") if len(piece) > 1 or piece == "a" for char in piece)


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
    "unicode": active_in_unicode_forms, "white space": white_space, "word": words,
    "other": partial(set_apart, "Whitespace"),
    **{name: partial(set_apart, name) for name in ("Punctuation", "Digits", "BertPreTokenizer")},
    "lowered": partial(changed, "Lowercase"), "ideographs": partial(changed, "handle_chinese_chars"),
    "accents False": partial(changed, "StripAccents", ""), "accents True": partial(changed, "strip_accents", ""),
    "removed False": partial(changed, "Nmt", ""), "spaces False": partial(changed, "Nmt", " "),
    "removed True": partial(changed, "clean_text", ""), "spaces True": partial(changed, "clean_text", " "),
}  # fmt: skip
"""What the steps of a tokenizer name; False is the normalizer of its own, True that of BERT."""


@cache
def of_name(name: str) -> Packed:
    """A set of `SETS`."""
    return SETS[name]()
