"""Search for bugs of the CPU kernels that `kvexport validate` does not find.

    python benchmarks/mutants.py [--only NAME ...]

Bugs are planted in a copy of the CPU kernels, one at a time. `kvexport validate` must fail with each of them and pass
without. This needs g++.
Writes benchmarks/results/mutants.json: for every mutant its engine and the problems that the validation found.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import save

from kvexport.validate import merges

ROOT = Path(__file__).parent.parent
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
HAS_TILES = CPU_INFO.is_file() and "amx_bf16" in CPU_INFO.read_text()
if not HAS_TILES:
    ISA_FLAGS["avx512vnni"] += ("-include", str(PLUGINS / "tests" / "tiles_in_software.h"))


class Mutant(NamedTuple):
    """A bug: `old` becomes `new` everywhere in the file."""

    name: str  # A description of the bug
    file: str  # file below plugins/
    old: str  # text that is replaced
    new: str  # its replacement
    engine: str = ""  # A key of `ENGINES` whose engine computes with the changed code
    isa: str = ISA  # instruction set that computes with it


DECODE, PREFILL, ATTENTION = (f"cpu/attention/{name}.h" for name in ("decode", "prefill", "attention"))
SELECT, MERGE, FIT = (f"cpu/merge/{name}" for name in ("select.h", "merge_cache.cpp", "fit.h"))
MATH, EPILOGUE = "math/merge.h", "cpu/linear/epilogue.h"
MUTANTS = (
    Mutant(
        "window off by one, decode", ATTENTION, "<= now - call.sliding_window", "< now - call.sliding_window", "window"
    ),
    Mutant(
        "window off by one, prefill",
        PREFILL,
        "rows.now[r] - call.sliding_window :",
        "rows.now[r] - call.sliding_window - 1 :",
        "window",
    ),
    Mutant("lost vote", MATH, "votes += member_votes;", "votes += 1.0f;", "ballot"),
    Mutant("votes not read in prefill", PREFILL, "head.past_votes[slot] : 1.0f", "1.0f : 1.0f", "keepkv"),
    Mutant(
        "wrong group of query heads",
        DECODE,
        "call.query_heads + head.h * group + g % group;",
        "call.query_heads + g % group * call.heads + head.h;",
        "keepkv",
    ),
    Mutant("stale score", DECODE, "load(past + c) * decay + received", "load(past + c) * decay", "h2o"),
    Mutant(
        "wrong position",
        ATTENTION,
        "static_cast<int32_t>(head.first + i)",
        "static_cast<int32_t>(head.first + i + 1)",
        "keepkv",
    ),
    Mutant("missing bias", EPILOGUE, "if (p.bias) add_row(", "if (false) add_row(", "bias"),
    Mutant("a token does not see itself", PREFILL, "(position <= rows.now[r])", "(position < rows.now[r])", "keepkv"),
    Mutant("transposed rotary", EPILOGUE, "u * c - v * s", "u * c + v * s", "keepkv"),
    Mutant(
        "eviction tie",
        SELECT,
        "keep_score[i] == keep_score[j] && i < j",
        "keep_score[i] == keep_score[j] && i > j",
        "snapkv",
    ),
    Mutant("wrong scale", DECODE, "* call.scale", "* call.scale * 1.001f", "keepkv"),
    Mutant("threshold", MERGE, "[i] > policy.threshold)", "[i] > policy.threshold - 0.02f)", "keepkv"),
    Mutant(
        "sinks off by one",
        SELECT,
        "is_unprotected[i] = position[i] >= call.sinks",
        "is_unprotected[i] = position[i] > call.sinks",
        "h2o",
    ),
    Mutant(
        "recent off by one",
        SELECT,
        "position[i] <= head.now - head.recent;",
        "position[i] < head.now - head.recent;",
        "h2o",
    ),
    Mutant("fractional votes", MATH, "weighted_logit += w * l;", "weighted_logit += l;", "keepkv"),
    Mutant("age off by one", MATH, "static_cast<unsigned>(position) + 1u", "static_cast<unsigned>(position)", "keepkv"),
    Mutant("average does not decay", PREFILL, "past[c] + log_decay", "past[c]", "keepkv"),
    Mutant("gate", EPILOGUE, "exp(-x)", "exp(-1.0001f * x)", "keepkv"),
    Mutant("epsilon", "cpu/linear/rows.h", "static_cast<float>(size) + epsilon", "static_cast<float>(size)", "keepkv"),
    Mutant(
        "position of a merged slot",
        MERGE,
        "latest = max_of(latest, members[j])",
        "latest = members[0]",
        "ballot",
    ),
    Mutant("a product loses an input", "cpu/core/tile.h", "i < last; ++i", "i < last - 1; ++i", "keepkv"),
    Mutant("pooled neighbours", SELECT, "reach = policy.pooled / 2", "reach = policy.pooled / 2 + 1", "snapkv"),
    Mutant("keys turned the wrong way", MERGE, "place++ - before", "before - place++", "places"),
    Mutant(
        "a fit reads targets with the votes before their merge",
        FIT,
        "bias_of(votes[i]);\n      for",
        "bias_of(work.votes.get()[i]);\n      for",
        "fitted",
    ),
    Mutant(
        "a fit does not know targets' merged values",
        FIT,
        "difference[j] = to[j] - merged[c * kBlock + j]",
        "difference[j] = 0.0f * merged[c * kBlock + j]",
        "fitted",
    ),
    Mutant("a few tokens see the next one", DECODE, "max_of(from, own + 1)", "max_of(from, own + 2)", "full"),
)
# The recipe's method, the kind of checkpoint (the trained tiny one, or a random one of that architecture), and other
# settings.
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
    """Return the artifacts of engines."""
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
        headers = next((ROOT / "build-cache" / "headers").rglob("onnxruntime_cxx_api.h")).parent
        self.flags = [*FLAGS, f"-isystem{headers}"]
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
        before = file.read_text()
        if mutant.old not in before:
            raise ValueError(f"{mutant.name}: {mutant.file} has no {mutant.old!r}")
        file.write_text(before.replace(mutant.old, mutant.new))
        try:
            compiled = "avx512vnni" if mutant.isa == "amx" else mutant.isa
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="run only mutants whose names begin with it")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if not options.only or any(m.name.startswith(name) for name in options.only)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        library = Library(folder)
        engines = build_engines(sorted({m.engine for m in mutants}), folder)
        figures: dict[str, Any] = {"unchanged": {}, "mutants": {}}
        for name, artifact in engines.items():
            figures["unchanged"][name] = verdict(library.path, artifact)
            print("unchanged", name, figures["unchanged"][name], flush=True)
        for mutant in mutants:
            begin = time.perf_counter()
            library.change(mutant)
            verdict_of = verdict(library.path, engines[mutant.engine])
            library.restore()
            figures["mutants"][mutant.name] = {"engine": mutant.engine, "file": mutant.file, **verdict_of}
            outcome = "MISSED" if verdict_of["passed"] else "detected"
            print(
                f"{outcome}: {mutant.name} ({time.perf_counter() - begin:.0f} s) {verdict_of.get('problems')}",
                flush=True,
            )
    missed = [name for name, verdict_of in figures["mutants"].items() if verdict_of["passed"]]
    failed = [name for name, verdict_of in figures["unchanged"].items() if not verdict_of["passed"]]
    figures["detected"] = f"{len(mutants) - len(missed)} of {len(mutants)}"
    if not options.only:
        save("mutants", figures)
    if missed or failed:
        sys.exit(f"missed: {missed}; unchanged and yet failed: {failed}")


if __name__ == "__main__":
    main()
