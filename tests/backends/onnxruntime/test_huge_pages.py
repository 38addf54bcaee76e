"""Tests of weights in huge pages: when they are used, and when they are not."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from kvexport.backends.onnxruntime.operators import library, why_small_pages
from kvexport.ops.linear import Form
from tests.support.paths import ROOT

PLUGINS = ROOT / "plugins"
GIB = 1 << 30
# A program that makes a session of one Linear with a constant weight of 4 MiB, and prints the megabytes of huge pages
# that the process then asks for.
PROGRAM = """
import re, sys
import numpy as np
import onnxruntime as ort
from kvexport.backends.onnxruntime.operators import library

options = ort.SessionOptions()
options.register_custom_ops_library(str(library()))

def advised():
    maps = open("/proc/self/smaps").read().split("VmFlags:")
    sizes = [int(re.findall(r"^Size: +(\\d+) kB", part, re.MULTILINE)[-1]) for part in maps[:-1]]
    return sum(size for size, flags in zip(sizes, maps[1:]) if " hg" in flags.splitlines()[0]) // 1024

before = advised()
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
(found,) = session.run(None, {"x": np.ones((2, 1024), np.float32)})
assert (found == 1024).all()
held = advised() - before
del session
print(held, advised() - before)
"""


@pytest.fixture(scope="module")
def one_linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    node = helper.make_node("Linear", ["x", "w"], ["y"], domain="kvexport", **Form().attributes)
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B", 1024]) for name in "xy")
    weight = numpy_helper.from_array(np.ones((1024, 1024), np.float32), "w")
    graph = helper.make_graph([node], "g", [x], [y], [weight])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    path = tmp_path_factory.mktemp("model") / "linear.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=11), path)
    return path


def megabytes(model: Path, environment: dict[str, str]) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    return [int(x) for x in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="not reached: huge pages are Linux's")
def test_a_weight_stays_in_huge_pages_while_its_session_exists(one_linear: Path) -> None:
    path = library()
    if path is None:
        pytest.skip("not reached: the native operators are not built (make native)")
    if why := why_small_pages(path):
        pytest.skip(f"not reached: weights in huge pages: {why}")
    held, left = megabytes(one_linear, {})
    assert held >= 4 and left == 0
    assert megabytes(one_linear, {"KVEXPORT_HUGE_PAGES": "off"}) == [0, 0]


# Gives up memory of the heap, a mapped file, and a mapped file with one changed page; prints how many pages are left.
GIVE_UP = """
#include <cstdio>
#include <vector>
#include "PLUGINS/bindings/onnxruntime/huge_pages.h"
int main(int, char** arguments) {
  const size_t page = sysconf(_SC_PAGESIZE), bytes = 1100 * page;
  volatile int sum = 0;
  const int file = open(arguments[1], O_RDONLY);
  for (int kind = 0; kind < 3; ++kind) {
    const int flags = MAP_PRIVATE | (kind ? 0 : MAP_ANONYMOUS);
    char* data = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, kind ? file : -1, 0));
    volatile char* const all = data;
    for (size_t i = 0; i < bytes; i += page)
      if (kind == 0 || (kind == 2 && i == 700 * page)) all[i] = 7;
      else sum = sum + all[i];
    kv::give_up(data, bytes);
    std::vector<uint64_t> entries(1100);
    const int map = open("/proc/self/pagemap", O_RDONLY);
    if (pread(map, entries.data(), 8800, reinterpret_cast<uintptr_t>(data) / page * 8) != 8800) return 1;
    int present = 0;
    for (uint64_t entry : entries) present += entry >> 63;
    printf("%d %d ", present, all[700 * page]);
  }
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="not reached: Linux alone tells which pages are of a file")
def test_copied_pages_of_a_file_leave_memory_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"\5" * (1100 * os.sysconf("SC_PAGESIZE")))
    (tmp_path / "give_up.cpp").write_text(GIVE_UP.replace("PLUGINS", str(PLUGINS)))
    try:
        command = ["g++", "-std=c++17", "-o", tmp_path / "give_up", tmp_path / "give_up.cpp"]
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("not reached: there is no g++")
    done = subprocess.run([tmp_path / "give_up", tmp_path / "weights"], capture_output=True, text=True, check=True)
    heap, heap_value, mapped, mapped_value, changed, changed_value = map(int, done.stdout.split())
    assert (heap, mapped, changed) == (1100, 0, 1100)
    assert (heap_value, mapped_value, changed_value) == (7, 5, 7)


@pytest.fixture(scope="module")
def asks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that returns whether a number of bytes may be allocated on the machine whose files are under a root."""
    folder = tmp_path_factory.mktemp("asks")
    source = folder / "asks.cpp"
    source.write_text(
        f'#include "{PLUGINS}/bindings/onnxruntime/huge_pages.h"\n'
        "int main(int, char** a) { return kv::has_memory(atoll(a[1]), a[2]) ? 0 : 1; }\n"
    )
    try:
        subprocess.run(["g++", "-std=c++17", "-o", folder / "asks", source], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("not reached: there is no g++")
    return folder / "asks"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MACHINE = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 5 kB\nMemAvailable: {32 << 20} kB\n"}
V2 = {"proc/self/cgroup": "0::/jobs/one\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/jobs\n4:memory:/jobs/one\n"}


def group(
    path: str, limit: int, used: int, stat: str = "", names: tuple[str, str] = ("max", "current")
) -> dict[str, str]:
    files = {names[0]: f"{limit * GIB}\n", names[1]: f"{used * GIB}\n"} | ({"stat": stat} if stat else {})
    return {f"sys/fs/cgroup/{path}memory.{name}": text for name, text in files.items()}


OF_V1 = ("limit_in_bytes", "usage_in_bytes")
CACHED = f"anon {GIB}\ninactive_file {4 * GIB}\nactive_file {2 * GIB}\n"


@pytest.mark.parametrize(
    ("files", "most"),
    [
        (MACHINE, 24),  # an eighth of the machine's 64 stays
        (MACHINE | V2, 24),
        (MACHINE | V2 | {"sys/fs/cgroup/jobs/one/memory.max": "max\n"}, 24),
        (MACHINE | V2 | group("jobs/one/", 8, 1), 6),
        (MACHINE | V2 | group("jobs/one/", 8, 7, CACHED), 6),  # the memory that it uses for files counts as free
        # A group around the process's own group, and the root group, whose path is the host's.
        (MACHINE | V2 | group("jobs/", 16, 1), 13),
        (MACHINE | V2 | group("", 16, 1), 13),
        (MACHINE | V1 | group("memory/jobs/one/", 8, 4, f"total_inactive_file {GIB}\ntotal_active_file 0\n", OF_V1), 4),
        (MACHINE | V1 | group("memory/", 8, 1, names=OF_V1), 6),
        ({}, -1),  # nothing is known
    ],
)
def test_an_eighth_of_the_memory_stays_free(files: dict[str, str], most: int, asks: Path, tmp_path: Path) -> None:
    """An eighth of the memory stays free, both of the machine and of every control group around the process."""
    write(tmp_path, files)

    def may(count: int) -> bool:
        return subprocess.run([asks, str(count * GIB), str(tmp_path)], check=False).returncode == 0

    assert not may(most + 1)
    assert most < 0 or may(most)
