"""Size of an image of docker/, whose build is replayed in a folder without Docker.

    python benchmarks/image_size.py --out FOLDER [--file docker/cpu.Dockerfile] [--artifact ARTIFACT]

The RUN lines of the stage `build` run with their paths in /opt below FOLDER, up to a line that takes files of another
stage, which is not replayed. Packages of the system (apt-get) are those of this machine. The script prints the bytes of
the folder that the image's last stage copies, of its largest packages, and the time of the RUN lines. With an artifact,
the server of that folder starts and the command of HEALTHCHECK asks it.

The base image is not counted: add its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "/opt/kvexport"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--file", type=Path, default=ROOT / "docker" / "cpu.Dockerfile")
    parser.add_argument("--arg", nargs="*", default=[], metavar="NAME=VALUE", help="build arguments")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    lines = joined(options.file.read_text())
    seconds = replay(lines, options.out, dict(one.split("=", 1) for one in options.arg))
    prefix = options.out / PREFIX.lstrip("/")
    print(f"RUN lines of the stage build    {seconds:8.1f} s")
    print(f"{PREFIX}                   {size(prefix) / 1e6:8.1f} MB")
    (packages,) = prefix.glob("lib/python*/site-packages")
    for total, name in sorted(((size(path), path.name) for path in packages.iterdir()), reverse=True)[:10]:
        print(f"  {name:30} {total / 1e6:8.1f} MB")
    print("compilers, PyTorch, pip:", ", ".join(unwanted(prefix)) or "none")
    if options.artifact:
        print(f"healthy after                   {serve(prefix, options.artifact, check(lines)):8.1f} s")


def joined(text: str) -> list[str]:
    """Return the instructions of a Dockerfile, each joined to one line."""
    kept = "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return re.sub(r"\\\n\s*", "", kept).splitlines()


def replay(lines: list[str], out: Path, build_arguments: dict[str, str]) -> float:
    """Run the COPY and RUN lines of the stage `build` below `out`, up to files of another stage; return the seconds."""
    source, seconds = out / "source", 0.0
    source.mkdir(parents=True)
    arguments: dict[str, str] = {}
    start = next(i for i, line in enumerate(lines) if line.endswith(" AS build"))
    for line in lines[start:]:
        name, rest = line.split(" ", 1)
        if name == "ARG":
            key, _, value = rest.partition("=")
            arguments[key] = build_arguments.get(key, value.strip('"'))
        elif name == "COPY" and rest.startswith("--from"):
            break
        elif name == "COPY":
            copy(rest.split()[:-1], source)
        elif name == "RUN" and "apt-get" not in rest:
            began = time.perf_counter()
            command = rest.replace("/opt/", f"{out.resolve()}/opt/")
            environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
            environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            subprocess.run(["sh", "-ec", command], cwd=source, env={**environment, **arguments}, check=True)
            seconds += time.perf_counter() - began
    return seconds


def copy(names: list[str], target: Path) -> None:
    """Copy the operands of a COPY line into `target`, without the files that .dockerignore excludes."""
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "_native"))
        else:
            shutil.copy(ROOT / name, target / name)


def size(path: Path) -> int:
    """Return the bytes of a file, or of the files below a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())


def unwanted(prefix: Path) -> list[str]:
    """Return the names of compilers, PyTorch, transformers and pip among the programs and packages of a folder."""
    names = {"torch", "transformers", "cmake", "g++", "gcc", "c++", "nvcc", "pip"}
    places = [prefix / "bin", *prefix.glob("lib/python*/site-packages")]
    return sorted({path.name for place in places for path in place.iterdir() if path.name in names})


def check(lines: list[str]) -> list[str]:
    """Return the command of HEALTHCHECK."""
    (line,) = (line for line in lines if line.startswith("HEALTHCHECK"))
    command: list[str] = json.loads(line.split(" CMD ")[1])
    return command


def serve(prefix: Path, artifact: Path, command: list[str]) -> float:
    """Serve the artifact on port 8000, without a home folder; return the seconds until the health check succeeds."""
    environment = {"PATH": f"{prefix / 'bin'}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"}
    began = time.perf_counter()
    server = subprocess.Popen([prefix / "bin" / "kvexport", "serve", artifact.resolve()], cwd="/", env=environment)
    try:
        while subprocess.run(command, env=environment, capture_output=True, check=False).returncode:
            if server.poll() is not None or time.perf_counter() - began > 60:
                raise SystemExit("the server did not become healthy within 60 s")
            time.sleep(0.1)
        return time.perf_counter() - began
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
