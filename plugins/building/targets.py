"""The targets of plugins/build.py: their sources, compilers and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CAPABILITIES = ("80", "86", "87", "89", "90", "100", "110", "120")  # compute capabilities of the kernels by default
KERNELS = (
    "cuda/attention/vote_attention.cu",
    "cuda/attention/vote_attention_quantized.cu",
    "cuda/merge/merge_cache.cu",
)
# The files that the kernels, and each of their bindings, include (patterns below plugins/).
KERNEL_FILES = ("abi/*.h", "math/*.h", "cuda/**/*.h", "cuda/**/*.cu", "building/*.py")
ONNXRUNTIME_FILES = (*KERNEL_FILES, "bindings/node/*", "bindings/onnxruntime/*")
TENSORRT_FILES = (*KERNEL_FILES, "bindings/node/*", "bindings/tensorrt/*", "tests/tensorrt_*", "tests/cuda_runtime_*")

# Without contraction of products and sums, the host gives the same bits with its threads in any order.
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
HOST_FLAGS = ["-std=c++17", "-O2", "-fPIC", *WARNINGS, "-fno-strict-aliasing", "-ffp-contract=off"]
DEVICE_FLAGS = ["-std=c++17", "-O3", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=default", "-lineinfo"]
BINDING_FLAGS = ["-std=c++17", "-O2", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-maybe-uninitialized"]


def object_flags(capabilities: Sequence[str]) -> list[str]:
    """Return nvcc's flags for object files of these compute capabilities, with PTX of the latest for later ones."""
    codes = [f"arch=compute_{x},code=sm_{x}" for x in capabilities]
    codes.append(f"arch=compute_{capabilities[-1]},code=compute_{capabilities[-1]}")
    return [*DEVICE_FLAGS, *(flag for code in codes for flag in ("-gencode", code)), "-c"]


class Target(NamedTuple):
    """A library or a program.

    Attributes:
        meaning: One line for the help text.
        output: Its path below the checkout; other paths are below plugins/.
        compiler: "cmake" (of CMakeLists.txt), "nvcc" (the kernels are linked in), "ptx" (nvcc's PTX, translated) or
            "host" (a C++ compiler; the kernels are the library of the target `cuda-host`).
        sources: The files to compile.
        headers: Names in headers.PLACES.
        exports: A linker script that names the exported functions.
        reads: Patterns of files; a library for tests is stale if one of them is newer.
        link: Flags of the linker.
        sanitize: Sanitizers, for instance "address,undefined".
    """

    meaning: str
    output: str
    compiler: str
    sources: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    exports: str = ""
    reads: tuple[str, ...] = ()
    link: tuple[str, ...] = ("-shared",)
    sanitize: str = ""


TARGETS = {
    "onnxruntime": Target(
        "the operators for ONNX Runtime's CPU provider",
        "kvexport/_native/libkvexport_onnxruntime.so",
        "cmake",
    ),
    "onnxruntime-cuda": Target(
        "the operators for ONNX Runtime's CUDA provider",
        "kvexport/_native/libkvexport_onnxruntime_cuda.so",
        "nvcc",
        ("bindings/onnxruntime/cuda_library.cpp",),
        ("onnxruntime",),
        exports="bindings/onnxruntime/cuda_exports.map",
    ),
    "tensorrt": Target(
        "the operators as TensorRT plugins",
        "kvexport/_native/libkvexport_tensorrt.so",
        "nvcc",
        ("bindings/tensorrt/library.cpp",),
        ("tensorrt",),
        exports="bindings/tensorrt/exports.map",
    ),
    "cuda": Target(
        "the CUDA kernels alone, for tests on a GPU", "build-cache/cuda/libkvexport_cuda.so", "nvcc", reads=KERNEL_FILES
    ),
    "cuda-host": Target(
        "the CUDA kernels compiled for the host, for tests without a GPU",
        "build-cache/cuda/libkvexport_cuda_host.so",
        "host",
        KERNELS,
        reads=KERNEL_FILES,
    ),
    "cuda-sanitized": Target(
        "the CUDA kernels for the host, those of attention and merging under sanitizers, for tests",
        "build-cache/cuda/libkvexport_cuda_sanitized.so",
        "host",
        KERNELS[:3],
        reads=KERNEL_FILES,
        link=("-shared", "-Wl,--no-as-needed"),
        sanitize="address,undefined",
    ),
    "cuda-ptx": Target(
        "the CUDA kernels' PTX, run on the host with checks of every access to memory, for tests; needs nvcc",
        "build-cache/cuda/libkvexport_cuda_ptx.so",
        "ptx",
    ),
    "onnxruntime-cuda-host": Target(
        "ONNX Runtime's binding of cuda-host, registered with its CPU provider",
        "build-cache/cuda/libkvexport_onnxruntime_cuda_host.so",
        "host",
        ("bindings/onnxruntime/cuda_library.cpp",),
        ("onnxruntime",),
        exports="bindings/onnxruntime/cuda_exports.map",
        reads=ONNXRUNTIME_FILES,
    ),
    "tensorrt-host": Target(
        "the TensorRT plugins over cuda-host, with a CUDA runtime of the host",
        "build-cache/tensorrt/libkvexport_tensorrt_host.so",
        "host",
        ("bindings/tensorrt/library.cpp", "tests/cuda_runtime_on_host.cpp"),
        ("tensorrt", "cuda"),
        exports="bindings/tensorrt/exports.map",
        reads=TENSORRT_FILES,
        link=("-shared", "-Wl,--no-undefined"),
    ),
    "tensorrt-harness": Target(
        "tensorrt-host with functions that call the plugins as TensorRT does, for tests",
        "build-cache/tensorrt/libtensorrt_harness.so",
        "host",
        ("bindings/tensorrt/library.cpp", "tests/cuda_runtime_on_host.cpp", "tests/tensorrt_harness.cpp"),
        ("tensorrt", "cuda"),
        reads=TENSORRT_FILES,
        link=("-shared", "-Wl,--no-undefined"),
    ),
}
