"""Engines with speculation: recipes, prompts, settings of all kinds, and answers with any drafter."""

from pathlib import Path
from typing import Any

from kvexport.engine.engine import Engine
from kvexport.engine.speculation import Drafter
from kvexport.language.grammar import Grammar
from kvexport.language.token import Token
from kvexport.recipe.fields import Recipe
from tests.support.models import make_recipe, random_ids

CHUNK, NEW = 16, 60


def recipe_of(checkpoint: Path, speculate: dict[str, Any] | None = None, **cache: Any) -> Recipe:
    """Return a recipe of a full cache and a drafter of n-grams, unless `cache` or `speculate` set others."""
    return make_recipe(
        checkpoint,
        cache={"method": "full", **cache},
        export={"prefill_chunk": CHUNK},
        speculate={"draft": "ngram", "tokens": 5, **(speculate or {})},
        limits={"max_length": 512, "max_batch": 4},
    )


def prompts(seed: int, vocabulary: int) -> list[list[int]]:
    return [ids.tolist() for ids in random_ids(seed, 40, 3, 17, vocabulary=vocabulary)]


def generated(engine: Engine, batch: list[list[int]], drafter: Drafter | None, **settings: Any) -> list[list[Token]]:
    engine.drafter = drafter
    answers: list[list[Token]] = [[] for _ in batch]
    for token in engine.stream(batch, **{"max_new_tokens": NEW, **settings}):
        answers[token.sequence].append(token)
    return answers


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True},
    "drawn from few": {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9},
    "penalties": {"do_sample": True, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}},
    "eos": {"do_sample": True, "eos_token_ids": (3, 9, 21, 40), "min_new_tokens": 8},
    "stop string": {"do_sample": True, "stop_strings": ("a", "Zx")},
    "grammar": {"do_sample": True, "grammar": Grammar("regex", "([a-f]{1,3} ){2,30}")},
    "length": {"max_new_tokens": 3},
}
