"""Pinned tokens keep their keys and values, bit for bit, while everything else is merged or dropped around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.load import load
from kvexport.engine.prefixes import Prefixes
from kvexport.engine.request import Request
from kvexport.errors import SnapshotError, UsageError
from kvexport.export.build import build
from kvexport.language.chat import ChatTemplate
from kvexport.recipe.fields import Recipe
from kvexport.state.sessions import pins_after
from kvexport.state.snapshot import Snapshot
from tests.support.answers import answers, stopped
from tests.support.models import make_recipe, random_ids
from tests.support.on_device import onto_device
from tests.support.tensorrt_artifacts import engines as tensorrt_engines

BUDGET, ROOM, CHUNK, EVERY = 12, 8, 16, 4
LENGTH = 20 * (BUDGET + ROOM)
PINS = [((0, 3), (40, 43), (90, 92)), ((17, 25),), ()]
SLOT_TENSORS = ("key", "value", "key_scale", "value_scale")


def recipe_of(checkpoint: Path, model_dtype: str = "float32", **cache: Any) -> Recipe:
    common = {"method": "ballot", "budget": BUDGET, "sinks": 2, "recent": 4, "merge_every": EVERY, "pinned": ROOM}
    limits = {"max_length": LENGTH + 100, "max_batch": 3}
    export = {"prefill_chunk": CHUNK}
    return make_recipe(checkpoint, dtype=model_dtype, cache={**common, **cache}, export=export, limits=limits)


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(recipe_of(tiny_checkpoint), tmp_path_factory.mktemp("pins") / "artifact")


@pytest.fixture
def engine(artifact: Path) -> Engine:
    return load(artifact)


def ids_of(seed: int, *lengths: int) -> list[np.ndarray]:
    return random_ids(seed, *lengths, vocabulary=64)


def calls(lanes: Lanes, sequences: list[np.ndarray]) -> Any:
    """Append sequences without merges, in chunks and then token by token, and yield the lengths before each call."""
    while any(lanes.length[lane] < len(ids) for lane, ids in enumerate(sequences)):
        before = list(lanes.length)
        count = CHUNK if before[0] < LENGTH // 2 else 1
        tokens = [ids[start : start + count] for start, ids in zip(before, sequences, strict=True)]
        lanes.begin(lanes.state.decode, tokens, first=0)
        yield before
        lanes.merge_due(range(len(sequences)))


def slots(lanes: Lanes, lane: int, positions: set[int]) -> dict[tuple[int, int, int], tuple[bytes, ...]]:
    state, found = lanes.read(lane), {}
    for i, layer in enumerate(lanes._plan.caches):
        own = {name: state[f"past_key_values.{i}.{name}"] for name in ("position", "votes", *SLOT_TENSORS[:2])}
        own |= {name: x for name in SLOT_TENSORS[2:] if (x := state.get(f"past_key_values.{i}.{name}")) is not None}
        heads = {name: x.reshape(layer.kv_heads, -1, *x.shape[1:]) for name, x in own.items()}
        for head, slot in zip(*np.nonzero(heads["votes"] > 0), strict=True):
            if (position := int(heads["position"][head, slot])) in positions:
                assert heads["votes"][head, slot] == 1
                content = tuple(x[head, slot].tobytes() for name, x in heads.items() if name in SLOT_TENSORS)
                found[i, int(head), position] = content
    return found


@pytest.mark.parametrize(
    ("method", "dtype", "cache"),
    [("ballot", "float32", "model"), ("kvslimmer", "float16", "model"), ("kvmerger", "float32", "int8")],
)
def test_pinned_slots_survive_20_times_the_budget_bit_for_bit(
    tiny_checkpoint: Path, tmp_path: Path, method: str, dtype: str, cache: str
) -> None:
    engine = load(build(recipe_of(tiny_checkpoint, dtype, method=method, dtype=cache), tmp_path / "artifact"))
    lanes = engine.lanes(3)
    pinned = [{p for first, end in pins for p in range(first, end)} for pins in PINS]
    for lane, pins in enumerate(PINS):
        lanes.pin(lane, pins)
    first: list[dict[tuple[int, int, int], tuple[bytes, ...]]] = [{}, {}, {}]
    for before in calls(lanes, ids_of(1, LENGTH, LENGTH - 7, 90)):
        for lane, length in enumerate(before):
            first[lane] |= slots(lanes, lane, {p for p in pinned[lane] if p >= length})
    assert lanes.merges > 60
    for lane in range(3):
        assert len(first[lane]) == len(pinned[lane]) * 2 * 2
        assert slots(lanes, lane, pinned[lane]) == first[lane]
        assert min(lanes.read(lane)["past_key_values.0.position"]) >= 0
        assert lanes.occupied(lane) < BUDGET + ROOM + CHUNK


def test_pins_at_the_front_equal_sinks_and_free_room_equals_budget(
    artifact: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A front of pins is the same cache as so many sinks, and room without pins the same as so much more budget."""
    sequences = ids_of(2, LENGTH, LENGTH - 30, 50)
    for sinks, pins in ((ROOM, ((0, ROOM),)), (2, ())):
        recipe = recipe_of(tiny_checkpoint, budget=BUDGET + ROOM, pinned=0, sinks=sinks)
        both = load(artifact), load(build(recipe, tmp_path / str(sinks)))
        lanes = [engine.lanes(3) for engine in both]
        for lane in range(3):
            lanes[0].pin(lane, pins)
        for one in lanes:
            list(calls(one, sequences))
        for lane in range(3):
            a, b = (one.read(lane) for one in lanes)
            assert all((a[name] == b[name]).all() for name in b), (sinks, lane)


