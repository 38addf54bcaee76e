"""`kvexport calibrate`: which layers of a model hold what it finds again in a text, and which of them a recipe's budget
can keep whole."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.cache import LayerGeometry, plan_cache
from kvexport.engine.engine import load
from kvexport.errors import UsageError
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.language import Ids, Words, language_of
from kvexport.evaluate.recall import Passage, passage, retrieval_layers
from kvexport.evaluate.statistics import Estimate, mean, share
from kvexport.language.text import FILE_NAME, Tokenizer
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.report.sections import KeyValues, Section, Table
from kvexport.terminal import Progress, silent

FACTS = 6  # in a passage, each asked for once
LENGTH = 1000  # tokens of a passage, where the recipe's sequences are not shorter
ROOM = 64  # tokens beyond the passage: a question and its answer
MOST = 2 / 3  # of all slots are those of whole layers, at the most, but where these are one
MATTERS = 0.05  # of what all layers cost together, for a layer to be worth its slots
THINGS = (
    "library",
    "kitchen",
    "garden",
    "bank",
    "museum",
    "hospital",
    "school",
    "church",
    "theatre",
    "station",
    "airport",
    "factory",
)


@dataclass(frozen=True)
class Calibration:
    """length: tokens of a passage. exact: share of the questions that the full cache answers. layers: by how many nats
    a token of the answers gets less likely where that layer alone loses the middle of the text. whole: what the
    recipe's budget can keep whole, [] where nothing is worth it."""

    recipe: str
    length: int
    exact: Estimate
    layers: list[Estimate]
    whole: list[int]

    @property
    def setting(self) -> str:
        """As `--set` takes it; "" where no layer is worth its slots."""
        return f"cache.allocation.whole={self.whole}" if self.whole else ""

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {**asdict(self), "setting": self.setting}

    def sections(self) -> list[Section]:
        """For `kvexport.report`: the dearest layers first."""
        asked = f"{self.exact.count} in texts of {self.length} tokens, the full cache answers {self.exact.value:.0%}"
        said: dict[str, str] = {"recipe": self.recipe, "questions": asked}
        if self.whole:
            said["write"] = f"cache: {{allocation: {{whole: {self.whole}}}}}"
            said["or"] = f"--set {self.setting}"
        else:
            said["write"] = "nothing: " + (
                "no layer costs enough" if self.exact.value else "a model that answers nothing shows no layer's worth"
            )
        order = sorted(range(len(self.layers)), key=lambda i: -self.layers[i].value)
        rows = [
            (i, e.value, f"{e.low:.3g} to {e.high:.3g}", "whole" if i in self.whole else "")
            for i, e in ((i, self.layers[i]) for i in order)
        ]
        note = (
            "By how many nats a token of the answers gets less likely where that layer alone keeps its sinks and the "
            "latest eighth."
        )
        heads = ("layer", "nats", "95 %", "")
        return [KeyValues("Calibration", said), Table("What recall hangs on", heads, rows, note)]


def calibrate(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    length: int | None = None,
    passages: int = 4,
    seed: int = 0,
    text: str | None = None,
    progress: Callable[[str, int | None], Progress] = silent,
) -> Calibration:
    """Build the recipe's model with a full cache, ask it for facts in `passages` texts, and choose whole layers for the
    recipe's budget.

    length: tokens of a passage, default 1,000 or what the recipe's sequences have room for. text: what facts are put
    into, default Python's reference manual. Raises UsageError for a recipe in which no layer can be whole (it evicts
    nothing, its positions are those in the cache, its budget is too small), a checkpoint without a tokenizer, and a
    text that is too short.
    """
    from kvexport.export.build import build, read_model

    own = load_recipe(recipe, overrides)
    with progress("reading the checkpoint", None):
        shape = read_model(own.recipe)
    _require_a_whole_layer(own.recipe, shape.geometry)
    length = length or min(LENGTH, own.recipe.limits.max_length - ROOM)
    given = fact_passages(shape.checkpoint.path, text, length, passages, seed)
    with tempfile.TemporaryDirectory(prefix="kvexport-calibrate-") as folder:
        made = build(_full(own.resolved, length), Path(folder) / "full", progress=progress)
        engine = load(made, verify=False)
        rounds = passages * (1 + len(engine.plan.caches))
        with progress(f"asking without one layer after another, {rounds} times", rounds) as bar:
            answers, cost = retrieval_layers(engine, given, advance=bar.advance)
    exact = share(sum(a.exact for a in answers), len(answers))
    layers = [mean(costs) for costs in cost.T]
    whole = whole_layers([e.value for e in layers], own.recipe, shape.geometry) if exact.value else []
    return Calibration(own.name, length, exact, layers, whole)


