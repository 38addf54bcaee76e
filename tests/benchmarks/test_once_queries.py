"""Tests of the reference queries that a compression gets."""

from __future__ import annotations

import math
from typing import Any

import once_queries
import pytest
import torch
from once_queries import LENGTH, Noted, Read

from kvexport.methods.slots import Rotary

HEADS, GROUP, SIZE = 2, 3, 4


def read_text() -> Read:
    """Return a text whose queries hold their token and their query head of the group in the first two numbers."""
    read: Any = Read.__new__(Read)
    read.group, read.rotary = GROUP, Rotary((0.5, 0.25))
    tokens = LENGTH + 500
    query = torch.zeros(1, HEADS * GROUP, tokens, SIZE)
    query[..., 0] = torch.arange(tokens)
    query[..., 1] = (torch.arange(HEADS * GROUP) % GROUP)[:, None]
    for name, part in (("queries", query[:, :, :LENGTH]), ("again", query[:, :, LENGTH:])):
        notes = Noted([2.0])
        for call in part.split(300, 2):
            notes.attended(0, call, torch.zeros(1, HEADS, call.shape[2], SIZE))
        setattr(read, name, notes.taken())
    read.state = {"past_key_values.0.key": query[:, ::GROUP].numpy()}
    return read


@pytest.mark.parametrize(("of", "first"), [("last", LENGTH - 8), ("spread", LENGTH // 8 - 1), ("again", LENGTH + 62)])
def test_a_ring_has_all_heads_of_its_tokens_and_their_counts(of: str, first: int) -> None:
    ring, seen = read_text().chosen(0, of, 8 * GROUP)
    assert ring.shape == (1, HEADS, 8 * GROUP, SIZE) and seen.shape == ring.shape[:3] and seen.dtype == torch.int32
    tokens, heads = ring[0, 1, :, 0] / 2, ring[0, 1, :, 1] / 2  # the scale of the logits is part of the queries
    assert heads.tolist() == [0, 1, 2] * 8
    assert tokens[::GROUP].tolist() == tokens[2::GROUP].tolist() == sorted(set(tokens.tolist()))
    assert tokens[0] == first and tokens[-1] == (LENGTH + 499 if of == "again" else LENGTH - 1)
    assert seen[0, 1].tolist() == ([LENGTH] * 24 if of == "again" else (tokens + 1).int().tolist())


def test_half_of_a_ring_are_the_last_tokens_and_half_come_before_them() -> None:
    ring, _ = read_text().chosen(0, "half", 8 * GROUP)
    tokens = (ring[0, 0, ::GROUP, 0] / 2).tolist()
    assert tokens[4:] == [LENGTH - 4, LENGTH - 3, LENGTH - 2, LENGTH - 1] and tokens[3] == LENGTH - 5 > 2 * tokens[1]


def test_turned_queries_and_keys_are_as_they_would_be_at_the_end() -> None:
    read = read_text()
    plain, turned = (read.chosen(0, of, 4 * GROUP)[0] for of in ("spread", "turned"))
    assert read.chosen(0, "turned", 4 * GROUP)[1].unique().tolist() == [LENGTH]
    angle = 0.5 * (LENGTH - 500 + 1)  # the angle of the first token's first plane, which has numbers 0 and 2
    x, y = plain[0, 0, 0, 0].item(), plain[0, 0, 0, 2].item()
    assert turned[0, 0, 0, 0].item() == pytest.approx(x * math.cos(angle) - y * math.sin(angle), rel=1e-3)
    keys, seen = read.chosen(0, "keys", 10)
    assert keys.shape == (1, HEADS, 10, SIZE) and seen.unique().tolist() == [LENGTH]
    lengths = keys.norm(dim=-1).mean() / read.queries[0].norm(dim=-1).mean()
    assert lengths.item() == pytest.approx(1.0, rel=0.1)


def test_a_row_is_a_recipe() -> None:
    recipes = [once_queries.recipe_of(row) for row in once_queries.ROWS]
    assert {recipe.cache.budget for recipe in recipes} == {200} and len(set(once_queries.ROWS)) == len(recipes)
    assert [len(recipe.cache.allocation.shares) for recipe in recipes].count(30) == 4
