"""Builds the native operators into kvexport/_native, where a compiler and ONNX Runtime's C headers are found.

    python plugins/build.py [--fetch-headers] [--sanitize address,undefined] [--out DIR]
    python plugins/build.py --cuda [80 90 ...]       for ONNX Runtime's CUDA provider, by nvcc: for this machine's GPUs,
    unless named python plugins/build.py --cuda-on-host           its stand-in without a GPU, for tests, in
    build-cache/cuda

Exit code 3 and one line that says what is missing, where something is. `pip install` does the same through
hatch_build.py and goes on.
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARY, CUDA_LIBRARY = "libkvexport_onnxruntime.so", "libkvexport_onnxruntime_cuda.so"
ON_HOST = ROOT / "build-cache" / "cuda" / "libkvexport_onnxruntime_cuda_host.so"
HEADER = "onnxruntime_cxx_api.h"
FETCHED = ROOT / "build-cache" / "headers"
PLACES = (
    FETCHED / "usr/include/onnxruntime",
    Path("/usr/include/onnxruntime"),
    Path("/usr/local/include/onnxruntime"),
    Path("/usr/include/onnxruntime/core/session"),
    Path("/usr/local/include/onnxruntime/core/session"),
)


class Missing(Exception):
    """Something that building takes is not there."""


def find_headers() -> Path:
    """The folder of ONNX Runtime's C++ header; the variable ONNXRUNTIME_INCLUDE_DIR comes first."""
    asked = os.environ.get("ONNXRUNTIME_INCLUDE_DIR")
    for place in (Path(asked),) if asked else PLACES:
        if (place / HEADER).is_file():
            return place
    if asked:
        raise Missing(f"ONNXRUNTIME_INCLUDE_DIR={asked} holds no {HEADER}")
    raise Missing(
        "ONNX Runtime's C headers were not found (apt-get install libonnxruntime-dev, or set ONNXRUNTIME_INCLUDE_DIR)"
    )


def fetch_headers() -> Path:
    """ONNX Runtime's headers out of Debian's package, unpacked under build-cache; nothing is installed."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Missing(
            "ONNX Runtime's C headers were not found, and this is not Debian, whose package libonnxruntime-dev has them"
        )
    FETCHED.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["sh", str(ROOT / "plugins" / "fetch_headers.sh"), str(FETCHED)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Missing(f"Debian's libonnxruntime-dev could not be fetched: {reason}")
    return find_headers()


def build(headers: Path, *, sanitize: str = "", out: Path | None = None) -> Path:
    """Compile and put the library in `out`, kvexport/_native unless given; the library's path."""
    for tool in ("cmake", os.environ.get("CXX", "c++")):
        if not shutil.which(tool):
            raise Missing(f"{tool} was not found (apt-get install cmake g++)")
    folder = ROOT / "build-cache" / ("native" + ("-" + sanitize.replace(",", "-") if sanitize else ""))
    options = [f"-DONNXRUNTIME_INCLUDE_DIR={headers}", f"-DKV_SANITIZE={sanitize}"]
    configure = ["cmake", "-S", str(ROOT / "plugins"), "-B", str(folder), *options]
    for command in (configure, ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing("the compiler failed:\n" + (done.stdout + done.stderr)[-4000:])
    target = (out or ROOT / "kvexport" / "_native") / LIBRARY
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place: a process that has the old one mapped keeps it.
    shutil.copyfile(folder / LIBRARY, target.with_suffix(".new"))
    target.with_suffix(".new").replace(target)
    return target


def build_cuda(headers: Path, architectures: Sequence[str] = (), *, out: Path | None = None) -> Path:
    """The library for the CUDA provider, for these compute capabilities ("90"): this machine's, or all that are
    supported where it has no GPU, unless named. Nothing of CUDA but the driver is needed to run it."""
    kernels = cuda_kernels()
    wanted = sorted(set(architectures or gpus_here() or kernels.ARCHITECTURES), key=int)
    target = (out or ROOT / "kvexport" / "_native") / CUDA_LIBRARY
    try:
        return Path(kernels.link_binding(cuda_binding(headers), kernels.compile_all(wanted), wanted, target))
    except kernels.Missing as error:
        raise Missing(str(error)) from error


def build_cuda_on_host(headers: Path) -> Path:
    """The same binding over the kernels for the host, registered with the CPU provider; kept where it is current."""
    kernels = cuda_kernels()
    if cuda_on_host_is_current():
        return ON_HOST
    try:
        return Path(kernels.link_binding_on_host(cuda_binding(headers), ON_HOST))
    except kernels.Missing as error:
        raise Missing(str(error)) from error


def cuda_on_host_is_current() -> bool:
    """Whether the stand-in is there and no source is newer."""
    plugins = ROOT / "plugins"
    sources = (*plugins.glob("bindings/onnxruntime/*"), *plugins.glob("bindings/node/*"), Path(__file__))
    return bool(cuda_kernels().is_current(ON_HOST, *sources))


def cuda_binding(headers: Path) -> Any:
    """What `cuda_kernels` links with the kernels."""
    folder = ROOT / "plugins" / "bindings" / "onnxruntime"
    return cuda_kernels().Binding(folder / "cuda_library.cpp", headers, folder / "cuda_exports.map")


def cuda_kernels() -> Any:
    """plugins/cuda/build_cuda.py."""
    if "kvexport_build_cuda" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "kvexport_build_cuda", ROOT / "plugins" / "cuda" / "build_cuda.py"
        )
        assert spec is not None and spec.loader is not None
        module = sys.modules["kvexport_build_cuda"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["kvexport_build_cuda"]


def gpus_here() -> list[str]:
    """The compute capabilities of this machine's GPUs, as in "90"."""
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = [line.strip().replace(".", "") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [number for number in found if number.isdigit()]


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch-headers", action="store_true", help="take ONNX Runtime's from Debian's package")
    parser.add_argument("--sanitize", default="", help="address,undefined or thread")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cuda", nargs="*", metavar="CAPABILITY", help="compute capabilities without their dot, as 90")
    parser.add_argument("--cuda-on-host", action="store_true")
    options = parser.parse_args()
    try:
        try:
            headers = find_headers()
        except Missing:
            if not options.fetch_headers or os.environ.get("ONNXRUNTIME_INCLUDE_DIR"):
                raise
            headers = fetch_headers()
        if options.cuda is not None:
            print(build_cuda(headers, options.cuda, out=options.out))
        elif options.cuda_on_host:
            print(build_cuda_on_host(headers))
        else:
            print(build(headers, sanitize=options.sanitize, out=options.out))
    except Missing as error:
        print(f"kvexport: the native operators were not built: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
