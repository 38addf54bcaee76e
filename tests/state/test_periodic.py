"""Tests of periodic selection: the entries that steps read, and answers that depend only on the recipe."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport import backends
from kvexport.artifact.reading import load_manifest
from kvexport.backends.base import LoadOptions
from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.request import Request
from kvexport.errors import SnapshotError, UsageError
from kvexport.export.build import build
from kvexport.state.periodic import READ, PeriodicState, by_heads
from kvexport.state.snapshot import Snapshot
from tests.support.answers import stopped
from tests.support.models import random_ids
from tests.support.periodic import EVERY, RECENT, SINKS, SLOTS, recipe_of
from tests.support.schedules import Alone, Schedule


@pytest.fixture(scope="module")
def opened(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    built: dict[str, Path] = {}

    def opened(*, method: str = "h2o", **settings: Any) -> Engine:
        if method not in built:
            folder = tmp_path_factory.mktemp("periodic")
            built[method] = build(recipe_of(tiny_checkpoint, method=method), folder / "artifact")
        path = built[method]
        manifest = replace(load_manifest(path), recipe=recipe_of(tiny_checkpoint, method=method, **settings))
        return Engine(path, manifest, backends.get("onnxruntime").load(path, manifest, LoadOptions(threads=1)))

    return opened


@pytest.fixture(scope="module")
def full(opened: Any) -> Engine:
    return opened(slots=None)


@pytest.fixture(scope="module")
def periodic(opened: Any) -> Engine:
    return opened()


def answers(engine: Engine, batch: list[Any], new: int = 60) -> list[list[int]]:
    return [answer.token_ids for answer in engine.generate(batch, max_new_tokens=new, do_sample=False)]


def prompts(seed: int) -> list[list[int]]:
    return [ids.tolist() for ids in random_ids(seed, 90, 3, 41, vocabulary=64)]


def rows(lanes: Lanes, prompt: Any, tokens: Any) -> Any:
    lanes.prefill([prompt])
    return np.stack([lanes.append([[int(token)]])[0, 0].copy() for token in tokens])


def selected_of(lanes: Lanes) -> tuple[PeriodicState, Any]:
    state = lanes.state
    assert isinstance(state, PeriodicState)
    return state, state._selected.view(0)


def view_of(lanes: Lanes) -> Any:
    """Return views [KV heads, slots, ...] of the full cache's tensors of the first lane."""
    view = lanes.state.view(0)
    assert view is not None
    return by_heads(lanes._plan, view)


def held(own: Any, layer: int = 0, head: int = 0) -> list[int]:
    votes, position = (own[f"past_key_values.{layer}.{name}"][head] for name in ("votes", "position"))
    return position[votes > 0].tolist()


@pytest.mark.parametrize("settings", [{"every": 1, "slots": 24}, {"every": 8, "slots": 250}, {"slots": 90}])
def test_sequences_that_fit_are_answered_from_the_full_cache(
    opened: Any, full: Engine, settings: dict[str, Any]
) -> None:
    """The cases have answers of 60 and 29 tokens to prompts of up to 60."""
    new = {24: 60, 250: 60, 90: 29}[settings["slots"]]
    batch = [ids[:60] for ids in prompts(1)]
    assert answers(opened(**settings), batch, new) == answers(full, batch, new)


