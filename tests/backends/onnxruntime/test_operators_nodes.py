"""Nodes of the native operators: malformed ones, tensors that do not fit, and one buffer for past and present state."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvexport.backends.onnxruntime.operators import library
from kvexport.methods.attention_matching import AttentionMatching
from kvexport.schema.attribute import Attribute
from kvexport.schema.policy import POLICY
from tests.conformance.layout import joined
from tests.support.one_node import (
    DV,
    GRKV_5,
    HQ,
    KEEPKV,
    KVSLIMMER,
    MERGE_CACHE,
    RING,
    RING_PREFIX,
    STATE,
    VOTE_ATTENTION,
    C,
    D,
    H,
    S,
    T,
    merge_of,
    merge_shapes,
    model,
    ring,
    ring_shapes,
    session,
    state,
    vote_attention_inputs,
    vote_attention_shapes,
)
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    library() is None, reason="not reached: the native operators are not built (make native)"
)
# KV heads of several capacities, budgets and recent slots.
CAPACITY, BUDGET = [16, 9], [8, 6]
SLOTS = sum(CAPACITY)
LISTED = MERGE_CACHE | {"capacity": CAPACITY, "budget": BUDGET, "recent": [2, 1]}
# Reference queries, and merges that fit slots to them.
ROWS = 5
KEEPING, KEPT_SHAPES, RING_SHAPES = {"reference_queries": ROWS}, ring_shapes("VoteAttention"), ring_shapes("MergeCache")
MATCHING = merge_of(AttentionMatching(queries=ROWS))


def attention(changes: dict[str, Any] | None = None, shapes: dict[str, Any] | None = None, **options: Any) -> Any:
    with_changes = {**VOTE_ATTENTION, **(changes or {})}
    attributes = {name: value for name, value in with_changes.items() if value is not None}
    return session(model("VoteAttention", attributes, {**vote_attention_shapes(), **(shapes or {})}, **options))


def merging(all_attributes: dict[str, Any], shapes: dict[str, Any] | None = None, **options: Any) -> Any:
    attributes = {name: value for name, value in all_attributes.items() if value is not None}
    return session(model("MergeCache", attributes, {**merge_shapes(), **(shapes or {})}, **options))


def test_well_formed_nodes_run_with_and_without_optional_inputs() -> None:
    rng = np.random.default_rng(0)
    feed = vote_attention_inputs(rng, 2, T, 5)
    with_sinks = attention().run(["output"], feed)[0]
    del feed["sink_logits"]
    without = attention(absent=["sink_logits"]).run(["output"], feed)[0]
    assert with_sinks.shape == without.shape == (2, HQ, T, DV)
    assert not np.array_equal(with_sinks, without)
    for attributes in (
        MERGE_CACHE,
        KEEPKV,
        KVSLIMMER,
        KVSLIMMER | {"inverse_frequencies": None, "rotary_interleaved": None},
    ):
        votes = merging(attributes).run(["present_votes"], state(rng, 2, C))[0]
        assert ((votes.reshape(2, H, C) > 0).sum(-1) == MERGE_CACHE["budget"]).all()


@pytest.mark.parametrize("name", VOTE_ATTENTION)
def test_every_attribute_of_attention_is_needed(name: str) -> None:
    with pytest.raises(Exception, match=f"VoteAttention: the attribute {name} should be an? .*: No attribute"):
        attention({name: None})


@pytest.mark.parametrize("name", sorted(KEEPKV.keys() - {"select"}))
def test_every_attribute_of_a_merge_is_needed(name: str) -> None:
    with pytest.raises(Exception, match=f"MergeCache: the attribute {name} should be an? .*: No attribute"):
        merging({**KEEPKV, name: None})


def test_a_node_without_a_policy_is_left_to_its_function() -> None:
    own = {name: value for name, value in KEEPKV.items() if name not in {attribute.name for attribute in POLICY}}
    with pytest.raises(Exception, match="MergeCache: the node carries no merge policy: only the function"):
        merging(own)


@pytest.mark.parametrize("attribute", [a for a in POLICY if a.bounds], ids=lambda attribute: attribute.name)
def test_a_policy_out_of_its_range(attribute: Attribute) -> None:
    for bound, step in (("least", -1), ("above", 0), ("below", 0), ("most", 1)):
        limit = getattr(attribute, bound)
        if limit is None:
            continue
        value = attribute.node_value(limit + step)
        assert attribute.problem(value)
        with pytest.raises(Exception, match=f"MergeCache: {attribute.name} is .*, and has to be {attribute.bounds}"):
            merging({**KEEPKV, attribute.name: value})


ATTENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "type-of-a-number": ({"scale": 1}, {}, "the attribute scale should be a float"),
    "type-of-an-integer": ({"sliding_window": 1.5}, {}, "the attribute sliding_window should be an integer"),
    "type-of-a-word": ({"statistics": 1.0}, {}, "the attribute statistics should be a string"),
    "type-of-a-list": ({"decay": [1, 2]}, {}, "differ in length: 1, 0, 1, 1"),
    "number-for-a-list": ({"window": 3}, {}, "differ in length: 1, 1, 0, 1"),
    "unknown-score": ({"statistics": "entropy"}, {}, "statistics is 'entropy'; known: none, log_ema, probability"),
    "no-score": ({"statistics": ""}, {}, "names 1 to 8 statistics, not 0"),
    "nine-scores": ({"statistics": ",".join(["none"] * 9)}, {}, "names 1 to 8 statistics, not 9"),
    "lists-of-two-lengths": ({"decay": [0.9, 0.8]}, {}, "differ in length: 1, 2, 1, 1"),
    "decay-of-an-average": ({"decay": [1.0]}, {}, r"a decay is 1\.0+, and that of a log_ema lies in \(0, 1\)"),
    "negative-window": ({"window": [-4]}, {}, "a window is -4, and not negative"),
    "recency-weight": ({"recency_weight": [0.0]}, {}, r"a recency_weight is 0\.0+, and positive"),
    "negative-sliding-window": ({"sliding_window": -1}, {}, "sliding_window is -1, and has to be at least 0"),
    "beyond-32-bits": ({"sliding_window": 2**33}, {}, "the attribute sliding_window is out of range: 8589934592"),
    "negative-softcap": ({"softcap": -2.0}, {}, r"softcap is -2\.0+, and has to be at least 0"),
    "softcap-of-nan": ({"softcap": float("nan")}, {}, "softcap is -?nan, and has to be at least 0"),
    "prefix-of-no-size": ({"value_prefix": 0}, {}, "value_prefix is 0, and has to be at least 1"),
    "prefix-of-stored-values": ({"value_prefix": 4}, {}, r"value is \[\?, 2, \?, 12\], not \[\?, 2, \?, 4\]"),
    "rank": ({}, {"query": ["B", HQ, "T"]}, r"query \[\?, 4, \?\] and key .* have four dimensions"),
    "rank-of-votes": ({}, {"past_votes": ["B"]}, r"past_votes is \[\?\], not \[\?, \?\]"),
    "unknown-rank": ({}, {"past_key": None}, r"query .*, past_key \[\] and past_score .* three"),
    "heads-that-do-not-divide": ({}, {"query": ["B", 3, "T", D]}, "3 query heads are not a multiple of 2 KV heads"),
    "no-heads": ({}, {"key": ["B", 0, "T", D]}, "4 query heads are not a multiple of 0 KV heads"),
    "heads-that-differ": ({}, {"value": ["B", 4, "T", DV]}, r"value is \[\?, 4, \?, 12\], not \[\?, 2, \?, 12\]"),
    "slots-that-differ": (
        {},
        {"past_key": ["B", S, D], "past_votes": ["B", 33]},
        r"past_votes is \[\?, 33\], not \[\?, 32\]",
    ),
    "slots-of-no-head": ({}, {"past_key": ["B", S + 1, D]}, "33 slots are not the same number for each of 2 KV heads"),
    "head-size": ({}, {"query": ["B", HQ, "T", 2 * D]}, "query has heads of 16, past_key of 8"),
    "size-of-new-keys": ({}, {"key": ["B", H, "T", 2 * D]}, r"key is \[\?, 2, \?, 16\], not \[\?, 2, \?, 8\]"),
    "statistics": ({}, {"past_score": ["B", 3, "S"]}, "past_score has 3 statistics, `statistics` names 1"),
    "query-length": ({}, {"query_length": ["B", 2]}, r"query_length is \[\?, 2\], not \[\?, 1\]"),
    "sinks": ({}, {"sink_logits": [HQ + 1]}, r"sink_logits is \[5\], not \[4\]"),
    "head-without-slots": ({"capacity": [16, 0]}, {}, "capacity is 0, and has to be at least 1"),
    "type-of-capacity": ({"capacity": 16}, {}, "capacity holds no integers"),
    "heads-listed": ({"capacity": [16, 9, 7]}, {"past_key": ["B", SLOTS, D]}, "3 numbers, but there are 2 KV heads"),
    "sum-of-capacity": ({"capacity": [16, 8]}, {"past_key": ["B", SLOTS, D]}, "capacity is 24, but there are 25 slots"),
    "ring-of-no-rows": ({"reference_queries": 0}, KEPT_SHAPES, "reference_queries is 0, and has to be at least 1"),
    "ring-of-another-type": ({"reference_queries": 1.5}, KEPT_SHAPES, "reference_queries should be an integer"),
    "ring-of-no-fit": ({}, KEPT_SHAPES, "only a quantized cache has scales, and only a fit a ring of queries"),
    "ring-is-missing": (KEEPING, {}, "a method that fits has query and query_seen"),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_that_cannot_be(name: str) -> None:
    changes, shapes, message = ATTENTIONS[name]
    with pytest.raises(Exception, match=f"kvexport: VoteAttention: .*{message}"):
        attention(changes, shapes)


MERGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown-zip": ({**KEEPKV, "zip": "fold"}, {}, "zip is 'fold'; known: key, vote, mean"),
    "unknown-order": ({**KEEPKV, "order": "random"}, {}, "order is 'random'; known: lowest, nearest, least_error"),
    "unknown-statistic": ({**KEEPKV, "statistics": "entropy"}, {}, "statistics is 'entropy'"),
    "no-switch": ({**KEEPKV, "mean_adds": 2}, {}, "mean_adds is 2, and has to be 0 or 1"),
    "share-pairs": ({**KVSLIMMER, "share_pairs": 1}, {}, "share_pairs has no native kernel"),
    "order-of-dropped": ({**MERGE_CACHE, "order": "nearest"}, {}, "order is nearest, which needs merge to be zip"),
    "error-without-distance": ({**KEEPKV, "order": "least_error"}, {}, "order is least_error, which needs measure"),
    "pairs-merged-last": ({**KVSLIMMER, "merged_last": 1}, {}, "merge is pair, which needs merged_last to be false"),
    "threshold-of-nan": ({**KEEPKV, "threshold": float("nan")}, {}, "threshold is -?nan, and has to be a number"),
    "budget": ({**MERGE_CACHE, "budget": [8, 0]}, {}, "budget is 0, and has to be at least 1"),
    "negative-sinks": ({**MERGE_CACHE, "sinks": -1}, {}, "sinks is -1, and has to be at least 0"),
    "negative-window": ({**MERGE_CACHE, "sliding_window": -7}, {}, "sliding_window is -7, and has to be at least 0"),
    "beyond-32-bits": (MERGE_CACHE | {"budget": [2**32 + 1] * 2}, {}, "the attribute budget is out of range: 42949672"),
    "type": ({**MERGE_CACHE, "sinks": 8.0}, {}, "the attribute sinks should be an integer"),
    "type-of-frequencies": ({**KVSLIMMER, "inverse_frequencies": [1, 2]}, {}, "inverse_frequencies holds no floats"),
    "rotary-planes": ({**KVSLIMMER, "inverse_frequencies": [1.0] * 5}, {}, "5 rotary planes do not fit into keys of"),
    "interleaved": ({**KVSLIMMER, "rotary_interleaved": None}, {}, "the attribute rotary_interleaved should be an"),
    "rank": (MERGE_CACHE, {"score": ["B", "S"]}, r"key .* and score \[\?, \?\] have three dimensions each"),
    "rank-of-votes": (MERGE_CACHE, {"votes": ["B"]}, r"votes is \[\?\], not \[\?, \?\]"),
    "slots-that-differ": (MERGE_CACHE, {"key": ["B", S, D], "position": ["B", 31]}, r"position is \[\?, 31\], not"),
    "slots-of-no-head": (MERGE_CACHE, {"key": ["B", 1, D]}, "1 slots are not the same number for each of 2 KV heads"),
    "too-few-statistics": ({**KEEPKV, "statistics": "probability,log_ema"}, {}, "1 statistics, the method keeps 2"),
    "prefix-of-no-size": ({**MERGE_CACHE, "value_prefix": 0}, {}, "value_prefix is 0, and has to be at least 1"),
    "too-many-statistics": (KEEPKV, merge_shapes(2), "the score has 2 statistics, the method keeps 1"),
    "head-without-slots": (LISTED | {"capacity": [16, 0]}, {}, "capacity is 0, and has to be at least 1"),
    "type-of-capacity": (LISTED | {"capacity": 16}, {}, "capacity holds no integers"),
    "heads-listed": (
        LISTED | {"capacity": [16, 9, 7]},
        {"key": ["B", SLOTS, D]},
        "capacity has 3 numbers, and budget 2",
    ),
    "sum-of-capacity": (
        LISTED | {"capacity": [16, 8]},
        {"key": ["B", SLOTS, D]},
        "capacity is 24, but there are 25 slots",
    ),
    "heads-of-budget": (LISTED | {"budget": [8]}, {}, "budget and recent have a number for each KV head, not 1 and 2"),
    "heads-of-recent": (LISTED | {"recent": [2, 1, 1]}, {}, "recent have a number for each KV head, not 2 and 3"),
    "heads-of-both": (LISTED | {"budget": [8], "recent": [2]}, {}, "capacity has 2 numbers, and budget 1"),
    "negative-recent": (LISTED | {"recent": [2, -1]}, {}, "recent is -1, and has to be at least 0"),
    "type-of-budget": (LISTED | {"budget": 8}, {}, "budget and recent have a number for each KV head, not 0 and 2"),
    "ring-without-fit": (MATCHING | {"fit": None}, RING_SHAPES, "select is attended, which needs the reference"),
    "ring-unknown-fit": (MATCHING | {"fit": "keys"}, RING_SHAPES, "fit is 'keys'; known: values, votes_and_values"),
    "ring-ridge": (MATCHING | {"ridge": 0.0}, RING_SHAPES, r"ridge is 0\.0+, and has to be above 0"),
    "ring-change": (MATCHING | {"change_max": -1.0}, RING_SHAPES, r"change_max is -1\.0+, and has to be above 0"),
    "ring-steps": (MATCHING | {"vote_steps": -1}, RING_SHAPES, "vote_steps is -1, and has to be at least 0"),
    "ring-bias": (MATCHING | {"bias_max": float("nan")}, RING_SHAPES, "bias_max is -?nan, and has to be above 0"),
    "ring-no-ridge": (MATCHING | {"ridge": None}, RING_SHAPES, "the attribute ridge should be a float"),
    "ring-fit-of-pairs": (MATCHING | KVSLIMMER | {"fit": "values"}, RING_SHAPES, "a fit needs merge to be drop or zip"),
    "ring-is-missing": (GRKV_5, {}, "a method that fits has query and query_seen"),
}


@pytest.mark.parametrize("name", MERGES)
def test_a_merge_that_cannot_be(name: str) -> None:
    attributes, shapes, message = MERGES[name]
    with pytest.raises(Exception, match=f"kvexport: MergeCache: .*{message}"):
        merging(attributes, shapes)


@pytest.mark.parametrize("name", ["query", "query_length", "past_key", "past_score", "past_position"])
def test_a_missing_input_of_attention(name: str) -> None:
    with pytest.raises(Exception, match="VoteAttention"):
        attention(absent=[name])


@pytest.mark.parametrize("name", STATE)
def test_a_missing_input_of_a_merge(name: str) -> None:
    with pytest.raises(Exception, match="MergeCache"):
        merging(MERGE_CACHE, absent=[name])


def wider(x: Any) -> Any:
    return np.concatenate([x, x], axis=-1)


RUNS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "batch": ("key", lambda x: x[:1], r"key is \[1, 2, 3, 8\], not \[2, 2, 3, 8\]"),
    "tokens": ("position", wider, r"position is \[2, 6\], not \[2, 3\]"),
    "slots": ("past_votes", wider, r"votes is \[2, 64\], not \[2, 32\]"),
    "more-tokens-than-slots": ("tokens", lambda x: x, "more tokens than a KV head has slots"),
}


@pytest.mark.parametrize("name", RUNS)
def test_tensors_that_do_not_fit_are_an_error_of_the_run(name: str) -> None:
    tensor, change, message = RUNS[name]
    rng = np.random.default_rng(0)
    feed = vote_attention_inputs(rng, 2, T, 5) if tensor != "tokens" else vote_attention_inputs(rng, 2, C + 1, 0)
    feed = {n: change(x) if n == tensor else x for n, x in feed.items()}
    with pytest.raises(Exception, match=message):
        attention().run(None, feed)


def head_state(rng: np.random.Generator, used: int, capacity: int) -> dict[str, np.ndarray]:
    """Return the state tensors [2, 1, capacity, ...] of one KV head whose first `used` slots are occupied."""
    votes = np.where(np.arange(capacity) < used, rng.uniform(0.5, 3, (2, 1, capacity)), 0.0)
    return {
        "key": rng.normal(size=(2, 1, capacity, D)).astype(np.float32),
        "value": rng.normal(size=(2, 1, capacity, DV)).astype(np.float32),
        "votes": votes.astype(np.float32),
        "score": rng.uniform(0.1, 3, (2, 1, 1, capacity)).astype(np.float32),
        "position": np.tile(np.arange(capacity, dtype=np.int32), (2, 1, 1)),
    }


def layer_state(used: tuple[int, int] = (5, 4), prefix: str = "") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heads = [head_state(rng, n, capacity) for n, capacity in zip(used, CAPACITY, strict=True)]
    return {prefix + name: x for name, x in joined(heads)[0].items()}


def feed(tokens: int = T, **changes: np.ndarray) -> dict[str, np.ndarray]:
    inputs = vote_attention_inputs(np.random.default_rng(1), 2, tokens, 5)
    return inputs | layer_state(prefix="past_") | changes


def test_every_head_keeps_its_budget_in_its_own_slots() -> None:
    outputs = attention({"capacity": CAPACITY}).run(None, feed())
    assert outputs[0].shape == (2, HQ, T, DV)
    votes = outputs[3]
    assert [(x > 0).sum() for x in np.split(votes[0], [CAPACITY[0]])] == [5 + T, 4 + T]
    merged = merging(LISTED).run(["present_votes"], layer_state(used=(16, 9)))[0]
    assert [(x > 0).sum() for x in np.split(merged[1], [CAPACITY[0]])] == BUDGET


def test_a_capacity_that_is_omitted_is_the_same_for_every_head() -> None:
    inputs = {name: x[:, :, :24] if "score" in name else x[:, :24] for name, x in layer_state().items()}
    lists = {"budget": BUDGET, "recent": [2, 1]}
    one, listed = merging(KEEPKV | lists), merging(KEEPKV | lists | {"capacity": [12, 12]})
    for name, x, y in zip(STATE, one.run(None, inputs), listed.run(None, inputs), strict=True):
        assert x.tobytes() == y.tobytes(), name
    with pytest.raises(Exception, match="25 slots are not the same number for each of 2 KV heads"):
        one.run(None, layer_state())


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (feed(tokens=10), "the call brings more tokens than a KV head has slots"),
        (feed(past_votes=np.zeros((2, SLOTS - 1), np.float32)), r"votes is \[2, 24\], not \[2, 25\]"),
        (feed(past_key=np.zeros((2, SLOTS - 1, D), np.float32)), "the sum of capacity is 25, but there are 24 slots"),
        (feed(query=np.zeros((2, 3, T, D), np.float32)), "3 query heads are not a multiple of 2 KV heads"),
    ],
    ids=["tokens", "slots of votes", "slots of keys", "query heads"],
)
def test_tensors_that_do_not_fit_the_heads_are_errors_of_the_run(inputs: dict[str, np.ndarray], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        attention({"capacity": CAPACITY}, {"query": ["B", None, "T", D]}).run(None, inputs)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"score": np.zeros((2, 1, SLOTS + 1), np.float32)}, r"score is \[2, 1, 26\], not \[2, 1, 25\]"),
        ({"position": np.zeros((2, SLOTS - 1), np.int32)}, r"position is \[2, 24\], not \[2, 25\]"),
        ({"value": np.zeros((1, SLOTS, DV), np.float32)}, r"value is \[1, 25, 12\], not \[2, 25, 12\]"),
    ],
    ids=["slots of scores", "slots of positions", "sequences"],
)
def test_states_that_do_not_fit_the_heads_are_errors_of_a_merge(change: dict[str, np.ndarray], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        merging(LISTED, {name: [None] * x.ndim for name, x in change.items()}).run(None, layer_state() | change)


def ring_feed(op: str, rng: np.random.Generator, half: bool = False) -> dict[str, Any]:
    inputs = vote_attention_inputs(rng, 2, T, 6, half=half) if op == "VoteAttention" else state(rng, 2, C, half=half)
    return inputs | ring(rng, op, 2, ROWS, C)


def ring_node(op: str, attributes: dict[str, Any], shapes: dict[str, Any] | None = None, **options: Any) -> Any:
    return (attention if op == "VoteAttention" else merging)(attributes, ring_shapes(op) | (shapes or {}), **options)


@pytest.mark.parametrize(("op", "attributes", "tensor", "message"), [
    ("VoteAttention", KEEPING, "query", r"query is \[2, 2, 4, 8\], not \[2, 2, 5, 8\]"),
    ("VoteAttention", KEEPING, "query_seen", r"query_seen is \[2, 2, 4\], not \[2, 2, 5\]"),
    ("MergeCache", GRKV_5, "query_seen", r"query_seen is \[2, 2, 4\], not \[2, 2, 5\]"),
])  # fmt: skip
def test_a_ring_that_does_not_fit_is_an_error_of_the_run(
    op: str, attributes: dict[str, Any], tensor: str, message: str
) -> None:
    feed = ring_feed(op, np.random.default_rng(0))
    name = RING_PREFIX[op] + tensor
    feed[name] = feed[name][:, :, 1:]
    shapes = {x: [*shape[:2], None if x == name else "W", *shape[3:]] for x, shape in ring_shapes(op).items()}
    with pytest.raises(Exception, match=message):
        ring_node(op, attributes, shapes).run(None, feed)


def test_a_ring_without_rows_is_an_error_of_the_run() -> None:
    feed = ring_feed("MergeCache", np.random.default_rng(0))
    feed |= {"query": np.zeros((2, H, 0, D), np.float32), "query_seen": np.zeros((2, H, 0), np.int32)}
    with pytest.raises(Exception, match="the ring of reference queries has no rows"):
        ring_node("MergeCache", GRKV_5).run(None, feed)


ZIP_KEY = {**KEEPKV, "zip": "key"}
VALUES_IN_KEYS = {
    "stored": (MERGE_CACHE, DV, 4, "values of size 12 are stored, and value_prefix is 4"),
    "not stored": (MERGE_CACHE, 0, None, "values of size 0 are stored, and value_prefix is 0"),
    "larger than a key": (MERGE_CACHE, 0, D + 1, "value_prefix is not the size of a value, or is larger than a key"),
    "apart": (ZIP_KEY, 0, 4, "values are a part of their keys, and the merge changes them apart"),
    "rotated": (KVSLIMMER, 0, 4, "values are a part of their keys, and the merge changes them apart"),
}


@pytest.mark.parametrize("name", VALUES_IN_KEYS)
def test_values_that_cannot_be_read_from_keys_are_an_error_of_the_run(name: str) -> None:
    attributes, size, prefix, message = VALUES_IN_KEYS[name]
    feed = state(np.random.default_rng(0), 2, C)
    feed["value"] = feed["value"][..., :size]
    with pytest.raises(Exception, match=message):
        merging({**attributes, "value_prefix": prefix}, {"value": ["B", "S", size]}).run(None, feed)


def test_random_nodes_never_end_the_process() -> None:
    command = [sys.executable, "-m", "tests.support.node_fuzz", "1", "1500"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"case {done.stderr[-2000:]}"
    opened, ran = (int(word) for word in done.stdout.split() if word.isdigit())
    assert 1500 > opened > ran > 200


def in_place(one: Any, feed: dict[str, Any], past: str) -> dict[str, Any]:
    """Run a session with every state tensor bound to one buffer as input and output, and return its outputs by name."""
    binding = one.io_binding()
    arrays = {name: array.copy() for name, array in feed.items()}
    names = [output.name for output in one.get_outputs()]
    outputs = {name: arrays[past + name.removeprefix("present_")] for name in names if name != "output"}
    if past:
        outputs["output"] = np.full((*feed["query"].shape[:3], feed["value"].shape[3]), np.nan, feed["query"].dtype)
    for bind, named in ((binding.bind_input, arrays), (binding.bind_output, outputs)):
        for name, array in named.items():
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    one.run_with_iobinding(binding)
    return outputs


def assert_same_in_place(one: Any, feed: dict[str, Any], past: str) -> dict[str, Any]:
    """Assert that one buffer and separate buffers give the same bits, and return the outputs in separate buffers."""
    separate = dict(zip([output.name for output in one.get_outputs()], one.run(None, feed), strict=True))
    bound = in_place(one, feed, past)
    assert {name: x.tobytes() for name, x in bound.items()} == {name: x.tobytes() for name, x in separate.items()}
    return separate


every_type = pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])


@every_type
@pytest.mark.parametrize("tokens", [0, 1, T])
@pytest.mark.parametrize("capacity", [C, 3000])
def test_attention_in_place_has_the_bits_of_separate_buffers(half: bool, tokens: int, capacity: int) -> None:
    feed = vote_attention_inputs(np.random.default_rng(1), 2, tokens, capacity - T - 1, capacity, half=half)
    feed["query_length"][0] = min(1, tokens)
    separate = assert_same_in_place(attention(half=half), feed, "past_")
    if tokens == 0:
        assert all(separate[f"present_{name}"].tobytes() == feed[f"past_{name}"].tobytes() for name in STATE)


@every_type
@pytest.mark.parametrize("attributes", [MERGE_CACHE, KEEPKV, KVSLIMMER], ids=lambda attributes: attributes["merge"])
def test_a_merge_in_place_has_the_bits_of_separate_buffers(half: bool, attributes: dict[str, Any]) -> None:
    assert_same_in_place(merging(attributes, half=half), state(np.random.default_rng(2), 2, C, half=half), "")


@pytest.mark.parametrize("op", ["VoteAttention", "MergeCache"])
def test_no_bit_depends_on_the_number_of_threads(op: str) -> None:
    rng, attends = np.random.default_rng(4), op == "VoteAttention"
    feed = vote_attention_inputs(rng, 3, T, 900, 1000) if attends else state(rng, 3, 1000, 1000)
    serialized = model(op, *((VOTE_ATTENTION, vote_attention_shapes()) if attends else (KEEPKV, merge_shapes())))
    one, four = (session(serialized, threads).run(None, feed) for threads in (1, 4))
    assert [x.tobytes() for x in one] == [x.tobytes() for x in four]


@every_type
@pytest.mark.parametrize(
    ("op", "attributes"), [("VoteAttention", KEEPING), ("MergeCache", GRKV_5), ("MergeCache", MATCHING)]
)
def test_a_ring_in_place_has_the_bits_of_separate_buffers(op: str, attributes: dict[str, Any], half: bool) -> None:
    feed = ring_feed(op, np.random.default_rng(2), half)
    separate = assert_same_in_place(ring_node(op, attributes, half=half), feed, RING_PREFIX[op])
    assert all(f"present_{name}" in separate for name in RING)


@every_type
def test_values_in_keys_have_the_bits_of_stored_values_in_place(half: bool) -> None:
    rng, size = np.random.default_rng(3), 6
    feed = vote_attention_inputs(rng, 2, T, C - T - 1, half=half)
    feed |= {"value": feed["key"][..., :size].copy(), "past_value": feed["past_key"][..., :size].copy()}
    without = feed | {"past_value": feed["past_value"][..., :0].copy()}
    shapes = {"value": ["B", H, "T", size]}
    stored = in_place(attention(shapes=shapes | {"past_value": ["B", "S", size]}, half=half), feed, "past_")
    read = attention({"value_prefix": size}, shapes | {"past_value": ["B", "S", 0]}, half=half)
    past = {name: stored[f"present_{name}"] for name in STATE}
    assert_values_in_keys(in_place(read, without, "past_"), stored, size)

    shapes = {"value": ["B", "S", size]}
    stored = in_place(merging(KEEPKV, shapes, half=half), past, "")
    read = merging({**KEEPKV, "value_prefix": size}, {"value": ["B", "S", 0]}, half=half)
    assert_values_in_keys(in_place(read, past | {"value": past["value"][..., :0].copy()}, ""), stored, size)


def assert_values_in_keys(read: dict[str, Any], stored: dict[str, Any], size: int) -> None:
    """Assert that both outputs have the same bits, and that the stored values are the first numbers of their keys."""
    assert read.pop("present_value").size == 0
    used = stored["present_votes"] > 0
    np.testing.assert_array_equal(stored.pop("present_value")[used], stored["present_key"][used][..., :size])
    assert {name: x.tobytes() for name, x in read.items()} == {name: x.tobytes() for name, x in stored.items()}
