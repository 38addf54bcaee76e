"""Build of a library with the C ABI of the kernels from their translated PTX and the runtime that executes it.

All files are cached under digests of their inputs: PTX by the kernels' sources and nvcc, an object file by its C++, the
runtime's headers and the compiler. So a second build compiles nothing, and unchanged kernels are not compiled again.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from ..targets import HOST_FLAGS, KERNEL_FILES, KERNELS, object_flags
from ..tools import CACHE, PLUGINS, Missing, cached, digest, host_compiler, publish, run, tool, version
from . import read, translate
from .instructions import Unknown

CACHED = CACHE / "ptx"
RUNTIME = "tests/ptx"
CAPABILITY = "90"
# Translated code has unused variables and labels. Optimizing it would take longer than the tests run it: most of their
# time goes into the checks of memory, which are compiled with HOST_FLAGS.
FLAGS = ["-std=c++17", "-O0", "-fPIC", "-mfma", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
DAY = 86400.0
# The kernels that the cases of the tests run. Building all kernels takes minutes.
SAMPLE = re.compile(
    r"Rank|Choose|FormSets|Order|Place|DecodeSums|(Append|Attended|MergeRows|PrefillScores|Turn)<(float|Half)>"
    r"|Nearest<float, \w+>|NearestMma<Half, \w+, \d>|Decode<float, [148]>|DecodeMma<Half, 128>|Prefill<float, 1>"
    r"|PrefillMma(Scores)?<Half, 64>"
    r"|AppendQuantized|DecodeQuantized<\d, \d, 128>|Prefill<Quantized, 1>|PrefillScores<Quantized>"
)


def missing() -> str | None:
    """Return what this machine lacks to build the library; None if nothing."""
    if platform.machine() != "x86_64":
        return "PTX runs only on x86-64"
    try:
        tool("nvcc"), host_compiler()
    except Missing as error:
        return str(error)
    return None


def build(library: Path, *, everything: bool = False) -> Path:
    """Build the library unless it is current; return its path.

    Args:
        library: The path.
        everything: Whether it has all kernels, not only those of SAMPLE.

    Raises:
        Missing: This machine lacks a compiler, or the PTX has an instruction that is not supported.
    """
    if lacking := missing():
        raise Missing(lacking)
    if is_current(library, everything=everything):
        return library
    with ThreadPoolExecutor(2) as pool:
        texts = {
            program: _translate(module, program, kernel)
            for ptx in pool.map(ptx_of, KERNELS)
            for program, (module, kernel) in _programs(ptx).items()
            if everything or SAMPLE.fullmatch(_short(program))
        }
        sources = [f"{RUNTIME}/{name}.cpp" for name in ("run", "memory", "warp")] + list(KERNELS)
        objects = dict(zip(texts, pool.map(_object, texts.values()), strict=True))
        objects |= dict(zip(sources, pool.map(_own_object, sources), strict=True))
    _remove_unused()
    _link(objects.values(), library)
    library.with_suffix(".json").write_text(json.dumps({name: path.name for name, path in objects.items()}))
    library.with_suffix(".key").write_text(_key(everything))
    return library


def mutant(base: Path, program: str, alter: Callable[[str], str], library: Path) -> Path:
    """Link a copy of a library of `build` in which the PTX of one program is altered; return its path.

    Args:
        base: The library of `build`.
        program: The program's name without namespaces.
        alter: Returns the altered body of the kernel.
        library: The path of the copy.

    Raises:
        KeyError: There is no such program.
    """
    objects = _objects_of(base)
    for unit in KERNELS:
        for name, (module, kernel) in _programs(ptx_of(unit)).items():
            if _short(name) == program:
                altered = kernel._replace(body=alter(kernel.body))
                return _link((objects | {name: _object(_translate(module, name, altered))}).values(), library)
    raise KeyError(program)


def of_source(base: Path, unit: str, plugins: Path, library: Path) -> Path:
    """Link a copy of a library of `build` with one source's kernels from another copy of plugins/; return its path."""
    objects = _objects_of(base)
    for name, (module, kernel) in _programs(ptx_of(unit, plugins)).items():
        if name in objects:
            objects[name] = _object(_translate(module, name, kernel))
    return _link(objects.values(), library)


def _objects_of(library: Path) -> dict[str, Path]:
    return {name: CACHED / path for name, path in json.loads(library.with_suffix(".json").read_text()).items()}


def _link(objects: Iterable[Path], library: Path) -> Path:
    library.parent.mkdir(parents=True, exist_ok=True)
    new = library.with_suffix(".new")
    run([host_compiler(), "-shared", *map(str, objects), "-lpthread", "-o", str(new)], "linker")
    return publish(new, library)


def named(library: Path, everything: bool) -> Path:
    """Return the path of the library of all kernels, next to that of the sample, or the latter's."""
    return library.with_stem(f"{library.stem}_all") if everything else library


def is_current(library: Path, *, everything: bool = False) -> bool:
    """Return whether the library exists and was built from the current sources and compilers."""
    key = library.with_suffix(".key")
    return missing() is None and library.is_file() and key.is_file() and key.read_text() == _key(everything)


def compiled(*, everything: bool = False) -> dict[str, read.Kernel]:
    """Return the PTX of every program of SAMPLE, or of all, by its name without namespaces."""
    return {
        _short(program): kernel
        for unit in KERNELS
        for program, (_, kernel) in _programs(ptx_of(unit)).items()
        if everything or SAMPLE.fullmatch(_short(program))
    }


