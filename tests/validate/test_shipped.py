"""Answers with CUDA graphs and steps that run ahead are compared with answers without, over a device of the host."""

from pathlib import Path
from typing import Any

import numpy as np

from kvexport.engine.load import load
from kvexport.validate.shipped import shipped_difference
from tests.support.on_device import onto_device

TOKENS = [np.random.default_rng(i).integers(0, 64, size) for i, size in enumerate((160, 100, 1))]


def opened(path: Path, graphs: bool, wrong: int | None = None) -> Any:
    engine = onto_device(load(path), graphs=graphs)
    if graphs and wrong is not None:
        run, calls = engine.model.run, []

        def late(name: str, binding: Any, graph: int | None, *, wait: bool = True) -> None:
            """Leave one merge out, as a graph that was captured without it would."""
            calls.append(name)
            if name != "merge" or calls.count("merge") != wrong:
                run(name, binding, graph, wait=wait)

        engine.model.run = late
    return engine


def test_graphs_and_steps_ahead_give_equal_answers(tiny_artifact: Path) -> None:
    assert shipped_difference(lambda graphs: opened(tiny_artifact, graphs), TOKENS) == ""


def test_a_graph_that_lacks_a_merge_is_named(tiny_artifact: Path) -> None:
    found = shipped_difference(lambda graphs: opened(tiny_artifact, graphs, wrong=3), TOKENS)
    assert "of the answer to sequence" in found and "with them and" in found
