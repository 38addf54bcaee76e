"""Images with rotary positions of rows and columns (M-RoPE): the positions after an image belong to its lane."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.options import EngineOptions
from kvexport.engine.request import Request
from kvexport.export.build import build
from kvexport.images.rows import call_images, places_of
from kvexport.state.snapshot import Snapshot
from tests.support import models, vision
from tests.support.answers import answers, stopped
from tests.support.vision import picture

BUDGET, SINKS, CHUNK, EVERY = 24, 4, 16, 4
SETTINGS: dict[str, Any] = {
    "cache": {"method": "streaming", "budget": BUDGET, "sinks": SINKS, "merge_every": EVERY},
    "export": {"logits": "all", "prefill_chunk": CHUNK},
    "limits": {"max_length": 600, "max_batch": 4},
}
MARKER = "<|image_pad|>"
WIDE, TALL = picture(40, 90, 1), picture(90, 45, 2)
PROMPT = f"a{MARKER}bcd{MARKER} efghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.save_checkpoint("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(build(models.make_recipe(checkpoint, **SETTINGS), tmp_path_factory.mktemp("artifact") / "artifact"))


def _seen_by(ends: list[int]) -> NDArray[np.bool_]:
    """Return which tokens [n, n] each token sees, if the model reads tokens up to each of `ends` in one call."""
    seen, kept, added, begin = np.zeros((ends[-1], ends[-1]), bool), list[int](), 0, 0
    for end in ends:
        for token in range(begin, end):
            seen[token, kept] = seen[token, begin : token + 1] = True
        kept, added = [*kept, *range(begin, end)], added + end - begin
        if len(kept) > BUDGET and (end - begin > 1 or added >= EVERY):
            kept, added = [*kept[:SINKS], *kept[SINKS - BUDGET :]], 0
        begin = end
    return seen


def test_logits_past_the_budget_are_those_of_transformers_that_sees_as_much(checkpoint: Path, engine: Engine) -> None:
    ids, images = engine.encode_with_images(PROMPT, [WIDE, TALL])
    places, lanes = places_of(ids, images, engine.manifest.images), engine.lanes(1)
    ids, prompt = np.append(ids, range(100, 112)), len(ids)
    ends = [*range(CHUNK, prompt, CHUNK), *range(prompt, len(ids) + 1)]
    rows, begin = [], 0
    for end in ends:
        chunk, call = slice(begin, end), call_images([(places[begin:end], images)])
        rows.append(lanes.append([ids[chunk]], prefill=end <= prompt, images=call)[0].copy())
        begin = end
    right = vision.Transformers(checkpoint)
    _, given = right.inputs(PROMPT, [WIDE, TALL])
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    kinds = torch.nn.functional.pad(tensors.pop("mm_token_type_ids").int(), (0, len(ids) - prompt))
    grid = tensors["image_grid_thw"]
    position, _ = right.model.model.get_rope_index(torch.from_numpy(ids)[None], kinds, grid)
    mask = torch.from_numpy(np.where(_seen_by(ends), 0.0, -np.inf).astype(np.float32))[None, None]
    with torch.no_grad():
        expected = right.model(torch.from_numpy(ids)[None], attention_mask=mask, position_ids=position, **tensors)
    logits = expected.logits[0].numpy()
    assert prompt > 2 * BUDGET and position.max() < len(ids) - 12
    assert np.abs(np.concatenate(rows) - logits).max() <= 1e-4 * np.abs(logits).max()


def test_answers_do_not_depend_on_the_batch_or_on_prefixes(engine: Engine) -> None:
    prompts, images = [PROMPT, f"{MARKER}c", "d"], [[WIDE, TALL], [TALL], []]
    together = engine.generate(prompts, images=images, max_new_tokens=6)
    alone = [engine.generate(p, images=i, max_new_tokens=6)[0] for p, i in zip(prompts, images, strict=True)]
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]
    kept = engine.with_options(EngineOptions(prefix_memory=1 << 24))
    for hits in (0, 48):
        assert kept.generate(PROMPT, images=[WIDE, TALL], max_new_tokens=6)[0].token_ids == alone[0].token_ids
        assert kept.prefixes.hits == hits  # type: ignore[union-attr]


def test_forks_and_snapshots_go_on_after_an_image(engine: Engine) -> None:
    more = f"xyz{MARKER}w"
    ids, images = engine.encode_with_images(PROMPT, [WIDE, TALL])
    settings = engine.settings(max_new_tokens=6)
    right = engine.generate(PROMPT, images=[WIDE, TALL], max_new_tokens=6)[0].token_ids
    engine.add(request := Request(ids, settings, images=images, keep=True))
    engine.add(fork := request.fork())
    while len(request.tokens) < 3:
        engine.step()
    snapshot = Snapshot.from_bytes(stopped(engine, request).to_bytes(), engine.manifest)
    resumed = Request((), start=snapshot, keep=True)
    answers(engine, resumed)
    assert [token.id for token in (*request.tokens, *resumed.tokens)] == right
    assert [token.id for token in fork.tokens] == right
    assert resumed.snapshot is not None
    later, image = engine.encode_with_images(more, [WIDE])
    answers(engine, next_turn := Request(later, settings, start=resumed.snapshot, images=image))
    whole, both = engine.encode_with_images([*ids, *right, *later], [WIDE, TALL, WIDE])
    lanes, places = engine.lanes(1), places_of(whole, both, engine.manifest.images)
    last, begin = None, 0
    for end in [*range(CHUNK, len(ids), CHUNK), *range(len(ids), len(ids) + len(right))]:
        call = call_images([(places[begin:end], both)])
        lanes.append([whole[begin:end]], prefill=end <= len(ids), images=call)
        begin = end
    while begin < len(whole):
        part = slice(begin, begin + CHUNK)
        last = lanes.append([whole[part]], prefill=True, images=call_images([(places[part], both)]))[0]
        begin += CHUNK
    assert last is not None
    assert next_turn.tokens[0].id == last[(len(whole) - 1 - (begin - CHUNK))].argmax()
