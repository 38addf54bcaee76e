"""The kernels' PTX, translated and linked with the runtime that runs it, into a library with the C ABI of the kernels.

Everything is kept by its content: PTX by the kernels' sources and nvcc, an object file by its C++, the runtime's
headers and the compiler. So a second run compiles nothing, and a kernel that did not change is not compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from ..targets import HOST_FLAGS, KERNEL_FILES, KERNELS
from ..tools import CACHE, PLUGINS, Missing, host_compiler, publish, run, tool
from . import read, translate
from .instructions import Unknown

KEPT = CACHE / "ptx"
RUNTIME = "tests/ptx"
CAPABILITY = "90"
# Translated code has variables that nothing reads, and labels that nothing jumps to. To optimize it takes longer than
# tests run it: most of their time goes into the checks of memory, which are compiled with HOST_FLAGS.
FLAGS = ["-std=c++17", "-O0", "-fPIC", "-mfma", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
DAY = 86400.0
# The kernels that the tests' cases reach; all of them take minutes.
SAMPLE = re.compile(
    r"Rank|Choose|FormSets|Order|Place|DecodeSums|(Append|Attended|MergeRows|PrefillScores|Turn)<(float|Half)>"
    r"|Nearest<float, \w+>|NearestMma<Half, \w+, \d>|Decode<float, [148]>|DecodeMma<Half, 128>|Prefill<float, 1>"
    r"|PrefillMma(Scores)?<Half, 64>|LinearCores<float, 8>"
    r"|LinearMma<(Half, 4|BFloat, 8), 1>"
    r"|AllReduce<float>|AppendSmall|DecodeSmall<\d, \d, 128>|Prefill<Small, 1>|PrefillScores<Small>"
)


def missing() -> str | None:
    """What this machine lacks; None where nothing is lacking."""
    if platform.machine() != "x86_64":
        return "PTX is run on x86-64 alone"
    try:
        tool("nvcc"), host_compiler()
    except Missing as error:
        return str(error)
    return None


def build(library: Path, *, everything: bool = False) -> Path:
    """The library, as it is where nothing changed. everything: all kernels, not only those of SAMPLE.

    Raises Missing.
    """
    if lacking := missing():
        raise Missing(lacking)
    if is_current(library, everything=everything):
        return library
    with ThreadPoolExecutor(2) as pool:
        texts = {
            program: _translated(module, program, kernel)
            for ptx in pool.map(ptx_of, KERNELS)
            for program, (module, kernel) in _programs(ptx).items()
            if everything or SAMPLE.fullmatch(_short(program))
        }
        sources = [f"{RUNTIME}/{name}.cpp" for name in ("run", "memory", "warp")] + list(KERNELS)
        objects = dict(zip(texts, pool.map(_object, texts.values()), strict=True))
        objects |= dict(zip(sources, pool.map(_own_object, sources), strict=True))
    _forget()
    _linked(objects.values(), library)
    library.with_suffix(".json").write_text(json.dumps({name: path.name for name, path in objects.items()}))
    library.with_suffix(".key").write_text(_key(everything))
    return library


def mutant(base: Path, program: str, alter: Callable[[str], str], library: Path) -> Path:
    """`base`, a library of `build`, with another PTX of one program (named without namespaces)."""
    objects = _objects_of(base)
    for unit in KERNELS:
        for name, (module, kernel) in _programs(ptx_of(unit)).items():
            if _short(name) == program:
                altered = kernel._replace(body=alter(kernel.body))
                return _linked((objects | {name: _object(_translated(module, name, altered))}).values(), library)
    raise KeyError(program)


def of_source(base: Path, unit: str, plugins: Path, library: Path) -> Path:
    """`base`, a library of `build`, with the kernels of one source as they are in another copy of plugins/."""
    objects = _objects_of(base)
    for name, (module, kernel) in _programs(ptx_of(unit, plugins)).items():
        if name in objects:
            objects[name] = _object(_translated(module, name, kernel))
    return _linked(objects.values(), library)


def _objects_of(library: Path) -> dict[str, Path]:
    return {name: KEPT / path for name, path in json.loads(library.with_suffix(".json").read_text()).items()}


def _linked(objects: Iterable[Path], library: Path) -> Path:
    library.parent.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(".new")
    run([host_compiler(), "-shared", *map(str, objects), "-lpthread", "-o", str(made)], "linker")
    return publish(made, library)


def named(library: Path, everything: bool) -> Path:
    """The library of all kernels stands beside that of the sample."""
    return library.with_stem(f"{library.stem}_all") if everything else library


def is_current(library: Path, *, everything: bool = False) -> bool:
    """Whether the library is there and made of what is there now."""
    beside = library.with_suffix(".key")
    return missing() is None and library.is_file() and beside.is_file() and beside.read_text() == _key(everything)


def compiled() -> dict[str, str]:
    """PTX of every program of SAMPLE."""
    found = {}
    for unit in KERNELS:
        for program, (_, kernel) in _programs(ptx_of(unit)).items():
            if SAMPLE.fullmatch(_short(program)):
                found[_short(program)] = kernel.body
    return found


def _key(everything: bool) -> str:
    """Of all that a library is made of."""
    ours = sorted([*(PLUGINS / RUNTIME).glob("*"), *Path(__file__).parent.glob("*.py")])
    versions = (_version(tool("nvcc")), _version(host_compiler()))
    return _digest(*versions, str(everything), *(path.read_bytes() for path in (*_sources(), *ours)))


def _sources(plugins: Path = PLUGINS) -> list[Path]:
    """What nvcc reads."""
    patterns = [pattern for pattern in KERNEL_FILES if not pattern.endswith(".py")]
    return sorted(path for pattern in patterns for path in plugins.glob(pattern))


def _digest(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
        found.update(b"\0")
    return found.hexdigest()[:32]


@cache
def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout


def _kept(path: Path, command: Sequence[str], what: str) -> Path:
    """A file that a command makes as `path`, unless it is there."""
    if path.is_file():
        path.touch()
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{os.getpid()}-{path.name}")
    run([*command, "-o", str(made)], what)
    return publish(made, path)


def ptx_of(unit: str, plugins: Path = PLUGINS) -> Path:
    """The PTX of a source of the kernels, for CAPABILITY."""
    nvcc = tool("nvcc")
    texts = [part for path in _sources(plugins) for part in (str(path.relative_to(plugins)), path.read_bytes())]
    name = f"{Path(unit).stem}-{_digest(_version(nvcc), unit, CAPABILITY, *texts)}.ptx"
    command = [nvcc, "-std=c++17", "-O3", f"-arch=compute_{CAPABILITY}", "-lineinfo", "-ptx", str(plugins / unit)]
    return _kept(KEPT / name, command, "compiler")


@cache
def _programs(ptx: Path) -> dict[str, tuple[read.Module, read.Kernel]]:
    """The kernels of a source's PTX by their programs' names in C++, each with what it is part of."""
    module = read.module(ptx.read_text())
    listed = "\n".join(kernel.name for kernel in module.kernels)
    names = subprocess.run([tool("c++filt")], input=listed, capture_output=True, text=True, check=True).stdout
    found = {}
    for kernel, name in zip(module.kernels, names.splitlines(), strict=True):
        program = re.search(r"run_program<(.*)>\(", name)
        if program is None:
            raise Missing(f"a kernel is named otherwise than expected: {name}")
        found[program[1].strip()] = module, kernel
    return found


def _short(program: str) -> str:
    return program.replace("kv::cuda::", "")


def _translated(module: read.Module, program: str, kernel: read.Kernel) -> str:
    """C++ of a kernel."""
    try:
        return translate.source(module, kernel, program)
    except Unknown as error:
        raise Missing(f"PTX of {program} has what is not translated: {error}") from error


def _object(text: str) -> Path:
    """Of a kernel's C++."""
    headers = [path.read_bytes() for path in sorted((PLUGINS / RUNTIME).glob("*.h"))]
    name = _digest(_version(host_compiler()), *FLAGS, text, *headers)
    source, kept = KEPT / f"{name}.{os.getpid()}.cpp", KEPT / f"{name}.o"
    if not kept.is_file():
        source.write_text(text)
    command = [host_compiler(), *FLAGS, f"-I{PLUGINS / RUNTIME}", "-c", str(source)]
    try:
        return _kept(kept, command, "compiler")
    finally:
        source.unlink(missing_ok=True)


def _own_object(source: str) -> Path:
    """Of the runtime, or of the kernels' calls, which launch PTX."""
    files = [*_sources(), *sorted((PLUGINS / RUNTIME).glob("*"))]
    name = f"{Path(source).stem}-{_digest(_version(host_compiler()), *(path.read_bytes() for path in files))}.o"
    kind = ["-x", "c++"] if source.endswith(".cu") else []
    flags = [*HOST_FLAGS, "-DKV_PTX", *kind]
    return _kept(KEPT / name, [host_compiler(), *flags, "-c", str(PLUGINS / source)], "compiler")


def _forget() -> None:
    """What no build has used for a week."""
    for path in KEPT.iterdir():
        if path.stat().st_mtime < time.time() - 7 * DAY:
            path.unlink(missing_ok=True)
