"""Tests of the images' files, read as Docker reads them."""

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from typer.main import get_command

from kvexport.commands.app import app
from tests.support.paths import ROOT

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return (name, arguments) of every instruction, without comments and with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in joined.splitlines()]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    all_stages: list[list[tuple[str, str]]] = []
    for name, rest in instructions(path):
        if name == "FROM":
            all_stages.append([])
        if all_stages:
            all_stages[-1].append((name, rest))
    return all_stages


def values(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [rest for name, rest in stage if name == instruction]


def reaches_the_build(path: str) -> bool:
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = [path, *map(str, Path(path).parents)]
        if any(
            fnmatch(part, pattern) or (line.startswith("**/") and fnmatch(Path(part).name, pattern)) for part in parts
        ):
            kept = line.startswith("!")
    return kept


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_last_stage_copies_the_built_files_and_runs_as_an_ordinary_user(path: Path) -> None:
    *_, build, last = stages(path)
    assert build[0][1].endswith(" AS build")
    assert values(last, "COPY") == ["--from=build /opt/kvexport /opt/kvexport"]
    assert not any("apt-get" in command or "pip" in command for command in values(last, "RUN"))
    (user,) = values(last, "USER")
    assert user.isdigit()
    assert int(user) >= 1000
    assert any(f"--uid {user} " in command for command in values(last, "RUN"))
    names = [name for name, _ in last]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))
    assert json.loads(values(last, "ENTRYPOINT")[0]) == ["kvexport"]
    (check,) = values(last, "HEALTHCHECK")
    assert re.fullmatch(r"(--\w[\w-]*=\d+s )+CMD \[.*\]", check)
    program, *_ = json.loads(check.split(" CMD ")[1])
    assert program == "python"
    assert values(last, "EXPOSE") == ["8000"]


class Health(BaseHTTPRequestHandler):
    """A server whose /health answers with the status of its class."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, False)])
def test_the_health_check_asks_the_server(status: int | None, healthy: bool) -> None:
    (check,) = {values(stages(path)[-1], "HEALTHCHECK")[0].split(" CMD ")[1] for path in FILES}
    with HTTPServer(("127.0.0.1", 0), type("Answer", (Health,), {"status": status})) as server:
        command = [word.replace(":8000", f":{server.server_port}") for word in json.loads(check)]
        if status is None:
            server.server_close()
        else:
            Thread(target=server.handle_request, daemon=True).start()
        done = subprocess.run([sys.executable, *command[1:]], capture_output=True, check=False)
    assert (done.returncode == 0) is healthy


def test_compose_serves_with_a_read_only_root_and_no_privileges() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text()
    service = yaml.safe_load(text)["services"]["kvexport"]
    assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["read_only"] and service["tmpfs"] == ["/tmp"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [volume.rsplit(":", 1)[-1] for volume in service["volumes"]] == ["ro", "/sessions"]
    with get_command(app).make_context("kvexport", list(service["command"])) as context:
        serve = context.command.commands["serve"]  # type: ignore[attr-defined]
        options = serve.make_context("serve", list(service["command"][1:])).params
    assert (options["port"], options["session_folder"]) == (8000, Path("/sessions/kept"))
    assert service["stop_grace_period"] == f"{options['drain'] + 60:.0f}s"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_copied_files_exist_and_are_all_that_a_build_reads(path: Path) -> None:
    every = [text for stage in stages(path)[:-1] for text in values(stage, "COPY") if not text.startswith("--from=")]
    sources = [name for text in every for name in text.split()[:-1]]
    for name in sources:
        assert (ROOT / name).exists(), name
        assert reaches_the_build(name), name
    built = set(re.findall(r'^"(\w+)" = |packages = \["(\w+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    folders = {a or b for a, b in built}
    assert folders == {"recipes", "kvexport"}
    assert folders | {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "licenses", "plugins"} <= set(sources)


def test_files_that_a_build_does_not_read_stay_outside() -> None:
    for name in (
        ".git/config",
        ".venv/bin/python",
        "build-cache/x",
        "tests/conftest.py",
        "artifacts/a",
        "kvexport/_native/lib.so",
        "kvexport/__pycache__",
    ):
        assert not reaches_the_build(name), name
    assert reaches_the_build("kvexport/commands/app.py")
    assert reaches_the_build("recipes/checkpoints/tiny/config.json")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_command_is_shell(path: Path) -> None:
    commands = [rest for name, rest in instructions(path) if name == "RUN"]
    assert commands
    for command in commands:
        done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_the_compiler_of_the_cuda_image_is_the_one_whose_registers_are_recorded() -> None:
    (version,) = (rest.partition("=")[2] for name, rest in instructions(FILES[1]) if rest.startswith("NVCC="))
    recorded = json.loads((ROOT / "plugins" / "cuda" / "resources.json").read_text())["compiler"]
    assert version.startswith(f"{recorded}.")


def test_the_runtime_image_takes_tensorrt_without_its_builder(tmp_path: Path) -> None:
    """The stage `tensorrt` gathers libraries and module of a folder that looks like NGC's image; `build` moves them."""
    names = [
        "libnvinfer.so.11.4.1",
        "libnvinfer_builder_resource_sm90.so.11.4.1",
        "libnvonnxparser.so.11.4.1",
        "libc.so.6",
    ]
    for folder in ("usr/lib", "usr/python/tensorrt", "usr/python/tensorrt-11.4.1.dist-info", "opt/tensorrt/lib"):
        (tmp_path / folder).mkdir(parents=True)
    for name in names:
        (tmp_path / "usr/lib" / name).touch()
    (tmp_path / "usr/lib/libnvinfer.so.11").symlink_to(names[0])
    (tmp_path / "usr/python/tensorrt/__init__.py").touch()
    (command,) = (text for text in values(stages(FILES[2])[0], "RUN") if text.startswith("find /"))
    command = command.replace("find /", f"find {tmp_path}/").replace("/opt/", f"{tmp_path}/opt/")
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "usr/python")}
    subprocess.run(["sh", "-ec", command], env=environment, check=True)
    gathered = sorted(path.name for path in (tmp_path / "opt/tensorrt").glob("*/*"))
    assert gathered == [
        "libnvinfer.so.11", names[0], names[2], "tensorrt", "tensorrt-11.4.1.dist-info"
    ]  # fmt: skip
    packages = tmp_path / "opt/kvexport/lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (command,) = (text for text in values(stages(FILES[2])[1], "RUN") if text.startswith("mv "))
    subprocess.run(["sh", "-ec", command.replace("/opt/", f"{tmp_path}/opt/")], check=True)
    assert (packages / "tensorrt/__init__.py").is_file() and (tmp_path / "opt/kvexport/tensorrt" / names[0]).is_file()
