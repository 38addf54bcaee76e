"""What merging the KV cache entries of images loses, on a small vision-language model that this script trains itself.

    python benchmarks/quality/vision_merge.py [--methods ballot,keepkv,h2o] [--parts 4,8,2] [--passages 60] [--work DIR]

The model is a LLaVA of 210,000 parameters. Its image encoder sees 36 patches of a picture: 4 for each of 9 cells, which
have a colour and a pattern. Its decoder reads 36 rows, and then words with facts (a name and its number) among them.
Questions ask for the colour or the pattern of a cell, or for the number of a name. Training takes some minutes of one
core, and its checkpoint is kept in DIR. A prompt is mostly image (36 rows, 12 words), mixed (36 and 36) or mostly text
(36 and 108), and the cache has 1/2, 1/4 or 1/8 as many slots as the prompt has tokens. Each question starts from a copy
of the cache. Results go to benchmarks/results/vision-merge.json as they are measured, and what the file holds is not
measured again: for questions about the image and about the text, the right answers with Wilson's intervals at 95 %, and
the KL to the full cache in nats. It is a small model of our own, with pictures that are easy to compress: trained
vision-language models will give other figures.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

import kvexport
from benchmarks.common import earlier, options_of, save
from kvexport.engine.lanes import Lanes
from kvexport.evaluate.statistics import Estimate, mean
from kvexport.images.rows import call_images, places_of
from kvexport.recipe.fields import Recipe
from kvexport.validate.divergence import kl

Z = 1.959964  # the normal quantile of 97.5 %
NAME = "vision-merge"
LONGEST = 256
SIDE, CELL, PATCH = 48, 16, 8  # pixels
ROWS = (SIDE // PATCH) ** 2
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40),
           "white": (240, 240, 240), "purple": (150, 50, 170)}  # fmt: skip
PATTERNS = ("solid", "rows", "columns", "checks")
CELLS = [f"{column}{row}" for row in "123" for column in "abc"]
NAMES = [f"name{i}" for i in range(8)]
NUMBERS = [f"number{i}" for i in range(10)]
FILLERS = [f"word{i}" for i in range(20)]
WORDS = ["colour", "pattern", "number", *COLOURS, *PATTERNS, *CELLS, *NAMES, *NUMBERS, *FILLERS]
KINDS = {"mostly image": (12, 3), "mixed": (36, 5), "mostly text": (108, 7)}  # words after the image, facts in them
QUESTIONS = 9  # about the image of a passage; there is one about each fact


class Passage(NamedTuple):
    image: Image.Image
    words: list[str]
    questions: list[tuple[str, str, str]]  # two words, and the word that answers them


def share(hits: int, count: int) -> Estimate:
    """Return the fraction `hits` / `count` with Wilson's score interval (Wilson 1927), which is never of width 0."""
    if not 0 <= hits <= count or not count:
        raise ValueError(f"{hits} hits of {count}")
    p, z2 = hits / count, Z * Z
    centre = p + z2 / (2 * count)
    half = Z * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count))
    # Rounding must not move an end past the share itself.
    low, high = (centre - half) / (1 + z2 / count), (centre + half) / (1 + z2 / count)
    return Estimate(p, min(max(low, 0.0), p), max(min(high, 1.0), p), count)


