"""`kvexport calibrate`: the layers on which recall of facts depends, and those that a recipe's budget can keep whole.

A whole layer evicts nothing.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.cache import LayerGeometry
from kvexport.cache_planning import plan_cache
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.language import Ids, Words, language_of
from kvexport.evaluate.recall import Passage, passage, retrieval_layers
from kvexport.evaluate.statistics import Estimate, mean, share
from kvexport.language.tokenizer import FILE_NAME, Tokenizer
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.report.sections import KeyValues, Section, Table
from kvexport.terminal import Progress, silent

FACTS = 6  # facts in a passage; one question about each
LENGTH = 1000  # tokens of a passage, unless the recipe's sequences are shorter
ROOM = 64  # tokens for a question and its answer
MOST = 2 / 3  # largest share of all slots that whole layers may take; one whole layer may take more
MATTERS = 0.05  # a layer is worth its slots if its cost is above this share of the cost of all layers
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
    """The measured effect of each layer's cache on the recall of facts.

    Attributes:
        recipe: Name of the recipe.
        length: Tokens of a passage.
        exact: The share of the questions that the full cache answers.
        layers: Increase of -ln p per token of the answers, in nats, if that layer alone loses the middle of the text.
        whole: The layers that the recipe's budget can keep whole; [] if no layer is worth its slots.
    """

    recipe: str
    length: int
    exact: Estimate
    layers: list[Estimate]
    whole: list[int]

    @property
    def setting(self) -> str:
        """The layers that evict nothing, as an argument of the option `--set`; "" if no layer is worth its slots."""
        return f"cache.allocation.whole={self.whole}" if self.whole else ""

    def to_json(self) -> dict[str, Any]:
        """Return the measured recall and the chosen whole layers as JSON values."""
        return {**asdict(self), "setting": self.setting}

    def sections(self) -> list[Section]:
        """Return the sections of the report on recall by layer, the most important layers first."""
        questions = (
            f"{self.exact.count} in texts of {self.length} tokens, the full cache answers {self.exact.value:.0%}"
        )
        summary: dict[str, str] = {"recipe": self.recipe, "questions": questions}
        if self.whole:
            summary["write"] = f"cache: {{allocation: {{whole: {self.whole}}}}}"
            summary["or"] = f"--set {self.setting}"
        else:
            summary["write"] = "nothing: " + (
                "no layer costs enough" if self.exact.value else "a model that answers nothing shows no layer's worth"
            )
        order = sorted(range(len(self.layers)), key=lambda i: -self.layers[i].value)
        rows = [
            (i, e.value, f"{e.low:.3g} to {e.high:.3g}", "whole" if i in self.whole else "")
            for i, e in ((i, self.layers[i]) for i in order)
        ]
        note = (
            "Increase of -ln p per token of the answers, in nats, if that layer alone keeps only its sinks and the "
            "latest eighth."
        )
        heads = ("layer", "nats", "95 %", "")
        return [KeyValues("Calibration", summary), Table("Layers on which recall depends", heads, rows, note)]


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
    """Measure how much the recall of facts depends on each layer's cache, and choose layers that evict nothing.

    The recipe's budget limits the number of such whole layers. The recipe's model is built with a full cache and asked
    for facts in `passages` texts.

    Args:
        recipe: Name or file of the recipe.
        overrides: Changes of the recipe, as `--set` takes them.
        length: Tokens of a passage; None for 1,000, or the length that the recipe's sequences allow if that is less.
        passages: The number of passages.
        seed: Seed of the passages.
        text: The text to insert facts into; None for Python's reference manual.
        progress: Shows the stages.

    Raises:
        UsageError: No layer of the recipe can be whole (it evicts nothing, its positions are those in the cache, or its
            budget is too small), the checkpoint has no tokenizer, or the text is too short.
    """
    from kvexport.export.build import build, read_model

    own = load_recipe(recipe, overrides)
    with progress("reading the checkpoint", None):
        shape = read_model(own.recipe)
    _require_a_whole_layer(own.recipe, shape.geometry)
    length = length or min(LENGTH, own.recipe.limits.max_length - ROOM)
    texts = fact_passages(shape.checkpoint.path, text, length, passages, seed)
    with tempfile.TemporaryDirectory(prefix="kvexport-calibrate-") as folder:
        artifact = build(_full(own.resolved, length), Path(folder) / "full", progress=progress)
        engine = load(artifact, verify=False)
        rounds = passages * (1 + len(engine.plan.caches))
        with progress(f"asking without one layer after another, {rounds} times", rounds) as bar:
            answers, cost = retrieval_layers(engine, texts, advance=bar.advance)
    exact = share(sum(a.exact for a in answers), len(answers))
    layers = [mean(costs) for costs in cost.T]
    whole = whole_layers([e.value for e in layers], own.recipe, shape.geometry) if exact.value else []
    return Calibration(own.name, length, exact, layers, whole)


def _full(recipe: dict[str, Any], length: int) -> Recipe:
    """Return the recipe with a full KV cache that has room for a passage of `length` tokens and its questions.

    `recipe` is the content of the recipe's YAML file.
    """
    cache = {**recipe["cache"], "method": "full", "parameters": {}}
    limits = {**recipe["limits"], "max_length": length + ROOM, "max_batch": FACTS}
    export = {**recipe["export"], "prefill_chunk": min(256, length)}
    return Recipe.model_validate({**recipe, "cache": cache, "limits": limits, "export": export})


def whole_layers(cost: Sequence[float], recipe: Recipe, geometry: Sequence[LayerGeometry]) -> list[int]:
    """Return the layers that should evict nothing: the most important ones that the recipe's budget has slots for.

    Only layers whose cost is above the threshold `MATTERS` count.
    """
    least = MATTERS * sum(max(c, 0.0) for c in cost)
    dearest = sorted((i for i, c in enumerate(cost) if c > 0 and c >= least), key=lambda i: -cost[i])
    layers = dearest[: max(1, int(MOST * recipe.budget * len(cost) / recipe.limits.max_length))]
    while layers and not _fits(recipe, layers, geometry):
        layers.pop()
    return sorted(layers)


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
    """Raise UsageError if the recipe's budget lets no layer evict nothing, before minutes of measuring."""
    if not recipe.cache.build_method().compresses or recipe.budget >= recipe.limits.max_length:
        raise UsageError(
            f"this recipe's cache evicts nothing (method {recipe.cache.method}, {recipe.budget} slots), so every "
            "layer is whole already",
            "--set cache.method=h2o --set cache.budget=0.34, or what you want to build",
        )
    try:
        plan_cache(_with_whole(recipe, [0]), geometry)
    except UsageError as error:
        raise UsageError(f"no layer of this recipe can be whole: {error.problem}", error.fix) from error


