"""Engines on ONNX Runtime's CUDA provider, with and without CUDA graphs: the part `onnxruntime` of `gpu_check`.

The float16 engine has per-head budgets and weights of 4 bits. The results are compared with the ONNX functions on the
CPU. The part needs onnxruntime-gpu and the packages of `kvexport build`. Without one of them it is skipped, and its row
names the missing one.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plugins.building import make
from tools.gpu_check.target import Figures, Skipped, Target

NEEDED = ("onnxruntime", "tokenizers", "yaml", "torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors")
# Relative to the largest logit; sums may be in another order.
TOLERANCE = {"float32": 1e-3, "float16": 5e-2}
LENGTHS, PROMPTS, CHUNK, STEPS = (200, 90, 31), (120, 41, 30), 16, 64


def onnxruntime(target: Target) -> Figures:
    """Measure the largest difference of any logit far past the budget, by type, and milliseconds per decode step."""
    prepare(target)
    library = make.build("onnxruntime-cuda-host") if target.on_host else build_for_this_gpu()
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in TOLERANCE:
            answers = []
            artifact = small_artifact(Path(folder), dtype)
            with operators("off"):
                from kvexport.engine.load import load

                reference = load(artifact, device="cpu")
            for graphs in (False, True):
                engine = device_engine(artifact, library, graphs=graphs, on_host=target.on_host)
                sequences = [np.random.default_rng(i).integers(0, engine.vocabulary, n) for i, n in enumerate(LENGTHS)]
                worst = largest_difference(engine, reference, sequences)
                assert worst < TOLERANCE[dtype], (
                    f"{dtype}, graphs {graphs}: a logit differs by {worst:.3g} of the largest"
                )
                greedy, tokens = greedy_times(engine)
                answers.append(tokens)
                figures[f"{dtype}, {'graphs' if graphs else 'plain'}"] = {
                    "largest difference": worst,
                    **step_times(engine),
                    **greedy,
                }
                if graphs:
                    require_graphs(engine.model)
            assert answers[0] == answers[1], f"{dtype}: CUDA graphs give other tokens"
    return figures


def prepare(target: Target) -> None:
    require_packages(NEEDED)
    if not target.on_host:
        from kvexport.backends.onnxruntime.devices import graph_problem, problems

        if missing := problems("cuda"):
            raise Skipped("; ".join(problem for problem, _ in missing))
        if no_graphs := graph_problem():
            raise Skipped(no_graphs)


def require_graphs(model: Any) -> None:
    """Check that the decoder, the merge and the largest logits still run as CUDA graphs, and not as plain calls."""
    lacking = {"decoder", "merge", "top_logits"} - model.graphs
    assert not lacking, f"no CUDA graph of {', '.join(sorted(lacking))}: {model.graph_problem}"


def require_packages(names: Sequence[str]) -> None:
    """Check that packages are installed, and pydantic with them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"{missing[0]} is not installed")
    import pydantic

    if not hasattr(pydantic, "TypeAdapter"):
        raise Skipped("pydantic is not installed")  # gpu_check's stand-in supports only methods


