"""The native operators after their build.

The tests run random calls of the kernels under sanitizers and on every instruction set, and the conformance suite on
each of them. They check the library's exports, and the messages of a build that lacks a part.

Programs for the tests stay under build-cache, and are compiled again only after a change of their sources. A test that
this machine cannot run is skipped with the name of the missing part. `make cross-tools` installs the compiler and the
emulator for Arm.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from kvexport.backends.onnxruntime.operators import library
from plugins.building import make
from tests.support.paths import ROOT

PLUGINS = ROOT / "plugins"
ON_ARM = platform.machine() in ("aarch64", "arm64")
ON_X86 = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "amx")
ISAS = ("portable", "neon", "dotprod", "i8mm") if ON_ARM else ON_X86
LINEAR_ALONE = ("avxvnni", "avx512vnni", "amx", "dotprod", "i8mm")  # which differ only in linear kernels
every_isa = pytest.mark.parametrize("isa", ISAS)
needs_library = pytest.mark.skipif(
    library() is None, reason="not reached: the native operators are not built (make native)"
)


def tool(*names: str) -> str:
    """Return the path of the first of these programs that is installed. Skip the test if none is."""
    path = next((path for path in map(shutil.which, names) if path), None)
    if path is None:
        pytest.skip(f"not reached: there is no {' or '.join(names)} on this machine")
    return path


@cache
def fuzz(folder: str, *options: str) -> Path:
    cmake = tool("cmake")
    tool(os.environ.get("CXX", "c++"))
    build = ROOT / "build-cache" / folder
    jobs = str(os.cpu_count() or 1)
    for command in (
        ["-S", str(PLUGINS), "-B", str(build), "-DKV_ALONE=", *options],
        ["--build", str(build), "--target", "kv_fuzz", "--parallel", jobs],
    ):
        done = subprocess.run([cmake, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return build / "kv_fuzz"


def calls_hold(command: list[str], seed: int, cases: int, isa: str = "", kind: Sequence[str] = ()) -> None:
    """Run random calls on an instruction set, by default the best. Skip the test if the machine lacks it."""
    environment = {**os.environ, "KVEXPORT_CPU_ISA": isa, "TSAN_OPTIONS": "halt_on_error=1"}
    if isa:
        none = subprocess.run([*command, "0", "0"], capture_output=True, text=True, check=True, env=environment)
        if not none.stdout.startswith(f"{isa}:"):
            pytest.skip(f"not reached: this machine has no {isa}, and would run {none.stdout.partition(':')[0]}")
    arguments = [*command, str(seed), str(cases), *(["linear"] if isa in LINEAR_ALONE else kind)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    if (
        "unexpected memory mapping" in done.stderr
    ):  # ThreadSanitizer of GCC 12 does not know kernels that randomize addresses this much
        done = subprocess.run(
            [tool("setarch"), "-R", *arguments], capture_output=True, text=True, check=False, env=environment
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


# Seeds are far apart: case i of seed s is case 0 of seed s + i.
@every_isa
def test_random_calls_hold_on_every_instruction_set(isa: str) -> None:
    calls_hold([str(fuzz("native"))], 10_000, 300, isa)


@every_isa
def test_random_calls_under_address_and_undefined_behaviour_sanitizer(isa: str) -> None:
    calls_hold([str(fuzz("native-address-undefined", "-DKV_SANITIZE=address,undefined"))], 20_000, 60, isa)


def test_cases_that_once_failed_hold() -> None:
    """Cases that once failed pass under the address and undefined-behaviour sanitizers, which found them."""
    lines = (PLUGINS / "tests" / "fuzz_seeds.txt").read_text().splitlines()
    arguments = [line.partition(":")[0].split() for line in lines if not line.startswith("#")]
    program = str(fuzz("native-address-undefined", "-DKV_SANITIZE=address,undefined"))
    for seed, cases, *kind in arguments:
        calls_hold([program], int(seed), int(cases), kind=kind)
    assert arguments


def test_random_calls_under_thread_sanitizer() -> None:
    """No threads race on this machine's best instruction set: all sets share the code that divides the work."""
    output = subprocess.run([fuzz("native"), "0", "0"], capture_output=True, text=True, check=True).stdout
    best = output.partition(":")[0].replace("amx", "avx512vnni")  # whose kernels have both
    alone = best if best in make.SETS else ""
    calls_hold([str(fuzz("native-thread", "-DKV_SANITIZE=thread", f"-DKV_ALONE={alone}"))], 30_000, 30)


