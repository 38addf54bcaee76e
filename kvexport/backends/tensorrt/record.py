"""The record of an artifact's TensorRT engines in its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvexport.artifact.manifest import Manifest, parse_fields, require_file
from kvexport.backends.tensorrt.environment import REBUILD, Gpu, dotted, version_of
from kvexport.backends.tensorrt.section import TensorRTSection
from kvexport.errors import EnvironmentProblem

NAME = "tensorrt"


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    decoder: str  # file of the decoder's plan
    merge: str | None  # file of the merge's plan, or None
    top_logits: str  # file of the plan that finds the largest logits
    tensorrt: str  # version of TensorRT that built the plans
    gpu: Gpu  # GPU that the plans were built for
    plugin_version: str | None  # version of the plugins in the plans, or None without plugins
    functions: Mapping[str, str]  # for each operator that runs as its ONNX function, the reason
    options: TensorRTSection  # the recipe's section `backend.tensorrt`

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "options": self.options.model_dump(mode="json")}


def engine_record(root: Path, manifest: Manifest) -> EngineRecord | None:
    if NAME not in manifest.engines:
        return None
    place = f"engines.{NAME}"
    record = parse_fields(root, EngineRecord, manifest.engines[NAME], place)
    for field in ("decoder", "merge", "top_logits"):
        if (file := getattr(record, field)) is not None:
            require_file(root, manifest, f"{place}.{field}", file)
    return record


def check_plan(engines: EngineRecord, version: str, gpu: Gpu) -> None:
    built, options = engines.tensorrt, engines.options
    present, required = version_of(version), version_of(built)
    if options.version_compatible:
        if present < required:
            raise EnvironmentProblem(
                f"the plan was built by TensorRT {built} and runs on it or a later one, this is {version}",
                f"upgrade TensorRT, or {REBUILD}",
            )
    elif present != required:
        raise EnvironmentProblem(
            f"the plan was built by TensorRT {built} and runs on no other, this is {version}",
            f"{REBUILD}; backend.tensorrt.version_compatible=true makes plans that run on later versions",
        )
    level, name, capability = options.hardware_compatible, engines.gpu.name, engines.gpu.compute_capability
    fits = gpu.compute_capability >= (8, 0) if level == "ampere_plus" else gpu.compute_capability == capability
    if not fits:
        runs_on = "8.0 and newer" if level == "ampere_plus" else dotted(capability)
        raise EnvironmentProblem(
            f"the plan was built on {name} and runs on compute capability {runs_on}, this is {gpu}", REBUILD
        )
