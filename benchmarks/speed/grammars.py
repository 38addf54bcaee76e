"""Validity of answers drawn from random logits under random JSON schemas, and the cost of the token masks.

    python benchmarks/speed/grammars.py [--count 1000] [--tokenizer FOLDER] [--save]

Every answer must be JSON that jsonschema accepts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from benchmarks.common import SMALL_CHECKPOINT as SMALL
from benchmarks.common import save
from kvexport.language.grammar import Constraint, Grammar, Grammars
from kvexport.language.sampling import Sampler
from kvexport.language.settings import GenerationSettings
from kvexport.language.tokenizer import Tokenizer

MOST_TOKENS = 1500


def random_schema(random: np.random.Generator, depth: int = 3) -> dict[str, Any]:
    """Return a random schema all of whose answers are short enough to be drawn to their end."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth:
        kinds += ["object", "array", "anyOf", "ref"] * 2
    kind = str(random.choice(kinds))
    below = depth - 1
    if kind == "object":
        names = [f"{random.choice(['name', 'ключ', 'a b', 'x'])}{i}" for i in range(random.integers(0, 5))]
        required = [name for name in names if random.random() < 0.6]
        properties = {name: random_schema(random, below) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = int(random.integers(0, 3))
        return {
            "type": "array",
            "items": random_schema(random, below),
            "minItems": least,
            "maxItems": least + int(random.integers(0, 3)),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(random, below) for _ in range(random.integers(1, 4))]}
    if kind == "ref":
        leaf = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}}}
        return {"type": "array", "items": {"type": ["string", "null"], "maxLength": 3}, "maxItems": 2} | (
            {"$defs": {"leaf": leaf}} if below < 0 else {}
        )
    least = int(random.integers(-50, 50))
    return {
        "string": {"type": "string", "minLength": int(random.integers(0, 3)), "maxLength": int(random.integers(3, 30))},
        "integer": {"type": "integer", "minimum": least, "maximum": least + int(random.integers(0, 1000))},
        "number": {"type": "number", "minimum": least, "exclusiveMaximum": least + 10},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": ["red", 'with "quotes"', 3, None, [1, {"a": 2}]]},
        "const": {"const": {"x": [1, 2.5, "ü"]}},
        "pattern": {"type": "string", "pattern": "^[a-f]{2,8}-[0-9]+(\\.[xyz])?$", "maxLength": 20},
        "format": {"type": "string", "format": str(random.choice(["date", "uuid", "ipv4", "time"]))},
    }[kind]


def draw(
    constraint: Constraint, tokenizer: Tokenizer, vocabulary: int, eos: tuple[int, ...], seed: int, **chosen: Any
) -> tuple[list[int], str, str]:
    """Return the tokens, the text and the finish reason of an answer drawn from random logits."""
    random = np.random.default_rng(seed)
    settings = GenerationSettings(max_new_tokens=MOST_TOKENS, eos_token_ids=eos, seed=seed, **chosen)
    sampler = Sampler(settings, [1], vocabulary, constraint)
    while sampler.finish_reason is None:
        sampler.next(random.standard_normal(vocabulary).astype(np.float32) * 2)
    return sampler.generated, tokenizer.decode(sampler.generated), sampler.finish_reason


def main() -> None:
    """Measure, print the figures, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--tokenizer", type=Path, default=SMALL)
    parser.add_argument("--save", action="store_true", help="write results/grammars.json")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_folder(options.tokenizer)
    eos = tuple(i for name in ("<eos>", "<|im_end|>") if (i := tokenizer.token_id(name)) is not None)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    figures: dict[str, Any] = {"count": options.count, "vocabulary": tokenizer.vocab_size, "valid": 0, "cut": 0}
    compile_seconds, mask_seconds, accept_seconds, tokens = [], [], 0.0, 0
    for seed in range(options.count):
        schema = random_schema(np.random.default_rng(seed))
        start = time.perf_counter()
        constraint = grammars.start(Grammar.json_schema(schema), eos)
        compile_seconds.append(time.perf_counter() - start)
        ids, text, reason = draw(constraint, tokenizer, tokenizer.vocab_size, eos, seed, do_sample=bool(seed % 2))
        if reason == "length":
            figures["cut"] += 1
            continue
        jsonschema.validate(json.loads(text), schema)
        figures["valid"] += 1
        again = grammars.start(Grammar.json_schema(schema), eos)
        for token in ids:
            start = time.thread_time()
            again.mask()
            middle = time.thread_time()
            again.accept(token)
            mask_seconds.append(middle - start)
            accept_seconds += time.thread_time() - middle
        tokens += len(ids)
    figures["tokens"] = tokens
    figures["mask_us"] = {str(p): round(float(np.percentile(mask_seconds, p)) * 1e6, 1) for p in (50, 90, 99, 100)}
    figures["mask_us"]["mean"] = round(float(np.mean(mask_seconds)) * 1e6, 1)
    figures["accept_us"] = round(accept_seconds / max(tokens, 1) * 1e6, 1)
    figures["compile_ms"] = round(float(np.median(compile_seconds)) * 1e3, 1)
    print(json.dumps(figures, indent=1))
    if options.save:
        save("grammars", figures)


if __name__ == "__main__":
    main()
