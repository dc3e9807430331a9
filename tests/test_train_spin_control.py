"""How torch's threads wait while a run trains: asleep beside busy processes, spinning on a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triptych.machine import Usage
from triptych.train.spin_control import Waiting, gnu_openmp

needs_gnu = pytest.mark.skipif(gnu_openmp() is None, reason="torch does not use GNU OpenMP here")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    yield
    torch.set_num_threads(before)


class Machine:
    """Four processors, of which others use `others`; a second passes at each look, and this process uses two."""

    def __init__(self) -> None:
        self.others, self.at, self.busy = 0.0, 0.0, 0.0

    def usage(self, seconds: float = 1.0) -> Usage:
        self.at += seconds
        self.busy += seconds * (self.others + 2.0)
        return Usage(self.at, 4, self.busy, self.at * 2.0)


@needs_gnu
def test_it_follows_the_use_of_the_processors() -> None:
    machine, notes, seen = Machine(), [], []
    with Waiting(notes.append, machine.usage) as waiting:
        assert waiting.asleep  # until the first look
        for machine.others in (0.0, 2.0, 2.2, 2.5, 2.2, 2.1, 4.0, 4.0):
            waiting.look()
            seen.append(waiting.asleep)
    assert seen == [False, False, False, True, True, False, True, True]
    assert notes == ["other programs keep 2.5 of 4 processors busy; training is slower"]
    assert not waiting.asleep


@needs_gnu
def test_it_waits_for_a_whole_interval() -> None:
    machine = Machine()
    with Waiting(print, lambda: machine.usage(0.4)) as waiting:
        waiting.look()
        waiting.look()
        assert waiting.asleep
        waiting.look()
        assert not waiting.asleep


@needs_gnu
def test_the_surplus_threads_end() -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    torch.zeros(1 << 18).add_(1)
    before = threads()
    with Waiting(print, Machine().usage):
        more = threads() - before
        assert len(more) >= 2
    deadline = time.monotonic() + 60
    while more & threads():  # they end shortly after
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_has_no_second_thread_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    with Waiting(print, Machine().usage) as waiting:
        assert not waiting.asleep
    torch.set_num_threads(2)
    with Waiting(print, lambda: None) as waiting:
        waiting.look()
        assert not waiting.asleep
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with Waiting(print, Machine().usage) as waiting:
        assert not waiting.asleep


SPIN = """
import sys, time
import torch
from triptych import machine
from triptych.train.spin_control import _Surplus, gnu_openmp

torch.set_num_threads(2)
numbers = torch.zeros(1 << 18)
def spent():
    numbers.add_(1)  # the second thread waits from here on
    begin = time.process_time()
    time.sleep(0.5)
    return time.process_time() - begin
spent()
surplus = _Surplus(gnu_openmp(), 2)
spent()  # those that still look for the number of times they began with
asleep = spent()
surplus.end()
spinning = 0.0
for _ in range(20):  # the surplus threads end shortly after, and the first looks may still be few
    spinning = max(spinning, spent())
    if spinning > 0.05:
        break
print(asleep, spinning)
"""


@needs_gnu
@pytest.mark.heavy
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one processor no thread spins")
def test_threads_that_wait_use_no_time_while_there_is_a_surplus() -> None:
    """The behaviour of GNU OpenMP that all this rests on; without a surplus a waiting thread looks on and on."""
    environment = os.environ | {"GOMP_SPINCOUNT": "100000000", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-c", SPIN], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    asleep, spinning = map(float, run.stdout.split())
    assert asleep < 0.05 < spinning, (asleep, spinning, Path("/proc/loadavg").read_text())
