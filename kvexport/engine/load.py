"""Loading of an artifact (an exported model) into an inference engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvexport import backends
from kvexport.artifact.reading import load_manifest
from kvexport.backends.adapters import load_adapters
from kvexport.backends.base import LoadOptions
from kvexport.engine.engine import Engine
from kvexport.engine.options import EngineOptions
from kvexport.machine import require_memory
from kvexport.plan.planner import state_bytes


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    cuda_graph: bool | None = None,
    verify: bool = True,
    float_input: bool = False,
    lanes: int | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    options: EngineOptions | None = None,
) -> Engine:
    """Load an artifact (the folder of an exported model) and return an inference engine.

    Args:
        path: The folder of the artifact.
        threads: The number of threads that run the model; None takes the recipe's number, and 0 lets the backend
            choose.
        backend: The backend's name; None takes the recipe's. ONNX Runtime runs every artifact; other backends run only
            artifacts that were prepared for them.
        device: "cpu" or "cuda", for backends that have the choice; None takes the recipe's.
        cuda_graph: Whether decode steps are recorded as CUDA graphs, for backends that can; None takes the recipe's
            choice.
        verify: False skips the sha256 of every file, but still checks sizes and names. TensorRT plans contain code, so
            their digests are always verified. Use False only for files that you have just verified.
        float_input: Whether packed (4- or 8-bit) weights are multiplied with unrounded inputs. Otherwise kernels round
            the inputs (docs/reference/contract.md). True needs the package onnx.
        lanes: The largest number of sequences that run at once; None takes that of `options`.
        adapters: The folders of LoRA adapters in PEFT's format, by the names that requests use
            (docs/tasks/adapters.md).
        options: The engine's options; None takes the defaults.

    Returns:
        The engine. It needs neither torch nor transformers.

    Raises:
        UsageError: There is no artifact at `path`, no such backend or device, or an adapter does not fit the artifact.
        ArtifactError: The artifact is damaged, or not prepared for the backend.
        EnvironmentProblem: The machine lacks what the backend needs, or the artifact was prepared on another machine.
    """
    path, options = Path(path), options or EngineOptions()
    if lanes is not None:
        options = replace(options, lanes=lanes)
    later = {name for one in backends.all_backends() for name in one.verified}
    manifest = load_manifest(path, verify=verify, later=later)
    runtime = backends.get(manifest.recipe.backend.name if backend is None else backend)
    if (device or runtime.device(manifest.recipe)) == "cpu":
        fix = "an artifact of a smaller limits.max_length or cache.budget (kvexport plan says what a recipe takes)"
        require_memory(state_bytes(manifest.recipe, manifest.cache), "the cache of one sequence", fix)
    loaded = load_adapters(manifest, adapters or {})
    model = runtime.load(path, manifest, LoadOptions(threads, device, cuda_graph, float_input, loaded))
    return Engine(path, manifest, model, options, loaded)
