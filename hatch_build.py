"""Hatch's hooks: native operators in wheels, and the metadata.

Environment variables:

- KVEXPORT_NATIVE=off builds a wheel without native operators, for any platform.
- KVEXPORT_MACHINE=aarch64 compiles for another processor.
- KVEXPORT_REPOSITORY=URL is the address of the project's repository, for the metadata and the links of README.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

NATIVE, MACHINE, REPOSITORY = "KVEXPORT_NATIVE", "KVEXPORT_MACHINE", "KVEXPORT_REPOSITORY"
WITHOUT = f"{NATIVE}=off pip install ... installs kvexport without native operators: every model runs, but slower"
# The newest versions of symbols in systems of manylinux_2_28, as auditwheel lists them.
OLDEST_GLIBC = 28
NEWEST = {"GLIBCXX_3.4": 24, "CXXABI_1.3": 11, "GCC": 7}


class NativeOperators(BuildHookInterface):  # type: ignore[misc]
    """The hook that adds the native operators to a wheel."""

    def dependencies(self) -> list[str]:
        """Return the packages that a build needs besides hatchling: cmake if the system has none."""
        return ["cmake"] if self._compiles() and not shutil.which("cmake") else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the wheel's native operators.

        Raises:
            RuntimeError: Something is missing. The message names it, and the way to continue without native operators.
        """
        if not self._compiles() or version == "editable":  # `make native` compiles in a checkout
            return
        machine = os.environ.get(MACHINE, "")
        library = self._build("onnxruntime", *(["--machine", machine] if machine else []))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library.read_bytes(), machine or platform.machine())}"
        build_data["force_include"][str(library)] = f"kvexport/_native/{library.name}"
        build_data["sbom_files"].append(str(self._bill(library)))

    def _compiles(self) -> bool:
        """Return whether this build compiles native operators, which are written for Linux."""
        return self.target_name == "wheel" and sys.platform == "linux" and os.environ.get(NATIVE) != "off"

    def _build(self, *arguments: str) -> Path:
        """Run plugins/build.py and return the path of the library."""
        script = Path(self.root) / "plugins" / "build.py"
        done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{done.stderr.strip()}\n{WITHOUT}")
        return Path(done.stdout.strip().splitlines()[-1])

    def _bill(self, library: Path) -> Path:
        """Write the bill of materials of the library's compiled code (CycloneDX) and return its path."""
        header = Path(self.root) / "plugins" / "third_party" / "onnxruntime" / "onnxruntime_c_api.h"
        minor = re.search(r"#define ORT_API_VERSION (\d+)", header.read_text())
        content = library.read_bytes()
        compiler = re.search(rb"GCC: \([^)]*\) ([\d.]+)", content)
        entries = bill(
            self.metadata.version,
            {library.name: hashlib.sha256(content).hexdigest()},
            onnxruntime=f"1.{minor[1]}" if minor else "",
            compiler=compiler[1].decode() if compiler else "",
        )
        path = Path(self.root) / "build-cache" / "native.cdx.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(entries, indent=1) + "\n")
        return path


class Metadata(MetadataHookInterface):  # type: ignore[misc]
    """The hook that sets the project's links, and a README whose links work on a package index."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`; without KVEXPORT_REPOSITORY there are no links."""
        repository = os.environ.get(REPOSITORY, "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        base = f"{repository}/{{}}/v{version_of(Path(self.root))}" if repository else ""
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, base)}
        if repository:
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{base.format('blob')}/docs/index.md",
                "Changelog": f"{base.format('blob')}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }


def version_of(root: Path) -> str:
    """Return the version of the package in the checkout `root`."""
    version = re.search(r'__version__ = "(.+)"', (root / "kvexport" / "version.py").read_text())
    assert version
    return version[1]


def platform_tag(library: bytes, machine: str) -> str:
    """Return the platform that a library needs, from the versions of the symbols that it uses.

    Returns:
        manylinux_2_28_MACHINE, or the manylinux of a newer glibc; linux_MACHINE if the library needs a newer C++
        library than systems of manylinux_2_28 have.
    """
    newer = (highest(library, name) > most for name, most in NEWEST.items())
    if any(newer):
        return f"linux_{machine}"
    return f"manylinux_2_{max(OLDEST_GLIBC, highest(library, 'GLIBC_2'))}_{machine}"


def highest(library: bytes, name: str) -> int:
    """Return the highest number of a version of symbols; 0 if the library names none.

    Args:
        library: The bytes of an ELF file.
        name: The name before the number: "GLIBC_2" gives 17 for "GLIBC_2.17", and "GCC" gives 7 for "GCC_7.0.0".
    """
    end = re.escape(name.encode()) + (rb"_" if name == "GCC" else rb"\.")
    return max((int(number) for number in re.findall(rb"(?<=\0)" + end + rb"(\d+)[\d.]*(?=\0)", library)), default=0)


def absolute_links(text: str, base: str) -> str:
    """Return Markdown with links to files of the repository made absolute.

    Args:
        text: The Markdown.
        base: The address of a version with "{}" for "blob" or "raw"; "" replaces links by their text.
    """

    def link(match: re.Match[str]) -> str:
        mark, shown, target = match.groups()
        if not base:
            return str(shown)
        return f"{mark}[{shown}]({base.format('raw' if mark else 'blob')}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", link, text)


def bill(version: str, libraries: dict[str, str], *, onnxruntime: str, compiler: str) -> dict[str, Any]:
    """Return the bill of materials of the native libraries.

    Args:
        version: The version of kvexport.
        libraries: {file: its SHA-256}.
        onnxruntime: The version of ONNX Runtime's headers.
        compiler: The version of GCC, whose runtime functions are linked in.
    """
    root = f"pkg:pypi/kvexport@{version}"

    def component(name: str, number: str, licence: str, **more: Any) -> dict[str, Any]:
        licenses = [{"expression": licence}]
        return {"type": "library", "bom-ref": name, "name": name, "version": number, "licenses": licenses, **more}

    compiled_in = [
        component("onnxruntime-headers", onnxruntime, "MIT"),
        component("libgcc", compiler, "GPL-3.0-or-later WITH GCC-exception-3.1"),
    ]
    own = [
        component(name, version, "Apache-2.0", hashes=[{"alg": "SHA-256", "content": digest}])
        for name, digest in libraries.items()
    ]
    inside = [one["bom-ref"] for one in compiled_in]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "library", "bom-ref": root, "name": "kvexport", "version": version, "purl": root}
        },
        "components": [*own, *compiled_in],
        "dependencies": [
            {"ref": root, "dependsOn": list(libraries)},
            *({"ref": name, "dependsOn": inside} for name in libraries),
        ],
    }
