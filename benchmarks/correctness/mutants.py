"""Search for planted bugs that no check finds: bugs are planted in a copy of the kernels' sources, one at a time.

    python benchmarks/correctness/mutants.py validate|kernels|cuda|ptx [--only NAME ...] [--each 4]

The check must fail with each bug (`mutant_tables.py` lists them) and pass without:

    validate   `kvexport validate` of engines that run the changed CPU kernels (results/mutants.json)
    kernels    the tests' random calls of packed weights, quantized caches and LoRA adapters: plugins/tests/fuzz.cpp
               with the same seed and number of cases (results/kernel-mutants.json)
    cuda       the tests of the CUDA kernels on the host. Bugs that exist only on a GPU (a missing barrier, fence or
               wait) are compiled by nvcc, and their PTX runs on the host (results/cuda-mutants.json)
    ptx        the runner of PTX on the host. In place of the table, every barrier, fence, wait and commit of the PTX is
               removed alone (of a kernel's barriers `--each`, evenly spread; --only names kernels). A trap in place of
               an instruction tells whether the calls reach it at all (results/ptx_faults.json)

The first two need g++, `kernels` also a processor with AVX-512 VNNI; AMX runs in software where there is none
(plugins/tests/tiles_in_software.h). The others need nvcc, g++ and about fifteen minutes. With --only, the results of
other bugs stay.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import ROOT, earlier, options_of, save
from benchmarks.correctness import mutant_tables
from kvexport.validate import merges

PLUGINS = ROOT / "plugins"
PRODUCTS = ("cpu/linear/linear.cpp", "cpu/linear/panel_products.cpp", "cpu/experts/experts.cpp")
SOURCES = (
    "cpu/attention/vote_attention.cpp",
    "cpu/merge/merge_cache.cpp",
    "cpu/recurrence/linear_attention.cpp",
    *PRODUCTS,
)
DISPATCH = "cpu/dispatch.cpp"
BINDING = "bindings/onnxruntime/library.cpp"
REPACK = "cpu/linear/repack.cpp"
ONCE = (DISPATCH, REPACK)  # compiled once, for no specific instruction set
FLAGS = ("-std=gnu++17", "-Og", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-w")
# One instruction set is enough if the sources are the same for all.
ISA = "avx2"
ISA_FLAGS = {
    "portable": ("-DKV_WIDTH=4",),
    "avx2": ("-DKV_WIDTH=8", "-march=x86-64-v3"),
    "avx512": ("-DKV_WIDTH=16", "-march=x86-64-v4"),
    "avx512vnni": ("-DKV_WIDTH=16", "-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
CPU_INFO = Path("/proc/cpuinfo")
HAS_BF16 = CPU_INFO.is_file() and "avx512_bf16" in CPU_INFO.read_text()
HAS_TILES = CPU_INFO.is_file() and "amx_bf16" in CPU_INFO.read_text()
if not HAS_TILES:
    ISA_FLAGS["avx512vnni"] += ("-include", str(PLUGINS / "tests" / "tiles_in_software.h"))


class Mutant(NamedTuple):
    """A bug: `old` becomes `new` everywhere in the file."""

    name: str  # A description of the bug
    file: str  # file below plugins/
    old: str  # text that is replaced
    new: str  # its replacement
    where: str = ISA  # what computes with it: a key of ENGINES, an instruction set, or a key of UNITS
    call: str = ""  # the call that runs its PTX


TABLES = {
    kind: [
        Mutant(name, file, *rest) for file, rows in getattr(mutant_tables, kind.upper()).items() for name, *rest in rows
    ]
    for kind in ("validate", "kernels", "cuda")
}
Judge = Callable[[Mutant], dict[str, Any]]
# Of an engine the recipe's method, the kind of checkpoint (the trained tiny one, or a random one of that architecture),
# and other settings.
ENGINES: dict[str, tuple[str, ...]] = {
    "keepkv": ("keepkv", "tiny"),
    "ballot": ("ballot", "tiny"),
    "h2o": ("h2o", "tiny"),
    "snapkv": ("snapkv", "tiny"),
    "window": ("keepkv", "mistral"),
    "bias": ("keepkv", "qwen2"),
    "places": ("ballot", "tiny", "cache.positions=cache"),
    "fitted": ("attention_matching", "tiny", "cache.parameters={after: ballot, queries: 24, change_max: 10.0}"),
    "full": ("full", "tiny", "export.prefill_chunk=8"),
    # validate allows quantized caches more, so bugs are planted for them too.
    "int8": ("ballot", "tiny", "cache.dtype=int8"),
    "int8 keepkv": ("keepkv", "tiny", "cache.dtype=int8"),
    "int4": ("ballot", "tiny", "cache.dtype=int4"),
}
SHAPE = dict(vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
             eos_token_id=None, initializer_range=0.3)  # fmt: skip


def checkpoint(kind: str, folder: Path) -> Path:
    """Write a random checkpoint with a sliding window or with biases."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    if kind == "mistral":
        model: Any = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=48))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder / kind)
    return folder / kind


