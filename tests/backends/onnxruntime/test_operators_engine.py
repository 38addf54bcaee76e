"""Engines on the native operators and on the functions of their graphs give the same tokens and nearly the same logits.

inspect, doctor and validate tell which of the two runs where.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvexport import paths
from kvexport.backends.onnxruntime import operators as native
from kvexport.commands.app import app
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import EnvironmentProblem
from kvexport.export.build import build
from kvexport.schema.operators import schema_digest
from tests.support.models import given_tokens_logits, make_recipe, random_ids
from tests.support.tiny_model import RECIPE

needs_library = pytest.mark.skipif(
    native.library() is None, reason="not reached: the native operators are not built (make native)"
)
LENGTHS, PROMPTS = (240, 150, 70, 31), (160, 41, 60, 20)


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A function that returns an artifact of the tiny checkpoint, by method and dtype, with the logits of every token.

    Each artifact is built once.
    """
    built: dict[tuple[str, str], Path] = {}

    def get(method: str, dtype: str) -> Path:
        if (method, dtype) not in built:
            folder = tmp_path_factory.mktemp("native")
            export = {"prefill_chunk": 16, "logits": "all"}
            cache = {"method": method, "budget": 32, "merge_every": 4}
            recipe = make_recipe(tiny_checkpoint, dtype=dtype, cache=cache, export=export, limits=RECIPE["limits"])
            built[method, dtype] = build(recipe, folder / "artifact")
        return built[method, dtype]

    return get


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Engine]:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    one = load(path)
    monkeypatch.setenv(native.VARIABLE, "off")
    return one, load(path)


