"""The API that TensorRT's Python bindings and NVIDIA's cuda-bindings export, read without TensorRT, CUDA or a GPU.

    python tests/support/tensorrt_bindings.py

This command fetches the bindings into build-cache/tensorrt-bindings and installs nothing elsewhere. The bindings need
TensorRT's libraries at import. Empty libraries of the same names stand in for them: they export the symbols that are
looked up.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

VARIABLE = "KVEXPORT_TENSORRT_BINDINGS"
FETCHED = ROOT / "build-cache" / "tensorrt-bindings"
GET = "make tensorrt-bindings"
PACKAGES = ("tensorrt-cu13-bindings==11.4.*", "cuda-bindings==13.*", "cuda-pathfinder")
STUBS = {
    "libnvinfer.so.11": (
        "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry", "getPluginRegistry",
    ),
    "libnvonnxparser.so.11": (
        "createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion"
    ),
    "libnvinfer_plugin.so.11": ("initLibNvInferPlugins",),
}  # fmt: skip
# This runs in a separate process, so that no other code imports these bindings without their libraries.
DUMP = """
import ctypes, json, sys
folder = sys.argv[1]
for stub in sys.argv[2:]:
    ctypes.CDLL(f"{folder}/{stub}", mode=ctypes.RTLD_GLOBAL)
import tensorrt_bindings as tensorrt
def members(cls):
    return {name: (getattr(cls, name).__doc__ or "")
            for name in dir(cls) if not name.startswith("_") or name == "__init__"}
def described(module):
    return {name: {"doc": value.__doc__ or "", "members": members(value) if isinstance(value, type) else {}}
            for name, value in vars(module).items() if not name.startswith("_")}
found = {"version": tensorrt.__version__, "tensorrt": described(tensorrt)}
try:
    from cuda.bindings import runtime
    found["cuda"] = described(runtime)
except ImportError as error:
    found["cuda"], found["cuda_problem"] = {}, str(error)
print(json.dumps(found))
"""


def folder() -> Path | None:
    place = Path(os.environ.get(VARIABLE) or FETCHED)
    return place if (place / "tensorrt_bindings" / "__init__.py").is_file() else None


def api(place: Path) -> dict[str, Any]:
    """Return every public class and function of both packages, with the docstrings of its members."""
    command = [sys.executable, "-c", DUMP, str(place), *STUBS]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    classes: dict[str, Any] = json.loads(done.stdout)
    return classes


def fetch() -> None:
    """Download the packages into FETCHED, and compile the stub libraries beside them."""
    fresh = FETCHED.with_name(FETCHED.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary",
        ":all:",
    ]  # fmt: skip
    subprocess.run([*command, "--target", str(fresh), *PACKAGES], check=True)
    for name, functions in STUBS.items():
        source = "".join(f"void *{function}(void) {{ return 0; }}\n" for function in functions)
        compiler = [
            os.environ.get("CC", "cc"), "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(fresh / name), "-x", "c",
            "-",
        ]  # fmt: skip
        subprocess.run(compiler, input=source, text=True, check=True)
    shutil.rmtree(FETCHED, ignore_errors=True)
    fresh.rename(FETCHED)


if __name__ == "__main__":
    try:
        fetch()
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"tensorrt-bindings: they could not be fetched: {error}")
    print(FETCHED)
