"""Recipes that differ from a shipped one only in the method, and the recipes of tests/recipes."""

from pathlib import Path

from tests.support.paths import ROOT

TINY_CHECKPOINT = ROOT / "recipes" / "checkpoints" / "tiny"
SMALL_CHECKPOINT = ROOT / "tests" / "checkpoints" / "small"
# The recent share of the budget that a method needs in a cache of 64 slots. All other methods keep a half.
RECENT = {"ballot": 0.3, "kvslimmer": 0.25, "asymkv": 0.25}


def method_settings(method: str) -> list[str]:
    """Return the overrides that make `tiny-base` a recipe of the method, as --set takes them."""
    recent = [f"cache.recent={RECENT[method]}"] if method in RECENT else []
    return [f"cache.method={method}", *recent]


def set_options(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def recipe_file(name: str) -> Path:
    return ROOT / "tests" / "recipes" / f"{name}.yaml"
