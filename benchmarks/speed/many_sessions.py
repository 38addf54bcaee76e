"""Several sessions at once on the CPU: kvexport with a fixed budget beside llama.cpp and OpenVINO GenAI.

    python benchmarks/speed/many_sessions.py --work DIR --file FILE.gguf --name NAME --llamacpp DIR --openvino DIR
        [--sessions 8] [--tokens 2048] [--slots 1024] [--sides kvexport,int4,llamacpp,openvino,evicting] [--rounds 3]

Every session has a prompt of --tokens tokens of its own. Each side runs alone, in a process of its own, one side after
the other, with two threads: first it reads the prompts of all sessions, then it decodes 32 tokens of every session, as
often as --rounds says. The figures are the tokens of prompts and of decoding per second, all sessions together, and
the largest resident memory of the process.

kvexport   the default of `kvexport build`: a merging cache of --slots slots, 8 bits
int4       the same with 4 bits
llamacpp   a cache of the whole text in q8_0, flash attention (`pip install --no-deps --target DIR xllamacpp`)
openvino   a cache of the whole text in 8 bits, its default (`pip install --no-deps --target DIR openvino
           openvino-genai openvino-tokenizers`)
evicting   OpenVINO GenAI with its eviction of blocks (H2O), with a cache of --slots tokens

All sides read the same GGUF file. OpenVINO GenAI converts it.
Results of sides that are not measured again stay. Writes benchmarks/results/many-sessions-NAME.json.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import earlier, options_of, read_bandwidth, save

SIDES = ("kvexport", "int4", "llamacpp", "openvino", "evicting")
KVEXPORT = SIDES[:2]
THREADS, BLOCK = 2, 32
Side = tuple[Callable[[], None], Callable[[], None]]  # reads all prompts; decodes BLOCK tokens of every session


def prompts_of(options: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(1000, 20000, options.tokens) for _ in range(options.sessions)]


def artifact_of(options: Any, side: str) -> Path:
    path: Path = options.work / f"{options.name}-{side}-{options.sessions}-{options.tokens}-{options.slots}"
    return path


def build(options: Any, side: str) -> None:
    """Build the artifact of a side, in this process, so that the memory of the build is not that of the side."""
    import kvexport

    changes = [f"limits.max_batch={options.sessions}", f"backend.threads={THREADS}"]
    changes += ["cache.dtype=int4"] if side == "int4" else []
    length = options.tokens + BLOCK * (options.rounds + 2)
    out = artifact_of(options, side)
    if not out.exists():
        kvexport.build(options.file, out, changes, budget=options.slots, max_length=length, calibrate=False)


def kvexport_side(options: Any) -> Side:
    import kvexport

    engine = kvexport.load(artifact_of(options, options.side), verify=False)
    lanes, prompts = engine.lanes(options.sessions), prompts_of(options)

    def read() -> None:
        lanes.prefill(prompts)

    def decode() -> None:
        for token in range(BLOCK):
            lanes.append([[1000 + token]] * options.sessions)

    return read, decode


def llamacpp_side(options: Any) -> Side:
    sys.path.append(options.llamacpp)
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(options.file)
    parameters.n_ctx = options.sessions * (options.tokens + 4 * BLOCK)
    parameters.n_parallel = options.sessions
    parameters.kv_unified = False
    parameters.n_batch = parameters.n_ubatch = 512
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = THREADS
    parameters.port = 0
    server, prompts = xllamacpp.Server(parameters), prompts_of(options)

    def ask(session: int, tokens: int) -> None:
        request = {"prompt": prompts[session].tolist(), "n_predict": tokens, "ignore_eos": True, "temperature": 0.0}
        answer = server.handle_completions({**request, "cache_prompt": True, "id_slot": session})
        answer = json.loads(answer) if isinstance(answer, str) else answer
        assert answer["timings"]["predicted_n"] == tokens, answer["timings"]

    def all_ask(tokens: int) -> None:
        threads = [threading.Thread(target=ask, args=(i, tokens)) for i in range(options.sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # The prompt stays in the slot's cache, so that a later request for it decodes at once.
    return (lambda: all_ask(1)), (lambda: all_ask(BLOCK))


def openvino_side(options: Any, evicting: bool) -> Side:
    sys.path.append(options.openvino)
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = options.sessions, 512
    scheduler.enable_prefix_caching = not evicting
    scheduler.num_kv_blocks = options.sessions * (options.tokens + 8 * BLOCK) // 32 + options.sessions
    if evicting:
        mode = openvino_genai.AggregationMode.NORM_SUM
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(
            start_size=32, recent_size=128, max_cache_size=options.slots, aggregation_mode=mode
        )
    pipeline = openvino_genai.LLMPipeline(
        str(options.file), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=THREADS
    )
    prompt = np.stack(prompts_of(options)).astype(np.int64)
    asked = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))

    def ask(tokens: int) -> None:
        pipeline.generate(
            asked, openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        )

    return (lambda: ask(1)), (lambda: ask(BLOCK + 1))


def side_of(options: Any) -> Side:
    if options.side in KVEXPORT:
        return kvexport_side(options)
    if options.side == "llamacpp":
        return llamacpp_side(options)
    return openvino_side(options, options.side == "evicting")


def measure(options: Any) -> None:
    """Print the figures of one side as JSON."""
    read, decode = side_of(options)
    start = time.perf_counter()
    read()
    reading = time.perf_counter() - start
    seconds = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        decode()
        seconds.append(time.perf_counter() - start)
    if options.side == "evicting":  # without a cache of prefixes it reads the prompts again
        seconds = [x - reading for x in seconds]
    tokens = options.sessions * BLOCK
    figures = {
        "prompt_tokens_per_second": round(options.sessions * options.tokens / reading, 1),
        "decoded_tokens_per_second": round(tokens / min(seconds), 1),
        "all": [round(tokens / x, 1) for x in seconds],
        "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
    }
    print("figures " + json.dumps(figures), flush=True)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--file", required=True, type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--llamacpp")
    parser.add_argument("--openvino")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--side", choices=SIDES, help="measures one side in this process, as the script asks itself")
    options = parser.parse_args()
    if options.side:
        measure(options)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    name = f"many-sessions-{options.name}"
    key = f"{options.sessions} sessions of {options.tokens} tokens"
    results: dict[str, Any] = earlier(name)
    row = results.setdefault(key, {})
    for side in options.sides.split(","):
        if side in KVEXPORT:
            build(options, side)
        before = read_bandwidth(256, THREADS, 0.5)
        command = [sys.executable, *sys.argv, "--side", side]
        run = subprocess.run(command, capture_output=True, text=True)
        line = next((line for line in run.stdout.splitlines() if line.startswith("figures ")), None)
        if line is None:
            raise SystemExit(f"{side} failed:\n{run.stdout[-1000:]}\n{run.stderr[-3000:]}")
        bandwidth = [round(x / 1e9, 1) for x in (before, read_bandwidth(256, THREADS, 0.5))]
        row[side] = {**json.loads(line.removeprefix("figures ")), "slots": options.slots, "bandwidth_GBps": bandwidth}
        print(key, side, row[side], flush=True)
        save(name, results)


if __name__ == "__main__":
    main()