# Kernels of AVX-512 without content, and a program that tells whether they would run.
EMPTY_KERNELS = """#include <cstdio>
#include "cpu/core/kernels.h"
#include "cpu/recurrence/recurrence.h"
namespace kv {
namespace avx512vnni {
void linear(const KvLinear&, const KvAdapters*, KvRunner) {}
void linear_amx(const KvLinear&, const KvAdapters*, KvRunner) {}
void experts(const KvExperts&, KvRunner) {}
}  // namespace avx512vnni
namespace avx512 {
void vote_attention(const KvVoteAttention&, KvRunner) {}
void keep_queries(const KvVoteAttention&, const KvRing&) {}
void merge_cache(const KvMergeCache&, const KvFit*, const KvRing*, KvRunner) {}
void linear(const KvLinear&, const KvAdapters*, KvRunner) {}
void experts(const KvExperts&, KvRunner) {}
void linear_attention(const KvLinearAttention&, KvRunner) {}
}  // namespace avx512
}  // namespace kv
const char* kv_cpu_why_no_panels(const KvWeight*, int64_t) { return nullptr; }
int main() {
  const KvLinear call{};
  const char* const problem = kv_cpu_linear(&call, {});
  printf("%s: %s", kv_cpu_isa(), problem ? problem : "");
}
"""


@pytest.mark.skipif(ON_ARM, reason="not reached: AVX-512 is of x86")
@pytest.mark.parametrize(("alone", "left_out"), [("avx512", "avx512vnni"), ("avx512vnni", "avx512")])
def test_kernels_of_one_set_alone_refuse_machines_without_it(alone: str, left_out: str, tmp_path: Path) -> None:
    compiler, source = tool(os.environ.get("CXX", "c++")), tmp_path / "program.cpp"
    source.write_text(EMPTY_KERNELS)

    def said(supports: int, isa: str) -> str:
        """Return the answer of the program on a machine that has all instruction sets, or none."""
        program = tmp_path / f"program{supports}"
        if not program.exists():
            flags = [f'-DKV_ALONE="{alone}"', f"-DKV_ALONE_{alone}", f"-D__builtin_cpu_supports(x)={supports}"]
            sources = [str(source), str(PLUGINS / "cpu" / "dispatch.cpp")]
            subprocess.run([compiler, "-std=gnu++17", *flags, f"-I{PLUGINS}", *sources, "-o", program], check=True)
        environment = {**os.environ, "KVEXPORT_CPU_ISA": isa}
        return subprocess.run([program], check=True, capture_output=True, text=True, env=environment).stdout

    assert said(1, alone) == f"{alone}: a dimension is zero or negative"
    for answer in (said(0, ""), said(1, "avx2"), said(1, left_out)):
        assert answer.startswith(f": its kernels were compiled for {alone} alone")


@pytest.mark.parametrize("isa", ["neon", "portable", "dotprod", "i8mm"])
def test_random_calls_on_arm(isa: str) -> None:
    if platform.machine() in ("aarch64", "arm64"):
        pytest.skip("not reached by emulation: this machine is one, and its own instruction sets are tested")
    compiler = tool("aarch64-linux-gnu-g++")
    options = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}")
    program = fuzz(
        "native-aarch64",
        *options,
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        "-DCMAKE_BUILD_TYPE=Cross",
        "-DCMAKE_CXX_FLAGS_CROSS=-Og",
    )
    calls_hold([tool("qemu-aarch64-static", "qemu-aarch64"), str(program)], 40_000, 30, isa)


# All instruction sets except the best one, on which the suite itself runs.
@needs_library
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa not in LINEAR_ALONE][:-1])
def test_the_conformance_suite_on_every_instruction_set(isa: str) -> None:
    environment = {**os.environ, "KVEXPORT_BACKENDS": "native-cpu", "KVEXPORT_CPU_ISA": isa}
    answer = "from kvexport.backends.onnxruntime.operators import *; print(instruction_set(library()))"
    detected = subprocess.run(
        [sys.executable, "-c", answer], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    if detected.stdout.strip() != isa:
        pytest.skip(f"not reached: this machine has no {isa}")
    files = [f"tests/conformance/test_{name}.py" for name in ("vote_attention", "merge_cache")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is None or int(passed[1]) > 100, done.stdout[-500:]


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "amx"])  # amx is compiled together with avx512vnni
def test_no_function_of_one_instruction_set_can_stand_in_for_anothers(isa: str) -> None:
    # The linker keeps any of several weak definitions of one name, perhaps one that this machine cannot run.
    fuzz("native")
    folder = ROOT / "build-cache" / "native" / "CMakeFiles" / f"kv_{isa}.dir"
    once = ("dispatch.cpp", "repack.cpp")  # compiled once, for no particular instruction set
    sources = [path.relative_to(PLUGINS) for path in (PLUGINS / "cpu").rglob("*.cpp") if path.name not in once]
    if isa in LINEAR_ALONE:
        sources = [path for path in sources if path.name in ("linear.cpp", "panel_products.cpp", "experts.cpp")]
    objects = [folder / f"{path}.o" for path in sources]
    assert len(objects) == (3 if isa in LINEAR_ALONE else 6) and all(path.is_file() for path in objects)
    listed = subprocess.run(
        [tool("nm"), "-C", "--defined-only", *map(str, objects)], capture_output=True, text=True, check=True
    ).stdout
    symbols = re.findall(r"^[0-9a-f]+ (\w) (.+)$", listed, re.MULTILINE)
    assert any(name.startswith(f"kv::{isa}::linear(") and kind == "T" for kind, name in symbols)
    weak = [name for kind, name in symbols if kind in "WVu" and not name.startswith("DW.ref.")]
    assert not [name for name in weak if not name.startswith(f"kv::{isa}::")]
    strong = [name for kind, name in symbols if kind in "TDBR"]
    assert not [name for name in strong if not name.startswith(f"kv::{isa}::")]


