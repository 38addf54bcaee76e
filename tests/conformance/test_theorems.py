"""The theorems of the methods' papers, tested on every backend: closed forms, bounds and conserved quantities.

The tests compute attention before and after a merge in float64, from its definition. Heads have two sinks and three
recent slots (`cases.SINKS`, `RECENT`). Both heads of a profile have random caches of their own.
"""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexport.ops.vote_attention import LOG_ZERO
from tests.conformance.backends import Backend, reached
from tests.conformance.cases import MERGE_PROFILES, RECENT, SINKS, MergeProfile, MergeScenario, merge_cache_state
from tests.conformance.comparison import by_position, state_of

Arrays = dict[str, np.ndarray]
theorem = settings(max_examples=12, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
PROFILE = {profile.name: profile for profile in MERGE_PROFILES}


def on(*names: str) -> Any:
    """Return a decorator that runs a test with these profiles on every backend that has a kernel for them."""
    pairs = [(backend, PROFILE[name]) for backend in reached() for name in names]
    return pytest.mark.parametrize(
        ("backend", "profile"),
        [pytest.param(b, p, id=f"{p.name}-{b.name}") for b, p in pairs if b.lacks(p.attributes(1)) is None],
    )


def head_of(
    profile: MergeProfile, key: np.ndarray, value: np.ndarray, *, votes: Any = None, logit: Any = None, mass: Any = None
) -> Arrays:
    count = len(key)
    position = np.arange(count)
    score = np.zeros((len(profile.statistics), count))
    for k, statistic in enumerate(profile.statistics):
        if statistic.kind == "log_ema":
            score[k] = (np.zeros(count) if logit is None else logit) + np.log1p(
                -(statistic.decay ** (count - position))
            )
        else:
            score[k] = np.ones(count) if mass is None else mass
    return {
        "key": key,
        "value": value,
        "votes": np.ones(count) if votes is None else np.asarray(votes),
        "score": score,
        "position": position,
    }


def merged(backend: Backend, profile: MergeProfile, heads: list[Arrays], leave: int) -> list[Arrays]:
    """Return the heads of one sequence after MergeCache has evicted `leave` slots."""
    types = {"key": profile.dtype, "value": profile.dtype, "votes": "float32", "score": "float32", "position": "int32"}
    state = {name: np.stack([head[name] for head in heads])[None].astype(types[name]) for name in types}
    result = state_of(backend.merge_cache(state, profile.attributes(len(heads[0]["key"]) - leave)))
    return [{name: x.astype(np.float64) for name, x in by_position(result, 0, h).items()} for h in range(len(heads))]


def masses(head: Arrays, query: np.ndarray, alpha: float) -> np.ndarray:
    return head["votes"] ** alpha * np.exp(head["key"].astype(np.float64) @ query)


def attended(head: Arrays, query: np.ndarray, alpha: float) -> np.ndarray:
    mass = masses(head, query, alpha)
    output: np.ndarray = mass @ head["value"] / mass.sum()
    return output


def random_heads(
    profile: MergeProfile, seed: int, free: int, *, spread: float = 1.0, error: float = 0.0
) -> tuple[list[Arrays], np.ndarray]:
    """Return heads whose keys lie within `spread` of one centre, and the query whose logits are their scores."""
    rng = np.random.default_rng(seed)
    size, value_size = profile.sizes
    count = SINKS + free + RECENT
    query, heads = rng.normal(size=size) / math.sqrt(size), []
    for _ in range(profile.kv_heads):
        key = 2.0 * np.ones(size) + spread * rng.normal(size=(count, size))
        logit = key @ query + np.log1p(error * rng.uniform(-1.0, 1.0, count))
        votes, mass = np.exp(0.5 * rng.normal(size=count)), rng.gamma(1.0, size=count)
        heads.append(head_of(profile, key, rng.normal(size=(count, value_size)), votes=votes, logit=logit, mass=mass))
    return heads, query


# 1 Zero perturbation


@on("keepkv-vote-evict", "ballot")
@theorem
@given(seed=seeds, leave=st.integers(1, 8))
def test_fractional_votes_do_not_change_the_current_querys_output(
    backend: Backend, profile: MergeProfile, seed: int, leave: int
) -> None:
    heads, query = random_heads(profile, seed, 9, spread=0.3)
    for before, after in zip(heads, merged(backend, profile, heads, leave), strict=True):
        np.testing.assert_allclose(attended(after, query, 1.0), attended(before, query, 1.0), rtol=2e-5, atol=2e-5)


@on("keepkv-key-evict")
@theorem
@given(seed=seeds, leave=st.integers(1, 8))
def test_guarded_key_factors_do_not_change_the_current_querys_output(
    backend: Backend, profile: MergeProfile, seed: int, leave: int
) -> None:
    heads, query = random_heads(profile, seed, 9, spread=0.3)
    for before, after in zip(heads, merged(backend, profile, heads, leave), strict=True):
        # Eq. 7 divides by a logit, which limits the precision of float32.
        np.testing.assert_allclose(attended(after, query, 1.0), attended(before, query, 1.0), rtol=2e-3, atol=2e-3)


@on("keepkv-mean-merge-first", "zeromerge", "kvslimmer-partly-turned", "kvmerger", "d2o", "h2o")
def test_other_rules_change_the_attention_output(backend: Backend, profile: MergeProfile) -> None:
    heads, query = random_heads(profile, 1, 9, spread=0.3)
    alpha = profile.build_method().vote_exponent
    for before, after in zip(heads, merged(backend, profile, heads, 4), strict=True):
        assert np.abs(attended(after, query, alpha) - attended(before, query, alpha)).max() > 1e-4


# 2 The key factor


@on("keepkv-key-evict")
@pytest.mark.parametrize(
    ("logits", "factor"), [((-1.0, -3.0), 1.264706), ((1.0, -3.0), None), ((2.5, 2.5), 1.0), ((0.0, 0.0), 1.0)]
)
def test_key_factors_within_the_limit_scale_the_key(
    backend: Backend, profile: MergeProfile, logits: Any, factor: float | None
) -> None:
    head, _ = random_heads(profile, 2, 2)
    for h in head:
        h["key"][2:4] = np.ones(8) + 0.05 * np.eye(8)[:2]
        h["votes"][2:4] = 1.0
        h["score"][0, 2:4] = np.asarray(logits) + np.log1p(-(0.9 ** (7.0 - h["position"][2:4])))
    weight = np.exp(logits) / np.exp(logits).sum()
    for before, after in zip(head, merged(backend, profile, head, 1), strict=True):
        mean = weight @ before["key"][2:4]
        np.testing.assert_allclose(after["key"][2], mean * (factor or 1.0), rtol=1e-5)
        if factor is None:  # 0.350198 is outside [1/2, 2]: fractional votes instead
            log_mean = math.log(np.exp(logits).sum())
            assert after["votes"][2] == pytest.approx(math.exp(log_mean - weight @ logits), rel=1e-5)
        else:
            assert after["votes"][2] == 2.0


# 3 Equal pairs, 4 attention sag


def twins(profile: MergeProfile, seed: int) -> list[Arrays]:
    """Return heads with three pairs of equal keys and values between the sinks and the recent slots.

    The keys have one norm, and lie in dimensions that no rotary embedding rotates.
    """
    rng = np.random.default_rng(seed)
    size, value_size = profile.sizes
    turned = 2 * len(profile.rotary.inverse_frequencies)
    base = rng.normal(size=(SINKS + 3 + RECENT, size)) * (np.arange(size) >= turned)
    base /= np.linalg.norm(base, axis=-1, keepdims=True)
    angle = np.arange(3) * 2.0  # far apart, whatever the seed
    base[SINKS : SINKS + 3] = 0.0
    base[SINKS : SINKS + 3, -2:] = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    double = np.r_[:SINKS, np.repeat(np.arange(SINKS, SINKS + 3), 2), SINKS + 3 : len(base)]
    value = rng.normal(size=(len(base), value_size))[double]
    mass, logit = rng.gamma(1.0, size=len(base))[double], rng.normal(size=len(base))[double]
    return [head_of(profile, base[double], value, logit=logit, mass=mass) for _ in range(profile.kv_heads)]


@on(
    "keepkv-key-evict",
    "keepkv-vote-evict",
    "keepkv-mean-merge-first",
    "ballot",
    "zeromerge",
    "asymkv-interleaved-shared",
)
@theorem
@given(seed=seeds)
def test_equal_pairs_merge_without_any_change_for_every_query(
    backend: Backend, profile: MergeProfile, seed: int
) -> None:
    heads = twins(profile, seed)
    for before, after in zip(heads, merged(backend, profile, heads, 1), strict=True):
        assert after["votes"].max() == pytest.approx(2.0, rel=1e-5)
        for query in np.random.default_rng(seed).normal(size=(4, profile.sizes[0])):
            np.testing.assert_allclose(attended(after, query, 1.0), attended(before, query, 1.0), rtol=1e-5, atol=1e-5)


@on("h2o", "d2o", "kvmerger")
def test_equal_pairs_lose_attention_without_votes(backend: Backend, profile: MergeProfile) -> None:
    heads = twins(profile, 3)
    query = np.random.default_rng(3).normal(size=profile.sizes[0])
    for before, after in zip(heads, merged(backend, profile, heads, 1), strict=True):
        assert np.abs(attended(after, query, 0.0) - attended(before, query, 0.0)).max() > 1e-3
        # A pair has 2 s / Z of the attention before its merge, and s / (Z - s) afterwards.
        s, z = masses(before, query, 0.0), masses(before, query, 0.0).sum()
        (gone,) = np.setdiff1d(before["position"], after["position"])
        (rest,) = np.flatnonzero((after["key"] == before["key"][gone].astype(np.float32)).all(-1))
        assert masses(after, query, 0.0)[rest] / masses(after, query, 0.0).sum() == pytest.approx(
            s[gone] / (z - s[gone]), rel=1e-5
        )


@on("keepkv-mean-merge-first", "d2o")
@theorem
@given(seed=seeds)
def test_a_convex_merge_without_votes_loses_attention(backend: Backend, profile: MergeProfile, seed: int) -> None:
    heads, query = random_heads(profile, seed, 9, spread=0.3)
    for before, after in zip(heads, merged(backend, profile, heads, 1), strict=True):
        changed = ~np.isin(after["votes"], before["votes"].astype(np.float32))
        assert changed.sum() == 1
        others = masses(after, query, 0.0)[~changed].sum()
        pair = masses(before, query, 0.0).sum() - others
        assert masses(after, query, 0.0)[changed][0] < pair


# 5 ZeroMerge


@on("zeromerge")
@theorem
@given(seed=seeds, alpha=st.floats(0.05, 1.0), leave=st.integers(1, 8))
def test_unmerged_tokens_keep_at_least_their_probability(
    backend: Backend, profile: MergeProfile, seed: int, alpha: float, leave: int
) -> None:
    heads, query = random_heads(profile, seed, 9)
    for head in heads:
        head["votes"][:] = 1.0
    for before, after in zip(heads, merged(backend, profile, heads, leave), strict=True):
        share = masses(before, query, 1.0) / masses(before, query, 1.0).sum()
        now = masses(after, query, alpha) / masses(after, query, alpha).sum()
        alone = after["votes"] == 1.0
        assert alone.any()
        assert (now[alone] >= share[after["position"][alone].astype(int)] * (1 - 1e-5)).all()


# 6 AsymKV, 7 KVSlimmer


@on("asymkv-interleaved-shared", "kvslimmer-partly-turned")
@theorem
@given(seed=seeds, leave=st.integers(1, 4))
def test_neighbouring_pairs_add_counts_and_summed_values(
    backend: Backend, profile: MergeProfile, seed: int, leave: int
) -> None:
    heads, _ = random_heads(profile, seed, 9)
    for head in heads:
        head["votes"] = np.random.default_rng(seed).integers(1, 9, len(head["votes"])).astype(float)
    for before, after in zip(heads, merged(backend, profile, heads, leave), strict=True):
        assert after["votes"].sum() == before["votes"].sum()
        total = after["votes"] @ after["value"]
        np.testing.assert_allclose(total, before["votes"] @ before["value"], rtol=1e-5, atol=1e-4)


@on("kvslimmer-partly-turned")
@pytest.mark.parametrize("attention", [(0.1, 0.2), (1 / 6, 1 / 3)], ids=["inside", "a1+a2=1/2"])
def test_equal_residuals_weigh_by_attention(
    backend: Backend, profile: MergeProfile, attention: tuple[float, float]
) -> None:
    heads, _ = random_heads(profile, 5, 2)
    for head in heads:
        head["score"][0] = (1.0 - sum(attention)) / 5
        head["score"][0, 2:4] = attention
        head["value"][3] = head["value"][2]
        head["key"][2:4, :6] = 0.0  # the dimensions that are rotated
    for before, after in zip(heads, merged(backend, profile, heads, 1), strict=True):
        np.testing.assert_allclose(after["key"][2], before["key"][2] / 3 + before["key"][3] * 2 / 3, rtol=1e-5)


@on("kvslimmer-partly-turned", "asymkv-interleaved-shared")
def test_keys_merge_in_the_younger_ones_frame(backend: Backend, profile: MergeProfile) -> None:
    """A key at two positions merges to the key at the younger position, whatever the weights."""
    heads, _ = random_heads(profile, 6, 2)
    frequencies = np.asarray(profile.rotary.inverse_frequencies)
    for head in heads:
        plain = np.random.default_rng(7).normal(size=8)
        for p in (2, 3):
            key = plain.copy()
            for f, frequency in enumerate(frequencies):
                i, j = (2 * f, 2 * f + 1) if profile.rotary.interleaved else (f, f + len(frequencies))
                c, s = math.cos(p * frequency), math.sin(p * frequency)
                key[i], key[j] = plain[i] * c - plain[j] * s, plain[j] * c + plain[i] * s
            head["key"][p] = key
    for before, after in zip(heads, merged(backend, profile, heads, 1), strict=True):
        np.testing.assert_allclose(after["key"][2], before["key"][3], rtol=1e-5, atol=1e-6)


# 8 KVMerger


@on("kvmerger")
def test_gaussian_weights_of_two_equal_distances(backend: Backend, profile: MergeProfile) -> None:
    heads, _ = random_heads(profile, 8, 5)
    basis, d = np.eye(8), 0.3
    for head in heads:
        head["votes"][:] = 1.0
        head["score"][0] = [
            1,
            1,
            1,
            2,
            3,
            9,
            1.5,
            1,
            1,
            1,
        ]  # slot 5 is the only heavy hitter; slots 2 to 4 join, and 4 is their pivot
        pivot = 2 * basis[0]
        head["key"][2:5] = [pivot + d * basis[1], pivot + d * basis[2], pivot]
        head["key"][5:7] = [-basis[3], -basis[4]]
    for after in merged(backend, profile, heads, 2):
        (r,) = np.flatnonzero(after["votes"] == 3.0)
        g = math.exp(-9 / 4)
        np.testing.assert_allclose(
            after["key"][r], 2 * basis[0] + g / (1 + 2 * g) * d * (basis[1] + basis[2]), rtol=1e-5, atol=1e-6
        )
        assert 1 / (1 + 2 * g) == pytest.approx(0.825901, abs=1e-6)


@on("kvmerger")
def test_equal_keys_merge_by_their_plain_mean(backend: Backend, profile: MergeProfile) -> None:
    heads = twins(profile, 9)
    for head in heads:
        head["value"] = np.random.default_rng(9).normal(size=head["value"].shape)
    for before, after in zip(heads, merged(backend, profile, heads, 1), strict=True):
        (r,) = np.flatnonzero(after["votes"] == 2.0)
        pair = [i for i in range(len(before["key"])) if np.allclose(before["key"][i], after["key"][r], atol=1e-6)]
        assert len(pair) == 2
        np.testing.assert_allclose(after["value"][r], before["value"][pair].mean(0), rtol=1e-5)


# 10 Conservation


BINARY = MergeScenario("binary-votes", 24, 12, ((24, 24), (19, 17)))
UNBOUNDED = [p for p in MERGE_PROFILES if p.method != "full" and getattr(p.build_method(), "votes_max", 1e30) == 1e30]
# Votes that are fitted, or made fractional by a zip, do not stand for whole tokens.
WHOLE = [
    p
    for p in UNBOUNDED
    if getattr(p.build_method(), "zip", "mean") in ("mean", "count") and p.method != "attention_matching"
]


@on(*(profile.name for profile in WHOLE))
def test_no_token_is_counted_twice_and_ballot_and_zeromerge_lose_none(backend: Backend, profile: MergeProfile) -> None:
    """Votes are powers of two, so the votes of a slot tell which tokens it stands for."""
    state = merge_cache_state(profile, BINARY)
    for b, row in enumerate(BINARY.used):
        for h, used in enumerate(row):
            state["votes"][b, h, :used] = 2.0 ** np.arange(used)
    after = state_of(backend.merge_cache(state, profile.attributes(BINARY.budget)))
    for b, row in enumerate(BINARY.used):
        for h, used in enumerate(row):
            stand_for = [int(v) for v in by_position(after, b, h)["votes"]]
            now = int(state["position"][b, h, :used].max())
            seen = (state["position"][b, h, :used] > now - (profile.sliding_window or now + 1)).sum()
            assert len(stand_for) == min(seen, BINARY.budget)
            assert sum(stand_for) == np.bitwise_or.reduce(stand_for), "a token counts in two slots"
            if (profile.method in ("ballot", "zeromerge")) and not profile.sliding_window:
                assert sum(stand_for) == 2**used - 1, "a vote was lost"


@on("keepkv-key-evict", "keepkv-vote-evict", "ballot")
@theorem
@given(seed=seeds, leave=st.integers(1, 6))
def test_slots_that_no_query_has_seen_merge_by_their_votes(
    backend: Backend, profile: MergeProfile, seed: int, leave: int
) -> None:
    heads, _ = random_heads(profile, seed, 9, spread=0.3)
    for head in heads:
        head["score"][-1] = LOG_ZERO
    for before, after in zip(heads, merged(backend, profile, heads, leave), strict=True):
        assert after["votes"].sum() == pytest.approx(before["votes"].sum(), rel=1e-5)
        for name in ("key", "value"):
            np.testing.assert_allclose(
                after["votes"] @ after[name], before["votes"] @ before[name], rtol=1e-4, atol=1e-4
            )
        assert (after["score"][-1] == np.float32(LOG_ZERO)).all()


# 11 KeepKV's Theorem 5


@on("keepkv-vote-evict", "ballot")
@theorem
@given(seed=seeds, leave=st.integers(1, 6), error=st.floats(0.0, 0.3))
def test_the_perturbation_is_within_its_bound(
    backend: Backend, profile: MergeProfile, seed: int, leave: int, error: float
) -> None:
    """The perturbation is within ``|o' - o| <= 2 eps (1 + eps) gamma / (1 - eps)^2``.

    eps is the largest relative error of the predicted scores, of all slots and of the merged one (which predicts ``sum
    w / p``). gamma is ``sum A_i |v_i - o|`` over all slots that merged.
    """
    # One target, because the result does not show which slot merged into which target.
    leave = 1 if profile.build_method().recent_receives else leave
    heads, query = random_heads(profile, seed, leave + 1, spread=0.3, error=error)
    k = len(profile.statistics) - 1
    for before, after in zip(heads, merged(backend, profile, heads, leave), strict=True):
        seen = len(before["key"]) - before["position"]
        predicted = np.exp(before["score"][k] - np.log1p(-(profile.statistics[k].decay ** seen)))
        stays = np.isin(before["position"], after["position"])
        untouched = stays & (before["votes"].astype(np.float32) == _at(after, before["position"], "votes"))
        untouched &= (before["key"].astype(np.float32) == _at(after, before["position"], "key")).all(-1)
        actual = np.exp(before["key"] @ query)
        errors = list(np.abs(actual / predicted - 1.0))
        mass = masses(before, query, 1.0)
        output = mass @ before["value"] / mass.sum()
        gamma = (mass / mass.sum() * np.linalg.norm(before["value"] - output, axis=-1))[~untouched].sum()
        into = np.isin(after["position"], before["position"][~untouched])
        total = (before["votes"] * predicted)[~untouched].sum()
        assert into.sum() == 1
        errors.append(abs(float(np.exp(after["key"][into][0] @ query)) * after["votes"][into][0] / total - 1.0))
        eps = max(errors)
        assert eps < 1.0
        assert (
            np.linalg.norm(attended(after, query, 1.0) - output) <= 2 * eps * (1 + eps) * gamma / (1 - eps) ** 2 + 2e-5
        )


def _at(head: Arrays, positions: np.ndarray, name: str) -> np.ndarray:
    """Return the rows of `head` at these positions, nan where it has none."""
    rows = {int(p): x for p, x in zip(head["position"], head[name], strict=True)}
    return np.stack([rows.get(int(p), np.full(head[name].shape[1:], np.nan)) for p in positions])
