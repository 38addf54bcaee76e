"""LinearAttention's CUDA kernels on the host, from their source and from nvcc's PTX, against PyTorch in float64.

Beside the numbers, the tests check the execution as `test_cuda_on_host.py` does. None of them uses a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvexport.ops.linear_attention import UpdateRule
from tests.conformance.cuda_library import Caller, CudaPtx
from tests.conformance.cuda_recurrence import RULES, Recurrence, RecurrenceCase, recurrence
from tests.conformance.test_cuda_on_host import ORDERS, set_host
from tests.conformance.test_cuda_on_host import caller as caller  # the fixture

SIZES = [
    Recurrence((9, 4, 0), 3, 3, 8, 6),  # rows that are no whole vectors
    Recurrence((1, 0, 1), 4, 2, 16, 70),  # a step, in which one sequence has no token
    Recurrence((40, 17), 2, 1, 5, 128),
    Recurrence((20, 8), 2, 1, 128, 64),
    Recurrence((11,), 2, 2, 100, 36),
    Recurrence((9, 1), 1, 1, 256, 20),
    Recurrence((1,), 2, 1, 130, 33),
]


def check(one: RecurrenceCase, actual: dict[str, np.ndarray]) -> None:
    for name, right in one.meaning().items():
        error = np.abs(actual[name] - right).max() / max(1.0, np.abs(right).max())
        assert error < 2e-6, (name, error, one.sizes)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_what_pytorch_computes(caller: Caller, rule: UpdateRule, by_channel: bool) -> None:
    for sizes in SIZES:
        one = recurrence(rule, sizes._replace(by_channel=by_channel))
        actual = one.run(caller)
        check(one, actual)
        for i, length in enumerate(sizes.lengths):
            assert (actual["output"][i, length:] == 0).all()
            if length == 0:
                assert np.array_equal(actual["present_state"][i], one.feeds["past_state"][i])


@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[3]], ids=["single numbers", "vectors"])
def test_no_bit_depends_on_the_order_of_threads_blocks_and_copies(caller: Caller, sizes: Recurrence) -> None:
    one, results = recurrence("gated_delta", sizes._replace(by_channel=True)), []
    for order, late in ORDERS:
        set_host(caller.library, order, late)
        results.append({name: x.tobytes() for name, x in one.run(caller).items()})
    set_host(caller.library)
    assert all(found == results[0] for found in results[1:])


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_a_state_may_be_written_over_itself_and_tensors_may_begin_anywhere(caller: Caller, sizes: Recurrence) -> None:
    one = recurrence("gated_delta", sizes)
    right = {name: x.tobytes() for name, x in one.run(caller).items()}
    assert {name: x.tobytes() for name, x in one.run(caller, in_place=True).items()} == right
    one.offset = 4
    assert {name: x.tobytes() for name, x in one.run(caller).items()} == right


def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(caller: Caller) -> None:
    one = recurrence("gated_delta", Recurrence((19,), 2, 1, 32, 40))
    prompt, state, rows = one.run(caller), one.feeds["past_state"], []
    for t in range(19):
        feeds = {name: x[:, t : t + 1].copy() for name, x in one.feeds.items()}
        feeds |= {"past_state": state, "query_length": np.ones((1, 1), np.int64)}
        step = RecurrenceCase(one.rule, one.sizes._replace(lengths=(1,)), feeds).run(caller)
        state = step["present_state"]
        rows.append(step["output"])
    assert np.array_equal(np.concatenate(rows, 1), prompt["output"])
    assert np.array_equal(state, prompt["present_state"])


def test_lengths_that_do_not_fit_are_clamped(caller: Caller) -> None:
    one = recurrence("delta", Recurrence((7, 7), 1, 1, 8, 8))
    right = one.run(caller)
    one.feeds["query_length"] = np.array([[99], [-3]])
    actual = one.run(caller)
    assert np.array_equal(actual["output"][0], right["output"][0]) and (actual["output"][1] == 0).all()
    assert np.array_equal(actual["present_state"][1], one.feeds["past_state"][1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": -1}, "a dimension is zero or negative"),
        ({"value_size": 0}, "a dimension is zero or negative"),
        ({"batch": 1 << 31}, r"more than 2\^30 sequences or tokens"),
        ({"key_heads": 2}, "the heads are not a multiple of the key heads"),
        ({"key_size": 257}, "a head has keys of more than 256 numbers"),
    ],
)
def test_refusals_say_why(caller: Caller, changes: dict[str, Any], message: str) -> None:
    one = recurrence("linear", Recurrence((2,), 3, 3, 4, 4))
    one.changes = changes
    with pytest.raises(RuntimeError, match=message):
        one.run(caller)


needs_ptx = pytest.mark.skipif(CudaPtx().available() is not None, reason=f"not reached: {CudaPtx().available()}")


@needs_ptx
@pytest.mark.parametrize("rule", ["gated_delta", "linear"])
def test_nvccs_ptx_of_it_is_what_pytorch_computes(rule: UpdateRule) -> None:
    for sizes in (Recurrence((11, 0), 2, 1, 100, 36, by_channel=True), Recurrence((1, 1), 2, 2, 70, 5)):
        one = recurrence(rule, sizes)
        check(one, one.run(CudaPtx().caller))
