"""Tests of docker/ray_serve.py: with a replacement of Ray, and with a real Ray if it is installed."""

import importlib.util
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvexport.errors import UsageError
from tests.support.paths import ROOT

SCRIPT = ROOT / "docker" / "ray_serve.py"


class FakeRay:
    """Ray Serve's functions that the script calls. `run` ends as an interrupt does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.options: dict[str, Any] = {}
        self.bound: tuple[Any, ...] = ()
        ray, serve, config = (ModuleType(name) for name in ("ray", "ray.serve", "ray.serve.config"))
        ray.serve, ray.shutdown = serve, lambda: self.log.append("shutdown")  # type: ignore[attr-defined]
        serve.ingress = lambda: lambda replica: replica  # type: ignore[attr-defined]
        serve.deployment = self.deployment  # type: ignore[attr-defined]
        serve.start = lambda http_options: self.log.append(f"start {http_options}")  # type: ignore[attr-defined]
        serve.run = self.run  # type: ignore[attr-defined]
        serve.delete = lambda name: self.log.append(f"delete {name}")  # type: ignore[attr-defined]
        config.AutoscalingConfig = dict  # type: ignore[attr-defined]
        config.RequestRouterConfig = dict  # type: ignore[attr-defined]
        for module in (ray, serve, config):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def deployment(self, replica: Any, **options: Any) -> Any:
        self.replica, self.options = replica, options
        return SimpleNamespace(bind=self.bind)

    def bind(self, *arguments: Any) -> str:
        self.bound = arguments
        return "application"

    def run(self, application: str, name: str) -> None:
        self.log.append(f"run {application} {name}")
        raise KeyboardInterrupt


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    monkeypatch.delenv("KVEXPORT_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    return FakeRay(monkeypatch)


def run(*words: object) -> None:
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(SCRIPT))["main"]([str(word) for word in words])


def test_replicas_are_engines_of_the_artifact_behind_a_router_of_sessions(ray: FakeRay, tiny_artifact: Path) -> None:
    run(tiny_artifact, "--replicas", 2, "--cpus", 1, "--lanes", 3, "--session-folder", "kept")
    assert ray.log == [
        "start {'host': '127.0.0.1', 'port': 8000}",
        "run application kvexport",
        "delete kvexport",
        "shutdown",
    ]
    assert (ray.options["num_replicas"], ray.options["max_ongoing_requests"]) == (2, 6)
    assert ray.options["request_router_config"]["request_router_class"].endswith(".ConsistentHashRouter")
    artifact, settings, threads, lanes = ray.bound
    assert (artifact, threads, lanes) == (tiny_artifact.resolve(), 1, 3)
    assert settings.session_folder == str(Path("kept").absolute()) and settings.session_shared
    replica = ray.replica(*ray.bound)
    replica.check_health()
    assert replica.__serve_build_asgi_app__().state.service.engine.max_batch == 3


def test_replicas_are_as_many_as_the_load_needs(ray: FakeRay, tiny_artifact: Path) -> None:
    run(tiny_artifact, "--replicas", 1, "--max-replicas", 4)
    scaling = ray.options["autoscaling_config"]
    assert scaling == {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 4}
    assert "num_replicas" not in ray.options and not ray.bound[1].session_shared


def test_other_machines_need_a_key(ray: FakeRay, tiny_artifact: Path) -> None:
    with pytest.raises(UsageError, match="no API key"):
        runpy.run_path(str(SCRIPT))["main"]([str(tiny_artifact), "--host", "0.0.0.0"])
    assert ray.log == []


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not reached: ray[serve]")
def test_replicas_answer_as_the_engine_does(tiny_artifact: Path) -> None:
    import httpx2

    import kvexport

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [tiny_artifact, "--replicas", 2, "--port", port, "--name", "tiny"]
    server = subprocess.Popen([sys.executable, SCRIPT, *map(str, words)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("http")).strip()
        expected = kvexport.load(tiny_artifact).generate("hello", max_new_tokens=20)[0].text
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 20}
        answers = [httpx2.post(f"{url}/v1/completions", json=body).json() for _ in range(8)]
        assert {answer["choices"][0]["text"] for answer in answers} == {expected}
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