def test_a_selection_of_all_entries_equals_the_full_cache(opened: Any, full: Engine) -> None:
    (prompt, tokens) = random_ids(2, 60, 40, vocabulary=64)
    lanes = opened(slots=120).lanes(1)
    lanes.state._settings = lanes.state._settings.model_copy(update={"slots": 119})  # type: ignore[attr-defined]
    expected = rows(full.lanes(1), prompt, tokens)
    np.testing.assert_allclose(rows(lanes, prompt, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["unscored", "h2o", "keepkv"])
def test_a_step_reads_the_selected_entries_and_the_tokens_since(opened: Any, method: str) -> None:
    """Far beyond the slots, a step reads the sinks, the latest entries and those of the highest scores, bit by bit."""
    lanes = opened(method="keepkv" if method == "keepkv" else "h2o").lanes(1)
    lanes.state._selected.scored = method != "unscored"  # as for a method that keeps no scores
    prompt, tokens = random_ids(3, 50, 150, vocabulary=64)
    lanes.prefill([prompt])
    selections, budget = [], SLOTS - EVERY
    for token in tokens:
        length = lanes.length[0]
        lanes.append([[int(token)]])
        if length % EVERY == 0:
            continue
        state, own = selected_of(lanes)
        of_selected, view = held(own), view_of(lanes)
        assert len(of_selected) <= SLOTS and of_selected == sorted(set(of_selected))
        assert of_selected[-1] == length and set(range(SINKS)) <= set(of_selected)
        for kind in ("key", "value"):
            whole, copy = view[f"past_key_values.1.{kind}"], own[f"past_key_values.1.{kind}"]
            for head in range(2):
                at = held(own, 1, head)
                np.testing.assert_array_equal(copy[head, : len(at)], whole[head, at])
        since = length - state._contents[0].start + 1
        selections.append(tuple(of_selected[: len(of_selected) - since]))
        assert len(selections[-1]) == budget and 1 <= since <= EVERY
    view = view_of(lanes)
    for layer in range(2):  # the full cache keeps every token
        assert (view[f"past_key_values.{layer}.position"][:, :200] == np.arange(200)).all()
        assert (view[f"past_key_values.{layer}.votes"][:, :200] == 1).all()
    assert len(set(selections)) > 15


def test_the_highest_scores_are_chosen(periodic: Engine) -> None:
    lanes = periodic.lanes(1)
    prompt, tokens = random_ids(4, 61, 30, vocabulary=64)
    lanes.prefill([prompt])
    checked = 0
    for token in tokens:
        length, view = lanes.length[0], view_of(lanes)
        score = view["past_key_values.0.score"][0, 0, :length].copy()
        lanes.append([[int(token)]])
        if length % EVERY == 1:
            between = np.arange(SINKS, length - RECENT)
            best = between[np.argsort(-score[between], kind="stable")[: SLOTS - EVERY - SINKS - RECENT]]
            expected = [*range(SINKS), *sorted(best.tolist()), *range(length - RECENT, length)]
            assert held(selected_of(lanes)[1]) == [*expected, length]
            checked += 1
    assert checked == 4


def test_an_unread_entry_is_selected_again_when_queries_attend_to_it(periodic: Engine) -> None:
    """An entry that no step read is selected again when a query asks for it.

    An early entry has the lowest score, and is not selected. At the next step of the full cache the query is nearer to
    its key than to any other.
    """
    lanes = periodic.lanes(1)
    prompt, tokens = random_ids(5, 65, 16, vocabulary=64)
    lanes.prefill([prompt])
    view = view_of(lanes)
    view["past_key_values.0.score"][:, 0, :65] = 1e-3
    view["past_key_values.0.score"][:, 0, 10] = 0
    for token in tokens[:7]:
        lanes.append([[int(token)]])
        assert not {10} & {*held(selected_of(lanes)[1], 0, 0), *held(selected_of(lanes)[1], 0, 1)}
    view = view_of(lanes)
    assert lanes.length[0] == 72
    keys = view["past_key_values.0.key"]
    keys[:, :72] *= 1e-3
    keys[:, 10] = 1e3 * np.sign(keys[:, 10])  # its product with a query is far above all others, or far below
    lanes.append([[int(tokens[7])]])  # reads the full cache
    view = view_of(lanes)
    attending = [head for head in range(2) if view["past_key_values.0.score"][head, 0, 10] > 0.4]
    assert attending
    lanes.append([[int(tokens[8])]])
    for head in range(2):
        assert (10 in held(selected_of(lanes)[1], 0, head)) == (head in attending)


def test_scores_are_updated_for_the_entries_that_are_read(periodic: Engine) -> None:
    """The full cache's scores of the selected entries change with the steps that read them. All others stay."""
    lanes = periodic.lanes(1)
    prompt, tokens = random_ids(6, 65, 6, vocabulary=64)
    lanes.prefill([prompt])
    before = by_heads(lanes._plan, lanes.read(0))["past_key_values.1.score"][:, 0, :65]
    for token in tokens:
        lanes.append([[int(token)]])
    after = by_heads(lanes._plan, lanes.read(0))["past_key_values.1.score"][:, 0]
    for head in range(2):
        read = [p for p in held(selected_of(lanes)[1], 1, head) if p < 65]
        others = sorted(set(range(65)) - set(read))
        np.testing.assert_array_equal(after[head, others], before[head, others])
        assert (after[head, read] > before[head, read]).all()
        # The six queries gave their whole attention to the selected entries and the new tokens.
        gained = after[head, read].sum() - before[head, read].sum() + after[head, 65:].sum()
        assert gained == pytest.approx(6, abs=1e-3)


def test_answers_of_a_batch_equal_solo_answers(periodic: Engine) -> None:
    batch = prompts(8)
    alone = [answers(periodic, [ids], 120)[0] for ids in batch]
    assert answers(periodic, batch, 120) == alone


def test_schedules_answer_as_solo_runs(opened: Any, periodic: Engine, tmp_path: Path) -> None:
    """Requests join, leave, fork, stop and resume; there are snapshots as bytes, and prefixes."""
    one, another = (opened() for _ in range(2))
    for seed in range(3):
        Schedule([one, another], Alone(periodic), tmp_path / str(seed), 500 + seed).run(15)


def stopped_after(engine: Engine, new: int) -> tuple[Snapshot, list[int]]:
    """Return the snapshot and the tokens of a long answer that is stopped after `new` tokens."""
    request = Request(prompts(9)[0], engine.settings(max_new_tokens=100, do_sample=False), keep=True)
    engine.add(request)
    while len(request.tokens) < new:
        engine.step()
    return stopped(engine, request), [token.id for token in request.tokens]


def test_a_snapshot_continues_at_every_point_of_a_period(periodic: Engine) -> None:
    engine = periodic
    expected, kinds = answers(engine, [prompts(9)[0]], 100)[0], set[str]()
    for new in range(30, 40):
        snapshot, tokens = stopped_after(engine, new)
        kinds |= {name.rpartition(".")[2] for name in snapshot.state}
        again = Request((), start=Snapshot.from_bytes(snapshot.to_bytes(), engine.manifest))
        other = periodic
        other.add(again)
        while other.busy:
            other.step()
        assert tokens + [token.id for token in again.tokens] == expected
    assert READ in kinds


def test_damaged_positions_of_a_snapshot_are_refused(periodic: Engine, full: Engine) -> None:
    engine = periodic
    snapshot, _ = stopped_after(engine, 33)
    name = f"past_key_values.1.{READ}"
    good = snapshot.state[name]
    wrong: list[Any] = [good[:, ::-1], good + 1000, good.astype(np.int64), good[:1], good[:, :0], None]
    wrong += [np.tile(np.arange(SLOTS + 1, dtype=np.int32), (2, 1))]
    for array in wrong:
        state = {**snapshot.state, name: array}
        if array is None:
            del state[name]
        data = Snapshot(snapshot.origin, snapshot.ids, state, snapshot.counters, snapshot.sampler).to_bytes()
        with pytest.raises(SnapshotError, match="damaged"):
            Snapshot.from_bytes(data, engine.manifest)
    with pytest.raises(SnapshotError, match="another contract"):
        Snapshot.from_bytes(snapshot.to_bytes(), full.manifest)


def test_rolled_back_tokens_leave_no_trace(periodic: Engine) -> None:
    """Rolled back tokens leave no trace, and entries are selected again from those that were there before."""
    prompt, tokens, wrong = random_ids(10, 70, 20, 1, vocabulary=64)
    lanes, straight = (periodic.lanes(1) for _ in range(2))
    rows(lanes, prompt, tokens)
    rows(straight, prompt, tokens)
    lanes.draft([wrong], first=0)
    lanes.settle(0, 1)
    one, other = view_of(lanes), view_of(straight)
    assert lanes.counters(0) == straight.counters(0)
    for layer in range(2):
        for kind in ("votes", "position"):
            name = f"past_key_values.{layer}.{kind}"
            np.testing.assert_array_equal(one[name][:, :90], other[name][:, :90])
        assert (one[f"past_key_values.{layer}.votes"][:, 90:] == 0).all()
    lanes.append([[1]])
    assert held(selected_of(lanes)[1])[-1] == 90


def test_tensorrt_is_refused(periodic: Engine) -> None:
    with pytest.raises(UsageError, match="TensorRT keeps the cache on the GPU"):
        backends.get("tensorrt").preparation(periodic.manifest.recipe)


def test_state_on_a_device_is_refused(periodic: Engine) -> None:
    engine = periodic
    model: Any = engine.model
    model.zeros = partial(DeviceArray, "cpu")
    with pytest.raises(UsageError, match=r"copies entries in the host's memory"):
        engine.lanes(1)
