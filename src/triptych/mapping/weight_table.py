"""One reversible table per family: our parameter names, HF's, GGUF's, and the operations between their tensors.

    ours                                hf                                          gguf
    decoder.blocks.{i}.attn.<q,k>.*     model.layers.{i}.self_attn.<q,k>_proj.*     blk.{i}.attn_<q,k>.*|rope_permute
    decoder.blocks.{i}.attn.(q,k,v).*   transformer.h.{i}.attn.c_attn.*|transpose   blk.{i}.attn_qkv.*
    -                                   model.layers.{i}.self_attn.rotary.inv_freq  -      # computed from the config
    [MaskedLMHead]
    head.proj.bias                      lm_head.bias|spare                          -      # why it need not be equal

`{i}` runs over the blocks, `{e}` over the experts of a mixture, `*` over weight and bias; rows of parameters the spec
does not have fall away.  `<q,k>` in every column stands for a row with `q` and one with `k`.  Several names of ours in
brackets are one stored tensor, split along its rows; so are all experts where only our column says `{e}`.  `-` in our
column is a tensor that is known and not needed, for the reason in the comment; `-` elsewhere, a name that format lacks.
Two rows for one of our names are duplicates: the first one present is loaded, the others must equal it, the first is
written.  One marked `spare` is written too, and is not compared when the first one is present.  `[Part]` opens rows for
models that have such a part, `[tie:name]` for those in which that parameter shares another's tensor, `[own:name]` where
it has its own and `[as:naming]` for models of that `naming`.  A format without names for a family needs no column.
"""

import re
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

FileFormat = Literal["hf", "gguf"]


@dataclass(frozen=True)
class WeightTableRow:
    """One line of a table: patterns with `{i}` and `*`, and the names of the ops of each format."""

    ours: tuple[str, ...]  # empty: known and not needed
    hf: str | None
    gguf: str | None
    hf_ops: tuple[str, ...] = ()
    gguf_ops: tuple[str, ...] = ()
    part: str | None = None  # only for models with such a part, tie or naming
    note: str = ""

    def column(self, kind: FileFormat) -> tuple[str | None, tuple[str, ...]]:
        return (self.hf, self.hf_ops) if kind == "hf" else (self.gguf, self.gguf_ops)


WeightTable = tuple[WeightTableRow, ...]


def table(text: str) -> WeightTable:
    """The rows of the three-column text described above."""
    rows, part = [], None
    for line in chain.from_iterable(map(_spelled_out, text.splitlines())):
        body, _, note = line.partition("#")
        columns = body.split()
        if len(columns) == 1:
            part = columns[0].strip("[]")
        elif columns:
            ours, hf, gguf = [*columns, "-"][:3]
            (hf_name, *hf_ops), (gguf_name, *gguf_ops) = hf.split("|"), gguf.split("|")
            names = (None if hf_name == "-" else hf_name, None if gguf_name == "-" else gguf_name)
            rows.append(WeightTableRow(_several(ours), *names, tuple(hf_ops), tuple(gguf_ops), part, note.strip()))
    return tuple(rows)


def names_in(text: str) -> frozenset[str]:
    """The words of a text, without the reasons after `#` in its lines."""
    return frozenset(word for line in text.splitlines() for word in line.partition("#")[0].split())


def renamed(rows: WeightTable, old: str, new: str) -> WeightTable:
    """The rows of a family in which `new` stands for `old` in every HF name.

    GGUF names are dropped: they belong to the family the rows came from.
    """
    return tuple(replace(row, hf=row.hf and row.hf.replace(old, new), gguf=None) for row in rows)


def within(prefix: str, rows: WeightTable) -> WeightTable:
    """The rows with `prefix` before every HF name."""
    return tuple(replace(row, hf=row.hf and prefix + row.hf) for row in rows)


def of_decoder(naming: str, rows: WeightTable) -> WeightTable:
    """The rows of a family for the decoder inside a model of two: its parameters are a decoder's, `decoder.` stands
    before every HF name, and they are for models of this `naming` alone."""
    return tuple(
        replace(
            row,
            ours=tuple(name.replace("encoder.", "decoder.") for name in row.ours),
            part=row.part if row.part and row.part.startswith(("tie:", "own:")) else f"as:{naming}",
        )
        for row in within("decoder.", rows)
    )


def _spelled_out(line: str) -> list[str]:
    """`a.<q,k> x.<query,key>` -> `a.q x.query`, `a.k x.key`."""
    several = [found.split(",") for found in re.findall("<(.*?)>", line)]
    return [re.sub("<.*?>", "%s", line) % choices for choices in zip(*several, strict=True)] if several else [line]


def _several(name: str) -> tuple[str, ...]:
    """`a.(q,k).*` -> `a.q.*`, `a.k.*`; `-` -> nothing."""
    before, bracket, rest = name.partition("(")
    if not bracket:
        return () if name == "-" else (name,)
    inside, _, after = rest.partition(")")
    return tuple(before + choice + after for choice in inside.split(","))
