"""A backend is a folder: no other code has its name, and a new folder is a new backend everywhere."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvexport
from kvexport import backends
from kvexport.artifact.reading import load_manifest
from kvexport.backends import sections
from kvexport.errors import ArtifactError, UsageError
from kvexport.recipe.load import load_recipe
from kvexport.validate.runner import validate_artifact
from tests.support.paths import ROOT

PACKAGE = ROOT / "kvexport"
SECTION = '''
from typing import Literal

from pydantic import Field

from kvexport.recipe.section import RecipeSection


class Echo(RecipeSection):
    """How the echo answers."""

    volume: int = Field(3, ge=0, le=11, description="How loud.")


class Section(RecipeSection):
    """Keys of `backend:`."""

    echo: Echo = Field(Echo(), description="How the echo answers.")
'''
# The backend runs the graphs with ONNX Runtime, after a step of its own, so that there is a result to compare.
BACKEND = '''
from dataclasses import replace

from kvexport import backends
from kvexport.backends.base import Backend, Description, Diagnosis
from kvexport.errors import ArtifactError, EnvironmentProblem


class EchoBackend(Backend):
    """A made-up backend."""

    name = "echo"
    prepared = frozenset({"echo.txt"})

    def problems(self, recipe):
        return [("it is too loud here", "--set backend.echo.volume=3")] if recipe.backend.echo.volume > 10 else []

    def preparation(self, recipe):
        for problem, fix in self.problems(recipe):
            raise EnvironmentProblem(problem, fix)

        def add(folder, manifest, progress):
            (folder / "echo.txt").write_text("hello " * recipe.backend.echo.volume)
            return replace(manifest, engines={**manifest.engines, "echo": {"file": "echo.txt"}})

        return add

    def load(self, path, manifest, options):
        if "echo" not in manifest.engines:
            raise ArtifactError(f"{path} has no echo", f"kvexport build --from {path} --backend echo")
        return backends.get("onnxruntime").load(path, manifest, options)

    def runners(self, sessions, manifest):
        return backends.get("onnxruntime").runners(sessions, manifest)

    def diagnose(self):
        return Diagnosis({"echo": "from the hills"}, {"echo": {"hills": 2}})

    def describe(self, path, manifest):
        from kvexport.report import KeyValues

        said = (path / "echo.txt").read_text() if "echo" in manifest.engines else "nothing"
        return Description((KeyValues("Echo", {"said": said}),), {"echo": said})


BACKEND = EchoBackend()
'''
# The folder is in the package's path before kvexport is first imported, as an installed one is. Every line of stdin is
# one command, which a fork of this process runs: importing torch anew for each would take most of the time.
MAIN = """
import json, os, sys
from pathlib import Path

import kvexport.backends

kvexport.backends.__path__.append({folder!r})
import kvexport.export.graph.graphs
import kvexport.validate.merges
import transformers.models.llama.modeling_llama
from kvexport.commands.app import main
from tests.support.shared_traces import shared_traces

for line in sys.stdin:
    arguments, *streams = json.loads(line)
    if not os.fork():
        for number, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv[1:] = arguments
        with shared_traces(Path({traces!r})):
            sys.exit(main())
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def alternatives() -> str:
    *others, last = map(repr, sections.names())
    return f"{', '.join(others)} or {last}"


