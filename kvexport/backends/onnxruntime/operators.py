"""The shared libraries of kvexport's native operators for ONNX Runtime, one for the CPU and one for CUDA.

The CPU's library has VoteAttention, MergeCache, Linear, Experts and LinearAttention; CUDA's has the first two. Without
a library, or for a compression method or layer that a library does not support, ONNX Runtime runs the operators' ONNX
functions (their meaning in standard operators, which the ONNX graph carries).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.backends import libraries
from kvexport.errors import EnvironmentProblem
from kvexport.paths import checkout
from kvexport.schema.operators import schema_digest
from kvexport.schema.state import TYPES

if TYPE_CHECKING:
    from kvexport.artifact.manifest import Manifest
    from kvexport.methods.base import Method

NAMES = {"cpu": "libkvexport_onnxruntime.so", "cuda": "libkvexport_onnxruntime_cuda.so"}
VARIABLE = "KVEXPORT_OPERATORS"


@dataclass(frozen=True)
class Implementation:
    native: bool  # whether the native kernel runs
    detail: str  # instruction set of the native kernel, or why the ONNX function runs instead

    def __str__(self) -> str:
        return f"native, {self.detail}" if self.native else f"function: {self.detail}"


def library(device: str = "cpu") -> Path | None:
    return libraries.find(VARIABLE, NAMES[device], "onnxruntime-cuda" if device == "cuda" else "")


def why_no_library(device: str = "cpu") -> tuple[str, str]:
    subject = f"the native operators{' for CUDA' if device == 'cuda' else ''}"
    return libraries.why_none(VARIABLE, subject, how_to_build(device))


def how_to_build(device: str) -> str:
    if checkout():
        return "make native-cuda" if device == "cuda" else "make native"
    if device == "cuda":
        return "pip install --find-links DIR kvexport-cuda, with DIR the folder of kvexport's wheels (make release)"
    return "apt-get install g++ && pip install --force-reinstall --no-deps --no-binary kvexport kvexport"


def instruction_set(path: Path) -> str:
    """Return the instruction set in use, such as avx2, or the GPUs that a library for CUDA is compiled for."""
    return _ask(path, "kvexport_isa")


def why_small_pages(path: Path) -> str:
    """Return why weights stay in small memory pages (docs/tasks/native-operators.md); "" if in huge pages."""
    return _ask(path, "kvexport_huge_pages")


def require_runnable(path: Path, device: str) -> None:
    problem = _ask(path, "kvexport_device_problem") if _has(path, "kvexport_device_problem") else ""
    if problem:
        raise EnvironmentProblem(f"{path.name} cannot be used: {problem}", f"{how_to_build(device)}, or {VARIABLE}=off")


def why_function(path: Path | None, op: str, method: Method, device: str = "cpu") -> str | None:
    if path is None:
        return why_no_library(device)[0]
    if method.extra_state and (device != "cpu" or not method.reference_queries):
        names = ", ".join(tensor.name for tensor in method.extra_state)
        which = "CUDA" if method.reference_queries else "native"
        return f"the method {method.name} keeps extra state, {names}, which no {which} kernel supports"
    if op != "MergeCache":
        return None
    policy = method.policy()
    if policy is None:
        return f"the method {method.name} has no native kernel: it has no merge policy"
    return policy.why_not_native or None


def implementations(manifest: Manifest, device: str | None = None) -> dict[str, Implementation]:
    from kvexport.backends.onnxruntime import section

    recipe = manifest.recipe
    device = device or section.of(recipe).device
    path = library(device)
    method = recipe.cache.build_method()
    in_keys = any(layer.value_in_key for layer in manifest.cache.caches)
    result = {}
    for op in ("VoteAttention", "MergeCache"):
        if in_keys and device != "cpu":
            why: str | None = f"values are a part of their keys, which no kernel for {device} reads: build for {device}"
        else:
            why = _why_no_layer(path, op, manifest) if path else None
        why = why or why_function(path, op, method, device)
        result[op] = (
            Implementation(True, instruction_set(path)) if path and why is None else Implementation(False, str(why))
        )
    return result


def _why_no_layer(path: Path, op: str, manifest: Manifest) -> str | None:
    """Return why a library lacks a kernel of `op` for a layer; a library without limits does not export the check."""
    if not _has(path, "kvexport_attention_problem"):
        return None
    merges = op == "MergeCache"
    problem_of = getattr(loaded(path), "kvexport_merge_problem" if merges else "kvexport_attention_problem")
    problem_of.restype = ctypes.c_char_p
    caches = manifest.cache.caches
    for i, (layer, heads) in enumerate(zip(caches, manifest.model.query_heads, strict=True)):
        if merges and all(b >= c for b, c in zip(layer.budget, layer.capacity, strict=True)):
            continue
        capacity, budget = ((ctypes.c_int * layer.kv_heads)(*numbers) for numbers in (layer.capacity, layer.budget))
        of_heads = (layer.kv_heads, capacity, budget) if merges else (heads, layer.kv_heads, capacity)
        if problem := problem_of(
            TYPES.index(layer.dtype), *of_heads, layer.key_size, layer.value_size, layer.statistics
        ):
            return f"layer {i} has no native kernel: {problem.decode()}"
    return None


@cache
def loaded(path: Path) -> ctypes.CDLL:
    if libraries.is_cut_off(path):
        raise _refused(path, f"{path} is damaged: its end is missing")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _refused(path, libraries.why_not_loaded(path, error)) from error
    schema = getattr(library, "kvexport_schema", None)
    if schema is not None:
        schema.restype = ctypes.c_char_p
    if schema is None or schema().decode() != schema_digest():
        raise _refused(path, f"{path} was built for another version of kvexport's operators")
    return library


def _refused(path: Path, problem: str) -> EnvironmentProblem:
    device = "cuda" if path.name.startswith(Path(NAMES["cuda"]).stem) else "cpu"
    return EnvironmentProblem(problem, f"{how_to_build(device)}, or {VARIABLE}=off")


def _has(path: Path, question: str) -> bool:
    return hasattr(loaded(path), question)


@cache
def _ask(path: Path, question: str) -> str:
    try:
        function = getattr(loaded(path), question)
    except AttributeError as error:
        problem = f"the native operators cannot be loaded: {error}"
        raise EnvironmentProblem(problem, f"build them again, or {VARIABLE}=off") from error
    function.restype = ctypes.c_char_p
    answer: bytes = function()
    return answer.decode()


def open_node(model: bytes, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library()))
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
