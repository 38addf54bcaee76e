"""Cost of 8 and 4 bits for keys and values on SmolLM2-135M-Instruct: rounding, merging, and both at equal bytes.

    python benchmarks/quantized_cache.py [--texts 0,1,...] [--methods full,h2o,keepkv,ballot]

A text takes some minutes; earlier results are kept. The method `full` measures rounding alone.

Texts are 1,024 tokens of Python's manual in chunks of 64. The figure is KL(full float32 cache || this one) over the
second half of a text, in nats. PyTorch computes it with the operators' reference functions, which `validate` compares
engines with. The forms int8, int4 and k8v4 are caches of these types. The other forms, among them llama.cpp's q4_0,
exist only in this script: a float32 cache whose rows are rounded before they are appended and after merges. In the form
`recent exact` the chunk that is being read and the 64 tokens before it are not rounded. Writes
benchmarks/results/quantized-cache.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import RESULTS, save
from simulated_cache import SimulatedCache, kl
from torch import Tensor

from kvexport.evaluate.corpus import manual
from kvexport.evaluate.statistics import mean
from kvexport.export.build import read_model
from kvexport.export.hooks.attention import IMPLEMENTATION
from kvexport.language.tokenizer import Tokenizer
from kvexport.ops.quantized_cache import dequantized, quantized, rotated_by_hadamard
from kvexport.recipe.load import load_recipe

NAME, RECIPE = "quantized-cache", "smollm2-135m-base"
LENGTH, CHUNK, SLOTS = 1024, 64, 128
KEY_SIZE = 64  # the key size of SmolLM2
METHODS = ("h2o", "keepkv", "ballot")
Rounding = Callable[[Tensor], Tensor]


def as_it_is(rows: Tensor) -> Tensor:
    """Return the rows unchanged: float16 of a float32 model costs less than this benchmark can show."""
    return rows


def int8_unrotated(rows: Tensor) -> Tensor:
    return dequantized(*quantized(rows))


def int4_unrotated(rows: Tensor) -> Tensor:
    return dequantized(*quantized(rows, torch.uint8))


def int4(rows: Tensor) -> Tensor:
    """Return the rows as a cache of int4 stores them."""
    return rotated_by_hadamard(dequantized(*quantized(rotated_by_hadamard(rows), torch.uint8)))


def int4_of_7(rows: Tensor) -> Tensor:
    """Round rotated rows to equal steps, -7 to 7, with one scale per row."""
    turned = rotated_by_hadamard(rows)
    scale = (turned.abs().amax(-1, keepdim=True) / 7).to(torch.bfloat16).float()
    return rotated_by_hadamard(torch.round(turned / torch.where(scale > 0, scale, 1.0)).clamp(-7, 7) * scale)


def int4_of_8(rows: Tensor) -> Tensor:
    """Round rotated rows to equal steps, -8 to 7, with the number of the largest magnitude at -8."""
    return rotated_by_hadamard(_of_8(rotated_by_hadamard(rows), rows.shape[-1]))


def q4_0(rows: Tensor) -> Tensor:
    """Round rows to equal steps, -8 to 7, in blocks of 32, as llama.cpp's q4_0 does."""
    return _of_8(rows, 32)


def q4_0_rotated(rows: Tensor) -> Tensor:
    return rotated_by_hadamard(_of_8(rotated_by_hadamard(rows), 32))


def _of_8(rows: Tensor, block: int) -> Tensor:
    blocks = rows.unflatten(-1, (-1, block))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).half().float()
    return (torch.round(blocks / torch.where(scale != 0, scale, 1.0)).clamp(-8, 7) * scale).flatten(-2)


@dataclass(frozen=True)
class Form:
    """A form of stored rows."""

    bits: tuple[float, float]  # bits of a number of a key and of a value, including the scales of a row of 64
    rounding: Rounding = as_it_is  # rounding of rows in a cache of the model's type
    dtype: str = "model"  # cache's type, as a recipe names it
    sinks: int = 0  # number of first tokens whose rows are not rounded
    recent: int = 0  # number of latest tokens whose rows are not rounded yet

    def rounded(self, rows: Tensor, position: Tensor, last: int) -> Tensor:
        """Round rows [B, H, n, D] of tokens at `position` [B, H or 1, n]; the latest token is at `last`."""
        exact = (position < self.sinks) | (position > last - self.recent)
        return torch.where(exact[..., None], rows, self.rounding(rows))