@pytest.fixture(scope="module")
def echo(
    tmp_path_factory: pytest.TempPathFactory, traces: Path
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """A function that runs kvexport's command line with an invented backend installed."""
    path = tmp_path_factory.mktemp("third") / "echo"
    path.mkdir()
    (path / "__init__.py").write_text('"""A made-up backend."""\n')
    (path / "section.py").write_text(SECTION)
    (path / "backend.py").write_text(BACKEND)
    command = [sys.executable, "-c", MAIN.format(folder=str(path.parent), traces=str(traces))]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    streams = [path.parent / name for name in ("stdout", "stderr")]

    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:

        def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps([arguments, *map(str, streams)]) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            done = subprocess.CompletedProcess(arguments, status, *(stream.read_text() for stream in streams))
            assert done.returncode == code, done.stdout + done.stderr
            return done

        yield run


def test_a_folder_is_a_backend_everywhere(
    tiny_recipe: Path, tmp_path: Path, echo: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    artifact = tmp_path / "a"
    recipe = tmp_path / "echo.yaml"
    recipe.write_text(f"extends: {tiny_recipe}\nbackend:\n  name: echo\n  echo: {{volume: 2}}\n")
    # The backend's section is part of the recipe, with the usual errors.
    shown = echo("recipes", "show", str(recipe), "--resolved", "--origin").stdout
    assert re.search(r"backend\.echo\.volume\s+2\s+\S*echo\.yaml:4", shown)
    loud = echo("plan", "--recipe", str(recipe), "--set", "backend.echo.volume=12", code=2)
    assert "backend.echo.volume: should be less than or equal to 11 (how loud), found 12" in loud.stderr
    # The backend builds and prepares an artifact. It reports a missing requirement before the build starts.
    lacking = echo("build", "--recipe", str(recipe), "--set", "backend.echo.volume=11", "--out", str(artifact), code=3)
    assert "it is too loud here" in lacking.stderr
    assert not artifact.exists()
    echo("build", "--recipe", str(recipe), "--out", str(artifact))
    assert (artifact / "echo.txt").read_text() == "hello hello "
    # An artifact gives the same tokens on another backend.
    generate = ("generate", str(artifact), "abc", "--max-new-tokens", "8", "--greedy")
    assert echo(*generate).stdout == echo(*generate, "--backend", "onnxruntime").stdout
    assert ", ".join(sorted(["echo", *sections.names()])) in echo(*generate, "--backend", "nobody", code=2).stderr
    # validate compares the backend with PyTorch, with all layers and with the first ones.
    results = json.loads(echo("validate", str(artifact), "--length", "60", "--batch", "1", "--json").stdout)
    assert (results["backend"], results["passed"]) == ("echo", True)
    first = echo("validate", str(artifact), "--length", "60", "--batch", "1", "--json", "--layers", "1")
    assert (json.loads(first.stdout)["backend"], json.loads(first.stdout)["layers"]) == ("echo", [1, 2])
    # inspect and doctor show the backend.
    assert re.search(r"said\s+hello hello", echo("inspect", str(artifact)).stdout)
    seen = json.loads(echo("inspect", str(artifact), "--json").stdout)
    assert (seen["echo"], seen["engines"]) == ("hello hello ", {"echo": {"file": "echo.txt"}})
    assert re.search(r"echo\s+from the hills", echo("doctor").stdout)
    assert json.loads(echo("doctor", "--json").stdout)["echo"] == {"hills": 2}
    assert " or ".join(sorted(["echo", *sections.names()])) in " ".join(echo("generate", "--help").stdout.split())
    # build --from prepares the artifact again for this machine.
    echo("build", "--from", str(artifact), "--set", "backend.echo.volume=1")
    assert (artifact / "echo.txt").read_text() == "hello "
    refused = echo("build", "--from", str(artifact), "--backend", "onnxruntime", code=2)
    assert "--backend echo or tensorrt" in refused.stderr
    # Without the backend's folder the artifact is refused, with a message that names the backend.
    with pytest.raises(ArtifactError, match=rf"recipe\.backend\.name should be {alternatives()}, found 'echo'"):
        kvexport.load(artifact)


def test_an_unknown_backend_is_an_error_everywhere(tiny_recipe: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    known = ", ".join(sections.names())
    for ask in (
        lambda: backends.get("nobody"),
        lambda: kvexport.load(tiny_artifact, backend="nobody"),
        lambda: validate_artifact(tiny_artifact, backend="nobody"),
    ):
        with pytest.raises(UsageError, match="there is no backend nobody") as caught:
            ask()
        assert known in caught.value.fix
    with pytest.raises(UsageError, match=rf"backend\.name: should be {alternatives()} .*, found 'nobody'"):
        load_recipe(str(tiny_recipe), ["backend.name=nobody"])


def test_every_folder_is_a_whole_backend() -> None:
    folders = sorted(path.parent.name for path in PACKAGE.glob("backends/*/backend.py"))
    assert [backend.name for backend in backends.all_backends()] == list(sections.names()) == folders
    assert {"onnxruntime", "tensorrt"} <= set(folders)
    assert sections.default() == "onnxruntime"


def test_two_backends_cannot_have_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    section = sections._module("onnxruntime")
    monkeypatch.setattr(sections, "_module", lambda name: section)
    monkeypatch.setattr(sections, "default", lambda: "onnxruntime")
    with pytest.raises(TypeError, match=r"backend\.device is a key of {} and of {}".format(*sections.names())):
        sections.backend_section()


@pytest.mark.parametrize("name", sections.names())
def test_a_backend_is_named_in_its_own_folder_alone(name: str) -> None:
    """A backend's name occurs only in its own folder, in code, comments and texts.

    Other code that depended on one backend would not work for others. The exception is the list of packages whose
    reports are switched off before anything is imported.
    """
    own = PACKAGE / "backends" / name
    assert own.is_dir()
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if own not in path.parents
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b{name}\b|{name}_|_{name}", line)
        if path != PACKAGE / "outbound.py"
    ]
    assert not named, "\n".join(named)


def test_files_that_were_prepared_are_not_taken_over_by_another_preparation(tiny_artifact: Path) -> None:
    plain = set(load_manifest(tiny_artifact).files)
    for backend in backends.all_backends():
        assert not plain & backend.prepared
