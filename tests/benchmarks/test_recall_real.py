"""Tests of the published method that is not part of kvexport, and of how answers are saved."""

from typing import Any

import pytest
import torch

from benchmarks.quality import recall_real
from kvexport.methods.slots import Slots


def test_keydiff_keeps_the_keys_that_differ_from_the_mean_of_those_that_are_there() -> None:
    key = torch.tensor([[3.0, 0.1], [9.0, 0.2], [0.0, 2.0], [1.0, 0.0], [-5.0, 0.0]])[None, None]
    votes = torch.tensor([[[1.0, 1.0, 1.0, 1.0, 0.0]]])
    nothing = torch.zeros(1, 1, 5)
    slots = Slots(key, key, votes, nothing[:, :, None], nothing.int(), torch.zeros(1, 1, 1, dtype=torch.int32))
    score = recall_real.KeyDiff().keep_score(slots, votes > 0, 1)[0, 0, :4]
    unit = torch.nn.functional.normalize(key[0, 0, :4], dim=-1)
    expected = -torch.nn.functional.cosine_similarity(unit, unit.mean(0, keepdim=True))
    torch.testing.assert_close(score / score.norm(), expected / expected.norm())
    assert int(score.argmax()) == 2


@pytest.mark.parametrize(("method", "layers"), [("h2o", []), ("h2o+whole", [7, 8, 17, 18, 23]), ("h2o+8+18", [8, 18])])
def test_a_method_names_its_whole_layers(method: str, layers: list[int]) -> None:
    assert recall_real.whole_layers(method) == layers


def test_differences_are_over_the_questions_of_both_methods() -> None:
    def row(method: str, each: list[list[float]]) -> dict[str, Any]:
        label = {"task": "codes", "method": method, "divisor": 3, "length": 2000, "known": False, "set": []}
        return recall_real.row(label, each)

    more = row("keepkv+whole", [[1, 1.0], [1, 1.0], [0, 0.5]])
    fewer = row("streaming", [[0, 0.25], [1, 1.0]])
    rows = recall_real.differences([more, fewer, row("h2o", [[0, 0.0], [0, 0.0]])])
    assert [(d["method"], d["best_published"]) for d in rows] == [("keepkv+whole", "streaming")]
    assert rows[0]["exact"]["value"] == pytest.approx(0.5)
    assert rows[0]["exact"]["count"] == 2
    assert more["questions"] == 3 and more["provenance"]["command"] and more["provenance"]["commit"]
