"""One ONNX Runtime session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvexport.backends.onnxruntime.devices import INSTALL_CUDA, PROVIDERS, load_cuda_libraries
from kvexport.errors import EnvironmentProblem


def open_session(
    path: Path,
    *,
    threads: int,
    operators: Path | None,
    device: str,
    graphs: bool = False,
    model: bytes | None = None,
) -> Any:
    """An ONNX Runtime session of the ONNX graph at `path` on a device. operators: the library of native ones to
    register, None: functions run. graphs: it captures CUDA graphs. model: another ONNX graph over the weights of the
    one at `path`. Raises EnvironmentProblem where ONNX Runtime cannot use the device."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Threads that spin on after a run would be in the way of the other session's.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if operators is not None:
        options.register_custom_ops_library(str(operators))
    source: Any = str(path)
    if model is not None:
        source = model
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    cpu = PROVIDERS["cpu"]
    if device == "cpu":
        return ort.InferenceSession(source, options, providers=[cpu])
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


def first_line(error: Exception) -> str:
    """The first line of its message, its class where there is none."""
    return (str(error) or type(error).__name__).splitlines()[0]
