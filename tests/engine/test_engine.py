"""Tests of the engine: batches, chunks, ends, seeds, idle lanes, reuse, and the bounds of a cache."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.language.token import Token
from tests.conformance.layout import of_heads
from tests.support import models
from tests.support.paths import ROOT

BUDGET, CHUNK, MERGE_EVERY, MAX_LENGTH = 16, 8, 4, 200
# The first prompt fills its smallest budget while it decodes, so it does not merge together with the others.
PROMPTS = (7, 90, 27)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine with three layers of different budgets, 16 slots on average, and no tokenizer."""
    folder = tmp_path_factory.mktemp("engine")
    recipe = models.make_recipe(
        models.save_checkpoint(folder / "checkpoint", models.llama(num_hidden_layers=3)),
        cache={
            "method": "keepkv",
            "budget": BUDGET,
            "allocation": {"kind": "cosine", "minimum": 0.5},
            "sinks": 2,
            "recent": 4,
            "merge_every": MERGE_EVERY,
            "parameters": {"zip": "mean", "threshold": 0.3},
        },
        export={"prefill_chunk": CHUNK, "logits": "all"},
        limits={"max_length": MAX_LENGTH, "max_batch": 4},
    )
    loaded = load(build(recipe, folder / "artifact"))
    assert len({layer.budget for layer in loaded.plan.caches}) == 3
    return loaded


@pytest.fixture(scope="module")
def chat(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact)


def prompts(seed: int = 0) -> list[list[int]]:
    return [ids.tolist() for ids in models.random_ids(seed, *PROMPTS)]


def state(lanes: Lanes, layer: int, kind: str) -> Any:
    backend: Any = lanes.state
    return backend.state[f"past_key_values.{layer}.{kind}"]


def votes(lanes: Lanes, layer: int) -> Any:
    return of_heads("votes", state(lanes, layer, "votes"), 2)  # [lanes, KV heads, capacity]


def used_slots(lanes: Lanes, layer: int) -> Any:
    return (votes(lanes, layer) > 0).sum(-1)  # [lanes, KV heads]


def fresh_lanes(engine: Engine, count: int) -> Lanes:
    return Lanes(engine.new_state(count), engine.plan, count, prefill_chunk=CHUNK, merge_every=MERGE_EVERY)


def lane_bytes(lanes: Lanes, lane: int) -> list[bytes]:
    backend: Any = lanes.state
    return [array[lane].tobytes() for array in [*backend.state.values(), backend.past_length]]


# Batches.


def test_a_sequence_generates_the_same_alone_and_in_a_ragged_batch(engine: Engine) -> None:
    together = engine.generate(prompts(), max_new_tokens=70)
    assert [c.prompt_tokens for c in together] == list(PROMPTS)
    for prompt, completion in zip(prompts(), together, strict=True):
        alone = engine.generate(prompt, max_new_tokens=70)[0]
        assert len(set(alone.token_ids)) > 5
        assert completion == alone


def test_logits_of_a_sequence_do_not_depend_on_its_batch(engine: Engine) -> None:
    sequences = models.random_ids(1, *(length + 70 for length in PROMPTS))
    together = models.given_tokens_logits(engine, sequences, PROMPTS)
    for sequence, length, rows in zip(sequences, PROMPTS, together, strict=True):
        alone = models.given_tokens_logits(engine, [sequence], [length])[0]
        assert alone.shape == rows.shape == (length + 70, models.SIZES["vocab_size"])
        np.testing.assert_allclose(rows, alone, rtol=0, atol=1e-5)


def test_an_ended_sequence_keeps_its_state_while_others_go_on(engine: Engine) -> None:
    lanes = engine.lanes(3)
    ids = [np.array(p) for p in prompts()]
    lanes.prefill(ids)
    ended = lane_bytes(lanes, 1)
    for _ in range(30):
        lanes.append([ids[0][:1], ids[0][:0], ids[2][:1]])
        assert lane_bytes(lanes, 1) == ended
    # A chunk of a neighbour's prompt does not change it either.
    lanes.append([ids[1][:CHUNK], ids[0][:0], ids[1][:3]], prefill=True)
    assert lane_bytes(lanes, 1) == ended
    assert lanes.length == [PROMPTS[0] + 30 + CHUNK, PROMPTS[1], PROMPTS[2] + 33]


def test_an_empty_lane_stays_empty(engine: Engine) -> None:
    lanes = engine.lanes(2)
    for start in range(0, 40, CHUNK):
        logits = lanes.append([np.arange(start, start + CHUNK), np.arange(0)], prefill=True)
        assert np.isfinite(logits).all()
    assert not any(map(any, lane_bytes(lanes, 1)))


