"""Tests of methods that fit the cache to reference queries: the ring, the solver, and the effect of a fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.export.build import build
from kvexport.methods.attention_matching import AttentionMatching
from kvexport.methods.base import Method
from kvexport.methods.fitting import Fitting
from kvexport.methods.grkv import GRKV
from kvexport.methods.primitives.fit import attention, fitted_values, inverse, newton_steps
from kvexport.methods.slots import Rotary, Slots, gather_rows
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.recipe.cache import CacheSection
from kvexport.schema.state import STATE, STATE_NAMES
from kvexport.state.snapshot import Snapshot
from kvexport.validate.runner import validate_artifact
from tests.conformance.backends import Backend, NativeCpu, Torch
from tests.conformance.cases import MergeProfile, MergeScenario, merge_cache_state, single_precision, stored_precision
from tests.conformance.comparison import assert_same_cache, state_of
from tests.conformance.layout import of_heads
from tests.support.answers import answers, stopped
from tests.support.models import make_recipe
from tests.support.tiny_model import RECIPE

ROWS = 5
NATIVE_CPU = NativeCpu()
every_backend = pytest.mark.parametrize(
    "backend", [b for b in (Torch(), NATIVE_CPU) if b.available() is None], ids=lambda backend: backend.name
)


@every_backend
def test_the_ring_has_the_latest_queries_of_every_head_after_any_calls(backend: Backend) -> None:
    """Three lanes have ragged calls and are sometimes idle. Padding in the ring would be noticed."""
    method, (batch, heads, group, size, capacity) = GRKV(queries=ROWS), (3, 2, 2, 4, 32)
    attributes = VoteAttentionAttributes(0.5, statistics=method.statistics, method=method)
    rng = np.random.default_rng(0)
    state = empty_state(method, batch, heads, capacity, size)
    noted: list[list[tuple[np.ndarray, int]]] = [[] for _ in range(batch)]
    seen = np.zeros(batch, np.int64)
    for lengths in ((3, 0, 1), (1, 2, 4), (0, 0, 3), (2, 1, 1)):
        tokens = max(lengths)
        query = rng.normal(size=(batch, heads * group, tokens, size)).astype(np.float32)
        for b, length in enumerate(lengths):
            for t in range(length):
                # Each query head of a group adds a row to the ring of its KV head.
                noted[b] += [(query[b, g::group, t] * 0.5, int(seen[b]) + t + 1) for g in range(group)]
            query[b, :, length:] = 99.0
        key = rng.normal(size=(batch, heads, tokens, size)).astype(np.float32)
        position = seen[:, None] + np.arange(tokens)
        feed = {"query": query, "key": key, "value": key, "position": position}
        feed |= {"query_length": np.array(lengths)[:, None]}
        before = state
        state = state_of(backend.vote_attention(feed | {f"past_{n}": x for n, x in state.items()}, attributes))
        same = all((state[name][1] == before[name][1]).all() for name in ("query", "query_seen"))
        assert same or lengths[1], "an idle lane changed"
        seen += lengths
    for b in range(batch):
        rows = [(np.zeros((heads, size)), 0)] * ROWS + noted[b]
        for i, (query, count) in enumerate(rows[-ROWS:]):
            np.testing.assert_array_equal(state["query"][b, :, i], query)
            assert (state["query_seen"][b, :, i] == count).all()


def empty_state(method: Method, batch: int, heads: int, capacity: int, size: int) -> dict[str, np.ndarray]:
    sizes = {"B": batch, "H": heads, "S": heads * capacity, "D": size, "Dv": size, "K": len(method.statistics)}
    types = {"cache": "float32"}
    flat = {x.name: np.zeros(x.shape(sizes), types.get(x.dtype, x.dtype)) for x in (*STATE, *method.extra_state)}
    return {name: of_heads(name, x, heads) for name, x in flat.items()}


NATIVE = [
    # (queries, sizes of key and value, slots, type): more queries, and longer values, than a kernel's block has.
    (2, (16, 8), 40, "float32"),
    (7, (16, 24), 130, "float16"),
    (70, (24, 72), 200, "float32"),
    (130, (8, 130), 150, "float32"),
    (32, (64, 64), 160, "float32"),
]


@pytest.mark.skipif(NATIVE_CPU.available() is not None, reason="not reached: the native operators are not built")
@pytest.mark.parametrize(("queries", "sizes", "capacity", "dtype"), NATIVE)
@pytest.mark.parametrize("kind", [GRKV, AttentionMatching])
@pytest.mark.parametrize("peak", [4.0, 200.0])
def test_the_native_fit_is_pytorchs_for_any_sizes(
    kind: type[Fitting], queries: int, sizes: tuple[int, int], capacity: int, dtype: str, peak: float
) -> None:
    """Newton's iteration and Cholesky's factors solve the same equations."""
    used = ((capacity, capacity - 3), (capacity // 2, 5), (0, 0))
    profile = MergeProfile(f"native-{kind.name}", kind.name, {"queries": queries}, sizes=sizes, dtype=dtype)
    state = merge_cache_state(profile, MergeScenario(f"{queries}", capacity, capacity // 3, used, peak=peak))
    attributes = MergeCacheAttributes(kind(queries=queries), capacity // 3, 2, capacity // 6)
    right, actual = (state_of(b.merge_cache(state, attributes)) for b in (Torch(), NATIVE_CPU))
    single, stored = 20 * single_precision(peak), max(20 * single_precision(peak), stored_precision(dtype, peak))
    assert_same_cache(actual, right, profile.statistics, single=single, stored=stored)
    assert (actual["query"] == state["query"]).all() and (actual["query_seen"] == state["query_seen"]).all()
    if peak < 100.0:
        assert not np.isin(actual["value"][0, 0, : capacity // 3], state["value"][0, 0]).all(), "nothing was fitted"


@pytest.mark.parametrize(("rows", "ridge"), [(8, 1.0), (32, 0.05), (64, 1e-3)])
@pytest.mark.parametrize("peak", [0.0, 3.0, 300.0])
def test_the_inverse_is_linalgs_for_all_probabilities(rows: int, ridge: float, peak: float) -> None:
    """With a peak of 0 all rows are equal, and with 300 they have ones and zeros, which is the worst condition."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(2, rows, 40)).astype(np.float32))
    logits[1] = 0.0
    logits[1, :, 3] = 1.0
    design = torch.softmax(peak * logits, dim=-1)
    gram = design @ design.transpose(-1, -2)
    right = torch.linalg.inv(gram.double() + ridge * torch.eye(rows, dtype=torch.float64))
    error = (inverse(gram, ridge).double() - right).abs().amax((-2, -1)) / right.abs().amax((-2, -1))
    assert (error < 4e-7 * (rows / ridge + 1)).all()
    assert newton_steps(rows, ridge) <= 5 + np.log2(rows / ridge + 1)


