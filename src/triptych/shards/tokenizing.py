"""Texts into a directory of shards, by several processes.

    OUT/tokenizer/              the tokenizer
    OUT/plan.json               what is tokenized and how, until all is done
    OUT/shard-000000.safetensors ...
    OUT/manifest.json           in place of plan.json when the last shard is there

The inputs are cut into parts (`inputs.parts`), and each part becomes the shard of its number: which tokens a shard has
does not depend on the processes, nor on how often the run was stopped.  A shard is written under another name, synced,
and renamed by the one process that holds the lock of the directory.  A run that goes on makes the shards that are
missing, so that no token is lost and none comes twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread

from triptych import machine
from triptych.arguments import checked, integer
from triptych.checkpoints.save import sync_directory, target_of
from triptych.errors import ConfigError, InputError, TextError, TriptychError, counted, shown
from triptych.run_lock import RunLock
from triptych.text import Tokenizer, from_directory
from .inputs import HUB, InputPart, hub_texts, list_inputs, parts
from .manifest import (
    MANIFEST,
    PLAN,
    TOKENIZER,
    InputEntry,
    ShardEntry,
    ShardManifest,
    differences,
    fingerprint,
    read_manifest,
)
from .shard_file import ShardHeader, open_shard, shard_name

SHARD_BYTES = 1 << 26  # of the inputs that become one shard
MOST_PROCESSES = 1 << 10
_START = "from triptych.shards.tokenize_worker import main; main()"


@dataclass(frozen=True)
class TokenizingSummary:
    """What was tokenized, the shards that earlier runs had made, and what was skipped of the inputs."""

    manifest: ShardManifest
    resumed: int
    notes: tuple[str, ...] = ()


MakeShards = Callable[[Path, ShardManifest, Callable[[], Iterator[InputPart]]], None]
"""Called with the directory, the plan and what gives all parts, each time in the same order: writes their shards."""


@checked
def tokenize(
    inputs: Sequence[str | Path],
    out: Path | str,
    tokenizer: Tokenizer,
    *,
    tokenizer_from: str = "",
    field: str = "text",
    separator: str | None = None,
    split: str = "train",
    subset: str | None = None,
    processes: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int | None], object] | None = None,
    make: MakeShards | None = None,
) -> TokenizingSummary:
    """Write the token ids of `inputs` as shards into the directory `out`; called again, it goes on where it was.

    An input is a text file, a folder, a file of records (`.jsonl`, `.csv`, `.tsv`, `.parquet`) or `hub:org/name`, of
    which `split` and `subset` are read once, in order.  A text file is one document, or several with `separator`
    between; one of more than `shard_bytes` bytes without a separator is cut at ends of lines.  Of records `field` is a
    document each.  Documents without a token are left out and counted.  `tokenizer_from` says in the manifest what the
    tokenizer was made from.  `progress` is called with the bytes done and all of them (None with a data set of the
    hub), in any thread.  `make` makes the shards elsewhere (`MakeShards`), and takes no data set of the hub.

    Raises TextError and InputError for inputs that cannot be read, ConfigError where `out` is of another run or in use.
    """
    if isinstance(inputs, str) or not inputs:
        raise InputError("there is nothing to tokenize; give a list of files, folders or hub:org/name")
    count = integer("processes", machine.cores().usable if processes is None else processes, 1)
    if count > MOST_PROCESSES:
        raise InputError(f"processes={count} is more than {MOST_PROCESSES:,}; as many as there are cores are enough")
    if separator == "":
        raise InputError("separator is empty; give the text between two documents, or leave it out")
    if not (make is None or callable(make)):
        raise InputError(f"make is {shown(make)}, no function; leave it out to tokenize on this machine")
    entries, notes = list_inputs(inputs)
    if make is not None and any(entry.path.startswith(HUB) for entry in entries):
        raise InputError("a data set of the hub is read once, by one machine; give files, or leave out --ray")
    plan = ShardManifest(
        tokenizer=fingerprint(tokenizer), vocab_size=tokenizer.vocab_size, tokenizer_from=tokenizer_from, field=field,
        separator=separator, shard_bytes=integer("shard_bytes", shard_bytes, 1), inputs=entries,
    )  # fmt: skip
    directory = target_of(out)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        check_own(directory)
    except OSError as error:
        raise TextError(f"cannot write {out}: {error.strerror or error}") from None
    with RunLock(directory):
        before = begin(directory, plan, tokenizer)
        if before.shards:
            return TokenizingSummary(before, len(before.shards), tuple(notes))
        run = _TokenizingRun(directory, plan, progress or (lambda done, total: None))
        every = partial(parts, plan, partial(hub_texts, split=split, subset=subset))
        if make is not None:
            make(directory, plan, every)
        run.make(every(), count)
        return TokenizingSummary(run.finish(), run.resumed, tuple(notes))


def check_own(directory: Path) -> None:
    """Raises ConfigError for a directory that holds something else than shards."""
    names = set(os.listdir(directory))
    others = sorted(name for name in names - {TOKENIZER} if name[0] != ".")
    if others and not names & {PLAN, MANIFEST}:
        raise ConfigError(f"{directory} holds {shown(others[0])} and no shards; give a new directory")


def begin(directory: Path, plan: ShardManifest, tokenizer: Tokenizer) -> ShardManifest:
    """Write `plan` into an empty directory; the plan or the manifest that is there.

    Raises ConfigError for a directory with a run of other inputs or another tokenizer.
    """
    names = (directory / name for name in (MANIFEST, PLAN))
    there = next((read_manifest(path) for path in names if path.exists()), None)
    if there is not None:
        if there.run != plan.run:
            reasons = "; ".join(differences(there, plan))
            raise ConfigError(f"{directory} is of another run: {reasons}; give another directory, or delete this one")
        return there
    tokenizer.save(directory / TOKENIZER)
    if fingerprint(from_directory(directory / TOKENIZER)) != plan.tokenizer:
        raise TextError("this tokenizer is not the same when it is saved and loaded again; give one from a directory")
    plan.write(directory / PLAN)
    return plan


class _TokenizingRun:
    """One call: which shards are there, and which are being made."""

    def __init__(self, directory: Path, plan: ShardManifest, progress: Callable[[int, int | None], object]) -> None:
        self.directory, self.plan, self.progress = directory, plan, progress
        self.done: dict[int, ShardHeader] = {}
        self.resumed, self.number = 0, 0
        self._lock, self._stop, self._errors = Lock(), Event(), list[BaseException]()
        self._bytes, self._reading = 0, dict[int, int]()
        once = any(entry.path.startswith(HUB) for entry in plan.inputs)
        self._total = None if once else sum(entry.size for entry in plan.inputs)
        for left in directory.glob(".shard-*.tmp"):
            left.unlink(missing_ok=True)

    def make(self, every: Iterable[InputPart], processes: int) -> None:
        """Make the shards of all parts that are not there yet."""
        todo, workers = self._todo(every), list[_TokenizerProcess]()

        def work() -> None:
            try:
                worker: _TokenizerProcess | None = None
                while (task := self._next(todo)) is not None:
                    if worker is None:
                        workers.append(worker := _TokenizerProcess(self.directory, self.plan))
                    self._commit(*task, worker.run(*task, partial(self._read, task[0])))
            except BaseException as error:
                self._errors.append(error)
                self._stop.set()

        threads = [Thread(target=work, daemon=True) for _ in range(processes)]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) and not self._stop.is_set():
                self._stop.wait(0.05)
        finally:
            self._stop.set()
            for worker in workers:
                worker.close()
            for thread in threads:
                thread.join(1.0)  # one that waits for the network commits nothing any more
        if self._errors:
            raise self._errors[0]

    def _next(self, todo: Iterator[tuple[int, InputPart]]) -> tuple[int, InputPart] | None:
        with self._lock:
            return None if self._stop.is_set() else next(todo, None)

    def _todo(self, every: Iterable[InputPart]) -> Iterator[tuple[int, InputPart]]:
        """The parts without a shard, and their numbers."""
        for number, part in enumerate(every):
            self.number = number + 1
            header = self._made(number)
            if header is None:
                yield number, part
                continue
            if header.origin.digest != part.digest:
                raise ConfigError(
                    f"{self.directory / shard_name(number)} was made from other texts than the data set has now, which "
                    "is read once and in order; delete the directory and begin again"
                )
            self.done[number] = header
            self.resumed += 1
            self._bytes += part.weight
            self.progress(self._bytes, self._total)

    def _made(self, number: int) -> ShardHeader | None:
        """The header of the shard `number`, where it is there and of this run."""
        path = self.directory / shard_name(number)
        if not path.exists():
            return None
        try:
            header, _ = open_shard(path)
        except TextError as error:
            raise TextError(f"{error}; remove it, and the same command makes it again") from None
        if (header.origin.run, header.origin.number) != (self.plan.run, number):
            raise ConfigError(f"{path} is a shard from another run; remove it, and the same command makes it again")
        return header

    def _read(self, number: int, characters: int) -> None:
        """`characters` of the part `number` have been read."""
        with self._lock:
            self._reading[number] = characters
            self.progress(self._bytes + sum(self._reading.values()), self._total)

    def _commit(self, number: int, part: InputPart, file: str) -> None:
        """The shard in `file` is whole: from here on it outlives this process."""
        path = self.directory / shard_name(number)
        with self._lock:
            if self._stop.is_set():
                return
            os.replace(self.directory / file, path)
            sync_directory(self.directory)
            self.done[number] = open_shard(path)[0]
            self._bytes += part.weight
            self._reading.pop(number, None)
            self.progress(self._bytes + sum(self._reading.values()), self._total)

    def finish(self) -> ShardManifest:
        """Write the manifest.  Raises TextError where there is no token."""
        assert sorted(self.done) == list(range(self.number))
        for entry in self.plan.inputs:
            if not entry.path.startswith(HUB) and not _is_as_before(entry):
                raise TextError(
                    f"{entry.path} has changed while it was tokenized; delete {self.directory}, begin again"
                )
        shards = [
            ShardEntry(
                name=shard_name(number), documents=header.documents, tokens=header.tokens, size=header.size,
                text_bytes=header.origin.text_bytes, empty=header.origin.empty, sha256=header.sha256,
            )
            for number, header in sorted(self.done.items())
        ]  # fmt: skip
        manifest = self.plan.model_copy(update={"shards": shards})
        if not manifest.tokens:
            raise TextError("the inputs have no text; give others")
        manifest.write(self.directory / MANIFEST)
        (self.directory / PLAN).unlink(missing_ok=True)
        return manifest


def _is_as_before(entry: InputEntry) -> bool:
    with suppress(OSError):
        status = os.stat(entry.path)
        return (status.st_size, status.st_mtime_ns) == (entry.size, entry.changed)
    return False


class _TokenizerProcess:
    """A process that makes shards."""

    def __init__(self, directory: Path, plan: ShardManifest) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
            env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for the process that waits for this one
        )  # fmt: skip
        self._send(
            tokenizer=str(directory / TOKENIZER), out=str(directory), run=plan.run, field=plan.field,
            separator=plan.separator, fingerprint=plan.tokenizer,
        )  # fmt: skip

    def _send(self, **values: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # what it says instead of an answer is read below
            self.process.stdin.write(json.dumps(values) + "\n")
            self.process.stdin.flush()

    def run(self, number: int, part: InputPart, progress: Callable[[int], object]) -> str:
        """Make one shard -> the name of its file.  Raises what the process reports, and TextError where it ended."""
        assert self.process.stdout is not None
        self._send(number=number, part=part.to_json())
        for line in self.process.stdout:
            answer = json.loads(line)
            if "file" in answer:
                return str(answer["file"])
            if "error" in answer:
                raise _error(answer["kind"])(f"{answer['error']}")
            progress(answer["read"])
        code = self.process.wait()
        ended = f"by signal {-code}, perhaps for lack of memory" if code < 0 else f"with exit code {code}"
        raise TextError(f"a process that tokenizes ended {ended}; the same command goes on, with fewer processes")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _error(name: str) -> type[TriptychError]:
    kinds: dict[str, type[TriptychError]] = {"InputError": InputError, "ConfigError": ConfigError}
    return kinds.get(name, TextError)


def in_words(summary: TokenizingSummary) -> str:
    """`"12 documents, 345 tokens, 1.2 MB of text in 3 shards"`."""
    made = summary.manifest
    size = f"{made.text_bytes / 1e6:,.1f} MB"
    shards = counted(len(made.shards), "shard")
    return f"{counted(made.documents, 'document')}, {counted(made.tokens, 'token')}, {size} of text in {shards}"
