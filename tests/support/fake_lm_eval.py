"""lm-evaluation-harness as far as a model class meets it: the abstract class, and the registry of names. Nothing else
is there.

Where the real package is installed it is used, and `test_evaluate_lm_eval.py` holds this one to it.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAMES: dict[str, type] = {}


class LM(abc.ABC):
    """The harness's class: what is abstract there is abstract here, so that a model that lacks one of them cannot be
    made."""

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
        """The harness hands on what is not None."""
        return cls(**arg_dict, **{name: x for name, x in (additional_config or {}).items() if x is not None})


def register_model(*names: str) -> Callable[[type], type]:
    """Registers a subclass of LM."""

    def decorate(cls: type) -> type:
        assert issubclass(cls, LM), f"Model '{cls.__name__}' must extend LM class"
        NAMES.update(dict.fromkeys(names, cls))
        return cls

    return decorate


def get_model(model_name: str) -> type:
    """What is registered under a name."""
    if model_name not in NAMES:
        raise ValueError(f"Attempted to load model '{model_name}', but no model for this name found!")
    return NAMES[model_name]


def install() -> None:
    """Puts the modules that kvexport imports into `sys.modules`."""
    for name, contents in {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.api.registry": {"register_model": register_model, "get_model": get_model},
    }.items():
        module = ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