def test_too_few_steps_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvexport.methods.primitives.fit.newton_steps", lambda rows, ridge: newton_steps(rows, ridge) - 4
    )
    gram = torch.ones(32, 32)
    right = torch.linalg.inv(gram.double() + 0.05 * torch.eye(32, dtype=torch.float64))
    assert (inverse(gram, 0.05) - right).abs().max() / right.abs().max() > 4e-7 * 641


def one_head(method: Fitting, seed: int, capacity: int = 40) -> tuple[Slots, list[Tensor]]:
    """Return a full cache of one head, and its state with the ring of reference queries."""
    rng = np.random.default_rng(seed)
    key, value = (torch.from_numpy(rng.normal(size=(1, 1, capacity, 16)).astype(np.float32)) for _ in range(2))
    query = 0.7 * torch.from_numpy(rng.normal(size=(1, 1, method.queries, 16)).astype(np.float32))
    votes, position = torch.ones(1, 1, capacity), torch.arange(capacity, dtype=torch.int32)[None, None]
    score = torch.from_numpy(rng.gamma(1.0, size=(1, 1, len(method.statistics), capacity)).astype(np.float32))
    own = [query, torch.full((1, 1, method.queries), capacity, dtype=torch.int32)]
    slots = Slots(key, value, votes, score, position, position[..., -1:])
    return slots, [key, value, votes, score, position, *own]


@pytest.mark.parametrize("kind", [GRKV, AttentionMatching])
@pytest.mark.parametrize("seed", range(4))
def test_a_fit_brings_the_reference_queries_closer_to_their_output(kind: type[Fitting], seed: int) -> None:
    """A smaller ridge brings it nearer."""
    errors = {}
    for ridge, change_max in ((0.05, 1e-6), (0.5, 10.0), (0.05, 10.0), (1e-3, 10.0)):
        method = kind(queries=16, ridge=ridge, change_max=change_max)
        before, state = one_head(method, seed)
        result = merge_cache(*state, attributes=MergeCacheAttributes(method, 24, 2, 4))
        after = Slots(*result[:5], before.now)
        outputs = [
            attention(x, x.votes > 0, state[5], state[6], method.vote_exponent) @ x.value for x in (before, after)
        ]
        errors[ridge, change_max] = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    dropped, loose, middle, tight = errors.values()
    assert tight < middle < loose < dropped and tight < 0.5 * dropped


