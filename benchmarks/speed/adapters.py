"""The time of a decode step with a LoRA adapter of rank 16, beside a step of the same model without adapters.

    python benchmarks/speed/adapters.py [--layers 4] [--bits 4] [--rounds 7] [--threads 2] [--work DIR]

The model is SmolLM2-135M, or with `--layers N` a model of N layers of the shape of TinyLlama-1.1B with random weights.

The sides are an artifact without adapters ("none"), one that takes adapters, in a step without any ("idle"), and the
same artifact in a step of an adapter of random numbers of rank 16 on all projections ("adapter"). Every side decodes
in one process, in turn, round by round; a ratio is the median over rounds. A step is the mean of 64, merges among them,
after a prompt of 256 tokens.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import kvexport
from benchmarks.common import SHAPES, interleave, make_checkpoint, options_of, ratio, save
from kvexport.artifact.manifest import Manifest
from kvexport.engine.lanes import Lanes

RANK, STEPS, PROMPT = 16, 64, 256


def write_adapter(folder: Path, manifest: Manifest) -> Path:
    """Write an adapter of random numbers for all projections that an artifact's adapters may change."""
    rng = np.random.default_rng(0)
    tensors = {}
    for module, (inputs, outputs) in manifest.adapters.items():
        for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            name = f"base_model.model.{module}.lora_{factor}.weight"
            tensors[name] = rng.standard_normal(shape, dtype=np.float32) / 100
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return folder


def checkpoint(layers: int, work: Path) -> Path:
    """Return a checkpoint of `layers` layers of the shape of TinyLlama-1.1B, written if it is not there."""
    SHAPES["wide"] = {**SHAPES["1b"], "num_hidden_layers": layers}
    return make_checkpoint("wide", work / f"checkpoint-{layers}")


def step_seconds(lanes: Lanes, ids: Any) -> float:
    start = time.perf_counter()
    for i in range(STEPS):
        lanes.append([ids[i : i + 1]])
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--bits", type=int, choices=(4, 8))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvexport-adapters")
    options = parser.parse_args()
    from kvexport.recipe.load import load_recipe

    options.work.mkdir(parents=True, exist_ok=True)
    folders = {}
    for side, count in (("none", 0), ("adapter", 1)):
        folders[side] = options.work / f"{options.layers or 'smollm2'}-{options.bits}-{side}"
        settings = [f"adapters.count={count}", f"adapters.rank={RANK}"]
        settings += [f"model.path={checkpoint(options.layers, options.work)}"] if options.layers else []
        settings += [f"weights.bits={options.bits}"] if options.bits else []
        if not folders[side].exists():
            kvexport.build(load_recipe("smollm2-135m-keepkv", settings).recipe, folders[side])
    plain = kvexport.load(folders["none"], threads=options.threads)
    taking = kvexport.load(folders["adapter"], threads=options.threads)
    folder = write_adapter(options.work / "random", taking.manifest)
    taking = kvexport.load(folders["adapter"], threads=options.threads, adapters={"random": folder})
    ids = np.random.default_rng(0).integers(3, plain.vocabulary, PROMPT)
    lanes = {"none": plain.lanes(1), "idle": taking.lanes(1), "adapter": taking.lanes(1)}
    state: Any = lanes["adapter"].state
    state.adapt(0, taking.adapters.by_name["random"].rows)
    prompts = {}
    for side, one in lanes.items():
        one.prefill([ids])
        one.clear()
        start = time.perf_counter()
        one.prefill([ids])
        prompts[side] = time.perf_counter() - start
        step_seconds(one, ids)
    times = interleave({side: partial(step_seconds, one, ids) for side, one in lanes.items()}, options.rounds)
    results: dict[str, Any] = {
        "model": f"{options.layers} layers of TinyLlama-1.1B" if options.layers else "SmolLM2-135M",
        "bits": options.bits,
        "threads": options.threads,
        "prompt_milliseconds": {side: round(1e3 * seconds, 1) for side, seconds in prompts.items()},
        "step_milliseconds": {side: [round(1e3 * x, 3) for x in values] for side, values in times.items()},
        "idle, times none": ratio(times["idle"], times["none"]),
        "adapter, times none": ratio(times["adapter"], times["none"]),
        "goal": 1.1,
    }
    print(json.dumps(results, indent=1))
    if options.rounds > 1:
        print(save(f"adapters{'_wide' if options.layers else ''}{options.bits or ''}", results))


if __name__ == "__main__":
    main()
