"""The site builds without a warning, and its reference shows the public names and the options."""

import subprocess
import sys
from pathlib import Path

import kvexport
from tests.support.paths import ROOT


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "-b", "html"]
    run = subprocess.run(
        [*command, "-d", tmp_path / "trees", "docs", tmp_path / "site"], cwd=ROOT, text=True, stderr=-1
    )
    assert run.returncode == 0, run.stderr
    python = (tmp_path / "site" / "reference" / "python.html").read_text(encoding="utf-8")
    assert not [name for name in kvexport.__all__ if name != "__version__" and f'id="kvexport.{name}"' not in python]
    commands = (tmp_path / "site" / "reference" / "cli.html").read_text(encoding="utf-8")
    example = "".join(f'<span class="pre">{word}</span> ' for word in ("kvexport", "chat", "Qwen/Qwen3-0.6B"))
    assert example in commands
    assert "--max-new-tokens" in commands and "kvexport recipes show" in commands
