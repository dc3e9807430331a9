"""The order of rows in shards: a function of (seed, number) that visits every row once an epoch, without a table."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shard_texts import documents, shards_of
from triptych.errors import ConfigError
from triptych.shards import Mixture, RowOrder, ShardSet
from triptych.shards.order import BLOCK, Frame, Positions, mixed, permuted
from triptych.shards.packing import pack

FRAMES = {
    "plain": Frame(), "causal": Frame((7,), (8,), shifted=True), "no bos": Frame((), (8,), shifted=True),
    "bare": Frame((), (), shifted=True), "long": Frame((7, 6), (8, 9, 5), shifted=True),
}  # fmt: skip


@pytest.fixture
def shards(tmp_path: Path) -> ShardSet:
    return ShardSet(shards_of(tmp_path, [*documents(60), "a", "b", "long " * 300, "c"], shard_bytes=2500))


def framed(shards: ShardSet, frame: Frame) -> list[tuple[list[int], ...]]:
    """The positions of each document, by hand."""
    found = []
    for number in range(shards.documents):
        ids = [*frame.before, *shards.document(number).tolist(), *frame.after]
        found.append((ids[:-1], ids[1:]) if frame.shifted else (ids,))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000])
def test_the_permutation_is_one(size: int) -> None:
    orders = {tuple(permuted(i, size, key) for i in range(size)) for key in range(40)}
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len(orders) >= min(40, [1, 1, 2, 5][min(size, 3)])


def test_the_permutation_is_about_uniform() -> None:
    """Each index goes to each place about equally often, and neighbours do not stay neighbours; the control, a shift by
    the key, fails the second."""
    size, keys = 13, 4000
    orders = np.array([[permuted(i, size, key) for i in range(size)] for key in range(keys)])
    shifts = np.array([[(i + mixed(key)) % size for i in range(size)] for key in range(keys)])
    for counted, passes in ((orders, True), (shifts, False)):
        expected = keys / size
        single = np.array([np.bincount(column, minlength=size) for column in counted.T])
        assert (((single - expected) ** 2 / expected).sum(1) < 45).all()  # 12 degrees of freedom: 1e-5
        steps = (counted[:, 1:] - counted[:, :-1]) % size
        share = np.bincount(steps.ravel(), minlength=size) / steps.size
        assert (share[1:].max() < 1.3 / (size - 1)) == passes


@pytest.mark.parametrize("seed", range(30))
def test_packing_fills_every_row_and_loses_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, length = int(random.integers(1, 20)), int(random.integers(1, 50))
    total, lengths = rows * length, list[int]()
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, 1 + int(random.exponential(length * random.random()))))
    packed = pack(lengths, rows, length)
    assert [sum(stop - start for _, start, stop in row) for row in packed] == [length] * rows
    covered = Counter((item, i) for row in packed for item, start, stop in row for i in range(start, stop))
    assert covered == Counter((item, i) for item, size in enumerate(lengths) for i in range(size))


def test_packing_cuts_few_documents() -> None:
    """Beside the control, rows that are filled in order."""
    random = np.random.default_rng(0)
    length, rows, cuts, in_order = 1024, 32, 0, 0
    for _ in range(40):
        sizes = np.maximum(1, random.lognormal(4.3, 0.8, 700).astype(int))
        ends = np.cumsum(sizes)
        sizes = np.diff(np.append(ends[ends < rows * length], rows * length), prepend=0)
        pieces = sum(len(row) for row in pack(sizes.tolist(), rows, length))
        cuts += pieces - len(sizes)
        in_order += len(set(range(length, rows * length, length)) - set(np.cumsum(sizes).tolist()))
    assert cuts < in_order / 3


@pytest.mark.parametrize("name", FRAMES)
def test_any_stretch_is_read_as_by_hand(name: str, shards: ShardSet) -> None:
    frame = FRAMES[name]
    positions = Positions(shards, frame)
    every = framed(shards, frame)
    flat = [list(itertools.chain.from_iterable(column)) for column in zip(*every, strict=True)]
    assert len(positions) == len(flat[0])
    random = np.random.default_rng(0)
    ends = np.cumsum([len(document[0]) for document in every])
    for _ in range(200):
        start = int(random.integers(len(positions)))
        stop = min(len(positions), start + int(random.integers(1, 400)))
        pieces = [positions.read(cut) for cut in positions.cut(start, stop)]
        read = [np.concatenate(column).tolist() for column in zip(*pieces, strict=True)]
        assert read == [column[start:stop] for column in flat]
        assert len(pieces) == len({int(np.searchsorted(ends, i, side="right")) for i in range(start, stop)})


@pytest.mark.parametrize("pack_rows", [1, 4, 32])
@pytest.mark.parametrize("length", [1, 20, 64, 10**6])
def test_an_epoch_has_every_row_once(length: int, pack_rows: int, shards: ShardSet) -> None:
    """All positions but fewer than a group, none twice, and others are left out in another epoch."""
    positions = Positions(shards, FRAMES["causal"])
    stop = len(positions) - 100
    order = RowOrder(positions, length, pack_rows, stop)
    left_out = []
    for epoch in range(2):
        rows = [order.row(5, epoch * order.rows + i) for i in range(order.rows)]
        covered = Counter(
            (cut.shard, cut.document, i) for row in rows for cut in row for i in range(cut.first, cut.last)
        )
        assert set(covered.values()) == {1}
        assert all(sum(cut.last - cut.first for cut in row) == order.length for row in rows)
        assert 0 <= stop - len(covered) < order.pack * order.length
        last = positions.cut(stop - 1, stop)[0]
        assert max(covered) <= (last.shard, last.document, last.last - 1)
        left_out.append(set(covered))
    if stop % (order.pack * order.length) and order.groups > 3:
        assert left_out[0] != left_out[1]
    assert order.row(5, 3) == RowOrder(positions, length, pack_rows, stop).row(5, 3)
    if order.rows > 20:
        assert [order.row(5, i) for i in range(9)] != [order.row(6, i) for i in range(9)]


def test_rows_of_a_step_come_from_places_far_apart(shards: ShardSet) -> None:
    """Four neighbouring rows are of four groups; the control, a window after the other, are not."""
    order = RowOrder(Positions(shards, Frame()), 32, 8)
    group = order.pack * order.length
    starts = np.cumsum([0, *(one.tokens for one in shards.manifest.shards)])

    def groups(first: int) -> int:
        places = []
        for number in range(first, first + 4):
            cut = order.row(1, number)[0]
            ends = shards.arrays(cut.shard).ends
            begin = int(ends[cut.document - 1]) if cut.document else 0
            place = int(starts[cut.shard]) + begin + cut.first - mixed(1, 2, 0) % order.stop
            places.append(place % order.stop // group)
        return len(set(places))

    assert sum(groups(first) for first in range(0, 40, 4)) >= 37


def test_no_more_than_its_rows_is_read(shards: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tokens; of the ends those that a search and the group need."""
    order, read = RowOrder(Positions(shards, Frame()), 32, 4), list[int]()
    ids = ShardSet.ids
    monkeypatch.setattr(
        ShardSet, "ids", lambda self, shard, start, stop: [read.append(stop - start), ids(self, shard, start, stop)][1]
    )
    for number in (0, 17, 10**12):
        read.clear()
        for cut in order.row(0, number):
            order.positions.read(cut)
        assert sum(read) == 32


