"""Pages of a cache: rows share those of a common beginning, and none sees what another writes."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import tiny
from native_models import llama, needs_native
from triptych import nn
from triptych.attention import Cache, CachedLayer, Rows
from triptych.attention.layer_cache import Store
from triptych.attention.pages import Pages
from triptych.count import count
from triptych.errors import InputError
from triptych.generate import Engine, LiveRow, PromptLookup, Request, Scheduler, Speculation, beam_search
from triptych.native.step import PAGE_POSITIONS, PAGES_OF_CHUNK

G, K, KV, SIZE = 2, 8, 5, 4
FULL = CachedLayer(groups=G, width=K, value_width=KV)
RING = CachedLayer(groups=G, width=K, value_width=KV, window=3)


def paged(slots: int, layers: Sequence[CachedLayer] = (FULL, FULL)) -> tuple[Cache, Pages]:
    cache = Cache(layers, slots, page=SIZE)
    assert cache.pages is not None
    return cache, cache.pages


def write(cache: Cache, slot: int, numbers: Sequence[float]) -> None:
    """Tokens of which each has one number in all of its keys and values."""
    rows = Rows((len(numbers),), (cache.lengths[slot],), (slot,))
    opened = cache.begin(rows, "")
    for layer in range(len(cache.stores)):
        k, v = (torch.tensor(numbers)[:, None, None].expand(-1, G, width) for width in (K, KV))
        opened.of(layer).extend(layer, k, v)
    opened.finish()


def held(cache: Cache, slot: int, layer: int = 0) -> list[float]:
    """The numbers of the tokens of a slot, whose keys and values all have them."""
    k, v = cache.kept(layer, slot)
    numbers = k[0, :, 0]
    assert all((x == numbers[None, :, None]).all() for x in (k, v))
    return numbers.tolist()


def nothing_is_held(pages: Pages) -> bool:
    """No slot holds a page, each is free once, and all are zero."""
    whole = [(i * PAGES_OF_CHUNK, i * PAGES_OF_CHUNK + n) for i, n in enumerate(pages.chunks)]
    zero = not any(x.any() for store in pages.stores for chunk in store.chunks for x in chunk)
    return not pages.holders and not any(pages.tables) and pages.free == whole and zero


# -- tables and counts ------------------------------------------------------------------------------------------------


def shared_and_written(length: int) -> tuple[Cache, Pages]:
    """Three slots with one beginning, two of which go on; the third keeps it as it is."""
    cache, pages = paged(3)
    write(cache, 0, [1.0] * length)
    for slot in (1, 2):
        cache.share_prefix(0, slot, length)
    assert len(pages.holders) == pages.count(length)
    for i in range(2 * SIZE + 1):
        for slot in (0, 1):
            write(cache, slot, [10.0 * (slot + 1) + i])
    return cache, pages


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE + 2])
def test_rows_share_a_beginning_and_then_differ(length: int) -> None:
    cache, pages = shared_and_written(length)
    assert held(cache, 2) == [1.0] * length
    for slot in (0, 1):
        assert held(cache, slot) == [1.0] * length + [10.0 * (slot + 1) + i for i in range(2 * SIZE + 1)]
    assert pages.copies == (2 if length % SIZE else 0)  # at the bound of a page nothing is written to a shared one
    whole, own = length // SIZE, pages.count(length + 2 * SIZE + 1) - length // SIZE
    assert len(pages.holders) == whole + 2 * own + (length % SIZE > 0)
    cache.free([0, 1])
    assert held(cache, 2) == [1.0] * length
    cache.free([2])
    assert nothing_is_held(pages)


def test_a_page_that_is_not_copied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pages, "_copy", lambda self, table, at, positions: None)
    cache, _ = shared_and_written(SIZE + 1)
    assert held(cache, 2) == [1.0] * (SIZE + 1)
    assert held(cache, 0) != [1.0] * (SIZE + 1) + [10.0 + i for i in range(2 * SIZE + 1)]


def test_the_last_row_that_holds_a_page_writes_to_it() -> None:
    cache, pages = paged(2)
    write(cache, 0, [1.0] * 6)
    cache.share_prefix(0, 1, 6)
    write(cache, 1, [2.0])
    write(cache, 0, [3.0])
    assert pages.copies == 1
    assert (held(cache, 0)[6], held(cache, 1)[6]) == (3.0, 2.0)


def test_a_row_that_goes_back_into_a_shared_page_writes_to_a_copy() -> None:
    """As wrong guesses are taken back, and a text is begun again."""
    for back in (0, 3, SIZE, 6, 2 * SIZE):
        cache, pages = paged(2)
        write(cache, 0, [float(i) for i in range(11)])
        cache.share_prefix(0, 1, 11)
        for slot in (1, 0):
            cache.trim(slot, back)
            write(cache, slot, [50.0 + slot] * 5)
            assert held(cache, slot) == [*map(float, range(back)), *[50.0 + slot] * 5]
            assert held(cache, 1) == [*map(float, range(back)), *[51.0] * 5]
        cache.free([0, 1])
        assert nothing_is_held(pages)


def test_slots_that_change_places_keep_their_tokens() -> None:
    cache, pages = paged(3)
    for slot in range(3):
        write(cache, slot, [slot + 1.0] * (3 + 3 * slot))
    cache.copy([1, 2, 2], [0, 1, 2])
    assert [held(cache, slot) for slot in range(3)] == [[2.0] * 6, [3.0] * 9, [3.0] * 9]
    for slot in range(3):
        write(cache, slot, [7.0 + slot])
    assert [held(cache, slot)[-2:] for slot in range(3)] == [[2.0, 7.0], [3.0, 8.0], [3.0, 9.0]]
    cache.free([2, 0, 1])
    assert nothing_is_held(pages)


def test_random_steps_leave_every_row_with_its_tokens() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        cache, pages = paged(5)
        texts: list[list[float]] = [[] for _ in range(5)]
        for number in range(120):
            slot, other = draw.sample(range(5), 2)
            match draw.choice(("write", "write", "step", "share", "copy", "trim", "free", "room")):
                case "write":
                    texts[slot] += [float(number)] * draw.randrange(1, 9)
                    write(cache, slot, texts[slot][cache.lengths[slot] :])
                case "step":
                    for i, text in enumerate(texts):
                        text.append(float(number))
                        write(cache, i, text[-1:])
                case "share" if texts[slot]:
                    cache.free([other])
                    assert other in cache.add(len(cache.free_slots))
                    length = draw.randrange(1, len(texts[slot]) + 1)
                    cache.share_prefix(slot, other, length)
                    texts[other] = texts[slot][:length]
                case "copy":
                    cache.copy([slot, other], [other, slot])
                    texts[slot], texts[other] = texts[other], texts[slot]
                case "trim":
                    del texts[slot][draw.randrange(len(texts[slot]) + 1) :]
                    cache.trim(slot, len(texts[slot]))
                case "free":
                    cache.free([slot])
                    cache.add(1)
                    texts[slot] = []
                case "room":
                    cache.expect(slot, len(texts[slot]), len(texts[slot]) + 30)
                    cache.give_up_room(other)
            assert [held(cache, i) for i in range(5)] == texts, (seed, number)
            assert sum(map(len, pages.tables)) == sum(pages.holders.values())
            assert sum(end - first for first, end in pages.free) + len(pages.holders) == pages.total
        cache.free(range(5))
        assert nothing_is_held(pages)


def test_rows_that_wait_do_not_hide_that_another_lacks_room() -> None:
    """Slot 1 comes to the end of its page in steps in which slot 0, the longer one, writes nothing."""
    cache, _ = paged(2)
    write(cache, 0, [1.0] * (3 * SIZE))
    write(cache, 1, [2.0] * (SIZE - 2))
    for lengths in ((1, 1), (0, 1), (0, 1), (1, 1)):
        rows = Rows(lengths, tuple(cache.lengths))
        opened = cache.begin(rows, "")
        new = torch.tensor([1.0] * lengths[0] + [2.0])[:, None, None]
        for layer in range(2):
            opened.of(layer).extend(layer, new.expand(-1, G, K), new.expand(-1, G, KV))
        opened.finish()
    assert held(cache, 0) == [1.0] * (3 * SIZE + 2)
    assert held(cache, 1) == [2.0] * (SIZE + 2)


def test_memory_grows_by_chunks_and_nothing_moves() -> None:
    cache, pages = paged(2)
    write(cache, 0, [1.0] * 9)
    before = [x.data_ptr() for store in cache.stores for chunk in store.chunks for x in chunk]
    write(cache, 1, [2.0] * 90)
    write(cache, 0, [3.0] * 90)
    after = [x.data_ptr() for store in cache.stores for x in store.chunks[0]]
    assert before == after
    assert len(pages.chunks) == 3
    assert cache.nbytes == cache.slot_bytes(90) + cache.slot_bytes(99)
    assert held(cache, 0) == [1.0] * 9 + [3.0] * 90


def test_slots_are_added_when_all_rows_have_left() -> None:
    cache, pages = paged(1)
    write(cache, 0, [1.0] * 40)
    cache.free([0])
    assert nothing_is_held(pages)
    assert cache.add(3) == [0, 1, 2]
    for slot in range(3):
        write(cache, slot, [float(slot)] * (50 - slot))
    assert [held(cache, slot) for slot in range(3)] == [[float(slot)] * (50 - slot) for slot in range(3)]


def test_memory_that_is_not_there_leaves_every_row_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, pages = paged(2)
    write(cache, 0, [1.0] * 6)
    cache.share_prefix(0, 1, 6)
    new_chunk = Store.new_chunk

    def full(self: Store, *arguments: Any) -> Any:
        if self is cache.stores[1]:
            raise MemoryError
        return new_chunk(self, *arguments)

    monkeypatch.setattr(Store, "new_chunk", full)
    for slot, tokens in ((0, 90), (1, 1)):
        with pytest.raises(MemoryError):
            write(cache, slot, [2.0] * tokens)
        assert [held(cache, i) for i in range(2)] == [[1.0] * 6] * 2
        assert [len(store.chunks) for store in cache.stores] == [1, 1]
    monkeypatch.setattr(Store, "new_chunk", new_chunk)
    write(cache, 1, [2.0])
    assert held(cache, 1) == [1.0] * 6 + [2.0]
    cache.free([0, 1])
    assert nothing_is_held(pages)


def test_rows_that_join_together_lie_side_by_side() -> None:
    """So that modules read them in place; one that was in the way leaves its pages to others."""
    cache, pages = paged(3)
    for slot in range(3):
        cache.expect(slot, 6, 30)
    opened = cache.begin(Rows((6, 6, 6)), "")
    places = opened.of(0).places  # type: ignore[attr-defined]
    assert places.regular is not None
    assert [len(table) for table in pages.tables] == [8, 8, 8]  # no row takes more than it may need
    opened.finish()
    cache.share_prefix(1, cache.add(1)[0], 6)
    assert cache.begin(Rows((1, 1), (6, 6), (0, 3)), "").of(0).places.regular is None  # type: ignore[attr-defined]


def test_rings_are_copied() -> None:
    cache, pages = paged(2, (FULL, RING))
    write(cache, 0, [float(i) for i in range(6)])
    cache.share_prefix(0, 1, 6)
    write(cache, 0, [10.0, 11.0])
    write(cache, 1, [20.0, 21.0])
    for slot, last in ((0, [10.0, 11.0]), (1, [20.0, 21.0])):
        assert held(cache, slot) == [*map(float, range(6)), *last]
        assert sorted(held(cache, slot, layer=1)) == sorted([5.0, *last])
    cache.free([0, 1])
    assert nothing_is_held(pages)


def test_what_is_wrong_is_refused_and_changes_nothing() -> None:
    for page in (0, -1, True):
        with pytest.raises(InputError, match="page"):
            Cache([FULL], page=page)
    cache, pages = paged(2)
    write(cache, 0, [1.0] * 6)
    write(cache, 1, [2.0])
    before = [*pages.tables], dict(pages.holders)
    with pytest.raises(InputError, match="holds 1 tokens; free it first"):
        cache.share_prefix(0, 1, 4)
    cache.free([1])
    with pytest.raises(InputError, match="holds 6"):
        cache.share_prefix(0, 1, 7)
    with pytest.raises(InputError, match="slot 1 is not in use"):
        cache.free([1])
    with pytest.raises(InputError, match="page"):
        count(tiny.decoder().spec).cache_bytes(5, page=0)
    assert (pages.tables[0], pages.holders) == (before[0][0], dict.fromkeys(before[0][0], 1))


# -- rows of an engine ------------------------------------------------------------------------------------------------

START = [3 + i * 7 % 30 for i in range(2 * PAGE_POSITIONS + 10)]


def requests(count: int, new: int = 20, **how: Any) -> list[Request]:
    return [Request(prompt=[*START, 4 + i, 5], max_new_tokens=new, number=i, **how) for i in range(count)]


def alone(module: nn.Transformer, wanted: Sequence[Request], **how: Any) -> list[list[int]]:
    texts = []
    for request in wanted:
        engine = Engine(module, **how)
        (row,) = engine.add(request)
        run(engine)
        texts.append(row.new)
    return texts


def run(engine: Engine) -> None:
    while engine.rows:
        engine.step()


def long_decoder() -> nn.Transformer:
    return llama(max_position_embeddings=1024)


@pytest.mark.parametrize("executor", [pytest.param("auto", marks=needs_native), "modules"])
def test_rows_that_share_pages_write_what_they_write_alone(executor: Any) -> None:
    module, wanted = long_decoder(), requests(4)
    engine = Engine(module, executor=executor, reuse=True, cache_type="fp16")
    rows = engine.add(*wanted)
    run(engine)
    assert [row.reused for row in rows] == [0, *[len(START)] * 3]
    assert [row.new for row in rows] == alone(module, wanted, executor=executor, cache_type="fp16")
    assert engine.cache.pages is not None
    assert engine.cache.pages.copies >= 3
    assert (engine.why_modules is None) == (executor == "auto")


@needs_native
def test_rows_that_share_pages_have_the_bits_that_they_have_alone() -> None:
    module, numbers = long_decoder(), dict[bool, dict[tuple[int, int], float]]()
    for reuse in (False, True):
        engine, numbers[reuse] = Engine(module, reuse=reuse, chunk=32), {}  # few enough for native products
        rows = engine.add(*requests(3, logprobs=1))
        while engine.rows:
            for output in engine.step():
                if output.logprobs is not None:
                    numbers[reuse][output.row.request.number, len(output.row.ids)] = output.logprobs.logprob
        assert all(row.reused > 0 for row in rows[1:]) == reuse
    assert numbers[False] == numbers[True]
    assert len(numbers[True]) == 3 * 20
    assert engine.why_modules is None


def test_rows_of_an_engine_that_write_to_a_shared_page_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pages, "_copy", lambda self, table, at, positions: None)
    module, wanted = long_decoder(), requests(4)
    engine = Engine(module, reuse=True)
    rows = engine.add(*wanted)
    run(engine)
    assert [row.new for row in rows] != alone(module, wanted)


@pytest.mark.parametrize("executor", [pytest.param("auto", marks=needs_native), "modules"])
def test_beams_share_pages_and_leave_none(executor: Any) -> None:
    module = long_decoder()
    engines = [Engine(module, executor=executor), Engine(module, executor="static")]  # this one copies whole slots
    found = []
    for engine in engines:
        best = beam_search(engine, requests(2, new=12), beams=3)
        found.append([[beam.tokens for beam in beams] for beams in best])
    assert found[0] == found[1]
    pages = engines[0].cache.pages
    assert pages is not None
    assert pages.copies > 0
    assert nothing_is_held(pages)
    assert pages.total < 2 * 3 * pages.count(len(START) + 14), "beams of one prompt share its pages"


@needs_native
def test_guesses_are_taken_back_from_shared_pages() -> None:
    """The rows share the whole prompt but its last id, in a page of which each begins to write its guesses."""
    module, wanted = long_decoder(), [Request(prompt=START, max_new_tokens=40, number=i) for i in range(3)]
    engine = Engine(module, reuse=True, speculation=Speculation(PromptLookup(), 4, adaptive=False))
    rows = engine.add(*wanted)
    run(engine)
    assert [row.new for row in rows] == alone(module, wanted)
    assert sum(row.drafted - row.accepted for row in rows) > 0, "no guess was wrong"
    assert rows[1].reused == len(START) - 1


@torch.inference_mode()
def test_a_step_goes_on_in_memory_that_has_moved() -> None:
    """Steps of one row use views of the stores that the first of them made."""
    module, logits = llama(), list[torch.Tensor]()
    for moved in (False, True):
        cache = module.decoder.cache(1, page=None)
        for past, ids in [(0, [3, 1, 4, 1]), *((4 + i, [5 + i]) for i in range(6))]:
            if moved and past == 6:
                cache.ensure_capacity(2 * cache.capacity)
            batch = nn.Batch(inputs=torch.tensor(ids), rows=Rows((len(ids),), (past,)), cache=cache)
            last = module.logits(batch)
        assert cache.stores[0].k[0, :, :10].any(-1).all()
        logits.append(last)
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("mask", ["window", "causal"])
def test_windows_and_every_token_beside_each_other(mask: str) -> None:
    module = tiny.decoder(mask=mask)
    engine, prompt = Engine(module, reuse=True), [3, 1, 4, 1, 5, 9, 2, 6]
    wanted = [Request(prompt=[*prompt, 5 + i], max_new_tokens=9, number=i) for i in range(3)]
    rows = engine.add(*wanted)
    run(engine)
    assert [row.new for row in rows] == alone(module, wanted)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_eight_rows_that_share_2000_tokens_take_little_more_than_one() -> None:
    module = llama(max_position_embeddings=2100)
    start = [3 + i * 7 % 30 for i in range(2000)]
    used = []
    for number in (1, 8):
        engine = Engine(module, reuse=True)
        wanted = [Request(prompt=[*start, *[4 + i] * 16], max_new_tokens=16, number=i) for i in range(number)]
        rows = engine.add(*wanted)
        most = 0
        while engine.rows:
            engine.step()
            assert engine.cache.pages is not None
            most = max(most, len(engine.cache.pages.holders))
        used.append(most)
        assert all(len(row.ids) == 2032 for row in rows)
        assert engine.cache.nbytes <= 1.1 * most * engine.cache.pages.page_bytes
    assert used[1] <= 1.3 * used[0]


def mixed_requests(number: int, longest: int) -> list[Request]:
    draw = random.Random(3)
    return [
        Request(prompt=[draw.randrange(30) for _ in range(draw.choice((3, 20, longest)))], max_new_tokens=2, number=i)
        for i in range(number)
    ]


def test_the_memory_of_mixed_requests_is_what_count_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the step whose rows hold most: their own lengths in whole pages, not as many times the longest."""
    module = llama(max_position_embeddings=1024)
    scheduler, make_room, counted = Scheduler(Engine(module), max_rows=16), Pages.make_room, list[int]()

    def counting(self: Pages, rows: Rows) -> None:
        make_room(self, rows)
        begun = [row for row in scheduler.engine.rows if row.cached or row.slot in rows.slots]
        counted.append(sum(counts.cache_bytes(row.limit, dtype="fp32", page=PAGE_POSITIONS) for row in begun))

    counts = count(module.spec)
    monkeypatch.setattr(Pages, "make_room", counting)
    for request in mixed_requests(100, 700):
        scheduler.submit(request)
    while scheduler.busy:
        scheduler.step()
    assert 0.9 * max(counted) <= scheduler.engine.cache.nbytes <= 1.1 * max(counted)
    assert max(counted) < 0.8 * 16 * counts.cache_bytes(702, dtype="fp32"), "no better than slots"