@pytest.mark.parametrize("seed", range(4))
def test_fitted_votes_keep_the_probability_mass(seed: int) -> None:
    """Fitted votes keep more of the mass over all slots than the votes of the kept slots do."""
    shares = []
    for steps in (0, 8, 64):
        method = AttentionMatching(queries=16, steps=steps)
        before, state = one_head(method, seed)
        key, _, votes, *_ = merge_cache(*state, attributes=MergeCacheAttributes(method, 24, 2, 4))
        mass = [
            (x * torch.exp(state[5] @ k.transpose(-1, -2))).sum(-1)
            for x, k in ((before.votes, before.key), (votes, key))
        ]
        shares.append(float((mass[1] / mass[0] - 1.0).square().sum()))
        assert votes.sum() <= before.votes.sum() * (1 + 1e-5)
    plain, few, many = shares
    assert few < 0.2 * plain and many < few


def test_no_more_of_the_values_changes_than_is_allowed() -> None:
    before, _ = one_head(GRKV(), 0)
    free = (before.position > 3) & (before.position < 30)
    read = torch.softmax(torch.randn(1, 1, 8, 40, generator=torch.Generator().manual_seed(0)), -1)
    for most in (0.01, 0.2):
        value = fitted_values(read, before.value, torch.full((1, 1, 8, 16), 9.0), free, 0.05, most)
        assert value[~free].equal(before.value[~free])
        assert (value - before.value).norm() / before.value[free].norm() == pytest.approx(most, rel=1e-4)


def test_queries_move_with_the_recent_keys_where_positions_are_places() -> None:
    """If positions are places, a query among the recent slots reads the same of them before and after a merge."""
    method = GRKV(queries=6)
    _, state = one_head(method, 3)
    rotary = Rotary((1.0, 0.3, 0.1, 0.02), cache_positions=True)
    result = merge_cache(*state, attributes=MergeCacheAttributes(method, 24, 2, 8, rotary=rotary))
    logits = []
    for held, used in ((state, 40), (result, 24)):
        recent = held[4][:, :, :used].argsort(dim=-1)[:, :, -8:]
        logits.append(held[5] @ gather_rows(held[0], recent).transpose(-1, -2))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    assert (result[5] - state[5]).abs().max() > 0.1 and result[6].equal(state[6])


def test_a_recipes_parameters_of_a_fit_are_checked() -> None:
    assert CacheSection(method="grkv", parameters={"queries": 64}).build_method() == GRKV(queries=64)
    for parameters, named in (
        ({"ridge": 0.0}, "ridge"),
        ({"queries": 0}, "queries"),
        ({"change_max": 0}, "change_max"),
    ):
        with pytest.raises(ValueError, match=named):
            CacheSection(method="grkv", parameters=parameters).build_method()


def test_an_artifact_keeps_the_ring_and_continues_from_a_snapshot(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A request that was saved as bytes in the middle of its answer gets the same tokens."""
    cache = {"method": "attention_matching", "parameters": {"queries": 8}, "budget": 24, "merge_every": 4}
    recipe = make_recipe(tiny_checkpoint, cache=cache, export={"prefill_chunk": 16}, limits=RECIPE["limits"])
    artifact = build(recipe, tmp_path_factory.mktemp("fitting") / "artifact")
    engine = load(artifact)
    layer = engine.manifest.cache.caches[0]
    assert [tensor.name for tensor in layer.state] == [*STATE_NAMES, "query", "query_seen"]
    slots = layer.slots * (2 * layer.key_size + 3) * 4
    assert layer.bytes() == slots + layer.kv_heads * 8 * (layer.key_size + 1) * 4
    result = validate_artifact(artifact, length=120)
    assert result.passed, result.problem

    prompt, settings = [3 * i % 60 for i in range(70)], engine.settings(max_new_tokens=24)
    whole = engine.generate([prompt], max_new_tokens=24)[0].token_ids
    first = Request(prompt, settings, keep=True)
    engine.add(first)
    while len(first.tokens) < 9:
        engine.step()
    saved = stopped(engine, first).to_bytes()
    engine.generate([[5] * 50], max_new_tokens=5)  # the lane is given to another request
    second = Request((), start=Snapshot.from_bytes(saved, engine.manifest))
    assert [token.id for token in first.tokens] + answers(engine, second)[0] == list(whole)
