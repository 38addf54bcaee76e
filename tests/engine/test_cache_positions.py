"""Positions in the cache, compared with a decoder that keeps unrotated keys and rotates all of them in every call."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvexport.artifact.reading import load_manifest
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.export.build import build
from kvexport.recipe.fields import MOST, Recipe
from kvexport.state.snapshot import Snapshot
from kvexport.validate.runner import validate_artifact
from tests.support.answers import answers
from tests.support.http_server import running
from tests.support.models import make_recipe, random_ids
from tests.support.schedules import Alone, Schedule

BUDGET, CHUNK, SINKS, RECENT, EVERY = 32, 16, 2, 12, 4
TRAINED = 512


def recipe_of(checkpoint: Path, method: str) -> Recipe:
    cache = {"method": method, "budget": BUDGET, "sinks": SINKS, "recent": RECENT, "merge_every": EVERY}
    return make_recipe(
        checkpoint,
        cache={**cache, "positions": "cache"},
        export={"prefill_chunk": CHUNK, "logits": "all"},
        limits={"max_length": "unlimited", "max_batch": 3},
    )


@pytest.fixture(scope="module")
def streaming(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(recipe_of(tiny_checkpoint, "streaming"), tmp_path_factory.mktemp("streaming") / "artifact")


@pytest.fixture(scope="module")
def merging(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(recipe_of(tiny_checkpoint, "keepkv"), tmp_path_factory.mktemp("keepkv") / "artifact")


class Rerotating:
    """A Llama over a list of unrotated keys, of which it keeps the sinks and the latest, as StreamingLLM does."""

    def __init__(self, checkpoint: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.since_merge = 0

    def rotated(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = places[:, None].double() * frequency
        plane = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([plane.real, plane.imag], dim=-1)

    @torch.no_grad()
    def append(self, ids: np.ndarray) -> np.ndarray:
        hidden = self.model.model.embed_tokens(torch.from_numpy(ids))
        for i, layer in enumerate(self.model.model.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            query, key, value = (
                project(normed).reshape(len(ids), -1, attention.head_dim).transpose(0, 1)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if i < len(self.held):
                key, value = (torch.cat([old, new], 1) for old, new in zip(self.held[i], (key, value), strict=True))
                self.held[i] = key, value
            else:
                self.held.append((key, value))
            places = torch.arange(key.shape[1])
            now = places[-len(ids) :]
            group = query.shape[0] // key.shape[0]
            keys, values = (x.repeat_interleave(group, 0) for x in (self.rotated(key, places), value))
            logits = self.rotated(query, now) @ keys.transpose(1, 2) * attention.head_dim**-0.5
            logits = logits.masked_fill(places > now[:, None], -torch.inf)
            output = (torch.softmax(logits, -1) @ values).transpose(0, 1).reshape(len(ids), -1)
            hidden = hidden + attention.o_proj(output)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return np.asarray(self.model.lm_head(self.model.model.norm(hidden)).numpy())

    def evict(self) -> None:
        self.held = [
            tuple(torch.cat([x[:, :SINKS], x[:, x.shape[1] - (BUDGET - SINKS) :]], 1) for x in layer)  # type: ignore[misc]
            if layer[0].shape[1] > BUDGET
            else layer
            for layer in self.held
        ]


def test_equals_keys_that_are_rotated_anew_in_every_call(streaming: Path, tiny_checkpoint: Path) -> None:
    engine, slow = load(streaming), Rerotating(tiny_checkpoint)
    (ids,) = random_ids(1, 8 * BUDGET, vocabulary=64)
    lanes, prompt, worst = engine.lanes(1), 6 * BUDGET, 0.0
    for start in range(0, prompt, CHUNK):
        part = ids[start : start + CHUNK]
        worst = max(worst, float(np.abs(lanes.append([part], prefill=True)[0] - slow.append(part)).max()))
        slow.evict()
    for step, token in enumerate(ids[prompt:], 1):
        worst = max(worst, float(np.abs(lanes.append([[token]])[0] - slow.append(np.array([token]))).max()))
        if step % EVERY == 0:
            slow.evict()
    assert worst < 2e-4, "logits are of the order of 1"


def test_a_session_continues_beyond_the_trained_length(merging: Path) -> None:
    engine = load(merging)
    (ids,) = random_ids(2, 2 * TRAINED, vocabulary=64)
    answer = engine.generate([ids], engine.settings(max_new_tokens=TRAINED))[0]
    assert len(answer.token_ids) == TRAINED
    assert answer.finish_reason == "length", "the answer has max_new_tokens"
    lanes = engine.lanes(1)
    logits = lanes.prefill([ids])
    assert np.isfinite(logits).all()


def test_lanes_of_a_batch_equal_solo_runs(streaming: Path) -> None:
    engine = load(streaming)
    prompts = random_ids(3, 150, 20, 61, vocabulary=64)
    settings = engine.settings(max_new_tokens=40)
    together = [x.token_ids for x in engine.generate(prompts, settings)]
    assert together == [engine.generate([prompt], settings)[0].token_ids for prompt in prompts]


def shifted(engine: Engine, ids: np.ndarray, by: int) -> list[np.ndarray]:
    """Return the logits of the second half of `ids`, after the session was made `by` tokens older."""
    lanes, half = engine.lanes(1), len(ids) // 2
    lanes.prefill([ids[:half]])
    state: Any = lanes.state
    held = {name: x.copy() for name, x in state.get_state().items()}
    for name, x in held.items():
        if name.endswith(".position"):
            x[x >= SINKS] += by
    state.set_state(held, np.array([[half + by]], dtype=np.int64))
    lanes.length[0] += by
    return [lanes.append([ids[i : i + 1]])[0].copy() for i in range(half, len(ids))]


@pytest.mark.parametrize("by", [10**9, MOST - 300])
def test_logits_are_equal_a_thousand_million_tokens_later(merging: Path, by: int) -> None:
    """Only the ages of statistics count from the beginning, and they are differences."""
    engine = load(merging)
    (ids,) = random_ids(4, 192, vocabulary=64)
    for late, early in zip(shifted(engine, ids, by), shifted(engine, ids, 0), strict=True):
        np.testing.assert_array_equal(late, early)


def test_answers_of_random_schedules_equal_solo_answers(merging: Path, tmp_path: Path) -> None:
    """A place depends only on the state of its lane."""
    *engines, other = (load(merging) for _ in range(3))
    for seed in range(4):
        Schedule(engines, Alone(other), tmp_path / str(seed), 500 + seed).run(15)


def test_a_conversation_moves_between_processes_beyond_the_trained_length(merging: Path) -> None:
    engines = [load(merging), load(merging)]
    turns = [ids.tolist() for ids in random_ids(6, *[70] * 8, vocabulary=64)]
    starts: list[Snapshot | None] = [None, None]
    for i, ids in enumerate(turns):
        told: list[list[int]] = []
        for side, engine in enumerate((engines[0], engines[i % 2])):  # one session stays on its engine, the other moves
            request = Request(ids, engine.settings(max_new_tokens=30), start=starts[side], keep=True)
            told += answers(engine, request)
            data = request.snapshot.to_bytes()
            starts[side] = request.snapshot if side == 0 else Snapshot.from_bytes(data, engines[1 - i % 2].manifest)
        assert told[0] == told[1]
    assert starts[1] is not None and starts[1].length > 1.5 * TRAINED


def test_a_session_of_the_server_continues_beyond_the_trained_length(merging: Path) -> None:
    engine = load(merging)
    with running(engine) as server:
        seen = 0
        for words in ("anna has the lamp and bob the drum. " * 5,) * 4:
            body = {"prompt": words, "session_id": "long", "max_tokens": 20}
            status, _, answer = server.ask("/v1/completions", body)
            assert status == 200, answer
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == max(0, seen - 1)  # the last token is read anew
            seen = usage["prompt_tokens"] + usage["completion_tokens"]
        assert seen > 1.5 * TRAINED


def test_the_artifact_has_positions_of_the_cache(merging: Path) -> None:
    manifest = load_manifest(merging)
    assert manifest.limits.max_length == MOST
    assert manifest.recipe.limits.max_length == MOST
    assert manifest.cache.cache_positions
    for node in onnx.load(merging / "merge.onnx").graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes["cache_positions"] == 1
        assert len(attributes["inverse_frequencies"]) == 4


def test_the_artifact_passes_validation(merging: Path) -> None:
    """Every call and merge passes validation against PyTorch, in place and with separate state."""
    assert validate_artifact(merging, length=160).passed
