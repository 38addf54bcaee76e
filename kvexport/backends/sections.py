"""The names of the backends, and the keys that each backend adds to a recipe's section `backend:`.

Every recipe needs these keys, so this module imports no backend, and only pydantic of other packages.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from kvexport.recipe.section import RecipeSection


@cache
def names() -> tuple[str, ...]:
    registry = importlib.import_module("kvexport.backends")
    return tuple(sorted(module.name for module in pkgutil.iter_modules(registry.__path__) if module.ispkg))


@cache
def default() -> str:
    (name,) = (name for name in names() if getattr(_module(name), "DEFAULT", False))
    return name


def backend_section() -> type[RecipeSection]:
    from typing import Literal

    from pydantic import Field, create_model

    from kvexport.recipe.section import RecipeSection

    class Named(RecipeSection):
        name: Literal[names()] = Field(default(), description="The backend that runs the ONNX graphs.")  # type: ignore[valid-type]

    sections: dict[str, type[RecipeSection]] = {name: _module(name).Section for name in names()}
    owners: dict[str, str] = dict.fromkeys(Named.model_fields, "every backend")
    for name, section in sections.items():
        for key in section.model_fields:
            if key in owners:
                raise TypeError(f"backend.{key} is a key of {owners[key]} and of {name}")
            owners[key] = name
    bases: Any = (*reversed(sections.values()), Named)  # pydantic takes the fields of the last base first
    text = "The backend that runs the ONNX graphs, and its settings."
    return cast("type[RecipeSection]", create_model("BackendSection", __base__=bases, __doc__=text))


def without_former_keys(section: Any) -> Any:
    """Return a manifest's section `backend:` without the keys that earlier versions wrote and nothing reads now."""
    kept = copy.deepcopy(section)
    for name in names():
        for owner, key in getattr(_module(name), "FORMER_KEYS", ()):
            if isinstance(kept, dict) and isinstance(kept.get(owner), dict):
                kept[owner].pop(key, None)
    return kept


def on_gpu(values: Mapping[str, Any]) -> bool:
    module = _module(name) if (name := values.get("name", default())) in names() else None
    return bool(getattr(module, "on_gpu", lambda _: False)(values))


def device_settings(name: str | None, device: str) -> list[str]:
    from kvexport.errors import UsageError

    settings = getattr(_module(name or default()), "device_settings", None)
    if settings is None:
        raise UsageError(f"the backend {name} has no choice of devices", "leave --device out")
    return cast("list[str]", settings(device))


def _module(name: str) -> Any:
    return importlib.import_module(f"kvexport.backends.{name}.section")
