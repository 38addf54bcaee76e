"""Tests of `kvexport deploy ray`: the refusals, and a real Ray if it is installed."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from kvexport.deploy import ray as deployed
from tests.support import command_line


def test_a_machine_without_ray_gets_the_install_command(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed, "is_there", lambda module: False)
    assert "pip install 'ray[serve]>=2.60'" in command_line.failure(3, "deploy", "ray", tiny_artifact)


def test_other_machines_need_a_key_and_lanes_are_those_of_the_artifact(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVEXPORT_API_KEY", raising=False)
    assert "no API key" in command_line.failure(2, "deploy", "ray", tiny_artifact, "--host", "0.0.0.0")
    monkeypatch.setattr(deployed, "ray_serve", lambda: None)  # refused before Ray is called
    assert "built for 4" in command_line.failure(2, "deploy", "ray", tiny_artifact, "--lanes", "5")


def test_replicas_answer_as_the_engine_does(tiny_artifact: Path) -> None:
    pytest.importorskip("ray.serve", reason="not reached: ray[serve]")
    import httpx2

    import kvexport

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = command_line.process("deploy", "ray", tiny_artifact, "--replicas", 2, "--port", port, "--name", "tiny")
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("http")).strip()
        expected = kvexport.load(tiny_artifact).generate("hello", max_new_tokens=20)[0].text
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 20}
        answers = [httpx2.post(f"{url}/v1/completions", json=body).json() for _ in range(8)]
        assert {answer["choices"][0]["text"] for answer in answers} == {expected}
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    assert code == 128 + signal.SIGTERM