@needs_library
# cam has no native kernel for merges: its attention is native, and its merge runs as a function.
@pytest.mark.parametrize(("method", "dtype"), [("keepkv", "float32"), ("cam", "float32"), ("keepkv", "float16")])
def test_both_engines_generate_equal_tokens_far_past_the_budget(
    method: str, dtype: str, artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = both(artifact(method, dtype), monkeypatch)
    sequences = random_ids(0, *LENGTHS, vocabulary=engines[0].vocabulary)
    tolerance = 1e-3 if dtype == "float32" else 5e-2
    pairs = list(zip(*(given_tokens_logits(engine, sequences, PROMPTS) for engine in engines), strict=True))
    assert any(not np.array_equal(actual, expected) for actual, expected in pairs), "one implementation answered twice"
    for actual, expected in pairs:
        assert np.abs(actual - expected).max() < tolerance * max(1.0, float(np.abs(expected).max()))
    if dtype == "float32":  # in half precision the two best tokens sometimes have equal logits
        prompts = [ids[:length].tolist() for ids, length in zip(sequences, PROMPTS, strict=True)]
        native_tokens, function_tokens = (
            [c.token_ids for c in e.generate(prompts, max_new_tokens=120)] for e in engines
        )
        assert native_tokens == function_tokens
        assert {len(ids) for ids in native_tokens} == {120}


def inspected(path: Path) -> tuple[dict[str, object], str]:
    data, shown = (CliRunner().invoke(app, ["inspect", str(path), *options]) for options in (["--json"], []))
    assert data.exit_code == shown.exit_code == 0
    inspection = json.loads(data.stdout)
    assert inspection["operators"] == {"VoteAttention": "function", "MergeCache": "function"}  # those of the artifact
    return inspection["runs_here"], " ".join(shown.stdout.split())


@needs_library
def test_inspect_shows_where_an_operator_runs_and_why(
    artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = native.library()
    assert path
    isa = native.instruction_set(path)
    here, shown = inspected(artifact("cam", "float32"))
    assert here["VoteAttention"] == {"native": True, "detail": isa}
    assert here["MergeCache"] == {
        "native": False,
        "detail": "the method cam has no native kernel: it has no merge policy",
    }
    assert f"VoteAttention native, {isa}" in shown
    assert "MergeCache function: the method cam has no native kernel" in shown
    assert inspected(artifact("keepkv", "float32"))[0]["MergeCache"] == {"native": True, "detail": isa}
    monkeypatch.setenv(native.VARIABLE, "off")
    here, shown = inspected(artifact("keepkv", "float32"))
    assert here["VoteAttention"] == {"native": False, "detail": "switched off by KVEXPORT_OPERATORS"}
    assert "VoteAttention function: switched off by KVEXPORT_OPERATORS" in shown


@needs_library
def test_validate_lists_its_comparisons(artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.library()
    assert path
    arguments = ["validate", str(artifact("keepkv", "float32")), "--length", "20", "--json"]
    how = f"native, {native.instruction_set(path)}"
    assert json.loads(CliRunner().invoke(app, arguments).stdout)["operators"] == {
        "VoteAttention": how,
        "MergeCache": how,
    }
    monkeypatch.setenv(native.VARIABLE, "off")
    off = "function: switched off by KVEXPORT_OPERATORS"
    shown = CliRunner().invoke(app, arguments[:-1])
    assert f"MergeCache {off}" in " ".join(shown.stdout.split())


def doctor() -> dict[str, str]:
    shown = " ".join(CliRunner().invoke(app, ["doctor"]).stdout.split())
    state: dict[str, str] = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["native"]
    assert (
        f"native operators {state['instruction_set'] or 'none: ' + state['problem'] + '. To mend it: ' + state['fix']}"
        in shown
    )
    return state


@needs_library
def test_the_doctor_names_the_instruction_set() -> None:
    path = native.library()
    assert path
    details = {"small_pages": native.why_small_pages(path)}
    assert doctor() == {"instruction_set": native.instruction_set(path), "problem": "", "fix": ""} | details


def test_the_doctor_shows_how_to_build_a_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setitem(native.NAMES, "cpu", "libnone.so")
    not_built = {"instruction_set": "", "problem": "the native operators are not built", "fix": "make native"}
    assert doctor() == not_built | {"small_pages": ""}
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "kvexport")  # installed, not a checkout
    compiles = "pip install --force-reinstall --no-deps --no-binary kvexport kvexport"
    assert doctor()["fix"] == f"apt-get install g++ && {compiles}"
    monkeypatch.setenv(native.VARIABLE, "off")
    assert doctor()["problem"] == "switched off by KVEXPORT_OPERATORS"
    monkeypatch.setenv(native.VARIABLE, str(tmp_path / "gone.so"))
    assert doctor()["problem"] == f"KVEXPORT_OPERATORS={tmp_path / 'gone.so'} is no file"


def test_a_library_that_cannot_be_loaded_is_a_problem_of_the_environment(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.so").write_text("no library")
    monkeypatch.setenv(native.VARIABLE, str(tmp_path / "broken.so"))
    assert "the native operators cannot be loaded" in doctor()["problem"]
    with pytest.raises(EnvironmentProblem, match="the native operators cannot be loaded"):
        load(tiny_artifact)


def test_a_library_of_other_machines_is_refused_before_a_kernel_runs(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not shutil.which("cc"):
        pytest.skip("not reached: cc was not found")
    answers = {"schema": schema_digest(), "device_problem": "its kernels were compiled for avx512 alone"}
    lines = [f'const char* kvexport_{name}(void) {{ return "{text}"; }}' for name, text in answers.items()]
    (tmp_path / "other.c").write_text("\n".join(lines) + "\n")
    other = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", other, tmp_path / "other.c"], check=True)
    monkeypatch.setenv(native.VARIABLE, str(other))
    with pytest.raises(EnvironmentProblem, match=r"other\.so cannot be used: its kernels were compiled for") as caught:
        load(tiny_artifact)
    assert caught.value.fix == "make native, or KVEXPORT_OPERATORS=off"
    assert doctor()["problem"] == caught.value.problem


@pytest.mark.parametrize("says", ["", 'const char* kvexport_schema(void) { return "of another version"; }'])
def test_a_library_of_another_version_is_refused_before_it_reads_a_node(
    says: str, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not shutil.which("cc"):
        pytest.skip("not reached: cc was not found")
    (tmp_path / "old.c").write_text(f'const char* kvexport_isa(void) {{ return "avx2"; }}\n{says}\n')
    old = tmp_path / "old.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", old, tmp_path / "old.c"], check=True)
    monkeypatch.setenv(native.VARIABLE, str(old))
    assert "was built for another version of kvexport's operators" in doctor()["problem"]
    with pytest.raises(EnvironmentProblem, match="was built for another version") as caught:
        load(tiny_artifact)
    assert caught.value.fix == "make native, or KVEXPORT_OPERATORS=off"
