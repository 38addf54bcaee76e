"""A fake of lm-evaluation-harness: only the abstract class of models and the registry of names.

Where the real package is installed, tests use it, and `test_evaluate_lm_eval.py` compares this fake with it.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAMES: dict[str, type] = {}


class LM(abc.ABC):
    """The harness's base class of models, with the same abstract methods: a model without one cannot be constructed."""

    def __init__(self) -> None:
        self._rank, self._world_size = 0, 1

    @abc.abstractmethod
    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]: ...

    @abc.abstractmethod
    def generate_until(self, requests: list[Any]) -> list[str]: ...

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> LM:
        """Construct the model from the arguments and the additional settings that are not None, as the harness does."""
        return cls(**arg_dict, **{name: x for name, x in (additional_config or {}).items() if x is not None})


def register_model(*names: str) -> Callable[[type], type]:
    """Return a decorator that registers a subclass of LM."""

    def decorate(cls: type) -> type:
        assert issubclass(cls, LM), f"Model '{cls.__name__}' must extend LM class"
        NAMES.update(dict.fromkeys(names, cls))
        return cls

    return decorate


def get_model(model_name: str) -> type:
    """Return the class that is registered under a name."""
    if model_name not in NAMES:
        raise ValueError(f"Attempted to load model '{model_name}', but no model for this name found!")
    return NAMES[model_name]


def install() -> None:
    """Put the modules that kvexport imports into `sys.modules`."""
    for name, contents in {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.api.registry": {"register_model": register_model, "get_model": get_model},
    }.items():
        module = ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
