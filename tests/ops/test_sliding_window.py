"""In a layer with a sliding window nothing outlives the window: evicted slots are dropped, whatever the method."""

import pytest
import torch
from torch import Tensor

from kvexport.export.graph.tracer import layer_attributes
from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.onnx_function import merge_cache_node_attributes
from kvexport.ops.vote_attention import vote_attention
from kvexport.plan.cache import LayerGeometry

TOKENS, WINDOW, BUDGET, CHUNK, SIZE = 96, 32, 16, 4, 8
# A fit changes the values of kept slots on purpose.
METHODS = [name for name, method in all_methods().items() if method().compresses and not method().extra_state]


def read(method: Method, query: Tensor, key: Tensor, value: Tensor, budget: int) -> tuple[Tensor, list[Tensor]]:
    """Return the attention output [1, 1, T, Dv] of a layer with a window, read in chunks, and its cache."""
    layer = LayerGeometry(1, 1, SIZE, value.shape[-1], sliding_window=WINDOW)
    attend, merge = layer_attributes(method, layer), MergeCacheAttributes(method, budget, 1, budget // 2, WINDOW)
    capacity, statistics = budget + CHUNK, len(method.statistics)
    state = [torch.zeros(1, 1, capacity, SIZE), torch.zeros(1, 1, capacity, value.shape[-1])]
    state += [torch.zeros(1, 1, capacity), torch.zeros(1, 1, statistics, capacity)]
    state += [torch.zeros(1, 1, capacity, dtype=torch.int32)]
    outputs = []
    for first in range(0, TOKENS, CHUNK):
        new = [x[:, :, first : first + CHUNK] for x in (query, key, value)]
        position = torch.arange(first, first + CHUNK)[None]
        output, *state = vote_attention(*new, position, torch.tensor([[CHUNK]]), *state, attributes=attend)
        state = list(merge_cache(*state, attributes=merge))
        outputs.append(output)
    return torch.cat(outputs, 2), state


@pytest.mark.parametrize("name", METHODS)
def test_no_slot_holds_a_token_that_left_the_window(name: str) -> None:
    """Values are one-hot numbers of their tokens, so they show which tokens a slot stands for."""
    rng = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, TOKENS, SIZE, generator=rng) for _ in range(2))
    key[..., 0] += 4.0  # keys alike, so that methods with a threshold would merge them
    _, (_, value, votes, _, position) = read(all_methods()[name](), query, key, torch.eye(TOKENS)[None, None], BUDGET)
    used = votes[0, 0] > 0
    assert used.sum() == BUDGET
    assert not value[0, 0][:, : TOKENS - WINDOW].any()
    assert (votes[0, 0, used] == 1).all()
    assert (value[0, 0, used].argmax(-1) == position[0, 0, used]).all()


def test_ballot_in_a_window_is_as_near_to_the_full_window_as_dropping() -> None:
    """Heads rest on tokens of large keys and small values, and the first of them leaves with its window."""
    rng = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, TOKENS, SIZE, generator=rng) for _ in range(3))
    angle = torch.arange(TOKENS) * 0.3
    query[..., :2], key[..., :2] = torch.tensor([6.0, 0.0]), torch.tensor([-4.0, 0.0])
    rests = torch.arange(0, TOKENS, 7)
    key[0, 0, rests, 0], key[0, 0, rests, 1] = 6.0 * angle[rests].cos().abs(), 6.0 * angle[rests].sin()
    value[0, 0, rests] *= 0.05
    full, _ = read(all_methods()["h2o"](), query, key, value, WINDOW)
    late = slice(2 * WINDOW, TOKENS)
    errors = {}
    for name in ("ballot", "h2o"):
        output, _ = read(all_methods()[name](), query, key, value, BUDGET)
        errors[name] = float((output - full)[:, :, late].norm() / full[:, :, late].norm())
    assert errors["ballot"] < 1.5 * errors["h2o"], errors


def test_kernels_get_a_policy_that_drops() -> None:
    method = all_methods()["ballot"]()
    attributes = MergeCacheAttributes(method, BUDGET, 1, 4, WINDOW)
    node = merge_cache_node_attributes([attributes])
    assert (node["merge"], node["order"], node["select"]) == ("drop", "lowest", "mean")
    assert merge_cache_node_attributes([MergeCacheAttributes(method, BUDGET, 1, 4)])["merge"] == "zip"