def drawn(engine: Engine, count: int) -> list[Request]:
    """Return requests whose prompts have the same beginning and pins in different places."""
    rng, shared = np.random.default_rng(4), ids_of(3, 120)[0].tolist()
    requests = []
    for number in range(count):
        ids = shared[: int(rng.integers(60, 120))] + rng.integers(0, 60, 20).tolist()
        starts = sorted(rng.choice(len(ids) // 4, int(rng.integers(0, 4)), replace=False) * 4)
        pin = [(int(start), int(start) + 2) for start in starts]
        requests.append(Request(ids, engine.settings(max_new_tokens=12), pin=pin if number % 4 else [(0, ROOM)]))
    return requests


def test_prefixes_forks_and_snapshots_keep_pins(artifact: Path, engine: Engine) -> None:
    requests = drawn(engine, 16)
    alone = [answers(load(artifact), request)[0] for request in drawn(engine, 16)]
    assert alone != [answers(load(artifact), Request(r.prompt, r.settings))[0] for r in requests]

    engine.prefixes = Prefixes(CHUNK, 1 << 30)
    assert answers(engine, *requests) == alone
    assert engine.prefixes.hits > 0
    assert [request.timing.pinned_tokens for request in requests[:4]] == [
        ROOM,
        *(2 * len(request.pin) for request in requests[1:4]),
    ]

    forked = drawn(engine, 16)[:4]
    assert answers(engine, *[x for request in forked for x in (request, request.fork())]) == [
        x for one in alone[:4] for x in (one, one)
    ]

    for tokens, request in zip(alone, drawn(engine, 16), strict=True):
        request.keep = True
        engine.add(request)
        for _ in range(len(tokens)):  # some are stopped within their prompts, whose pins are not read yet
            engine.step()
        if request.state.value == "finished":
            continue
        snapshot = stopped(engine, request)
        copy = Snapshot.from_bytes(snapshot.to_bytes(), engine.manifest)
        assert copy.counters == snapshot.counters and copy.counters.pins == request.pins
        rest = Request((), start=copy)
        answers(load(artifact), rest)
        assert [token.id for token in (*request.tokens, *rest.tokens)] == tokens


def test_the_answers_on_a_device_and_on_engines_of_tensorrt_are_the_same(
    artifact: Path, engine: Engine, tmp_path: Path, plugins: Path
) -> None:
    expected = answers(engine, *drawn(engine, 8))
    device = load(artifact)
    onto_device(device, graphs=True, late=True)
    assert answers(device, *drawn(device, 8)) == expected
    engines = load(tensorrt_engines(artifact, tmp_path / "engines"))
    assert answers(engines, *drawn(engines, 8)) == expected


def test_a_next_turn_keeps_the_pins_of_earlier_ones_and_adds_its_own(engine: Engine) -> None:
    ids = ids_of(5, 60)[0].tolist()
    first = Request(ids, engine.settings(max_new_tokens=5), keep=True, pin=[(20, 24)])
    answers(engine, first)
    assert first.snapshot is not None and first.snapshot.counters.pins == ((20, 24),)
    second = Request([1, 2, 3, 4], engine.settings(max_new_tokens=5), start=first.snapshot, keep=True, pin=[(1, 3)])
    answers(engine, second)
    seen = len(first.snapshot.ids)
    assert second.snapshot is not None and second.snapshot.counters.pins == ((20, 24), (seen + 1, seen + 3))
    with pytest.raises(UsageError, match="pins 9 tokens, and the artifact has room for 8") as refused:
        engine.add(Request([1, 2, 3, 4], start=second.snapshot, pin=[(0, 3)]))
    assert "--set cache.pinned=9" in refused.value.fix


def test_pins_of_a_conversation_that_continues_a_snapshot(engine: Engine) -> None:
    request = Request(list(range(30)), engine.settings(max_new_tokens=3), keep=True, pin=[(4, 8)])
    answers(engine, request)
    known, new = request.snapshot, np.arange(40, 50)
    assert known is not None
    same = np.concatenate([known.ids, new])
    assert pins_after(known, new, same, [(4, 8), (35, 38)]) == ((2, 5),)
    assert pins_after(known, new, same, [(4, 8)]) == ()
    assert pins_after(known, new, same, [(5, 8)]) is None
    assert pins_after(known, new, same, [(2, 4), (4, 8)]) is None
    # The client's tokenizer writes the answer in one token more.
    other = np.concatenate([known.ids[:31], [60, 61, 62], new])
    assert pins_after(known, new, other, [(4, 8), (36, 38)]) == ((2, 4),)
    assert pins_after(known, new, other, [(4, 8), (31, 33)]) is None


def test_a_snapshot_with_wrong_pins_is_refused(engine: Engine) -> None:
    request = Request(list(range(30)), engine.settings(max_new_tokens=3), keep=True, pin=[(4, 8)])
    answers(engine, request)
    snapshot = request.snapshot
    assert snapshot is not None
    for pins in (((4, 90),), ((8, 4),), ((0, 9),), ((6, 8), (4, 5))):
        wrong = Snapshot(
            snapshot.origin, snapshot.ids, snapshot.state, snapshot.counters._replace(pins=pins), snapshot.sampler
        )
        with pytest.raises(SnapshotError, match="it pins"):
            Snapshot.from_bytes(wrong.to_bytes(), engine.manifest)


@pytest.mark.parametrize("pin", [[(0, 31)], [(-1, 3)], [(5, 4)], [5], "ab", [(0, 1.5)], [(0, 1, 2)]])
def test_what_is_no_range_of_the_prompt_is_refused(engine: Engine, pin: Any) -> None:
    with pytest.raises(UsageError, match="no range of the prompt's 30 tokens"):
        engine.generate(list(range(30)), pin=pin, max_new_tokens=2)


def test_an_artifact_without_room_refuses_pins(tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pins 4 tokens, and the artifact has room for 0") as refused:
        load(tiny_artifact).generate(list(range(30)), pin=4, max_new_tokens=2)
    assert "--set cache.pinned=4" in refused.value.fix
    full = build(recipe_of(tiny_checkpoint, method="full", pinned=0), tmp_path / "full")
    with pytest.raises(UsageError, match=r"evicts nothing \(full\)"):
        load(full).generate(list(range(30)), pin=4, max_new_tokens=2)


def test_a_pinned_message_of_a_conversation_stays_in_the_cache(engine: Engine) -> None:
    source = "{% for m in messages %}{{ m.role[0] }} {{ m.content | trim }}.{% endfor %}a "
    engine.chat_template = ChatTemplate({"default": source}, {}, "the test")
    facts, filler = "code 41", "x y z " * 30
    messages = [{"role": "user", "content": filler}, {"role": "user", "content": f" {facts} ", "cache": "pin"}]
    messages.append({"role": "user", "content": filler})
    ids, pins = engine.encode_pinned_chat(messages)
    assert [engine.tokenizer.decode(ids[first:end].tolist()) for first, end in pins] == [facts]
    assert (ids == engine.encode_chat([{k: m[k] for k in ("role", "content")} for m in messages])).all()
    answer = engine.chat(messages, max_new_tokens=4)
    assert answer.token_ids == engine.generate(ids, pin=pins, max_new_tokens=4)[0].token_ids
    assert engine.timing.pinned_tokens == len(facts)
    with pytest.raises(UsageError, match="the artifact has room for 8"):
        engine.chat([{**messages[0], "cache": "pin"}], max_new_tokens=4)
    with pytest.raises(UsageError, match="encode_pinned_chat takes no images"):
        engine.encode_pinned_chat([{"role": "user", "content": [{"type": "image", "image": b""}]}])
