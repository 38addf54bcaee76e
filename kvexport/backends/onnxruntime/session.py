"""Creation of ONNX Runtime sessions, and checks of their inputs and outputs against the planned KV-cache tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.artifact.digests import built_again
from kvexport.backends.onnxruntime.devices import INSTALL_CUDA, PROVIDERS, load_cuda_libraries
from kvexport.errors import ArtifactError, EnvironmentProblem, first_line, lacks_memory

if TYPE_CHECKING:
    from kvexport.plan.cache import CachePlan

FUSED_PRODUCTS = "ORT_FPA_INTB_GEMM"  # ONNX Runtime's own variable: 0 leaves its fused products off


def open_session(
    path: Path,
    *,
    threads: int,
    operators: Path | None,
    device: str,
    graphs: bool = False,
    model: bytes | None = None,
    float_input: bool = False,
    stream: int | None = None,
) -> Any:
    """Open an ONNX Runtime session of the ONNX graph at `path`, which runs in the CUDA stream `stream` if given.

    `model` has the bytes of another ONNX graph, which then runs with the weights of the graph at `path`. With
    `float_input`, packed weights multiply unrounded inputs; this needs the package onnx.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Threads that spin after a run of one session would slow the threads of another session.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if operators is not None:
        options.register_custom_ops_library(str(operators))
    if float_input:
        model = _with_float_input(path.read_bytes() if model is None else model) or model
    source: Any = str(path)
    if model is not None:
        source = model
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    cpu = PROVIDERS["cpu"]
    if device == "cpu":
        try:
            return ort.InferenceSession(source, options, providers=[cpu])
        except Exception as error:
            if lacks_memory(error) or model is not None:
                raise
            raise _unusable(path, f"ONNX Runtime does not open it: {first_line(error)}") from error
    load_cuda_libraries(ort)
    if FUSED_PRODUCTS not in os.environ:
        # Otherwise a product of packed weights with more than 16 rows first writes all weights in 16 bits.
        options.add_session_config_entry("ep.cuda.fpa_intb_gemm", "1")
    # TF32 is off, so that matrix products of a float32 model are computed in float32. Without the arena's strategy, a
    # memory arena that is too small would grow to twice its size.
    settings = {"device_id": "0", "use_tf32": "0", "enable_cuda_graph": str(int(graphs))}
    settings["arena_extend_strategy"] = "kSameAsRequested"
    if stream is not None:
        settings["user_compute_stream"] = str(stream)
    session = None
    try:
        session = ort.InferenceSession(
            source, options, providers=[(PROVIDERS[device], settings), cpu], enable_fallback=0
        )
    except Exception as error:
        # If the provider did not start, the operators that were registered for it have no implementation.
        if "Could not find an implementation" not in str(error):
            raise EnvironmentProblem(
                f"ONNX Runtime cannot load {path.name} on {device}: {first_line(error)}", INSTALL_CUDA
            ) from error
    if session is None or PROVIDERS[device] not in session.get_providers():
        raise EnvironmentProblem(
            f"ONNX Runtime cannot start its provider for {device}; its messages above give the reason", INSTALL_CUDA
        )
    return session


def require_interface(session: Any, path: Path, plan: CachePlan, others: Mapping[str, tuple[int, ...] | None]) -> None:
    """Check that an ONNX graph takes and returns exactly the state tensors of the cache plan, in the planned shapes.

    Buffers of the plan's size are bound to the ONNX graph, so a graph with other shapes would write beyond them.
    """
    shapes = {name: layer.shapes(1)[kind] for name, _, layer, kind in plan.state_names()}
    present = {name: present for name, present, *_ in plan.state_names()}
    outputs = {node.name for node in session.get_outputs()}
    inputs = {node.name: node.shape for node in session.get_inputs()}
    for name, expected_shape in others.items():
        shape = inputs.pop(name, None)
        if shape is None:
            raise _unusable(path, f"it has no input {name}")
        if expected_shape is not None and not _fits(shape, expected_shape):
            raise _unusable(path, f"its input {name[:80]} is {shape}, expected {list(expected_shape)}")
    if others and (missing := shapes.keys() - inputs.keys()):
        raise _unusable(path, f"it has no input {min(missing)}")
    for name, shape in inputs.items():
        expected = shapes.get(name)
        if expected is None or not _fits(shape, expected):
            wording = "no such input" if expected is None else f"[batch, {', '.join(map(str, expected[1:]))}]"
            raise _unusable(path, f"its input {name[:80]} is {shape}, expected {wording}")
        if present[name] not in outputs:
            raise _unusable(path, f"it has no output {present[name]}")


def _with_float_input(model: bytes) -> bytes | None:
    import onnx

    proto = onnx.ModelProto.FromString(model)
    readers = [node for node in proto.graph.node if node.op_type in ("Linear", "AdaptedLinear", "Experts")]
    attributes = [attribute for node in readers for attribute in node.attribute if attribute.name == "float_input"]
    for attribute in attributes:
        attribute.i = 1
    return proto.SerializeToString() if attributes else None


def _fits(shape: Sequence[int | str], expected: Sequence[int]) -> bool:
    sizes = zip(shape[1:], expected[1:], strict=False)
    return len(shape) == len(expected) and all(isinstance(x, str) or x == size for x, size in sizes)


def _unusable(path: Path, problem: str) -> ArtifactError:
    return ArtifactError(f"{path} cannot be run: {problem}", built_again(path.parent))
