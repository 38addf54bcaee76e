"""After SIGTERM or SIGINT in any stage of a build or a calibration there is one line, an exit code, no partial file."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvexport.artifact.reading import load_manifest
from tests.support.command_line import ENVIRONMENT, ROOT
from tests.support.http_server import wait_until

STAGES, BUILD, PUBLISH = "kvexport.export.stages", "kvexport.export.build", "kvexport.artifact.publish"
BUILD_PLACES = [
    f"{BUILD}:read_model",
    "kvexport.export.texts:copy_texts",
    f"{STAGES}:choose_weights",
    f"{STAGES}:_merge_bytes",  # in a separate process
    f"{STAGES}:write_weights",  # in a separate process
    "kvexport.export.graph.tracer:trace_decoder",
    f"{STAGES}:write_graphs",
    f"{STAGES}:describe",
    f"{BUILD}:write_manifest",
    f"{PUBLISH}:sync_tree",
    f"{PUBLISH}:_publish",
]
CALIBRATE_PLACES = [f"{BUILD}:read_model", "kvexport.calibrate.head_costs:_fisher_directions"]
ENDS = [signal.SIGTERM, signal.SIGINT]

Run = Callable[[str, signal.Signals, list[object]], tuple[int, str, str]]


@pytest.fixture(scope="module")
def jobs(traces: Path, tiny_recipe: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.signalled", str(traces), str(tiny_recipe)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=ROOT, env=ENVIRONMENT, **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.stdin.close()


@pytest.fixture
def signalled(jobs: subprocess.Popen[str], tmp_path: Path) -> Run:
    """A function that runs a command, signals it at a place, and returns the exit code, stdout and stderr."""

    def run(place: str, number: signal.Signals, arguments: list[object]) -> tuple[int, str, str]:
        (tmp_path / "temporary").mkdir()
        files = {name: str(tmp_path / name) for name in ("stdout", "stderr", "reached")}
        job = {"arguments": [str(a) for a in arguments], "place": place, "signal": int(number), **files}
        assert jobs.stdin and jobs.stdout
        jobs.stdin.write(json.dumps({**job, "folder": str(tmp_path / "temporary")}) + "\n")
        jobs.stdin.flush()
        child = int(jobs.stdout.readline())
        if ":" not in place:
            wait_until((tmp_path / "reached").exists)
            os.kill(child, number)
        code = int(jobs.stdout.readline())
        assert (tmp_path / "reached").exists(), "the place was not reached"
        assert list((tmp_path / "temporary").glob("kvexport*")) == []
        return code, (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text()

    return run


def check_end(number: signal.Signals, code: int, stdout: str, stderr: str) -> None:
    assert code == 128 + number, stderr
    words = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert stderr.rstrip().splitlines()[-1] == words
    assert "Traceback" not in stderr and stdout == ""


@pytest.mark.parametrize(("place", "number"), zip(BUILD_PLACES, itertools.cycle(ENDS), strict=False))
def test_a_build_that_is_ended_leaves_the_artifact_before_it(
    signalled: Run, tiny_recipe: Path, tiny_artifact: Path, tmp_path: Path, place: str, number: signal.Signals
) -> None:
    """A build that is ended keeps the previous artifact, which every second build would replace."""
    out = tmp_path / "out" / "artifact"
    out.parent.mkdir()
    replaces = BUILD_PLACES.index(place) % 4 > 1
    if replaces:
        shutil.copytree(tiny_artifact, out)
    check_end(number, *signalled(place, number, ["build", "--recipe", tiny_recipe, "--out", out]))
    assert [path.name for path in out.parent.iterdir()] == (["artifact"] if replaces else [])
    if replaces:
        assert load_manifest(out) == load_manifest(tiny_artifact)


def test_a_signal_after_the_publication_leaves_the_new_artifact(
    signalled: Run, tiny_recipe: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "artifact"
    out.parent.mkdir()
    arguments = ["build", "--recipe", tiny_recipe, "--out", out]
    check_end(signal.SIGTERM, *signalled(f"{PUBLISH}:release", signal.SIGTERM, arguments))
    assert load_manifest(out).files == load_manifest(tiny_artifact).files
    assert {path.name for path in out.parent.iterdir()} <= {"artifact", ".artifact.lock"}


@pytest.mark.parametrize(("place", "number"), zip(CALIBRATE_PLACES, itertools.cycle(ENDS), strict=False))
def test_a_calibration_that_is_ended_prints_nothing_and_leaves_nothing(
    signalled: Run, place: str, number: signal.Signals
) -> None:
    arguments = ["calibrate", "--recipe", "tiny-base", "--set", "cache.budget=32", "--json"]
    check_end(number, *signalled(place, number, arguments))


@pytest.mark.parametrize(
    ("number", "file"), [(signal.SIGTERM, "decoder.onnx"), (signal.SIGHUP, "tokenizer.json")], ids=["late", "early"]
)
def test_a_build_that_is_ended_from_outside_leaves_nothing_behind(
    signalled: Run, tiny_recipe: Path, tmp_path: Path, number: signal.Signals, file: str
) -> None:
    out = tmp_path / "out" / "artifact"
    out.parent.mkdir()
    check_end(number, *signalled(file, number, ["build", "--recipe", tiny_recipe, "--out", out]))
    assert list(out.parent.iterdir()) == []


def test_an_evaluation_that_is_ended_leaves_no_folder(signalled: Run, tiny_recipe: Path) -> None:
    arguments = ["eval", "--recipe", tiny_recipe, "--tasks", "text", "--samples", 1, "--length", 64, "--budgets", 32]
    check_end(signal.SIGTERM, *signalled("tokenizer.json", signal.SIGTERM, arguments))
