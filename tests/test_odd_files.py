"""Tokenizers, templates, sounds and checkpoints in situations that are rare: each works or says what to do."""

import io
import os
import random
import signal
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from triptych.checkpoints import atomic_write, write_directory
from triptych.checkpoints.gguf_reader import GGUFSource
from triptych.checkpoints.gguf_writer import write_gguf
from triptych.checkpoints.save import recover
from triptych.cli.loading import read_texts
from triptych.cli.transcribe import _formatted
from triptych.errors import CheckpointError, InputError, TextError
from triptych.media import audio
from triptych.tasks import Segment
from triptych.text import bpe_tokenizer, byte_tokenizer, character_tokenizer, from_gguf, word_tokenizer
from triptych.text import side_files as added
from triptych.text.chat import ChatTemplate
from triptych.text.detokenize import BYTE_OF
from triptych.text.specials import Specials

# ---------------------------------------------------------------- text


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_after_an_interrupt_the_next_prompt_is_its_own() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(60) %}{% endfor %}{% endfor %}"
    slow, quick = ChatTemplate(f"{loop}slow"), ChatTemplate("quick")
    quick.render([])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            slow.render([])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert quick.render([]).text == "quick"


@pytest.mark.usefixtures("unchecked")
def test_listed_tokens_are_added_in_one_call() -> None:
    """Gemma's config lists six thousand; the library makes its table anew with each call."""

    class Counting:
        calls = 0

        def __init__(self) -> None:
            self.backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
            self.backend.add_tokens([AddedToken("<x>", lstrip=True)])

        def __getattr__(self, name: str) -> Any:
            Counting.calls += 1
            return getattr(self.backend, name)

        def token_to_id(self, text: str) -> int | None:
            return self.backend.token_to_id(text)

    backend: Any = Counting()
    listed = {str(i + 2): {"content": "<x>" if i == 0 else f"<{i}>", "special": False} for i in range(200)}
    added.add_tokens(backend, Specials(), {"added_tokens_decoder": listed}, Path("here"))
    assert Counting.calls < 10
    assert backend.backend.get_vocab_size() == 202
    assert not backend.backend.get_added_tokens_decoder()[2].lstrip
    listed["201"] = {"content": "<5>"}
    with pytest.raises(TextError, match=r"gives '<5>' the id 201, the vocabulary"):
        added.add_tokens(Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[])), Specials(),
                  {"added_tokens_decoder": listed}, Path("here"))  # fmt: skip


def test_a_vocabulary_of_a_gguf_that_repeats_or_has_endless_pieces() -> None:
    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    tokens = [Counted(i) for i in range(300)]
    with pytest.raises(TextError, match="holds '299' twice"):
        from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*tokens, Counted(299)]})
    assert Counted.compared < 3000
    long = {"tokens": ["<unk>", "a" * 2000], "scores": [0.0, 0.0], "token_type": [2, 1], "model": "llama"}
    with pytest.raises(TextError, match="a piece of 2,000 characters; 1,024 is the limit"):
        from_gguf({f"tokenizer.ggml.{name}": value for name, value in long.items()})


def test_a_stream_of_bytes_that_are_no_characters_is_not_decoded_anew_with_each() -> None:
    tokenizer = byte_tokenizer()
    inverse = {byte: char for char, byte in BYTE_OF.items()}
    ids = [int(tokenizer.backend.token_to_id(inverse[byte])) for byte in range(256)]
    stream, decode, decoded = tokenizer.stream(), tokenizer.stream()._decode, 0

    def counted(some: Any) -> str:
        nonlocal decoded
        decoded += len(some)
        return decode(some)

    stream._decode = counted
    parts = [stream.put(ids[0x80]) for _ in range(600)]
    assert "".join(parts) + stream.flush() == "\ufffd" * 600
    assert decoded < 600 * 120
    for seed in range(60):
        number = random.Random(seed)
        pieces = ("€".encode(), "😀".encode()[:3], bytes([0x80]), bytes([0xF0]), b"a", "é".encode())
        whole = b"".join(number.choices(pieces, (3, 3, 9, 3, 0.2, 1), k=90))
        stream = tokenizer.stream()
        rows = [ids[byte] for byte in whole]
        assert "".join(map(stream.put, rows)) + stream.flush() == tokenizer.decode(rows)


@pytest.mark.parametrize("make", [character_tokenizer, bpe_tokenizer, word_tokenizer])
def test_a_new_vocabulary_from_half_of_a_surrogate_pair(make: Any) -> None:
    given: tuple[Any, ...] = ("a\udc80b",) if make is character_tokenizer else (["a\udc80b"], 300)
    with pytest.raises(TextError, match="remove its lone surrogates"):
        make(*given)


