"""One ONNX Runtime session."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.backends.onnxruntime.devices import INSTALL_CUDA, PROVIDERS, load_cuda_libraries
from kvexport.errors import ArtifactError, EnvironmentProblem, lacks_memory

if TYPE_CHECKING:
    from kvexport.cache import CachePlan


def open_session(
    path: Path,
    *,
    threads: int,
    operators: Path | None,
    device: str,
    graphs: bool = False,
    model: bytes | None = None,
    float_input: bool = False,
) -> Any:
    """An ONNX Runtime session of the ONNX graph at `path` on a device. operators: the library of native ones to
    register, None: functions run. graphs: it captures CUDA graphs. model: another ONNX graph over the weights of the
    one at `path`. float_input: see `LoadOptions`; takes the package onnx. Raises EnvironmentProblem where ONNX Runtime
    cannot use the device, ArtifactError where it can and does not open the ONNX graph."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Threads that spin on after a run would be in the way of the other session's.
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
    # Without TF32: products of a float32 model are float32.
    chosen = {"device_id": "0", "use_tf32": "0", "enable_cuda_graph": str(int(graphs))}
    session = None
    try:
        session = ort.InferenceSession(source, options, providers=[(PROVIDERS[device], chosen), cpu], enable_fallback=0)
    except Exception as error:
        # Where the provider did not start, nothing implements the operators that were registered for it.
        if "Could not find an implementation" not in str(error):
            raise EnvironmentProblem(
                f"ONNX Runtime cannot load {path.name} on {device}: {first_line(error)}", INSTALL_CUDA
            ) from error
    if session is None or PROVIDERS[device] not in session.get_providers():
        raise EnvironmentProblem(
            f"ONNX Runtime cannot start its provider for {device}, and has said why above", INSTALL_CUDA
        )
    return session


def require_interface(session: Any, path: Path, plan: CachePlan, others: Iterable[str]) -> None:
    """Raises ArtifactError where the ONNX graph at `path` takes anything but the plan's state and the inputs `others`,
    or state of other shapes, or does not give it back: what is bound to it is as large as the plan says."""
    shapes = {name: layer.shapes(1)[kind] for name, _, layer, kind in plan.state_names()}
    present = {name: present for name, present, *_ in plan.state_names()}
    given = {node.name for node in session.get_outputs()}
    taken = {node.name: node.shape for node in session.get_inputs()}
    for name in others:
        if taken.pop(name, None) is None:
            raise _unusable(path, f"it has no input {name}")
    if others and (missing := shapes.keys() - taken.keys()):
        raise _unusable(path, f"it has no input {min(missing)}")
    for name, found in taken.items():
        expected = shapes.get(name)
        if expected is None or not _fits(found, expected):
            wanted = "no such input" if expected is None else f"[batch, {', '.join(map(str, expected[1:]))}]"
            raise _unusable(path, f"its input {name[:80]} is {found}, expected {wanted}")
        if present[name] not in given:
            raise _unusable(path, f"it has no output {present[name]}")


def _with_float_input(model: bytes) -> bytes | None:
    """The ONNX graph with packed weights that are multiplied with inputs as they are; None where none is packed."""
    import onnx

    proto = onnx.ModelProto.FromString(model)
    linears = [node for node in proto.graph.node if node.op_type == "Linear"]
    found = [attribute for node in linears for attribute in node.attribute if attribute.name == "float_input"]
    for attribute in found:
        attribute.i = 1
    return proto.SerializeToString() if found else None


def _fits(found: Sequence[int | str], expected: Sequence[int]) -> bool:
    """Whether an input of shape `found`, whose names are dimensions of any size, takes tensors of a shape, for any
    batch."""
    sizes = zip(found[1:], expected[1:], strict=False)
    return len(found) == len(expected) and all(isinstance(x, str) or x == size for x, size in sizes)


def _unusable(path: Path, problem: str) -> ArtifactError:
    return ArtifactError(
        f"{path} cannot be run: {problem}",
        f"kvexport build --recipe NAME --out {shlex.quote(str(path.parent))}, which builds it again",
    )


def first_line(error: Exception) -> str:
    """The first line of its message, its class where there is none."""
    return (str(error) or type(error).__name__).splitlines()[0]
