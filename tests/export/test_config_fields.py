"""A config.json with fields of a wrong type or size is refused, and the error names the field."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kvexport.errors import UsageError
from kvexport.export.build import read_model
from tests.support import models

WRONG: dict[str, Any] = {
    "text": "abc", "fraction": 1.5, "list": [1, "a"], "mapping": {"a": 1}, "null": None, "huge": 10**30, "below 0": -1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
}
# Fields that affect nothing, and fields that may have several types.
ANYTHING = {"architectures", "transformers_version"}
TAKEN = {
    "mapping": {"dtype", "rope_parameters"},
    "fraction": {"attention_dropout", "dtype", "initializer_range", "rms_norm_eps"},
}
REFUSED = {  # Kinds of values that only these fields refuse.
    "null": {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"},
    "huge": {"hidden_size", "head_dim", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"},
    "below 0": {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"},
}
OTHER_MESSAGES = {"model_type": "model type", "sliding_window": "int too big"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {
        name: models.save_checkpoint(folder / name, AutoConfig.for_model(name, **{**models.SIZES, **extra}))
        for name, extra in FAMILIES.items()
    }


def problem(checkpoint: Path, change: dict[str, Any]) -> str | None:
    config = checkpoint / "config.json"
    good = config.read_text()
    config.write_text(json.dumps({**json.loads(good), **change}))
    try:
        read_model(models.make_recipe(checkpoint, limits={"max_length": 512}))
    except UsageError as error:
        return error.problem
    finally:
        config.write_text(good)
    return None


@pytest.mark.parametrize(
    ("family", "kind"), [*(("llama", kind) for kind in WRONG), ("qwen2", "text"), ("qwen2", "huge")]
)
def test_a_field_of_a_wrong_type_or_size_is_named(checkpoints: dict[str, Path], family: str, kind: str) -> None:
    fields = set(json.loads((checkpoints[family] / "config.json").read_text())) - ANYTHING
    problems = {name: problem(checkpoints[family], {name: WRONG[kind]}) for name in fields}
    refused = {name: words for name, words in problems.items() if words is not None}
    assert refused.keys() >= (REFUSED[kind] & fields if kind in REFUSED else fields - TAKEN.get(kind, set()))
    assert [
        message
        for name, message in refused.items()
        if name not in message and OTHER_MESSAGES.get(name, "-") not in message
    ] == []


@pytest.mark.parametrize(("change", "message"), [
    ({"hidden_act": "abc"}, "without its hidden_act it can"),
    ({"initializer_range": "abc"}, "Field 'initializer_range' expected float, got str"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers should be an integer from 1 to 10000, found 1000000000"),
    ({"num_attention_heads": 0}, "num_attention_heads should be an integer from 1 to 2147483647, found 0"),
    ({"text_config": {"vocab_size": -3}}, "vocab_size should be an integer"),
    ({"dtype": "abc"}, "without its dtype it can"),
])  # fmt: skip
def test_wrong_config_fields_are_named(checkpoints: dict[str, Path], change: dict[str, Any], message: str) -> None:
    assert message in str(problem(checkpoints["llama"], change))
