"""What an artifact's manifest says of its TensorRT engines."""

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
    """Plans by file name, merge and top_logits None where there is none; the TensorRT that built them, for which GPU;
    version of the plugins that they hold, None for none; why operators run from their functions, by operator; options:
    the recipe's."""

    decoder: str
    merge: str | None
    top_logits: str | None = None
    tensorrt: str
    gpu: Gpu
    plugin_version: str | None
    functions: Mapping[str, str]
    options: TensorRTSection

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {**asdict(self), "options": self.options.model_dump(mode="json")}


def engine_record(root: Path, manifest: Manifest) -> EngineRecord | None:
    """The record of the artifact `root`; None where it has no engines. Raises ArtifactError naming a field that is
    wrong, or a plan that is no file of the artifact."""
    if NAME not in manifest.engines:
        return None
    place = f"engines.{NAME}"
    record = parse_fields(root, EngineRecord, manifest.engines[NAME], place)
    for field in ("decoder", "merge", "top_logits"):
        if (file := getattr(record, field)) is not None:
            require_file(root, manifest, f"{place}.{field}", file)
    return record


def check_plan(engines: EngineRecord, version: str, gpu: Gpu) -> None:
    """Raises EnvironmentProblem where plans that `engines` describes were built for another TensorRT or another GPU."""
    built, options = engines.tensorrt, engines.options
    ours, theirs = version_of(version), version_of(built)
    if options.version_compatible:
        if ours < theirs:
            raise EnvironmentProblem(
                f"the plan was built by TensorRT {built} and runs on it or a later one, this is {version}",
                f"upgrade TensorRT, or {REBUILD}",
            )
    elif ours != theirs:
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
