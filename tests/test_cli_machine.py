"""The machine as a container sees it, from made-up /proc and /sys."""

import os
from pathlib import Path

import pytest
import torch

from triptych import machine
from triptych.errors import InputError

CPU = "processor : 0\nmodel name : Fast 9000\nflags : fma avx2 avx512f avx512bw avx512vl amx_bf16\n\nprocessor : 1\n"


def root(tmp_path: Path, **files: str) -> Path:
    for name, content in {"proc/cpuinfo": CPU, **files}.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))


def test_without_a_quota_the_binding_counts(tmp_path: Path) -> None:
    assert machine.cores(root(tmp_path)) == machine.Cores(usable=6, online=8, affinity=6, quota=None, physical=6)


@pytest.mark.parametrize(("granted", "usable"), [("max 100000", 6), ("250000 100000", 3), ("20000 100000", 1)])
def test_a_quota_of_the_second_version(granted: str, usable: int, tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": granted}
    assert machine.cores(root(tmp_path, **files)).usable == usable


def test_a_quota_further_up_holds(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}
    assert machine.cores(root(tmp_path, **{"proc/self/cgroup": "0::/a/b\n"}, **files)).quota == 2.0


@pytest.mark.parametrize(("granted", "quota"), [("-1", None), ("400000", 4.0)])
def test_a_quota_of_the_first_version(granted: str, quota: float | None, tmp_path: Path) -> None:
    group = "sys/fs/cgroup/cpu/box"
    files = {f"{group}/cpu.cfs_quota_us": granted, f"{group}/cpu.cfs_period_us": "100000"}
    assert machine.cores(root(tmp_path, **{"proc/self/cgroup": "4:cpu,cpuacct:/box\n"}, **files)).quota == quota


def test_what_cores_can_do_and_memory(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\nHugePages: 3\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000000",
    }
    found = machine.look(root(tmp_path, **files))
    assert found.processor == "Fast 9000"
    assert found.isa == ("avx2", "fma", "avx512", "amx_bf16")
    assert (found.memory, found.memory_free, found.memory_limit) == (2 << 20, 1 << 20, 1_000_000)


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    found = machine.look(tmp_path)
    assert (found.isa, found.memory, found.memory_limit) == ((), None, None)


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_two_threads_of_a_core_are_one_physical_core(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors 0 and 4 share a core, 1 and 5 too; the process may use 0 to 5."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    files = {f"sys/devices/system/cpu/cpu{n}/topology/{file}": f"{n % 4},{n % 4 + 4}\n" for n in range(8)}
    found = machine.cores(root(tmp_path, **files))
    assert (found.usable, found.physical) == (6, 4)
    assert machine.threads(root(tmp_path)) == 4
    quota = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "300000 100000"}
    assert machine.threads(root(tmp_path, **quota)) == 3


def test_a_topology_that_is_not_whole_counts_processors(tmp_path: Path) -> None:
    files = {f"sys/devices/system/cpu/cpu{n}/topology/core_cpus_list": "0-5\n" for n in range(5)}
    assert machine.cores(root(tmp_path, **files)).physical == 6


def test_what_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of these eight processors are not this process's; idle and waiting do not count, stolen time does."""
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    own, at = iter((1.0, 3.0)), iter((10.0, 12.0))
    monkeypatch.setattr("triptych.machine.time.process_time", lambda: next(own))
    monkeypatch.setattr("triptych.machine.time.monotonic", lambda: next(at))
    line = "cpu{n} {used} 0 0 {used} 9 0 0 {used} 7 7\n"
    before, after = (
        "cpu  9 9 9 9 9 9 9 9\n" + "".join(line.format(n=n, used=used * (n + 1)) for n in range(8)) + "intr 5\n"
        for used in (0, 10)
    )
    first = machine.usage(root(tmp_path, **{"proc/stat": before}))
    second = machine.usage(root(tmp_path, **{"proc/stat": after}))
    assert (second.processors, second.busy) == (6, pytest.approx(4.2))  # 2 x 0.1 s x (1 + ... + 6)
    assert second.by_others(first) == pytest.approx((4.2 - 2.0) / 2.0)
    assert first.by_others(second) >= 0.0


def test_a_system_without_such_counts(tmp_path: Path) -> None:
    assert machine.usage(tmp_path) is None


@pytest.mark.parametrize(("asked", "expected"), [("3", 3), ("", 6), ("0", 6), ("many", 6)])
def test_threads(asked: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert machine.threads(root(tmp_path)) == expected


@pytest.mark.parametrize(("name", "says"), [("gpu", "not one of"), ("meta", "not one of"), ("cuda:99", "cuda:99")])
def test_a_device_that_is_not_there(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        machine.device(name)


def test_the_cpu_is_always_there() -> None:
    assert machine.device("cpu") == torch.device("cpu")
