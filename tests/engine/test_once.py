"""Tests of prompts that the full cache reads and that are compressed once, at their end (`cache.merge_prompts`)."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.prefixes import Prefixes
from kvexport.engine.request import Request
from kvexport.errors import SnapshotError, UsageError
from kvexport.evaluate.tasks import Sample
from kvexport.export.build import build
from kvexport.recipe.fields import Recipe
from kvexport.state.periodic import by_heads
from kvexport.state.snapshot import Snapshot
from kvexport.validate import comparison
from kvexport.validate.reference import TorchReference
from kvexport.validate.runner import validate_artifact
from kvexport.validate.tokens import continued_prompts, schedule
from tests.support import models
from tests.support.answers import answers, stopped
from tests.support.counted import counted_logits

BUDGET, CHUNK, EVERY, LENGTH = 16, 8, 12, 128
PROMPT = 61
FITTED = {"method": "attention_matching", "parameters": {"after": "ballot", "queries": 6}}  # rows of three tokens


def recipe_of(checkpoint: Path, **cache: Any) -> Recipe:
    return models.make_recipe(
        checkpoint,
        cache={**FITTED, "budget": BUDGET, "sinks": 2, "recent": 4, "merge_every": EVERY} | cache,
        export={"prefill_chunk": CHUNK, "logits": "all"},
        limits={"max_length": LENGTH, "max_batch": 3},
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_checkpoint(tmp_path_factory.mktemp("once") / "checkpoint", models.llama())


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return load(build(recipe_of(checkpoint, merge_prompts="end"), checkpoint.parent / "once"))


def used(engine: Engine, state: Any) -> list[list[int]]:
    """Return the number of used slots of every layer and KV head."""
    heads = by_heads(engine.plan, state)
    return [(heads[f"past_key_values.{i}.votes"] > 0).sum(-1).tolist() for i in range(len(engine.plan.caches))]


def test_nothing_merges_before_the_end_of_a_prompt(engine: Engine) -> None:
    lanes, (ids,) = engine.lanes(1), models.random_ids(3, PROMPT)
    last = PROMPT // CHUNK * CHUNK
    for start in range(0, last, CHUNK):
        lanes.append([ids[start : start + CHUNK]], prefill=True, unread=[0])
    state = lanes.read(0)
    assert used(engine, state) == [[last] * 2] * len(engine.plan.caches) and lanes.merges == 0
    assert state["past_key_values.0.position"].tolist() == 2 * [*range(last)], "all tokens, each in a slot of its own"
    lanes.append([ids[last:]], prefill=True)
    assert used(engine, lanes.read(0)) == [[BUDGET] * 2] * len(engine.plan.caches) and lanes.merges == 1


def test_questions_follow_a_context_that_was_compressed_once(engine: Engine) -> None:
    context, question, other = (ids.tolist() for ids in models.random_ids(4, PROMPT, 5, 3))
    settings = engine.settings(max_new_tokens=4, do_sample=False, ignore_eos=True)
    first = Request(context, settings, keep=True)
    answers(engine, first, Request(models.random_ids(5, 20)[0].tolist(), settings))
    at = BUDGET + first.snapshot.length - PROMPT
    assert used(engine, first.snapshot.state) == [[at] * 2] * len(engine.plan.caches), "no answer's token merged yet"
    requests = [Request(ids, settings, start=first.snapshot, keep=True) for ids in (question, other)]
    answers(engine, *requests)
    alone = Request(question, settings, start=first.snapshot, keep=True)
    answers(engine, alone)
    assert [t.id for t in alone.tokens] == [t.id for t in requests[0].tokens]
    assert first.snapshot.length == PROMPT + 3


def answered(engine: Engine, request: Request) -> tuple[list[int], Snapshot]:
    answers(engine, request)
    assert request.snapshot is not None
    return [t.id for t in request.tokens], request.snapshot


# tokens: those after the prompt, of which the cache has not seen the last. rows: those that the next merge will read,
# 12 tokens after the last merge.
@pytest.mark.parametrize(("tokens", "rows"), [(1, 0), (10, 0), (11, 2), (12, 4), (13, 0), (23, 2)])
def test_a_snapshot_holds_the_reference_queries_that_a_merge_will_read_and_no_others(
    engine: Engine, tokens: int, rows: int
) -> None:
    context = models.random_ids(9, PROMPT)[0].tolist()
    settings = engine.settings(max_new_tokens=30, do_sample=False, ignore_eos=True)
    whole, last = answered(engine, Request(context, settings, keep=True))
    request = Request(context, settings, keep=True)
    engine.add(request)
    while len(request.tokens) < tokens:
        engine.step()
    snapshot = stopped(engine, request)
    rings = [x.shape[1] for name, x in snapshot.state.items() if name.endswith((".query", ".query_seen"))]
    assert rings == [rows] * 2 * len(engine.plan.caches)
    read_back = Snapshot.from_bytes(snapshot.to_bytes(), engine.manifest)
    rest, at_last = answered(engine, Request((), start=read_back, keep=True))
    assert whole == whole[:tokens] + rest
    assert all((at_last.state[name] == x).all() for name, x in last.state.items()), "to the bit"


@pytest.mark.parametrize(("seen", "rows", "shape"), [(0, 5, "[2, 5, 16]"), (7, 7, "[2, 7, 16]"), (2, 0, "[2, 0, 16]")])
def test_a_snapshot_with_other_queries_than_a_ring_can_have_is_damaged(
    engine: Engine, seen: int, rows: int, shape: str
) -> None:
    one = engine.settings(max_new_tokens=1)
    _, snapshot = answered(engine, Request(models.random_ids(9, 20)[0].tolist(), one, keep=True))
    layer = "past_key_values.1"
    rings = {
        f"{layer}.query": np.zeros((2, rows, 16), np.float32),
        f"{layer}.query_seen": np.zeros((2, seen), np.int32),
    }
    changed = dataclasses.replace(snapshot, state={**snapshot.state, **rings})
    with pytest.raises(SnapshotError, match="damaged") as caught:
        Snapshot.from_bytes(changed.to_bytes(), engine.manifest)
    assert f"{layer}.query is float32 {shape}" in caught.value.problem


def test_cached_prefixes_are_uncompressed_and_change_no_answer(engine: Engine) -> None:
    context, one, other = (ids.tolist() for ids in models.random_ids(6, 5 * CHUNK, 9, 7))
    settings = engine.settings(max_new_tokens=6, do_sample=False, ignore_eos=True)
    cold = [Request(context + ids, settings) for ids in (one, other)]
    answers(engine, *cold)
    engine.prefixes = Prefixes(CHUNK, 1 << 24)
    try:
        warm = [Request(context + ids, settings) for ids in (one, other)]
        for request in warm:
            answers(engine, request)
    finally:
        engine.prefixes = None
    assert warm[1].cached_tokens == 5 * CHUNK
    assert [[t.id for t in r.tokens] for r in warm] == [[t.id for t in r.tokens] for r in cold]


def test_tokens_inside_a_prompt_are_not_judged_where_nothing_has_merged_yet(engine: Engine) -> None:
    ids = models.random_ids(7, PROMPT)[0].tolist()
    with pytest.raises(UsageError, match="merge_prompts is end, and the task evaluates tokens inside a prompt"):
        counted_logits(engine, [Sample(ids, PROMPT, [10, 20])])
    rows = counted_logits(engine, [Sample(ids, PROMPT - 2, [PROMPT - 3, PROMPT - 2])])
    assert rows[0].shape == (2, models.SIZES["vocab_size"])


def test_validate_needs_only_the_slots_that_its_sequences_use(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong number beyond the slots that the reference has is found too."""
    slots = set()
    decode = TorchReference.decode

    def noted(self: TorchReference, *args: Any) -> Any:
        slots.update(self.plan.heads("capacity").tolist())
        return decode(self, *args)

    monkeypatch.setattr(TorchReference, "decode", noted)
    result = validate_artifact(engine.path, length=40, batch=2)
    assert result.passed and result.head_merges > 0 and result.unmerged == 0
    assert slots == {64} and engine.plan.caches[0].capacity[0] == LENGTH
    monkeypatch.setattr(comparison, "has_beyond", lambda source, target, arrays: True)
    wrong = validate_artifact(engine.path, length=40, batch=1)
    assert wrong.mismatch is not None and wrong.mismatch.tensor == "unused slots"


def test_validate_knows_where_the_prompts_of_its_sequences_end() -> None:
    calls = list(schedule(models.random_ids(8, 36, 15), CHUNK, [1]))
    assert [[len(part) for part in parts] for parts, _ in calls] == [[8, 8], [8, 6], [8, 0], [8, 0], [3, 0], [1, 1]]
    assert [continued_prompts(calls[i + 1 :]) for i in range(len(calls))] == [[0, 1], [0], [0], [0], [], []]


def test_the_plan_has_room_for_the_longest_prompt_and_shows_the_slots_used_afterwards(engine: Engine) -> None:
    assert {*engine.plan.heads("capacity")} == {LENGTH}


def test_an_unlimited_length_needs_room_that_is_written_down(checkpoint: Path) -> None:
    cache = {"merge_prompts": "end", "positions": "cache"}
    fields = {**recipe_of(checkpoint, **cache).model_dump(mode="json"), "limits": {"max_length": "unlimited"}}
    with pytest.raises(ValueError, match=r"merge_prompts is end and .* unlimited: set cache\.slack"):
        Recipe.model_validate(fields)
    fields["cache"]["slack"] = 100
    assert Recipe.model_validate(fields).capacity(BUDGET) == BUDGET + 100
