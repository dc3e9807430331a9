"""What do pages of a cache save, and what does reuse of a prompt?  (Lecture L4 12.9; Kwon et al. 2023)

Requests with one beginning run on the engine.  After each step a table of small pages is laid over the keys that its
cache has: rows point to pages, share those of their common beginning, and copy a shared page before they write to it.
Read through the table, the keys must be those of the engine, whose own pages are larger.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from triptych.generate import Engine, LiveRow, Request
from triptych.nn import Transformer, new
from triptych.page import MatrixSection, TableSection
from triptych.spec import RopeSpec
from .lab import Check, Findings, Lab, Setup, clause, size
from .small_models import block, curve, decoder

VOCAB, WIDTH, HEADS = 53, 32, 4


class PagedCacheLab(Lab):
    name = "paged-cache"

    rows: int = size(6, f"requests that begin alike, 2 to {VOCAB // 2}", least=2, most=VOCAB // 2, full=16)
    shared: int = size(43, "tokens of the common beginning; the engine reuses 8 or more", full=203)
    own: int = size(9, "tokens that each prompt has of its own", full=21)
    new: int = size(24, "tokens written by the longest; others write less", full=96)
    page: int = size(16, "tokens of a page")

    def findings(self, setup: Setup) -> Findings:
        module, prompts = model(setup.seed), self.prompts_of(setup.seed)
        setup.progress(f"{self.rows} requests, each prompt computed")
        plain = self.write(module, prompts, reuse=False)
        setup.progress("the same with reuse, and pages laid over the cache")
        reused = self.write(module, prompts, reuse=True)
        setup.progress("controls: pages that are not copied, and prompts that share nothing")
        careless = self.write(module, prompts, reuse=True, copying=False)
        apart = self.write(module, self.prompts_of(setup.seed, alike=False), reuse=True)
        whole = self.rows * (self.shared + self.own)
        _, distinct, slots, places = reused.fullest
        texts = [[row.new for row in written.rows] for written in (plain, reused)]
        inside = int(self.shared % self.page > 0)  # whether the page in which rows part is shared, and not full
        own, spare = self.shared + self.rows * self.own, 2 * self.rows * self.page
        filled, least = places / (distinct + spare), 1.0 / (1 + spare / distinct)
        yield clause(
            f"The keys and values of a common beginning are computed once and taken over: {reused.computed:,}"
            f" prompt tokens in place of {plain.computed:,}, and no token of a text changes. Control: prompts that"
            " share nothing reuse nothing.",
            Check("tokens that differ with reuse", sum(a != b for a, b in zip(*texts, strict=True)), most=0),
            Check("prompt tokens computed without reuse, over all of them", plain.computed / whole, 1.0, 1.0),
            Check("prompt tokens computed with reuse, over those that differ", reused.computed / own, 1.0, 1.0),
            Check("tokens reused by prompts that share nothing", sum(row.reused for row in apart.rows), most=0),
            instead="Reuse does not do what it should",
        )
        yield clause(
            "Rows point to the same full pages; the page in which they part is copied, before one of them writes"
            f" to it (copied: {reused.pages.copies}). Every key read through the pages is the engine's."
            f" Control: without the copy {careless.wrong:,} keys are another row's.",
            Check("keys that differ when read through the pages", reused.wrong, most=0),
            Check("pages copied before a write", reused.pages.copies, inside * (self.rows - 1), self.rows),
            Check("control: keys that differ when pages are not copied before a write", careless.wrong, inside),
            instead="That pages hold the engine's keys because they are copied was not seen",
        )
        yield clause(
            f"Slots with room for the longest row take {slots:,} places, pages {places:,} for {distinct:,} tokens, the"
            " shared ones counted once: less than two pages a row are empty or copies.",
            Check("places of pages over tokens that differ, and two pages a row", filled, least, 1.0),
            Check("places of slots over places of pages", slots / places, least=1.5),
            instead="Pages do not save these places",
        )
        names = ("tokens held by rows", "tokens that differ", "places of slots", "places of pages")
        lines = {name: map(float, held) for name, held in zip(names, zip(*reused.history, strict=True), strict=True)}
        steps = range(1, len(reused.history) + 1)
        yield _table({"no reuse": plain, "reuse": reused, "reuse, nothing shared": apart})
        yield curve("Places of the cache, step by step", "step", "tokens", steps, lines)
        yield drawing([reused.pages.tables[row] for row in reused.rows], self.page)

    def prompts_of(self, seed: int, *, alike: bool = True) -> list[list[int]]:
        """One beginning and an ending of each prompt's own; not alike, each prompt begins with another id too."""
        draw = random.Random(seed)
        start = [draw.randrange(VOCAB - self.rows) for _ in range(self.shared)]
        # the first id of each ending is its own, so that prompts part exactly there
        ends = [[VOCAB - 1 - i, *(draw.randrange(VOCAB) for _ in range(self.own - 1))] for i in range(self.rows)]
        return [[*(start if alike else [end[0], *start[1:]]), *end] for end in ends]

    def write(self, module: Transformer, prompts: list[list[int]], *, reuse: bool, copying: bool = True) -> PagedRun:
        """Run all requests, with a table of pages beside the engine's cache."""
        engine, pages, done = Engine(module, reuse=reuse), KeyPages(self.page, copying), dict[LiveRow, int]()
        limits = [max(self.new * (i + 1) // self.rows, 2) for i in range(self.rows)]
        requests = [
            Request(prompt=prompt, max_new_tokens=limit, number=i, keep_slot=True)
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        rows = engine.add(*requests)
        history: list[tuple[int, int, int, int]] = []
        while engine.rows:
            engine.step()
            for row in rows:
                _follow(engine, row, rows, pages, done)
            held = sum(done.values())
            shared = sum(row.reused for row in rows)
            slots = len(rows) * max(row.limit for row in rows)
            history.append((held, held - shared, slots, pages.used * self.page))
        wrong = sum(int((pages.read(row, done[row]) != _keys(engine, row, 0)).any((1, 2, 3)).sum()) for row in rows)
        computed = sum(len(row.request.prompt) - row.reused for row in rows)
        return PagedRun(rows, computed, history, pages, wrong)


@dataclass(eq=False)
class Page:
    """Keys of all layers of up to `page` tokens, `[tokens, layers, G, K]`, and how many rows point to it."""

    keys: list[Tensor]
    rows: int = 1


@dataclass(eq=False)
class KeyPages:
    """A cache of pages: of each row, which pages it has, in the order of its tokens.

    copies   pages that were copied because a row wrote to one that others read; without `copying`, none is.
    """

    size: int
    copying: bool = True
    tables: dict[LiveRow, list[Page]] = field(default_factory=dict)
    copies: int = 0

    def share(self, row: LiveRow, source: LiveRow, length: int) -> None:
        """Row `row` begins with the first `length` tokens of `source`, in the same pages."""
        self.tables[row] = self.tables[source][: -(-length // self.size)]
        for page in self.tables[row]:
            page.rows += 1

    def write(self, row: LiveRow, position: int, keys: Tensor) -> None:
        """The keys [layers, G, K] of a row's token, on a page of its own from there on."""
        table = self.tables.setdefault(row, [])
        number, place = divmod(position, self.size)
        if number == len(table):
            table.append(Page([]))
        page = table[number]
        if page.rows > 1 and self.copying:
            page.rows -= 1
            page = table[number] = Page(page.keys[:place])
            self.copies += 1
        page.keys[place:] = [keys]

    def read(self, row: LiveRow, length: int) -> Tensor:
        """[length, layers, G, K], through the row's table."""
        return torch.stack([keys for page in self.tables[row] for keys in page.keys][:length])

    @property
    def used(self) -> int:
        """Pages that some row points to."""
        return len({id(page) for table in self.tables.values() for page in table})


class PagedRun(NamedTuple):
    """A run: its rows, prompt tokens computed, and after each step (tokens held, tokens that differ, places of slots,
    places of pages); `wrong` is how many keys differ when read through the pages."""

    rows: list[LiveRow]
    computed: int
    history: list[tuple[int, int, int, int]]
    pages: KeyPages
    wrong: int

    @property
    def fullest(self) -> tuple[int, int, int, int]:
        """Of the history, the step that holds most."""
        return max(self.history, key=lambda at: at[0])


def model(seed: int) -> Transformer:
    blocks = [block(WIDTH, HEADS, 2 * WIDTH)] * 2
    return new(decoder(VOCAB, blocks, inside=RopeSpec(width=WIDTH // HEADS)), seed).eval()


def _keys(engine: Engine, row: LiveRow, first: int) -> Tensor:
    """[tokens, layers, G, K]: what the engine's cache has of a row from `first` on."""
    keys = [engine.cache.kept(layer, row.slot)[0][:, first:] for layer in range(len(engine.cache.stores))]
    return torch.stack(keys).permute(2, 0, 1, 3)


def _follow(engine: Engine, row: LiveRow, rows: list[LiveRow], pages: KeyPages, done: dict[LiveRow, int]) -> None:
    """Write what a step added to a row to its pages; what it reused, it shares with the first row that has it."""
    first = done.get(row, 0)
    if not first and row.reused:
        source = next(other for other in rows if done.get(other, 0) >= row.reused and other is not row)
        pages.share(row, source, row.reused)
        first = row.reused
    for position, keys in enumerate(_keys(engine, row, first), first):
        pages.write(row, position, keys)
    if row.cached:
        done[row] = row.cached


def _table(ways: dict[str, PagedRun]) -> TableSection:
    rows = [
        [name, *(f"{n:,}" for n in (written.computed, *written.fullest, written.pages.copies))]
        for name, written in ways.items()
    ]
    header = ("", "prompt tokens computed", "tokens held", "that differ", "places of slots", "of pages", "pages copied")
    return TableSection("At the step that holds most", header, rows)


def drawing(tables: list[list[Page]], size: int) -> MatrixSection:
    """The pages of each row, of `size` tokens: a page that several rows have has one number."""
    numbers: dict[int, int] = {}
    for page in chain(*tables):
        numbers.setdefault(id(page), len(numbers) + 1)
    most = max(map(len, tables))
    padded = [[*table, *[None] * (most - len(table))] for table in tables]
    return MatrixSection(
        "The table of pages at the end",
        "Rows point to numbered pages; a darker page is shared. Rows keep their slots here after they end.",
        [f"row {i}" for i in range(len(tables))],
        [f"tokens {i * size}-" for i in range(most)],
        [["" if page is None else str(numbers[id(page)]) for page in table] for table in padded],
        [[0.0 if page is None else 0.9 if page.rows > 1 else 0.3 for page in table] for table in padded],
    )
