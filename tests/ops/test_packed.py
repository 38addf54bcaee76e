"""Tests of packed weights in numpy: their parts and their values."""

import numpy as np
import pytest

from kvexport.ops.packed import PackedFormat, PackedTensor, dequantize, pack, unpack

FORMATS = [
    PackedFormat(4, True, 32),
    PackedFormat(4, False, 16, "zero", "float32"),
    PackedFormat(8, True, 64, "minimum"),
    PackedFormat(8, False, 128, "zero", ordered=True),
    PackedFormat(4, False, 32, "minimum", "float32", ordered=True),
]


@pytest.mark.parametrize("packing", FORMATS, ids=str)
def test_every_packed_number_equals_the_formula(packing: PackedFormat) -> None:
    rng, (n, k) = np.random.default_rng(0), (5, 128)
    low = packing.lowest
    numbers = {part: rng.integers(low, low + (1 << packing.bits), (n, k // g)) for part, g in _numbers(packing)}
    scale, minimum = (rng.standard_normal((n, k // packing.group)).astype(packing.scale_dtype) for _ in range(2))
    order = rng.permutation(k)
    stored = {part: pack(x, packing.bits) for part, x in numbers.items()}
    stored |= {"scale": scale, "minimum": minimum, "order": order}
    parts = packing.tensors(n, k)
    assert {name: stored[name].nbytes for name in parts} == {name: part.nbytes for name, part in parts.items()}
    actual = dequantize(packing, n, k, stored)
    for i in range(n):
        for j in range(k):
            g = i, j // packing.group
            zero = numbers["zero"][g] if packing.offset == "zero" else 0
            value = np.float32(numbers["weight"][i, j] - zero) * np.float32(scale[g])
            value += np.float32(minimum[g]) if packing.offset == "minimum" else np.float32(0)
            assert actual[i, order[j] if packing.ordered else j] == value


def _numbers(packing: PackedFormat) -> list[tuple[str, int]]:
    return [("weight", 1), *([("zero", packing.group)] if packing.offset == "zero" else [])]


def test_the_low_half_of_a_byte_comes_first() -> None:
    np.testing.assert_array_equal(pack(np.array([1, -1, 7]), 4), [0xF1, 0x07])
    np.testing.assert_array_equal(unpack(np.array([0xF1, 0x07], np.uint8), PackedTensor("int4", (3,))), [1, -1, 7])
    np.testing.assert_array_equal(unpack(np.array([0xF1, 0x07], np.uint8), PackedTensor("uint4", (3,))), [1, 15, 7])


@pytest.mark.parametrize(
    ("group", "inputs", "words"),
    [(8, 64, "16 to 256"), (512, 1024, "16 to 256"), (33, 66, "even"), (32, 48, "do not divide")],
)
def test_a_group_that_does_not_fit_is_an_error(group: int, inputs: int, words: str) -> None:
    assert words in PackedFormat(4, True, group).fault(inputs)
    assert not PackedFormat(4, True, inputs).fault(inputs)
