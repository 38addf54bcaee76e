"""A build measures the budgets of its KV heads, once for each checkpoint, or gives the reason why it cannot."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.calibrate import measured, texts
from kvexport.calibrate.default import with_measured_budgets
from kvexport.calibrate.head_costs import HeadCosts
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.plan.budgets import allocate
from kvexport.recipe.load import LoadedRecipe, recipe_for
from tests.support.paths import ROOT

KINDS = {"prose": texts.FILES["prose"], "tables": texts.FILES["tables"]}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the small checkpoint, which a test may change."""
    folder = tmp_path_factory.mktemp("own") / "small"
    shutil.copytree(ROOT / "tests" / "checkpoints" / "small", folder)
    return folder


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache folder, shared by all tests of this module, so that the costs are measured once."""
    return tmp_path_factory.mktemp("cache-home")


@pytest.fixture(autouse=True)
def surroundings(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    monkeypatch.setattr(texts, "FILES", KINDS)


def budgets(checkpoint: Path, *settings: str, budget: int = 64, calibrate: bool | None = None) -> LoadedRecipe:

    def changed(more: Sequence[str]) -> LoadedRecipe:
        return recipe_for(str(checkpoint), [f"cache.budget={budget}", "limits.max_length=256", *settings, *more])

    return with_measured_budgets(changed([]), changed, calibrate=calibrate)


def counted(monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[Any]:
    """Return a list to which every measured text is appended. The text with the number `fail_at` is interrupted."""
    original, done = HeadCosts.of_text, list[Any]()

    def of_text(self: HeadCosts, *arguments: Any) -> Any:
        if len(done) == fail_at:
            raise KeyboardInterrupt
        done.append(arguments)
        return original(self, *arguments)

    monkeypatch.setattr(HeadCosts, "of_text", of_text)
    return done


def test_an_interrupted_measurement_continues_and_serves_every_budget(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as interrupted:
        done = counted(interrupted, fail_at=1)
        with pytest.raises(KeyboardInterrupt):
            budgets(small)
    assert len(done) == 1 and "the costs of 1 of 4 texts are kept" in capsys.readouterr().err
    more = counted(monkeypatch)
    recipe = budgets(small).recipe
    assert (compared := budgets(small).divergence) is not None and 0 < compared.built < compared.dropped
    assert len(more) == 3  # of two kinds of text and two passages with facts, the first was saved
    shares = np.array(recipe.cache.allocation.shares)
    assert shares.ndim == 2 and shares.std() > 0.1 and shares.mean() == pytest.approx(1, abs=0.02)
    assert sum(allocate(recipe, len(shares))) == 64 * shares.size
    other = budgets(small, budget=32).recipe
    assert other.cache.budget == 32 and other.cache.allocation.kind == "listed" and len(more) == 3


def test_a_gpu_gets_budgets_of_heads_and_equal_ones_for_a_quantized_cache(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = budgets(small, "backend.device=cuda").recipe.cache.allocation.shares
    assert shares == budgets(small).recipe.cache.allocation.shares
    assert "cache.dtype is int8: a merge on a GPU" in refused(small, capsys, "backend.device=cuda", "cache.dtype=int8")


def test_a_checkpoint_that_changed_is_measured_again(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets(small)
    counted(monkeypatch, fail_at=0)
    budgets(small)
    weights = next(small.glob("*.safetensors"))
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    os.utime(weights, (1, 1))
    with pytest.raises(KeyboardInterrupt):
        budgets(small)
    os.utime(weights, ns=times)
    for file in measured.cache_folder("calibrations").glob("*/*.json"):
        file.write_text('{"costs": [[[1.0]]]}')
    with pytest.raises(KeyboardInterrupt):
        budgets(small)


@pytest.mark.parametrize("settings", [["cache.allocation.kind=cosine"], ["cache.method=full"], ["cache.budget=256"]])
def test_a_recipe_that_leaves_no_choice_is_not_measured(
    small: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, fail_at=0)
    assert budgets(small, *settings).recipe.cache.allocation.shares == []
    assert budgets(small, calibrate=False).recipe.cache.allocation.kind is None


def refused(checkpoint: Path, capsys: pytest.CaptureFixture[str], *settings: str, budget: int = 64) -> str:
    loaded = budgets(checkpoint, *settings, budget=budget)
    assert loaded.recipe.cache.allocation.kind is None
    shown = capsys.readouterr().err
    with pytest.raises((UsageError, EnvironmentProblem)) as error:
        budgets(checkpoint, *settings, budget=budget, calibrate=True)
    assert error.value.problem in shown and "budgets are equal in all layers and KV heads, because" in shown
    return shown


def test_the_reason_is_printed_if_budgets_cannot_be_measured(
    small: Path,
    tiny_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "8 slots leave no choice: sinks, recent slots and two more take 12" in refused(small, capsys, budget=8)
    assert "does not know the words of the text 'prose'" in refused(tiny_checkpoint, capsys)
    bare = tmp_path / "bare"
    shutil.copytree(small, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert "has no tokenizer.json" in refused(bare, capsys)
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    monkeypatch.setattr(texts, "FILES", {"short": short})
    assert "tokens, expected at least 256" in refused(small, capsys)
    monkeypatch.setattr(texts, "FILES", {"code": texts.FOLDER / "code.txt"})
    monkeypatch.setattr(measured, "machine_memory", lambda: (1 << 20, 1 << 20))
    assert "of memory, and 1.05 MB are free" in refused(small, capsys)


def test_a_calibration_of_a_large_model_is_left_to_the_user(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvexport.calibrate.default.MOST_PARAMETERS", 1e5)
    os.utime(next(small.glob("*.safetensors")), (2, 2))
    monkeypatch.setattr(HeadCosts, "of_text", lambda *_: np.ones((6, 2, 5)))
    assert budgets(small).recipe.cache.allocation.kind is None
    assert "billion parameters takes more than half an hour" in capsys.readouterr().err
    assert budgets(small, calibrate=True).recipe.cache.allocation.kind == "listed"


def test_a_build_reads_a_number_of_texts_that_depends_on_the_model_alone(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that a longer calibration has measured change nothing for a build that reads fewer."""
    done: list[object] = []

    def of_text(_: object, ids: object, *__: object) -> object:
        done.append(ids)
        costs = np.ones((6, 2, 5)) / np.arange(1, 6)
        costs[len(done) % 6] *= 50
        return costs

    monkeypatch.setattr(measured, "PARAMETERS", 1.0)
    monkeypatch.setattr(measured, "SHORT", -1)
    monkeypatch.setattr(HeadCosts, "of_text", of_text)
    os.utime(next(small.glob("*.safetensors")), (3, 3))
    first = budgets(small).recipe.cache.allocation.shares
    assert len(done) == measured.FEWEST
    shown = capsys.readouterr().err
    assert "calibrating on 3 texts, about" in shown and "--no-calibrate builds at once with equal budgets" in shown
    assert re.findall(r"(\d of 3) texts are measured, about \d+ s left", shown) == ["1 of 3", "2 of 3"]
    assert budgets(small, calibrate=True).recipe.cache.allocation.shares != first
    assert len(done) == 4
    assert budgets(small).recipe.cache.allocation.shares == first and len(done) == 4
