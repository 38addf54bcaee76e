"""The machine's memory, and the number of threads with which a model runs fastest on its CPU."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from kvexport.errors import EnvironmentProblem
from kvexport.units import format_bytes

# A core of less than this share of the fastest core's capacity would be the last to finish every product.
FAST = 0.75
TORCH_BYTES = 1 << 30
KEPT_BYTES = 1 << 30  # what a server keeps of prefixes, and of sessions, by default


class Threads(NamedTuple):
    number: int
    # Why there are fewer threads than physical cores; empty if every physical core has a thread
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number}: {'; '.join(self.reasons)}" if self.reasons else f"{self.number}: one for each core"


def suitable_threads(root: Path = Path("/"), usable: frozenset[int] | None = None) -> Threads:
    """Return how many threads a model on the CPU should have: one for each fast core of one NUMA node.

    A matrix product waits for its slowest thread. Slow cores, a second thread on a core, the memory of another NUMA
    node, and more threads than a control group allows therefore make a step longer.
    """
    processors = _usable() if usable is None else usable
    cores = _first_of_each_core(root, processors)
    reasons = []
    fast = cores & _fast(root, processors)
    if fast and fast < cores:
        reasons.append(f"{len(cores) - len(fast)} of {len(cores)} cores are efficiency cores, which have none")
        cores = fast
    nodes = [node for node in (cores & listed for listed in _nodes(root)) if node]
    if len(nodes) > 1:
        cores = max(nodes, key=len)
        reasons.append(
            f"the cores of one of {len(nodes)} NUMA nodes; run one engine on each node with "
            "`numactl --cpunodebind=N --membind=N kvexport ...`"
        )
    granted = _granted(root)
    if granted is not None and granted < len(cores):
        reasons.append(f"the control group grants the time of {granted:g} cores (cpu.max)")
        return Threads(max(1, int(granted)), tuple(reasons))
    return Threads(max(1, len(cores)), tuple(reasons))


def _usable() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _numbers(text: str) -> frozenset[int]:
    ranges = [(int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return frozenset(number for first, last in ranges for number in range(first, last + 1))


def _first_of_each_core(root: Path, processors: frozenset[int]) -> frozenset[int]:
    """Return one of the logical processors of each core, so that no core gets two threads."""
    folder = root / "sys/devices/system/cpu"
    siblings = {n: _numbers(read_system_file(folder / f"cpu{n}/topology/thread_siblings_list")) for n in processors}
    return frozenset(n for n in processors if n == min(siblings[n] & processors, default=n))


def _fast(root: Path, processors: frozenset[int]) -> frozenset[int]:
    if listed := _numbers(read_system_file(root / "sys/devices/cpu_core/cpus")):  # Intel
        return listed & processors
    folder = root / "sys/devices/system/cpu"
    texts = {n: read_system_file(folder / f"cpu{n}/cpu_capacity").strip() for n in processors}  # Arm
    capacity = {n: int(text) for n, text in texts.items() if text.isdigit()}
    if capacity.keys() != processors:
        return processors
    return frozenset(n for n in processors if capacity[n] >= FAST * max(capacity.values()))


def _nodes(root: Path) -> list[frozenset[int]]:
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    return [_numbers(read_system_file(folder / "cpulist")) for folder in folders]


def _granted(root: Path) -> float | None:
    limits = []
    for line in read_system_file(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::/"):  # version 2 of control groups
            group = Path(line.removeprefix("0::/"))
            for folder in (group, *group.parents):
                quota = read_system_file(root / "sys/fs/cgroup" / folder / "cpu.max").split()
                if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
                    limits.append(int(quota[0]) / int(quota[1]))
    return min(limits, default=None)


def machine_memory() -> tuple[int, int]:
    """Return the total and available bytes of the machine's memory, or of its control group's if less; 0 if unknown."""
    text = read_system_file(Path("/proc/meminfo"))
    sizes = {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    group = Path("/sys/fs/cgroup")
    limit, used = (read_system_file(group / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit() and 0 < int(limit) < (total or int(limit) + 1):
        return int(limit), min(available or int(limit), max(0, int(limit) - int(used)))
    return total, available


def require_memory(size: int, purpose: str, fix: str) -> None:
    """Raise EnvironmentProblem if an allocation exceeds the machine's memory, before the system kills the process."""
    total, _ = machine_memory()
    if 0 < total < size:
        raise EnvironmentProblem(
            f"{purpose} takes {format_bytes(size)}, and this machine or its control group has {format_bytes(total)}",
            fix,
        )


def release_mapped(file: Path) -> None:
    """Let the system take back the memory of a file's mapped pages; a page that is needed later is read again."""
    if sys.platform != "linux":
        return
    name, advise = f" {file.resolve()}", ctypes.CDLL(None).madvise
    for line in read_system_file(Path("/proc/self/maps")).splitlines():
        if line.endswith(name):
            first, last = (int(x, 16) for x in line.split(" ", 1)[0].split("-"))
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def require_address_space() -> None:
    """Raise EnvironmentProblem if PyTorch lacks address space; PyTorch would end the process without a message."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < TORCH_BYTES:
        raise EnvironmentProblem(
            f"not enough memory: PyTorch takes {format_bytes(TORCH_BYTES)} of address space, and the limit is "
            f"{format_bytes(limit)}",
            f"ulimit -v {TORCH_BYTES >> 10}, or more",
        )


def read_system_file(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
