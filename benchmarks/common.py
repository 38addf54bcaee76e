"""Shared parts of the benchmarks: options, checkpoints of random weights, memory bandwidth, turns, JSON results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Recipes and a trained checkpoint that only benchmarks and tests use.
TEST_RECIPES = ROOT / "tests" / "recipes"
SMALL_CHECKPOINT = ROOT / "tests" / "checkpoints" / "small"

# Where scripts put what they build unless --work names another folder.
WORK = Path(tempfile.gettempdir()) / "kvexport-benchmark"

# M, the reference model of all CPU figures (27.8M parameters), and two shapes of real checkpoints.
SHAPES: dict[str, dict[str, Any]] = {
    "M": dict(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1408,
        vocab_size=4096,
    ),
    "1b": dict(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        vocab_size=32000,
    ),
    "7b": dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=11008,
        vocab_size=32000,
    ),
}


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script's options, whose help is the script's docstring as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def make_checkpoint(shape: str, folder: Path, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a Llama checkpoint of random weights (std 0.02) with a word tokenizer, shard by shard.

    A checkpoint that the folder already holds is kept.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        dtype=dtype,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    weight_map, shard, size, number, total = {}, {}, 0, 0, 0
    parameters = list(model.named_parameters())
    for i, (name, parameter) in enumerate(parameters):
        if parameter.ndim == 1:
            tensor = torch.ones(parameter.shape, dtype=getattr(torch, dtype))
        else:
            count = parameter.numel()
            # A large tensor repeats one random block. Its values do not influence the measurements, and drawing all of
            # them takes minutes.
            block = (torch.randn(min(count, 1 << 22), generator=generator) * 0.02).to(getattr(torch, dtype))
            tensor = block.repeat(-(-count // len(block)))[:count].reshape(parameter.shape)
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        if size > 2 << 30 or i == len(parameters) - 1:
            number += 1
            file = f"model-{number:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
            shard, size = {}, 0
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(folder, config.vocab_size)
    (folder / "complete").touch()
    return folder


def make_checkpoint_apart(shape: str, folder: Path, dtype: str) -> Path:
    """Write a checkpoint in a process of its own: what is measured later starts with the peak memory of its parent."""
    code = "import sys, pathlib; from benchmarks.common import make_checkpoint as make; "
    code += "make(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3])"
    command = [sys.executable, "-c", code, shape, str(folder.absolute()), dtype]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of `size` meaningless words to a checkpoint's folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def read_bandwidth(megabytes: int = 512, threads: int = 2, seconds: float = 1.0) -> float:
    """Return the bytes per second that `threads` threads read from memory.

    This is the best of repeated dot products of an array, far larger than any cache, with itself. NumPy allocates the
    array in huge pages, which weights are kept in too; PyTorch's own arrays are read more slowly.
    """
    import torch

    torch.set_num_threads(threads)
    array = torch.from_numpy(np.ones(megabytes << 18, np.float32))
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.dot(array, array)
        best = max(best, array.nbytes / (time.perf_counter() - start))
    return best


def interleave(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every side once per round, in turn, and return the figures of each side."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            figures[name].append(run())
    return figures


def ratio(a: list[float], b: list[float]) -> float:
    """Return the median of the pairwise ratios a / b of two interleaved sides."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def machine() -> dict[str, Any]:
    """Return the processor, core count, Python version and package versions of this machine."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    packages = {}
    for name in ("kvexport", "torch", "transformers", "onnxruntime", "onnxruntime-genai", "numpy"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "packages": packages}


def head() -> dict[str, Any]:
    """Return the date, command, commit and machine of a measurement."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()
    # processor.py sets the variable. Absolute paths are private, so DIR replaces them.
    processor = os.environ.get("AS_PROCESSOR")
    outer = ["benchmarks/speed/processor.py", processor] if processor else []
    arguments = ("DIR" if Path(a).is_absolute() else a for a in sys.argv[1:])
    script = Path(sys.argv[0]).resolve()
    named = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    command = " ".join(["python", *outer, str(named), *arguments])
    return {"date": date.today().isoformat(), "command": command, "commit": commit, "machine": machine()}


def earlier(name: str) -> dict[str, Any]:
    """Return what benchmarks/results/NAME.json holds; nothing if there is no such file."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def save(name: str | Path, figures: dict[str, Any]) -> Path:
    """Write a file, or benchmarks/results/NAME.json: date, command, commit and machine, then the figures."""
    path = name if isinstance(name, Path) else RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    plain = json.loads(json.dumps({**head(), **figures}, default=_plain))
    path.write_text(_lines(plain) + "\n", encoding="utf-8")
    return path


def _lines(value: Any, indent: int = 0) -> str:
    """Return JSON with one line per record: an item of a list, a mapping below the second level, or a short value."""
    flat = json.dumps(value)
    records = isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)
    nested = isinstance(value, dict) and (indent < 2 or '": [[' in flat or '": [{' in flat)
    if len(flat) <= 160 or not (records or nested):
        return flat
    margin = " " * (indent + 1)
    if records:
        return "[\n" + ",\n".join(margin + json.dumps(item) for item in value) + f"\n{margin[1:]}]"
    items = (f"{margin}{json.dumps(key)}: {_lines(item, indent + 1)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + f"\n{margin[1:]}}}"


def _plain(value: Any) -> Any:
    """Return a NumPy number or array as Python's numbers, for JSON."""
    return value.item() if isinstance(value, np.generic) else value.tolist()