# Chunks.


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 11])
def test_where_chunks_end_does_not_matter_within_the_budget(engine: Engine, length: int) -> None:
    assert length <= min(engine.plan.heads("budget"))
    ids = models.random_ids(2, length)[0]
    whole = engine.lanes(1).prefill([ids])
    pieces = engine.lanes(1)
    for token in ids:
        last = pieces.append([np.array([token])])
    np.testing.assert_allclose(last[:, 0], whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1, 90])
def test_prefill_goes_chunk_by_chunk_and_ends_within_every_budget(
    engine: Engine, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    lanes = engine.lanes(1)
    append = lanes.append

    def counted(chunks: Any, **how: Any) -> Any:
        seen.append(len(chunks[0]))
        return append(chunks, **how)

    monkeypatch.setattr(lanes, "append", counted)
    lanes.prefill(models.random_ids(3, length))
    assert sum(seen) == length and {*seen[:-1]} <= {CHUNK} and 0 < seen[-1] <= CHUNK
    assert lanes.length == [length]
    for i, layer in enumerate(engine.plan.caches):
        assert (used_slots(lanes, i) == min(length, layer.budget[0])).all()


def test_a_call_takes_no_more_than_a_chunk(engine: Engine) -> None:
    lanes = engine.lanes(1)
    for count in (0, CHUNK + 1):
        with pytest.raises(ValueError, match=f"1 to {CHUNK} tokens"):
            lanes.append([np.arange(count)])
    assert lanes.length == [0]


# ---- the bounds of a cache ----


def watch(engine: Engine, lanes: Lanes) -> list[int]:
    """Compare every later call of the backend with the contract, and return a list that gets all merged lanes."""
    backend: Any = lanes.state
    decode, merge = backend.decode, backend.merge
    layers = list(enumerate(engine.plan.caches))
    merged: list[int] = []

    def watched_decode(input_ids: Any, query_length: Any, first: int) -> Any:
        before = [used_slots(lanes, i) for i, _ in layers]
        new = np.zeros((lanes.count, 1), np.int64)
        new[first : first + len(query_length)] = query_length
        logits = decode(input_ids, query_length, first)
        for i, layer in layers:
            assert (used_slots(lanes, i) == before[i] + new).all()
            assert used_slots(lanes, i).max() <= layer.capacity[0]
            # The used slots are the first ones.
            assert (np.diff((votes(lanes, i) > 0).astype(int), axis=-1) <= 0).all()
        return logits

    def watched_merge(first: int, last: int) -> None:
        before = [used_slots(lanes, i) for i, _ in layers]
        others = [lane_bytes(lanes, lane) for lane in range(lanes.count) if not first <= lane < last]
        merge(first, last)
        for i, layer in layers:
            assert (used_slots(lanes, i)[first:last] == np.minimum(before[i][first:last], layer.budget)).all()
        assert others == [lane_bytes(lanes, lane) for lane in range(lanes.count) if not first <= lane < last]
        merged.extend(range(first, last))

    backend.decode, backend.merge = watched_decode, watched_merge
    return merged


def test_ten_times_the_budget_stays_within_capacity_and_merges_to_the_budget(engine: Engine) -> None:
    lanes = fresh_lanes(engine, 3)
    merged = watch(engine, lanes)
    ids = models.random_ids(4, 10 * BUDGET, 10 * BUDGET, 30)
    lanes.prefill([ids[0], ids[1][:20], ids[2]])
    for step in range(10 * BUDGET - 20):
        lanes.append([ids[0][:0], ids[1][20 + step :][:1], ids[2][:1] if step % 3 == 0 and step < 90 else ids[2][:0]])
    assert lanes.length == [160, 160, 60]
    assert [merged.count(lane) > 3 for lane in range(3)] == [True] * 3
    # A lane merges after its own MERGE_EVERY decoded tokens.
    largest = max(engine.plan.heads("budget"))
    assert merged.count(1) <= 20 // CHUNK + (160 - 20) // MERGE_EVERY + 1
    assert all(used_slots(lanes, i).max() <= largest + MERGE_EVERY for i in range(3))


def test_votes_never_exceed_the_tokens_seen_and_nothing_else_is_lost(engine: Engine) -> None:
    lanes = engine.lanes(2)
    ids = models.random_ids(5, 150, 60)
    lanes.prefill(ids)
    for i, layer in enumerate(engine.plan.caches):
        used, total = votes(lanes, i) > 0, votes(lanes, i).sum(-1)
        # All votes are whole: merged entries are counted, and entries without a neighbour are dropped.
        np.testing.assert_array_equal(votes(lanes, i), np.round(votes(lanes, i)))
        assert (total <= np.array(lanes.length)[:, None]).all()
        assert (total > layer.budget).any()
        position = of_heads("position", state(lanes, i, "position"), 2)
        for lane, length in enumerate((150, 60)):
            for head in range(2):
                held = position[lane, head][used[lane, head]].tolist()
                # Sinks and the latest tokens have one slot each.
                assert {0, 1, *range(length - 4, length)} <= set(held)
                assert len(set(held)) == len(held)


# The lanes of a call.


def test_a_call_does_not_depend_on_earlier_calls(engine: Engine) -> None:
    first = engine.generate(prompts(), max_new_tokens=20)
    assert engine.generate(prompts(6), max_new_tokens=33) != first
    assert engine.generate(prompts(), max_new_tokens=20) == first


def test_a_call_does_not_depend_on_an_abandoned_stream(engine: Engine) -> None:
    expected = engine.generate(prompts(), max_new_tokens=20)
    stream = engine.stream(prompts(6), max_new_tokens=20)
    for _ in range(30):
        next(stream)
    assert engine.generate(prompts(), max_new_tokens=20) == expected


def test_streams_of_one_engine_run_at_once_and_do_not_disturb_each_other(engine: Engine) -> None:
    batches = [prompts(), prompts(6)[:2], [prompts(8)[1]]]  # more sequences than lanes
    expected = [[c.token_ids for c in engine.generate(batch, max_new_tokens=20)] for batch in batches]
    streams = [engine.stream(batch, max_new_tokens=20) for batch in batches]
    answers: list[list[list[int]]] = [[[] for _ in batch] for batch in batches]
    open_ones = set(range(len(streams)))
    while open_ones:
        for i in sorted(open_ones):
            token = next(streams[i], None)
            if token is None:
                open_ones.discard(i)
            else:
                answers[i][token.sequence].append(token.id)
    assert answers == expected
    assert not engine.busy


def test_lanes_are_empty_when_a_request_gets_them(engine: Engine) -> None:
    lanes = engine.lanes(2)
    lanes.prefill([np.arange(50), np.arange(20)])
    assert any(map(any, lane_bytes(lanes, 0)))
    again = engine.lanes(2)
    assert not any(map(any, lane_bytes(again, 0) + lane_bytes(again, 1)))
    assert again.length == [0, 0]


# Streams and their ends.


def collect(stream: Iterator[Token], count: int) -> tuple[list[list[int]], list[str], list[Any]]:
    ids: list[list[int]] = [[] for _ in range(count)]
    texts: list[str] = [""] * count
    reasons: list[Any] = [None] * count
    for token in stream:
        assert reasons[token.sequence] is None
        ids[token.sequence].append(token.id)
        texts[token.sequence] += token.text
        reasons[token.sequence] = token.finish_reason
    return ids, texts, reasons


def test_a_stream_equals_the_result_of_generate(chat: Engine) -> None:
    questions = ["abc", "the quick brown fox jumps over the lazy dog", "x"]
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "seed": 3, "stop_strings": ["e"]}
    completions = chat.generate(questions, **settings)
    ids, texts, reasons = collect(chat.stream(questions, **settings), 3)
    assert ids == [c.token_ids for c in completions]
    assert texts == [c.text for c in completions]
    assert reasons == [c.finish_reason for c in completions]
    assert None not in reasons