FORMS = {
    "float16": Form((16.0, 16.0)),
    "int8": Form((8.5, 8.5), dtype="int8"),
    "int8 unrotated": Form((8.5, 8.5), int8_unrotated),
    "k8v4": Form((8.5, 4.5), dtype="k8v4"),
    "int4": Form((4.5, 4.5), dtype="int4"),
    "int4 unrotated": Form((4.5, 4.5), int4_unrotated),
    "int4, 4 sinks exact": Form((4.5, 4.5), int4, sinks=4),
    "int4, recent exact": Form((4.5, 4.5), int4, recent=CHUNK),
    "int4, both exact": Form((4.5, 4.5), int4, sinks=4, recent=CHUNK),
    "int4 to 7": Form((4.5, 4.5), int4_of_7),
    "int4 to -8": Form((4.5, 4.5), int4_of_8),
    "q4_0": Form((4.5, 4.5), q4_0),
    "q4_0 rotated": Form((4.5, 4.5), q4_0_rotated),
}
MERGED = ("float16", "int8", "k8v4", "int4")


def slots_of(stored: Form, size: int) -> int:
    """Return the slots whose bytes, with those of slack, equal those of SLOTS and CHUNK slots of float16.

    Votes, scores and positions are counted.
    """
    slot = [size * sum(x.bits) / 8 + 12 for x in (FORMS["float16"], stored)]
    return int((SLOTS + CHUNK) * slot[0] / slot[1]) - CHUNK


class Reader(SimulatedCache):
    """The model over a cache of one method with rounded rows."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        recipe = load_recipe(RECIPE).recipe
        self.shape = read_model(recipe)
        path = self.shape.checkpoint.path  # type: ignore[union-attr]
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, attn_implementation=IMPLEMENTATION
        ).eval()
        self.tokenizer = Tokenizer.from_folder(path)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return new rows, rounded."""
        position, last = self.position[:, None], int(self.position[0, -1])
        return self.form.rounded(key, position, last), self.form.rounded(value, position, last)

    def end_chunk(self, layer: int, merged: bool) -> None:
        """Round the rows of a layer again if the cache's type does not."""
        if self.form.dtype == "model" and (merged or self.form.recent):
            key, value, _, _, position = self.state[layer]
            last = int(self.position[0, -1])
            self.state[layer][:2] = (self.form.rounded(x, position, last) for x in (key, value))

    def read(self, ids: Sequence[int], method: str, slots: int, stored: Form) -> Tensor:
        """Return the logits [tokens, vocabulary] of every token of a text."""
        sets = [f"cache.method={method}", f"cache.budget={slots}", f"export.prefill_chunk={CHUNK}"]
        sets += [f"limits.max_length={LENGTH}", f"cache.dtype={stored.dtype}"]
        self.form = stored
        return self.logits(self.model, ids, load_recipe(RECIPE, sets).recipe, self.shape.geometry)


def figures(size: int) -> list[tuple[str, int, str]]:
    """Return (method, slots, form) of all figures.

    Every form is measured over the full cache. Every method is measured in the slots and in the bytes of float16.
    """
    merged = [(m, n, x) for m in METHODS for x in MERGED for n in sorted({SLOTS, slots_of(FORMS[x], size)})]
    return [("full", LENGTH, name) for name in FORMS if name != "float16"] + merged


def measured() -> dict[str, dict[str, float]]:
    """Return the earlier results text by text."""
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text())["texts"] if path.exists() else {}  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--texts", default="0,1,2,3,4,5,6,7", help="the numbers of texts, which are spread over the manual"
    )
    parser.add_argument("--methods", default=",".join(("full", *METHODS)))
    arguments = parser.parse_args()
    reader = Reader()
    ids = reader.tokenizer.encode(manual())
    for number in arguments.texts.split(","):
        first = int(number) * (len(ids) - LENGTH) // 8
        text, done = ids[first : first + LENGTH], measured().get(number, {})
        selected = [x for x in figures(KEY_SIZE) if x[0] in arguments.methods.split(",")]
        missing = [x for x in selected if " | ".join(map(str, x)) not in done]
        full = reader.read(text, "full", LENGTH, FORMS["float16"]) if missing else None
        for method, slots, name in missing:
            key = f"{method} | {slots} | {name}"
            done[key] = kl(full, reader.read(text, method, slots, FORMS[name]))
            print(number, key, f"{done[key]:.5f}", flush=True)
            write(measured() | {number: done})  # another process may have added results meanwhile
    write(measured())


def write(texts: dict[str, dict[str, float]]) -> None:
    """Write all results, and their means over the texts that have them."""
    keys = [" | ".join(map(str, x)) for x in figures(KEY_SIZE)]
    rows = {k: mean(each) for k in keys if (each := [x[k] for x in texts.values() if k in x])}
    summary = {k: [x.value, x.low, x.high, x.count] for k, x in rows.items()}
    save(NAME, {"recipe": RECIPE, "length": LENGTH, "chunk": CHUNK, "kl": summary, "texts": texts})


if __name__ == "__main__":
    main()
