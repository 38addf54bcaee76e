"""Images whose tokens see each other in both directions: chunks end before them, also past the budget."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.options import EngineOptions
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.images.rows import call_images, chunk_borders, places_of
from tests.engine.test_rotary_images import BUDGET, CHUNK, SETTINGS, _seen_by
from tests.support import models, vision
from tests.support.vision import picture

MARKER, WINDOW = "<start_of_image>", 11
ONE, TWO = picture(50, 40, 1), picture(30, 70, 2)
PROMPT = f"a{MARKER}bcd{MARKER} efghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.save_checkpoint("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(build(models.make_recipe(checkpoint, **SETTINGS), tmp_path_factory.mktemp("artifact") / "artifact"))


def test_logits_past_the_budget_are_those_of_transformers_that_sees_as_much(checkpoint: Path, engine: Engine) -> None:
    """Layers with a sliding window keep its tokens alone; the other layer keeps sinks and the latest tokens."""
    ids, images = engine.encode_with_images(PROMPT, [ONE, TWO])
    places, lanes = places_of(ids, images, engine.manifest.images), engine.lanes(1)
    ids, prompt = np.append(ids, range(100, 112)), len(ids)
    ends = [*chunk_borders(places, images, 0, CHUNK), *range(prompt, len(ids) + 1)]
    rows, begin = [], 0
    for end in ends:
        call = call_images([(places[begin:end], images)])
        rows.append(lanes.append([ids[begin:end]], prefill=end <= prompt, images=call)[0].copy())
        begin = end
    whole = _seen_by(ends)
    for image in np.split(np.flatnonzero(places), 2):
        assert len(image) == 16 and any(a <= image[0] and image[-1] < b for a, b in pairwise(ends))
        whole[np.ix_(image, image)] = True
    token = np.arange(len(ids))
    near = (token <= token[:, None]) | whole
    masks = {"full_attention": whole, "sliding_attention": near & (token > token[:, None] - WINDOW)}
    right = vision.Transformers(checkpoint)
    _, given = right.inputs(PROMPT, [ONE, TWO])
    with torch.no_grad():
        logits = right.model(
            torch.from_numpy(ids)[None],
            pixel_values=torch.from_numpy(given["pixel_values"]),
            attention_mask={
                name: torch.from_numpy(np.where(seen, 0.0, -np.inf).astype(np.float32))[None, None]
                for name, seen in masks.items()
            },
        ).logits[0].numpy()  # fmt: skip
    assert prompt > 2 * BUDGET
    assert np.abs(np.concatenate(rows) - logits).max() <= 1e-4 * np.abs(logits).max()


def test_answers_do_not_depend_on_the_batch_or_on_prefixes(engine: Engine) -> None:
    prompts, images = [PROMPT, f"{MARKER}c", "d"], [[ONE, TWO], [TWO], []]
    together = engine.generate(prompts, images=images, max_new_tokens=6)
    alone = [engine.generate(p, images=i, max_new_tokens=6)[0] for p, i in zip(prompts, images, strict=True)]
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]
    kept = engine.with_options(EngineOptions(prefix_memory=1 << 24))
    ids, encoded = engine.encode_with_images(PROMPT, [ONE, TWO])
    last = chunk_borders(places_of(ids, encoded, engine.manifest.images), encoded, 0, CHUNK)[-1]
    for hits in (0, last):
        assert kept.generate(PROMPT, images=[ONE, TWO], max_new_tokens=6)[0].token_ids == alone[0].token_ids
        assert kept.prefixes.hits == hits  # type: ignore[union-attr]


def test_images_that_do_not_fit_a_chunk_are_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"more than 16 tokens of images follow each other"):
        engine.generate([1, *[256] * 32], images=[ONE, TWO], max_new_tokens=1)
    assert not engine.pending()


@pytest.mark.parametrize(
    "cache",
    [
        {"method": "keepkv", "budget": 32, "allocation": {"kind": "listed", "shares": [[2.0, 1.0]] * 3}},
        {"method": "full", "dtype": "int8"},
    ],
    ids=["heads", "int8"],
)
def test_other_caches(cache: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    """KV heads with budgets of their own, and a quantized cache, while nothing is evicted."""
    export = {"logits": "all", "prefill_chunk": 64}
    recipe = models.make_recipe(checkpoint, cache=cache, export=export, limits={"max_length": 100})
    own = load(build(recipe, tmp_path / "artifact"))
    ids, images = own.encode_with_images(f"abcd{MARKER}ef", [ONE])
    call = call_images([(places_of(ids, images, own.manifest.images), images)])
    rows = own.lanes(1).append([ids], prefill=True, images=call)[0]
    right = vision.Transformers(checkpoint)
    expected = right.logits(*right.inputs(f"abcd{MARKER}ef", [ONE]))
    allowed = 0.03 if "dtype" in cache else 1e-4
    assert np.abs(rows - expected).max() <= allowed * np.abs(expected).max()
