"""Tokens of decoders with recurrent states over 4,096 tokens, compared with transformers in every way of reading.

    python benchmarks/correctness/hybrids.py [TYPE...] [--length 4096] [--work DIR]

Every type is a tiny model of random weights with a full cache. A token is the argmax of the logits plus a noise that
depends on its position alone, so that no answer ends in a loop. transformers' own model reads prompt and answer at
once. `tokens` counts the compared tokens, `different` those that transformers would not have chosen. The ways of
reading are

    steps    a prompt of one token; every other token is decoded
    chunks   half of the tokens are a prompt, read in chunks of 256
    batch    three sequences of different lengths join one after the other, and leave one after the other
    session  half way the state goes through a session's file to an engine that has read nothing
    fork     a second answer to a prompt that was read once
    prefix   a second prompt that begins like an earlier one; `cached` of its tokens are not read again

`logits` is the largest error of the logits of given random tokens, relative to the largest logit, in chunks of random
sizes in a batch of two lanes that idle in turn.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import kvexport
from benchmarks.common import earlier, options_of, save
from kvexport.artifact.reading import load_manifest
from kvexport.engine.options import EngineOptions
from kvexport.engine.request import FINISHED, Request
from kvexport.export.build import build
from kvexport.language.settings import GenerationSettings
from kvexport.state.sessions import SessionStore
from tests.support import models
from tests.support.answers import stopped
from tests.support.hybrids import CONFIGS

TYPES = ("qwen3_5_text", "qwen3_next", "lfm2", "bamba", "granitemoehybrid", "falcon_h1")
CHUNK = 256
VOCABULARY = models.SIZES["vocab_size"]


class Noise:
    """A logits processor that adds numbers which depend on the position of the token alone."""

    def __init__(self, length: int, seed: int = 0) -> None:
        self.rows = np.random.default_rng(seed).gumbel(size=(length + 1, VOCABULARY)).astype(np.float32) * 2

    def __call__(self, ids: Any, logits: Any) -> Any:
        """Return the logits of the token after `ids`, with its noise."""
        return logits + self.rows[len(ids)]


class Model:
    """One decoder type: its artifact and transformers' model."""

    def __init__(self, name: str, length: int, work: Path) -> None:
        self.length, self.work = length, work / name
        config = CONFIGS[name]()
        config.max_position_embeddings = length + 64
        checkpoint = models.save_checkpoint(self.work / "checkpoint", config)
        recipe = models.make_recipe(
            checkpoint,
            cache={"method": "full"},
            export={"logits": "all", "prefill_chunk": CHUNK},
            limits={"max_length": length + 1, "max_batch": 3},
        )
        self.artifact = build(recipe, self.work / "artifact")
        self.manifest = load_manifest(self.artifact)
        self.reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.noise = Noise(length)

    def engine(self, **options: Any) -> Any:
        return kvexport.load(self.artifact, threads=1, options=EngineOptions(**options), verify=False)

    def logits(self, ids: Any) -> Any:
        """Return transformers' logits of every token of a sequence, read at once."""
        with torch.no_grad():
            return self.reference(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()

    def sessions(self) -> SessionStore:
        """Return a store of the sessions in the files that earlier stores have left."""
        return SessionStore(self.manifest, memory=0, folder=self.work / "sessions", disk=1 << 30)

    def request(self, prompt: Any, length: int | None = None, noise: Noise | None = None, **fields: Any) -> Request:
        """Return a request whose answer brings the sequence to `length` tokens."""
        settings = GenerationSettings(do_sample=False, max_new_tokens=(length or self.length) - len(prompt))
        return Request(prompt, settings, processors=[noise or self.noise], **fields)

    def compare(self, requests: list[Request], noises: list[Noise] | None = None) -> dict[str, int]:
        """Count the tokens of answers, and those that transformers would not have chosen.

        A tie within rounding is no difference.
        """
        tokens = different = 0
        for request, noise in zip(requests, noises or [self.noise] * len(requests), strict=True):
            assert request.error is None and request.finish_reason == "length", (request.finish_reason, request.error)
            ids, start = (
                request.seen,
                len(request.ids) - len(request.start.sampler["generated"] if request.start else ()),
            )
            rows = self.logits(ids[:-1])[start - 1 :] + noise.rows[start : len(ids)]
            logits = np.take_along_axis(rows, ids[start:, None], 1)[:, 0]
            tokens += len(ids) - start
            different += int((rows.max(1) - logits > 1e-5 * np.abs(rows).max()).sum())
        return {"tokens": tokens, "different": different}


def run(engine: Any, *requests: Request) -> list[Request]:
    for request in requests:
        engine.add(request)
    while any(request.state is not FINISHED for request in requests):
        engine.step()
    return list(requests)


def steps(model: Model) -> dict[str, int]:
    (prompt,) = models.random_ids(1, 1)
    return model.compare(run(model.engine(), model.request(prompt)))


def chunks(model: Model) -> dict[str, int]:
    (prompt,) = models.random_ids(2, model.length // 2)
    return model.compare(run(model.engine(), model.request(prompt)))


def batch(model: Model) -> dict[str, int]:
    engine, length = model.engine(), model.length
    prompts = models.random_ids(3, length // 4, length // 9, 7)
    requests = [model.request(p, n) for p, n in zip(prompts, (length, length // 2, length // 3), strict=True)]
    for request, count in zip(requests, (length // 5, length // 8, 0), strict=True):
        engine.add(request)
        for _ in range(count):
            engine.step()
    while any(request.state is not FINISHED for request in requests):
        engine.step()
    return model.compare(requests)


def session(model: Model) -> dict[str, int]:
    engine = model.engine()
    (prompt,) = models.random_ids(4, model.length // 3)
    first = model.request(prompt)
    first.keep = True
    engine.add(first)
    while len(first.ids) + len(first.tokens) < model.length // 2:
        engine.step()
    store = model.sessions()
    store.put("half", stopped(engine, first))
    store.close()
    second = Request((), start=model.sessions().get("half"), processors=[model.noise])
    return model.compare(run(model.engine(), second))


def fork(model: Model) -> dict[str, int]:
    (prompt,) = models.random_ids(5, model.length // 2)
    first, noise = model.request(prompt), Noise(model.length, seed=1)
    second = first.fork()
    second.processors = [noise]
    run(model.engine(), first, second)
    assert second.timing.prompt_tokens == 0, "the prompt was read twice"
    return model.compare([first, second], [model.noise, noise])


def prefix(model: Model) -> dict[str, int]:
    engine = model.engine(prefix_memory=1 << 30)
    beginning, first, second = models.random_ids(6, model.length // 2, 9, 70)
    run(engine, model.request(np.concatenate([beginning, first]), model.length // 2 + 20))
    (request,) = run(engine, model.request(np.concatenate([beginning, second])))
    assert request.cached_tokens > 0, "nothing was cached"
    return {**model.compare([request]), "cached": request.cached_tokens}


def logits(model: Model) -> dict[str, float]:
    sequences = models.random_ids(7, model.length, model.length // 2)
    lanes, rng, read = model.engine().lanes(2), np.random.default_rng(0), [0, 0]
    rows: list[list[Any]] = [[], []]
    while any(read[i] < len(ids) for i, ids in enumerate(sequences)):
        counts = [int(rng.choice([0, 1, 3, 100, CHUNK])) for _ in sequences]
        pieces = [ids[start : start + n] for ids, start, n in zip(sequences, read, counts, strict=True)]
        if not any(map(len, pieces)):
            continue
        appended = lanes.append(pieces, prefill=True)
        for i, piece in enumerate(pieces):
            rows[i].append(appended[i, : len(piece)].copy())
            read[i] += len(piece)
    error = 0.0
    for ids, appended in zip(sequences, rows, strict=True):
        right = model.logits(ids)
        error = max(error, float(np.abs(np.concatenate(appended) - right).max() / np.abs(right).max()))
    return {"error": error}


WAYS: tuple[Callable[[Model], dict[str, Any]], ...] = (steps, chunks, batch, session, fork, prefix, logits)


def measure(name: str, length: int, work: Path) -> dict[str, Any]:
    """Return the results of every way of reading a type."""
    model, results = Model(name, length, work), dict[str, Any]()
    for way in WAYS:
        start = time.perf_counter()
        results[way.__name__] = way(model)
        print(name, way.__name__, json.dumps(results[way.__name__]), f"{time.perf_counter() - start:.0f} s", flush=True)
    return results


def main() -> None:
    torch.set_num_threads(1)
    parser = options_of(__doc__)
    parser.add_argument(
        "types", nargs="*", default=[], help="types to measure; others keep their results; default: all"
    )
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        results = earlier("hybrids").get("types", {}) if options.types else {}
        for name in options.types or TYPES:
            results[name] = measure(name, options.length, work)
            save("hybrids", {"length": options.length, "types": results})


if __name__ == "__main__":
    main()
