"""Compilation and linking of a target."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import headers, resources
from .ptx import library as ptx
from .targets import BINDING_FLAGS, CAPABILITIES, DEVICE_FLAGS, HOST_FLAGS, KERNELS, TARGETS, Target, object_flags
from .tools import CACHE, PLUGINS, ROOT, Missing, host_compiler, link, publish, run, tool

# The flags of /proc/cpuinfo that the kernels of an instruction set need; the best set first.
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
SETS = {"avx512vnni": AVX512 | {"avx512_vnni"}, "avx512": AVX512, "avxvnni": AVX2 | {"avx_vnni"}, "avx2": AVX2}


def build(
    name: str,
    *,
    capabilities: Sequence[str] = (),
    sanitize: str = "",
    machine: str = "",
    here: bool = False,
    out: Path | None = None,
    everything: bool = False,
) -> Path:
    """Build a target and return the path of its library.

    Args:
        name: A key of TARGETS.
        capabilities: Compute capabilities ("90") that nvcc compiles for; empty for this machine's GPUs, or for all that
            are supported if it has none.
        sanitize: Sanitizers ("address,undefined"), only for `onnxruntime`.
        machine: Another processor ("aarch64") to compile for, only for `onnxruntime`. Without `out`, the library is
            then in a folder of its own below build-cache.
        here: Whether `onnxruntime` may leave out all instruction sets but the best that this machine has, unless it was
            built for all before. The library then runs on no lesser machine.
        out: The folder of the library.
        everything: For `cuda-ptx`, whether to build all kernels, as another library, instead of a sample.

    Raises:
        Missing: A program or header is missing, or a compiler failed.
    """
    target = TARGETS[name]
    if sanitize and name != "onnxruntime":
        raise Missing(f"{name} takes no --sanitize; onnxruntime does")
    if machine and name != "onnxruntime":
        raise Missing(f"{name} takes no --machine; onnxruntime does")
    if out and target.compiler == "host":
        raise Missing(f"{name} takes no --out: tests look for it in {Path(target.output).parent}")
    for one in target.headers:  # first, since it may fail at once
        headers.find(one)
    library = out / Path(target.output).name if out else ROOT / target.output
    if target.compiler == "ptx":
        return ptx.build(ptx.named(library, everything), everything=everything)
    if target.compiler == "cmake":
        return _by_cmake(sanitize, machine, library if out or not machine else None, here)
    if target.compiler == "nvcc":
        objects, _ = compile_kernels(capabilities)
        return link_device(name, objects, capabilities, library)
    return _on_host(name)


def is_current(name: str, *more: Path) -> bool:
    """Return whether a target for tests exists and is newer than its sources and the files `more`."""
    target, library = TARGETS[name], host_output(name)
    if target.compiler == "ptx":
        return ptx.is_current(library)
    read = [*more, *(path for pattern in target.reads for path in PLUGINS.glob(pattern))]
    return library.is_file() and library.stat().st_mtime >= max(path.stat().st_mtime for path in read)


def host_output(name: str) -> Path:
    return ROOT / TARGETS[name].output


def missing(name: str) -> str | None:
    """Return what this machine lacks to build a target, and the command that installs it; None if nothing."""
    target = TARGETS[name]
    try:
        for one in target.headers:
            headers.find(one)
        if target.compiler == "cmake":
            _cmake()
        elif target.compiler == "nvcc":
            tool("nvcc")
        elif target.compiler == "ptx":
            return ptx.missing()
        else:
            host_compiler()
    except Missing as error:
        return str(error)
    return None


def _cmake() -> str:
    for program in ("cmake", os.environ.get("CXX", "c++")):
        tool(program, get="apt-get install cmake g++")
    return "cmake"


def best_set(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the best instruction set of SETS that this machine has; "" if it has none."""
    if not cpu_info.is_file():
        return ""
    flags = re.search(r"^flags\s*:(.*)$", cpu_info.read_text(), re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    return next((name for name, needed in SETS.items() if needed <= known), "")


def _by_cmake(sanitize: str, machine: str, library: Path | None, here: bool) -> Path:
    """Build the operators of the CPU: one object library per instruction set; copy the library unless it is None."""
    folder = CACHE / "-".join(["native", *filter(None, [*sanitize.split(","), machine and f"{machine}-wheel"])])
    settings = folder / "CMakeCache.txt"
    for_all = settings.is_file() and "KV_ALONE:STRING=\n" in settings.read_text()
    alone = best_set() if here and not machine and not for_all else ""
    options = [f"-DKV_SANITIZE={sanitize}", f"-DKV_ALONE={alone}"]
    if machine:
        compiler = tool(f"{machine}-linux-gnu-g++", get=f"apt-get install g++-{machine}-linux-gnu")
        options += [
            "-DCMAKE_SYSTEM_NAME=Linux",
            f"-DCMAKE_SYSTEM_PROCESSOR={machine}",
            f"-DCMAKE_CXX_COMPILER={compiler}",
        ]
    run([_cmake(), "-S", str(PLUGINS), "-B", str(folder), *options], "compiler")
    run(["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1)], "compiler")
    built = folder / Path(TARGETS["onnxruntime"].output).name
    if library is None:
        return built
    library.parent.mkdir(parents=True, exist_ok=True)
    copy = library.with_suffix(".new")
    shutil.copyfile(built, copy)
    return publish(copy, library)


# ---- the CUDA kernels, for a GPU ----


def compile_kernels(capabilities: Sequence[str] = ()) -> tuple[list[Path], resources.Report]:
    """Compile the kernels for these compute capabilities, and for later ones as PTX of the latest.

    Sources that were compiled before, with the same headers, flags and nvcc, are not compiled again.

    Returns:
        The object files, and the resources of each kernel (for one of the capabilities if there are several).
    """
    flags = object_flags(chosen_capabilities(capabilities))
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(lambda unit: ptx.device_code(flags, PLUGINS / unit, ".o"), KERNELS))
    return [path for path, _ in compiled], resources.read_report("\n".join(log for _, log in compiled))


def assembled(capability: str) -> resources.Report:
    """Return the resources that each kernel of the target `cuda-ptx` has for another capability than ptx.CAPABILITY.

    This takes ptxas alone. nvcc compiles the same PTX for both capabilities, except the instructions that overlap
    launches, which begin with 9.0.
    """
    flags = [*DEVICE_FLAGS, "-cubin", f"-arch=sm_{capability}"]

    def report_of(unit: str) -> str:
        return ptx.device_code(flags, ptx.retargeted(ptx.ptx_of(unit), capability), ".cubin")[1]

    with ThreadPoolExecutor(2) as pool:
        return resources.read_report("\n".join(pool.map(report_of, KERNELS)))


def record_resources(capabilities: Sequence[str]) -> None:
    """Compile the kernels for each of these compute capabilities, and write their resources to resources.json."""
    for capability in capabilities:
        _, report = compile_kernels([capability])
        resources.record(capability, report)
        print(f"sm_{capability}: {len(report)} kernels", file=sys.stderr)


def link_device(name: str, kernels: Sequence[Path], capabilities: Sequence[str], library: Path) -> Path:
    """Link a target of nvcc with the object files of the kernels; return its path."""
    target = TARGETS[name]
    compiled_for = f"-DKV_CUDA_ARCHITECTURES={'_'.join(chosen_capabilities(capabilities))}"
    flags = [*BINDING_FLAGS, *_include(target), compiled_for]
    objects, _ = _compile([tool("nvcc"), *flags], target.sources, CACHE / "cuda", "binding")
    exports = ["-Xlinker", f"--version-script={PLUGINS / target.exports}"] if target.exports else []
    return link([tool("nvcc"), "-shared", *exports], objects, library, [str(path) for path in kernels])


def chosen_capabilities(named: Sequence[str]) -> list[str]:
    """Return the named compute capabilities, or this machine's, or all that are supported, in ascending order."""
    return sorted(set(named or gpus_here() or CAPABILITIES), key=int)


def gpus_here() -> list[str]:
    """Return the compute capabilities of this machine's GPUs, for instance "90"."""
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = process.stdout.splitlines() if process.returncode == 0 else []
    return [number for line in lines if (number := line.strip().replace(".", "")).isdigit()]


# ---- for the host ----


def _on_host(name: str) -> Path:
    """Build a target for the host unless it is current; all except `cuda-host` link with its library."""
    target, library = TARGETS[name], host_output(name)
    kernels = None if name == "cuda-host" else build("cuda-host")
    included = [headers.find(one) / headers.PLACES[one].header for one in target.headers]
    if is_current(name, *included, *([kernels] if kernels else [])):
        return library
    exports = [f"-Wl,--version-script={PLUGINS / target.exports}"] if target.exports else []
    return _link_on_host(target, library, [*target.link, *exports], kernels)


def _link_on_host(
    target: Target,
    library: Path,
    link_flags: list[str],
    kernels: Path | None,
) -> Path:
    flags = list(HOST_FLAGS)
    if kernels and not set(target.sources) & set(KERNELS):
        flags += ["-fvisibility=hidden", "-DKV_ON_HOST"]
    if target.sanitize:
        # -Og compiles in half of the time of -O1, and the code runs nearly as fast. The address sanitizer sees what is
        # read or written through a pointer that the checks of pointers, which take a third of the time, would refuse.
        flags += ["-Og", f"-fsanitize={target.sanitize}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
        flags += ["-fno-sanitize=null,object-size,pointer-overflow"]
        flags += ["--param=asan-instrumentation-with-call-threshold=0"] if "g++" in host_compiler() else []
    command = [host_compiler(), *flags, *_include(target)]
    objects, _ = _compile(command, target.sources, library.parent, library.stem)
    own = [f"-L{kernels.parent}", f"-l:{kernels.name}", "-Wl,-rpath,$ORIGIN:$ORIGIN/../cuda"] if kernels else []
    return link([host_compiler(), *flags, *link_flags], objects, library, own)


def _include(target: Target) -> list[str]:
    return [option for one in target.headers for option in ("-isystem", str(headers.find(one)))]


def _compile(command: list[str], sources: Sequence[str], folder: Path, suffix: str) -> tuple[list[Path], list[str]]:
    """Compile the sources, two at a time; return the object files and the compiler's output for each."""
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: str) -> tuple[Path, str]:
        path = folder / f"{Path(source).stem}.{suffix}.{os.getpid()}.o"
        kind = ["-x", "c++"] if source.endswith(".cu") and "nvcc" not in command[0] else []
        return path, run([*command, *kind, "-c", str(PLUGINS / source), "-o", str(path)], "compiler")

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compile_one, sources))
    return [path for path, _ in results], [output for _, output in results]
