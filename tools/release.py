"""Builder of a release: the distributions, their bill of materials, their digests and the notes of the version.

    python -m tools.release [--out DIR]        (make release writes build-cache/release)

The source distribution and a wheel for each processor that this machine has a compiler for are built twice, each time
from a fresh copy of the commit in another folder, and must have the same bytes. With nvcc there is also a wheel of
kvexport-cuda for this machine's processor. Its libraries are compiled once, in this checkout: only their packing into
the wheel is done twice and compared. auditwheel then reads each wheel, if it is installed. The version's section of
CHANGELOG.md becomes notes.md. docs/tasks/cuda.md has the line that installs from this folder.

A tree with changes, a changelog without a dated section of the version, and a version that has a tag are refused.
Nothing is uploaded and no tag is set: the script prints the commands that remain.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from tools.lock import ROOT
from tools.sbom import bill

MACHINES = ("x86_64", "aarch64")


class Refused(SystemExit):
    """A reason for which nothing is released, with the line that removes it."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"release: {problem}\n  {fix}")


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Return what a command prints in a folder. Raise Refused with its last lines if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise Refused(f"{shlex.join(command)} failed", last)
    return done.stdout


def version_of(root: Path) -> str:
    match = re.search(r'__version__ = "(.+)"', (root / "kvexport" / "version.py").read_text())
    assert match
    return match[1]


