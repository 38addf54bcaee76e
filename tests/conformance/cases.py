"""Seeded inputs of the two operators, for every kind of cache that the contract allows, and tolerances of comparisons.

For each profile (attributes, heads, sizes, dtype) the backend `onnx-function` traces for some seconds, so there are few
profiles with several features each. Scenarios (which lanes, how full) cost nothing and run for every profile.
"""

import math
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.methods.fitting import Fitting
from kvexport.methods.slots import Rotary, Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.vote_attention import VoteAttentionAttributes

Arrays = dict[str, np.ndarray]
LOG_EMA = Statistic("log_ema", 0.9)


@dataclass(frozen=True)
class Profile:
    """One set of attributes, sizes and types of VoteAttention. `heads` is (query, KV), `sizes` is (key, value)."""

    name: str
    attributes: VoteAttentionAttributes
    heads: tuple[int, int]
    sizes: tuple[int, int]
    dtype: str = "float32"
    sinks: bool = False


PROFILES = [
    Profile("keepkv", VoteAttentionAttributes(8**-0.5, 1.0, (LOG_EMA,)), (2, 2), (8, 8)),
    Profile("h2o-group2", VoteAttentionAttributes(0.25, 0.0, (Statistic("probability"),)), (4, 2), (16, 8)),
    Profile(
        "softcap-two-windowed-statistics-group4",
        VoteAttentionAttributes(8**-0.5, 0.6, (Statistic("probability", 0.98, 3, 1.2), Statistic("log_ema", 0.95, 4,
           1.2)), softcap=20.0), (4, 1), (8, 12),
    ),
    Profile(
        "sinks-sliding-window-group8",
        VoteAttentionAttributes(8**-0.5, 1.0, (LOG_EMA, Statistic(), Statistic("probability", 0.98)), sliding_window=7),
        (8, 1), (8, 8), sinks=True,
    ),
    Profile("half-group2", VoteAttentionAttributes(8**-0.5, 1.0, (LOG_EMA,)), (4, 2), (8, 16), "float16"),
    # Kernels have a separate path for few tokens without scores.
    Profile(
        "unscored-sinks-sliding-window-group3",
        VoteAttentionAttributes(8**-0.5, 1.0, (Statistic(), ), softcap=20.0, sliding_window=7), (6, 2), (8, 20),
        sinks=True,
    ),
    Profile("unscored-half-group2", VoteAttentionAttributes(8**-0.5, 0.5, (Statistic(),)), (4, 2), (24, 8), "float16"),
]  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    name: str
    capacity: int
    tokens: int
    lanes: tuple[tuple[int, int], ...]  # used slots and new tokens of each sequence
    seen: float = 1.5  # tokens before this call, as a multiple of the capacity
    peak: float = 6.0  # largest magnitude of a logit


SCENARIOS = [
    Scenario("empty", 12, 5, ((0, 5), (0, 3), (0, 1)), seen=0.0),
    Scenario("one-token-ragged", 12, 1, ((4, 1), (11, 1), (0, 1), (7, 0))),
    Scenario("idle-lanes", 12, 3, ((0, 0), (12, 0), (5, 0), (5, 3))),
    Scenario("chunk-to-the-brim", 12, 6, ((6, 6), (0, 6), (12, 0), (9, 2))),
    Scenario("chunk-as-long-as-the-cache", 8, 8, ((0, 8), (3, 5), (8, 0))),
    Scenario("far-beyond-the-budget", 12, 4, ((8, 4), (7, 2)), seen=5000.0),
    Scenario("logits-of-200", 12, 4, ((8, 4), (0, 4), (3, 2)), peak=200.0),
    # Kernels take slots in blocks of 64 or fewer, and have a separate path for whole blocks.
    Scenario("several-blocks", 200, 11, ((189, 11), (70, 11), (128, 5))),
    Scenario("several-blocks-logits-of-200", 200, 11, ((189, 11), (70, 11), (128, 5)), peak=200.0),
    # Kernels split the slots of a large cache. The fourth lane has 256 slots in one split and 4 in the next, which the
    # first new token does not see.
    Scenario("few-tokens-in-splits", 2100, 5, ((2095, 5), (1300, 3), (0, 5), (255, 5), (40, 0))),
]


