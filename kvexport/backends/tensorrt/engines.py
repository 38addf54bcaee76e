"""TensorRT engines of an artifact: decoder.plan and merge.plan, from the graphs beside them.

A plan belongs to one version of TensorRT and one kind of GPU unless the recipe asks for more, so it is built where it
will run. What was timed on the way is kept for the next build under ``$XDG_CACHE_HOME/kvexport``; what TensorRT said is
the artifact's tensorrt.log.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvexport.artifact.manifest import Limits, Manifest
from kvexport.backends.tensorrt.cuda import Cuda
from kvexport.backends.tensorrt.environment import Gpu, import_tensorrt, require_gpu
from kvexport.backends.tensorrt.graphs import for_tensorrt, operators_of, plugin_refusal
from kvexport.backends.tensorrt.log import STEPS, make_log, make_monitor
from kvexport.backends.tensorrt.plugin import VERSION as PLUGIN_VERSION
from kvexport.backends.tensorrt.plugin import library, refusal, register, why_no_library
from kvexport.backends.tensorrt.record import NAME, EngineRecord
from kvexport.backends.tensorrt.section import TensorRTSection
from kvexport.backends.tensorrt.weights import require_taken
from kvexport.cache import CachePlan
from kvexport.errors import EnvironmentProblem, KvexportError
from kvexport.terminal import Progress

LOG = "tensorrt.log"
PLANS = {"decoder": "decoder.plan", "merge": "merge.plan", "top_logits": "top_logits.plan"}
DECODE, PREFILL = 0, 1  # the decoder's optimization profiles


@dataclass(frozen=True)
class Profile:
    """An optimization profile: (least, usual, most) sequences and tokens of each in one call."""

    batch: tuple[int, int, int]
    tokens: tuple[int, int, int] = (1, 1, 1)


def profiles(kind: str, limits: Limits) -> list[Profile]:
    """Of the decoder: DECODE and, where a call may take more than a token, PREFILL. Of merge: one, of mostly a single
    sequence. Of the top logits: one like DECODE."""
    most, chunk = limits.max_batch, limits.prefill_chunk
    if kind == "merge":
        return [Profile((1, 1, most))]
    decode = Profile((1, most, most))
    return [decode] if chunk == 1 or kind == "top_logits" else [decode, Profile((1, most, most), (1, chunk, chunk))]


class EngineBuilder:
    """TensorRT with a GPU and, where the options ask for them, the plugins. Made before anything else of a build, so
    that what is missing is said at once. Raises EnvironmentProblem for that."""

    def __init__(self, options: TensorRTSection) -> None:
        self.options = options
        self.gpu: Gpu = require_gpu(Cuda())
        self.trt = import_tensorrt()
        self.log = make_log(self.trt)
        self.plugin: Path | None = None
        self._refusal: Callable[[Any], str | None] = self._find_plugin()

    def _find_plugin(self) -> Callable[[Any], str | None]:
        """The function that says why the plugin does not take a node."""
        if self.options.plugin == "never":
            return plugin_refusal("switched off by backend.tensorrt.plugin")
        if library() is None and self.options.plugin == "auto":
            return plugin_refusal(why_no_library()[0])
        register(self.trt)
        self.plugin = library()
        return lambda node: refusal(self.trt, node)

    def add_engines(
        self, folder: Path, manifest: Manifest, progress: Callable[[str, int | None], Progress]
    ) -> Manifest:
        """Build engines of the ONNX graphs in `folder`, a staged artifact, into it; the manifest that says so.

        Raises UsageError for packed weights that TensorRT does not take, EnvironmentProblem where plugins are required
        and do not take a node, KvexportError with TensorRT's own
        words where it cannot build."""
        import onnx

        state, vocabulary = manifest.cache, manifest.model.vocabulary

        def shape_of(name: str, batch: int, tokens: int) -> tuple[int, ...]:
            return (batch, tokens, vocabulary) if name == "logits" else input_shape(state, name, batch, tokens)

        files: dict[str, str | None] = dict.fromkeys(PLANS)
        whys: dict[str, str] = {}
        for kind, graph in manifest.graphs.files():
            parsed = onnx.load(folder / graph, load_external_data=False)
            model, found = for_tensorrt(parsed, self._refusal, alias_state=self.options.alias_state)
            whys.update(found)
            require_taken(model, folder)
            if self.options.plugin == "always" and any(found.values()):
                raise EnvironmentProblem(
                    next(filter(None, found.values())), "--set backend.tensorrt.plugin=auto, or another cache.method"
                )
            files[kind] = PLANS[kind]
            with progress(f"building {PLANS[kind]}", STEPS) as task:
                wanted, plugin = profiles(kind, manifest.limits), self.plugin if "" in found.values() else None
                plan = self._build(model.SerializeToString(), folder / graph, wanted, shape_of, plugin, task)
                (folder / PLANS[kind]).write_bytes(plan)
        text = "\n".join(self.log.lines).replace(str(folder), ".")
        (folder / LOG).write_text(text + "\n", encoding="utf-8")
        operators = operators_of(whys, manifest.graphs.merge is not None)
        record = EngineRecord(
            decoder=PLANS["decoder"],
            merge=files["merge"],
            top_logits=files["top_logits"],
            tensorrt=self.trt.__version__,
            gpu=self.gpu,
            plugin_version=PLUGIN_VERSION if "plugin" in operators.values() else None,
            functions={name: why for name, why in whys.items() if why},
            options=self.options,
        )
        return replace(manifest, operators=operators, engines={**manifest.engines, NAME: record.to_json()})

    def _build(
        self,
        model: bytes,
        path: Path,
        wanted: list[Profile],
        shape_of: Callable[[str, int, int], tuple[int, ...]],
        plugin: Path | None,
        task: Any,
    ) -> memoryview:
        """The plan of one graph. path: where external data is relative to. shape_of: (an input, sequences, tokens of
        each). plugin: the library of those that it holds."""
        trt = self.trt
        builder = trt.Builder(self.log)
        network = builder.create_network(0)  # strongly typed, as every network of TensorRT 11
        parser = trt.OnnxParser(network, self.log)
        if not parser.parse(model, str(path)):
            reasons = [str(parser.get_error(i)) for i in range(parser.num_errors)] or ["no reason given"]
            raise KvexportError(
                f"TensorRT's parser refused {path.name}: {reasons[0]}", "report it, with kvexport doctor"
            )
        config = builder.create_builder_config()
        self._set_options(config, plugin)
        for wish in wanted:
            profile = builder.create_optimization_profile()
            for i in range(network.num_inputs):
                name = network.get_input(i).name
                shapes = [shape_of(name, b, t) for b, t in zip(wish.batch, wish.tokens, strict=True)]
                profile.set_shape(name, *shapes)
            if config.add_optimization_profile(profile) < 0:
                raise KvexportError(
                    f"TensorRT refused the optimization profile {wish} of {path.name}: {self._errors()}"
                )
        monitor = config.progress_monitor = make_monitor(trt, task)
        with _timing_cache(config, f"{trt.__version__}-{self.gpu.name}"), _interrupting(monitor):
            plan = builder.build_serialized_network(network, config)
        if monitor.interrupted:
            raise KeyboardInterrupt
        if plan is None:
            smaller = (
                "where memory is short: smaller limits.max_batch, export.prefill_chunk or backend.tensorrt.workspace"
            )
            raise KvexportError(f"TensorRT could not build an engine of {path.name}: {self._errors()}", smaller)
        return memoryview(plan)

    def _set_options(self, config: Any, plugin: Path | None) -> None:
        trt, options = self.trt, self.options
        config.builder_optimization_level = options.optimization_level
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.hardware_compatibility_level = getattr(
            trt.HardwareCompatibilityLevel, options.hardware_compatible.upper()
        )
        wanted = {
            "VERSION_COMPATIBLE": options.version_compatible,
            "WEIGHT_STREAMING": options.weight_streaming is not None,
            "REFIT": options.refit,
        }
        for flag in (name for name, on in wanted.items() if on):
            config.set_flag(getattr(trt.BuilderFlag, flag))
        if options.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
        if options.embed_plugin and plugin is not None:
            config.plugins_to_serialize = [str(plugin.resolve())]
        if options.alias_state and plugin is not None:
            config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)

    def _errors(self) -> str:
        """What TensorRT said of its failure: the last errors, the first of which is the cause."""
        return "; ".join(self.log.errors[-3:]) or "no reason given"


def input_shape(state: CachePlan, name: str, batch: int, tokens: int) -> tuple[int, ...]:
    """The shape of a graph's input for so many sequences and tokens of each."""
    if name == "input_ids":
        return (batch, tokens)
    if name in ("query_length", "past_length"):
        return (batch, 1)
    _, layer, kind = name.split(".")
    return state.caches[int(layer)].shapes(batch)[kind]


def cache_folder() -> Path:
    """Where timing caches are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvexport" / "tensorrt"


@contextmanager
def _timing_cache(config: Any, owner: str) -> Iterator[None]:
    """What earlier builds for the same GPU and TensorRT have timed is used, and what this one times is kept. A build
    works without."""
    path = cache_folder() / f"{re.sub(r'[^A-Za-z0-9.]+', '-', owner)}.timing"
    known = b""
    with suppress(OSError):
        known = path.read_bytes()
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, False):  # of another TensorRT or damaged
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    yield
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{secrets.token_hex(4)}")
        fresh.write_bytes(memoryview(config.get_timing_cache().serialize()))
        fresh.replace(path)


@contextmanager
def _interrupting(monitor: Any) -> Iterator[None]:
    """Ctrl-C asks TensorRT to end: an exception in one of its callbacks would end the process."""
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
