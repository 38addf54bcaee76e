"""Tests of the settings of generation, from a user and from a checkpoint's generation_config.json."""

import math
from typing import Any

import pytest
from transformers import GenerationConfig

from kvexport.errors import UsageError
from kvexport.language.settings import UNSUPPORTED, GenerationSettings


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 0.0, "do_sample": True},
        {"temperature": -1.0, "do_sample": True},
        {"temperature": math.nan, "do_sample": True},
        {"temperature": "hot"},
        {"do_sample": "yes"},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
        {"min_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"presence_penalty": 2.1},
        {"presence_penalty": "much"},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": math.nan},
        {"logit_bias": {3: 101.0}},
        {"logit_bias": {-3: 1.0}},
        {"logit_bias": {"3": 1.0}},
        {"logit_bias": {3: None}},
        {"logit_bias": [1]},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": True},
        {"ignore_eos": 1},
        {"seed": -1},
        {"seed": 1.5},
        {"eos_token_ids": (1, -2)},
        {"eos_token_ids": [1]},
        {"stop_strings": ("",)},
        {"stop_strings": (3,)},
    ],
    ids=str,
)
def test_impossible_settings_name_the_field(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        GenerationSettings(**bad)
    name = next(iter(bad))
    assert caught.value.problem.startswith(f"{name} is {bad[name]!r}")
    assert name in caught.value.fix


def test_a_generation_config_is_read_as_transformers_reads_it() -> None:
    data = {
        "_from_model_config": True, "bos_token_id": 1, "pad_token_id": None, "eos_token_id": [151645, 151643],
        "do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "repetition_penalty": None,
        "num_beams": 1, "bad_words_ids": [], "a_key_of_the_future": 3, "stop_strings": "END",
        "transformers_version": "5.23.0",
    }  # fmt: skip
    read = GenerationSettings.from_generation_config(data, seed=4, top_p=0.5, temperature=None)
    expected = GenerationSettings(
        do_sample=True,
        temperature=0.6,
        top_p=0.5,
        top_k=50,
        seed=4,
        eos_token_ids=(151645, 151643),
        stop_strings=("END",),
    )
    assert read == expected
    assert GenerationSettings.from_generation_config({"eos_token_id": 0}).eos_token_ids == (0,)
    assert GenerationSettings.from_generation_config(
        {}, stop_strings=["a", "b"], eos_token_ids=5
    ) == GenerationSettings(stop_strings=("a", "b"), eos_token_ids=(5,))


def test_unset_fields_have_the_defaults_of_transformers() -> None:
    reference, default = (
        GenerationConfig._get_default_generation_params(),
        GenerationSettings.from_generation_config({}),
    )
    shared = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
    assert {name: getattr(default, name) for name in shared} == {name: reference[name] for name in shared}


def test_the_neutral_values_are_those_of_transformers() -> None:
    reference = GenerationConfig._get_default_generation_params()
    differing = {
        name for name in UNSUPPORTED if reference.get(name) is not None and reference[name] != UNSUPPORTED[name]
    }
    assert differing == set()


@pytest.mark.parametrize(("key", "value"), [
    ("num_beams", 4), ("no_repeat_ngram_size", 3), ("suppress_tokens", [1]), ("guidance_scale", 2.0), ("min_length", 5),
    ("typical_p", 0.5),
])  # fmt: skip
def test_unsupported_generation_settings_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"{key} = ") as caught:
        GenerationSettings.from_generation_config({key: value, "do_sample": True})
    assert f"set {key} to" in caught.value.fix


def test_keys_without_effect_are_accepted() -> None:
    assert GenerationSettings.from_generation_config({"typical_p": 0.5, "temperature": 0.0}) == GenerationSettings(
        temperature=0.0
    )
    read = GenerationSettings.from_generation_config({"min_length": 5, "min_new_tokens": 2})
    assert read == GenerationSettings(min_new_tokens=2)


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown generation setting 'num_beams'"):
        GenerationSettings.from_generation_config({}, num_beams=2)
