"""The build of an artifact's TensorRT engines (decoder.plan, merge.plan, top_logits.plan) from its ONNX graphs.

A plan runs only with the TensorRT version and the kind of GPU that built it, so it is built on the machine that will
run it. TensorRT's log becomes the artifact's file tensorrt.log.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvexport.artifact.manifest import Limits, Manifest
from kvexport.backends.tensorrt.cuda import Cuda
from kvexport.backends.tensorrt.environment import Gpu, import_tensorrt, require_build_memory, require_gpu
from kvexport.backends.tensorrt.graphs import REFUSED, for_tensorrt, operators_of, plugin_refusal, refused_operator
from kvexport.backends.tensorrt.log import STEPS, make_log, make_monitor
from kvexport.backends.tensorrt.plugin import VERSION as PLUGIN_VERSION
from kvexport.backends.tensorrt.plugin import library, refusal, register, why_no_library
from kvexport.backends.tensorrt.record import NAME, EngineRecord
from kvexport.backends.tensorrt.section import TensorRTSection
from kvexport.backends.tensorrt.weights import require_taken
from kvexport.errors import EnvironmentProblem, KvexportError, UsageError
from kvexport.plan.cache import CachePlan
from kvexport.terminal import Progress

LOG = "tensorrt.log"
PLANS = {"decoder": "decoder.plan", "merge": "merge.plan", "top_logits": "top_logits.plan"}
DECODE, PREFILL = 0, 1  # indices of the decoder's optimization profiles
MOST_SORTED = 3839  # elements of an axis that TensorRT's TopK sorts


@dataclass(frozen=True)
class Profile:
    batch: tuple[int, int, int]
    tokens: tuple[int, int, int] = (1, 1, 1)


def profiles(kind: str, limits: Limits) -> list[Profile]:
    """Return the TensorRT optimization profiles (ranges of input shapes) of an ONNX graph.

    The decoder has up to three profiles in this order: DECODE for one token of several sequences, PREFILL if a call may
    have more than one token, and, if a call may have more than one sequence, a profile for one token of a single
    sequence. The merge graph has one profile, which is tuned for a single sequence. The graph of the largest logits has
    one profile, equal to DECODE.
    """
    most, chunk = limits.max_batch, limits.prefill_chunk
    if kind == "merge":
        return [Profile((1, 1, most))]
    decode = Profile((1, most, most))
    if kind == "top_logits":
        return [decode]
    prefill = [Profile((1, most, most), (1, chunk, chunk))] if chunk > 1 else []
    return [decode, *prefill, *([Profile((1, 1, 1))] if most > 1 else [])]


def single_profile(limits: Limits, count: int) -> int:
    return count - 1 if limits.max_batch > 1 and count == len(profiles("decoder", limits)) else DECODE


class EngineBuilder:
    def __init__(self, options: TensorRTSection) -> None:
        self.options = options
        self.gpu: Gpu = require_gpu(Cuda())
        self.trt = import_tensorrt()
        self.log = make_log(self.trt)
        self._refusal: Callable[[Any], str | None] = self._find_plugin()

    def _find_plugin(self) -> Callable[[Any], str | None]:
        if self.options.plugin == "never":
            return plugin_refusal("switched off by backend.tensorrt.plugin")
        if library() is None and self.options.plugin == "auto":
            return plugin_refusal(why_no_library()[0])
        register(self.trt)
        return lambda node: refusal(self.trt, node)

    def add_engines(
        self, folder: Path, manifest: Manifest, progress: Callable[[str, int | None], Progress]
    ) -> Manifest:
        """Build TensorRT engines from the ONNX graphs in `folder`; return the manifest with an entry about them."""
        state, vocabulary = manifest.cache, manifest.model.vocabulary
        weights = [*folder.glob("*.weights")]
        require_build_memory(sum(file.stat().st_size for file in weights))

        def shape_of(name: str, batch: int, tokens: int) -> tuple[int, ...]:
            return (batch, tokens, vocabulary) if name == "logits" else input_shape(state, name, batch, tokens)

        files: dict[str, str | None] = dict.fromkeys(PLANS)
        whys: dict[str, str] = {}
        for kind, graph, model, reasons in self._converted(folder, manifest):
            whys.update(reasons)
            files[kind] = PLANS[kind]
            with progress(f"building {PLANS[kind]}", STEPS) as task:
                plan = self._build(
                    model.SerializeToString(), folder / graph, profiles(kind, manifest.limits), shape_of, task
                )
                (folder / PLANS[kind]).write_bytes(plan)
        text = "\n".join(self.log.lines).replace(str(folder), ".")
        (folder / LOG).write_text(text + "\n", encoding="utf-8")
        operators = operators_of(whys, manifest.graphs.merge is not None)
        record = EngineRecord(
            decoder=PLANS["decoder"],
            merge=files["merge"],
            top_logits=PLANS["top_logits"],
            tensorrt=self.trt.__version__,
            gpu=self.gpu,
            plugin_version=PLUGIN_VERSION if "plugin" in operators.values() else None,
            functions={name: why for name, why in whys.items() if why},
        )
        return replace(manifest, operators=operators, engines={**manifest.engines, NAME: asdict(record)})

    def _converted(self, folder: Path, manifest: Manifest) -> list[tuple[str, str, Any, dict[str, str]]]:
        """Convert all graphs before the first build; return kind, file, graph, and why nodes are no plugins."""
        import onnx

        converted = []
        for kind, graph in manifest.graphs.files():
            parsed = onnx.load(folder / graph, load_external_data=False)
            model, reasons = for_tensorrt(parsed, self._refusal)
            if self.options.plugin == "always" and any(reasons.values()):
                raise EnvironmentProblem(
                    next(filter(None, reasons.values())), "--set backend.tensorrt.plugin=auto, or another cache.method"
                )
            for node in parsed.graph.node:
                if node.op_type in REFUSED:
                    raise UsageError(*refused_operator(node.op_type))
            require_taken(model, folder)
            if why := reasons.get("MergeCache"):
                require_sortable(manifest.cache, why)
            converted.append((kind, graph, model, reasons))
        return converted

    def _build(
        self,
        model: bytes,
        path: Path,
        profiles: list[Profile],
        shape_of: Callable[[str, int, int], tuple[int, ...]],
        task: Any,
    ) -> memoryview:
        trt = self.trt
        builder = trt.Builder(self.log)
        network = builder.create_network(0)  # strongly typed, like every network of TensorRT 11
        parser = trt.OnnxParser(network, self.log)
        if not parser.parse(model, str(path)):
            reasons = [str(parser.get_error(i)) for i in range(parser.num_errors)] or ["no reason given"]
            raise KvexportError(
                f"TensorRT's parser refused {path.name}: {reasons[0]}", "report it with the output of kvexport doctor"
            )
        config = builder.create_builder_config()
        config.builder_optimization_level = self.options.optimization_level
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        for profile_sizes in profiles:
            profile = builder.create_optimization_profile()
            for i in range(network.num_inputs):
                name = network.get_input(i).name
                shapes = [shape_of(name, b, t) for b, t in zip(profile_sizes.batch, profile_sizes.tokens, strict=True)]
                profile.set_shape(name, *shapes)
            if config.add_optimization_profile(profile) < 0:
                raise KvexportError(
                    f"TensorRT refused the optimization profile {profile_sizes} of {path.name}: {self._errors()}"
                )
        monitor = config.progress_monitor = make_monitor(trt, task)
        with _interrupting(monitor):
            plan = builder.build_serialized_network(network, config)
        if monitor.interrupted:
            raise KeyboardInterrupt
        if plan is None:
            smaller = "if memory is short: smaller limits.max_batch or export.prefill_chunk"
            raise KvexportError(f"TensorRT could not build an engine of {path.name}: {self._errors()}", smaller)
        return memoryview(plan)

    def _errors(self) -> str:
        return "; ".join(self.log.errors[-3:]) or "no reason given"


def require_sortable(state: CachePlan, why: str) -> None:
    for i, cache in enumerate(state.caches):
        slots = max(cache.capacity)
        if cache.merges and slots > MOST_SORTED:
            raise EnvironmentProblem(
                f"cache {i} has {slots} slots, and TensorRT sorts at most {MOST_SORTED} without kvexport's "
                f"plugin, which does not run MergeCache: {why}",
                f"python plugins/build.py tensorrt, or a cache.budget and cache.merge_every that give {MOST_SORTED} "
                "slots",
            )


def input_shape(state: CachePlan, name: str, batch: int, tokens: int) -> tuple[int, ...]:
    if name == "input_ids":
        return (batch, tokens)
    if name in ("query_length", "past_length"):
        return (batch, 1)
    place, kind = name.split(".", 1)[1].rsplit(".", 1)
    if place.isdigit():
        return state.caches[int(place)].shapes(batch)[kind]
    return next(layer for layer in state.states if layer.place == place).shapes(batch)[kind]


@contextmanager
def _interrupting(monitor: Any) -> Iterator[None]:
    """Make Ctrl-C ask TensorRT to stop its build while this context is active.

    An exception in one of TensorRT's callbacks, which Ctrl-C would raise otherwise, would end the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        monitor.interrupted = True

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
