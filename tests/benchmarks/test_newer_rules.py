"""The rules of newer papers, as `benchmarks/newer_methods.py` measures them, equal plain computations."""

from __future__ import annotations

import math
from dataclasses import replace

import newer_rules
import numpy as np
import pytest
import torch
from newer_rules import FUTURE, NEVER, Largest, Newer, NewerBallot, Queries
from numpy.testing import assert_allclose

from kvexport.methods.ballot import Ballot
from kvexport.methods.slots import Slots
from kvexport.ops import vote_attention

BATCH, HEADS, GROUP, SLOTS, SIZE = 2, 2, 3, 12, 8


def slots_of(seed: int = 0) -> Slots:
    """Return a full cache with random contents, in order of position."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, HEADS, SLOTS)
    key, value = (torch.randn(*shape, SIZE, generator=generator) for _ in range(2))
    score = torch.rand(BATCH, HEADS, 2, SLOTS, generator=generator)
    position = torch.arange(SLOTS, dtype=torch.int32).expand(shape)
    return Slots(key, value, torch.ones(shape), score, position, torch.full((*shape[:2], 1), SLOTS - 1))


def test_the_largest_probability_of_all_queries_is_kept_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vote_attention, "_probability_sum", newer_rules._sum_or_largest)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, HEADS * GROUP, 6, SIZE, generator=generator)
    key, value = (torch.randn(1, HEADS, 6, SIZE, generator=generator) for _ in range(2))
    zeros = torch.zeros(1, HEADS, 8, SIZE)
    state = (zeros, zeros, torch.zeros(1, HEADS, 8), torch.zeros(1, HEADS, 1, 8), torch.zeros(1, HEADS, 8).int())
    attributes = vote_attention.VoteAttentionAttributes(1.0, statistics=(Largest("probability"),))
    for first, end in ((0, 4), (4, 6)):
        new = (x[:, :, first:end] for x in (query, key, value))
        position, length = torch.arange(first, end)[None], torch.tensor([[end - first]])
        _, *state = vote_attention.vote_attention(*new, position, length, *state, attributes=attributes)
    for head in range(HEADS):
        probability = np.zeros((GROUP, 6, 6))
        for g in range(GROUP):
            for i in range(6):
                logits = key[0, head, : i + 1].double() @ query[0, head * GROUP + g, i].double()
                probability[g, i, : i + 1] = logits.softmax(0)
        assert_allclose(state[3][0, head, 0, :6], probability.max((0, 1)), rtol=1e-5)


def test_expected_attention_is_the_mean_exponential_of_gaussian_queries_at_later_positions() -> None:
    generator, slots = torch.Generator().manual_seed(2), slots_of()
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03])
    plain = torch.randn(BATCH, HEADS * GROUP, 40, SIZE, generator=generator)
    position, queries = torch.arange(3, 43), Queries(frequencies, HEADS)
    rotated = newer_rules._turned(plain, position[:, None] * frequencies)
    rotated[:, :, :2] = 1e3  # before the first position that counts
    for first, end in ((0, 16), (16, 40)):
        queries.add(rotated[:, :, first:end], position[first:end], 5)
    turn = np.zeros((SIZE, SIZE))
    for later in range(SLOTS, SLOTS + FUTURE):
        for plane, frequency in enumerate(frequencies.tolist()):
            c, s = math.cos(later * frequency) / FUTURE, math.sin(later * frequency) / FUTURE
            other = plane + SIZE // 2
            turn[[plane, other, plane, other], [plane, other, other, plane]] += [c, c, -s, s]
    counted = plain[:, :, 2:].double().numpy()
    expected = np.zeros((BATCH, HEADS, SLOTS))
    for b in range(BATCH):
        for head in range(HEADS * GROUP):
            mean, covariance = turn @ counted[b, head].mean(0), np.cov(counted[b, head].T, bias=True)
            keys = slots.key[b, head // GROUP].double().numpy()
            logit = keys @ mean + 0.5 * np.einsum("ki,ij,kj->k", keys, turn @ covariance @ turn.T, keys)
            expected[b, head // GROUP] += np.exp(logit) / np.exp(logit).sum() / GROUP
    assert_allclose(queries.expected(slots), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [Newer, NewerBallot])
def test_both_ends_of_the_prompt_and_large_values_are_never_evicted(kind: type[Newer | NewerBallot]) -> None:
    slots, unprotected = slots_of(), torch.ones(BATCH, HEADS, SLOTS, dtype=torch.bool)
    unprotected[..., 0] = False
    ends = kind(rules="ends", prompt=8, kept=20).keep_score(slots, unprotected, 3) >= NEVER
    assert ends.nonzero()[:, 2].unique().tolist() == [1, 6, 7]  # slot 0 is a sink, which is protected anyway
    large = kind(rules="values", kept=20).keep_score(slots, unprotected, 3) >= NEVER
    norms = slots.value.norm(dim=-1)
    for kept, norm in zip(large.flatten(0, 1), norms.flatten(0, 1), strict=True):
        assert kept.nonzero()[:, 0].tolist() == sorted((1 + norm[1:].argsort(descending=True)[:2]).tolist())


def test_without_a_rule_the_method_evicts_like_ballot() -> None:
    slots, unprotected = slots_of(), torch.ones(BATCH, HEADS, SLOTS, dtype=torch.bool)
    scores = [method.keep_score(slots, unprotected, 3) for method in (NewerBallot(), Ballot())]
    assert_allclose(*scores, rtol=1e-5)


def test_noise_keeps_a_slot_as_often_as_its_importance_says() -> None:
    rules, kept = newer_rules.Rules("noise", 8, 20), np.zeros(2)
    unprotected = torch.ones(BATCH, HEADS, SLOTS, dtype=torch.bool)
    importance = torch.tensor([3.0, 1.0, *[1e-9] * (SLOTS - 2)]).expand(BATCH, HEADS, -1)
    for now in range(SLOTS, SLOTS + 300):
        slots = replace(slots_of(), now=torch.full((BATCH, HEADS, 1), now))
        first = rules.importance(slots, unprotected, importance).argmax(-1).flatten()
        kept += [int((first == i).sum()) for i in range(2)]
    assert_allclose(kept / kept.sum(), [0.75, 0.25], atol=0.04)
