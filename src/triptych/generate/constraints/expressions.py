"""Regular expressions that mean the same to the library that makes masks and to Python, which judges the texts."""

from __future__ import annotations

import re
import warnings

from triptych.errors import InputError, first_line, shown

_FLAGS = re.compile(r"\(\?([a-zA-Z-]+)[:)]")
_SPACES = r"\s\x1c-\x1f"  # what Python calls white space: four control characters more than Unicode does


def portable(pattern: str, where: str) -> str:
    r"""`pattern` as the library is to read it; a text that matches it there matches `pattern` in Python's `re` too.

    The library reads `\d` and `\w` as ASCII, Python and other validators as Unicode, so that their opposites differ.

    Raises InputError, naming `where`, for an expression that Python cannot read or the two read differently.
    """
    if not isinstance(pattern, str):
        raise InputError(f"{where} must be a regular expression, not {shown(pattern)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise InputError(f"{where}: {shown(pattern)} is no regular expression: {first_line(error)}") from None
    others = {flag for flags in _FLAGS.findall(pattern) for flag in flags if flag not in "is"}
    if others or "{," in pattern:
        what = f"the flag {min(others)}" if others else "{,N}"
        raise InputError(f"{where}: {shown(pattern)} has {what}, which is not kept; leave it out")
    return "".join(_translated(pattern, where))


def _translated(pattern: str, where: str) -> list[str]:
    """The pieces of the expression, each escape and class as the library is to read it."""
    out: list[str] = []
    inside, negated, at = False, False, 0
    while at < len(pattern):
        piece = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(piece)
        if not inside and piece == "[":
            inside, negated = True, pattern[at : at + 1] == "^"
            at += negated
            first = pattern[at : at + 1] == "]"  # a bracket that comes first is a member
            at += first
            piece = "[" + "^" * negated + r"\]" * first
        elif inside and piece == "[":
            piece = r"\["  # not the beginning of another class
        elif inside and piece == "]":
            inside = False
        elif piece in (r"\D", r"\W") or (piece in (r"\d", r"\w") and inside and negated) or (piece == r"\S" and inside):
            alike = {"d": "[^0-9]", "w": "[^0-9A-Za-z_]", "s": r"[^\s]"}[piece[1].lower()]
            problem = f"{piece} there means ASCII to some and Unicode to others"
            raise InputError(f"{where}: in {shown(pattern)} {problem}; write characters, as in {alike}")
        elif piece == r"\S":
            piece = f"[^{_SPACES}]"
        elif piece == r"\s" and inside and negated:
            piece = _SPACES
        out.append(piece)
    return out