def test_tokens_have_the_requested_logprobs(engine: Engine) -> None:
    plain = list(engine.stream(prompts(), max_new_tokens=6))
    tokens = list(engine.stream(prompts(), max_new_tokens=6, logprobs=3))
    assert [token.id for token in tokens] == [token.id for token in plain]
    assert all(token.logprob is None and token.top_logprobs == () for token in plain)
    for token in tokens:  # greedy: the most probable token
        assert token.top_logprobs[0] == (token.id, token.logprob)
        assert len(token.top_logprobs) == 3
        assert 0 > token.top_logprobs[0][1] >= token.top_logprobs[1][1] >= token.top_logprobs[2][1]


def test_tokens_arrive_while_they_are_generated(chat: Engine) -> None:
    stream = chat.stream("abc", max_new_tokens=100)
    first = [next(stream) for _ in range(3)]
    assert chat.timing.steps == 2
    assert [t.id for t in first] == chat.generate("abc", max_new_tokens=3)[0].token_ids


def test_an_eos_ends_its_sequence_alone(engine: Engine) -> None:
    free = [c.token_ids for c in engine.generate(prompts(), max_new_tokens=40)]
    eos = free[0][9]
    stops = [ids.index(eos) + 1 if eos in ids else 40 for ids in free]
    assert stops[0] <= 10
    assert len(set(stops)) > 1
    for completion, ids, stop in zip(
        engine.generate(prompts(), max_new_tokens=40, eos_token_ids=[eos]), free, stops, strict=True
    ):
        assert completion.token_ids == ids[:stop]
        assert completion.finish_reason == ("stop" if eos in ids else "length")