def _full(recipe: dict[str, Any], length: int) -> Recipe:
    """The recipe, as plain data, with a full cache for a passage and its questions."""
    cache = {**recipe["cache"], "method": "full", "parameters": {}}
    limits = {**recipe["limits"], "max_length": length + ROOM, "max_batch": FACTS}
    export = {**recipe["export"], "prefill_chunk": min(256, length)}
    return Recipe.model_validate({**recipe, "cache": cache, "limits": limits, "export": export})


def whole_layers(cost: Sequence[float], recipe: Recipe, geometry: Sequence[LayerGeometry]) -> list[int]:
    """The dearest layers that matter, as many as the recipe's budget has slots for."""
    least = MATTERS * sum(max(c, 0.0) for c in cost)
    dearest = sorted((i for i, c in enumerate(cost) if c > 0 and c >= least), key=lambda i: -cost[i])
    chosen = dearest[: max(1, int(MOST * recipe.budget * len(cost) / recipe.limits.max_length))]
    while chosen and not _fits(recipe, chosen, geometry):
        chosen.pop()
    return sorted(chosen)


def _with_whole(recipe: Recipe, whole: list[int]) -> Recipe:
    allocation = recipe.cache.allocation.model_copy(update={"whole": sorted(whole)})
    return recipe.model_copy(update={"cache": recipe.cache.model_copy(update={"allocation": allocation})})


def _fits(recipe: Recipe, whole: list[int], geometry: Sequence[LayerGeometry]) -> bool:
    try:
        plan_cache(_with_whole(recipe, whole), geometry)
    except UsageError:
        return False
    return True


def _require_a_whole_layer(recipe: Recipe, geometry: Sequence[LayerGeometry]) -> None:
    """Raises UsageError where no layer of the recipe can be whole; before minutes of measuring."""
    if not recipe.cache.build_method().compresses or recipe.budget >= recipe.limits.max_length:
        raise UsageError(
            f"this recipe's cache evicts nothing (method {recipe.cache.method}, {recipe.budget} slots), so that every "
            "layer is whole",
            "--set cache.method=h2o --set cache.budget=0.34, or what you want to build",
        )
    try:
        plan_cache(_with_whole(recipe, [0]), geometry)
    except UsageError as error:
        raise UsageError(f"no layer of this recipe can be whole: {error.problem}", error.fix) from error


def fact_passages(checkpoint: Path, text: str | None, length: int, count: int, seed: int) -> list[Passage]:
    """Texts of about `length` tokens with FACTS facts each. Raises UsageError where the text is too short, or the
    checkpoint has no tokenizer."""
    if not (checkpoint / FILE_NAME).exists():
        raise UsageError(f"{checkpoint} has no {FILE_NAME}, without which no fact can be told", "put it there")
    tokenizer = Tokenizer.from_folder(checkpoint)
    language = language_of(tokenizer, text)
    made = []
    for i in range(count):
        rng, places = random.Random(f"{seed}/{i}"), np.random.default_rng([seed, i])
        if isinstance(language, Words):
            sentences = [tokenizer.decode(ids) for ids in language.filler(places, length)]
            told = zip(rng.sample(language.names, FACTS), rng.sample(language.things, FACTS), strict=True)
            facts = [(f"{name} {thing} .", f"? {name}", thing) for name, thing in told]
        else:
            sentences = re.split(r"(?<=[.:;]) ", " ".join((text or manual()).split()))
            first = rng.randrange(max(1, len(sentences) // 2))
            sentences = sentences[first:] + sentences[:first]
            facts = [_code(thing, f"{rng.randrange(10_000):04}") for thing in rng.sample(THINGS, FACTS)]
        found = passage(lambda text: _encode(tokenizer, text), sentences, facts, length, places)
        if len(found.ids) < length // 2:
            raise UsageError(
                f"the text to put facts into gives passages of {len(found.ids)} tokens, not of {length}",
                f"--text FILE with more text, or --length {len(found.ids)}",
            )
        made.append(replace(found, ids=[*language.start, *found.ids]))
    return made


def _code(thing: str, number: str) -> tuple[str, str, str]:
    said = f"The code of the {thing} is"
    return f"{said} {number}.", said, number


def _encode(tokenizer: Tokenizer, text: str) -> Ids:
    return tokenizer.encode(text, add_special_tokens=False)
