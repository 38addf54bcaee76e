"""Time and memory of encoding one image, beside transformers' encoder, and what other requests feel of it.

    python benchmarks/speed/image_encoder.py [--models siglip,clip] [--rounds 3] [--work DIR]

Two encoders of random weights at the sizes of real ones, each before the decoder M of `benchmarks/common.py`: that of
SmolVLM-256M (SigLIP base, one tile of 512 pixels in patches of 16) and that of LLaVA 1.5 (CLIP ViT-L/14, 336 pixels).
kvexport's engine and transformers in float32 encode the same new image in turn. Wall seconds and processor seconds are
medians of the rounds, and ratios are medians of the ratios of one round, because other programs may use the machine.
Memory is the largest resident memory of a process that encodes its second image, less that before the model is loaded:
weights, decoder and activations. Gaps are the longest waits between two tokens of another thread's request of the same
engine: while an image is encoded, while its prompt is read, and in as long a time without an image. Results go to
benchmarks/results/image-encoder.json.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image

import kvexport
from benchmarks.common import ROOT, SHAPES, WORK, earlier, interleave, options_of, ratio, save
from kvexport.export.vision import features_of, prepare, read_processor
from kvexport.recipe.fields import Recipe
from tests.support import vision

TEXT = {**vision.TEXT, **SHAPES["M"], "head_dim": 64}
SIGLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
SIDES = {"siglip": 512, "clip": 336}
THREADS = 1  # of each side: two threads of one step would wait for each other where other programs run
WAIT = 1.0  # seconds of decoding before an image comes


def make_artifact(name: str, folder: Path) -> Path:
    """Write a checkpoint of random weights with a processor, and build its artifact; what is there is kept."""
    if (folder / "artifact").exists():
        return folder / "artifact"
    side = SIDES[name]
    if name == "siglip":
        tokens, names, _, settings, _ = vision.KINDS["smolvlm"]
        images = hf.SmolVLMImageProcessorPil(
            size={"longest_edge": side}, max_image_size={"longest_edge": side}, do_image_splitting=False
        )
        encoder = hf.SmolVLMVisionConfig(**SIGLIP, image_size=side, patch_size=16)
        text = hf.LlamaConfig(**TEXT)
        config = hf.SmolVLMConfig(text_config=text, vision_config=encoder, image_token_id=256, scale_factor=4)
        settings = {"image_seq_len": 64}
    else:
        tokens, names, _, settings, _ = vision.KINDS["llava"]
        images = hf.LlavaImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
        encoder = hf.CLIPVisionConfig(**CLIP, image_size=side, patch_size=14)
        config = hf.LlavaConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=encoder, image_token_index=256)
        settings = {**settings, "patch_size": 14}
    vision.KINDS[name] = (tokens, names, images, settings, lambda: config)
    checkpoint = vision.save_checkpoint(name, folder / "checkpoint")
    recipe = {
        "model": {"path": str(checkpoint)},
        "cache": {"budget": 1024},
        "limits": {"max_length": 4096, "max_batch": 4},
    }
    return kvexport.build(Recipe.model_validate(recipe), folder / "artifact")


def picture(side: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def encoders(name: str, artifact: Path) -> dict[str, Callable[[], Callable[[Image.Image], Any]]]:
    """Return for each side a function that loads the model, which returns a function that encodes an image."""

    def ours() -> Callable[[Image.Image], Any]:
        engine = kvexport.load(artifact, threads=THREADS)
        marker = engine.require_images().marker
        return lambda image: engine.encode_with_images(marker, [image])

    def theirs() -> Callable[[Image.Image], Any]:
        model = hf.AutoModelForImageTextToText.from_pretrained(artifact.parent / "checkpoint", dtype=torch.float32)
        processor = read_processor(artifact.parent / "checkpoint", model.config)

        def encode(image: Image.Image) -> Any:
            with torch.no_grad():
                pixels = torch.from_numpy(np.asarray(prepare(processor, image)["pixel_values"]))
                return features_of(model.eval(), pixels)

        return encode

    return {"kvexport": ours, "transformers": theirs}


def resident(key: str) -> float:
    """Return megabytes of this process by the kernel: VmRSS now, or VmHWM, the most since it was reset."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure_memory(name: str, side: str, artifact: Path) -> None:
    """Print the megabytes that one side takes to encode its second image."""
    before = resident("VmRSS")
    encode = encoders(name, artifact)[side]()
    encode(picture(SIDES[name], 0))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    encode(picture(SIDES[name], 1))
    print(json.dumps(resident("VmHWM") - before))


