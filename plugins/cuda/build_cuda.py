"""Compiles the CUDA kernels: for a GPU with nvcc, and, to test them where there is none, for the host with g++.

    python plugins/cuda/build_cuda.py --host [--sanitize]     build-cache/cuda/libkvexport_cuda_host[_sanitized].so
    python plugins/cuda/build_cuda.py --device 90             build-cache/cuda/libkvexport_cuda.so, for compute
    capability 9.0 python plugins/cuda/build_cuda.py --record [80 90 ...]    plugins/cuda/resources.json: what the
    compiler says the kernels take

Needs Python alone. Exit code 3 and one line that says what is missing, where something is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
OUT = HERE.parent.parent / "build-cache" / "cuda"
SOURCES = ("attention/vote_attention", "merge/merge_cache")
HEADERS = (*HERE.rglob("*.h"), *HERE.parent.glob("math/*.h"), *HERE.parent.glob("abi/*.h"))
RESOURCES = HERE / "resources.json"
ARCHITECTURES = ("80", "86", "87", "89", "90", "100", "110", "120")
# No contraction: the host's threads in any order give the same bits, whatever the compiler makes of one phase.
HOST_FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
]
SANITIZE = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
DEVICE_FLAGS = ["-std=c++17", "-O3", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=default", "-lineinfo"]
ENTRY = re.compile(r"Compiling entry function '([^']+)'")
NUMBERS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spills": re.compile(r"(\d+) bytes spill stores"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "shared": re.compile(r"(\d+) bytes smem"),
}


class Missing(Exception):
    """A compiler is not there, or failed."""


class Binding(NamedTuple):
    """A framework's binding of the kernels: one source file, the framework's headers, and the linker script that names
    what the library exports. Compiled for the host, KV_ON_HOST is defined; for a GPU KV_CUDA_ARCHITECTURES, as in
    80_90."""

    source: Path
    headers: Path
    exports: Path


def is_current(library: Path, *more: Path) -> bool:
    """Whether the library is there and no source of the kernels is newer, and none of `more`."""
    sources = [*HEADERS, *(HERE / f"{name}.cu" for name in SOURCES), Path(__file__), *more]
    return library.is_file() and library.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


def build_host(*, sanitized: bool = False) -> Path:
    """The kernels as a library for the host; kept where it is current."""
    library = OUT / f"libkvexport_cuda_host{'_sanitized' if sanitized else ''}.so"
    if is_current(library):
        return library
    flags = HOST_FLAGS + (SANITIZE if sanitized else [])
    objects = _each(
        lambda name, to: [
            _tool(os.environ.get("CXX", "g++")),
            *flags,
            "-x",
            "c++",
            "-c",
            str(HERE / f"{name}.cu"),
            "-o",
            to,
        ],
        "host",
    )
    _link([_tool(os.environ.get("CXX", "g++")), *flags, "-shared"], objects, library)
    return library


def build_device(architecture: str) -> tuple[Path, dict[str, dict[str, int]]]:
    """The kernels as a library for one compute capability ("90"), and what each of them takes."""
    library, (objects, report) = OUT / "libkvexport_cuda.so", compile_device(architecture)
    _link([_tool("nvcc"), "-shared"], objects, library)
    return library, report


def compile_device(architecture: str) -> tuple[list[Path], dict[str, dict[str, int]]]:
    """Object files for one compute capability, and per kernel its registers and its bytes of spills, stack and static
    shared memory."""
    logs: list[str] = []
    objects = _compile([f"arch=compute_{architecture},code=sm_{architecture}"], f"sm{architecture}", logs)
    return objects, dict(sorted(read_report("\n".join(logs)).items()))


def compile_all(architectures: Sequence[str]) -> list[Path]:
    """Object files for all of these compute capabilities, and for later ones by PTX of the latest."""
    known = sorted(architectures, key=int)
    codes = [f"arch=compute_{x},code=sm_{x}" for x in known]
    return _compile([*codes, f"arch=compute_{known[-1]},code=compute_{known[-1]}"], "all", [])


def _compile(codes: Sequence[str], suffix: str, logs: list[str]) -> list[Path]:
    flags = [*DEVICE_FLAGS, *(flag for code in codes for flag in ("-gencode", code))]
    return _each(lambda name, to: [_tool("nvcc"), *flags, "-c", str(HERE / f"{name}.cu"), "-o", to], suffix, logs)


def link_binding(binding: Binding, kernels: list[Path], architectures: Sequence[str], library: Path) -> Path:
    """A binding and the object files of the kernels, which go, as one library."""
    made, host_flags = (
        OUT / f"binding.{os.getpid()}.o",
        "-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-maybe-uninitialized",
    )
    compiled_for = f"-DKV_CUDA_ARCHITECTURES={'_'.join(sorted(architectures, key=int))}"
    flags = ["-std=c++17", "-O2", "-Xcompiler", host_flags, "-isystem", str(binding.headers), compiled_for]
    _run([_tool("nvcc"), *flags, "-c", str(binding.source), "-o", str(made)], "compiler")
    _link([_tool("nvcc"), "-shared", "-Xlinker", f"--version-script={binding.exports}"], [made, *kernels], library)
    return library


def link_binding_on_host(binding: Binding, library: Path) -> Path:
    """A binding over the kernels for the host, beside whose library it has to stay."""
    build_host()
    made, compiler = OUT / f"binding.{os.getpid()}.o", _tool(os.environ.get("CXX", "g++"))
    flags = [*HOST_FLAGS, "-fvisibility=hidden", "-DKV_ON_HOST", "-isystem", str(binding.headers)]
    _run([compiler, *flags, "-c", str(binding.source), "-o", str(made)], "compiler")
    kernels = [f"-L{OUT}", "-l:libkvexport_cuda_host.so", "-Wl,-rpath,$ORIGIN"]
    _link([compiler, "-shared", f"-Wl,--version-script={binding.exports}"], [made], library, kernels)
    return library


def read_report(log: str) -> dict[str, dict[str, int]]:
    """Of ptxas's own report, per kernel: registers, and bytes of spills, stack and static shared memory."""
    found: dict[str, dict[str, int]] = {}
    for part in re.split(r"(?=Compiling entry function)", _demangled(log))[1:]:
        entry = ENTRY.search(part)
        if entry is None:
            raise Missing(f"nvcc's report reads otherwise than expected: {part[:200]}")
        program = re.search(r"run_program<(.*)>\(", entry[1])
        name = (program[1] if program else entry[1]).replace("kv::cuda::", "").replace("(int)", "").strip()
        found[name] = {key: int(match[1]) if (match := number.search(part)) else 0 for key, number in NUMBERS.items()}
    return found


