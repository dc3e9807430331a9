"""This machine as a program may use it: the cores it is allowed, what they can do, its memory, its GPU.

Nothing here imports torch but `use_threads`, `device`, `free_on` and `torch_facts`.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    import torch

ROOT = Path("/")

# What the kernels ask of a core -> the flags of /proc/cpuinfo that grant it (x86, then ARM).
ISA = {
    "avx2": ("avx2",),
    "fma": ("fma",),
    "avx512": ("avx512f", "avx512bw", "avx512vl"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "amx_bf16": ("amx_bf16",),
    "amx_int8": ("amx_int8",),
    "neon": ("asimd",),
    "dotprod": ("asimddp",),
    "sve": ("sve",),
    "bf16": ("bf16",),
    "i8mm": ("i8mm",),
}


@dataclass(frozen=True)
class Cores:
    """`usable` cores, the least of what the system has, what this process is bound to, and its quota.

    A core that runs two threads at a time (hyperthreading) counts as two, but once in `physical`, which are those this
    process is bound to."""

    usable: int
    online: int
    affinity: int
    quota: float | None  # cores' worth of time a cgroup grants, None without a limit
    physical: int


@dataclass(frozen=True)
class Usage:
    """Seconds of processor time until the moment `at`: all that was used of the `processors` this process may run on
    (the system's, and what a hypervisor gave to other machines, included), and this process's own."""

    at: float
    processors: int
    busy: float
    own: float

    def by_others(self, before: Usage) -> float:
        """Processors that other processes kept busy since `before`, on average."""
        others = (self.busy - before.busy) - (self.own - before.own)
        return max(0.0, others / max(self.at - before.at, 1e-9))


@dataclass(frozen=True)
class Machine:
    """The facts about the machine that need no torch.  Memory in bytes, None where the system does not say."""

    system: str
    processor: str
    cores: Cores
    isa: tuple[str, ...]
    memory: int | None
    memory_free: int | None
    memory_limit: int | None  # of the cgroup


def look(root: Path = ROOT) -> Machine:
    """The machine this process runs on."""
    info, memory = _cpuinfo(root), _meminfo(root)
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=info.get("model name") or platform.processor() or platform.machine(),
        cores=cores(root),
        isa=tuple(name for name, needed in ISA.items() if flags.issuperset(needed)),
        memory=memory.get("MemTotal"),
        memory_free=memory.get("MemAvailable"),
        memory_limit=min(_memory_limits(root), default=None),
    )


def free_memory(root: Path = ROOT) -> int | None:
    """Bytes that this process may still take without paging: of the machine, and of each cgroup with a limit, where
    pages of files that can be dropped count as free.  None where the system does not say."""
    free = [] if (available := _meminfo(root).get("MemAvailable")) is None else [available]
    for group in _groups(root, "memory"):
        limits = list(_limits_of(group))
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        if limits and used.isdecimal():
            stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            free.append(max(0, min(limits) - int(used) + int(stat.get("inactive_file", 0))))
    return min(free, default=None)


def process_status(field: str) -> int | None:
    """A field of /proc/self/status in bytes, such as VmRSS, the memory of this process; None on other systems."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return 1024 * int(text.partition(f"{field}:")[2].split()[0])


def free_on(where: torch.device) -> int | None:
    """Bytes that are free on a device; on the processor those of `free_memory`."""
    import torch

    return torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else free_memory()


def give_back_memory() -> None:
    """Give the system what the C allocator keeps of freed memory, where it has such a function (glibc)."""
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def cores(root: Path = ROOT) -> Cores:
    """Cores this process may keep busy: binding and cgroup quota count, as in a container of half a machine."""
    online = os.cpu_count() or 1
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(online))
    quota = min(_quotas(root), default=None)
    usable = min(online, len(bound), math.ceil(quota) if quota else online)
    return Cores(max(1, usable), online, len(bound), quota, _physical(root, bound))


def usage(root: Path = ROOT) -> Usage | None:
    """The use of the processors so far; None where the system does not say (/proc/stat)."""
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    ticks = count = 0
    for line in _read(root / "proc/stat").splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in bound and len(fields) >= 8:
            user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, fields[:8])
            ticks += user + nice + system + interrupts + soft + stolen
            count += 1
    if not count:
        return None
    return Usage(time.monotonic(), count, ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


def threads(root: Path = ROOT) -> int:
    """The number of threads for arithmetic: `OMP_NUM_THREADS` where it is set, else one a usable physical core."""
    threads_set = os.environ.get("OMP_NUM_THREADS", "")
    if threads_set.isdecimal() and int(threads_set):
        return int(threads_set)
    available = cores(root)
    return min(available.usable, available.physical)


def use_threads() -> int:
    """Have torch use `threads()`, once, before any work; -> how many."""
    import torch

    torch.set_num_threads(threads())
    return torch.get_num_threads()


def device(name: str) -> torch.device:
    """`cpu`, `cuda` or `cuda:N` as torch means it.  Raises InputError when it is not there, saying why."""
    import torch

    try:
        chosen = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is not one of cpu, cuda, cuda:N") from None
    if chosen.type != "cuda" and str(chosen) not in ("cpu", "cpu:0"):
        raise InputError(f"device {name!r} is not one of cpu, cuda, cuda:N")
    if chosen.type == "cuda" and (why := _no_gpu(torch)):
        raise InputError(f"device {name!r} cannot be used: {why}")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name!r} is not there; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return chosen


def torch_facts() -> dict[str, Any]:
    """The facts that torch gives of itself: version, threads, the code it picks for this processor, and the GPUs."""
    import torch

    gpus = [] if _no_gpu(torch) else [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "code": torch.backends.cpu.get_cpu_capability(),
        "gpus": gpus,
        "gpu": "used when a command is given --device cuda" if gpus else f"not used: {_no_gpu(torch)}",
    }


def _no_gpu(torch: Any) -> str:
    """The reason why there is no GPU to use; empty when there is one."""
    if not torch.backends.cuda.is_built():
        return "this torch is built for the processor only"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty on other systems."""
    first = _read(root / "proc/cpuinfo").strip().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    pairs = (line.partition(":") for line in _read(root / "proc/meminfo").splitlines())
    return {key: int(value.split()[0]) * 1024 for key, _, value in pairs if value.strip().endswith("kB")}


def _physical(root: Path, bound: set[int]) -> int:
    """Physical cores behind the processors `bound`; all processors are cores where the system does not say."""
    topology = (root / f"sys/devices/system/cpu/cpu{number}/topology" for number in bound)
    siblings = [_read(path / "core_cpus_list") or _read(path / "thread_siblings_list") for path in topology]
    return len(set(siblings)) if all(siblings) else len(bound)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's cgroup and those above it: a limit anywhere on the way holds (v2, then v1)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        here = base / path.strip("/")
        yield here
        yield from (parent for parent in here.parents if parent == base or base in parent.parents)


def _quotas(root: Path) -> Iterator[float]:
    """Cores' worth of time granted by each cgroup with a limit."""
    for group in _groups(root, "cpu"):
        granted, _, period = _read(group / "cpu.max").partition(" ")
        if not granted:
            granted, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if granted.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 are no limit
            yield int(granted) / int(period)


def _memory_limits(root: Path) -> Iterator[int]:
    """Bytes granted by each cgroup with a limit."""
    for group in _groups(root, "memory"):
        yield from _limits_of(group)


def _limits_of(group: Path) -> Iterator[int]:
    limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
    if limit.isdecimal() and int(limit) < 1 << 60:  # v1 writes no limit as a number near 2^63
        yield int(limit)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