def measure_seconds(name: str, artifact: Path, rounds: int) -> dict[str, Any]:
    loaded = {side: load() for side, load in encoders(name, artifact).items()}
    processor: dict[str, list[float]] = {side: [] for side in loaded}
    seed = iter(range(100, 10_000))

    def timed(side: str) -> float:
        image = picture(SIDES[name], next(seed))
        start, used = time.perf_counter(), time.process_time()
        loaded[side](image)
        processor[side].append(time.process_time() - used)
        return time.perf_counter() - start

    sides = {side: (lambda side=side: timed(side)) for side in loaded}
    interleave(sides, 1)  # opens the encoder, and warms both sides
    for times in processor.values():
        times.clear()
    wall = interleave(sides, rounds)
    return {
        "seconds": {side: statistics.median(times) for side, times in wall.items()},
        "processor_seconds": {side: statistics.median(times) for side, times in processor.items()},
        "ratio": ratio(wall["kvexport"], wall["transformers"]),
        "processor_ratio": ratio(processor["kvexport"], processor["transformers"]),
    }


def measure_gaps(name: str, artifact: Path) -> dict[str, Any]:
    """Return the longest waits of a request for its next token, around an image of another request."""
    engine, times = kvexport.load(artifact, threads=THREADS), list[float]()
    marker = engine.require_images().marker
    engine.encode_with_images(marker, [picture(SIDES[name], 0)])

    ends = threading.Event()

    def decode() -> None:
        for _ in engine.stream([5, 6, 7], max_new_tokens=4000, ignore_eos=True):
            times.append(time.perf_counter())
            if ends.is_set():
                break

    def longest(start: float, end: float) -> float:
        inside = [start, *(at for at in times if start < at < end), end]
        return max(b - a for a, b in itertools.pairwise(inside))

    other = threading.Thread(target=decode)
    other.start()
    time.sleep(WAIT)
    start = time.perf_counter()
    encoded = engine.encode_with_images(marker, [picture(SIDES[name], 1)])
    end = time.perf_counter()
    engine.generate(marker, images=[picture(SIDES[name], 1)], max_new_tokens=1)  # encoded already
    read = time.perf_counter()
    time.sleep(end - start)
    still = time.perf_counter()
    ends.set()
    other.join()
    return {
        "encoding_seconds": end - start,
        "image_tokens": len(encoded[0]),
        "gap_while_encoding": longest(start, end),
        "gap_while_reading": longest(end, read),
        "gap_without_image": longest(read, still),
        "tokens_while_encoding": sum(start < at < end for at in times),
        "tokens_without_image": sum(read < at < still for at in times),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--models", default="siglip,clip")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=WORK / "image-encoder")
    parser.add_argument("--memory", nargs=2, metavar=("MODEL", "SIDE"), help="what the script runs in processes")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.memory:
        name, side = options.memory
        measure_memory(name, side, options.work / name / "artifact")
        return
    results: dict[str, Any] = earlier("image-encoder").get("models", {})
    for name in options.models.split(","):
        artifact = make_artifact(name, options.work / name)
        memory = {}
        for side in ("kvexport", "transformers"):
            command = [sys.executable, __file__, "--memory", name, side, "--work", str(options.work.absolute())]
            ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
            memory[side] = json.loads(ran.stdout.splitlines()[-1])
        gaps = [measure_gaps(name, artifact) for _ in range(min(2, options.rounds))]
        seconds = measure_seconds(name, artifact, options.rounds)
        results[name] = {"rounds": options.rounds, **seconds, "megabytes": memory, "gaps": gaps}
        print(name, json.dumps(results[name], indent=1))
        save("image-encoder", {"threads": THREADS, "models": results})


if __name__ == "__main__":
    main()
