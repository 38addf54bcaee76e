"""Checks of the committed results: every method was measured, and every planted bug was found.

    python -m pytest benchmarks

`make test` does not run these checks. A new method fails them until `sweep.py` and `stability.py` have measured it,
which takes hours on a real model.
"""

from __future__ import annotations

import pytest

from benchmarks import tables
from benchmarks.correctness import attacks, mutants
from kvexport.methods import all_methods

TRAINED = ("tiny-base", "small-base")


@pytest.mark.parametrize("recipe", (*TRAINED, "smollm2-135m-base"))
def test_sweeps_compare_every_method_at_every_budget_in_equal_bytes(recipe: str) -> None:
    rows = tables.load(f"sweep-{recipe}")["groups"]["methods"]["rows"]
    assert {r["label"].split(":")[0] for r in rows} == set(all_methods()) - {"full"}
    labels = {r["label"] for r in rows}
    assert {(r["label"], r["budget"]) for r in rows} == {
        (label, budget) for label in labels for budget in tables.BUDGETS
    }
    for budget in tables.BUDGETS:
        sizes = [r["bytes"] for r in rows if r["budget"] == budget]
        assert max(sizes) - min(sizes) < 0.02 * max(sizes)


@pytest.mark.parametrize("recipe", TRAINED)
def test_every_method_stays_finite_and_bounded_over_twenty_training_lengths(recipe: str) -> None:
    result = tables.load(f"stability-{recipe}")
    rows = {r["label"]: r for r in result["rows"]}
    assert {label.split(":")[0] for label in rows} == set(all_methods())
    for label, row in rows.items():
        assert row["finite"], label
        assert row["tokens"] == 20 * result["training_length"] - 1
        # A merged key is a mean of keys. The paper's Eq. 7 scales it, by up to 2 per merge.
        limit = 2.0 if "zip=key" in label else 1.05
        assert row["key_norm"][1] <= limit * rows["full"]["key_norm"][1], label


@pytest.mark.parametrize("kind", ["kernels", "cuda"])
def test_every_planted_bug_was_found(kind: str) -> None:
    run = tables.load(mutants.CHECKS[kind][0])
    assert run["mutants"].keys() == {mutant.name for mutant in mutants.TABLES[kind]}
    assert all(map(mutants.detected, run["mutants"].values()))
    assert not any(run.get("unchanged", {}).values())


def test_no_attack_succeeded_and_no_turn_was_lost() -> None:
    rows = tables.load("attacks")["rows"]
    assert attacks.ATTACKS.keys() <= rows.keys()
    assert not any(row["failures"] for row in rows.values())
    assert max(row["longest gap s"] for row in rows.values()) <= attacks.LONGEST_GAP
    turns = tables.load("session-turns")["rows"]
    assert sum(row["acknowledged"] for row in turns) >= 10_000 and not any(row["lost"] for row in turns)
