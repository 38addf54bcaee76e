"""Tests of the release script, on a small package: its files, and the checkouts that it refuses."""

import hashlib
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tools import release

PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "kvexport"
requires-python = ">=3.10"
dynamic = ["version"]

[tool.hatch.version]
path = "kvexport/version.py"
"""
CHANGELOG = """# Changelog

## 1.2.0 (2026-11-24)

- Adapters are faster.

### Servers

- One more route.

## 1.1.0 (2026-10-01)

- Older.
"""
NOTES = "- Adapters are faster.\n\n### Servers\n\n- One more route.\n"


def git(root: Path, *arguments: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *own, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "kvexport").mkdir(parents=True)
    files = {
        "pyproject.toml": PROJECT,
        "CHANGELOG.md": CHANGELOG,
        "kvexport/__init__.py": "",
        "kvexport/version.py": '__version__ = "1.2.0"\n',
        "constraints.txt": "numpy==2.0.0\n",
        "requirements-lock.txt": "",
    }
    for name, text in files.items():
        (root / name).write_text(text)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return root


def test_a_release_has_distributions_digests_notes_and_a_bill_of_materials(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    files = {path.name: path for path in release.release(checkout, out, [])}
    assert {path.name for path in out.iterdir()} == set(files)
    assert list(files) == [
        "kvexport-1.2.0.tar.gz", "kvexport-1.2.0-py3-none-any.whl", "kvexport-1.2.0.cdx.json", "notes.md", "SHA256SUMS",
    ]  # fmt: skip
    assert files["notes.md"].read_text() == NOTES
    assert [x["name"] for x in json.loads(files["kvexport-1.2.0.cdx.json"].read_text())["components"]] == ["numpy"]
    for line in files["SHA256SUMS"].read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == digest


def test_the_wheel_of_cuda_kernels_is_beside_the_others(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = checkout / "plugins" / "cuda_wheel"
    (project / "kvexport_cuda").mkdir(parents=True)
    (project / "pyproject.toml").write_text(
        PROJECT.replace('"kvexport"', '"kvexport-cuda"').replace("kvexport/", "../../kvexport/")
    )
    (project / "kvexport_cuda" / "__init__.py").touch()
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--message", "cuda")
    files = [path.name for path in release.release(checkout, tmp_path / "out", [], tmp_path)]
    assert "kvexport_cuda-1.2.0-py3-none-any.whl" in files
    sums = (tmp_path / "out" / "SHA256SUMS").read_text()
    assert "kvexport_cuda-1.2.0" in sums


def test_cuda_libraries_are_compiled_for_their_toolkit_and_those_left_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "plugins"))
    from building import make, resources

    built = []
    monkeypatch.setattr(make, "missing", lambda name: "no headers" if name == "tensorrt" else None)
    monkeypatch.setattr(make, "build", lambda name, **options: built.append((name, options)))
    monkeypatch.setattr(resources, "compiler_version", lambda: "13.0")
    assert release.cuda_libraries(ROOT, ["90"], tmp_path) == ["tensorrt: no headers"]
    assert built == [("onnxruntime-cuda", {"capabilities": ["90"], "out": tmp_path / "cuda13"})]


def test_bytes_that_differ_between_two_builds_are_refused(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = iter([b"one", b"other"])

    def build(_root: Path, _target: str, _settings: object, folder: Path, _project: str) -> Path:
        folder.mkdir(parents=True)
        (folder / "a.whl").write_bytes(next(built))
        return folder / "a.whl"

    monkeypatch.setattr(release, "build", build)
    with pytest.raises(SystemExit, match=r"a.whl has other bytes when it is built again"):
        release.release(checkout, tmp_path / "out", [])


def test_a_build_that_fails_is_refused_with_its_last_lines(checkout: Path, tmp_path: Path) -> None:
    (checkout / "pyproject.toml").write_text(PROJECT.replace("[project]", "[project"))
    git(checkout, "commit", "--quiet", "--all", "--message", "broken")
    with pytest.raises(SystemExit, match=r"hatchling build --target sdist .* failed\n  .*"):
        release.release(checkout, tmp_path / "out", [])


def test_a_tree_with_changes_is_refused(checkout: Path) -> None:
    (checkout / "new.py").touch()
    with pytest.raises(SystemExit, match=r"release: the tree has changes: new.py\n  git stash"):
        release.check(checkout)


def test_a_version_that_was_tagged_is_refused(checkout: Path) -> None:
    assert release.check(checkout) == "1.2.0"
    git(checkout, "tag", "v1.2.0")
    with pytest.raises(SystemExit, match=r"the tag v1.2.0 exists\n  a new __version__"):
        release.check(checkout)


@pytest.mark.parametrize(("changelog", "problem"), [
    ("# Changelog\n", r"has no section of 1.2.0\n  add: ## 1.2.0"),
    ("## 1.2.0 (unreleased)\n\n- New.\n", r"'## 1.2.0 \(unreleased\)', which has no date"),
    ("## 1.2.0 (2026-11-24)\n\n## 1.1.0 (2026-10-01)\n\n- Older.\n", "the section of 1.2.0 .* is empty"),
])  # fmt: skip
def test_a_changelog_without_the_version_is_refused(checkout: Path, changelog: str, problem: str) -> None:
    (checkout / "CHANGELOG.md").write_text(changelog)
    git(checkout, "commit", "--quiet", "--all", "--message", "changelog")
    with pytest.raises(SystemExit, match=problem):
        release.check(checkout)


@pytest.mark.parametrize(("found", "right"), [(27, True), (28, True), (34, False)])
def test_a_wheel_that_promises_too_much_is_refused(
    found: int, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = f'kvexport is consistent with\nthe following platform tag: "manylinux_2_{found}_x86_64".'
    monkeypatch.setattr(release, "run", lambda *_: shown)
    wheel = tmp_path / "kvexport-1.2.0-py3-none-manylinux_2_28_x86_64.whl"
    with nullcontext() if right else pytest.raises(SystemExit, match="runs on fewer systems than its name says"):
        release.audit(wheel)
