"""The record of an artifact's TensorRT engines in its manifest."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvexport.artifact.manifest import Manifest, parse_fields, require_file
from kvexport.backends.tensorrt.environment import REBUILD, Gpu, dotted, version_of
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
    built, capability = engines.tensorrt, engines.gpu.compute_capability
    if version_of(version) != version_of(built):
        raise EnvironmentProblem(
            f"the plan was built by TensorRT {built} and runs on no other, this is {version}", REBUILD
        )
    if gpu.compute_capability != capability:
        raise EnvironmentProblem(
            f"the plan was built on {engines.gpu.name} and runs on compute capability {dotted(capability)}, this is "
            f"{gpu}",
            REBUILD,
        )
