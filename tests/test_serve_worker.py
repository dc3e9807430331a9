"""A model in a thread of its own: requests that come, leave, fail and stop beside others write what each does alone."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

import tiny
from triptych.errors import InputError
from triptych.generate import Request, Sampling, forbid
from triptych.model import Model, create
from triptych.serve.worker import STOPPING, ModelWorker, RowPiece
from triptych.tasks.generation_requests import end_ids
from triptych.text import ChatTemplate, Tokenizer, character_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def letters(template: str | None = None) -> Model:
    """A small decoder of letters, with weights large enough for it to write something.  It chats by `template`."""
    tokenizer = character_tokenizer(LETTERS)
    if template is not None:
        tokenizer = Tokenizer(tokenizer.backend, tokenizer.specials, chat=ChatTemplate(template))
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
              "intermediate_size": 24, "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 256}  # fmt: skip
    model = create(config, tokenizer)
    for parameter in model.module.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(20)
    return model


@pytest.fixture
def worker() -> Iterator[ModelWorker]:
    one = ModelWorker(letters(), "letters", max_rows=4)
    yield one
    one.stop()
    one.thread.join(60)
    assert not one.thread.is_alive()


def request(worker: ModelWorker, text: str, new: int, number: int = 0, **how: object) -> Request:
    assert worker.model.tokenizer is not None
    ends = end_ids(worker.model.inputs)
    how["rules"] = [forbid(ends)]  # such small models end at once
    return Request(prompt=worker.model.tokenizer.encode(text), max_new_tokens=new, number=number, ends=ends, **how)  # type: ignore[arg-type]


async def read(pieces: object) -> list[RowPiece]:
    return [piece async for piece in pieces]  # type: ignore[attr-defined]


def text_of(pieces: list[RowPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def alone(worker: ModelWorker, text: str, new: int, **how: object) -> str:
    return worker.model.generate([text], max_new_tokens=new, rules=[forbid(end_ids(worker.model.inputs))], **how)[
        0
    ].text  # type: ignore[arg-type]


def test_many_at_once_write_what_each_writes_alone(worker: ModelWorker) -> None:
    prompts = [LETTERS[i : i + 3 + i % 5] for i in range(12)]

    async def run() -> list[list[RowPiece]]:
        served = []
        for prompt in prompts:
            served.append(worker.submit(request(worker, prompt, 20, sampling=Sampling(temperature=0.8, seed=3))))
            await asyncio.sleep(0.002)
        return await asyncio.gather(*map(read, served))

    for prompt, pieces in zip(prompts, asyncio.run(run()), strict=True):
        assert text_of(pieces) == alone(worker, prompt, 20, temperature=0.8, seed=3)
        assert [piece.reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].reason in ("length", "end")
    assert worker.busy_for == 0.0


def test_a_stop_string_a_cancelled_one_and_a_bad_one_leave_the_others_alone(worker: ModelWorker) -> None:
    whole = alone(worker, "abc", 40)
    stop = whole[7:9]

    async def run() -> tuple[list[RowPiece], list[RowPiece], list[RowPiece], int]:
        stopped = worker.submit(request(worker, "abc", 40), (stop,))
        left = worker.submit(request(worker, "hello", 200))
        bad = worker.submit(request(worker, "hello", 4000))
        other = worker.submit(request(worker, "abc", 40))
        count = 0
        async for _ in left:
            count += 1
            if count == 3:
                break  # the client has gone
        return *(await asyncio.gather(*map(read, (stopped, bad, other)))), count

    stopped, bad, other, _ = asyncio.run(run())
    assert text_of(stopped) == whole[: whole.index(stop)]
    assert stopped[-1].reason == "stop"
    assert (bad[-1].reason, type(bad[-1].error)) == ("error", InputError)
    assert text_of(other) == whole
    asyncio.run(worker.call(lambda: None))
    assert not worker.rows
    assert worker.scheduler is not None
    assert not worker.scheduler.engine.rows


def test_calls_run_between_steps_and_their_errors_come_back(worker: ModelWorker) -> None:
    async def run() -> tuple[int, list[RowPiece]]:
        served = worker.submit(request(worker, "abc", 30))
        number = await worker.call(lambda: 7)
        with pytest.raises(KeyError):
            await worker.call(lambda: {}["no"])
        return number, await read(served)

    number, pieces = asyncio.run(run())
    assert number == 7
    assert text_of(pieces) == alone(worker, "abc", 30)


def test_a_worker_that_stops_ends_what_runs_and_takes_nothing_more(worker: ModelWorker) -> None:
    async def run() -> tuple[list[RowPiece], list[RowPiece]]:
        first = worker.submit(request(worker, "abc", 60))
        await first.pieces.get()
        worker.stop()
        second = worker.submit(request(worker, "abc", 5))
        return await read(first), await read(second)

    first, second = asyncio.run(run())
    assert first[-1].reason in ("length", "end")
    assert STOPPING in str(second[-1].error)


def test_a_model_that_does_not_generate_says_so() -> None:
    worker = ModelWorker(Model(tiny.encoder()), "bert", max_rows=2)

    async def run() -> list[RowPiece]:
        return await read(worker.submit(Request(prompt=[1, 2])))

    (piece,) = asyncio.run(run())
    assert "bert does not generate" in str(piece.error)
    worker.stop()
    worker.thread.join(60)


def test_calls_and_steps_take_turns(worker: ModelWorker) -> None:
    async def run() -> tuple[list[int], str]:
        served = worker.submit(request(worker, "abc", 60))
        pieces = aiter(served)
        await anext(pieces)
        assert served.row is not None
        row = served.row
        lengths = await asyncio.gather(*(worker.call(lambda: len(row.ids)) for _ in range(20)))
        served.cancel()
        return lengths, "".join([piece.text async for piece in pieces])

    lengths, _ = asyncio.run(run())
    assert all(b > a for a, b in pairwise(lengths)), "a row writes a token between two calls"
