"""The cache reaches a model under the name that its version of transformers has for it."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from kvexport.export.hooks.attention import PassThroughCache
from tests.support.paths import ROOT


class Old:
    def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool | None = None) -> Any:
        return past_key_values, use_cache


def refusing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse the old name, as transformers will from version 5.40 on."""

    @functools.wraps(forward)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        if "past_key_values" in options:
            raise ValueError("`past_key_values` is deprecated")
        return forward(*arguments, **options)

    return wrapper


class New:
    @refusing
    def forward(self, input_ids: Any, cache: Any = None, use_cache: bool | None = None) -> Any:
        return cache, use_cache


@pytest.mark.parametrize("model", [Old(), New()])
def test_the_cache_is_given_under_the_models_name_for_it(model: Any) -> None:
    cache = PassThroughCache()
    assert model.forward(1, **cache.as_arguments(model)) == (cache, True)


def test_the_installed_transformers_takes_the_name_without_a_warning(
    tiny_checkpoint: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    (name, _) = PassThroughCache().as_arguments(model)
    model(input_ids=model.dummy_inputs["input_ids"], **{name: None}, use_cache=True)
    assert [str(one.message) for one in recwarn if "deprecated" in str(one.message)] == []


def test_no_call_of_a_model_has_a_name_of_its_own_for_the_cache() -> None:
    folders = ("kvexport", "benchmarks", "tests", "tools")
    files = {path for folder in folders for path in (ROOT / folder).rglob("*.py")} - {Path(__file__)}
    assert [path for path in files if re.search("past_key_values=[^=]", path.read_text("utf-8"))] == []
