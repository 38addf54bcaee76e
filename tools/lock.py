"""Writer of requirements-lock.txt: the pins of constraints.txt, with the SHA-256 of the wheels that set-up installs.

    make lock        (after every change of constraints.txt)

For each of `TARGETS`, pip reports the wheels that it would install from its configured index. Only metadata is
downloaded, and nothing is installed. torch is not locked: every kind of processor and GPU needs another wheel of torch
and of its dependencies, so set-up installs it by its version alone. Like constraints.txt the lock file begins with the
packages for engines, which `make demo` installs, and ends with those that development adds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements-lock.txt"
NOT_LOCKED = {"torch"}
DEVELOPMENT = "# For development"  # begins the line between both kinds of packages, which the Makefile looks for
PYTHONS = ("3.11", "3.12", "3.13")
LINUX = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in range(5, 40)))
TARGETS = {
    "Linux x86-64": [f"{tag}_x86_64" for tag in LINUX],
    "Linux Arm": [f"{tag}_aarch64" for tag in LINUX],
    "macOS Arm": [
        f"macosx_{v}_{of}" for v in ("10_9", "10_13", "11_0", "12_0", "13_0", "14_0") for of in ("arm64", "universal2")
    ],
}


def normal(name: str) -> str:
    """Return a package's name in the form by which indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE)}


def wheels(locked: Mapping[str, str], python: str, platforms: Iterable[str]) -> dict[str, str]:
    """Return {name: SHA-256} of the wheels that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("".join(f"{name}=={version}\n" for name, version in locked.items()))
        options = ["--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
        target = ["--target", folder, "--python-version", python, *(f"--platform={name}" for name in platforms)]
        command = [sys.executable, "-m", "pip", "install", *options, *target, "--requirement", str(requirements)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    packages = json.loads(report)["install"]
    return {
        normal(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"] for item in packages
    }


def for_engines(text: str) -> dict[str, str]:
    """Return {name: version} of the pins for engines, those before the line that begins with DEVELOPMENT."""
    return pins(text.partition(DEVELOPMENT)[0])


def render(engines: Mapping[str, str], others: Mapping[str, str], hashes: Mapping[str, set[str]]) -> str:
    """Return the text of the lock file: the pins for engines and the others, sorted by name, with sorted hashes."""

    def lines(locked: Mapping[str, str]) -> list[str]:
        digests = {name: [f"    --hash=sha256:{digest}" for digest in sorted(hashes[name])] for name in locked}
        return [" \\\n".join([f"{name}=={locked[name]}", *digests[name]]) for name in sorted(locked)]

    head = "# Written by `make lock` (tools/lock.py) of constraints.txt: add and change pins there."
    return "\n".join([head, *lines(engines), f"{DEVELOPMENT}.", *lines(others)]) + "\n"


def main() -> None:
    text = CONSTRAINTS.read_text()
    locked = {name: version for name, version in pins(text).items() if name not in NOT_LOCKED}
    hashes: dict[str, set[str]] = {name: set() for name in locked}
    for target, platforms in TARGETS.items():
        for python in PYTHONS:
            try:
                for name, digest in wheels(locked, python, platforms).items():
                    hashes[name].add(digest)
            except subprocess.CalledProcessError as error:
                print(f"{target}, Python {python}: not covered\n{error.stderr}", file=sys.stderr)
                continue
            print(f"{target}, Python {python}: covered", flush=True)
    if missing := [name for name, digests in hashes.items() if not digests]:
        sys.exit(f"no wheel was found for {', '.join(missing)}")
    engines = {name: locked[name] for name in for_engines(text).keys() - NOT_LOCKED}
    others = {name: locked[name] for name in locked.keys() - engines.keys()}
    LOCK.write_text(render(engines, others, hashes))


if __name__ == "__main__":
    main()
