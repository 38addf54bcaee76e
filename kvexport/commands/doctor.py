"""`kvexport doctor`: what this machine has, what it lacks, and which verbs will work.

Needs the standard library only, so that it can speak where everything else is missing. Not covered: whether a GPU
computes.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from kvexport import __version__
from kvexport.backends.onnxruntime.devices import problems
from kvexport.backends.onnxruntime.operators import (
    instruction_set,
    library,
    require_runnable,
    why_no_library,
    why_small_pages,
)
from kvexport.backends.tensorrt import plugin
from kvexport.errors import EnvironmentProblem
from kvexport.report.page import KeyValues, Paragraph, Section, Table
from kvexport.units import format_bytes

FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "asimd",
    "asimdhp",
    "sve",
)
VERBS = {
    "generate": "run",
    "inspect": "run",
    "recipes": "run",
    "build": "export",
    "plan": "export",
    "validate": "export",
    "eval": "export",
}


@dataclass(frozen=True)
class Package:
    """A distribution: the module that it gives, the oldest version that will do, and the extra of kvexport that asks
    for it ("run": kvexport itself does)."""

    name: str
    module: str
    minimum: str
    extra: str
    purpose: str

    @property
    def install(self) -> str:
        """The line that installs it with all that belongs to it."""
        return (
            f"pip install '{self.name}>={self.minimum}'"
            if self.extra == "run"
            else f"pip install 'kvexport[{self.extra}]'"
        )


PACKAGES = (
    Package("numpy", "numpy", "1.26", "run", "arrays"),
    Package("onnxruntime", "onnxruntime", "1.22", "run", "runs an artifact's graphs"),
    Package("pydantic", "pydantic", "2.7", "run", "checks recipes"),
    Package("pyyaml", "yaml", "6", "run", "reads recipes"),
    Package("rich", "rich", "13", "run", "progress bars"),
    Package("tokenizers", "tokenizers", "0.20", "run", "text to tokens and back"),
    Package("typer", "typer", "0.12", "run", "the command line"),
    Package("torch", "torch", "2.9", "export", "traces the checkpoint; the reference of validate"),
    Package("transformers", "transformers", "5.0", "export", "the checkpoint's model"),
    Package("safetensors", "safetensors", "0.4", "export", "the checkpoint's weights"),
    Package("onnx", "onnx", "1.18", "export", "writes graphs"),
    Package("onnxscript", "onnxscript", "0.7", "export", "optimises graphs"),
    Package("onnx-ir", "onnx_ir", "1.0", "export", "optimises graphs"),
    Package("polygraphy", "polygraphy", "0.49", "export", "validate runs the engine with it"),
    Package("onnxruntime-gpu", "onnxruntime", "1.22", "gpu", "ONNX Runtime on a GPU"),
    Package("tensorrt", "tensorrt", "11", "tensorrt", "TensorRT engines"),
    Package("cuda-bindings", "cuda.bindings", "12.6", "tensorrt", "CUDA calls around TensorRT engines"),
)


@dataclass(frozen=True)
class PackageState:
    """A package as found. version: None = not installed. problem: why it cannot be used, "" = it can."""

    package: Package
    version: str | None
    problem: str


@dataclass(frozen=True)
class Native:
    """A library of native operators. instruction_set: what it uses of this machine, "" where it cannot be used; then
    the problem, and the
    line that mends it. small_pages: why weights stay in small pages, "" where they do not."""

    instruction_set: str
    problem: str = ""
    fix: str = ""
    small_pages: str = ""


@dataclass
class Diagnosis:
    """The environment. verbs: verb -> what it lacks (empty: it will work). Memory and disk in bytes, 0 = unknown."""

    packages: list[PackageState]
    verbs: dict[str, list[str]]
    providers: list[str]
    system: dict[str, Any]
    native: Native
    native_cuda: Native
    gpus: list[str] = field(default_factory=list)
    gpu_problem: str = ""
    tensorrt_plugins: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether an artifact can be run here."""
        return not self.verbs["generate"]

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        packages = [
            {**asdict(p.package), "install": p.package.install, "version": p.version, "problem": p.problem}
            for p in self.packages
        ]
        verbs = {verb: {"works": not lacks, "lacks": lacks} for verb, lacks in self.verbs.items()}
        gpu = {"devices": self.gpus, "problem": self.gpu_problem}
        return {
            "runs": self.runs,
            **self.system,
            "providers": self.providers,
            "native": asdict(self.native),
            "native_cuda": asdict(self.native_cuda),
            "tensorrt_plugins": self.tensorrt_plugins,
            "gpu": gpu,
            "packages": packages,
            "verbs": verbs,
        }

    def sections(self) -> list[Section]:
        """For a person."""
        system, plugins = self.system, self.tensorrt_plugins
        machine = {
            "kvexport": system["kvexport"],
            "Python": system["python"],
            "system": system["system"],
            "processor": f"{system['processor']}, {system['cores']} cores usable",
            "instructions": " ".join(system["instructions"]) or "unknown",
            "memory": f"{_size(system['memory'])}, {_size(system['memory_available'])} available",
            "free disk": f"{_size(system['disk_free'])} in {Path.cwd()}",
            "GPU": ", ".join(self.gpus) or f"none: {self.gpu_problem}",
            "ONNX Runtime providers": ", ".join(self.providers) or "none: onnxruntime cannot be imported",
            "native operators": _row(self.native),
            "weights in huge pages": _pages_row(self.native),
            "native operators for CUDA": _row(self.native_cuda),
            "TensorRT plugins": plugins.get("library") or "none: {problem}. To mend it: {fix}".format(**plugins),
        }
        packages = Table(
            "Packages",
            ("package", "version", "for", "what it does", "to mend"),
            [_package_row(p) for p in self.packages],
        )
        verbs = {verb: "works" if not lacks else f"lacks {', '.join(lacks)}" for verb, lacks in self.verbs.items()}
        return [KeyValues("Machine", machine), packages, KeyValues("Verbs", verbs), Paragraph(self.verdict)]

    @property
    def verdict(self) -> str:
        """What can be done here, in a line or two."""
        if not self.runs:
            lines = {s.package.install for s in self.packages if s.problem and s.package.extra == "run"}
            return f"Artifacts cannot be run here. To mend it: {' && '.join(sorted(lines)) or 'see above'}"
        if any(self.verbs.values()):
            return "Artifacts can be run here, but not built or validated. To mend it: pip install 'kvexport[export]'"
        return "Artifacts can be built, validated and run here."


