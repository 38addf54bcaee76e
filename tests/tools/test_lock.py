"""Every pin but torch has its digests, including those of pip and of the build backend, and set-up checks them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    written = lock.render({"one": "1.0"}, {"one": {"b" * 64, "a" * 64}})
    assert lock.pins(written) == {"one": "1.0"} and written.index("aaaa") < written.index("bbbb")
    (tmp_path / "lock.txt").write_text(written)
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "--find-links", "."]
    done = subprocess.run(
        [*command, "--require-hashes", "--requirement", "lock.txt"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
