"""The wheel has the native operators for its platform, and runs an artifact in a separate environment."""

import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from kvexport.backends.onnxruntime import devices
from kvexport.backends.onnxruntime.operators import library
from kvexport.version import __version__
from tests.support.paths import ROOT
from tools import release

needs_library = pytest.mark.skipif(
    library() is None, reason="not reached: the native operators are not built (make native)"
)
REPOSITORY = "https://example.org/kvexport"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build_of_a_test", path)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


hatch_build = module(ROOT / "hatch_build.py")


def build(target: str, out: Path, project: Path = ROOT, **environment: str) -> Path:
    """Build a distribution in the folder `out` and return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVEXPORT_")}
    done = subprocess.run(
        command, cwd=project, capture_output=True, text=True, env={**kept, **environment}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout. The library is compiled already (make native)."""
    return build("wheel", tmp_path_factory.mktemp("dist"), KVEXPORT_REPOSITORY=REPOSITORY)


def metadata(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as file:
        return file.read(f"kvexport-{__version__}.dist-info/{name}")


@needs_library
def test_the_wheel_is_for_every_python_and_for_systems_since_2018(wheel: Path) -> None:
    assert b"Root-Is-Purelib: false" in metadata(wheel, "WHEEL")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        assert [name for name in names if name.endswith(".so")] == ["kvexport/_native/libkvexport_onnxruntime.so"]
        content = file.read("kvexport/_native/libkvexport_onnxruntime.so")
    tag = hatch_build.platform_tag(content, platform.machine())
    assert wheel.name == f"kvexport-{__version__}-py3-none-{tag}.whl"
    compiler = re.search(rb"GCC: \([^)]*\) (\d+)", content)
    if compiler and int(compiler[1]) <= 12:  # newer ones link more of their own libstdc++ and glibc
        assert tag == f"manylinux_2_28_{platform.machine()}"
    assert not [name for name in names if name.startswith(("tests/", "docs/", "plugins/"))]
    assert wheel.stat().st_size < 7e6


@needs_library
def test_the_wheel_lists_its_compiled_libraries(wheel: Path) -> None:
    bill = json.loads(metadata(wheel, "sboms/native.cdx.json"))
    components = {one["name"]: one for one in bill["components"]}
    own = components.pop("libkvexport_onnxruntime.so")
    with zipfile.ZipFile(wheel) as file:
        content = file.read("kvexport/_native/libkvexport_onnxruntime.so")
    assert own["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}]
    assert components.keys() == {"onnxruntime-headers", "libgcc"}
    assert all(re.fullmatch(r"[\d.]+", one["version"]) for one in components.values())
    assert b"Copyright (c) Microsoft Corporation" in metadata(wheel, "licenses/licenses/onnxruntime.txt")


@needs_library
def test_the_metadata_has_addresses_and_links_that_work_on_an_index(wheel: Path) -> None:
    fields = message_from_bytes(metadata(wheel, "METADATA"))
    assert f"Repository, {REPOSITORY}" in fields.get_all("Project-URL", [])
    text = fields.get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert f"{REPOSITORY}/blob/v{__version__}/docs/start/install.md" in targets
    assert f"{REPOSITORY}/raw/v{__version__}/docs/_static/length.svg" in targets
    assert all(target.startswith(("https://", "http://", "#")) for target in targets)


@needs_library
@pytest.mark.parametrize(
    "index",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                os.environ.get("CI") != "true", reason="not reached: packages are installed from the index (CI=true)"
            ),
        ),
    ],
    ids=["packages of this environment", "packages of the index"],
)
def test_the_wheel_runs_an_artifact_natively_in_an_empty_environment(
    index: bool, wheel: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    """An engine runs with the wheel's native operators in an empty environment, into which pip installs the wheel."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    python, program = (folder / "bin" / name for name in ("python", "kvexport"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", str(wheel)]
    install += ["--constraint", str(ROOT / "constraints.txt")] if index else ["--no-index", "--no-deps"]
    subprocess.run(install, check=True, capture_output=True, text=True, cwd=tmp_path)
    environment = {"PATH": os.environ["PATH"]}
    if not index:  # not a .pth file, which would also bring the finder of an editable kvexport
        environment["PYTHONPATH"] = str(Path(numpy.__file__).parent.parent)
    code = (
        "import kvexport, sys, json\n"
        "from kvexport.backends.onnxruntime.operators import instruction_set, library\n"
        "engine = kvexport.load(sys.argv[1])\n"
        "print(json.dumps([kvexport.__file__, str(library()), instruction_set(library()),"
        " engine.generate('abc', max_new_tokens=3)[0].token_ids]))\n"
    )

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    imported, path, isa, ids = json.loads(run(python, "-c", code, str(tiny_artifact)))
    assert imported.startswith(str(folder)) and path.startswith(str(folder)) and isa
    printed = run(program, "generate", str(tiny_artifact), "abc", "--no-chat", "--max-new-tokens", "3", "--json")
    assert json.loads(printed)["token_ids"] == ids and len(ids) == 3


@needs_library
def test_auditwheel_finds_no_newer_system_than_the_name_of_the_wheel_promises(wheel: Path) -> None:
    pytest.importorskip("auditwheel", reason="not reached: auditwheel is not installed")
    release.audit(wheel)


@needs_library
def test_the_same_sources_give_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    again = build("wheel", tmp_path, KVEXPORT_REPOSITORY=REPOSITORY)
    assert again.read_bytes() == wheel.read_bytes()


def test_a_wheel_without_native_operators_is_for_every_platform(tmp_path: Path) -> None:
    plain = build("wheel", tmp_path, KVEXPORT_NATIVE="off")
    assert plain.name == f"kvexport-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(plain) as file:
        assert not [name for name in file.namelist() if name.endswith(".so")]
    text = message_from_bytes(metadata(plain, "METADATA")).get_payload()
    assert isinstance(text, str) and "](docs/" not in text
    assert "Install has the commands for machines with a GPU" in text


def test_a_source_distribution_brings_all_that_compiling_reads(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    command = ["git", "ls-files", "plugins", "recipes", "kvexport", "licenses"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "plugins/third_party/onnxruntime/onnxruntime_c_api.h" in tracked
    others = {"hatch_build.py", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    assert set(tracked.split()) | others <= names


def hook(target: str, root: Path = ROOT) -> Any:
    builder = hatch_build.NativeOperators.__new__(hatch_build.NativeOperators)
    builder.__dict__.update(
        {f"_BuildHookInterface__{key}": value for key, value in (("root", str(root)), ("target_name", target))}
    )
    return builder


def test_a_missing_tool_is_named_with_a_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KVEXPORT_NATIVE", raising=False)
    data: dict[str, Any] = {"force_include": {}, "sbom_files": []}
    with pytest.raises(RuntimeError, match=re.escape("cmake was not found (apt-get install cmake g++)")) as caught:
        hook("wheel").initialize("standard", data)
    assert str(caught.value).endswith(hatch_build.WITHOUT)
    hook("sdist").initialize("standard", data)
    hook("wheel").initialize("editable", data)
    monkeypatch.setattr(sys, "platform", "darwin")
    hook("wheel").initialize("standard", data)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("KVEXPORT_NATIVE", "off")
    hook("wheel").initialize("standard", data)
    assert data == {"force_include": {}, "sbom_files": []}


def test_cmake_comes_from_the_index_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVEXPORT_NATIVE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hook("wheel").dependencies() == ["cmake"]
    assert hook("sdist").dependencies() == []
    (tmp_path / "cmake").write_text("#!/bin/sh\n")
    (tmp_path / "cmake").chmod(0o755)
    assert hook("wheel").dependencies() == []


@pytest.mark.parametrize(("versions", "platform"), [
    ("GLIBC_2.2.5 GLIBC_2.27 GLIBCXX_3.4.21 CXXABI_1.3.9 GCC_3.0", "manylinux_2_28_x86_64"),
    ("GLIBC_2.17 GLIBC_2.34 GLIBCXX_3.4.24", "manylinux_2_34_x86_64"), ("GLIBC_2.27 GLIBCXX_3.4.29", "linux_x86_64"),
    ("GLIBC_2.27 CXXABI_1.3.13", "linux_x86_64"), ("GLIBC_2.27 GCC_12.0.0", "linux_x86_64"),
    ("xGLIBC_2.99 GLIBC_2.99x", "manylinux_2_28_x86_64"),
])  # fmt: skip
def test_the_platform_is_that_of_the_symbols(versions: str, platform: str) -> None:
    library = b"\x7fELF\0" + b"".join(name.encode() + b"\0" for name in versions.split())
    assert hatch_build.platform_tag(library, "x86_64") == platform


def test_links_to_files_become_absolute() -> None:
    text = "[a](docs/index.md) ![b](b.svg) [c](https://c.org/) [d](#d)"
    assert hatch_build.absolute_links(text, "https://r/{}/v1") == (
        "[a](https://r/blob/v1/docs/index.md) ![b](https://r/raw/v1/b.svg) [c](https://c.org/) [d](#d)"
    )
    assert hatch_build.absolute_links(text, "") == "a b [c](https://c.org/) [d](#d)"


# kvexport-cuda.

CUDA = ROOT / "plugins" / "cuda_wheel"


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package kvexport_cuda with files in place of the libraries of CUDA 12 and 13."""
    package = module(CUDA / "kvexport_cuda" / "__init__.py")
    monkeypatch.setattr(package, "FOLDER", tmp_path)
    for major in (9, 12, 13):
        (tmp_path / f"cuda{major}").mkdir()
        (tmp_path / f"cuda{major}" / "libkvexport_onnxruntime_cuda.so").touch()
    return package


@pytest.mark.parametrize(("driver", "major"), [(12, 12), (13, 13), (14, 13), (None, 13)])
def test_the_library_is_the_newest_that_the_driver_runs(
    brought: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: int | None, major: int
) -> None:
    monkeypatch.setattr(brought, "driver_major", lambda: driver)
    assert brought.get_library_path() == str(tmp_path / f"cuda{major}" / "libkvexport_onnxruntime_cuda.so")


def test_a_driver_that_is_too_old_is_named(brought: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brought, "driver_major", lambda: 8)
    with pytest.raises(FileNotFoundError, match="is built for CUDA 9, 12, 13, and the driver supports CUDA up to 8"):
        brought.get_library_path()


def test_a_library_that_the_wheel_lacks_is_a_file_that_does_not_exist(brought: ModuleType) -> None:
    assert not Path(brought.get_tensorrt_library_path()).exists()


def test_the_wheel_for_cuda_brings_its_libraries_and_announces_them(tmp_path: Path) -> None:
    folder = tmp_path / "libraries" / "cuda13"
    folder.mkdir(parents=True)
    (folder / "libkvexport_onnxruntime_cuda.so").write_bytes(b"\x7fELF\0GLIBC_2.34\0")
    (tmp_path / "dist").mkdir()
    path = build("wheel", tmp_path / "dist", CUDA, KVEXPORT_CUDA_LIBRARIES=str(folder.parent))
    assert path.name.startswith(f"kvexport_cuda-{__version__}-py3-none-manylinux_2_34_")
    with zipfile.ZipFile(path) as file:
        assert "kvexport_cuda/cuda13/libkvexport_onnxruntime_cuda.so" in file.namelist()
        assert "kvexport_cuda/LICENSE" in file.namelist()
        entries = file.read(f"kvexport_cuda-{__version__}.dist-info/entry_points.txt").decode()
        fields = message_from_bytes(file.read(f"kvexport_cuda-{__version__}.dist-info/METADATA"))
    assert "[kvexport.libraries]\nonnxruntime-cuda = kvexport_cuda:get_library_path" in entries
    assert fields["Requires-Dist"] == f"kvexport=={__version__}"


def empty_wheel(folder: Path, name: str, module: str = "") -> None:
    """Write a wheel without requirements; its module, if any, contains the name of the distribution."""
    stem, info = name.replace("-", "_"), f"{name.replace('-', '_')}-99.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-99-py3-none-any.whl", "w") as file:
        if module:
            file.writestr(f"{module}/__init__.py", name)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        extras = "".join(f"Provides-Extra: {extra}\n" for extra in ("cuda", "cudnn"))
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n{extras}")
        file.writestr(f"{info}/RECORD", "")


