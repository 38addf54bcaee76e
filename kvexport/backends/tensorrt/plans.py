"""Loading of an artifact's TensorRT engines from their plan files, and execution contexts of the engines."""

import shlex
from pathlib import Path
from typing import Any

from kvexport.artifact.digests import read_verified
from kvexport.artifact.manifest import Manifest
from kvexport.backends.tensorrt.cuda import Cuda, Replay
from kvexport.backends.tensorrt.engines import single_profile
from kvexport.backends.tensorrt.environment import REBUILD, import_tensorrt, require_gpu
from kvexport.backends.tensorrt.log import make_log
from kvexport.backends.tensorrt.plugin import register
from kvexport.backends.tensorrt.record import check_plan, engine_record
from kvexport.errors import ArtifactError, EnvironmentProblem, KvexportError
from kvexport.plan.cache import LayerStates


def overwritten(manifest: Manifest) -> dict[str, frozenset[str]]:
    """Return, for each engine, the state inputs whose memory the engine may overwrite with its outputs.

    KV caches may be overwritten if one plugin updates each of them. The state of a convolution may not, because several
    nodes update it, which TensorRT may run in any order.
    """
    plugins = {operator for operator, how in manifest.operators.items() if how == "plugin"}
    cache = {past for past, _, layer, _ in manifest.cache.state_names() if not isinstance(layer, LayerStates)}
    return {
        "decoder": frozenset(cache if "VoteAttention" in plugins else ()),
        "merge": frozenset(cache if "MergeCache" in plugins else ()),
    }


class Plans:
    def __init__(self, path: Path, manifest: Manifest) -> None:
        engines = engine_record(path, manifest)
        if engines is None:
            raise ArtifactError(
                f"{path} has ONNX graphs but no engines yet",
                f"kvexport build --from {shlex.quote(str(path))}, on the machine that is to run it",
            )
        self.cuda = Cuda()
        gpu = require_gpu(self.cuda)
        self.trt = import_tensorrt()
        check_plan(engines, self.trt.__version__, gpu)
        self.overwritten = overwritten(manifest)
        self.log = make_log(self.trt)
        if engines.plugin_version is not None:
            register(self.trt)
        self._runtime = self.trt.Runtime(self.log)
        self.decoder = self._open(path, manifest, engines.decoder)
        self.merge = self._open(path, manifest, engines.merge) if engines.merge else None
        self.top_logits = self._open(path, manifest, engines.top_logits)
        self.top_count = manifest.top_logits
        self.single = single_profile(manifest.limits, self.decoder.num_optimization_profiles)
        self.vocabulary = manifest.model.vocabulary
        self.all_logits = manifest.recipe.all_logits
        self.prefill_chunk = manifest.limits.prefill_chunk

    @property
    def memory_size(self) -> int:
        opened = [engine for engine in (self.decoder, self.merge, self.top_logits) if engine is not None]
        return max(int(engine.device_memory_size_v2) for engine in opened)

    def context(self, engine: Any, profile: int, stream: Any, memory: int) -> Any:
        context = engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is not None:
            context.set_device_memory(memory, engine.device_memory_size_v2)
        if context is None or not context.set_optimization_profile_async(profile, int(stream)):
            raise EnvironmentProblem(
                f"TensorRT cannot create an execution context: {self._last_errors()}",
                "smaller limits.max_batch or cache.budget",
            )
        self.cuda.synchronize(stream)
        return context

    def enqueue(self, context: Any, stream: Any) -> None:
        if not context.execute_async_v3(int(stream)):
            raise KvexportError(f"TensorRT did not run an engine: {self._last_errors()}")

    def replay(self, stream: Any, label: str) -> Replay:
        def warn(why: str) -> None:
            self.log.lines.append(f"[WARNING] {label} runs without a CUDA graph: {why}")

        return Replay(self.cuda, stream, warn)

    def _last_errors(self) -> str:
        return "; ".join(self.log.errors[-3:]) or "no reason given"

    def _open(self, path: Path, manifest: Manifest, name: str) -> Any:
        plan = read_verified(path, name, manifest.files[name].sha256)
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise EnvironmentProblem(
                f"TensorRT {self.trt.__version__} does not open {name} of {path}: {self._last_errors()}", REBUILD
            )
        return engine


def names(engine: Any) -> list[str]:
    return [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]


def bind(context: Any, name: str, address: int, shape: tuple[int, ...] | None = None) -> None:
    if shape is not None and not context.set_input_shape(name, shape):
        raise KvexportError(f"the engine does not take {name} of shape {shape}")
    if not context.set_tensor_address(name, address):
        raise KvexportError(f"the engine does not take an address for {name}")
