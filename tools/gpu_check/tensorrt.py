"""Engines on TensorRT with kvexport's plugins: the part `tensorrt` of `gpu_check`.

A small model is built for TensorRT, in float16, with budgets of its KV heads and with packed weights, and compared with
PyTorch at every step, cache state included. The part needs TensorRT, cuda-bindings, nvcc, TensorRT's headers and the
packages of `kvexport build` and `validate`. Without one of them it is skipped, and its row names the missing one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from plugins.building import make
from tools.gpu_check.onnxruntime import LENGTHS, STEPS, require_packages, step_times
from tools.gpu_check.target import Figures, Skipped, Target

NEEDED = (
    "onnxruntime", "tokenizers", "yaml", "torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors",
    "polygraphy",
)  # fmt: skip
ARTIFACTS: dict[str, dict[str, Any]] = {
    "float16": {},
    "budgets of KV heads": {"cache": {"allocation": {"kind": "listed", "shares": [[0.6, 1.4], [1.2, 0.8]]}}},
    "int4": {"weights": {"bits": 4, "group": 64}},
}
"""Changes of each artifact."""
CACHE = {"method": "keepkv", "budget": 32, "merge_every": 4}
CHUNK, LENGTH = 16, 120
VARIABLE = "KVEXPORT_TENSORRT_PLUGIN"


def tensorrt(target: Target) -> Figures:
    """Measure each artifact's operators in engines, their distance from PyTorch, and milliseconds of a step."""
    from kvexport.engine.load import load
    from kvexport.validate.runner import validate_artifact

    prepare(target)
    os.environ.setdefault(VARIABLE, str(build_for_this_gpu()))  # the part has a process of its own
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in ARTIFACTS.items():
            artifact = engines(Path(folder), name, changes)
            result = validate_artifact(artifact, length=LENGTH, batch=len(LENGTHS))
            if not result.passed:
                raise RuntimeError(f"{name}: {result.problem}")
            figures[name] = {
                "operators": dict(result.operators),
                "nats from PyTorch": result.own_kl,
                "heads merged": result.head_merges,
                **step_times(load(artifact)),
            }
            target.keep(figures)
    return figures


def prepare(target: Target) -> None:
    if target.on_host:
        raise Skipped("TensorRT needs a GPU")
    require_packages(NEEDED)
    from kvexport.backends.tensorrt.cuda import Cuda
    from kvexport.backends.tensorrt.environment import import_tensorrt, require_gpu
    from kvexport.errors import EnvironmentProblem

    try:
        require_gpu(Cuda())
        import_tensorrt()
    except EnvironmentProblem as error:
        raise Skipped(f"{error.problem} ({error.fix})") from error


def build_for_this_gpu() -> Path:
    """Compile the plugins for this machine's GPU, and return the library's path."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    try:
        return make.build("tensorrt", capabilities=[f"{major}{minor}"], out=make.CACHE / "cuda")
    except make.Missing as error:
        raise Skipped(str(error)) from error


def engines(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    """Build a random Llama of two layers for TensorRT, with plugins or not at all."""
    from kvexport.export.build import build
    from kvexport.recipe.fields import Recipe
    from tests.support.models import llama, make_recipe, save_checkpoint

    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        save_checkpoint(checkpoint, llama())
    limits = {"max_length": CHUNK + STEPS + LENGTH, "max_batch": len(LENGTHS)}
    plain = make_recipe(
        checkpoint,
        dtype="float16",
        cache=CACHE | changes.get("cache", {}),
        export={"prefill_chunk": CHUNK, "logits": "all"},
        limits=limits,
    )
    backend = {"name": "tensorrt", "tensorrt": {"plugin": "always"}}
    recipe = Recipe.model_validate(plain.model_dump() | {"weights": changes.get("weights", {}), "backend": backend})
    return build(recipe, folder / name.replace(" ", "-"))


PARTS = {"tensorrt": tensorrt}