def test_kvexport_for_gpus_and_its_kernels_are_installed_from_a_folder_of_wheels(tmp_path: Path) -> None:
    """Pip installs the wheels of kvexport and kvexport-cuda into an empty environment, with empty requirements."""
    wheels, libraries = tmp_path / "wheels", tmp_path / "libraries" / "cuda13"
    libraries.mkdir(parents=True)
    (libraries / "libkvexport_onnxruntime_cuda.so").write_bytes(b"\x7fELF\0GLIBC_2.17\0")
    wheels.mkdir()
    plain = build("wheel", tmp_path / "plain", KVEXPORT_NATIVE="off").rename(wheels / "kvexport-x-py3-none-any.whl")
    plain.rename(wheels / f"kvexport-{__version__}-py3-none-any.whl")
    built = build("wheel", tmp_path / "cuda", CUDA, KVEXPORT_CUDA_LIBRARIES=str(libraries.parent))
    built.rename(wheels / built.name)
    needed = message_from_bytes(metadata(wheels / f"kvexport-{__version__}-py3-none-any.whl", "METADATA"))
    for requirement in needed.get_all("Requires-Dist", []):
        if "extra ==" not in requirement or "extra == 'gpu'" in requirement:
            name = re.match(r"[\w.-]+", requirement)[0]  # type: ignore[index]
            empty_wheel(wheels, name, "onnxruntime" if name.startswith("onnxruntime") else "")
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    install += ["--find-links", str(wheels)]
    subprocess.run([*install, "kvexport[gpu]", "kvexport-cuda"], check=True, cwd=tmp_path)
    if on_x86 := (sys.platform, platform.machine()) == ("linux", "x86_64"):
        last = ["--force-reinstall", "--no-deps", "onnxruntime-gpu"]  # onnxruntime has the same module
        assert devices.INSTALL_GPU.endswith(" ".join(last))
        subprocess.run([*install, *last], check=True, cwd=tmp_path)
    (module,) = folder.glob("lib/python3*/site-packages/onnxruntime/__init__.py")
    assert module.read_text() == ("onnxruntime-gpu" if on_x86 else "onnxruntime")
    code = "from kvexport.backends.onnxruntime.operators import library; print(library('cuda'))"
    environment = {"PYTHONPATH": str(Path(numpy.__file__).parent.parent)}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == str(module.parent.parent / "kvexport_cuda/cuda13/libkvexport_onnxruntime_cuda.so")


def test_a_wheel_for_cuda_without_libraries_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    libraries = module(CUDA / "hatch_build.py").Libraries
    monkeypatch.setenv("KVEXPORT_CUDA_LIBRARIES", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"KVEXPORT_CUDA_LIBRARIES={tmp_path} has no libraries cudaN"):
        libraries.initialize(None, "standard", {})
