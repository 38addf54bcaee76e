"""Time of a new user's first minutes: an empty environment, the wheel, and the first token of an artifact.

    python benchmarks/speed/first_minutes.py WHEEL ARTIFACT [--extra serve]

Prints the seconds of each part, the bytes on disk, and the largest packages. pip takes packages from the index;
--no-cache makes it download all of them. `kvexport --help` and `import kvexport` are the best of six processes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

OWN = ("pip", "setuptools")  # of every new environment
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--extra", default="")
    parser.add_argument("--no-cache", action="store_true")
    options = parser.parse_args()
    wheel, artifact = options.wheel.resolve(), options.artifact.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "environment"
        program = folder / "bin" / "kvexport"
        created = seconds([sys.executable, "-m", "venv", str(folder)])
        (packages,) = folder.glob("lib/python*/site-packages")
        empty = size(packages)
        target = f"{wheel}[{options.extra}]" if options.extra else str(wheel)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", *(["--no-cache-dir"] if options.no_cache else [])]
        installed = seconds([*pip, target])
        token = seconds([str(program), "generate", str(artifact), "abc", "--max-new-tokens", "1"])
        parts = {"environment": created, "pip install": installed, "first token": token}
        for part, value in {**parts, "sum": sum(parts.values())}.items():
            print(f"{part:20} {value:8.2f} s")
        print(f"{'packages, no pip':20} {(size(packages) - empty) / 1e6:8.1f} MB")
        for name, count in largest(packages):
            print(f"  {name:18} {count / 1e6:8.1f} MB")
        for command in ([str(program), "--help"], [str(folder / "bin" / "python"), "-c", "import kvexport"]):
            print(f"{' '.join(command[1:]):20} {min(seconds(command) for _ in range(6)):8.3f} s")


def largest(packages: Path) -> list[tuple[str, int]]:
    """Return the packages of a folder above 1 MB by the bytes that they install, and the bytecode that pip compiles."""
    files = {one.name: one.files or () for one in metadata.distributions(path=[str(packages)]) if one.name not in OWN}
    sizes = {name: sum(file.size or 0 for file in listed) for name, listed in files.items()}
    sizes["bytecode"] = sum(
        path.stat().st_size for path in packages.rglob("*.pyc") if path.relative_to(packages).parts[0] not in OWN
    )
    return sorted(((name, count) for name, count in sizes.items() if count > 1e6), key=lambda item: -item[1])


def size(folder: Path) -> int:
    """Return the bytes of the files of a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def seconds(command: Sequence[str]) -> float:
    """Return the seconds that a command takes."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd="/", check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
