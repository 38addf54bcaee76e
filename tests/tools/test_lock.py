"""Every pin but torch has its digests, including those of pip and of the build backend, and set-up checks them."""

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT
from tools import lock


def test_the_lock_has_the_pins_of_the_constraints_and_digests_of_each() -> None:
    pinned = lock.pins(lock.CONSTRAINTS.read_text())
    text = lock.LOCK.read_text()
    expected = {name: version for name, version in pinned.items() if name not in lock.NOT_LOCKED}
    assert lock.pins(text) == expected, "make lock"
    assert {"pip", "hatchling", "numpy", "tokenizers"} <= expected.keys()
    blocks = [block for block in re.split(r"\n(?=\S)", text) if not block.startswith("#")]
    assert len(blocks) == len(expected)
    for block in blocks:
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n?", block), block
    assert lock.for_engines(text).keys() == lock.for_engines(lock.CONSTRAINTS.read_text()).keys() - lock.NOT_LOCKED


def needed(*names: str) -> set[str]:
    """Return these installed packages, written as requirements, and all that they require on this machine."""
    closure: dict[str, Requirement] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in closure:
            continue
        closure[str(requirement)] = requirement
        extras = requirement.extras or {""}
        lines = map(Requirement, distribution(requirement.name).requires or [])
        waiting += [one for one in lines if not one.marker or any(one.marker.evaluate({"extra": e}) for e in extras)]
    return {lock.normal(requirement.name) for requirement in closure.values()}


def test_the_demo_installs_what_builds_engines_and_no_more() -> None:
    text = lock.CONSTRAINTS.read_text()
    pinned = needed("kvexport", "kvexport[export]", "hatchling", "editables") & lock.pins(text).keys()
    assert pinned == lock.for_engines(text).keys()
    command = ["make", "--dry-run", "--always-make", "demo"]
    commands = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert '".[export]"' in commands and '".[dev]"' not in commands


def test_the_build_requirement_has_the_pinned_version() -> None:
    version = lock.pins(lock.CONSTRAINTS.read_text())["hatchling"]
    assert f'requires = ["hatchling=={version}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(("variables", "checked"), [([], True), (["LOCK=off"], False)])
def test_setup_checks_hashes_by_default(variables: list[str], checked: bool) -> None:
    command = ["make", "--dry-run", "--always-make", "setup", *variables]
    commands = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert ("--require-hashes" in commands) is checked
    assert "--no-build-isolation" in commands  # the build uses the packages that the line before installed


def test_a_lock_that_was_written_is_read_again_and_refuses_another_file(tmp_path: Path) -> None:
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    wheel.write_bytes(b"not what was locked")
    written = lock.render({"one": "1.0"}, {"two": "2.0"}, {"one": {"b" * 64, "a" * 64}, "two": {"c" * 64}})
    assert lock.pins(written) == {"one": "1.0", "two": "2.0"} and lock.for_engines(written) == {"one": "1.0"}
    assert written.index("aaaa") < written.index("bbbb")
    (tmp_path / "lock.txt").write_text(written)
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "--find-links", "."]
    done = subprocess.run(
        [*command, "--require-hashes", "--requirement", "lock.txt"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