def test_a_mixture_has_its_shares_in_every_block_and_visits_each_part_in_its_order(tmp_path: Path) -> None:
    sets = {}
    for i, name in enumerate(("a", "b", "c")):
        (tmp_path / name).mkdir()
        sets[name] = ShardSet(shards_of(tmp_path / name, documents(40, seed=i)))
    orders = {name: RowOrder(Positions(one, Frame()), 16, 4) for name, one in sets.items()}
    mixture = Mixture(orders, {"a": 5, "b": 3.0, "c": 0.01})
    assert sum(mixture.counts) == BLOCK
    assert mixture.counts == [2556, 1534, 6] or mixture.counts == [2557, 1534, 5]
    rows = [mixture.row(3, number) for number in range(2 * BLOCK)]
    for block in (rows[:BLOCK], rows[BLOCK:]):
        assert Counter(which for which, _ in block) == dict(enumerate(mixture.counts))
    first = [cuts for which, cuts in rows if which == 0]
    assert first == [orders["a"].row(mixed(3, 4, 0), i) for i in range(len(first))]
    run = max(len(list(same)) for _, same in itertools.groupby(which for which, _ in rows))
    assert run < 60  # the parts are mixed, and do not follow one another
    with pytest.raises(ConfigError, match=r"the weight of 'c' is less than 1/4,096 of all"):
        Mixture(orders, {"a": 5, "b": 3, "c": 1e-6})