def notes(changelog: str, version: str) -> str:
    """Return the text of a version's section in a changelog. Raise Refused if the section is missing or has no date."""
    heading = re.search(rf"^## {re.escape(version)}(.*)$", changelog, re.MULTILINE)
    if heading is None:
        raise Refused(f"CHANGELOG.md has no section of {version}", f"add: ## {version} (YYYY-MM-DD)")
    if not re.fullmatch(r" \(\d{4}-\d\d-\d\d\)", heading[1]):
        raise Refused(f"CHANGELOG.md has {heading[0]!r}, which has no date", f"write: ## {version} (YYYY-MM-DD)")
    text = re.split(r"^## ", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not text:
        raise Refused(f"the section of {version} in CHANGELOG.md is empty", "say what changed for users")
    return text + "\n"


def check(root: Path) -> str:
    """Return the version that the checkout `root` can release."""
    if changed := [line[3:] for line in run(["git", "status", "--porcelain"], root).splitlines()]:
        raise Refused(f"the tree has changes: {', '.join(changed[:3])}", "git stash, or git commit")
    version = version_of(root)
    if run(["git", "tag", "--list", f"v{version}"], root).strip():
        raise Refused(f"the tag v{version} exists", "a new __version__ in kvexport/version.py")
    notes((root / "CHANGELOG.md").read_text(), version)
    return version


def machines() -> list[str]:
    own = platform.machine()
    return [own, *(x for x in MACHINES if x != own and shutil.which(f"{x}-linux-gnu-g++"))]


def cuda_libraries(root: Path, capabilities: Sequence[str], folder: Path) -> list[str]:
    """Compile the CUDA libraries into `folder`, in the form that kvexport-cuda packs.

    Returns:
        The targets that were left out, because TensorRT's headers or nvcc are missing, with the reason.
    """
    sys.path.insert(0, str(root / "plugins"))
    from building import make, resources
    from building.targets import CAPABILITIES

    left_out = []
    for target in ("onnxruntime-cuda", "tensorrt"):
        if lacks := make.missing(target):
            left_out.append(f"{target}: {lacks}")
            continue
        major = resources.compiler_version().partition(".")[0]
        make.build(target, capabilities=capabilities or CAPABILITIES, out=folder / f"cuda{major}")
    return left_out


def build(root: Path, target: str, settings: Mapping[str, str], folder: Path, project: str = ".") -> Path:
    """Build a distribution of the project in a folder of a fresh copy of a commit, and return its file."""
    copy, out = folder / "source", folder / "dist"
    copy.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(copy)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVEXPORT_")}
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    run(command, copy / project, {**kept, **settings})
    (path,) = out.iterdir()
    return path


def build_twice(root: Path, target: str, settings: Mapping[str, str], out: Path, project: str = ".") -> Path:
    """Build a distribution twice and copy it into `out`. Raise Refused if the two differ."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (build(root, target, settings, Path(folder, name), project) for name in ("one", "other/folder"))
        if first.name != second.name or first.read_bytes() != second.read_bytes():
            raise Refused(f"{first.name} has other bytes when it is built again", "find what depends on time or folder")
        return Path(shutil.copy(first, out))


def audit(wheel: Path) -> None:
    """Let auditwheel read a wheel. Raise Refused if the wheel promises older systems than auditwheel finds."""
    promised = re.search(r"manylinux_2_(\d+)_", wheel.name)
    if promised is None:
        return
    shown = run([sys.executable, "-m", "auditwheel", "show", str(wheel)], wheel.parent)
    needed = re.search(r'platform\s+tag:\s+"manylinux_2_(\d+)_', shown)
    if needed is None or int(needed[1]) > int(promised[1]):
        raise Refused(f"auditwheel finds that {wheel.name} runs on fewer systems than its name says", shown.strip())


def release(root: Path, out: Path, processors: Sequence[str], cuda: Path | None = None) -> list[Path]:
    """Build everything of a release into the folder `out`, with the CUDA libraries in `cuda`, and return its files."""
    version = check(root)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    native = {} if processors else {"KVEXPORT_NATIVE": "off"}
    repository = os.environ.get("KVEXPORT_REPOSITORY")
    shared = native | ({"KVEXPORT_REPOSITORY": repository} if repository else {})
    of_wheels = [{"KVEXPORT_MACHINE": x} if x != platform.machine() else {} for x in processors] or [{}]
    files = [build_twice(root, "sdist", shared, out)]
    for own in of_wheels:
        files.append(build_twice(root, "wheel", shared | own, out))
        if "-linux_" in files[-1].name:
            raise Refused(f"{files[-1].name} is for systems like this one alone", "CXX=g++-12, or an older compiler")
        if has_auditwheel():
            audit(files[-1])
    if cuda:
        files.append(build_twice(root, "wheel", {"KVEXPORT_CUDA_LIBRARIES": str(cuda)}, out, "plugins/cuda_wheel"))
    pins, lock = ((root / name).read_text() for name in ("constraints.txt", "requirements-lock.txt"))
    written = {
        f"kvexport-{version}.cdx.json": json.dumps(bill(pins, lock), indent=1) + "\n",
        "notes.md": notes((root / "CHANGELOG.md").read_text(), version),
        "SHA256SUMS": "".join(f"{hashlib.sha256(x.read_bytes()).hexdigest()}  {x.name}\n" for x in files),
    }
    for name, text in written.items():
        (out / name).write_text(text)
        files.append(out / name)
    return files


def has_auditwheel() -> bool:
    return subprocess.run([sys.executable, "-m", "auditwheel", "--version"], capture_output=True).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build-cache" / "release", help="the folder of the files")
    parser.add_argument("--capabilities", nargs="+", default=[], metavar="N", help="of kvexport-cuda, as in 80 90")
    options = parser.parse_args()
    out = options.out
    check(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        left_out = cuda_libraries(ROOT, options.capabilities, Path(folder))
        files = release(ROOT, out, machines(), Path(folder) if any(Path(folder).iterdir()) else None)
    for path in files:
        print(f"{path}: {path.stat().st_size:,} bytes")
    for reason in left_out:
        print(f"kvexport-cuda lacks {reason}", file=sys.stderr)
    if not has_auditwheel():
        print("auditwheel is not installed, and read no wheel: pip install auditwheel", file=sys.stderr)
    tag = f"v{version_of(ROOT)}"
    print(f"\nWhat remains:\n  git tag --annotate {tag} --file {out / 'notes.md'} && git push origin {tag}")
    print(f"  python -m twine upload {out}/*.whl {out}/*.tar.gz")


if __name__ == "__main__":
    main()
