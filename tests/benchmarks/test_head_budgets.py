"""A test that the simulation of head budgets has the same caches as an engine."""

from __future__ import annotations

from typing import Any

import head_budgets
import numpy as np
import torch

from kvexport.export.graph.tracer import layer_attributes
from kvexport.methods.ballot import Ballot
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.vote_attention import vote_attention
from kvexport.plan.cache import LayerGeometry


def test_heads_filled_with_slots_that_count_nothing_are_caches_of_those_budgets() -> None:
    torch.manual_seed(1)
    layer, budgets, chunk = LayerGeometry(4, 2, 8, 8, scale=0.4), np.array([[[14, 30]], [[26, 20]]]), head_budgets.CHUNK
    simulated = head_budgets.Heads([layer], Ballot(), 2)
    simulated.begin(budgets, [0.5, 0.3])
    state: Any = [[head_budgets.empty(1, layer, int(n) + chunk, 2) for n in row[0]] for row in budgets]
    state = [[tuple(x[:, :1] for x in head) for head in row] for row in state]
    for first in range(0, 4 * chunk, chunk):
        query, key, value = (torch.randn(2, n, chunk, 8) for n in (4, 2, 2))
        position = torch.arange(first, first + chunk).expand(2, chunk)
        output = simulated.append(0, query, key, value, position)
        simulated.merge(0)
        for lane, recent in enumerate((0.5, 0.3)):
            for head in range(2):
                own = (slice(lane, lane + 1), slice(2 * head, 2 * head + 2)), (slice(lane, lane + 1), [head])
                inputs: Any = (query[own[0]], key[own[1]], value[own[1]], position[:1], torch.tensor([[chunk]]))
                expected, *held = vote_attention(
                    *inputs, *state[lane][head], attributes=layer_attributes(Ballot(), layer)
                )
                torch.testing.assert_close(output[own[0]], expected, rtol=1e-4, atol=1e-5)
                budget = int(budgets[lane, 0, head])
                attributes = MergeCacheAttributes(Ballot(), budget, head_budgets.SINKS, int(recent * budget))
                state[lane][head] = merge_cache(*held, attributes=attributes)
