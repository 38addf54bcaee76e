"""The audit distinguishes vulnerabilities from an absent network, and only vulnerabilities fail a test run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import audit


def program(folder: Path, code: int, output: str) -> Path:
    """Write a pip-audit into the folder that prints a text and exits, and return the folder."""
    (folder / "bin").mkdir(parents=True)
    script = folder / "bin" / "pip-audit"
    script.write_text(f"#!{sys.executable}\nimport sys\nprint({output!r})\nsys.exit({code})\n")
    script.chmod(0o755)
    return folder


def answer(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


FOUND = {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
SKIPPED = {"name": "b", "skip_reason": "Dependency not found on PyPI and could not be audited: b (1)"}


@pytest.mark.parametrize(("code", "output", "expected", "words"), [
    (0, answer({"name": "a", "version": "1", "vulns": []}, SKIPPED), 0, "1 of 2 packages were checked"),
    (1, f"Found 1\n{answer(FOUND, SKIPPED)}", 1, "a 1 has PYSEC-1, which 2 mends"),
    (0, f"No known vulnerabilities found\n{answer(SKIPPED)}", 3, "not checked: the list of vulnerabilities"),
    (1, "ConnectionError: Failed to resolve a name", 3, "not checked"), (2, "usage: pip-audit", 3, "not checked"),
])  # fmt: skip
def test_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, output: str, expected: int, words: str
) -> None:
    assert audit.audit(program(tmp_path / "env", code, output), tmp_path / "lock") == expected
    assert words in capsys.readouterr().out


def test_an_audit_that_takes_too_long_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = program(tmp_path / "env", 0, "")
    (folder / "bin" / "pip-audit").write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    monkeypatch.setattr(audit, "SECONDS", 0.0)
    assert audit.audit(folder, tmp_path / "lock") == audit.NOT_CHECKED
    assert "not checked" in capsys.readouterr().out


def test_no_package_index_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "run", lambda command, _: (0, "") if "venv" in command else (1, "no index"))
    assert audit.audit(tmp_path / "env", tmp_path / "lock") == audit.NOT_CHECKED
    assert "cannot be installed here: no index" in capsys.readouterr().out