def test_a_stop_string_ends_the_text_before_it(chat: Engine) -> None:
    free = chat.generate("hello", max_new_tokens=60)[0]
    assert free.finish_reason == "length"
    assert len(free.text) == 60
    stop = free.text[20:23]
    end = free.text.index(stop)
    stopped = chat.generate("hello", max_new_tokens=60, stop_strings=[stop, "no such text"])[0]
    assert stopped.text == free.text[:end]
    assert stopped.token_ids == free.token_ids[: end + 3]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("left", [1, 2, 7])
def test_a_sequence_ends_at_the_longest_length(engine: Engine, left: int) -> None:
    prompt = models.random_ids(7, MAX_LENGTH - left)[0].tolist()
    other = prompt[:3]
    long, short = engine.generate([prompt, other], max_new_tokens=9)
    assert len(long.token_ids) == left
    assert long.finish_reason == "length"
    assert len(short.token_ids) == 9
    assert engine.timing.prompt_tokens == MAX_LENGTH - left + 3
    assert engine.timing.generated_tokens == left + 9


def test_a_seed_repeats_itself_and_only_itself(engine: Engine) -> None:
    def sample(seed: int, batch: Any) -> list[list[int]]:
        return [c.token_ids for c in engine.generate(batch, max_new_tokens=25, do_sample=True, seed=seed)]

    together = sample(1, prompts())
    assert sample(1, prompts()) == together
    assert all(a != b for a, b in zip(sample(2, prompts()), together, strict=True))
    # The draws of a sequence do not depend on the others.
    assert [sample(1, p)[0] for p in prompts()] == together


# Prompts that are refused before anything runs.


@pytest.mark.parametrize(("batch", "problem"), [
    ([], "there is no prompt"), ([[]], "the prompt is empty"), ([[1, 2], []], "the prompt is empty"),
    ([1, 100], "token id 100 is out of range: the vocabulary has 100"),
    ([[1, 2], [3, -1]], "token id -1 is out of range"), ([[0.5, 1.0]], "token ids are integers"),
    ([0] * MAX_LENGTH, f"the prompt has {MAX_LENGTH} tokens"), ("text", "the artifact has no tokenizer.json"),
    (["text", "more"], "the artifact has no tokenizer.json"),
])  # fmt: skip
def test_prompts_that_cannot_be_used(engine: Engine, batch: Any, problem: str) -> None:
    for call in (engine.generate, engine.stream):
        with pytest.raises(UsageError) as caught:
            call(batch, max_new_tokens=2)
        assert problem in caught.value.problem
        assert caught.value.fix


def test_empty_text_and_unknown_settings(chat: Engine) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        chat.generate("")
    with pytest.raises(UsageError, match="unknown generation setting 'max_words'"):
        chat.generate("abc", max_words=3)


def test_a_missing_artifact_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        load(tmp_path / "nothing")


def test_running_needs_no_package_of_the_build(engine: Engine) -> None:
    expected = [c.token_ids for c in engine.generate(prompts(), max_new_tokens=20)]
    code = """
import json, sys
for name in ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "polygraphy"):
    sys.modules[name] = None
import kvexport.engine.load
path, batch = json.load(sys.stdin)
print(json.dumps([c.token_ids for c in kvexport.engine.load.load(path).generate(batch, max_new_tokens=20)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([str(engine.path), prompts()]),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def test_lanes_may_be_fewer_than_the_artifact_has_and_are_reserved_once(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact, lanes=2)
    lanes = engine.reserve()
    assert lanes.count == engine.max_batch == 2
    engine.generate([list(range(1, 46)), [5, 6, 7]], max_new_tokens=40)
    assert engine.reserve() is lanes and lanes.merges > 0
    many = [[1 + i % 90] for i in range(13)]
    answers = engine.generate(many, max_new_tokens=3)
    assert [one.token_ids for one in answers] == [engine.generate(x, max_new_tokens=3)[0].token_ids for x in many]
    with pytest.raises(UsageError, match="5 sequences at once") as caught:
        load(tiny_artifact, lanes=5)
    assert "--lanes 4" in caught.value.fix