def build_for_this_gpu() -> Path:
    """Compile the CUDA operators of ONNX Runtime for this machine's GPU, and return the library's path."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return make.build("onnxruntime-cuda", capabilities=[f"{major}{minor}"], out=make.CACHE / "cuda")


def small_artifact(folder: Path, dtype: str) -> Path:
    """Build a random Llama of two layers with keepkv at 32 slots; in float16 as the docstring of this file says."""
    from kvexport.export.build import build
    from tests.support.models import llama, make_recipe, save_checkpoint

    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        save_checkpoint(checkpoint, llama())
    cache = {"method": "keepkv", "budget": 32, "merge_every": 4}
    limits = {"max_length": 512, "max_batch": len(LENGTHS)}
    recipe = make_recipe(checkpoint, dtype=dtype, cache=cache, export={"prefill_chunk": CHUNK}, limits=limits)
    if dtype == "float16":
        values = recipe.model_dump(mode="json")
        values["cache"]["allocation"] = {"kind": "listed", "shares": [[1.0, 0.6], [0.7, 1.3]]}
        values["weights"] |= {"bits": 4, "group": 32}
        values["backend"]["device"] = "cuda"  # packed weights are laid out for it
        recipe = type(recipe).model_validate(values)
    return build(recipe, folder / dtype)


def device_engine(artifact: Path, library: Path, *, graphs: bool, on_host: bool) -> Any:
    """Return an engine on the CUDA provider, or with `on_host` on the CPU's, with the binding for the host.

    On the host, ONNX Runtime allocates the state.
    """
    from kvexport.engine.load import load
    from tests.support.on_device import onto_device

    with operators(str(library)):
        engine = load(artifact, device="cpu" if on_host else "cuda", cuda_graph=graphs)
    return onto_device(engine, graphs=graphs) if on_host else engine


@contextmanager
def operators(value: str) -> Iterator[None]:
    before = os.environ.get("KVEXPORT_OPERATORS")
    os.environ["KVEXPORT_OPERATORS"] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ["KVEXPORT_OPERATORS"]
        else:
            os.environ["KVEXPORT_OPERATORS"] = before


def largest_difference(
    engine: Any, reference: Any, sequences: list[np.ndarray], prompts: tuple[int, ...] = PROMPTS
) -> float:
    """Return the largest difference of the logits after every call, relative to the largest logit (at least 1).

    Both engines get the same prompts, then token by token the same tokens.
    """
    both = [e.lanes(len(sequences)) for e in (engine, reference)]
    heads = [s[:n] for s, n in zip(sequences, prompts, strict=True)]
    worst, logits = 0.0, [np.array(lanes.prefill(heads)) for lanes in both]
    running = list(range(len(sequences)))
    position = max(len(s) - n for s, n in zip(sequences, prompts, strict=True))
    for step in range(position + 1):
        actual, expected = (x[running] for x in logits)
        worst = max(worst, float(np.abs(actual - expected).max() / max(1.0, float(np.abs(expected).max()))))
        assert np.isfinite(actual).all(), "a logit is not finite"
        parts = [s[n:][step : step + 1] for s, n in zip(sequences, prompts, strict=True)]
        running = [lane for lane, part in enumerate(parts) if len(part)]
        if not running:
            break
        logits = [lanes.append(parts)[:, 0].copy() for lanes in both]
    return worst


def step_times(engine: Any) -> Figures:
    """Return the medians of decode steps of one sequence, with and without a merge.

    The largest logits are computed, as for an engine that samples.
    """
    lanes = engine.lanes(1)
    lanes.prefill([np.arange(CHUNK) % engine.vocabulary])
    spans: tuple[list[float], list[float]] = ([], [])
    for _ in range(STEPS):
        start, merges = time.perf_counter(), lanes.merges
        lanes.append_by(lanes.state.step, [[1]])
        spans[lanes.merges > merges].append(time.perf_counter() - start)
    # The first steps capture.
    plain, merging = (1e3 * float(np.median(each[2:])) for each in spans)
    return {"ms of a step": plain, "ms of a step that merges": merging}


def greedy_times(engine: Any) -> tuple[Figures, list[list[int]]]:
    """Return milliseconds per step of greedy answers, and their tokens, with calls that run ahead and without.

    Both must give the same tokens.
    """
    prompts = [(np.arange(n) % engine.vocabulary).tolist() for n in PROMPTS]
    figures, answers = {}, []
    for ahead in (False, True):
        one = engine.with_options(replace(engine.options, ahead=ahead))
        for _ in range(2):  # the first round captures
            found = one.generate(prompts, max_new_tokens=STEPS, do_sample=False, eos_token_ids=())
        answers.append([answer.token_ids for answer in found])
        name = "ms of a greedy step that runs ahead" if ahead else "ms of a greedy step"
        figures[name] = 1e3 * one.timing.decode_seconds / one.timing.steps
    assert answers[0] == answers[1], "calls that run ahead of the host give other tokens"
    return figures, answers[0]


PARTS = {"onnxruntime": onnxruntime}