def diagnose() -> Diagnosis:
    """Look at this machine. Takes about a second; imports onnxruntime and tokenizers, which are known to break, and
    nothing heavier."""
    providers, ort_problem = _providers()
    states = [package_state(package) for package in PACKAGES]
    broken = {"onnxruntime": ort_problem, "tokenizers": _import_problem("tokenizers")}
    states = [_with_problem(state, broken.get(state.package.name, "")) for state in states]
    if providers:
        # onnxruntime-gpu gives the same module as onnxruntime.
        states = [
            s if s.package.name != "onnxruntime" or s.version else PackageState(s.package, "from another package", "")
            for s in states
        ]
    lacking = [s.package for s in states if s.problem]
    verbs = {verb: [package.name for package in lacking if _needs(verb, package)] for verb in VERBS}
    if providers and "CPUExecutionProvider" not in providers:
        for lacks in verbs.values():
            lacks.append("onnxruntime's CPUExecutionProvider")
    gpus, gpu_problem = _gpus()
    return Diagnosis(
        states, verbs, providers, _system(), _native("cpu"), _native("cuda"), gpus, gpu_problem, _tensorrt_plugins()
    )


def require(verb: str) -> None:
    """Raises EnvironmentProblem naming every package beyond kvexport's own that `verb` needs and lacks; imports none of
    them."""
    missing = [p.name for p in PACKAGES if p.extra == "export" and _needs(verb, p) and not _is_there(p.module)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise EnvironmentProblem(
            f"{verb} needs {', '.join(missing)}, which {are} not installed", "pip install 'kvexport[export]'"
        )


def missing_package(error: ImportError) -> EnvironmentProblem | None:
    """The error to show for a failed import; None where what failed is a module of kvexport, which is a defect and no
    lack."""
    module = (error.name or "").partition(".")[0]
    if module == "kvexport":
        return None
    known = next((p for p in PACKAGES if p.module == module), None)
    if known is None:
        return EnvironmentProblem(
            f"an import failed: {str(error).splitlines()[0] if str(error) else module}", "kvexport doctor"
        )
    return EnvironmentProblem(
        f"{known.name} ({known.purpose}) cannot be imported: {str(error).splitlines()[0]}", known.install
    )


def package_state(package: Package) -> PackageState:
    """Whether a package is there and new enough, from its metadata alone."""
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return PackageState(package, None, "missing")
    if version is None or not _is_there(package.module):
        return PackageState(package, version, f"installed, but there is no module {package.module}")
    if _numbers(version) < _numbers(package.minimum):
        return PackageState(package, version, f"too old, {package.minimum} is the oldest that will do")
    return PackageState(package, version, "")


def _package_row(state: PackageState) -> tuple[str, str, str, str, str]:
    package = state.package
    if not state.problem:
        return package.name, state.version or "", package.extra, package.purpose, ""
    shown = "missing" if state.version is None else f"{state.version}: {state.problem}"
    return package.name, shown, package.extra, package.purpose, package.install


def _with_problem(state: PackageState, problem: str) -> PackageState:
    return state if state.problem or not problem else PackageState(state.package, state.version, problem)


def _needs(verb: str, package: Package) -> bool:
    if package.name == "polygraphy":
        return verb == "validate"
    return package.extra == "run" or package.extra == VERBS[verb]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _import_problem(module: str) -> str:
    """Why a module cannot be imported. Compiled ones fail in ways of their own."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"cannot be imported: {(str(error) or type(error).__name__).splitlines()[0]}"
    return ""


def _providers() -> tuple[list[str], str]:
    if problem := _import_problem("onnxruntime"):
        return [], problem
    try:
        return list(importlib.import_module("onnxruntime").get_available_providers()), ""
    except Exception as error:
        return [], f"does not name its providers: {error}"


def _system() -> dict[str, Any]:
    memory, available = _memory()
    model, flags = _processor()
    return {
        "kvexport": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "instructions": [flag for flag in FLAGS if flag in flags],
        "memory": memory,
        "memory_available": available,
        "disk_free": shutil.disk_usage(Path.cwd()).free,
    }


def _processor() -> tuple[str, set[str]]:
    text = _read(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine(), set(flags[1].split()) if flags else set()


def _memory() -> tuple[int, int]:
    """Bytes of memory in all and available, the smaller of the machine's and the control group's."""
    text = _read(Path("/proc/meminfo"))
    found = {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total, available = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    limit, used = (_read(Path("/sys/fs/cgroup") / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit() and 0 < int(limit) < (total or int(limit) + 1):
        return int(limit), min(available or int(limit), max(0, int(limit) - int(used)))
    return total, available


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _native(device: str) -> Native:
    if lacks := problems(device) if device != "cpu" else []:
        return Native("", "; ".join(problem for problem, _ in lacks), lacks[0][1])
    path = library(device)
    if path is None:
        return Native("", *why_no_library(device))
    try:
        require_runnable(path)
        return Native(instruction_set(path), small_pages=why_small_pages(path) if device == "cpu" else "")
    except EnvironmentProblem as error:
        return Native("", error.problem, error.fix)


def _tensorrt_plugins() -> dict[str, str]:
    """Where their library is, or why there is none and what changes that; whether TensorRT takes it is seen when
    engines are built."""
    path = plugin.library()
    if path is not None:
        return {"library": str(path)}
    problem, fix = plugin.why_no_library()
    lacks = plugin.what_building_lacks() if fix == plugin.BUILD else None
    return {"problem": f"{problem}; to build them here, first: {lacks}" if lacks else problem, "fix": fix}


def _row(native: Native) -> str:
    return native.instruction_set or f"none: {native.problem}. To mend it: {native.fix}"


def _pages_row(native: Native) -> str:
    if not native.instruction_set:
        return "no: it takes the native operators"
    if not native.small_pages:
        return "yes, where memory allows"
    fix = (
        ". To mend it, as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        if native.small_pages == "switched off in the kernel"
        else ""
    )
    return f"no: {native.small_pages}{fix}"


def _gpus() -> tuple[list[str], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi is not there"
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not run: {error}"
    if done.returncode:
        return [], f"nvidia-smi says: {((done.stdout + done.stderr).strip().splitlines() or ['nothing'])[0]}"
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], ""


def _size(count: int) -> str:
    return format_bytes(count) if count else "unknown"