def fact_passages(checkpoint: Path, text: str | None, length: int, count: int, seed: int) -> list[Passage]:
    """Return texts of about `length` tokens, each with FACTS inserted statements to recall, such as codes of places.

    Raises:
        UsageError: The text is too short, or the checkpoint has no tokenizer.
    """
    if not (checkpoint / FILE_NAME).exists():
        raise UsageError(f"{checkpoint} has no {FILE_NAME}, so facts cannot be written as tokens", "put it there")
    tokenizer = Tokenizer.from_folder(checkpoint)
    language = language_of(tokenizer, text)
    results = []
    for i in range(count):
        rng, places = random.Random(f"{seed}/{i}"), np.random.default_rng([seed, i])
        if isinstance(language, Words):
            sentences = [tokenizer.decode(ids) for ids in language.filler(places, length)]
            pairs = zip(rng.sample(language.names, FACTS), rng.sample(language.things, FACTS), strict=True)
            facts = [(f"{name} {thing} .", f"? {name}", thing) for name, thing in pairs]
        else:
            sentences = re.split(r"(?<=[.:;]) ", " ".join((text or manual()).split()))
            first = rng.randrange(max(1, len(sentences) // 2))
            sentences = sentences[first:] + sentences[:first]
            facts = [_code(thing, f"{rng.randrange(10_000):04}") for thing in rng.sample(THINGS, FACTS)]
        source = passage(lambda text: _encode(tokenizer, text), sentences, facts, length, places)
        if len(source.ids) < length // 2:
            raise UsageError(
                f"the text to insert facts into gives passages of {len(source.ids)} tokens, not of {length}",
                f"--text FILE with more text, or --length {len(source.ids)}",
            )
        results.append(replace(source, ids=[*language.start, *source.ids]))
    return results


def _code(thing: str, number: str) -> tuple[str, str, str]:
    statement = f"The code of the {thing} is"
    return f"{statement} {number}.", statement, number


def _encode(tokenizer: Tokenizer, text: str) -> Ids:
    return tokenizer.encode(text, add_special_tokens=False)
