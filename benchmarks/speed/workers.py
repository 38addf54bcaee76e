"""Processes that measure one side of a comparison each, and the models and runs of llama.cpp and onnxruntime-genai.

A script starts a `Worker` for every side. The process of a worker runs the same script again, and calls `serve`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, read_bandwidth

BLOCK = 32  # tokens: one merge interval
Run = Callable[[], float]


class Worker:
    """The process of one side."""

    def __init__(self, side: str, command: Sequence[str], threads: int, log: Path, packages: str | None = None) -> None:
        self.side = side
        path = os.pathsep.join(filter(None, (packages, str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
        self.log = (log / f"{side}.log").open("w+")
        pipe = subprocess.PIPE
        command = [sys.executable, *command]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.log, text=True, env=environment)

    def read(self) -> str:
        """Return the next line that is an answer, since libraries write on stdout too."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == "ready" or line.strip().replace(".", "").replace("e-", "").isdigit():
                return line.strip()
        self.log.seek(0)
        raise SystemExit(f"{self.side} failed:\n{self.log.read()[-3000:]}")

    def figure(self) -> float:
        """Let the process measure once more, and return the seconds that it measured."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds = float(self.read())
        time.sleep(0.2)  # threads that still spin would slow down the next side
        return seconds

    def end(self) -> None:
        """End the process, and keep the largest resident memory that it had, in MB."""
        assert self.process.stdin is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        self.peak_MB = int(status.partition("VmHWM:")[2].split()[0]) // 1000
        self.process.stdin.close()
        self.process.wait()


def in_turn(
    workers: Sequence[Worker], rounds: int, threads: int, blocks: int = 1
) -> tuple[dict[str, list[float]], list[float]]:
    """Return the figures of every side, which measure in turn, and the read bandwidth in bytes per second.

    The bandwidth is measured before and after each round of `blocks` figures a side. The processes are ended.
    """
    for worker in workers:
        worker.read()
    figures: dict[str, list[float]] = {worker.side: [] for worker in workers}
    bandwidth = [read_bandwidth(256, threads, 0.5)]
    for _ in range(rounds):
        for _ in range(blocks):
            for worker in workers:
                figures[worker.side].append(worker.figure())
        bandwidth.append(read_bandwidth(256, threads, 0.5))
    for worker in workers:
        worker.end()
    return figures, bandwidth


def serve(run: Run) -> None:
    """Print a line with a figure for every line of input. A first run warms up."""
    run()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(run(), flush=True)


def timed_block(step: Callable[[], Any]) -> float:
    """Return the seconds of one of BLOCK steps."""
    start = time.perf_counter()
    for _ in range(BLOCK):
        step()
    return (time.perf_counter() - start) / BLOCK


def engine_run(kind: str, artifact: Path, ids: Any, batch: int = 1) -> Run:
    """Return a function that returns the seconds of a step (`decode`) of kvexport, or of prompts.

    All `batch` sequences begin with the prompt `ids`.
    """
    import kvexport

    engine = kvexport.load(artifact, verify=False)
    lanes = engine.lanes(
        batch
    )  # for all prompts, as an engine keeps them: new memory would be touched for the first time

    def prompt() -> float:
        lanes.clear()
        start = time.perf_counter()
        lanes.prefill([ids] * batch)
        return time.perf_counter() - start

    if kind == "prefill":
        return prompt
    lanes.prefill([ids] * batch)
    # Other tokens choose other experts.
    tokens = itertools.cycle(ids[i : i + 1] for i in range(len(ids)))
    return lambda: timed_block(lambda: lanes.append([next(tokens)] * batch))


def genai_model(checkpoint: Path, out: Path, packages: str, threads: int, precision: str, *options: str) -> Path:
    """Return the model that onnxruntime-genai's own builder makes of a checkpoint; it is made if it is missing."""
    if not out.exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(checkpoint), "-o", str(out)]
        command += ["-p", precision, "-e", "cpu", "-c", str(out.with_name("cache"))]
        command += ["--extra_options", *options] if options else []
        subprocess.run(command, env={**os.environ, "PYTHONPATH": packages}, check=True)
    path = out / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config))
    return out


def genai_run(kind: str, model: Path, ids: Any, length: int, batch: int = 1) -> Run:
    """Return a function that returns the seconds of a step (`decode`) of onnxruntime-genai, or of prompts."""
    import onnxruntime_genai as og

    loaded = og.Model(str(model))
    ids = ids[None].astype(np.int32).repeat(batch, 0)

    def generator() -> Any:
        parameters = og.GeneratorParams(loaded)
        parameters.set_search_options(max_length=length, min_length=length, batch_size=batch)
        return og.Generator(loaded, parameters)

    def prompt() -> float:
        one = generator()
        start = time.perf_counter()
        one.append_tokens(ids)
        return time.perf_counter() - start

    if kind == "prefill":
        return prompt
    one = generator()
    one.append_tokens(ids)
    return lambda: timed_block(one.generate_next_token)


def llamacpp_run(kind: str, model: Path, ids: Any, threads: int, packages: str) -> Run:
    """Return a function that returns the seconds of a decoded token (`decode`) of llama.cpp, or of a prompt."""
    sys.path.append(packages)
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.n_ctx = len(ids) + 2 * BLOCK
    parameters.n_parallel = 1
    parameters.n_batch = parameters.n_ubatch = 512
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.port = 0
    server = xllamacpp.Server(parameters)
    given: Mapping[str, Any] = {"prompt": ids.tolist(), "n_predict": BLOCK, "ignore_eos": True, "temperature": 0.0}

    def ask(**changes: Any) -> Any:
        answer = server.handle_completions({**given, **changes})
        return (json.loads(answer) if isinstance(answer, str) else answer)["timings"]

    if kind == "prefill":
        return lambda: float(ask(n_predict=1, cache_prompt=False)["prompt_ms"]) / 1e3
    return lambda: float(ask(cache_prompt=True)["predicted_per_token_ms"]) / 1e3


def openvino_run(kind: str, model: Path, ids: Any, threads: int, packages: str) -> Run:
    """Return a function that returns the seconds of a decoded token (`decode`) of OpenVINO GenAI, or of a prompt."""
    sys.path.append(packages)
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(str(model), "CPU", INFERENCE_NUM_THREADS=threads)
    turns = itertools.count()

    def ask(tokens: int) -> Any:
        prompt = np.roll(ids, next(turns))[None].astype(np.int64)  # a new prompt, since it keeps those that it has read
        mask = openvino.Tensor(np.ones_like(prompt))
        asked = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), mask)
        settings = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        return pipeline.generate(asked, settings).perf_metrics

    if kind == "prefill":
        return lambda: float(ask(1).get_ttft().mean) / 1e3
    return lambda: float(ask(BLOCK + 1).get_tpot().mean) / 1e3
