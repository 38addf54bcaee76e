"""Tests of sampling against transformers' own logits processors."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from kvexport.errors import KvexportError, UsageError
from kvexport.language.sampling import Sampler
from kvexport.language.settings import GenerationSettings


class _Model(GenerationMixin):
    def __init__(self) -> None:
        self.config = SimpleNamespace(is_encoder_decoder=False)


def reference_scores(
    generation: GenerationSettings, prompt: list[int], generated: list[int], logits: np.ndarray
) -> np.ndarray:
    sampling: dict[str, Any] = {}
    if generation.do_sample:
        sampling = {
            "temperature": float(generation.temperature),
            "top_k": generation.top_k,
            "top_p": generation.top_p,
            "min_p": generation.min_p or None,
        }
    config = GenerationConfig(
        do_sample=generation.do_sample,
        min_new_tokens=generation.min_new_tokens,
        repetition_penalty=float(generation.repetition_penalty),
        **sampling,
    )
    config._eos_token_tensor = torch.tensor(generation.eos_token_ids) if generation.eos_token_ids else None
    processors = _Model()._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu")
    return processors(torch.tensor([prompt + generated]), torch.from_numpy(logits.copy())[None])[0].numpy()


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return weights / weights.sum()


def is_borderline(generation: GenerationSettings, prompt: list[int], generated: list[int], logits: np.ndarray) -> bool:
    before = reference_scores(
        GenerationSettings(**{**generation.__dict__, "top_p": 1.0, "min_p": 0.0}), prompt, generated, logits
    )  # penalty, eos, temperature and top_k do not round
    probabilities = softmax(before)
    cumulative = np.cumsum(np.sort(probabilities))
    near_top_p = generation.top_p < 1 and np.abs(cumulative - (1 - generation.top_p)).min() < 1e-5
    near_min_p = np.abs(probabilities / probabilities.max() - generation.min_p).min() < 1e-5
    return bool(near_top_p or near_min_p)


def assert_same_distribution(sampler: Sampler, prompt: list[int], logits: np.ndarray) -> None:
    expected = reference_scores(sampler.settings, prompt, sampler.generated, logits)
    ids, probabilities = sampler.distribution(logits)
    kept = np.flatnonzero(expected > -np.inf)
    assert (np.diff(ids) > 0).all()
    assert ids.size == kept.size
    # If equal scores straddle the top_p boundary, torch.sort does not define which of them stay. Their probabilities
    # are equal.
    unstable = sampler.settings.top_p < 1 and np.unique(logits).size < logits.size
    if not unstable:
        assert ids.tolist() == kept.tolist()
    np.testing.assert_allclose(np.sort(probabilities), np.sort(softmax(expected)[kept]), atol=1e-6)
    if ids.tolist() == kept.tolist():
        np.testing.assert_allclose(probabilities, softmax(expected)[kept], atol=1e-6)


@st.composite
def cases(draw: st.DrawFn) -> tuple[GenerationSettings, list[int], list[int], np.ndarray]:
    size = draw(st.sampled_from([2, 3, 30, 300, 3000]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = (random.standard_normal(size) * draw(st.sampled_from([0.1, 1.0, 5.0, 40.0]))).astype(np.float32)
    shape = draw(st.sampled_from(["distinct", "ties", "holes"]))
    if shape == "ties":
        logits = np.round(logits * 2) / 2
    if shape == "holes":
        logits[random.random(size) < 0.4] = -np.inf
        logits[random.integers(size)] = 1.0
    ids = st.lists(st.integers(0, size + 3), min_size=1, max_size=20)
    prompt, generated = draw(ids), draw(st.lists(st.integers(0, size - 1), max_size=5))
    generation = GenerationSettings(
        do_sample=draw(st.booleans()),
        min_new_tokens=draw(st.integers(0, 6)),
        temperature=draw(st.sampled_from([1.0, 1, 0.3, 0.7, 1.7, 10.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 50, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2, 0.5, 3.0])),
        seed=0,
        eos_token_ids=tuple(draw(st.lists(st.integers(0, size // 2), max_size=2))),
    )
    return generation, prompt, generated, logits


def openai_settings(size: int) -> st.SearchStrategy[dict[str, Any]]:
    penalty = st.sampled_from([0.0, 0.5, 2.0, -0.5])
    bias = st.dictionaries(st.integers(0, size - 1), st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=4)
    return st.fixed_dictionaries({"presence_penalty": penalty, "frequency_penalty": penalty, "logit_bias": bias})


def sampler_after(generation: GenerationSettings, prompt: list[int], generated: list[int], size: int) -> Sampler:
    sampler = Sampler(generation, prompt, size)
    for token in generated:
        forced = np.full(size, -np.inf, dtype=np.float32)
        forced[token] = 50.0
        sampler.next(forced)
    return sampler


@settings(max_examples=300, deadline=None)
@given(cases())
def test_kept_tokens_and_probabilities_are_those_of_transformers(
    case: tuple[GenerationSettings, list[int], list[int], np.ndarray],
) -> None:
    generation, prompt, generated, logits = case
    generated = [token for token in generated if token not in generation.eos_token_ids]
    assume((reference_scores(generation, prompt, generated, logits) > -np.inf).any())
    sampler = sampler_after(generation, prompt, generated, logits.size)
    assert sampler.generated == generated
    before = logits.copy()
    if generation.do_sample:
        assume(not is_borderline(generation, prompt, generated, logits))
        assert_same_distribution(sampler, prompt, logits)
        possible = sampler.distribution(logits)[0]
        assert sampler.next(logits) in possible
    else:
        expected = torch.from_numpy(reference_scores(generation, prompt, generated, logits)).argmax().item()
        assert sampler.distribution(logits)[0].tolist() == [expected]
        assert sampler.next(logits) == expected
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 50},
        {"top_k": 0, "top_p": 0.9},
        {"top_k": 20_000, "top_p": 0.95, "min_p": 0.1},
        {"top_k": 0, "temperature": 0.6, "min_p": 0.05},
    ],
    ids=str,
)
def test_a_large_vocabulary_keeps_the_same_tokens(options: dict[str, Any], spread: float) -> None:
    logits = (np.random.default_rng(3).standard_normal(150_001) * spread).astype(np.float32)
    logits[[5, 77_777, 150_000]] = logits.max() - 1.0
    sampler = Sampler(GenerationSettings(do_sample=True, **options), [1], logits.size)
    expected = np.flatnonzero(reference_scores(sampler.settings, [1], [], logits) > -np.inf)
    ids, _ = sampler.distribution(logits)
    # float32 sums over 150 001 tokens differ in the last bits between torch and numpy, so a flat top_p may move by a
    # few tokens.
    tolerated = 0 if "top_p" not in options else 1e-5 * logits.size
    assert np.setxor1d(ids, expected).size <= tolerated
    assert ids.size > 1


def test_every_tie_at_the_top_k_boundary_is_kept() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], dtype=np.float32)
    ids, probabilities = Sampler(GenerationSettings(do_sample=True, top_k=2), [], 6).distribution(logits)
    assert ids.tolist() == [1, 2, 3, 4]
    assert probabilities.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("size", [5, 3000])
def test_the_most_probable_token_stays_however_small_top_p_is(size: int) -> None:
    logits = np.random.default_rng(2).standard_normal(size).astype(np.float32)
    sampler = Sampler(GenerationSettings(do_sample=True, top_k=0, top_p=1e-12), [], size)
    kept = np.flatnonzero(reference_scores(sampler.settings, [1], [], logits) > -np.inf)
    assert sampler.distribution(logits)[0].tolist() == kept.tolist() == [logits.argmax()]


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = np.zeros(100_000, dtype=np.float32)
    logits[[70_000, 4_321]] = 2.5
    sampler = Sampler(GenerationSettings(), [], logits.size)
    assert sampler.next(logits) == 4_321 == torch.from_numpy(logits).argmax().item()


def test_half_precision_logits_are_widened() -> None:
    logits = np.linspace(-3, 3, 40).astype(np.float16)
    generation = GenerationSettings(do_sample=True, top_k=5, temperature=0.7)
    ids, probabilities = Sampler(generation, [], 40).distribution(logits)
    expected = softmax(reference_scores(generation, [0], [], logits.astype(np.float32)))
    np.testing.assert_allclose(probabilities, expected[ids], atol=1e-6)


def rows(count: int, size: int = 64) -> list[np.ndarray]:
    return list(np.random.default_rng(11).standard_normal((count, size)).astype(np.float32))


def test_a_seed_fixes_the_draws_beside_any_requests() -> None:
    generation = GenerationSettings(do_sample=True, seed=7, top_k=0)
    alone = Sampler(generation, [1, 2], 64)
    tokens = [alone.next(row) for row in rows(40)]
    again, neighbour = Sampler(generation, [1, 2], 64), Sampler(GenerationSettings(do_sample=True, seed=8), [3], 64)
    beside = []
    for row in rows(40):
        neighbour.next(row)
        beside.append(again.next(row))
        again.distribution(row)
    assert beside == tokens
    assert neighbour.generated != tokens
    assert alone.generated == tokens


def test_without_a_seed_two_sequences_differ() -> None:
    flat = np.zeros(10_000, dtype=np.float32)
    first, second = (Sampler(GenerationSettings(do_sample=True, top_k=0), [], flat.size) for _ in range(2))
    assert [first.next(flat) for _ in range(8)] != [second.next(flat) for _ in range(8)]


def test_drawn_frequencies_follow_the_probabilities() -> None:
    logits = np.array([2.0, -math.inf, 1.0, 0.0, 1.5, -1.0, -4.0, 0.5], dtype=np.float32)
    generation = GenerationSettings(do_sample=True, seed=1, temperature=0.8, top_p=0.97, max_new_tokens=10**5)
    sampler, draws = Sampler(generation, [], logits.size), 10_000
    ids, probabilities = sampler.distribution(logits)
    counts = np.bincount([sampler.next(logits) for _ in range(draws)], minlength=logits.size)
    assert counts.sum() == counts[ids].sum() == draws
    statistic = ((counts[ids] - draws * probabilities) ** 2 / (draws * probabilities)).sum()
    freedom = ids.size - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_the_sequence_ends_at_an_eos_or_at_its_length() -> None:
    logits = np.array([0.0, 5.0, 1.0], dtype=np.float32)
    sampler = Sampler(GenerationSettings(eos_token_ids=(1, 9), min_new_tokens=2, max_new_tokens=5), [], 3)
    reasons = [sampler.finish_reason]
    for _ in range(3):
        sampler.next(logits)
        reasons.append(sampler.finish_reason)
    assert sampler.generated == [2, 2, 1]
    assert reasons == [None, None, None, "stop"]
    endless = Sampler(GenerationSettings(max_new_tokens=2), [], 3)
    assert [(endless.next(logits), endless.finish_reason) for _ in range(2)] == [(1, None), (1, "length")]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("bad", "named"), [(math.nan, "nan"), (math.inf, "inf")])
def test_logits_that_are_no_numbers_are_named(bad: float, named: str, sampled: bool) -> None:
    logits = np.zeros(300, dtype=np.float32)
    logits[[0, 217]] = 9.0, bad
    sampler = Sampler(GenerationSettings(do_sample=sampled, repetition_penalty=1.1), [3], 300)
    with pytest.raises(KvexportError, match=rf"logit 217 of new token 0 is {named}"):
        sampler.next(logits)
    assert sampler.generated == []


def test_a_row_that_leaves_no_token_is_an_error() -> None:
    sampler = Sampler(GenerationSettings(eos_token_ids=(0, 1), min_new_tokens=1), [], 2)
    with pytest.raises(KvexportError, match="no token is possible"):
        sampler.next([1.0, 2.0])


def test_a_temperature_that_overflows_is_named() -> None:
    sampler = Sampler(GenerationSettings(do_sample=True, temperature=1e-38), [], 2)
    with pytest.raises(KvexportError, match="temperature 1e-38"):
        sampler.next([100.0, 2.0])


def test_wrong_shapes_and_ids_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[1, 4\].*vocabulary of 4"):
        Sampler(GenerationSettings(), [], 4).next(np.zeros((1, 4), dtype=np.float32))
    with pytest.raises(UsageError, match="token id -3"):
        Sampler(GenerationSettings(repetition_penalty=2.0), [1, -3], 4)


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_penalties_and_bias_are_those_of_openai(
    case: tuple[GenerationSettings, list[int], list[int], np.ndarray], data: st.DataObject
) -> None:
    generation, prompt, generated, logits = case
    more = data.draw(openai_settings(logits.size))
    generated = [token for token in generated if token not in generation.eos_token_ids]
    generation = replace(generation, do_sample=True, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0, **more)
    expected = logits.copy()
    for token, value in generation.logit_bias.items():
        expected[token] += np.float32(value)
    expected = reference_scores(generation, prompt, generated, expected).astype(np.float64)
    for token in set(generated):
        expected[token] -= generation.frequency_penalty * generated.count(token) + generation.presence_penalty
    assume((expected > -np.inf).any())
    ids, probabilities = sampler_after(generation, prompt, generated, logits.size).distribution(logits)
    assert ids.tolist() == np.flatnonzero(expected > -np.inf).tolist()
    np.testing.assert_allclose(probabilities, softmax(expected)[ids], rtol=2e-4, atol=1e-30)


def test_a_bias_decides_and_one_beyond_the_vocabulary_is_refused() -> None:
    row = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    assert Sampler(GenerationSettings(logit_bias={0: 100}), [], 3).next(row) == 0
    assert Sampler(GenerationSettings(logit_bias={1: -100}), [], 3).next(row) == 2
    assert row.tolist() == [1.0, 3.0, 2.0]
    with pytest.raises(UsageError, match="logit_bias names the token 3"):
        Sampler(GenerationSettings(logit_bias={3: 1}), [], 3)


def test_an_ignored_eos_is_a_token_like_any_other() -> None:
    row = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    sampler = Sampler(
        GenerationSettings(eos_token_ids=(1,), ignore_eos=True, min_new_tokens=2, max_new_tokens=2), [], 3
    )
    assert [sampler.next(row), sampler.finish_reason] == [1, None]
    assert [sampler.next(row), sampler.finish_reason] == [1, "length"]


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("vocabulary", [3, 20, 30000])
def test_logprobs_are_those_of_the_unchanged_logits(vocabulary: int, count: int) -> None:
    generation = GenerationSettings(
        do_sample=True, temperature=0.5, top_k=2, presence_penalty=1.0, logit_bias={2: 3.0}, logprobs=count, seed=0
    )
    sampler = Sampler(generation, [1], vocabulary)
    random = np.random.default_rng(vocabulary)
    for _ in range(5):
        row = np.round(random.normal(0, 3, vocabulary) * 4).astype(np.float32) / 4  # with ties
        token = sampler.next(row)
        exact = torch.log_softmax(torch.from_numpy(row).double(), -1).numpy()
        assert sampler.logprobs.chosen == pytest.approx(exact[token], abs=1e-5)
        expected = sorted(range(vocabulary), key=lambda i: (-row[i], i))[:count]
        assert [i for i, _ in sampler.logprobs.top] == expected
        np.testing.assert_allclose([value for _, value in sampler.logprobs.top], exact[expected], atol=1e-5)
    plain = Sampler(replace(generation, logprobs=None), [1], vocabulary)
    plain.next(row)
    assert plain.logprobs is None


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("at", [0, 1, 17])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 0, "temperature": 1.5}])
def test_a_sampler_continues_from_its_state_as_text(options: dict[str, Any], at: int, seed: int | None) -> None:
    merged_settings = GenerationSettings(repetition_penalty=1.3, frequency_penalty=0.7, seed=seed, **options)
    rows = np.random.default_rng(1).normal(0, 1, (40, 64)).astype(np.float32)
    whole = Sampler(merged_settings, [3, 4], 64)
    for row in rows[:at]:
        whole.next(row)
    restored = Sampler(merged_settings, [3, 4], 64)
    restored.restore(json.loads(json.dumps(whole.state())))
    assert [restored.next(row) for row in rows[at:]] == [whole.next(row) for row in rows[at:]]
    assert restored.generated == whole.generated
    assert restored.state() == whole.state()


@pytest.mark.parametrize(("damage", "named"), [
    (lambda state: state.pop("random"), "random"), (lambda state: state.update(generated=["?"]), "no state"),
    (lambda state: state.update(generated=[64]), "out of range"),
    (lambda state: state.update(random=[-1, 1]), "out of range"), (lambda state: state.update(random=[]), "do_sample"),
    (lambda state: state.update(random=[1]), "do_sample"),
])  # fmt: skip
def test_a_damaged_state_of_a_sampler_is_refused(damage: Any, named: str) -> None:
    sampler = Sampler(GenerationSettings(do_sample=True), [1], 64)
    state: Any = sampler.state()
    damage(state)
    with pytest.raises(UsageError, match=named):
        sampler.restore(state)
    assert sampler.generated == []
