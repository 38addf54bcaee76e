"""A method is one file, which runs in PyTorch and as an ONNX function, and satisfies the contract."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvexport.methods
from benchmarks import tables
from kvexport.evaluate.settings import load_setting
from kvexport.methods import all_methods
from kvexport.recipe.cache import CacheSection
from tests.conformance.backends import Torch, reached
from tests.conformance.cases import RECENT, SINKS, MergeProfile, MergeScenario, merge_cache_state
from tests.conformance.comparison import STATE, assert_same_cache, by_position, state_of

FILE = '''
"""Keys of small norm stay: what leaves is dropped."""

from kvexport.methods.base import Method


class SmallNorm(Method):
    """Devoto et al. (arXiv 2406.11430) found that keys of low L2 norm draw the attention."""

    name = "small_norm"
    summary = "small key norms stay"
    source = "arXiv 2406.11430"
    power: float = 2.0

    def keep_score(self, slots, unprotected, count):
        return -slots.key.float().norm(dim=-1) ** self.power
'''
SCENARIO = MergeScenario("new-method", 20, 12, ((20, 20), (13, 16), (0, 0), (12, 5)))


@pytest.fixture
def small_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MergeProfile]:
    (tmp_path / "small_norm.py").write_text(FILE)
    monkeypatch.setattr(kvexport.methods, "__path__", [*kvexport.methods.__path__, str(tmp_path)])
    all_methods.cache_clear()
    yield MergeProfile("small-norm", "small_norm", {"power": 1.0})
    monkeypatch.undo()
    sys.modules.pop("kvexport.methods.small_norm", None)
    all_methods.cache_clear()


def test_a_new_file_is_a_method_that_recipes_may_name(small_norm: MergeProfile) -> None:
    assert "small_norm" in all_methods()
    method = CacheSection(method="small_norm", parameters={"power": 3.0}).build_method()
    assert method.model_dump() == {"power": 3.0}
    with pytest.raises(ValueError, match="powr"):
        CacheSection(method="small_norm", parameters={"powr": 3.0}).build_method()


def test_eval_and_the_table_of_the_docs_have_the_new_method(small_norm: MergeProfile) -> None:
    assert load_setting("tiny-base", "small_norm:power=3", 64, []).cache.parameters == {"power": 3}
    assert "| `small_norm` | small key norms stay | none | 0 | uniform | arXiv 2406.11430 |" in tables.methods()


def test_the_new_method_runs_in_every_backend_that_derives_methods(
    small_norm: MergeProfile, record_property: Callable[[str, object], None]
) -> None:
    state = merge_cache_state(small_norm, SCENARIO)
    attributes = small_norm.attributes(SCENARIO.budget)
    torch_result = state_of(Torch().merge_cache(state, attributes))
    for b, row in enumerate(SCENARIO.used):
        for h, used in enumerate(row):
            old, new = by_position(state, b, h), by_position(torch_result, b, h)
            now = old["position"].max(initial=-1)
            free = (old["position"] >= SINKS) & (old["position"] <= now - RECENT)
            norm = np.where(free, np.linalg.norm(old["key"], axis=-1), -1.0)
            leaving = np.argsort(-norm)[: max(used - SCENARIO.budget, 0)]
            stays = np.delete(np.arange(used), leaving)
            for name in STATE:
                axis = -1 if name not in ("key", "value") else 0
                assert (new[name] == old[name].take(stays, axis)).all(), name
    # Native kernels know only the methods for which they were written. A function can be derived for any method.
    for backend in reached():
        if backend.name == "onnx-function":
            start = time.perf_counter()
            result = state_of(backend.merge_cache(state, attributes))
            record_property(
                "seconds from a method's file to its ONNX function's first result",
                round(time.perf_counter() - start, 2),
            )
            assert_same_cache(result, torch_result, (), single=0.0, stored=0.0)
