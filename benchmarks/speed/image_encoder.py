"""Time and memory of the image encoder of an artifact, beside the same encoder in PyTorch.

    python benchmarks/speed/image_encoder.py [--shapes siglip-b,clip-l] [--rounds 7] [--threads 2] [--work DIR]

The encoders have random weights in float32 and the shapes of SmolVLM's (SigLIP-B/16, 512 x 512 pixels, 64 rows) and of
LLaVA-1.5's (CLIP-L/14, 336 x 336 pixels, 576 rows); the decoders behind them are small. Both sides encode one tile, in
one process, in turn; a ratio is the median over rounds. PyTorch runs its own attention (sdpa). Memory is the peak of a
process of its own that encodes one tile, in megabytes, and that of the same process before the encoder is loaded.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

import kvexport
from benchmarks.common import interleave, options_of, ratio, save
from kvexport.export.vision import features_of
from kvexport.recipe.fields import Recipe
from tests.support import vision

TEXT = {**vision.TEXT, "hidden_size": 576, "head_dim": 64}
B = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
L = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
SIGLIP = hf.SmolVLMVisionConfig(**B, image_size=512, patch_size=16)
CLIP = hf.CLIPVisionConfig(**L, image_size=336, patch_size=14)
SPLIT = {"size": {"longest_edge": 1024}, "max_image_size": {"longest_edge": 512}}
CROP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
# Kind of tests/support/vision.py, image processor, settings of the processor, and config of the model
SHAPES: dict[str, tuple[str, Any, dict[str, Any], Any]] = {
    "siglip-b": (
        "smolvlm",
        hf.SmolVLMImageProcessorPil(**SPLIT),
        {"image_seq_len": 64},
        hf.SmolVLMConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=SIGLIP, image_token_id=256, scale_factor=4),
    ),
    "clip-l": (
        "llava",
        hf.LlavaImageProcessorPil(**CROP),
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        hf.LlavaConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=CLIP, image_token_index=256),
    ),
}


def make_artifact(shape: str, work: Path) -> Path:
    """Build an artifact of a model with random weights; one that the folder already holds is kept."""
    kind, images, settings, config = SHAPES[shape]
    checkpoint, artifact = work / f"{shape}-checkpoint", work / shape
    if not artifact.exists():
        special, names, *_ = vision.KINDS[kind]
        vision.KINDS[kind] = (special, names, images, settings, lambda: config)
        vision.save_processor(kind, checkpoint)
        hf.AutoModelForImageTextToText.from_config(config).save_pretrained(checkpoint)
        recipe = {"model": {"path": str(checkpoint)}, "cache": {"budget": 256}, "limits": {"max_length": 4096}}
        kvexport.build(Recipe.model_validate(recipe), artifact)
    return artifact


def encoders(shape: str, work: Path, side: str, threads: int) -> Callable[[], Any]:
    """Return a function that encodes a tile of random pixels with one side's image encoder."""
    if side == "engine":
        engine: Any = kvexport.load(work / shape, threads=threads)
        spec = engine.manifest.images
        pixels = np.random.default_rng(0).standard_normal((1, 3, spec.height, spec.width), np.float32)
        return lambda: engine.model.encode_tile(pixels)
    torch.set_num_threads(threads)
    model = hf.AutoModelForImageTextToText.from_pretrained(work / f"{shape}-checkpoint").eval()
    side_length, five = SHAPES[shape][3].vision_config.image_size, shape == "siglip-b"
    tile = torch.randn(1, *[1] * five, 3, side_length, side_length)
    return torch.no_grad()(lambda: features_of(model, tile))


def megabytes(field: str) -> int:
    """Return resident memory of this process: VmRSS is the current one, VmHWM the peak."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default="siglip-b,clip-l")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvexport-encoders")
    parser.add_argument("--peak", nargs=2, metavar=("SHAPE", "SIDE"), help="print the memory of this process alone")
    options = parser.parse_args()
    if options.peak:
        before = megabytes("VmRSS")
        encoders(options.peak[0], options.work, options.peak[1], options.threads)()
        print(json.dumps({"before": before, "peak": megabytes("VmHWM")}))
        return
    results: dict[str, Any] = {"threads": options.threads}
    for shape in options.shapes.split(","):
        artifact = make_artifact(shape, options.work)
        memory = {}
        for side in ("engine", "pytorch"):
            command = [sys.executable, __file__, "--peak", shape, side, "--work", str(options.work)]
            memory[side] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        sides = {side: encoders(shape, options.work, side, options.threads) for side in memory}
        for run in sides.values():
            run()
        times = interleave({side: lambda run=run: seconds(run) for side, run in sides.items()}, options.rounds)  # type: ignore[misc]
        parameters = sum(x.numel() for x in hf.AutoModel.from_config(SHAPES[shape][3].vision_config).parameters())
        results[shape] = {
            "parameters": parameters,
            "weight_megabytes": (artifact / "decoder.weights").stat().st_size >> 20,
            "megabytes": memory,
            "seconds": {side: [round(x, 3) for x in values] for side, values in times.items()},
            "engine, times PyTorch": round(ratio(times["engine"], times["pytorch"]), 3),
        }
        print(json.dumps(results[shape], indent=1), flush=True)
    print(save("image-encoder", results))


if __name__ == "__main__":
    main()