def passage(kind: str, rng: random.Random) -> Passage:
    cells = {cell: (rng.choice([*COLOURS]), rng.choice(PATTERNS)) for cell in CELLS}
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    y, x = np.mgrid[:CELL, :CELL]
    shapes = dict(zip(PATTERNS, (y >= 0, y // 2 % 2 == 0, x // 2 % 2 == 0, (y // 2 + x // 2) % 2 == 0), strict=True))
    for i, (colour, pattern) in enumerate(cells.values()):
        top, left = i // 3 * CELL, i % 3 * CELL
        pixels[top : top + CELL, left : left + CELL][shapes[pattern]] = COLOURS[colour]
    count, facts = KINDS[kind]
    numbers = {name: rng.choice(NUMBERS) for name in rng.sample(NAMES, facts)}
    parts = [[name, number] for name, number in numbers.items()]
    parts += [[rng.choice(FILLERS)] for _ in range(count - 2 * facts)]
    rng.shuffle(parts)
    asked = rng.sample([(i, cell) for cell in CELLS for i in (0, 1)], QUESTIONS)
    questions = [(("colour", "pattern")[i], cell, cells[cell][i]) for i, cell in asked]
    questions += [("number", name, number) for name, number in numbers.items()]
    return Passage(Image.fromarray(pixels), [word for part in parts for word in part], questions)


def make_files(folder: Path) -> hf.PreTrainedTokenizerFast:
    """Write the tokenizer and the settings of the processor."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *WORDS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<image>"])
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", extra_special_tokens={"image_token": "<image>"}
    )
    fast.save_pretrained(folder)
    sides = {"height": SIDE, "width": SIDE}
    hf.LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=sides).save_pretrained(folder)
    settings = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return fast


def make_model(image_token: int) -> Any:
    text = hf.LlamaConfig(
        vocab_size=image_token + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    vision = hf.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    torch.manual_seed(0)
    config = hf.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=image_token, vision_feature_layer=-1
    )
    return hf.LlavaForConditionalGeneration(config)


def train(folder: Path, steps: int, threads: int, batch: int = 16) -> Path:
    """Train the model on passages followed by all their questions and answers, and save its checkpoint."""
    if (folder / "model.safetensors").exists():
        return folder
    torch.set_num_threads(threads)
    tokenizer, rng, began = make_files(folder), random.Random(0), time.process_time()
    token = tokenizer.convert_tokens_to_ids("<image>")
    model = make_model(token).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        kind = rng.choice([*KINDS])
        read = [passage(kind, rng) for _ in range(batch)]
        texts = []
        for one in read:
            rng.shuffle(one.questions)
            texts.append([*one.words, *(word for question in one.questions for word in question)])
        words = torch.tensor([tokenizer.convert_tokens_to_ids(text) for text in texts])
        ids = torch.cat([torch.full((batch, ROWS), token), words], 1)
        shown = torch.from_numpy(np.stack([np.asarray(one.image) for one in read])).permute(0, 3, 1, 2) / 255
        pixels = (shown - torch.tensor(OPENAI_CLIP_MEAN)[:, None, None]) / torch.tensor(OPENAI_CLIP_STD)[:, None, None]
        logits = model(input_ids=ids, pixel_values=pixels).logits
        answers = torch.arange(ROWS + KINDS[kind][0] + 2, ids.shape[1], 3)
        loss = torch.nn.functional.cross_entropy(logits[:, answers - 1].flatten(0, 1), ids[:, answers].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            right = (logits[:, answers - 1].argmax(-1) == ids[:, answers]).float().mean()
            print(step, kind, f"loss {loss:.3f} right {right:.3f} {time.process_time() - began:.0f} s", flush=True)
        if step % 200 == 199 or step == steps - 1:
            model.save_pretrained(folder)
    return folder


def engine_of(checkpoint: Path, folder: Path, method: str, slots: int, threads: int) -> kvexport.Engine:
    recipe = {
        "model": {"path": str(checkpoint)},
        "cache": {"method": method, "budget": slots, "sinks": 1, "recent": 2, "merge_every": 8},
        "export": {"prefill_chunk": 32},
        "limits": {"max_length": LONGEST, "max_batch": 32},
    }
    kvexport.build(Recipe.model_validate(recipe), folder)
    return kvexport.load(folder, threads=threads, verify=False)


def asked(engine: Any, lanes: dict[int, Lanes], one: Passage) -> NDArray[np.float32]:
    """Let an engine read a passage, and return the logits after each question from a copy of the cache."""
    ids, images = engine.encode_with_images(f"<image>{' '.join(one.words)}", [one.image])
    places, reader, answering = places_of(ids, images, engine.manifest.images), lanes[1], lanes[len(one.questions)]
    reader.clear()
    for start in range(0, len(ids), reader.prefill_chunk):
        part = slice(start, start + reader.prefill_chunk)
        reader.append([ids[part]], prefill=True, images=call_images([(places[part], images)]))
    saved = reader.save(0)
    for lane in range(answering.count):
        answering.restore(lane, saved)
    return answering.prefill([engine.encode(f"{first} {second}") for first, second, _ in one.questions]).copy()


def measure(
    engine: Any, passages: list[Passage], right: list[NDArray[np.float32]]
) -> tuple[dict[str, Any], list[NDArray[np.float32]]]:
    """Return the figures of an engine over passages of one kind, and its logits; `right` are those of the full one."""
    lanes = {count: engine.lanes(count) for count in (1, len(passages[0].questions))}
    rows = [asked(engine, lanes, one) for one in passages]
    figures: dict[str, Any] = {}
    for name, part in (("image", slice(QUESTIONS)), ("text", slice(QUESTIONS, None))):
        exact = [
            engine.tokenizer.decode([int(row.argmax())]).strip() == answer
            for one, own in zip(passages, rows, strict=True)
            for (_, _, answer), row in zip(one.questions[part], own[part], strict=True)
        ]
        estimate = share(sum(exact), len(exact))
        figures[f"{name} right"] = [round(x, 4) for x in (estimate.value, estimate.low, estimate.high)]
        if right:
            far = [np.mean([*map(kl, a[part], b[part])]) for a, b in zip(right, rows, strict=True)]
            estimate = mean(far)
            figures[f"{name} kl"] = [round(x, 4) for x in (estimate.value, estimate.low, estimate.high)]
    return figures, rows


def main() -> None:
    options = options_of(__doc__)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--passages", type=int, default=60)
    options.add_argument("--methods", default="ballot,keepkv,h2o")
    options.add_argument("--parts", default="4,8,2")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvexport-vision")
    chosen = options.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    checkpoint = train(chosen.work, chosen.steps, chosen.threads)
    passages, right = {}, {}
    for kind in KINDS:
        rng = random.Random(f"passages/{kind}")
        passages[kind] = [passage(kind, rng) for _ in range(chosen.passages)]
    methods, shares = chosen.methods.split(","), map(int, chosen.parts.split(","))
    sides = [("full", 1), *((method, parts) for parts in shares for method in methods)]
    wanted: dict[tuple[str, int], list[tuple[str, int]]] = {}  # kinds and parts, by method and slots
    for method, parts in sides:
        for kind, (words, _) in KINDS.items():
            slots = LONGEST if method == "full" else (ROWS + words) // parts
            wanted.setdefault((method, slots), []).append((kind, parts))
    rows = earlier(NAME).get("rows", [])
    for (method, slots), prompts in wanted.items():
        known = [(row["prompt"], row["parts"]) for row in rows if row["method"] == method]
        if method != "full" and all(prompt in known for prompt in prompts):
            continue
        with tempfile.TemporaryDirectory() as folder:
            engine = engine_of(checkpoint, Path(folder) / "artifact", method, slots, chosen.threads)
            for kind, parts in prompts:
                figures, logits = measure(engine, passages[kind], right.get(kind, []))
                right.setdefault(kind, logits)
                if (kind, parts) not in known:
                    label = {"prompt": kind, "method": method, "parts": parts, "slots": slots}
                    rows = [*rows, {**label, "passages": chosen.passages, **figures}]
                    print(rows[-1], flush=True)
                    save(NAME, {"rows": rows})
            engine.close()


if __name__ == "__main__":
    main()
