"""The search for kvexport's native libraries (shared objects), and the reasons why one cannot be loaded."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

from kvexport.errors import EnvironmentProblem
from kvexport.paths import native_folder

# The group of Python entry points by which another distribution, such as kvexport-cuda, offers a native library. An
# entry point is a function without arguments that returns the path of the library.
GROUP = "kvexport.libraries"
MACHINES = {3: "i686", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}  # e_machine of ELF files


def find(variable: str, name: str, entry: str = "") -> Path | None:
    """Return a native library: that of the environment variable, else of the native folder or a distribution."""
    setting = os.environ.get(variable, "")
    if setting == "off":
        return None
    path = Path(setting) if setting else native_folder() / name
    if path.is_file():
        return path
    return None if setting or not entry else _from_another_distribution(entry)


def why_none(variable: str, subject: str, fix: str) -> tuple[str, str]:
    setting = os.environ.get(variable, "")
    if not setting:
        return f"{subject} are not built", fix
    problem = f"switched off by {variable}" if setting == "off" else f"{variable}={setting} is no file"
    return problem, f"unset {variable}"


def _from_another_distribution(entry: str) -> Path | None:
    for point in metadata.entry_points(group=GROUP, name=entry):
        try:
            path = Path(point.load()())
        except Exception as error:  # the code of another distribution
            raise EnvironmentProblem(
                f"{point.value} of another Python package gives no native library: {error}",
                "pip install --force-reinstall --no-deps kvexport-cuda",
            ) from error
        return path if path.is_file() else None
    return None


def is_cut_off(path: Path) -> bool:
    """Return whether a 64-bit ELF file ends before its section table does, as after a copy to a full disk.

    The system would load such a file, and end the process when code first touches the missing part.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] != b"\x7fELF\x02" or len(header) < 64:
        return False
    place, size, count = (int.from_bytes(header[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return path.stat().st_size < place + size * count


def why_not_loaded(path: Path, error: OSError) -> str:
    machine = platform.machine()
    with path.open("rb") as file:
        header = file.read(20)
    built_for = MACHINES.get(int.from_bytes(header[18:20], "little"), "another machine")
    if header[:4] == b"\x7fELF" and built_for != {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine):
        return f"{path} is for {built_for}, and this machine is {machine}"
    if lacks := re.search(r"version `([A-Z]+)_([\d.]+)' not found", str(error)):
        library = {"GLIBC": "glibc", "GLIBCXX": "libstdc++"}.get(lacks[1], lacks[1])
        return f"{path} needs {library} {lacks[2]} or newer, and this system's is older"
    return f"the native operators cannot be loaded: {error}"
