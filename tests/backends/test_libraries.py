"""Native libraries of other distributions are found, and a library for another system is named with what is wrong."""

import ctypes
import platform
import re
import sys
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from kvexport.backends import libraries
from kvexport.backends.onnxruntime import operators as native
from kvexport.backends.tensorrt import plugin
from kvexport.errors import EnvironmentProblem

GLIBC = "/lib/libm.so.6: version `{}' not found (required by x.so)"


@pytest.mark.parametrize(
    ("machine", "error", "problem"),
    [
        (183, "x.so: cannot open shared object file", " is for aarch64, and this machine is x86_64"),
        (62, GLIBC.format("GLIBC_2.38"), " needs glibc 2.38 or newer, and this system's is older"),
        (62, GLIBC.format("GLIBCXX_3.4.32"), " needs libstdc++ 3.4.32 or newer, and this system's is older"),
        (62, "libgomp.so.1: cannot open shared object file", "the native operators cannot be loaded: libgomp"),
    ],
)
def test_a_library_for_another_system_is_named_with_the_missing_versions(
    machine: int, error: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little"))

    def refuse(name: str) -> None:
        raise OSError(error)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(EnvironmentProblem, match=re.escape(problem)) as caught:
        native.loaded(path)
    assert caught.value.fix == "make native, or KVEXPORT_OPERATORS=off"


@pytest.mark.skipif(native.library() is None, reason="not reached: the native operators are not built (make native)")
def test_a_library_whose_end_is_missing_is_named_instead_of_ending_the_process(tmp_path: Path) -> None:
    whole = native.library()
    assert whole is not None and not libraries.is_cut_off(whole)
    path = tmp_path / whole.name
    path.write_bytes(whole.read_bytes()[:1_000_000])
    with pytest.raises(EnvironmentProblem, match="is damaged: its end is missing"):
        native.loaded(path)


def test_a_library_of_another_distribution_is_used_where_the_package_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "cuda13.so"
    library.touch()
    module = ModuleType("brings")
    module.get_library_path = lambda: str(library)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "brings", module)
    point = EntryPoint("onnxruntime-cuda", "brings:get_library_path", libraries.GROUP)
    points = {(point.group, point.name): [point]}
    monkeypatch.setattr(metadata, "entry_points", lambda group, name: points.get((group, name), []))
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setitem(native.NAMES, "cuda", "libnone.so")
    assert native.library("cuda") == library
    assert plugin.library() != library
    monkeypatch.setenv(native.VARIABLE, "off")
    assert native.library("cuda") is None
    monkeypatch.delenv(native.VARIABLE)
    library.unlink()
    assert native.library("cuda") is None
    del module.get_library_path
    with pytest.raises(EnvironmentProblem, match="brings:get_library_path of another Python package") as caught:
        native.library("cuda")
    assert caught.value.fix == "pip install --force-reinstall --no-deps kvexport-cuda"
