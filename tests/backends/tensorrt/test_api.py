"""Every name, flag and parameter of TensorRT and CUDA that kvexport uses exists in the real packages.

The other tests run kvexport on `fake_tensorrt` and `fake_cuda`, which refuse all other names. These tests compare the
fakes with the real bindings.
"""

import inspect
import re
from enum import EnumMeta
from typing import Any

import pytest

from tests.support import fake_cuda, fake_tensorrt, tensorrt_bindings

# The attributes of the fakes that only tests set or read.
TEST_ONLY = {
    "Builder": {"during_build", "failing"},
    "IBuilderConfig": {"seen"},
    "IPluginCreatorV3One": {"fields", "refused"},
    "IPluginRegistry": {"loaded"},
    "OnnxParser": {"refused"},
    "Runtime": {"opened"},
}


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    place = tensorrt_bindings.folder()
    if place is None:
        pytest.skip(f"not reached: TensorRT's Python bindings; to fetch them: {tensorrt_bindings.GET}")
    return tensorrt_bindings.api(place)


def public(cls: type) -> dict[str, Any]:
    """Return the attributes of a fake class that kvexport may use: all without an underscore, unless for tests only."""
    attributes = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    return {name: value for name, value in attributes.items() if name not in TEST_ONLY.get(cls.__name__, set())}


def parameters(docstring: str) -> list[list[tuple[str, bool]]]:
    """Return the overloads in a docstring of pybind11: (name, whether it has a default) of every parameter but self."""
    overloads = []
    for line in docstring.splitlines():
        signature = re.match(r"\s*(?:\d+\.\s+)?\w+\((.*)\)\s*->", line)
        if signature and "*args" not in signature[1]:
            parts = re.findall(r"(\w+):\s*((?:[^,\[\(]|\[[^\]]*\]|\([^)]*\))*)", signature[1])
            overloads.append([(name, "=" in rest) for name, rest in parts if name != "self"])
    return overloads


def fits(function: Any, overloads: list[list[tuple[str, bool]]]) -> bool:
    """Return whether some overload takes the fake's parameters, at the same places and names, and needs no others."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return any(
        [name for name, _ in overload[: len(names)]] == names and all(default for _, default in overload[len(names) :])
        for overload in overloads
    )


def test_the_version_is_the_one_the_fakes_speak_of(real: dict[str, Any]) -> None:
    assert real["version"].split(".")[:2] == fake_tensorrt.VERSION.split(".")[:2]


@pytest.mark.parametrize("name", fake_tensorrt.NAMES)
def test_tensorrt_has_every_used_name(real: dict[str, Any], name: str) -> None:
    assert name in real["tensorrt"]
    fake, members = getattr(fake_tensorrt, name), real["tensorrt"][name]["members"]
    if not isinstance(fake, type):
        return
    if isinstance(fake, EnumMeta):
        assert {member.name for member in fake} <= members.keys()
        return
    for attribute, value in public(fake).items():
        assert attribute in members, f"{name}.{attribute}"
        if inspect.isfunction(value):
            assert fits(value, parameters(members[attribute])), (
                f"{name}.{attribute}: {members[attribute].splitlines()[:2]}"
            )
    if name == "ILogger":  # the members of a pybind11 class include the severities
        assert {severity.name for severity in fake_tensorrt.ILogger.Severity} <= members.keys()


@pytest.mark.parametrize("name", ["Builder", "OnnxParser", "Runtime", "PluginField"])
def test_tensorrt_makes_these_of_the_same_arguments(real: dict[str, Any], name: str) -> None:
    constructor = getattr(fake_tensorrt, name).__init__
    assert fits(constructor, parameters(real["tensorrt"][name]["members"]["__init__"]))


def test_cuda_has_every_used_name(real: dict[str, Any]) -> None:
    if not real["cuda"]:
        pytest.skip(f"not reached: cuda-bindings: {real['cuda_problem']}; to fetch them: {tensorrt_bindings.GET}")
    used = [name for name in dir(fake_cuda.FakeCuda) if name.startswith("cuda")]
    assert len(used) > 15
    assert not [name for name in used if name not in real["cuda"]]
    for name in used:
        function = inspect.getattr_static(fake_cuda.FakeCuda, name)
        if inspect.isfunction(function):  # Cython writes C's types before the names, or Python's after them
            signature = re.match(r"\w+\((.*)\)", real["cuda"][name]["doc"])
            names = [part.split(":")[0].split()[-1] for part in signature[1].split(",") if part]
            assert names == list(inspect.signature(function).parameters)[1:], name
    for name in ("cudaError_t", "cudaMemcpyKind", "cudaStreamCaptureMode"):
        assert {m.name for m in getattr(fake_cuda, name)} <= real["cuda"][name]["members"].keys()


def test_signatures_are_read_out_of_docstrings() -> None:
    text = "set_shape(self: tensorrt.IOptimizationProfile, input: str, min: Dims, "
    text += "opt: List[int, str] = (1, 2), max: int = 0) -> None"
    assert parameters(text) == [[("input", False), ("min", False), ("opt", True), ("max", True)]]
    two = "Overloaded function.\n\n1. f(self: A, x: int) -> None\n\nWords (x: y).\n\n"
    two += "2. f(self: A, x: int, y: str = 'a') -> None"
    assert parameters(two) == [[("x", False)], [("x", False), ("y", True)]]
    assert fits(lambda input, min: None, [[("input", False), ("min", False), ("opt", True)]])
    assert not fits(lambda input, most: None, parameters(text))
    assert not fits(lambda input: None, parameters(text))