def test_a_limit_of_memory_is_kept_and_every_request_ends() -> None:
    module = llama(max_position_embeddings=1024)
    engine = Engine(module, reuse=True)
    limit = engine.cache.slot_bytes(702) + 2 * engine.cache.slot_bytes(1)
    scheduler, wanted = Scheduler(engine, max_rows=8, cache_bytes=limit), mixed_requests(30, 700)
    rows = [scheduler.submit(request) for request in wanted]
    most = 0
    while scheduler.busy:
        scheduler.step()
        most = max(most, len(engine.rows))
        assert engine.cache.nbytes <= limit
    assert most >= 3
    assert [row.new for row in rows] == alone(module, wanted)


def test_shared_pages_leave_room_for_more_rows() -> None:
    """With memory for the beginning once and a page a row, rows that share it run together; others one at a time."""
    module = long_decoder()

    def most_at_once(wanted: Callable[[int], list[int]]) -> int:
        engine = Engine(module, reuse=True)
        page = engine.cache.slot_bytes(1)
        scheduler = Scheduler(engine, max_rows=6, cache_bytes=8 * page)
        rows: list[LiveRow] = []
        most = 0
        for i in range(6):
            rows.append(scheduler.submit(Request(prompt=wanted(i), max_new_tokens=30, number=i)))
            for _ in range(3):
                scheduler.step()
                most = max(most, len(engine.rows))
        while scheduler.busy:
            scheduler.step()
        assert all(len(row.new) == 30 for row in rows)
        return most

    assert most_at_once(lambda i: [*START, i]) >= 4
    assert most_at_once(lambda i: [i, *START]) <= 2
