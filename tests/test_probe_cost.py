"""What reads do without, counted and not timed: copies of what was asked for, searches, taps made anew, and attention
by way of the probe."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch

import tiny
from triptych.attention import FlatKeys, Heads, Rows, plan_rows
from triptych.attention.rows import Parts
from triptych.model import Model
from triptych.probe import Plan, Read, Session, sites
from triptych.probe import reads_and_edits as plans
from triptych.probe.recording import Notes
from triptych.probe.session import ProbeTaps
from triptych.spec.masks import causal, full

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
STREAM, PATTERN = "blocks.1.resid_post", "blocks.0.attn.pattern"


class Calls:
    """How often the function `name` of `owner` is called."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.count, plain = 0, getattr(owner, name)

        def counted(*of: Any, **named: Any) -> Any:
            self.count += 1
            return plain(*of, **named)

        patch.setattr(owner, name, counted)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny.decoder())


def test_whole_reads_by_name_are_neither_searched_nor_copied(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    searches, selections = Calls(monkeypatch, fnmatch, "fnmatchcase"), Calls(monkeypatch, plans, "_selection")
    wanted = [Read(name) for name in sites(model.spec)]
    plan = Plan.of(model.spec, wanted)
    assert all(plan.reads[read.site][0] is read for read in wanted)
    assert (searches.count, selections.count) == (0, 0)
    Plan.of(model.spec, [Read("blocks.*.attn.pattern", heads=1)])  # the control: these are counted
    assert searches.count >= len(plan.sites)
    assert selections.count == 2  # one for each block


def test_taps_under_a_name_are_made_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Calls(monkeypatch, Session, "taps_under")
    taps = Session(Plan.of(model.spec, [STREAM])).taps
    block = taps.at("blocks.1")
    assert made.count == 2
    assert all(taps.at("blocks.1") is block for _ in range(9))
    assert taps.at("") is taps
    assert made.count == 2


def test_attention_that_nothing_reads_runs_as_it_is(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = Calls(monkeypatch, ProbeTaps, "_context")
    model.trace(ROWS, read=[STREAM, "blocks.0.attn.q", "blocks.1.attn.q"])
    assert contexts.count == 0
    model.trace(ROWS, read=[STREAM, "blocks.1.attn.q", PATTERN])
    assert contexts.count == 2  # keys and values of the block that is read, none of the other


def test_notes_are_three_lists_until_they_are_taken() -> None:
    notes, values = Notes(), [torch.ones(2, 3) * i for i in range(4)]
    for i, value in enumerate(values):
        notes.add(value, Rows((2,)), [i])
    assert (len(notes.values), len(notes.rows), len(notes.keys)) == (4, 4, 4)
    assert [(value is mine, keys) for (value, _, keys), mine in zip(notes.take(), values, strict=True)] == [
        (True, [i]) for i in range(4)
    ]
    assert notes.take() == []


@pytest.mark.parametrize("mask", [causal(), full()], ids=str)
def test_rows_of_many_lengths_are_ordered_once_for_queries_and_keys(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, others = Rows((70, 9, 131, 65)), Rows((3, 131, 9, 70))
    heads = Heads(heads=2, groups=2, width=4, value_width=4, dtype=torch.float32, device=torch.device("cpu"),
                  scale=None, softcap=None, sinks=False, dropout=0.0, learns=False)  # fmt: skip
    orders, padded = Calls(monkeypatch, Parts, "of"), Calls(monkeypatch, Rows, "padded_places")
    plan = plan_rows(rows, FlatKeys(rows), mask, heads)
    assert plan.queries is plan.flat_keys
    assert plan.queries is not None
    assert orders.count == 1
    assert padded.count == sum(not _equal(piece) for piece in plan.pieces)
    orders.count = 0
    crossed = plan_rows(rows, FlatKeys(others), full(), heads)  # the control: keys of other rows
    assert crossed.queries is not crossed.flat_keys
    assert orders.count == 2


def _equal(piece: Any) -> bool:
    """Whether the rows of a piece are of one length, so that they are not padded."""
    return not hasattr(piece.queries, "places")
