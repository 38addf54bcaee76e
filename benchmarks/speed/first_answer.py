"""Time from a GGUF file to the first token of `kvexport chat`, part by part, for the first and the second start.

    python benchmarks/speed/first_answer.py FILE.gguf [--row NAME] [--root CHECKOUT] [--work DIR]

Each start is a process of its own, with a cache folder that is empty before the first start. Budgets are not measured
(--no-calibrate). A part has wall seconds and processor seconds, without those of the parts within it. Parts that run
beside others are marked by `beside`: the wall seconds of the rest add up to the whole. Processor seconds of a part are
those of its own thread, and of all threads for parts that run the model; `processes` are those of processes that were
started, such as the one that writes the weights. Bytecode is compiled before, into --work (pip does that when it
installs), and files are in the page cache. --root measures another checkout of kvexport. Rows are kept in
results/first-answer.json.
"""

from __future__ import annotations

import builtins
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = {
    "kvexport.models:model_recipe": "settings, and the header of the file",
    "kvexport.export.model.checkpoint:open_checkpoint": "header of the file",
    "kvexport.export.build:read_model": "model without weights",
    "kvexport.export.texts:copy_texts": "trial of the tokenizer",
    "kvexport.export.stages:choose_weights": "choice of weights",
    "kvexport.export.weights.write:write_weights": "weights",
    "kvexport.export.stages:_merge_bytes": "merge graph",
    "kvexport.export.graph.tracer:trace_decoder": "trace of the decoder",
    "kvexport.export.graph.graphs:attentions_of": "functions of attention",
    "kvexport.export.stages:write_graphs": "graphs",
    "kvexport.artifact.publish:sync_tree": "sync to the disk",
    "kvexport.artifact.digests:check_artifact": "digests",
    "kvexport.backends.onnxruntime.session:open_session": "sessions",
    "kvexport.engine.load:load": "load, the rest",
    "kvexport.commands.chat:Chat.answer": "first token",
}
RUN = ("digests", "sessions", "load, the rest", "first token")  # parts whose threads all work for them
PROMPT = "What is 2+2? Answer briefly."


class Parts:
    """Seconds of parts of a process: the innermost part of each thread that runs gets the time."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self.own = threading.local()
        self.pending = dict(PARTS)

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), time.process_time()

    def _account(self) -> None:
        now, stack = self._clocks(), self.own.stack
        wall, thread, process = (a - b for a, b in zip(now, self.own.last, strict=True))
        self.own.last = now
        part = self.seconds.setdefault(stack[-1], {"wall": 0.0, "processor": 0.0})
        part["wall"] += wall
        part["processor"] += process if stack[-1] in RUN else thread
        if threading.current_thread() is not threading.main_thread():
            part["beside"] = True

    def within(self, name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if not hasattr(self.own, "stack"):
            self.own.stack, self.own.last = ["rest"], self._clocks()
        self._account()
        self.own.stack.append(name)
        try:
            return call(*args, **named)
        finally:
            self._account()
            self.own.stack.pop()

    def patch(self) -> None:
        """Measure the functions of `PARTS` whose modules have been imported by now."""
        for place in list(self.pending):
            module, _, path = place.partition(":")
            holder: Any = sys.modules.get(module)
            *outer, name = path.split(".")
            for each in outer:
                holder = getattr(holder, each, None)
            if (real := getattr(holder, name, None)) is not None:
                part = self.pending.pop(place)
                setattr(holder, name, lambda *a, _part=part, _real=real, **n: self.within(_part, _real, *a, **n))

    def watch_imports(self) -> None:
        real = builtins.__import__

        def imported(*args: Any, **named: Any) -> Any:
            nested = hasattr(self.own, "stack") and self.own.stack[-1] == "imports"
            module = real(*args, **named) if nested else self.within("imports", real, *args, **named)
            self.patch()
            return module

        builtins.__import__ = imported


def child(arguments: list[str], report: str) -> None:
    """Run a command of kvexport in this process, and write the seconds of its parts."""
    parts, start = Parts(), time.perf_counter()
    parts.watch_imports()
    sys.argv = ["kvexport", *arguments]

    def command() -> None:
        from kvexport.commands.app import main

        main()

    code: Any = 0
    try:
        parts.within("rest", command)
    except SystemExit as end:
        code = end.code
    times = os.times()
    total = {"wall": time.perf_counter() - start, "processor": times.user + times.system}
    Path(report).write_text(json.dumps([total, times.children_user + times.children_system, parts.seconds]))
    sys.exit(code)


def started(root: Path, arguments: list[str], work: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(root), "XDG_CACHE_HOME": str(work / "cache")}
    environment |= {"PYTHONPYCACHEPREFIX": str(work / "bytecode")}
    report = work / "parts.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(report), *arguments]
    subprocess.run(command, env=environment, input=f"{PROMPT}\n", text=True, check=True, cwd=work)
    total, processes, parts = json.loads(report.read_text())
    parts = {name: {key: x if x is True else round(x, 2) for key, x in part.items()} for name, part in parts.items()}
    shown = {name: part for name, part in parts.items() if part["wall"] >= 0.05}
    whole = {"wall": round(total["wall"], 2), "processor": round(total["processor"] + processes, 2)}
    return {"whole": whole, "processes": round(processes, 2), "parts": shown}


def main() -> None:
    from benchmarks.common import ROOT, WORK, earlier, options_of, save

    parser = options_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--row", default="now", help="the name of the row in the results")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout of kvexport that is measured")
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    work = options.work.resolve() / "first-answer"
    arguments = ["chat", str(options.file.resolve()), "--no-calibrate", "--max-tokens", "1"]
    row: dict[str, Any] = {"megabytes": round(options.file.stat().st_size / 1e6), "load average": os.getloadavg()[0]}
    for name in ("compile bytecode", "first start", "second start"):
        if name == "compile bytecode" and (work / "bytecode").exists():
            continue
        if name != "second start":
            shutil.rmtree(work / "cache", ignore_errors=True)
        (work / "cache").mkdir(parents=True, exist_ok=True)
        figures = started(options.root.resolve(), arguments, work)
        print(name, json.dumps(figures, indent=1), flush=True)
        if name != "compile bytecode":
            row[name] = figures
    run = ("date", "command", "commit", "machine")
    kept = {name: each for name, each in earlier("first-answer").items() if name not in run}
    save("first-answer", {**kept, options.row: row})
    shutil.rmtree(work / "cache")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[3:], sys.argv[2])
    else:
        main()
