"""kvexport: a Hugging Face checkpoint becomes an engine whose KV cache has a fixed budget.

    engine = kvexport.load("Qwen/Qwen3-0.6B", budget=1024)   # built the first time; needs the extra `export`
    print(engine.generate("Why is the sky blue?")[0].text)

    kvexport.build("Qwen/Qwen3-0.6B", "qwen3", budget=1024)  # or into a folder of your own
    engine = kvexport.load("qwen3")                          # needs neither torch nor transformers

The budget is the number of cache slots that each KV head keeps. Importing this package imports none of its
dependencies. The first use of a name imports what the name needs.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from kvexport.outbound import silence_dependencies as _silence_dependencies
from kvexport.version import __version__

_silence_dependencies()  # before any dependency can be imported

if _TYPE_CHECKING:
    from typing import Any

    from kvexport.engine.completion import Completion
    from kvexport.engine.engine import Engine
    from kvexport.engine.options import EngineOptions
    from kvexport.engine.request import Request
    from kvexport.errors import KvexportError
    from kvexport.language.grammar import Grammar
    from kvexport.language.settings import GenerationSettings
    from kvexport.language.token import Token
    from kvexport.models import LLM, build, load
    from kvexport.recipe.fields import Recipe

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineOptions",
    "GenerationSettings",
    "Grammar",
    "KvexportError",
    "Recipe",
    "Request",
    "Token",
    "__version__",
    "build",
    "load",
]

_HOMES = {
    "LLM": "kvexport.models",
    "Completion": "kvexport.engine.completion",
    "Engine": "kvexport.engine.engine",
    "EngineOptions": "kvexport.engine.options",
    "GenerationSettings": "kvexport.language.settings",
    "Grammar": "kvexport.language.grammar",
    "KvexportError": "kvexport.errors",
    "Recipe": "kvexport.recipe.fields",
    "Request": "kvexport.engine.request",
    "Token": "kvexport.language.token",
    "build": "kvexport.models",
    "load": "kvexport.models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
