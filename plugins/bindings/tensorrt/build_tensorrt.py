"""Compiles the TensorRT plugins: with the CUDA kernels, and, to test them where there is no GPU, with the kernels
compiled for the host.

    python plugins/bindings/tensorrt/build_tensorrt.py --device 80 90 [--out DIR]
        kvexport/_native/libkvexport_tensorrt.so, for these capabilities
    python plugins/bindings/tensorrt/build_tensorrt.py --host
        build-cache/tensorrt/libkvexport_tensorrt_host.so
    python plugins/bindings/tensorrt/build_tensorrt.py --harness
        what tests/backends/tensorrt/test_plugins.py drives the plugins with

Needs Python, a compiler, CUDA's headers and TensorRT's; no TensorRT library. Exit code 3 and one line that says what is
missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
PLUGINS = HERE.parent.parent
ROOT = PLUGINS.parent
OUT = ROOT / "build-cache" / "tensorrt"
LIBRARY = "libkvexport_tensorrt.so"
TESTS = PLUGINS / "tests"
HEADER = "NvInferRuntime.h"
CLONED = ROOT / "build-cache" / "TensorRT"
GET_HEADERS = "git clone --depth 1 --branch v11.1 https://github.com/NVIDIA/TensorRT build-cache/TensorRT"
TENSORRT_PLACES = (
    CLONED / "include",
    *(Path(f"/usr/include/{machine}-linux-gnu") for machine in ("x86_64", "aarch64")),
    Path("/usr/include"),
    Path("/usr/local/tensorrt/include"),
)
CUDA_PLACES = (Path("/usr/local/cuda/include"), Path("/usr/include"))
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
EXPORTS = HERE / "exports.map"


def _build_cuda() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_cuda", PLUGINS / "cuda" / "build_cuda.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cuda = _build_cuda()
Missing: type[Exception] = cuda.Missing


def tensorrt_headers() -> Path:
    """The folder of TensorRT's headers; the variable TENSORRT_INCLUDE_DIR comes first."""
    return _headers(
        "TENSORRT_INCLUDE_DIR", HEADER, TENSORRT_PLACES, f"TensorRT's headers were not found: {GET_HEADERS}"
    )


def cuda_headers() -> Path:
    """The folder of CUDA's headers: the variable CUDA_INCLUDE_DIR, nvcc's own, or the usual places."""
    nvcc = shutil.which("nvcc")
    own = [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    return _headers(
        "CUDA_INCLUDE_DIR",
        "cuda_runtime_api.h",
        (*own, *CUDA_PLACES),
        "CUDA's headers were not found: install the CUDA toolkit",
    )


def _headers(variable: str, header: str, places: tuple[Path, ...], otherwise: str) -> Path:
    asked = os.environ.get(variable)
    for place in (Path(asked),) if asked else places:
        if (place / header).is_file():
            return place
    raise Missing(f"{variable}={asked} holds no {header}" if asked else otherwise)


def missing(*tools: str) -> str | None:
    """What compiling by `tools` lacks here, and the line that gets it; None where nothing is."""
    try:
        tensorrt_headers()
        cuda_headers()
        for tool in tools:
            cuda._tool(tool)
    except Missing as error:
        return str(error)
    return None


def build_device(architectures: Sequence[str], out: Path | None = None) -> Path:
    """The plugins with the CUDA kernels for these compute capabilities ("90") and later ones, in `out`,
    kvexport/_native unless given."""
    library = (out or ROOT / "kvexport" / "_native") / LIBRARY
    binding = cuda.Binding(HERE / "library.cpp", tensorrt_headers(), EXPORTS)
    return Path(cuda.link_binding(binding, cuda.compile_all(architectures), architectures, library))


def build_host() -> Path:
    """The plugins with the kernels and CUDA's runtime on the host, as a library that a registry loads."""
    flags = ["-shared", f"-Wl,--version-script={EXPORTS},--no-undefined"]
    return _on_host("libkvexport_tensorrt_host.so", [], flags)


def build_harness() -> Path:
    """The same with the harness, as a library for ctypes."""
    return _on_host("libtensorrt_harness.so", [TESTS / "tensorrt_harness.cpp"], ["-shared", "-Wl,--no-undefined"])


def build_harness_on(kernels: Path) -> Path:
    """The same over a library of CUDA kernels (build_cuda.py's for a GPU) and CUDA's own runtime."""
    target = OUT / f"libtensorrt_harness_{kernels.stem.removeprefix('lib')}.so"
    if _is_current(target, kernels):
        return target
    runtime = [
        f"-L{place}" for place in (cuda_headers().parent / "lib64", cuda_headers().parent / "lib") if place.is_dir()
    ]
    objects = _compile([HERE / "library.cpp", TESTS / "tensorrt_harness.cpp"], [])
    linked = [str(kernels), *runtime, "-lcudart_static", "-ldl", "-lrt", "-lpthread", "-Wl,--no-undefined"]
    cuda._link([cuda._tool(os.environ.get("CXX", "g++")), "-shared"], objects, target, linked)
    return target


def build_fuzz() -> Path:
    """A program of random fields, under the address and undefined-behaviour sanitizers."""
    return _on_host("tensorrt_fuzz", [TESTS / "tensorrt_fuzz.cpp"], [], cuda.SANITIZE)


def _on_host(name: str, sources: list[Path], link: list[str], flags: list[str] | None = None) -> Path:
    """Kept where it is current."""
    target, kernels = OUT / name, cuda.build_host()
    if _is_current(target, kernels):
        return target
    objects = _compile([HERE / "library.cpp", TESTS / "cuda_runtime_on_host.cpp", *sources], flags or [])
    cuda._link([cuda._tool(os.environ.get("CXX", "g++")), *(flags or []), *link], objects, target, [str(kernels)])
    return target


def _is_current(target: Path, kernels: Path) -> bool:
    read = [
        *HERE.glob("*.*"),
        *TESTS.glob("tensorrt_*"),
        TESTS / "cuda_runtime_on_host.cpp",
        *HERE.parent.glob("node/*.h"),
        *cuda.HEADERS,
    ]
    newest = max(path.stat().st_mtime for path in [*read, kernels, tensorrt_headers() / HEADER])
    return target.is_file() and target.stat().st_mtime >= newest


def _compile(sources: list[Path], flags: list[str]) -> list[Path]:
    OUT.mkdir(parents=True, exist_ok=True)
    include = [option for folder in (tensorrt_headers(), cuda_headers()) for option in ("-isystem", str(folder))]
    compiler, objects = cuda._tool(os.environ.get("CXX", "g++")), []
    for source in sources:
        target = OUT / f"{source.stem}.{os.getpid()}.o"
        done = subprocess.run(
            [compiler, *FLAGS, *flags, *include, "-c", str(source), "-o", str(target)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Missing("the compiler failed:\n" + (done.stdout + done.stderr)[-4000:])
        objects.append(target)
    return objects


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", nargs="+", metavar="CAPABILITY", help="compute capabilities without their dot, as 90"
    )
    parser.add_argument("--out", type=Path, help="with --device: the folder of the library")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--harness", action="store_true")
    options = parser.parse_args()
    try:
        if options.device:
            print(build_device(options.device, options.out))
        if options.host:
            print(build_host())
        if options.harness:
            print(build_harness(), build_fuzz(), sep="\n")
    except Missing as error:
        print(f"kvexport: the TensorRT plugins were not built: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
