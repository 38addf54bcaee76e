"""Tests of a checkpoint's source: a directory, or a hub, which runs on this machine for the tests."""

from pathlib import Path

import pytest

from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.export.model.checkpoint import read_checkpoint, resolve_checkpoint
from tests.export.test_checkpoint import make_single
from tests.support.hub import Hub, hub

__all__ = ["hub"]  # a fixture


def test_a_directory_is_used_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("org/name", "any") == Path("org/name")
    assert resolve_checkpoint(str(tmp_path), None) == tmp_path


@pytest.mark.parametrize("path", [
    "", "llama", "./org/name", "../x", "/no/such/dir", "a/b/c", "a/b..c", "a--b/c", "org/n\u00e4me", "a/b.git", "a\0/b",
    "x" * 5000,
])  # fmt: skip
def test_names_that_are_neither_directory_nor_hub_id_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        resolve_checkpoint(path, None)
    assert "--set model.path" in caught.value.fix


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    make_single(tmp_path)
    with pytest.raises(UsageError, match="is a file, expected a directory") as caught:
        resolve_checkpoint(str(tmp_path / "model.safetensors"), None)
    assert str(tmp_path) in caught.value.fix


def test_a_hub_id_is_downloaded_without_pickles_and_code_and_reused_offline(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_single(tmp_path / "model")
    expected = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    expected |= {"tokenizer.json": b"{}", "chat_template.jinja": b"x"}
    unwanted = (
        "pytorch_model.bin",
        "modeling.py",
        "consolidated.safetensors",
        "onnx/config.json",
        "README.md",
        "tokenizer.model",
    )
    hub.files.update({**expected, **dict.fromkeys(unwanted, b"never")})
    directory = resolve_checkpoint("org/name", "main")
    assert {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()} == set(expected)
    assert set(hub.served) == set(expected)
    assert set(read_checkpoint(directory).tensors) == {"w"}
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_checkpoint("org/name", None) == directory


@pytest.mark.parametrize(("hub_id", "revision", "kind", "problem", "fix"), [
    ("org/name", "none", UsageError, "no revision 'none'", "model.revision"),
    ("org/unknown", None, UsageError, "directory 'org/unknown', and the hub has no public model", "hf auth login"),
    ("gated/name", None, EnvironmentProblem, "gated", "hf auth login"),
    ("broken/name", None, EnvironmentProblem, "'broken/name'", "hf download broken/name"),
])  # fmt: skip
def test_errors_of_the_hub_are_reported(
    hub: type[Hub], hub_id: str, revision: str | None, kind: type[UsageError], problem: str, fix: str
) -> None:
    with pytest.raises(kind) as caught:
        resolve_checkpoint(hub_id, revision)
    assert problem in caught.value.problem
    assert fix in caught.value.fix
    assert "\n" not in caught.value.problem


def test_the_offline_error_names_the_download_command(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentProblem, match="HF_HUB_OFFLINE") as caught:
        resolve_checkpoint("org/name", "v1 beta")
    assert "hf download org/name --revision 'v1 beta'" in caught.value.fix
    assert caught.value.exit_code == 3
    assert hub.served == []


def test_an_unreachable_hub_is_an_environment_problem(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentProblem, match="cannot be reached") as caught:
        resolve_checkpoint("org/name", None)
    assert "hf download org/name" in caught.value.fix
