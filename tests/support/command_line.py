"""Functions that run the command line, in this process or in another."""

import os
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from kvexport.commands.app import app
from tests.support.paths import ROOT

ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("KVEXPORT_DEBUG", "PYTHONUNBUFFERED")},
    "PYTHONPATH": str(ROOT),
}


def run(*arguments: object, **options: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], **options)


def ok(*arguments: object, **options: Any) -> str:
    result = run(*arguments, **options)
    assert result.exit_code == 0, result.output
    return result.stdout


def failure(code: int, *arguments: object, **options: Any) -> str:
    result = run(*arguments, **options)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "error:" in result.stderr
    return result.stderr


def process(*arguments: object, code: str = "", **options: Any) -> subprocess.Popen[str]:
    start = ["-c", code] if code else ["-m", "kvexport"]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": ENVIRONMENT,
        "cwd": ROOT,
        **options,
    }
    return subprocess.Popen([sys.executable, *start, *map(str, arguments)], **pipes)