def record(architectures: list[str]) -> None:
    """Write resources.json anew for these compute capabilities; others stay."""
    held: dict[str, Any] = json.loads(RESOURCES.read_text()) if RESOURCES.is_file() else {}
    held |= {"compiler": compiler_version(), "columns": list(NUMBERS)}
    for architecture in architectures:
        report = compile_device(architecture)[1]
        held[f"sm_{architecture}"] = {kernel: list(numbers.values()) for kernel, numbers in report.items()}
        print(f"sm_{architecture}: {len(report)} kernels", file=sys.stderr)
    # A line per kernel.
    lines = re.sub(r"\[[^\[\]]*\]", lambda row: " ".join(row[0].split()), json.dumps(held, indent=1))
    RESOURCES.write_text(lines + "\n")


def compiler_version() -> str:
    """nvcc's release, as in "13.0"."""
    said = subprocess.run([_tool("nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", said)
    return found[1] if found else "unknown"


def _tool(name: str) -> str:
    path = shutil.which(name) or (shutil.which(name, path="/usr/local/cuda/bin") if name == "nvcc" else None)
    if path is None:
        raise Missing(f"{name} was not found")
    return path


def _each(command: Any, suffix: str, logs: list[str] | None = None) -> list[Path]:
    """Compile all sources, two at a time; command(name, object) -> arguments."""
    OUT.mkdir(parents=True, exist_ok=True)

    def compiled(name: str) -> Path:
        target = OUT / f"{Path(name).name}.{suffix}.{os.getpid()}.o"
        said = _run(command(name, str(target)), "compiler")
        if logs is not None:
            logs.append(said)
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, SOURCES))


def _link(command: list[str], objects: list[Path], library: Path, libraries: Sequence[str] = ()) -> None:
    """Renamed into place: a process that has the old one mapped keeps it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")
    try:
        _run([*command, *map(str, objects), *libraries, "-o", str(made)], "linker")
    finally:
        for path in objects:
            path.unlink()
    made.replace(library)


def _run(command: list[str], what: str) -> str:
    """What the command says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"the {what} failed:\n" + (done.stdout + done.stderr)[-4000:])
    return done.stdout + done.stderr


def _demangled(log: str) -> str:
    done = subprocess.run([_tool("c++filt")], input=log, capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true")
    parser.add_argument(
        "--sanitize", action="store_true", help="with --host: under the address and undefined-behaviour sanitizers"
    )
    parser.add_argument("--device", metavar="CAPABILITY", help="compute capability without its dot, as 90")
    parser.add_argument("--record", nargs="*", metavar="CAPABILITY", help="all that are supported, unless named")
    options = parser.parse_args()
    try:
        if options.host:
            print(build_host(sanitized=options.sanitize))
        if options.device:
            print(build_device(options.device)[0])
        if options.record is not None:
            record(options.record or list(ARCHITECTURES))
    except Missing as error:
        print(f"kvexport: the CUDA kernels were not built: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
