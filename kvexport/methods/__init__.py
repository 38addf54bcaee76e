"""The KV cache compression methods, one file each: the package imports every file of this folder."""

import importlib
import pkgutil
from functools import cache

from kvexport.methods.base import Method


@cache
def all_methods() -> dict[str, type[Method]]:
    """Return every compression method's class by the method's name, in alphabetical order."""
    methods: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__):
        for item in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(item, type) and issubclass(item, Method) and "name" in vars(item):
                methods[item.name] = item
    return dict(sorted(methods.items()))