def test_a_tokenizer_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, folder = byte_tokenizer(), tmp_path / "new" / "folder"
    tokenizer.save(folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert before == tokenizer.files()

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TextError, match=r"cannot write the tokenizer into .*No space left"):
        tokenizer.save(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    with pytest.raises(TextError, match="cannot write the tokenizer into"):
        tokenizer.save(folder / "tokenizer.json")


# ---------------------------------------------------------------- sounds


@pytest.mark.parametrize(
    ("sound", "rate"),
    [(np.zeros((800, 2)), 16_000), (np.full(800, np.nan), 16_000), (np.zeros(800), 0), (np.zeros(800), 1 << 33)],
)
def test_what_is_no_sound_is_not_written(tmp_path: Path, sound: Any, rate: int) -> None:
    with pytest.raises(InputError, match=r"average its channels|a rate of"):
        audio.write_wav(tmp_path / "a.wav", sound.astype(np.float32), rate)
    assert not (tmp_path / "a.wav").exists()


def test_names_and_rates_that_no_sound_has(tmp_path: Path) -> None:
    audio.write_wav(tmp_path / "a.wav", np.zeros(800, np.float32))
    with pytest.raises(InputError, match="a rate of 0 samples"):
        audio.read_wav(tmp_path / "a.wav", rate=0)
    with pytest.raises(InputError, match="cannot write"):
        audio.write_wav(tmp_path / "a\0.wav", np.zeros(800, np.float32))


def test_a_long_sound_is_decoded_in_blocks(tmp_path: Path) -> None:
    samples = np.sin(np.arange(1_000_000) / 9).astype(np.float32)
    audio.write_wav(tmp_path / "a.wav", samples)
    tracemalloc.start()
    read = audio.read_wav(tmp_path / "a.wav")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 12 * len(samples)  # two bytes a sample as stored, twice, and four as read
    np.testing.assert_allclose(read, samples, atol=1e-4)


# ---------------------------------------------------------------- checkpoints


def test_what_a_killed_process_of_the_same_number_left_is_no_obstacle(tmp_path: Path) -> None:
    """In a container every process may have the same number."""
    left = tmp_path / f".model.{os.getpid()}.tmp"
    (left / "half").mkdir(parents=True)
    write_directory(tmp_path / "model", {"a": torch.zeros(2)}, {})
    (left / "half").mkdir(parents=True)
    recover(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    again = tmp_path / f".file.{os.getpid()}.tmp"
    again.mkdir()
    atomic_write(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert not again.exists()


def test_two_writers_of_one_process_do_not_share_a_directory(tmp_path: Path) -> None:
    def tensors() -> Any:
        yield "a", torch.zeros(2)
        with pytest.raises(CheckpointError, match="File exists"):
            write_directory(tmp_path / "model", {"b": torch.zeros(3)}, {})
        yield "c", torch.ones(2)

    write_directory(tmp_path / "model", tensors(), {})
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_name_with_brackets_is_cleaned_up_after(tmp_path: Path) -> None:
    left = tmp_path / ".model[1].999999999.tmp"
    left.mkdir()
    recover(tmp_path / "model[1]")
    assert not left.exists()


def test_a_path_with_a_zero_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write"):
        atomic_write(f"{tmp_path}/a\0b", b"")


@pytest.mark.parametrize("value", [-1, 1 << 32, 1e300, [1 << 31]])
def test_a_number_that_gguf_has_no_room_for_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="key 'a': a value is out of range"):
        write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama", "a": value}, [])
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_not_utf8_in_a_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama", "general.name": "m\udcff"}, [])
    assert GGUFSource(tmp_path / "a.gguf").metadata["general.name"] == "m?"


# ---------------------------------------------------------------- stdin


def test_lines_of_stdin_end_at_line_breaks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line per result: a text with U+2028 or a form feed is one, and a byte order mark is no part of the first."""
    raw = "\ufeffone\u2028still one\r\ntwo\x0cstill two\n\n three\n".encode()
    for arguments, expected in (
        ({"lines": True}, ["one\u2028still one", "two\x0cstill two", " three"]),
        ({}, ["one\u2028still one\r\ntwo\x0cstill two\n\n three"]),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        assert read_texts(["-"], **arguments) == expected


def test_subtitles_hold_any_text() -> None:
    segment = Segment(0.0, 1.5, " a < b & c --> d\n\ne ")
    assert _formatted(segment, 1, "vtt").splitlines()[1:] == ["a &lt; b &amp; c --&gt; d  e", ""]
    assert _formatted(segment, 1, "srt").splitlines()[2:] == ["a < b & c -> d  e", ""]
    assert _formatted(segment, 1, "text") == "a < b & c --> d  e\n"
