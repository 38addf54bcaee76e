"""Tests of merge policies: which methods are policies, two invented ones, and random ones."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import kvexport.methods
from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.onnx_function import merge_cache_node_attributes
from kvexport.schema.policy import POLICY, Fit, MergePolicy
from plugins.building import make
from tests.conformance.backends import Backend, CudaOnHost, NativeCpu, Torch, reached
from tests.conformance.cases import (
    MERGE_PROFILES,
    MERGE_SCENARIOS,
    PARTLY,
    RECENT,
    SINKS,
    MergeProfile,
    MergeScenario,
    merge_cache_state,
    single_precision,
    stored_precision,
)
from tests.conformance.comparison import assert_same_cache, state_of
from tests.support.tensorrt_harness import Harness, parsed, what_is_missing

Arrays = dict[str, np.ndarray]
# Why a method needs code of its own instead of a combination of the merge kernels' rules.
OWN_CODE = {
    "cam": "values are shared out to the next slots, which no merge into one target is",
    "d2o": "the gate is the mean of the call's own cosines",
    "kvmerger": "runs of neighbours merge around a pivot",
    "random": "the order is a hash of the position",
}
# The fields that distinguish the policies. A new method needs an entry in one of the two lists.
POLICIES = {
    "asymkv": {"select": "score", "merge": "pair"},
    "attention_matching": {"select": "attended", "fit": Fit("votes_and_values", 0.05, 0.1, 1.0, 8, 3.0)},
    "ballot": {"select": "mean", "order": "least_error", "merge": "zip", "measure": "distance", "mean_adds": True},
    "full": {},
    "grkv": {"select": "pooled", "pooled": 5, "fit": Fit("values", 0.05, 0.1, 0.0)},
    "h2o": {"select": "score"},
    "keepkv": {"select": "average", "order": "nearest", "merge": "zip", "zip": "vote", "threshold": 0.8},
    "kvslimmer": {"select": "score", "merge": "pair", "weigh": "hessian"},
    "pyramidinfer": {"select": "score"},
    "pyramidkv": {"select": "pooled", "pooled": 5},
    "snapkv": {"select": "pooled", "pooled": 5},
    "streaming": {"select": "position"},
    "zeromerge": {"select": "score", "merged_last": True, "merge": "running_mean", "measure": "dot"},
}


def test_every_method_is_a_policy_or_has_a_reason() -> None:
    policies = {name: method().policy() for name, method in all_methods().items()}
    assert {name for name, policy in policies.items() if policy is None} == OWN_CODE.keys()
    assert policies.keys() == OWN_CODE.keys() | POLICIES.keys()
    for name, fields in POLICIES.items():
        policy = policies[name]
        assert {field: getattr(policy, field) for field in fields} == fields, name
        # A method with a policy has no second definition of its meaning.
        kind = all_methods()[name]
        assert kind.merge is Method.merge, f"{name} has a policy and a merge of its own"
        keeps = {base for base in kind.__mro__ if "keep_score" in vars(base)}
        assert {base.__name__ for base in keeps} <= {"Method", "Merging"}, f"{name} has a keep_score of its own"


@pytest.mark.parametrize(("fields", "message"), [
    ({"votes_max": 0.5}, "votes_max is 0.5, and has to be at least 1"),
    ({"select": "age"}, "select is 'age'; known: position, score, average, pooled, mean, attended"),
    ({"weigh_decay": 1.0}, "weigh_decay is 1, and has to be above 0 and below 1"),
    ({"threshold": float("nan")}, "threshold is nan, and has to be a number"),
    ({"order": "nearest"}, "order is nearest, which needs merge to be zip or running_mean"),
    ({"order": "least_error", "merge": "zip"}, "order is least_error, which needs measure to be distance"),
    ({"merge": "pair", "merged_last": True}, "merge is pair, which needs merged_last to be false"),
    ({"select": "attended"}, "select is attended, which needs the reference queries of a fit"),
    ({"fit": Fit(ridge=0.0)}, "ridge is 0, and has to be above 0"),
])  # fmt: skip
def test_a_policy_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MergePolicy(**fields)


# ---- two invented methods ----

POOLED_ZIP = '''
"""SnapKV's selection with ballot's merge."""

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class PooledZip(Method):
    """Votes add up to a bound, in the nearest key."""

    name = "pooled_zip"
    summary = "pooled selection, zip by distance"
    source = "-"
    votes_max: float = 4.0

    @property
    def vote_exponent(self):
        return 1.0

    @property
    def statistics(self):
        return (Statistic("probability", 1.0, 16), Statistic("log_ema", 0.9))

    def policy(self):
        return MergePolicy(
            select="pooled", pooled=3, merge="zip", measure="distance", weigh_decay=0.9, votes_max=self.votes_max
        )
'''
MEAN_RUNNING = '''
"""The lowest mean probability merges into a running mean."""

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class MeanRunning(Method):
    """Every target may take slots in, those that merge nearest first."""

    name = "mean_running"
    summary = "mean selection, running mean"
    source = "-"

    @property
    def statistics(self):
        return (Statistic("probability"),)

    def policy(self):
        return MergePolicy(
            select="mean", order="nearest", eviction_pool=2, merge="running_mean", measure="cosine", threshold=0.3,
            residual=0.5, mean_adds=True,
        )
'''
MADE_UP = {"pooled_zip": POOLED_ZIP, "mean_running": MEAN_RUNNING}


@pytest.fixture(params=MADE_UP)
def made_up(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MergeProfile]:
    name: str = request.param
    (tmp_path / f"{name}.py").write_text(MADE_UP[name])
    monkeypatch.setattr(kvexport.methods, "__path__", [*kvexport.methods.__path__, str(tmp_path)])
    all_methods.cache_clear()
    yield MergeProfile(name, name, sizes=(8, 12))
    monkeypatch.undo()
    sys.modules.pop(f"kvexport.methods.{name}", None)
    all_methods.cache_clear()


def test_a_recombination_of_primitives_is_native_by_one_file_of_python(made_up: MergeProfile) -> None:
    """test_backends.py lists the other backends."""
    for scenario in MERGE_SCENARIOS:
        attributes, state = made_up.attributes(scenario.budget), merge_cache_state(made_up, scenario)
        right = state_of(Torch().merge_cache(state, attributes))
        single = single_precision(scenario.peak)
        for backend in reached():
            assert backend.lacks(attributes) is None, backend.name
            actual = state_of(backend.merge_cache(state, attributes))
            assert_same_cache(actual, right, made_up.statistics, single=single, stored=single)


def test_the_tensorrt_plugin_accepts_the_new_method(made_up: MergeProfile) -> None:
    if missing := what_is_missing():
        pytest.skip(missing)
    harness = Harness(make.build("tensorrt-harness"))
    fields = parsed(merge_cache_node_attributes([made_up.attributes(64)] * 2))
    assert harness.create("MergeCache", fields), harness.log()


# ---- any policy ----


class AnyPolicy(Method):
    name: ClassVar[str] = "any-policy"
    summary: ClassVar[str] = "-"
    source: ClassVar[str] = "-"
    compresses: ClassVar[bool] = True

    given: MergePolicy
    kept: tuple[Statistic, ...]

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return self.kept

    def policy(self) -> MergePolicy:
        return self.given


def any_policy(rng: random.Random) -> AnyPolicy:
    """Return a policy with random words, random numbers among a few, and the statistics that it needs."""
    words = {a.name: [word for word in a.words if word != "attended"] for a in POLICY if a.kind == "word"}
    fields: dict[str, Any] = {name: rng.choice(known) for name, known in words.items()}
    fields |= {"pooled": rng.choice([1, 3, 5]), "eviction_pool": rng.choice([1, 2, 4]), "tau": rng.choice([0.0, 0.3])}
    fields |= {"error_exponent": rng.choice([0.0, 0.5, 1.0]), "residual": rng.choice([0.2, 0.5, 1.0])}
    fields |= {"key_factor_max": rng.choice([2.0, np.inf]), "votes_max": rng.choice([2.5, np.inf])}
    fields["threshold"] = rng.choice([-1e38, 0.8 if fields["measure"] == "cosine" else -0.5])
    if fields["merge"] in ("drop", "pair"):
        fields["order"] = "lowest"
    if fields["order"] == "least_error":
        fields["measure"] = "distance"
    if fields["merge"] != "pair":
        fields["merged_last"] = rng.random() < 0.3
    first = "log_ema" if fields["select"] == "average" else "probability"
    last = {"zip": "log_ema", "pair": "probability"}.get(fields["merge"], first)
    fields["mean_adds"] = first == "probability" and rng.random() < 0.3
    kinds = [first] if first == last else [first, last]
    return AnyPolicy(given=MergePolicy(**fields), kept=tuple(Statistic(kind, 0.9) for kind in kinds))  # type: ignore[arg-type]


@cache
def any_case(seed: int) -> tuple[AnyPolicy, MergeCacheAttributes, Arrays, Arrays]:
    """Return a random policy, its call, a state, and PyTorch's result."""
    scenario = MergeScenario("any", 24, 14, ((24, 24), (19, 17), (15, 4)))
    profile = MergeProfile("any", "h2o", sizes=(8, 12))
    rng = random.Random(seed)
    method = any_policy(rng)
    rotary = PARTLY if method.given.merge == "pair" else profile.rotary
    attributes = MergeCacheAttributes(method, scenario.budget, SINKS, RECENT, rng.choice([0, 0, 40]), rotary)
    state = merge_cache_state(replace(profile, name=f"any-{seed}"), scenario, method.statistics)
    return method, attributes, state, state_of(Torch().merge_cache(state, attributes))


