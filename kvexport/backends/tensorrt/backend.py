"""The class that registers TensorRT as a backend of kvexport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvexport.backends.base import Backend, Description, Diagnosis, LoadOptions, Preparation, Runners
from kvexport.backends.tensorrt import plugin
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.packages import Package

if TYPE_CHECKING:
    from pathlib import Path

    from kvexport.artifact.manifest import Manifest
    from kvexport.backends.tensorrt.model import LoadedModel
    from kvexport.recipe.fields import Recipe


class TensorRT(Backend):
    name = "tensorrt"
    packages = (
        Package("tensorrt", "tensorrt", "11", "tensorrt", "TensorRT engines", needs_gpu=True),
        Package(
            "cuda-bindings", "cuda.bindings", "12.6", "tensorrt", "CUDA calls around TensorRT engines", needs_gpu=True
        ),
    )
    verified = frozenset({"decoder.plan", "merge.plan", "top_logits.plan"})
    prepared = verified | {"tensorrt.log"}

    def needs_gpu(self, recipe: Recipe) -> bool:
        return True

    def problems(self, recipe: Recipe) -> list[tuple[str, str]]:
        from kvexport.backends.tensorrt.cuda import Cuda
        from kvexport.backends.tensorrt.environment import import_tensorrt, require_gpu

        reasons = []
        for check in (lambda: require_gpu(Cuda()), import_tensorrt):
            try:
                check()
            except EnvironmentProblem as error:
                reasons.append((error.problem, error.fix))
        return reasons

    def preparation(self, recipe: Recipe) -> Preparation:
        from kvexport.backends.tensorrt import section
        from kvexport.backends.tensorrt.engines import EngineBuilder

        if recipe.cache.periodic.slots is not None:
            raise UsageError(
                f"cache.periodic.slots is {recipe.cache.periodic.slots}, which are copied in the host's memory, but "
                "TensorRT keeps the cache on the GPU",
                "--set cache.periodic.slots=null",
            )
        if recipe.cache.dtype != "model":
            raise UsageError(
                f"cache.dtype is {recipe.cache.dtype}, which the backend tensorrt does not support",
                "--set cache.dtype=model",
            )
        return EngineBuilder(section.of(recipe).tensorrt).add_engines

    def operator_problem(self, recipe: Recipe, operator: str) -> tuple[str, str] | None:
        from kvexport.backends.tensorrt.graphs import REFUSED, refused_operator

        return refused_operator(operator) if operator in REFUSED else None

    def positive_scales(self, recipe: Recipe) -> bool:
        return True

    def packing_problem(
        self, recipe: Recipe, dtype: str, group: int, *, has_offset: bool, has_table: bool, picked: bool
    ) -> tuple[str, str] | None:
        from kvexport.backends.tensorrt.weights import BLOCKS, PICKED, TABLE, problem

        if picked:
            return PICKED, "--set weights.head=float"
        if has_table:
            return TABLE, "weights in floats"
        why = problem(dtype, group, has_offset=has_offset)
        rounding = f"--set weights.bits=4 --set weights.group={BLOCKS[-1]} --set weights.symmetric=true"
        return (why, rounding) if why else None

    def load(self, path: Path, manifest: Manifest, options: LoadOptions) -> LoadedModel:
        from kvexport.backends.tensorrt.model import LoadedModel

        return LoadedModel(path, manifest)

    def runners(self, model: Any, manifest: Manifest) -> Runners:
        from polygraphy.backend.trt import TrtRunner

        from kvexport.backends.tensorrt.engines import DECODE, PREFILL

        decode = TrtRunner(model.decoder, name="engine", optimization_profile=DECODE)
        several = manifest.limits.prefill_chunk > 1
        prefill = TrtRunner(model.decoder, name="engine", optimization_profile=PREFILL) if several else decode
        merge = TrtRunner(model.merge, name="engine", optimization_profile=0) if model.merge else None
        return Runners(decode, prefill, merge)

    def diagnose(self) -> Diagnosis:
        """Return the state of the plugins' library; whether TensorRT accepts them is known when engines are built."""
        try:
            path = plugin.library()
        except EnvironmentProblem as error:
            row = f"none: {error.problem}. To mend it: {error.fix}"
            return Diagnosis(
                {"TensorRT plugins": row}, {"tensorrt_plugins": {"problem": error.problem, "fix": error.fix}}
            )
        if path is not None:
            return Diagnosis({"TensorRT plugins": str(path)}, {"tensorrt_plugins": {"library": str(path)}})
        problem, fix = plugin.why_no_library()
        lacks = plugin.what_building_lacks() if fix == plugin.BUILD else None
        why = f"{problem}; to build them here, first: {lacks}" if lacks else problem
        row = f"none: {why}. To mend it: {fix}"
        return Diagnosis({"TensorRT plugins": row}, {"tensorrt_plugins": {"problem": why, "fix": fix}})

    def describe(self, path: Path, manifest: Manifest) -> Description:
        from kvexport.backends.tensorrt.environment import dotted
        from kvexport.backends.tensorrt.record import engine_record
        from kvexport.report import KeyValues

        engines = engine_record(path, manifest)
        if engines is None:
            return Description()
        gpu = engines.gpu
        shown = {
            "TensorRT": engines.tensorrt,
            "GPU": f"{gpu.name}, compute capability {dotted(gpu.compute_capability)}",
        }
        for op, how in manifest.operators.items():
            why = f"function: {engines.functions.get(op, '')}" if how == "function" else how
            shown[op] = why or "not needed by this artifact"
        for op in engines.functions.keys() - manifest.operators.keys():
            shown[op] = f"a node for each KV head: {engines.functions[op]}"
        return Description(sections=(KeyValues("LoadedModel", shown),))


BACKEND = TensorRT()
