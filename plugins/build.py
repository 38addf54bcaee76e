"""Builds the native operators into kvexport/_native, where a compiler and ONNX Runtime's C headers are found.

    python plugins/build.py [--fetch-headers] [--sanitize address,undefined] [--out DIR]

Exit code 3 and one line that says what is missing, where something is. `pip install` does the same through hatch_build.py and goes on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libkvexport_onnxruntime.so"
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
    raise Missing("ONNX Runtime's C headers were not found (apt-get install libonnxruntime-dev, or set ONNXRUNTIME_INCLUDE_DIR)")


def fetch_headers() -> Path:
    """ONNX Runtime's headers out of Debian's package, unpacked under build-cache; nothing is installed."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Missing("ONNX Runtime's C headers were not found, and this is not Debian, whose package libonnxruntime-dev has them")
    FETCHED.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["sh", str(ROOT / "plugins" / "fetch_headers.sh"), str(FETCHED)], capture_output=True, text=True, check=False)
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


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch-headers", action="store_true", help="take ONNX Runtime's from Debian's package")
    parser.add_argument("--sanitize", default="", help="address,undefined or thread")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        try:
            headers = find_headers()
        except Missing:
            if not options.fetch_headers or os.environ.get("ONNXRUNTIME_INCLUDE_DIR"):
                raise
            headers = fetch_headers()
        print(build(headers, sanitize=options.sanitize, out=options.out))
    except Missing as error:
        print(f"kvexport: the native operators were not built: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
