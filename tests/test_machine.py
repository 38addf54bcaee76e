"""Tests of the number of threads on faked systems: hybrid processors, several memory nodes, and containers."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvexport.backends.onnxruntime import backend
from kvexport.machine import Threads, suitable_threads

CPU = "sys/devices/system/cpu/cpu"
PLAIN = {f"{CPU}{n}/topology/thread_siblings_list": f"{n}\n" for n in range(8)}
# Processors 0 to 3 are two threads of each of two performance cores, 4 to 7 are efficiency cores.
INTEL = {
    **{f"{CPU}{n}/topology/thread_siblings_list": f"{n // 2 * 2}-{n // 2 * 2 + 1}\n" for n in range(4)},
    **{f"{CPU}{n}/topology/thread_siblings_list": f"{n}\n" for n in range(4, 8)},
    "sys/devices/cpu_core/cpus": "0-3\n",
    "sys/devices/cpu_atom/cpus": "4-7\n",
}
ARM = PLAIN | {f"{CPU}{n}/cpu_capacity": f"{1024 if n == 7 else 900 if n > 3 else 350}\n" for n in range(8)}
NODES = PLAIN | {f"sys/devices/system/node/node{n}/cpulist": f"{4 * n}-{4 * n + 3}\n" for n in range(2)}
V2 = {"proc/self/cgroup": "0::/jobs/one\n"}


@pytest.mark.parametrize(
    ("files", "usable", "count", "reason"),
    [
        ({}, range(8), 8, ""),
        (PLAIN, range(8), 8, ""),
        (PLAIN, [1, 5], 2, ""),
        ({f"{CPU}{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}\n" for n in range(8)}, range(8), 4, ""),
        (INTEL, range(8), 2, "4 of 6 cores are efficiency cores"),
        (INTEL, range(4, 8), 4, ""),
        (INTEL, [3, 6], 1, "1 of 2 cores are efficiency cores"),
        (ARM, range(8), 4, "4 of 8 cores are efficiency cores"),
        (NODES, range(8), 4, "one of 2 NUMA nodes"),
        (NODES, range(4), 4, ""),
        (NODES, range(1, 6), 3, "one of 2 NUMA nodes"),
        (PLAIN | V2 | {"sys/fs/cgroup/jobs/one/cpu.max": "max 100000\n"}, range(8), 8, ""),
        (PLAIN | V2 | {"sys/fs/cgroup/jobs/one/cpu.max": "250000 100000\n"}, range(8), 2, "the time of 2.5 cores"),
        (PLAIN | V2 | {"sys/fs/cgroup/jobs/cpu.max": "50000 100000\n"}, range(8), 1, "the time of 0.5 cores"),
        (PLAIN | V2 | {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, range(8), 3, "the time of 3 cores"),
        (PLAIN | V2 | {"sys/fs/cgroup/jobs/one/cpu.max": "900000 100000\n"}, range(8), 8, ""),
        (PLAIN | V2 | {"sys/fs/cgroup/jobs/one/cpu.max": "nonsense\n"}, range(8), 8, ""),
    ],
)
def test_threads_suit_the_processor_and_the_container(
    tmp_path: Path, files: dict[str, str], usable: list[int], count: int, reason: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    threads = suitable_threads(tmp_path, frozenset(usable))
    assert threads.number == count
    assert reason in str(threads) if reason else not threads.reasons


@pytest.mark.parametrize(
    ("suitable", "usable", "passed"),
    [(Threads(4, ()), 8, 0), (Threads(4, ("the control group",)), 8, 4), (Threads(3, ()), 6, 3)],
    ids=["its own choice", "fewer than cores", "part of the machine"],
)
def test_onnx_runtime_gets_a_number_of_threads_where_it_would_choose_another(
    one_thread: Callable[[], int], monkeypatch: pytest.MonkeyPatch, suitable: Threads, usable: int, passed: int
) -> None:
    monkeypatch.setattr(backend, "suitable_threads", lambda: suitable)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)), raising=False)
    assert one_thread() == passed