def build_engines(names: Sequence[str], folder: Path) -> dict[str, Path]:
    from kvexport.export.build import build
    from kvexport.recipe.load import load_recipe

    artifacts = {}
    for name in names:
        method, kind, *others = ENGINES[name]
        changes = [f"cache.method={method}", "limits.max_length=512", "cache.budget=32", *others]
        if kind != "tiny":
            changes.append(f"model.path={checkpoint(kind, folder)}")
        artifacts[name] = build(load_recipe("tiny-base", changes).recipe, folder / name, name=name)
    return artifacts


def plant(mutant: Mutant, folder: Path) -> str:
    """Change the bug's file in a copy of plugins/, and return the file's text before."""
    file = folder / mutant.file
    before = file.read_text()
    if mutant.old not in before:
        raise ValueError(f"{mutant.name}: {mutant.file} has no {mutant.old!r}")
    file.write_text(before.replace(mutant.old, mutant.new))
    return before


class Library:
    """A copy of the kernels that can be changed and compiled to a library, or to a program."""

    def __init__(
        self, folder: Path, linears: Sequence[str] = (ISA,), program: str | None = None, made: Path | None = None
    ) -> None:
        self.folder, self.made = folder / "plugins", made
        shutil.copytree(PLUGINS, self.folder)
        dispatch = self.folder / DISPATCH
        text, count = re.subn(
            r"^Kernels choose\(\) \{.*?^\}\n", _choice(linears), dispatch.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        assert count == 1, "dispatch.cpp has no function that chooses"
        dispatch.write_text(f"#include <string>\n{text}")
        self.flags = [*FLAGS, f"-isystem{PLUGINS / 'third_party' / 'onnxruntime'}"]
        self.link = ["-pthread"] if program else ["-shared"]
        self.path = folder / ("program" if program else "operators.so")
        others = [source for source in SOURCES if source not in PRODUCTS]
        self.units = [(source, ISA) for source in others]
        self.units += [(source, isa) for source in PRODUCTS for isa in dict.fromkeys((*linears, ISA))]
        self.units += [(source, ISA) for source in (*ONCE, program or BINDING)]
        for unit in self.units:
            self._compile(*unit)
        self._link()

    def change(self, mutant: Mutant) -> None:
        """Plant a bug and compile the sources that contain it."""
        file = self.folder / mutant.file
        before = plant(mutant, self.folder)
        try:
            compiled = "avx512vnni" if mutant.where == "amx" else mutant.where if mutant.where in ISA_FLAGS else ISA
            self._changed = [
                (source, isa)
                for source, isa in self.units
                if (source in SOURCES and isa == compiled) or source in ONCE
                if file in self._reads(source)
            ]
            for unit in self._changed:
                self._compile(*unit)
            self._link()
        finally:
            file.write_text(before)

    def _reads(self, source: str) -> set[Path]:
        """Return a source's file and the files that it includes."""
        files, rest = set(), [self.folder / source]
        while rest:
            file = Path(os.path.normpath(rest.pop()))
            if file not in files:
                files.add(file)
                included = re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE)
                rest += [file.parent / name for name in included]
        return files

    def restore(self) -> None:
        """Take the unchanged object files again for the sources that `change` compiled."""
        for unit in self._changed:
            shutil.copy(self._object(*unit, kept=True), self._object(*unit))

    def _object(self, source: str, isa: str, kept: bool = False) -> Path:
        return self.folder / (f"{isa}_{source.replace('/', '_')}" + (".kept.o" if kept else ".o"))

    def _compile(self, source: str, isa: str) -> None:
        target, kept = self._object(source, isa), self._object(source, isa, kept=True)
        if not kept.exists() and source != DISPATCH and (there := self._made(source, isa)):
            shutil.copy(there, kept), shutil.copy(there, target)
            return
        flags = [*self.flags, f"-DKV_ISA={isa}", *ISA_FLAGS[isa]]
        subprocess.run(["g++", *flags, "-c", str(self.folder / source), "-o", str(target)], check=True)
        if not kept.exists():
            shutil.copy(target, kept)

    def _made(self, source: str, isa: str) -> Path | None:
        """Return CMake's object file if it is newer than all sources."""
        if self.made is None:
            return None
        part = {BINDING: "kvexport_onnxruntime", REPACK: "kvexport_cpu"}.get(source, f"kv_{isa}")
        there = self.made / "CMakeFiles" / f"{part}.dir" / f"{source}.o"
        newest = max(path.stat().st_mtime for path in PLUGINS.rglob("*") if path.suffix in (".h", ".cpp", ".txt"))
        return there if there.is_file() and there.stat().st_mtime > newest else None

    def _link(self) -> None:
        objects = [str(self._object(*unit)) for unit in self.units]
        subprocess.run(["g++", *self.link, *objects, "-o", str(self.path)], check=True)