@pytest.mark.parametrize(
    "backend", [b for b in reached() if isinstance(b, NativeCpu | CudaOnHost)], ids=lambda b: b.name
)
def test_native_kernels_equal_pytorch_for_any_policy(backend: Backend) -> None:
    """Native kernels and PyTorch agree on 400 random policies, which cover every pair of words many times."""
    for seed in range(400):
        method, attributes, state, right = any_case(seed)
        actual = state_of(backend.merge_cache(state, attributes))
        try:
            assert_same_cache(actual, right, method.statistics, single=2e-5, stored=2e-5)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {method.given}") from error


@pytest.mark.parametrize("backend", [b for b in reached() if b.name.startswith("native")], ids=lambda b: b.name)
@pytest.mark.parametrize("name", ["grkv", "attention_matching"])
def test_queries_that_read_only_evicted_slots_are_read_again(backend: Backend, name: str) -> None:
    """A query that read only evicted slots reads the remaining slots after the merge.

    An evicted slot has e^190 times the mass of all others, so float32 holds nothing of the others' mass beside it.
    """
    method = all_methods()[name](queries=4, selector="h2o", change_max=10.0)
    profile = MergeProfile("lost", name, {"queries": 4, "selector": "h2o", "change_max": 10.0})
    state = merge_cache_state(profile, MergeScenario("lost", 24, 14, ((24, 24),)), method.statistics)
    evicted = int(state["position"][0, 0].argsort()[SINKS + 4])
    state["score"][0, :, 0, evicted] = -1.0
    state["votes"][:] = np.where(state["votes"] > 0, 1.0, 0.0)
    for h in range(2):
        query = state["query"][0, h]
        query[:] = query[1] / np.linalg.norm(query[1])
        state["key"][0, h, evicted] = 200.0 * query[1]
    state["query_seen"][:] = state["position"].max() + 1
    attributes = MergeCacheAttributes(method, 14, SINKS, RECENT)
    right = state_of(Torch().merge_cache(state, attributes))
    assert not (right["position"] == state["position"][0, 0, evicted]).any(), "the slot is evicted"
    assert not np.isin(right["value"][0, :, :14], state["value"]).all(), "the values of other slots replace it"
    actual = state_of(backend.merge_cache(state, attributes))
    assert_same_cache(actual, right, method.statistics, single=2e-5, stored=2e-5)


@pytest.mark.parametrize("backend", [b for b in reached() if b.name.startswith("native")], ids=lambda b: b.name)
@pytest.mark.parametrize(
    "profile", [p for p in MERGE_PROFILES if p.method == "attention_matching"], ids=lambda p: p.name
)
def test_heads_without_a_query_keep_their_values(backend: Backend, profile: MergeProfile) -> None:
    scenario = next(s for s in MERGE_SCENARIOS if s.name == "ragged-over-the-budget")
    attributes, state = profile.attributes(scenario.budget), merge_cache_state(profile, scenario)
    backend.merge_cache(state, attributes)
    state["query"][:, 1], state["query_seen"][:, 1] = 0.0, 0
    actual, right = (state_of(b.merge_cache(state, attributes)) for b in (backend, Torch()))
    single, stored = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
    assert_same_cache(actual, right, profile.statistics, single=single, stored=stored)