@needs_library
def test_the_library_links_no_onnxruntime_and_exports_only_its_functions() -> None:
    path = str(library())
    needed = re.findall(
        r"NEEDED.*\[(.+)\]",
        subprocess.run([tool("readelf"), "-d", path], capture_output=True, text=True, check=True).stdout,
    )
    assert needed and not [name for name in needed if "onnx" in name]
    listed = subprocess.run(
        [tool("nm"), "-D", "--defined-only", path], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
    assert exported == {
        "RegisterCustomOps",
        "kvexport_isa",
        "kvexport_device_problem",
        "kvexport_schema",
        "kvexport_huge_pages",
    }


# Building.


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PLUGINS / "build.py"), "onnxruntime", "--out", str(tmp_path / "out")]
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**kept, **environment})


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("kvexport: the target onnxruntime was not built: ")
    return done.stderr


def test_without_cmake(tmp_path: Path) -> None:
    assert "cmake was not found (apt-get install cmake g++)" in one_line(build(tmp_path, PATH=str(tmp_path)))


def test_without_a_compiler(tmp_path: Path) -> None:
    (tmp_path / "cmake").write_text("#!/bin/sh\n")
    (tmp_path / "cmake").chmod(0o755)
    assert "c++ was not found" in one_line(build(tmp_path, PATH=str(tmp_path)))
    assert "/none/g++ was not found" in one_line(build(tmp_path, PATH=str(tmp_path), CXX="/none/g++"))


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("here", "flags", "before", "alone"),
    [
        (True, make.SETS["avx512vnni"], None, "avx512vnni"),
        (True, make.SETS["avx512vnni"], "avx512", "avx512vnni"),
        (True, make.SETS["avx512vnni"], "", ""),
        (True, make.AVX512, None, "avx512"),
        (True, make.AVX512 - {"avx512dq"}, None, "avx2"),
        (True, make.SETS["avxvnni"], None, "avxvnni"),
        (True, make.AVX2 - {"fma"}, None, ""),
        (False, make.AVX512, "avx512", ""),
    ],
    ids=[
        "first", "again", "after a build for all", "without VNNI", "without a part of AVX-512", "AVX2 with VNNI",
        "of no set", "for all",
    ],
)  # fmt: skip
def test_a_build_for_this_machine_leaves_out_other_instruction_sets(
    here: bool, flags: set[str], before: str | None, alone: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu_info, folder, commands = tmp_path / "cpuinfo", tmp_path / "native", []
    cpu_info.write_text(f"vendor_id\t: Any\nflags\t\t: fpu {' '.join(sorted(flags))}\n")
    best = make.best_set(cpu_info)
    assert not make.best_set(tmp_path / "missing")
    folder.mkdir()
    (folder / "libkvexport_onnxruntime.so").touch()
    if before is not None:
        (folder / "CMakeCache.txt").write_text(f"KV_ALONE:STRING={before}\n")
    monkeypatch.setattr(make, "CACHE", tmp_path)
    monkeypatch.setattr(make, "best_set", lambda: best)
    monkeypatch.setattr(make, "_cmake", lambda: "cmake")
    monkeypatch.setattr(make, "run", lambda command, what: commands.append(command) or "")
    make.build("onnxruntime", here=here, out=tmp_path / "out")
    assert [word for word in commands[0] if "ALONE" in word] == [f"-DKV_ALONE={alone}"]


def test_an_unknown_target_is_refused_with_those_that_are_known() -> None:
    command = [sys.executable, str(PLUGINS / "build.py"), "onnxruntime-cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 2 and "unknown target onnxruntime-cpu; known: onnxruntime, onnxruntime-cuda" in done.stderr
    )


def test_missing_tools_are_listed_without_a_build(tmp_path: Path) -> None:
    command = [sys.executable, str(PLUGINS / "build.py"), "onnxruntime", "cuda-host", "--check"]
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": "g++"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "kvexport: the target onnxruntime was not built: cmake was not found (apt-get install cmake g++)",
        "kvexport: the target cuda-host was not built: g++ was not found",
    ]