def _choice(linears: Sequence[str]) -> str:
    """Return the function of dispatch.cpp for the compiled instruction sets."""
    linear = {isa: f"kv::{isa}::linear" for isa in linears}
    if "avx512vnni" in linears:
        linear["amx"] = "kv::avx512vnni::linear_amx"
    cases = [f'if (wanted == "{isa}") chosen.name = "{isa}", chosen.linear = {name};' for isa, name in linear.items()]
    cases += [f'if (wanted == "{isa}") chosen.experts = kv::{isa}::experts;' for isa in linears]
    tiles = "may_use_tiles()" if HAS_TILES else "true"
    lines = [
        'const char* asked = getenv("KVEXPORT_CPU_ISA");',
        f'const std::string wanted = asked && (strcmp(asked, "amx") || {tiles}) ? asked : "{ISA}";',
        f"Kernels chosen = KV_KERNELS({ISA}, {ISA}, {ISA}, linear);",
    ]
    body = "\n  ".join([*lines, *cases, "return chosen;"])
    return f"Kernels choose() {{\n  {body}\n}}\n"


def verdict(library: Path, artifact: Path, examined: int = merges.MOST_EXAMINED) -> dict[str, Any]:
    """Return the result of `kvexport validate` on an artifact with this library.

    It runs in a process of its own, which loads no other library. This process is forked from one that has imported the
    modules that validate needs. `examined` is the largest number of differing merges that are compared in float64.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["kvexport.validate.merges", "transformers.models.llama.modeling_llama"])
    with ProcessPoolExecutor(1, processes) as pool:
        try:
            return pool.submit(_verdict, library, artifact, examined).result()
        except Exception as error:
            return {"passed": False, "crashed": [f"{type(error).__name__}: {error}"]}


def _verdict(library: Path, artifact: Path, examined: int) -> dict[str, Any]:
    from kvexport.validate.runner import validate_artifact

    merges.MOST_EXAMINED = examined
    os.environ |= {"KVEXPORT_OPERATORS": str(library), "OMP_NUM_THREADS": "1"}
    result = validate_artifact(artifact, length=220)
    return {
        "passed": result.passed,
        "differences": result.mismatched,
        "flips": len(result.flips),
        "head_merges": result.head_merges,
        "problems": [problem[:300] for problem in result.problems[:1]],
    }


def by_validate(mutants: Sequence[Mutant], folder: Path, whole: bool) -> tuple[dict[str, Any], Judge]:
    """Return the results of unchanged kernels, and the check of a bug, by `kvexport validate`."""
    library, engines = Library(folder), build_engines(sorted({m.where for m in mutants}), folder)

    def judge(mutant: Mutant) -> dict[str, Any]:
        library.change(mutant)
        result = verdict(library.path, engines[mutant.where])
        library.restore()
        return {"engine": mutant.where, "file": mutant.file, **result}

    return {"unchanged": {name: verdict(library.path, artifact) for name, artifact in engines.items()}}, judge


SEED, CASES = "10000", "300"  # as in tests/backends/onnxruntime/test_operators.py
OTHERS = (("20000", "60"), ("30000", "30"), ("40000", "30"))  # further calls of that test


def failures(program: Path, isa: str, *, linear: bool, seed: str = SEED, cases: str = CASES) -> str:
    """Return the message of the random calls of Linear alone, or of every operator, "" if they pass."""
    command = [str(program), seed, cases, *["linear"] * linear]
    environment = {**os.environ, "KVEXPORT_CPU_ISA": isa}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0 and not done.stdout.startswith(f"{isa}:"):
        sys.exit(f"this machine has no {isa}")
    return "" if done.returncode == 0 else done.stderr.strip()[:300] or f"ended by signal {-done.returncode}"


def by_calls(mutants: Sequence[Mutant], folder: Path, whole: bool) -> tuple[dict[str, Any], Judge]:
    """Return the results of unchanged kernels, and the check of a bug, by random calls."""
    program = Library(folder, list(ISA_FLAGS), "tests/fuzz.cpp")
    # Tiles in software are compiled with AVX512_BF16, which processors without AMX may lack.
    unchanged = dict.fromkeys((*ISA_FLAGS, *(["amx"] if HAS_BF16 else [])), "")
    for isa in unchanged:
        for seed, cases in (*OTHERS, (SEED, CASES)):
            unchanged[isa] += failures(program.path, isa, linear=isa != ISA, seed=seed, cases=cases)

    def judge(mutant: Mutant) -> dict[str, Any]:
        program.change(mutant)
        message = failures(program.path, mutant.where, linear=mutant.file.startswith("cpu/linear"))
        program.restore()
        return {"file": mutant.file, "isa": mutant.where, "detected": message}

    return {"seed": SEED, "cases": CASES, "unchanged": unchanged}, judge


# Of a source of CUDA its tests in tests/conformance, without the test that compiles its own library.
UNITS = {
    "attention": (
        "cuda/attention/vote_attention.cu",
        ("test_cuda_on_host.py", "test_prefill_on_host.py", "test_cuda_heads.py", "-k", "not outside_of_any_buffer"),
    ),
    "quantized": ("cuda/attention/vote_attention_quantized.cu", ("test_cuda_quantized.py",)),
    "merge": (
        "cuda/merge/merge_cache.cu",
        ("test_cuda_on_host.py", "test_nearest_on_host.py", "test_merge_cache.py", "-k", "merge or leave or nearest"),
    ),
}
ENDED, NEVER = "the process ended", "the calls do not come by"


def by_cuda(mutants: Sequence[Mutant], folder: Path, whole: bool) -> tuple[dict[str, Any], Judge]:
    """Return the results of unchanged kernels, and the check of a bug, by the tests of the CUDA kernels."""
    from plugins.building import make
    from plugins.building.ptx import library
    from plugins.building.targets import HOST_FLAGS
    from plugins.building.tools import host_compiler, run
    from tests.conformance.ptx_mutants import CALLS

    unchanged: dict[str, str] = {}
    if whole:
        host, ptx = make.build("cuda-host"), make.build("cuda-ptx")
        unchanged = {unit: failing_test(host, tests) for unit, tests in UNITS.values()}
        unchanged |= {call: ptx_fault(ptx, ptx, call) for call in CALLS}

    def judge(mutant: Mutant) -> dict[str, Any]:
        copy = folder / "plugins"
        shutil.copytree(PLUGINS, copy, ignore=shutil.ignore_patterns("__pycache__"))
        plant(mutant, copy)
        unit, tests = UNITS[mutant.where]
        if mutant.call:
            base = make.build("cuda-ptx")
            path = library.of_source(base, unit, copy, folder / "mutant.so")
            by = apart(120, ptx_fault, path, base, mutant.call)
        else:  # the other sources come from the unchanged library
            path = folder / "libkvexport_cuda_host.so"
            flags = [*HOST_FLAGS, "-O1", "-Wno-error", "-shared", "-Wl,--no-as-needed", "-x", "c++", str(copy / unit)]
            run([host_compiler(), *flags, "-x", "none", str(make.build("cuda-host")), "-o", str(path)], "compiler")
            by = failing_test(path, tests)
        shutil.rmtree(copy)
        path.unlink()
        return {"file": mutant.file, "run as": "PTX" if mutant.call else "host", "detected by": by}

    return {"unchanged": unchanged} if whole else {}, judge


def failing_test(path: Path, tests: tuple[str, ...]) -> str:
    """Return the first test that fails with a library for the host, or the reason why they ended; "" if all pass."""
    from tests.conformance.cuda_library import OTHER_LIBRARY

    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-rf", *(f"tests/conformance/{name}" if name.endswith(".py") else name for name in tests)]
    environment = {**os.environ, OTHER_LIBRARY: str(path), "KVEXPORT_BACKENDS": "cuda-on-host"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=300
        )
    except subprocess.TimeoutExpired:
        return "a test does not end"
    if done.returncode <= 0:
        return f"ended by signal {-done.returncode}" if done.returncode else ""
    match = re.search(r"^FAILED \S+?::(\S+)", done.stdout, re.MULTILINE)
    if not match:  # not a failure of the kernels
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return match[1]


def apart(seconds: float, judge: Callable[..., str], *arguments: Any) -> str:
    """Return the judgement of a process of its own, which a wrong kernel may end."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(judge, arguments).get(timeout=seconds)
        except multiprocessing.TimeoutError:
            return ENDED


