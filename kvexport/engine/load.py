"""Loading of an artifact (an exported model) into an inference engine."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvexport import backends
from kvexport.artifact.reading import load_manifest
from kvexport.backends.adapters import load_adapters
from kvexport.backends.base import LoadOptions
from kvexport.engine.engine import Engine
from kvexport.engine.options import EngineOptions
from kvexport.language.tokenizer import FILE_NAME, Tokenizer
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
    """Load an artifact and return an inference engine. `kvexport.load` explains the arguments.

    With `verify=False` the sha256 of no file is checked, but still sizes and names. TensorRT plans contain code, so
    their digests are always verified. ONNX Runtime runs every artifact; another `backend` runs only artifacts that were
    prepared for it. `float_input` needs the package onnx.
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
    with ThreadPoolExecutor(1) as pool:
        # A tokenizer takes tenths of a second, in which this thread waits for the backend.
        reading = pool.submit(Tokenizer.from_folder, path) if (path / FILE_NAME).exists() else None
        model = runtime.load(path, manifest, LoadOptions(threads, device, cuda_graph, float_input, loaded))
    tokenizer = None if reading is None else reading.result()
    return Engine(path, manifest, model, options, loaded, tokenizer)
