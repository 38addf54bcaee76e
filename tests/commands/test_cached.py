"""Tests of `kvexport list` and `kvexport rm`, and of advice about artifacts that are not there."""

import json
import stat
from pathlib import Path

import pytest

from kvexport.export.model.cached import cache_folder, make_cache_folder
from tests.support.command_line import failure, ok


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder("artifacts")


def test_the_cache_is_listed_and_parts_of_it_are_removed(cache: Path) -> None:
    assert json.loads(ok("list", "--json")) == []
    make_cache_folder(cache)
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    for name, size in (("one-abc", 1000), ("two-abc", 500)):
        (cache / name / "inner").mkdir(parents=True)
        (cache / name / "inner" / "file").write_bytes(bytes(size))
    (cache / ".one.lock").touch()
    listed = json.loads(ok("list", "--json"))
    assert [(one["name"], one["kind"], one["bytes"]) for one in listed] == [
        ("one-abc", "artifacts", 1000),
        ("two-abc", "artifacts", 500),
    ]
    assert "one-abc" in ok("list") and str(cache / "one-abc") == listed[0]["path"]
    assert "there is no 'three'" in failure(2, "rm", "one-abc", "three")
    assert "there is no '../artifacts'" in failure(2, "rm", "../artifacts")
    assert (cache / "one-abc").is_dir(), "nothing is removed if one name is wrong"
    ok("rm", "one-abc")
    assert sorted(path.name for path in cache.iterdir()) == [".one.lock", "two-abc"]


@pytest.mark.parametrize("name", ["model.gguf", "paper.pdf", "mistyped"])
def test_advice_never_names_a_file_of_the_user_as_the_target_of_a_build(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name != "mistyped":
        path.write_bytes(b"the user's own")
    message = failure(2, "inspect", path)
    assert f"--out {path}" not in message or name == "mistyped"
    if name == "model.gguf":
        assert f"fix: kvexport build {path} --out ARTIFACT" in message
    else:
        assert "kvexport list shows" in message