def ptx_fault(path: Path, base: Path, call: str) -> str:
    """Return the difference of a library's results from those of `base`, or ""."""
    from tests.conformance.cuda_library import PtxCaller
    from tests.conformance.ptx_mutants import CALLS, faults

    caller = PtxCaller(base)
    caller.set_order(0, late=False, multiprocessors=9)
    return faults(path, call, CALLS[call](caller))


def removals(each: int, only: Sequence[str]) -> None:
    """Remove every instruction of the PTX that orders memory, one at a time, and save how that was found."""
    from plugins.building import make
    from plugins.building.ptx import library
    from tests.conformance.ptx_mutants import CALLS, KINDS, places

    make.build("cuda-ptx")
    bodies, rows = {name: kernel.body for name, kernel in library.compiled().items()}, []
    for program in only or CALLS:
        for kind in KINDS:
            there = places(bodies[program], kind)
            count = min(each, len(there)) if kind == "barrier" else len(there)
            for which in [(2 * i + 1) * len(there) // (2 * count) for i in range(count)]:
                known = re.findall(r"\.loc\s+(\d+)\s+(\d+)", bodies[program][: there[which][0]])
                with tempfile.TemporaryDirectory() as folder:
                    by = apart(300, removed, program, kind, which, str(Path(folder) / "mutant.so"))
                row = {"program": program, "removed": kind, "number": which}
                row |= {"line": ":".join(known[-1]) if known else "?", "runs": by != NEVER, "detected by": by}
                rows.append(row)
                print(row, flush=True)
    if only:
        rows += [row for row in earlier("ptx_faults").get("rows", []) if row["program"] not in only]
        rows = sorted((row for row in rows if row["program"] in CALLS), key=lambda row: [*CALLS].index(row["program"]))
    run = [row for row in rows if row["runs"]]
    left = [row for row in run if not row["detected by"]]
    summary = {"removed": len(rows), "that run": len(run), "detected": len(run) - len(left), "undetected": left}
    save("ptx_faults", {**summary, "rows": rows})


def removed(program: str, kind: str, which: int, path: str) -> str:
    """Return how the removal of an instruction was found, or NEVER if the calls do not reach it."""
    from plugins.building import make
    from tests.conformance.cuda_library import PtxCaller
    from tests.conformance.ptx_mutants import CALLS, MULTIPROCESSORS, found, without

    caller = PtxCaller(make.build("cuda-ptx"))
    caller.set_order(0, late=False, multiprocessors=MULTIPROCESSORS)
    by = found(program, without(kind, which), Path(path), CALLS[program](caller))
    return by or ("" if found(program, without(kind, which, "trap;"), Path(path + ".trap")) else NEVER)


CHECKS = {
    "validate": ("mutants", by_validate),
    "kernels": ("kernel-mutants", by_calls),
    "cuda": ("cuda-mutants", by_cuda),
}


def detected(row: dict[str, Any]) -> bool:
    return not row["passed"] if "passed" in row else bool(row.get("detected") or row.get("detected by"))


def search(kind: str, only: Sequence[str]) -> None:
    """Plant the bugs of a table, save what found each, and exit with an error if nothing did."""
    name, check = CHECKS[kind]
    mutants = [m for m in TABLES[kind] if not only or m.name.startswith(tuple(only))]
    before = earlier(name) if only else {}
    rows: dict[str, Any] = before.get("mutants", {})
    with tempfile.TemporaryDirectory() as temporary:
        figures, judge = check(mutants, Path(temporary), not only)
        unchanged = before.get("unchanged", {}) | figures.get("unchanged", {})
        print("unchanged", unchanged, flush=True)
        for mutant in mutants:
            rows[mutant.name] = judge(mutant)
            print(mutant.name, "|", rows[mutant.name] if detected(rows[mutant.name]) else "MISSED", flush=True)
    rows = {mutant.name: rows[mutant.name] for mutant in TABLES[kind] if mutant.name in rows}
    missed = [name for name, row in rows.items() if not detected(row)]
    count = f"{len(rows) - len(missed)} of {len(rows)}"
    save(name, {**figures, "unchanged": unchanged, "detected": count, "mutants": rows})
    wrong = [x for x in unchanged.values() if (x if isinstance(x, str) else not x["passed"])]
    if missed or wrong:
        sys.exit(f"missed: {missed}; found with unchanged kernels: {wrong}")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("kind", choices=[*CHECKS, "ptx"])
    parser.add_argument("--only", nargs="*", metavar="NAME", default=[], help="bugs whose names begin with it")
    parser.add_argument("--each", type=int, default=4, help="barriers of a kernel that `ptx` removes")
    options = parser.parse_args()
    if options.kind == "ptx":
        removals(options.each, options.only)
    else:
        search(options.kind, options.only)


if __name__ == "__main__":
    main()
