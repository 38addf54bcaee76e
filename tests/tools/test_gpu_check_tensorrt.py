"""The part `tensorrt` of `tools/gpu_check`, over simulations of TensorRT and CUDA."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvexport.backends.tensorrt import plugin
from plugins.building import make
from tests.backends.tensorrt.test_build import Runner
from tools.gpu_check import __main__ as gpu_check
from tools.gpu_check import tensorrt
from tools.gpu_check.target import Skipped, Target


def target(kept: list[Any] | None = None, *, on_host: bool = False) -> Target:
    return Target(
        on_host=on_host, small=True, keep=lambda x: kept is not None and kept.append(json.loads(json.dumps(x)))
    )


@pytest.fixture
def simulated(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polygraphy.backend import trt

    monkeypatch.setattr(trt, "TrtRunner", Runner)
    monkeypatch.setattr(tensorrt, "build_for_this_gpu", lambda: plugins)
    monkeypatch.setattr(tensorrt, "LENGTH", 48)


def test_engines_are_built_and_compared_with_pytorch(simulated: None) -> None:
    kept: list[Any] = []
    figures = tensorrt.tensorrt(target(kept))
    assert list(figures) == list(tensorrt.ARTIFACTS) and len(kept) == 3, "figures are kept as they are measured"
    plain, heads, packed = figures.values()
    assert plain["operators"] == heads["operators"] == {"VoteAttention": "plugin", "MergeCache": "plugin"}
    assert packed["operators"] == plain["operators"]
    assert all(row["heads merged"] > 0 and row["ms of a step"] > 0 for row in figures.values())


def test_engines_that_differ_from_pytorch_fail(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Runner.infer

    def wrong(self: Runner, feed: dict[str, Any]) -> dict[str, Any]:
        outputs = original(self, feed)
        return {name: x * 1.5 if name == "logits" else x for name, x in outputs.items()}

    monkeypatch.setattr(Runner, "infer", wrong)
    with pytest.raises(RuntimeError, match="float16: "):
        tensorrt.tensorrt(target())


def test_what_is_missing_is_named(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Skipped, match="TensorRT needs a GPU"):
        tensorrt.prepare(target(on_host=True))
    tensorrt.prepare(target())
    with monkeypatch.context() as changed:
        changed.setattr(sys.modules["tensorrt"], "__version__", "10.3.0")
        with pytest.raises(Skipped, match=r"tensorrt is 10\.3\.0, which is too old"):
            tensorrt.prepare(target())
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "polygraphy" else original(name))
    with pytest.raises(Skipped, match="polygraphy is not installed"):
        tensorrt.prepare(target())


def test_a_missing_header_skips_the_part(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def missing(*_: Any, **__: Any) -> Path:
        raise make.Missing("NvInferRuntime.h was not found")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(make, "build", missing)
    with pytest.raises(Skipped, match=r"NvInferRuntime\.h was not found"):
        tensorrt.build_for_this_gpu()


def test_the_part_is_known_and_runs_after_those_of_the_default_time() -> None:
    assert "tensorrt" in gpu_check.FURTHER_PARTS and "tensorrt" in gpu_check.MODULES
    assert plugin.VARIABLE == tensorrt.VARIABLE
