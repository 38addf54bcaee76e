"""The class that registers ONNX Runtime as a backend of kvexport."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvexport.backends.base import Backend, Description, Diagnosis, LoadOptions, NodeOpener, Runners
from kvexport.backends.onnxruntime import devices
from kvexport.backends.onnxruntime import operators as native
from kvexport.errors import EnvironmentProblem, UsageError, first_line
from kvexport.machine import suitable_threads
from kvexport.packages import Package

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvexport.artifact.manifest import Manifest
    from kvexport.backends.onnxruntime.model import LoadedModel
    from kvexport.methods.base import Method
    from kvexport.recipe.fields import Recipe

log = logging.getLogger(__name__)
CPU_PROVIDER = devices.PROVIDERS["cpu"]
LEAST_BLOCK = 16  # the smallest number of inputs that share a scale in ONNX Runtime's operator MatMulNBits
DECODER_INPUTS = ("input_ids", "query_length", "past_length")  # the decoder's inputs besides the state tensors


@dataclass(frozen=True)
class Native:
    instruction_set: str  # instruction set that the library uses here; "" if the library cannot be used
    problem: str = ""  # why the library cannot be used
    fix: str = ""  # what the user can do about `problem`
    small_pages: str = ""  # why weights stay in small memory pages; "" if they are copied into huge pages


class OnnxRuntime(Backend):
    name = "onnxruntime"
    packages = (
        Package("onnxruntime", "onnxruntime", "1.22", "run", "runs an artifact's graphs"),
        Package("onnxruntime-gpu", "onnxruntime", "1.31", "gpu", "ONNX Runtime on a GPU", needs_gpu=True),
    )
    runs_adapters = runs_images = True

    def device(self, recipe: Recipe) -> str:
        from kvexport.backends.onnxruntime import section

        return section.of(recipe).device

    def problems(self, recipe: Recipe) -> list[tuple[str, str]]:
        return devices.problems(self.device(recipe))

    def library_products(self, recipe: Recipe) -> bool:
        return self.device(recipe) == "cuda"

    def packing_problem(
        self, recipe: Recipe, dtype: str, group: int, *, has_offset: bool, has_table: bool, picked: bool
    ) -> tuple[str, str] | None:
        if self.device(recipe) != "cuda" or group % LEAST_BLOCK == 0:
            return None
        return f"ONNX Runtime on CUDA takes only groups of multiples of {LEAST_BLOCK} inputs", "--set weights.group=32"

    def load(self, path: Path, manifest: Manifest, options: LoadOptions) -> LoadedModel:
        from kvexport.backends.adapters import load_adapters
        from kvexport.backends.onnxruntime import section
        from kvexport.backends.onnxruntime.model import LoadedModel
        from kvexport.backends.onnxruntime.session import require_interface
        from kvexport.images.rows import CallImages

        graphs, settings = manifest.graphs, section.of(manifest.recipe)
        threads = settings.threads if options.threads is None else options.threads
        if not threads:
            threads = _threads()
        device = options.device or settings.device
        if device not in devices.PROVIDERS:
            raise UsageError(f"there is no device {device}", f"choose {' or '.join(devices.PROVIDERS)}")
        if device == "cuda" and manifest.model.packed and not self.library_products(manifest.recipe):
            raise UsageError(
                f"{path} has packed weights in the layout of the CPU's kernels: {', '.join(manifest.model.packed)}",
                manifest.build_command("backend.device=cuda"),
            )
        devices.require_device(device)
        if device == "cuda":
            _require_room(path, manifest)
        library = native.library(device)
        if library:
            native.require_runnable(library, device)
        runs = native.implementations(manifest, device)
        adapters = options.adapters or load_adapters(manifest, {})
        model = LoadedModel(
            path / graphs.decoder,
            path / graphs.merge if graphs.merge else None,
            threads=threads,
            vocabulary=manifest.model.vocabulary,
            all_logits=manifest.recipe.all_logits,
            top_logits=(path / graphs.top_logits, manifest.top_logits),
            operators={op: library if how.native else None for op, how in runs.items()},
            device=device,
            float_input=options.float_input,
            graphs=device == "cuda" and (settings.cuda_graph if options.cuda_graph is None else options.cuda_graph),
            adapters=adapters,
            vision=path / graphs.vision if graphs.vision else None,
            images=manifest.images,
        )
        inputs = {**dict.fromkeys(DECODER_INPUTS), **adapters.shapes}
        if manifest.images is not None:
            inputs |= {name: x.shape for name, x in CallImages.none(manifest.images, 1, 1).inputs().items()}
        require_interface(model.decoder, path / graphs.decoder, manifest.cache, inputs)
        if graphs.merge:
            require_interface(model.merge, path / graphs.merge, manifest.cache, {})
        return model

    def runners(self, model: Any, manifest: Manifest) -> Runners:
        from polygraphy.backend.onnxrt import OnnxrtRunner

        decoder = OnnxrtRunner(model.decoder, name="engine")
        merge = OnnxrtRunner(model.merge, name="engine") if model.merge else None
        return Runners(decoder, decoder, merge, model.open_decoder)

    def operators(self, manifest: Manifest) -> dict[str, str]:
        return {op: str(how) for op, how in native.implementations(manifest, None).items()}

    def node_opener(self, operators: Sequence[str], method: Method) -> NodeOpener | None:
        path = native.library()
        return None if any(native.why_function(path, op, method) for op in operators) else native.open_node

    def diagnose(self) -> Diagnosis:
        providers, problem = _providers()
        cpu, cuda = _native("cpu"), _native("cuda")
        clash = devices.package_clash()
        return Diagnosis(
            rows={
                "ONNX Runtime providers": ", ".join(providers) or "none: onnxruntime cannot be imported",
                **({"ONNX Runtime packages": f"{clash[0]}. To mend it: {clash[1]}"} if clash else {}),
                "native operators": _row(cpu),
                "weights in huge pages": _pages_row(cpu),
                "threads of a model": str(suitable_threads()),
                "native operators for CUDA": _row(cuda),
            },
            data={
                "providers": providers,
                "packages_clash": clash and clash[0],
                "native": asdict(cpu),
                "native_cuda": asdict(cuda),
                "threads": suitable_threads()._asdict(),
            },
            broken={"onnxruntime": problem} if problem else {},
            # onnxruntime-gpu provides the same module as onnxruntime.
            provided=frozenset({"onnxruntime"}) if providers else frozenset(),
            lacks=(f"onnxruntime's {CPU_PROVIDER}",) if providers and CPU_PROVIDER not in providers else (),
        )

    def describe(self, path: Path, manifest: Manifest) -> Description:
        from kvexport.report import KeyValues

        implementations = native.implementations(manifest)
        here = {op: implementations.get(op) if needed else None for op, needed in manifest.operators.items()}
        runs = {op: str(how) if how else "not needed by this artifact" for op, how in here.items()}
        device = self.device(manifest.recipe)
        lacks = "; ".join(problem for problem, _ in self.problems(manifest.recipe)) if device != "cpu" else ""
        where = f"{device}, where nothing runs here: {lacks}" if lacks else device
        return Description(
            sections=(KeyValues("Operators on this machine", {"device": where, **runs}),),
            data={"runs_here": {op: asdict(how) if how else None for op, how in here.items()}},
        )


BACKEND = OnnxRuntime()


def _threads() -> int:
    """Return the number of threads of a model on this machine; 0 if ONNX Runtime would choose the same number.

    With 0, ONNX Runtime also binds each of its threads to a core. But ONNX Runtime counts the cores of the whole
    machine, even if the process may use only some of them.
    """
    threads = suitable_threads()
    restricted = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    return threads.number if threads.reasons or restricted else 0


def _require_room(path: Path, manifest: Manifest) -> None:
    from kvexport.plan.planner import state_bytes
    from kvexport.units import format_bytes

    if manifest.recipe.model.dtype == "float32":
        build = manifest.build_command("backend.device=cuda", "model.dtype=float16")
        log.warning("%s has float32 weights, which a GPU reads in twice the time of float16: %s", path, build)
    needed = manifest.bytes + state_bytes(manifest.recipe, manifest.cache)
    free, total = devices.gpu_memory()
    if needed > free:
        fix = "fewer programs on this GPU (nvidia-smi)"
        if not manifest.model.packed:
            fix = f"{manifest.build_command('backend.device=cuda', 'weights.bits=4')}, or {fix}"
        raise EnvironmentProblem(
            f"the weights and the cache of one sequence take {format_bytes(needed)}, and "
            f"{format_bytes(free)} of the GPU's {format_bytes(total)} are free",
            fix,
        )


def _providers() -> tuple[list[str], str]:
    """Return ONNX Runtime's providers, and why it cannot be imported; a compiled module may raise any exception."""
    try:
        module = importlib.import_module("onnxruntime")
    except Exception as error:
        return [], f"cannot be imported: {first_line(error)}"
    try:
        return list(module.get_available_providers()), ""
    except Exception as error:
        return [], f"does not name its providers: {error}"


def _native(device: str) -> Native:
    if lacks := devices.problems(device) if device != "cpu" else []:
        return Native("", "; ".join(problem for problem, _ in lacks), devices.fix_of(device, lacks))
    try:
        path = native.library(device)
        if path is None:
            return Native("", *native.why_no_library(device))
        native.require_runnable(path, device)
        pages = native.why_small_pages(path) if device == "cpu" else ""
        return Native(native.instruction_set(path), small_pages=pages)
    except EnvironmentProblem as error:
        return Native("", error.problem, error.fix)


def _row(library: Native) -> str:
    return library.instruction_set or f"none: {library.problem}. To mend it: {library.fix}"


def _pages_row(library: Native) -> str:
    if not library.instruction_set:
        return "no: this needs the native operators"
    if not library.small_pages:
        return "yes, where memory allows"
    fix = (
        ". To mend it, as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        if library.small_pages == "switched off in the kernel"
        else ""
    )
    return f"no: {library.small_pages}{fix}"
