"""The Makefile's environment: Python's bytecode is kept although a container says to write none."""

import os
import shutil
import subprocess

import pytest

from tests.support.paths import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="not reached: there is no make on this machine")
@pytest.mark.parametrize(("told", "kept"), [("1", "build-cache"), ("", "")], ids=["write none", "write"])
def test_bytecode_is_kept_where_python_is_told_to_write_none(told: str, kept: str) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": told}
    environment.pop("PYTHONPYCACHEPREFIX", None)
    program = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix or '')"
    command = ["make", "-s", "--no-print-directory", "--eval", f'shown:;@python3 -c "{program}"', "shown"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert done.stdout.strip() == f"False {ROOT / kept / 'pycache' if kept else ''}".strip()
