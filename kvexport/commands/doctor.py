"""The command `kvexport doctor`: installed and missing packages, devices, and the commands that work.

The command does not check that a GPU computes correctly.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvexport.backends import all_backends, packages
from kvexport.commands.options import JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import first_line
from kvexport.machine import machine_memory, read_system_file
from kvexport.packages import VERBS, PackageState, needs, package_state
from kvexport.units import format_bytes
from kvexport.version import __version__

if TYPE_CHECKING:
    from kvexport.backends.base import Diagnosis as BackendDiagnosis
    from kvexport.report import Section

FLAGS = "avx2 fma f16c avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_tile asimd asimdhp sve"


def doctor(as_json: JsonOption = False) -> None:
    """Show which packages and devices this machine has, and what it lacks.

    The exit code is 3 if this machine cannot run an artifact.
    """
    diagnosis = diagnose()
    print_result(as_json, diagnosis.to_json, diagnosis.sections)
    if not diagnosis.runs:
        raise typer.Exit(3)


@dataclass
class Diagnosis:
    packages: list[PackageState]
    verbs: dict[str, list[str]]  # for each command, the packages that it lacks
    backends: list[BackendDiagnosis]
    system: dict[str, Any]
    gpus: list[str] = field(default_factory=list)
    gpu_problem: str = ""

    @property
    def runs(self) -> bool:
        return not self.verbs["generate"]

    def to_json(self) -> dict[str, Any]:
        packages = [
            {**asdict(p.package), "install": p.package.install, "version": p.version, "problem": p.problem}
            for p in self.packages
        ]
        verbs = {verb: {"works": not lacks, "lacks": lacks} for verb, lacks in self.verbs.items()}
        gpu = {"devices": self.gpus, "problem": self.gpu_problem}
        return {
            "runs": self.runs,
            **self.system,
            **{key: value for backend in self.backends for key, value in backend.data.items()},
            "gpu": gpu,
            "packages": packages,
            "verbs": verbs,
        }

    def sections(self) -> list[Section]:
        from kvexport.report import KeyValues, Paragraph, Table

        system = self.system
        machine = {
            "kvexport": system["kvexport"],
            "Python": system["python"],
            "system": system["system"],
            "processor": f"{system['processor']}, {system['cores']} cores usable",
            "instructions": " ".join(system["instructions"]) or "unknown",
            "memory": f"{_size(system['memory'])}, {_size(system['memory_available'])} available",
            "free disk": f"{_size(system['disk_free'])} in {Path.cwd()}",
            "GPU": ", ".join(self.gpus) or f"none: {self.gpu_problem}",
            **{row: value for backend in self.backends for row, value in backend.rows.items()},
        }
        table = Table(
            "Packages",
            ("package", "version", "for", "what it does", "to mend"),
            [_package_row(p, self.gpu_problem) for p in self.packages],
        )
        verbs = {verb: "works" if not lacks else f"lacks {', '.join(lacks)}" for verb, lacks in self.verbs.items()}
        return [
            KeyValues("Machine", machine),
            table,
            KeyValues("Verbs", verbs),
            Paragraph(self.verdict),
        ]

    @property
    def verdict(self) -> str:
        """One or two sentences about the commands that work on this machine."""
        if not self.runs:
            lines = {s.package.install for s in self.packages if s.problem and s.package.extra == "run"}
            return f"Artifacts cannot be run here. To mend it: {' && '.join(sorted(lines)) or 'see above'}"
        able, missing = ["run"], []
        for extra, done in (("serve", ["served"]), ("export", ["built", "validated"])):
            if any(lacks for verb, lacks in self.verbs.items() if VERBS[verb] == extra):
                missing.append(extra)
            else:
                able += done
        text = f"Artifacts can be {' and '.join(filter(None, (', '.join(able[:-1]), able[-1])))} here"
        return f"{text}. For more: pip install 'kvexport[{','.join(missing)}]'" if missing else f"{text}."


def diagnose() -> Diagnosis:
    """Examine this machine's packages and devices, in about a second.

    The packages that backends need at run time, and tokenizers, are imported, because their imports often fail. Larger
    packages are not imported.
    """
    diagnoses = [backend.diagnose() for backend in all_backends()]
    states = [package_state(package) for package in packages()]
    broken = {"tokenizers": _import_problem("tokenizers")}
    provided: set[str] = set()
    for backend in diagnoses:
        broken.update(backend.broken)
        provided |= backend.provided
    states = [_with_problem(state, broken.get(state.package.name, "")) for state in states]
    states = [
        PackageState(s.package, "from another package", "") if s.package.name in provided and not s.version else s
        for s in states
    ]
    lacking = [s.package for s in states if s.problem]
    verbs = {verb: [package.name for package in lacking if needs(verb, package)] for verb in VERBS}
    for backend in diagnoses:
        for lacks in verbs.values():
            lacks += backend.lacks
    gpus, gpu_problem = _gpus()
    return Diagnosis(states, verbs, diagnoses, _system(), gpus, gpu_problem)


def _package_row(state: PackageState, gpu_problem: str) -> tuple[str, str, str, str, str]:
    package = state.package
    if not state.problem:
        return package.name, state.version or "", package.extra, package.purpose, ""
    shown = "missing" if state.version is None else f"{state.version}: {state.problem}"
    useless = package.needs_gpu and gpu_problem and state.version is None
    fix = "nothing: without a GPU use --device cpu" if useless else package.install
    return package.name, shown, package.extra, package.purpose, fix


def _with_problem(state: PackageState, problem: str) -> PackageState:
    return state if state.problem or not problem else PackageState(state.package, state.version, problem)


def _import_problem(module: str) -> str:
    """Return why a Python module cannot be imported; "" if it can. Compiled modules may raise any exception."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"cannot be imported: {first_line(error)}"
    return ""


def _system() -> dict[str, Any]:
    memory, available = machine_memory()
    model, flags = _processor()
    return {
        "kvexport": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "instructions": [flag for flag in FLAGS.split() if flag in flags],
        "memory": memory,
        "memory_available": available,
        "disk_free": shutil.disk_usage(Path.cwd()).free,
    }


def _processor() -> tuple[str, set[str]]:
    text = read_system_file(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine(), set(flags[1].split()) if flags else set()


def _gpus() -> tuple[list[str], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi is not installed, which comes with the NVIDIA driver: use --device cpu"
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
