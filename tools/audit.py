"""Check of the locked packages for known vulnerabilities, with pip-audit.

    python -m tools.audit [--soft]

pip-audit is not a dependency: it is installed into build-cache/audit the first time. If the list of vulnerabilities
cannot be reached, nothing is checked. The command then prints the reason and exits with 3, or with 0 if --soft is
given. Packages that pip-audit skips are not checked. A vulnerability always gives exit code 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION = "2.10.1"
SECONDS = 90.0
NOT_CHECKED = 3


def run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Run a command.

    Returns:
        The exit code, None if it took longer than `seconds` or could not start; and the output.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds), check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        return None, str(error)
    return done.returncode, done.stdout + done.stderr


def audit(folder: Path, lock: Path) -> int:
    """Check the packages of a lock file and return the exit code."""
    end, program = time.monotonic() + SECONDS, folder / "bin" / "pip-audit"
    if not program.exists():
        steps = [
            [sys.executable, "-m", "venv", str(folder)],
            [
                str(folder / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--retries",
                "0",
                f"pip-audit=={VERSION}",
            ],
        ]
        for step in steps:
            code, output = run(step, end - time.monotonic())
            if code != 0:
                print(f"audit: not checked: pip-audit cannot be installed here: {_last(output)}")
                return NOT_CHECKED
    options = ["--require-hashes", "--disable-pip", "--progress-spinner", "off", "--timeout", "5", "--format", "json"]
    _, output = run([str(program), *options, "--requirement", str(lock)], end - time.monotonic())
    try:
        packages = json.loads(output[output.index("{") : output.rindex("}") + 1])["dependencies"]
    except (ValueError, KeyError):
        print(f"audit: not checked: pip-audit does not answer: {_last(output)}")
        return NOT_CHECKED
    checked = [package for package in packages if "vulns" in package]
    for package in checked:
        for vulnerability in package["vulns"]:
            fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
            print(f"audit: {package['name']} {package['version']} has {vulnerability['id']}, which {fixed} mends")
    print(f"audit: {len(checked)} of {len(packages)} packages were checked, the others were not found on the list")
    if any(package["vulns"] for package in checked):
        return 1
    if not checked:
        print("audit: not checked: the list of vulnerabilities answered for no locked package")
        return NOT_CHECKED
    return 0


def _last(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1][:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--soft", action="store_true", help="exit with 0 if nothing could be checked")
    soft = parser.parse_args().soft
    code = audit(ROOT / "build-cache" / "audit", ROOT / "requirements-lock.txt")
    sys.exit(0 if soft and code == NOT_CHECKED else code)


if __name__ == "__main__":
    main()
