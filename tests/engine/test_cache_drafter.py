"""Tests of drafts by the model over selected entries of the cache: which entries are selected, unchanged answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from transformers import MistralConfig

from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.engine.cache_drafter import CacheDrafter
from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import UsageError
from kvexport.export.build import plan_memory
from kvexport.language.sampling import Sampler
from kvexport.language.settings import GenerationSettings
from kvexport.plan.planner import selected_plan
from kvexport.state.selected_cache import by_heads
from tests.support.models import SIZES, build_shared, make_recipe, random_ids, save_checkpoint
from tests.support.schedules import Alone, Schedule
from tests.support.speculation import NEW, SETTINGS, generated, prompts, recipe_of
from tests.support.tensorrt_artifacts import engines as tensorrt_engines

BUDGET, REBUILD, TOKENS, SINKS, RECENT = 20, 12, 5, 2, 8
CACHE = {"draft": "cache", "budget": BUDGET, "rebuild": REBUILD, "after": 0}
KEPT = {"sinks": SINKS, "recent": RECENT}


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a full cache without scores."""
    folder = tmp_path_factory.mktemp("cache-drafter")
    return build_shared(recipe_of(tiny_checkpoint, CACHE, **KEPT), folder / "artifact")


@pytest.fixture(scope="module")
def scored(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose cache has H2O's scores but evicts nothing."""
    folder = tmp_path_factory.mktemp("scored-drafter")
    recipe = recipe_of(tiny_checkpoint, CACHE, method="h2o", budget=1.0, **KEPT)
    return build_shared(recipe, folder / "artifact")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose layers see 24 tokens, and whose cache drops earlier ones in merges."""
    folder = tmp_path_factory.mktemp("windowed-drafter")
    save_checkpoint(folder / "checkpoint", MistralConfig(**SIZES, sliding_window=24))
    recipe = recipe_of(folder / "checkpoint", CACHE, merge_every=4, **KEPT)
    return build_shared(recipe, folder / "artifact")


@pytest.fixture(params=["plain", "scored", "windowed"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return load(request.getfixturevalue(request.param))


def layer_state(state: Any, layer: int, lane: int = 0) -> dict[str, Any]:
    view = by_heads(state._plan, state.view(lane))
    return {name: view[f"past_key_values.{layer}.{name}"] for name in ("key", "value", "votes", "position")}


class Watched:
    """A drafter that compares the selected cache with the full cache at every draft."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.drafter, CacheDrafter)
        self.engine, self.drafter, self.held = engine, engine.drafter, list[list[int]]()

    def __call__(self, requests: Sequence[Request], lanes: Lanes) -> list[list[int]]:
        drafts = self.drafter(requests, lanes)
        assert all(len(draft) <= TOKENS for draft in drafts)
        for request, draft in zip(requests, drafts, strict=True):
            if draft:
                self.check(request, draft, lanes)
        return drafts

    def check(self, request: Request, draft: list[int], lanes: Lanes) -> None:
        length = lanes.length[request.lane]
        for layer in range(2):
            own = layer_state(self.drafter._selected.state, layer, request.lane)
            full = layer_state(lanes.state, layer, request.lane)
            for head in range(2):
                used = int((own["votes"][head] > 0).sum())
                assert (own["votes"][head] == (np.arange(len(own["votes"][head])) < used)).all()
                positions = own["position"][head, :used]
                old = positions[positions < length]
                assert (np.diff(positions) > 0).all() and len(positions) - len(old) == len(draft)
                at = {int(p): slot for slot, p in enumerate(full["position"][head]) if full["votes"][head, slot] > 0}
                window = self.engine.plan.caches[layer].sliding_window or length
                seen = [i for i, p in enumerate(old) if p > length - window]  # the full cache dropped all others
                slots = [at[int(old[i])] for i in seen]  # no rejected token
                for name in ("key", "value"):
                    np.testing.assert_array_equal(own[name][head, seen], full[name][head, slots])
                present = sorted(at)
                assert set(present[-RECENT:]) <= {*old.tolist()}
                assert window < length or set(present[:SINKS]) <= {*old.tolist()}
                if layer == head == 0:
                    self.held.append(old.tolist())


def test_the_drafter_reads_entries_of_the_full_cache(engine: Engine) -> None:
    batch = prompts(4, 64)
    expected = generated(engine, batch, None, max_new_tokens=90)
    watched = Watched(load(engine.path))
    actual = generated(watched.engine, batch, watched, max_new_tokens=90)
    assert [[token.id for token in answer] for answer in actual] == [[token.id for token in a] for a in expected]
    timing = watched.engine.timing
    assert 0 < timing.accepted_tokens < timing.drafted_tokens
    sizes = {len(held) for held in watched.held}
    assert BUDGET in sizes and BUDGET + 1 < max(sizes) <= BUDGET + REBUILD


def test_scores_select_entries_between_the_first_and_the_latest(scored: Path) -> None:
    engine = load(scored)
    watched = Watched(engine)
    scores: list[Any] = []

    def noted(requests: Sequence[Request], lanes: Lanes) -> list[list[int]]:
        view = lanes.view(0)
        assert view is not None
        scores.append(by_heads(engine.plan, view)["past_key_values.0.score"][0, 0, : lanes.length[0]].copy())
        return watched(requests, lanes)

    generated(engine, prompts(4, 64)[:1], noted, max_new_tokens=60)
    selected = [(held, score) for held, score in zip(watched.held, scores, strict=False) if len(held) == BUDGET]
    assert len(selected) > 2
    for held, score in selected:
        between = np.arange(SINKS, len(score) - RECENT)
        best = between[np.argsort(-score[between], kind="stable")[: BUDGET - SINKS - RECENT]]
        assert held == sorted([*range(SINKS), *best.tolist(), *range(len(score) - RECENT, len(score))])


@pytest.mark.parametrize("engine", ["plain", "scored"], indirect=True)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_answers_are_those_without_drafts(engine: Engine, settings: dict[str, Any]) -> None:
    drafter = engine.drafter
    for seed in range(2):
        batch, generation = prompts(seed, 64), {"seed": seed, "logprobs": 2, **settings}
        expected, actual = (generated(engine, batch, each, **generation) for each in (None, drafter))
        assert [[t[:4] for t in answer] for answer in actual] == [[t[:4] for t in answer] for answer in expected]


def test_a_copy_of_a_sampler_draws_the_same_tokens() -> None:
    """A twin of a sampler draws the tokens that the sampler will draw, so that equal distributions draft them."""
    rows = np.random.default_rng(0).normal(size=(12, 64)).astype(np.float32) * 3
    for settings in SETTINGS.values():
        generation = GenerationSettings(
            **{"seed": 3, "logprobs": 1, "max_new_tokens": NEW, **settings, "grammar": None}
        )
        one, other = (Sampler(generation, [1, 2], 64) for _ in range(2))
        for row in rows[:5]:
            assert one.next(row) == other.next(row)
        twin = one.twin()
        drafted = [twin.next(row) for row in rows[5:]]
        assert drafted == [one.next(row) for row in rows[5:]] == [other.next(row) for row in rows[5:]]
        assert one.generated == other.generated == twin.generated and one.logprobs == other.logprobs


def test_schedules_with_a_cache_drafter_answer_as_solo_runs_without_drafts(scored: Path, tmp_path: Path) -> None:
    speculating, other = load(scored), load(scored)
    another, other.drafter = load(scored), None
    for seed in range(3):
        Schedule([speculating, another], Alone(other), tmp_path / str(seed), 400 + seed).run(15)


def test_drafts_are_made_only_where_they_pay(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default there are drafts if a draft step reads at most half the bytes of the weights and of the entries."""
    engine = load(plain)
    drafter: Any = engine.drafter
    drafter._settings = drafter._settings.model_copy(update={"after": None})
    entry = sum(x.kv_heads * (x.key_size + x.value_size) * 4 for x in engine.plan.caches)
    # The number of entries with as many bytes as the weights, lengths of prompts, and the length at which drafts begin.
    for weights, lengths, expected in ((30, [70], 70), (30, [30, 30], 55), (60, [70], 100), (200, [70], 0)):
        drafter._weights = weights * entry
        drafted: list[int] = []

        def noted(requests: Sequence[Request], lanes: Lanes, drafted: list[int] = drafted) -> list[list[int]]:
            drafts = drafter(requests, lanes)
            drafted += [lanes.length[0]] if any(drafts) else []
            return drafts

        generated(engine, [ids.tolist() for ids in random_ids(0, *lengths, vocabulary=64)], noted, max_new_tokens=36)
        assert min(drafted, default=0) == expected


def test_the_functions_take_both_caches(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEXPORT_OPERATORS", "off")
    engine = load(plain)
    expected, actual = (generated(engine, prompts(2, 64), each, max_new_tokens=20) for each in (None, engine.drafter))
    assert [[t.id for t in answer] for answer in actual] == [[t.id for t in answer] for answer in expected]
    assert engine.timing.accepted_tokens > 0


def test_invalid_logits_draft_no_tokens(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(plain)
    drafter: Any = engine.drafter
    expected = generated(engine, prompts(2, 64), None, max_new_tokens=20)
    drafter._selected.extend(3)
    monkeypatch.setattr(
        drafter._selected.state, "decode", lambda ids, _: np.full((len(ids), 1, 64), np.nan, np.float32)
    )
    actual = generated(engine, prompts(2, 64), drafter, max_new_tokens=20)
    assert [[t.id for t in answer] for answer in actual] == [[t.id for t in answer] for answer in expected]
    assert engine.timing.drafted_tokens == 0


def test_slots_stay_fixed_where_no_cache_drafts(tiny_artifact: Path, plain: Path) -> None:
    def sizes(artifact: Path) -> set[str]:
        graph = onnx.load(artifact / "decoder.onnx", load_external_data=False).graph
        return {x.type.tensor_type.shape.dim[1].dim_param for x in graph.input if x.name.endswith((".key", ".votes"))}

    assert sizes(tiny_artifact) == {""}
    assert sizes(plain) == {"slots.0", "slots.1"}


def test_the_plan_counts_its_memory(tiny_checkpoint: Path) -> None:
    with_drafter, without = (plan_memory(recipe_of(tiny_checkpoint, s, **KEPT)) for s in (CACHE, {}))
    own = selected_plan(with_drafter.recipe, with_drafter.cache)
    assert own is not None and {*own.heads("capacity")} == {BUDGET + REBUILD + TOKENS}
    assert with_drafter.sequence_bytes == without.sequence_bytes + own.bytes(1)


def test_a_budget_without_room_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_checkpoint, {**CACHE, "budget": SINKS + RECENT}, **KEPT)
    with pytest.raises(UsageError, match=r"speculate\.budget 10 cannot hold 2 sinks, 8 recent and one more") as caught:
        build_shared(recipe, tmp_path / "artifact")
    assert "speculate.budget=11" in caught.value.fix


def test_positions_in_the_cache_are_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"speculate\.draft is cache.*cache\.positions: cache"):
        make_recipe(tiny_checkpoint, cache={"positions": "cache"}, speculate=CACHE)


def test_engines_of_tensorrt_are_refused(plain: Path, tmp_path: Path, plugins: Path) -> None:
    with pytest.raises(UsageError, match=r"TensorRT has them on the GPU") as caught:
        tensorrt_engines(plain, tmp_path / "engines")
    assert "speculate.draft=ngram" in caught.value.fix and not (tmp_path / "engines").exists()


def test_state_on_a_device_is_refused(plain: Path) -> None:
    engine = load(plain)
    model: Any = engine.model
    model.zeros = partial(DeviceArray, "cpu")
    plan = selected_plan(engine.manifest.recipe, engine.plan)
    assert plan is not None
    with pytest.raises(UsageError, match=r"copies entries in the host's memory"):
        CacheDrafter(engine.manifest, model, plan)
