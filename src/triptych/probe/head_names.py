"""Attention heads by name: `(block, head)` in Python, `L4H2` where they are typed."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import SupportsIndex

from triptych.errors import InputError, ProbeError, nearest, shown
from triptych.probe.prompts import index_below
from triptych.probe.sites import sites
from triptych.spec.model import ModelSpec

HeadName = tuple[int | str, int]
"""A head: its block (or the name of its attention, "decoder.blocks.1.cross") and its number."""

_TYPED = re.compile(r"(?:(encoder|decoder|cross)[. ])?(?:[Ll](\d{1,6})[Hh](\d{1,6})|(\d{1,6})\.(\d{1,6}))")


def attention_head(spec: ModelSpec, head: HeadName) -> tuple[str, int]:
    """The name of a head's attention, and its number.  Raises InputError or ProbeError for one that is not there."""
    known = _attentions(spec)
    if not isinstance(head, Sequence) or isinstance(head, str) or len(head) != 2:
        raise InputError(f"{shown(head)} is not a head; give (block, head)")
    where, number = head
    if not isinstance(where, str | bool) and isinstance(where, SupportsIndex):  # NumPy's integers too
        where = operator.index(where)
    if isinstance(where, int) and len(spec.stacks) > 1:
        raise InputError(f'{shown(head)}: in which stack? give a name, ("decoder.blocks.{where}.cross", {number})')
    name = f"blocks.{where}.attn" if isinstance(where, int) else str(where)
    if name not in known:
        raise ProbeError(f"no attention {shown(name)} in this {spec.family} model{nearest(name, known)}")
    index = index_below(known[name], number)
    if index is None:
        raise ProbeError(f"{name} has heads 0..{known[name] - 1}, not {shown(number)}")
    return name, index


def typed_head(spec: ModelSpec, text: str) -> HeadName:
    """The head of `L4H2` or `4.2`; beside an encoder of `encoder.L4H2`, `decoder.L4H2` or `cross.L4H2`.

    Raises InputError for other texts, and with the nearest head that there is for a layer or head out of range.
    """
    found, both = _TYPED.fullmatch(text.strip()), len(spec.stacks) > 1
    stack = found[1] if found else None
    if found is None or (both and stack is None):
        how = "encoder.L4H2, decoder.L4H2 or cross.L4H2" if both else "L4H2"
        raise InputError(f"{shown(text)} is not a head; write {how}, layer and head counted from 0")
    if not both and stack not in (None, spec.layout):
        raise InputError(f"{shown(text)}: this {spec.family} model is {spec.layout} alone; write L4H2")
    layer, number = int(found[2] or found[4]), int(found[3] or found[5])
    prefix = "" if not both else "encoder." if stack == "encoder" else "decoder."
    kind = "cross" if stack == "cross" else "attn"
    of_kind = {
        name: heads for name, heads in _attentions(spec).items() if re.fullmatch(rf"{prefix}blocks\.\d+\.{kind}", name)
    }
    near = min(layer, len(of_kind) - 1)
    name = f"{prefix}blocks.{layer}.{kind}"
    heads = of_kind.get(name, of_kind[f"{prefix}blocks.{near}.{kind}"])
    if name not in of_kind or number >= heads:
        typed = f"{f'{stack}.' if both else ''}L{near}H{min(number, heads - 1)}"
        there = f"layers 0..{len(of_kind) - 1} and heads 0..{heads - 1}"
        raise InputError(f"no head {shown(text)}: there are {there}; the nearest is {typed}")
    return name, number


def head_text(head: tuple[str, int]) -> str:
    """`blocks.4.attn head 2`."""
    return f"{head[0]} head {head[1]}"


def _attentions(spec: ModelSpec) -> dict[str, int]:
    """The name of each attention and how many heads it has."""
    return {name.removesuffix(".z"): site.heads or 1 for name, site in sites(spec).items() if name.endswith(".z")}