def _key(everything: bool) -> str:
    """Return a digest of everything from which a library is built."""
    own = sorted([*(PLUGINS / RUNTIME).glob("*"), *Path(__file__).parent.glob("*.py")])
    versions = (version(tool("nvcc")), version(host_compiler()))
    return digest(*versions, str(everything), *(path.read_bytes() for path in (*kernel_sources(), *own)))


def kernel_sources(plugins: Path = PLUGINS) -> list[Path]:
    patterns = [pattern for pattern in KERNEL_FILES if not pattern.endswith(".py")]
    return sorted(path for pattern in patterns for path in plugins.glob(pattern))


def ptx_of(unit: str, plugins: Path = PLUGINS) -> Path:
    """Return the path of the PTX of a source of the kernels, for CAPABILITY."""
    nvcc = tool("nvcc")
    texts = [text for path in kernel_sources(plugins) for text in (str(path.relative_to(plugins)), path.read_bytes())]
    path = CACHED / f"{Path(unit).stem}-{digest(version(nvcc), unit, CAPABILITY, *texts)}.ptx"
    if plugins == PLUGINS and not path.is_file():
        CACHED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHED) as folder:
            # The object file takes a few seconds more than the PTX, and make.compile_kernels needs it as well.
            device_code(object_flags([CAPABILITY]), PLUGINS / unit, ".o", ["--keep", "--keep-dir", folder])
            if (kept := Path(folder) / f"{Path(unit).stem}.ptx").is_file():
                return publish(kept, path)
    command = [nvcc, "-std=c++17", "-O3", f"-arch=compute_{CAPABILITY}", "-lineinfo", "-ptx", str(plugins / unit)]
    return cached(path, command, "compiler")


def retargeted(ptx: Path, capability: str) -> Path:
    """Return the path of a copy of a PTX file of CAPABILITY for another capability."""
    text = ptx.read_text().replace(f".target sm_{CAPABILITY}", f".target sm_{capability}", 1)
    if int(capability) < 90:
        text = re.sub(r"^\s*griddepcontrol\.\w+;$", "", text, flags=re.MULTILINE)
    path = ptx.with_name(f"{ptx.stem}-{capability}.ptx")
    path.write_text(text)
    return path


def device_code(flags: Sequence[str], source: Path, suffix: str, more: Sequence[str] = ()) -> tuple[Path, str]:
    """Return nvcc's output for a source of the kernels, or for its PTX, and nvcc's report.

    Args:
        flags: The flags of nvcc.
        source: The file.
        suffix: The suffix of the output.
        more: Flags that do not change the output.
    """
    nvcc = tool("nvcc")
    read_files = [path.read_bytes() for path in (source, *kernel_sources())]
    path = CACHED / f"{source.stem}-{digest(version(nvcc), *flags, *read_files)}{suffix}"
    log = path.with_suffix(".log")
    cached(path, [nvcc, *flags, *more, str(source)], "compiler", log)
    return path, log.read_text()


@cache
def _programs(ptx: Path) -> dict[str, tuple[read.Module, read.Kernel]]:
    """Return the kernels of a PTX file by the C++ names of their programs, each with its module."""
    module = read.module(ptx.read_text())
    mangled = "\n".join(kernel.name for kernel in module.kernels)
    names = subprocess.run([tool("c++filt")], input=mangled, capture_output=True, text=True, check=True).stdout
    programs = {}
    for kernel, name in zip(module.kernels, names.splitlines(), strict=True):
        program = re.search(r"run_kernel<(.*)>\(", name)
        if program is None:
            raise Missing(f"the name of a kernel is not run_kernel<...>: {name}")
        programs[program[1].strip()] = module, kernel
    return programs


def _short(program: str) -> str:
    return program.replace("kv::cuda::", "")


def _translate(module: read.Module, program: str, kernel: read.Kernel) -> str:
    try:
        return translate.source(module, kernel, program)
    except Unknown as error:
        raise Missing(f"the PTX of {program} has an instruction that is not translated: {error}") from error


def _object(text: str) -> Path:
    headers = [path.read_bytes() for path in sorted((PLUGINS / RUNTIME).glob("*.h"))]
    name = digest(version(host_compiler()), *FLAGS, text, *headers)
    source, path = CACHED / f"{name}.{os.getpid()}.cpp", CACHED / f"{name}.o"
    if not path.is_file():
        source.write_text(text)
    command = [host_compiler(), *FLAGS, f"-I{PLUGINS / RUNTIME}", "-c", str(source)]
    try:
        return cached(path, command, "compiler")
    finally:
        source.unlink(missing_ok=True)


def _own_object(source: str) -> Path:
    """Return the object file of a source of the runtime, or of the kernels' entry points, which launch PTX."""
    files = [*kernel_sources(), *sorted((PLUGINS / RUNTIME).glob("*"))]
    name = f"{Path(source).stem}-{digest(version(host_compiler()), *(path.read_bytes() for path in files))}.o"
    kind = ["-x", "c++"] if source.endswith(".cu") else []
    flags = [*HOST_FLAGS, "-DKV_PTX", *kind]
    return cached(CACHED / name, [host_compiler(), *flags, "-c", str(PLUGINS / source)], "compiler")


def _remove_unused() -> None:
    """Remove the cached files that no build has used for a week."""
    for path in CACHED.iterdir():
        if path.is_file() and path.stat().st_mtime < time.time() - 7 * DAY:
            path.unlink(missing_ok=True)
