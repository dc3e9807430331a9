"""Long texts cut into parts that are encoded one by one, with the ids of the whole.

The library needs about 200 bytes for each token it makes, and a text of a hundred megabytes on one line would need more
memory than there is.  A text is therefore cut where a word ends, and only where the text around the cut, 200 characters
on either side, has the same ids cut and uncut.  A tokenizer that splits texts into words first encodes each word by
itself; one that does not (SentencePiece) is cut at spaces, which its pieces do not cross, or the ids would differ.
"""

import re
from collections.abc import Callable, Iterator

from triptych.errors import TextError

PART = 1 << 16  # characters of a part, unless there is no place to cut
MAX_UNCUT = 1 << 22  # characters without a place to cut
_CONTEXT = 200  # characters on either side of a cut that are encoded to judge it
_TRIES = 32  # matches of each pattern that are tried

#: Patterns of boundaries, the best first.  The characters that match are left out: a tokenizer that puts a space
#: before each text puts back the one that is left out.
_BOUNDARIES = (r"(?<=\w)(?=\n)", r"(?<=\w)(?= \w)", r"(?<=\w) (?=\w)", r"(?<=[^\w\s])(?=\s)", r"(?<=[^\w\s])(?=\w)")
_ANYWHERE = r"(?s)(?<=.)(?=.)"

Encode = Callable[[list[str]], list[list[int]]]
"""Texts to ids, without special tokens."""


def parts(text: str, encode: Encode, *, single_characters: bool = False) -> Iterator[str]:
    """`text` in parts of about 2^16 characters whose ids, one after the other, are those of `text`.

    `single_characters` tells that no token stands for more than one character, so that any place will do.

    Raises TextError for more than 2^22 characters without a place to cut.
    """
    boundaries = [re.compile(pattern) for pattern in (*_BOUNDARIES, *([_ANYWHERE] if single_characters else []))]
    start = 0
    while len(text) - start > PART:
        cut = _find_cut(text, start, boundaries, encode)
        if cut is None:
            break
        yield text[start : cut[0]]
        start = cut[1]
    if len(text) - start > MAX_UNCUT:
        raise TextError(
            f"the text has {len(text) - start:,} characters from character {start:,} on without a place to cut it into "
            "parts with the same tokens; put line breaks into it"
        )
    yield text[start:]


def _find_cut(text: str, start: int, boundaries: list[re.Pattern[str]], encode: Encode) -> tuple[int, int] | None:
    """The end of the part that begins at `start`, and the start of the next one."""
    for reach in (2 * PART, MAX_UNCUT):
        for boundary in boundaries:
            matches = boundary.finditer(text, start + PART, start + reach)
            for match, _ in zip(matches, range(_TRIES), strict=False):
                left = text[max(0, match.start() - _CONTEXT) : match.start()]
                right = text[match.end() : match.end() + _CONTEXT]
                whole, *two = encode([left + match[0] + right, left, right])
                if whole == two[0] + two[1]:
                    return match.span()
    return None


def words_together(text: str) -> Iterator[str]:
    """`text` in parts of about 2^16 characters, cut where a word ends and white space follows: for counting words."""
    start, end_of_word = 0, re.compile(r"(?<=\w)(?=\s)")
    while (match := end_of_word.search(text, start + PART)) is not None:
        yield text[start : match.start()]
        start = match.start()
    yield text[start:]
