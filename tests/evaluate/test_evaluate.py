"""eval: what it measures equals what it says, budgets have equal bytes, and a cache that holds everything is the full
cache."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvexport
from kvexport.cache import LayerGeometry, plan_cache
from kvexport.commands.app import app
from kvexport.errors import UsageError
from kvexport.evaluate.measure import counted_logits, judge, run_long, step_seconds
from kvexport.evaluate.runner import Evaluation, Options, evaluate
from kvexport.evaluate.sections import sections
from kvexport.evaluate.settings import equal_bytes, longer_checkpoint, overrides_of, parse_budgets
from kvexport.evaluate.suites import Item, run_items
from kvexport.evaluate.tasks import TASKS, Sample
from kvexport.recipe.inherit import recipe_folder
from kvexport.report.page import render_html, render_text
from tests.support.models import hugging_face_logits

LENGTH = 192
GEOMETRY = [LayerGeometry(4, 2, 32, 32)] * 2


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """The tiny trained model with sinks and a window: a sixth of the prompt, and more slots than it has tokens."""
    options = Options(
        methods=("streaming",),
        budgets=(32, 256),
        tasks=("needle", "duplicates", "text", "stability", "counting"),
        samples=10,
        length=LENGTH,
        training_length=64,
        telemetry=True,
    )
    return evaluate("tiny-base", ["export.prefill_chunk=16"], options, tmp_path_factory.mktemp("eval"))


def test_the_full_cache_recalls(evaluation: Evaluation) -> None:
    needle = evaluation.full.scores["needle"]
    assert needle.accuracy is not None
    assert needle.accuracy.value == 1.0
    assert needle.accuracy.count == 30
    assert needle.kl is None
    heads, size, other = 2, 2 * 32 * 4, 4 + 4 + 4  # keys and values; votes, score, position
    assert evaluation.full.bytes == 2 * heads * LENGTH * (size + other) + 8
    text = evaluation.full.scores["text"]
    assert text.nll is not None
    assert text.nll.value < 0.1


def test_a_budget_that_holds_everything_is_the_full_cache(evaluation: Evaluation) -> None:
    _, roomy = evaluation.results
    assert roomy.slots == 256
    for task, score in roomy.scores.items():
        full = evaluation.full.scores[task]
        assert score.accuracy == full.accuracy
        assert score.kl is not None
        assert score.nll is not None
        assert full.nll is not None
        assert score.kl.value < 1e-6
        assert score.agreement == 1.0
        assert score.nll.value == pytest.approx(full.nll.value, abs=1e-4)


def test_a_window_forgets_what_lies_before_it(evaluation: Evaluation) -> None:
    small = evaluation.results[0]
    right = {(c.length, c.depth): c.right / c.samples for c in small.scores["needle"].cells}
    assert right[LENGTH, 1.0] == 1.0
    assert right[LENGTH, 0.25] == right[LENGTH, 0.5] == 0.0
    kl, accuracy = small.scores["needle"].kl, small.scores["needle"].accuracy
    assert kl is not None
    assert accuracy is not None
    assert kl.low > 0.5
    assert accuracy.value == sum(right.values()) / len(right)


def test_stability_runs_twenty_lengths(evaluation: Evaluation) -> None:
    small, roomy = evaluation.results
    assert [w.end for w in small.windows][:3] == [64, 128, 192]
    assert small.windows[-1].end == 20 * 64 - 1
    assert all(w.finite and 0 < w.key_norm < 100 for w in small.windows)
    assert not roomy.windows


def test_telemetry_is_of_what_merges(evaluation: Evaluation) -> None:
    small, roomy = evaluation.results
    assert evaluation.full.telemetry is None
    assert roomy.telemetry == []
    assert small.telemetry
    assert max(r.tokens for r in small.telemetry) > LENGTH // 2
    assert all(r.heads == 8 * 4 and 0 < r.mean <= r.largest and r.theorem is None for r in small.telemetry)
    page = render_html("Evaluation", "", sections(evaluation))
    assert "Perturbation, merge by merge: streaming, 32 slots" in page
    assert "Perturbation by merging" in render_text(sections(evaluation))
    assert "Theorem 5" not in page


def test_what_a_model_cannot_be_asked_is_said(evaluation: Evaluation) -> None:
    assert list(evaluation.skipped) == ["counting"]
    assert evaluation.tasks == ["needle", "duplicates", "text"]
    assert "not asked: counting" in render_text(sections(evaluation))


def test_the_report_shows_every_candidate(evaluation: Evaluation) -> None:
    page = render_html("Evaluation", "", sections(evaluation))
    for words in (
        "streaming, 32 slots",
        "Accuracy: needle",
        "KL to the full cache: text",
        "needle: full",
        "Largest key norm",
    ):
        assert words in page
    tables = render_text(sections(evaluation))
    assert "Perplexity and distance: text" in tables
    assert f"{evaluation.results[0].bytes:,}" in tables


def test_the_verb_asks_for_what_it_was_told_and_prints_everything(
    evaluation: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def answer(*arguments: Any) -> Evaluation:
        asked.extend(arguments)
        return evaluation

    monkeypatch.setattr("kvexport.evaluate.runner.evaluate", answer)
    (tmp_path / "book.txt").write_text("Once upon a time")
    arguments = [
        "--methods",
        "streaming,keepkv:threshold=0.7",
        "--budgets",
        "1/4,64",
        "--tasks",
        "needle,text",
        "--samples",
        "5",
    ]
    arguments += [
        "--length",
        "64",
        "--seed",
        "7",
        "--batch",
        "3",
        "--text",
        f"{tmp_path}/book.txt",
        "--telemetry",
        "--html",
        f"{tmp_path}/page.html",
    ]
    result = CliRunner().invoke(app, ["eval", "--recipe", "tiny-base", "--set", "cache.sinks=2", "--json", *arguments])
    assert result.exit_code == 0, result.output
    name, overrides, options, work, _ = asked
    assert (name, overrides, work) == ("tiny-base", ["cache.sinks=2"], None)
    methods, budgets = ("streaming", "keepkv:threshold=0.7"), (0.25, 64.0)
    assert options == Options(
        methods, budgets, ("needle", "text"), 5, 64, 7, 3, source="Once upon a time", telemetry=True
    )
    data = json.loads(result.stdout)
    assert [r["slots"] for r in data["results"]] == [32, 256]
    assert data["full"]["scores"]["needle"]["accuracy"]["count"] == 30
    assert data["full"]["scores"]["duplicates"]["cells"] == []
    assert "<svg" in (tmp_path / "page.html").read_text()
    default = CliRunner().invoke(app, ["eval", "--recipe", "tiny-base"])
    assert default.exit_code == 0, default.output
    assert asked[7] == Options()
    assert "Perplexity and distance: text" in default.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "needles"], "unknown task 'needles'"),
        (["--budgets", "3/2"], "'3/2' is no budget"),
        (["--length", "9" * 23], "--length"),
        (["--methods", "streaming:sinks"], "'sinks' is no setting"),
        (["--methods", "nothing"], "unknown method 'nothing'"),
        (["--budgets", "4"], "cannot hold"),
        (["--length", "16", "--tasks", "duplicates"], "the task duplicates at a length of 16"),
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--ruler", "nowhere"], "holds no task of RULER"),
        (["--html", "nowhere/page.html"], "does not exist"),
        (["--telemetry", "--tasks", "stability"], "telemetry is taken on the samples of a task"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["eval", "--recipe", "tiny-base", *arguments])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "building" not in result.stderr


def test_budgets_are_shares_or_slots() -> None:
    assert parse_budgets("1/8, 0.5,64,1/8") == [0.125, 0.5, 64.0]
    assert parse_budgets("1/1") == [1.0]
    for wrong in ("0", "x", "1.5", "-1/2", "1/0", "", "nan", "inf", "9" * 23, "inf/inf"):
        with pytest.raises(UsageError, match="is no budget"):
            parse_budgets(wrong)


def test_labels_set_parameters() -> None:
    assert overrides_of("keepkv:threshold=0.7:cache.recent=0.8") == [
        "cache.method=keepkv",
        "cache.parameters.threshold=0.7",
        "cache.recent=0.8",
    ]


def test_budgets_have_equal_bytes() -> None:
    # cosine allocation rounds layer by layer; a longer merge interval costs slack.
    labels = ["streaming", "h2o", "keepkv:cache.allocation.kind=cosine", "streaming:cache.merge_every=64"]
    found = equal_bytes("tiny-base", labels, [0.125, 100], 512, GEOMETRY, [])
    assert [(c.label, c.budget) for c in found] == [(label, budget) for budget in (0.125, 100) for label in labels]
    for budget, slots in ((0.125, 64), (100, 100)):
        group = [c for c in found if c.budget == budget]
        limit = group[0].bytes
        assert group[0].slots == slots
        assert group[3].slots == slots - 32  # what the slack takes
        for setting in group:
            cache = setting.recipe.cache
            assert setting.bytes == plan_cache(setting.recipe, GEOMETRY).bytes() <= limit
            more = setting.recipe.model_copy(update={"cache": cache.model_copy(update={"budget": setting.slots + 1})})
            assert plan_cache(more, GEOMETRY).bytes() > limit


def test_a_divergence_is_the_closed_form() -> None:
    sample = Sample([0, 1], 1, [0])
    full, found = np.log(np.array([[0.25, 0.75]], np.float32)), np.log(np.array([[0.5, 0.5]], np.float32)) + 3
    outcome = judge(sample, found, full)
    assert outcome.kl[0] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert outcome.nll == pytest.approx(math.log(2))
    assert judge(sample, full, None).right
    assert not judge(Sample([0, 0], 1, [0]), full, None).right
    assert not outcome.agrees[0]


@pytest.fixture(scope="module")
def everything(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> kvexport.Engine:
    """The random model, uncompressed, with the logits of every token."""
    settings = ["cache.method=full", "export.logits=all", "limits.max_length=128"]
    return kvexport.load(kvexport.build(tiny_recipe, tmp_path_factory.mktemp("all") / "artifact", settings))


def test_counted_logits_are_hugging_faces(everything: kvexport.Engine, tiny_checkpoint: Path) -> None:
    rng = np.random.default_rng(0)
    samples = [
        Sample(rng.integers(0, 64, n).tolist(), prompt, counted)
        for n, prompt, counted in ((40, 40, [3, 17, 38]), (50, 44, [43, 44, 48]), (9, 1, [0, 7]))
    ]
    truth = hugging_face_logits(tiny_checkpoint, [np.array(s.ids) for s in samples])
    for sample, logits, whole in zip(samples, counted_logits(everything, samples), truth, strict=True):
        np.testing.assert_allclose(logits, whole[sample.counted], atol=2e-4)


def test_a_long_run_measures_the_loss_of_what_counts(everything: kvexport.Engine, tiny_checkpoint: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 64, 100)
    (logits,) = hugging_face_logits(tiny_checkpoint, [ids])
    loss = np.log(np.exp(logits).sum(-1))[:-1] - logits[np.arange(99), ids[1:]]
    windows = run_long(everything, ids.tolist(), [*range(10, 40), 90], window=40, decoded=16)
    assert [w.end for w in windows] == [40, 80, 99]
    assert windows[0].nll == pytest.approx(loss[10:40].mean(), abs=1e-4)
    assert math.isnan(windows[1].nll)
    assert windows[2].nll == pytest.approx(loss[90], abs=1e-4)


def test_an_artifact_of_last_logits_cannot_tell_what_lies_inside_a_prompt(tiny_recipe: Path, tmp_path: Path) -> None:
    engine = kvexport.load(
        kvexport.build(tiny_recipe, tmp_path / "artifact", ["cache.method=full", "limits.max_length=128"])
    )
    assert counted_logits(engine, [Sample([1, 2, 3, 4], 2, [1, 2])])[0].shape == (2, 64)
    with pytest.raises(UsageError, match="last token alone"):
        counted_logits(engine, [Sample([1, 2, 3, 4], 4, [1])])
    assert 0 < step_seconds(engine, 40) < 1


def test_prompts_of_suites_are_cut_in_the_middle_or_refused(everything: kvexport.Engine) -> None:
    seen: list[str] = []

    def score(text: str) -> float:
        seen.append(text)
        return float(len(text))

    short, long = "abc", "abcdefgh" * 30
    assert run_items(everything, [Item(short, 4, score), Item(long, 6, score, cut=True)], batch=2) == [4.0, 6.0]
    expected = everything.generate([long[:61] + long[-61:]], max_new_tokens=6, do_sample=False)[0].text
    assert seen[1] == expected
    with pytest.raises(UsageError, match="leaves no room in 128"):
        run_items(everything, [Item(long, 4, score)], batch=1)


def test_a_longer_checkpoint_shares_the_weights(tmp_path: Path) -> None:
    original = recipe_folder() / "checkpoints" / "tiny"
    copy = tmp_path / "original"
    shutil.copytree(original, copy)
    longer = longer_checkpoint(copy, tmp_path / "longer", 40960)
    config = json.loads((copy / "config.json").read_text())
    assert json.loads((longer / "config.json").read_text()) == {**config, "max_position_embeddings": 40960}
    assert (copy / "model.safetensors").samefile(longer / "model.safetensors")
    (copy / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    )
    with pytest.raises(UsageError, match="is dynamic"):
        longer_checkpoint(copy, tmp_path / "again", 40960)


def test_a_task_is_one_function() -> None:
    assert {"needle", "multikey", "multivalue", "associative", "tracking", "duplicates", "counting", "text"} <= set(
        TASKS
    )
    assert all(task.summary.endswith((".", "?")) for task in TASKS.values())
