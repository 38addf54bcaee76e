"""The host's version of tensor cores (plugins/cuda/core/mma.h) has the layout that PTX defines."""

import ctypes
import itertools
import subprocess

import numpy as np
import pytest

from plugins.building.targets import HOST_FLAGS
from plugins.building.tools import Missing, host_compiler
from tests.conformance.cuda_library import ROOT, HostMemory

# (lane, element) -> number of the element, columns first, from CUTLASS's SM80_16x8x16_F32F16F16F32_TN. A layout is
# (extents, strides) over the digits of the lane and then of the element. A is 16 x 16 and C 16 x 8, numbered row + 16
# column. B is numbered column + 8 row, with 8 columns.
LAYOUTS = {
    "a": (((4, 8), (32, 1)), ((2, 2, 2), (16, 8, 128)), 16),
    "b": (((4, 8), (16, 1)), ((2, 2), (8, 64)), 8),
    "sum": (((4, 8), (32, 1)), ((2, 2), (16, 8)), 16),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("mma") / "libmma.so"
    try:
        compiler = host_compiler()
    except Missing as error:
        pytest.skip(f"not reached: {error}")
    source = ROOT / "tests" / "conformance" / "mma_on_host.cpp"
    subprocess.run([compiler, *HOST_FLAGS, "-shared", str(source), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def digits(number: int, extents: tuple[int, ...], strides: tuple[int, ...]) -> int:
    total = 0
    for extent, stride in zip(extents, strides, strict=True):
        number, digit = divmod(number, extent)
        total += digit * stride
    return total


@pytest.mark.parametrize("operand", LAYOUTS)
def test_elements_are_placed_as_in_cutlass(library: ctypes.CDLL, operand: str) -> None:
    lanes, elements, first = LAYOUTS[operand]
    count = int(np.prod(elements[0]))
    actual = set()
    for lane, i in itertools.product(range(32), range(count)):
        row, column = ctypes.c_int(), ctypes.c_int()
        library.element(list(LAYOUTS).index(operand), lane, i, ctypes.byref(row), ctypes.byref(column))
        at = digits(lane, *lanes) + digits(i, *elements)
        expected = (at // first, at % first) if operand == "b" else (at % first, at // first)
        assert (row.value, column.value) == expected, (lane, i)
        actual.add(expected)
    assert len(actual) == 32 * count


# Elements of a few lanes from the figures of the PTX ISA: (lane, element) at (row, column).
PTX = {
    "a": {
        (0, 0): (0, 0),
        (0, 2): (8, 0),
        (0, 4): (0, 8),
        (0, 7): (8, 9),
        (1, 1): (0, 3),
        (4, 0): (1, 0),
        (31, 3): (15, 7),
        (31, 7): (15, 15),
    },
    "b": {(0, 1): (1, 0), (0, 2): (8, 0), (1, 0): (2, 0), (4, 0): (0, 1), (31, 3): (15, 7)},
    "sum": {(0, 1): (0, 1), (0, 2): (8, 0), (3, 0): (0, 6), (4, 0): (1, 0), (31, 3): (15, 7)},
}


@pytest.mark.parametrize("operand", PTX)
def test_elements_are_placed_as_in_the_figures_of_the_ptx_isa(library: ctypes.CDLL, operand: str) -> None:
    for (lane, i), expected in PTX[operand].items():
        row, column = ctypes.c_int(), ctypes.c_int()
        library.element(list(PTX).index(operand), lane, i, ctypes.byref(row), ctypes.byref(column))
        assert (row.value, column.value) == expected, (lane, i)


@pytest.mark.parametrize("rows", [0, 1], ids=["keys", "values"])
def test_a_product_of_operands_from_shared_memory(library: ctypes.CDLL, rows: int) -> None:
    """Rows of memory are 24 elements apart, and only 16 of them are read."""
    rng, memory = np.random.default_rng(0), HostMemory()
    exact = rng.integers(-8, 9, size=(2, 2, 16, 24)).astype(np.float32)
    a, b = (memory.put(x.astype(np.float16)) for x in exact)
    out = np.full((2, 16, 16), np.nan, np.float32)
    library.product_of(*(ctypes.c_void_p(x.ctypes.data) for x in (a, b)), 48, rows, out.ctypes.data_as(ctypes.c_void_p))
    left, right = exact[..., :16]
    assert np.array_equal(out, left @ (right if rows else right.transpose(0, 2, 1)))


def test_two_numbers_as_one_register(library: ctypes.CDLL) -> None:
    library.packed_of.argtypes, library.packed_of.restype = [ctypes.c_float, ctypes.c_float], ctypes.c_uint32
    both = np.array([library.packed_of(1.5, 1 / 3)], np.uint32).view(np.uint16)
    numbers = both.view(np.float16).astype(np.float32)
    assert numbers[0] == 1.5
    assert numbers[1] == pytest.approx(1 / 3, rel=2**-9)