def vote_attention_inputs(profile: Profile, scenario: Scenario) -> Arrays:
    rng = np.random.default_rng(zlib.crc32(f"{profile.name}/{scenario.name}".encode()))
    (query_heads, heads), (key_size, value_size) = profile.heads, profile.sizes
    batch, tokens, capacity = len(scenario.lanes), scenario.tokens, scenario.capacity
    used = np.array([lane[0] for lane in scenario.lanes])
    first = used + int(scenario.seen * capacity)
    statistics = profile.attributes.statistics
    past = {
        "key": rng.normal(size=(batch, heads, capacity, key_size)),
        "value": rng.normal(size=(batch, heads, capacity, value_size)),
        "votes": np.exp(rng.normal(size=(batch, heads, capacity))),
        "score": np.stack([_scores(rng, s, (batch, heads, capacity), scenario.peak) for s in statistics], axis=2),
        "position": np.zeros((batch, heads, capacity), np.int32),
    }
    for b in range(batch):
        for h in range(heads):
            past["position"][b, h] = _positions(rng, int(first[b]), capacity)
    past["votes"][np.arange(capacity) >= used[:, None, None].repeat(heads, 1)] = 0.0
    query = rng.normal(size=(batch, query_heads, tokens, key_size))
    key = rng.normal(size=(batch, heads, tokens, key_size))
    every_key = np.concatenate([past["key"], key], axis=2).repeat(query_heads // heads, axis=1)
    query *= scenario.peak / np.abs(query @ every_key.swapaxes(-1, -2) * profile.attributes.scale).max()
    floats = {"query": query, "key": key, "value": rng.normal(size=(batch, heads, tokens, value_size))}
    floats |= {"past_key": past["key"], "past_value": past["value"]}
    inputs = {name: x.astype(profile.dtype) for name, x in floats.items()}
    inputs |= {"past_votes": past["votes"].astype(np.float32), "past_score": past["score"].astype(np.float32)}
    inputs |= {"past_position": past["position"], "position": first[:, None] + np.arange(tokens)}
    inputs["query_length"] = np.array([[lane[1]] for lane in scenario.lanes])
    if profile.sinks:
        inputs["sink_logits"] = rng.normal(size=query_heads).astype(np.float32)
    return inputs


def _scores(rng: np.random.Generator, statistic: Statistic, shape: tuple[int, ...], peak: float) -> np.ndarray:
    if statistic.kind == "probability":
        return rng.gamma(1.0, size=shape)
    return rng.uniform(-peak, peak, size=shape)


def _positions(rng: np.random.Generator, before: int, count: int) -> np.ndarray:
    """Return distinct positions, half of them among the latest. The others may be beyond a sliding window."""
    low = max(before - 3 * count, 0)
    pool = np.arange(low, max(before, count))
    return rng.permutation(rng.choice(pool, size=count, replace=False))


@dataclass(frozen=True)
class MergeProfile:
    """One meaning of MergeCache without its budget, sinks and recent window."""

    name: str
    method: str
    parameters: dict[str, Any] = field(default_factory=dict)
    kv_heads: int = 2
    sizes: tuple[int, int] = (8, 8)
    dtype: str = "float32"
    sliding_window: int = 0
    rotary: Rotary = field(default_factory=Rotary)

    def build_method(self) -> Method:
        return all_methods()[self.method](**self.parameters)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return self.build_method().statistics

    def attributes(self, budget: int) -> MergeCacheAttributes:
        return MergeCacheAttributes(self.build_method(), budget, SINKS, RECENT, self.sliding_window, self.rotary)


SINKS, RECENT = 2, 3
# Powers of two make the float32 product with a position exact.
PARTLY = Rotary((1.0, 0.25, 0.03125))  # six of eight dimensions
INTERLEAVED = Rotary((1.0, 0.5, 0.125), interleaved=True)
BY_PLACE = Rotary((1.0, 0.25, 0.03125), cache_positions=True)
MERGE_PROFILES = [
    MergeProfile("full-sliding-window", "full", sizes=(8, 12), sliding_window=9),
    MergeProfile("streaming", "streaming"),
    MergeProfile("h2o", "h2o", sizes=(16, 8), sliding_window=14),
    MergeProfile("keepkv-key-evict", "keepkv", {"zip": "key", "order": "evict-first"}),
    MergeProfile("keepkv-vote-evict", "keepkv", {"zip": "vote", "order": "evict-first"}),
    MergeProfile("keepkv-key-merge-first", "keepkv", {"zip": "key", "order": "merge-first"}),
    MergeProfile(
        "keepkv-mean-merge-first", "keepkv", {"zip": "mean", "order": "merge-first", "threshold": 0.6, "pool": 1},
    ),
    MergeProfile(
        "keepkv-vote-merge-first-half", "keepkv", {"zip": "vote", "order": "merge-first"}, sizes=(8, 16),
        dtype="float16",
    ),
    MergeProfile("keepkv-on-snapkv", "keepkv", {"selector": "snapkv", "zip": "vote"}),
    MergeProfile("ballot", "ballot", {"zip": "vote"}, sizes=(8, 12)),
    MergeProfile("ballot-sliding-window", "ballot", sizes=(8, 12), sliding_window=30),
    MergeProfile("ballot-least-attended", "ballot", {"order": "least-attended", "votes_max": 1e30}),
    MergeProfile("ballot-small-pool", "ballot", {"pool": 2, "attention": 0.0, "votes_max": 1e30}, sizes=(12, 8)),
    MergeProfile(
        "ballot-count-on-h2o-half", "ballot", {"zip": "count", "selector": "h2o", "votes_max": 1e30}, dtype="float16",
    ),
    MergeProfile("ballot-bounded", "ballot", {"votes_max": 2.5}),
    MergeProfile("zeromerge", "zeromerge", {"residual": 0.5}, sizes=(8, 12)),
    MergeProfile("kvslimmer-partly-turned", "kvslimmer", {"tau": 0.3}, sizes=(8, 12), rotary=PARTLY),
    MergeProfile("kvmerger", "kvmerger", {"heavy": 0.2, "threshold": 0.6}, sizes=(8, 12)),
    MergeProfile(
        "kvmerger-set-size-on-snapkv-half", "kvmerger", {"value_scale": "set_size", "sigma": 5.0, "selector": "snapkv"},
        dtype="float16",
    ),
    MergeProfile("cam", "cam", {"receivers": 3}, sizes=(8, 12)),
    MergeProfile("grkv-places", "grkv", {"queries": 6, "ridge": 0.2, "change_max": 0.4}, sizes=(8, 8), rotary=BY_PLACE),
    MergeProfile(
        "attention-matching-half", "attention_matching", {"queries": 6, "ridge": 0.2, "steps": 3}, dtype="float16",
        sliding_window=30,
    ),
    MergeProfile(
        "attention-matching-after-ballot", "attention_matching", {"queries": 6, "ridge": 0.2, "after": "ballot"},
    ),
    MergeProfile("d2o", "d2o", {"selector": "h2o"}, sizes=(8, 12)),
    MergeProfile(
        "asymkv-interleaved-shared", "asymkv", {"share_pairs": True, "selector": "pyramidinfer"}, rotary=INTERLEAVED,
    ),
    MergeProfile("ballot-places", "ballot", sizes=(8, 12), rotary=BY_PLACE),
    MergeProfile(
        "keepkv-places-interleaved-half", "keepkv", dtype="float16", rotary=replace(INTERLEAVED, cache_positions=True),
    ),
    MergeProfile("kvslimmer-places", "kvslimmer", {"tau": 0.3}, rotary=BY_PLACE),
]  # fmt: skip
# Every method without a profile above is tested with its default parameters.
MERGE_PROFILES += [
    MergeProfile(name, name) for name in all_methods() if name not in {profile.method for profile in MERGE_PROFILES}
]


@dataclass(frozen=True)
class MergeScenario:
    name: str
    capacity: int
    budget: int
    used: tuple[tuple[int, int], ...]  # used slots of each sequence and KV head
    seen: float = 3.0  # position of the last token, as a multiple of the capacity
    peak: float = 4.0  # largest magnitude of a logit


MERGE_SCENARIOS = [
    MergeScenario("within-the-budget", 16, 12, ((12, 12), (0, 0), (5, 3))),
    MergeScenario("one-over", 13, 12, ((13, 13), (12, 12), (13, 12))),
    MergeScenario("ragged-over-the-budget", 24, 12, ((24, 24), (19, 17), (12, 13), (0, 0), (4, 24))),
    MergeScenario("one-slot-is-free", 16, SINKS + RECENT + 1, ((16, 16), (9, 5), (0, 0))),
    MergeScenario("nothing-seen-twice", 16, 12, ((16, 16), (14, 14)), seen=1.0),
    MergeScenario("far-beyond-the-budget", 24, 12, ((24, 24), (15, 15)), seen=5000.0),
    MergeScenario("logits-of-200", 24, 12, ((24, 24), (17, 17)), peak=200.0),
]


def merge_cache_state(
    profile: MergeProfile, scenario: MergeScenario, statistics: tuple[Statistic, ...] | None = None
) -> Arrays:
    """Return a state for MergeCache whose scores are far apart, so that rounding cannot change which slots are evicted.

    Keys lie in bundles, so that cosines fall on both sides of every threshold, but not near one. `statistics` replace
    those of the profile.
    """
    rng = np.random.default_rng(zlib.crc32(f"{profile.name}/{scenario.name}".encode()))
    batch, heads, capacity = len(scenario.used), profile.kv_heads, scenario.capacity
    statistics = profile.statistics if statistics is None else statistics
    state = {
        "key": np.zeros((batch, heads, capacity, profile.sizes[0]), profile.dtype),
        "value": rng.normal(size=(batch, heads, capacity, profile.sizes[1])).astype(profile.dtype),
        "votes": np.zeros((batch, heads, capacity), np.float32),
        "score": np.zeros((batch, heads, len(statistics), capacity), np.float32),
        "position": np.zeros((batch, heads, capacity), np.int32),
    }
    for b in range(batch):
        for h in range(heads):
            used, now = scenario.used[b][h], max(int(scenario.seen * capacity), capacity) - 1
            position = np.sort(rng.choice(np.arange(SINKS, now), size=max(capacity - SINKS - 1, 0), replace=False))
            position = np.concatenate([np.arange(SINKS), position, [now]])
            order = (
                np.concatenate([rng.permutation(np.r_[: used - 1, capacity - 1]), np.arange(used - 1, capacity - 1)])
                if used
                else ...
            )
            state["position"][b, h] = position[order]
            state["votes"][b, h, :used] = np.where(
                rng.random(used) < 0.5, rng.integers(1, 4, used), np.exp(rng.normal(size=used))
            )
            logit = rng.permutation(np.linspace(-scenario.peak, scenario.peak, capacity)) + rng.uniform(
                0.0, 0.1 * scenario.peak / capacity
            )
            n = now - state["position"][b, h] + 1
            for k, statistic in enumerate(statistics):
                log_ema = statistic.kind == "log_ema"
                shuffled = logit if k == 0 else rng.permutation(logit)
                corrected = (
                    shuffled + np.log1p(-(statistic.decay**n)) if log_ema else rng.permutation(np.exp(logit / 4))
                )
                state["score"][b, h, k] = corrected
            state["key"][b, h] = _bundles(rng, capacity, profile)
    return state | _own_state(profile, scenario, state)


def _own_state(profile: MergeProfile, scenario: MergeScenario, state: Arrays) -> Arrays:
    """Return the reference queries of a method that fits, and nothing for other methods."""
    if not isinstance(method := profile.build_method(), Fitting):
        return {}
    rng = np.random.default_rng(5)
    batch, heads, capacity = state["votes"].shape
    query = rng.normal(size=(batch, heads, method.queries, profile.sizes[0]))
    query *= scenario.peak / np.abs(query @ state["key"].astype(np.float64).swapaxes(-1, -2)).max()
    back = np.sort(rng.integers(0, capacity // 2, (batch, heads, method.queries)), axis=-1)[..., ::-1]
    seen = state["position"].max(-1, keepdims=True) + 1 - back
    query[::2, :, 0], seen[::2, :, 0] = 0.0, 0
    return {"query": query.astype(np.float32), "query_seen": seen.astype(np.int32)}


def _bundles(rng: np.random.Generator, count: int, profile: MergeProfile) -> np.ndarray:
    threshold = float(profile.parameters.get("threshold", 0.8))
    while True:
        centre = rng.normal(size=(3, profile.sizes[0]))
        key = (centre[rng.integers(0, 3, count)] + 0.45 * rng.normal(size=(count, profile.sizes[0]))).astype(
            profile.dtype
        )
        unit = key.astype(np.float64)
        unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
        if np.abs(unit @ unit.T - threshold).min() > 1e-5:
            return key


SHARES = (1.0, 0.5, 1.5)  # of a scenario's slots and used slots, for each KV head


def heads_of(profile: Profile, scenario: Scenario) -> list[Arrays]:
    """Return the inputs of VoteAttention for each KV head. Heads share the positions and lengths of the new tokens."""
    one = replace(profile, heads=(profile.heads[0] // profile.heads[1], 1))
    heads = []
    for h, share in enumerate(SHARES):
        capacity = max(scenario.tokens, int(share * scenario.capacity))
        lanes = tuple((min(int(share * used), capacity - new), new) for used, new in scenario.lanes)
        own = replace(scenario, name=f"{scenario.name}-{h}", capacity=capacity, lanes=lanes)
        heads.append(vote_attention_inputs(one, own))
    position = np.max([inputs["position"] for inputs in heads], axis=0)
    return [inputs | {"position": position} for inputs in heads]


def states_of(profile: MergeProfile, scenario: MergeScenario) -> tuple[list[Arrays], list[MergeCacheAttributes]]:
    one, states, attributes = replace(profile, kv_heads=1), [], []
    for h, share in enumerate(SHARES):
        budget = max(int(share * scenario.budget), h + RECENT + SINKS)
        capacity = max(int(share * scenario.capacity), budget + 1)
        used = tuple((min(int(share * x[h % 2]), capacity),) for x in scenario.used)
        name = f"{scenario.name}-head-{h}"
        states.append(merge_cache_state(one, replace(scenario, name=name, capacity=capacity, budget=budget, used=used)))
        own = one.attributes(capacity if profile.method == "full" else budget)
        attributes.append(replace(own, recent=RECENT + h))
    return states, attributes


def single_precision(peak: float) -> float:
    """Return the relative tolerance of float32 results: 1e-5, or the rounding error of a logit of this magnitude.

    float32 represents a logit M up to M * 2^-24; a product, a bias and a logarithm round it a few times each.
    """
    return max(1e-5, 4.0 * math.ldexp(peak, -24))


def stored_precision(dtype: str, peak: float) -> float:
    return 2e-3 if dtype == "float16" else single_precision(peak)
