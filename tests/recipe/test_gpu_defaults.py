"""The defaults of recipes for GPUs, and the devices that `kvexport build` takes."""

from typing import Any

import pytest

from kvexport import models
from kvexport.backends.onnxruntime import devices
from kvexport.commands.build import Device, build
from kvexport.errors import UsageError
from kvexport.recipe.load import recipe_for

ON_CUDA = ("backend.device=cuda",)


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ((), "float32"),
        (("backend.device=cpu",), "float32"),
        (ON_CUDA, "float16"),
        (("backend.name=tensorrt",), "float16"),
        ((*ON_CUDA, "model.dtype=float32"), "float32"),
        ((*ON_CUDA, "weights.bits=4"), "float16"),
    ],
    ids=str,
)
def test_models_on_gpus_are_float16_unless_the_recipe_says_otherwise(overrides: tuple[str, ...], dtype: str) -> None:
    assert recipe_for("someone/model", overrides).recipe.model.dtype == dtype


def overrides_of(monkeypatch: pytest.MonkeyPatch, device: Device | None, backend: str | None = None) -> list[str]:
    seen: list[str] = []

    def recipe_of_command(verb: str, model: Any, recipe: Any, overrides: list[str], **_: Any) -> Any:
        seen.extend(overrides)
        raise InterruptedError

    monkeypatch.setattr(models, "recipe_of_command", recipe_of_command)
    with pytest.raises(InterruptedError):
        build(recipe="tiny", backend=backend, device=device)
    return seen


@pytest.mark.parametrize(("problems", "expected"), [([], "cuda"), ([("no driver", "a GPU")], "cpu")])
def test_auto_is_the_device_of_this_machine(monkeypatch: pytest.MonkeyPatch, problems: Any, expected: str) -> None:
    monkeypatch.setattr(devices, "problems", lambda _: problems)
    assert overrides_of(monkeypatch, Device.auto) == [f"backend.device={expected}"]


def test_a_device_becomes_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overrides_of(monkeypatch, Device.cuda) == ["backend.device=cuda"]
    assert overrides_of(monkeypatch, Device.cpu) == ["backend.device=cpu"]
    assert overrides_of(monkeypatch, None) == []
    assert overrides_of(monkeypatch, Device.cuda, "tensorrt") == ["backend.name=tensorrt"]


def test_tensorrt_on_the_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="tensorrt runs on GPUs alone") as refused:
        build(recipe="tiny", backend="tensorrt", device=Device.cpu)
    assert "--device cuda" in refused.value.fix
