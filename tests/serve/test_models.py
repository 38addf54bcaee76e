"""Tests of several models on one server: each has a process of its own while it is used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command_line import failure, process
from tests.support.http_server import Running, wait_until

COMPLETE = "/v1/completions"
IDLE = 3


@pytest.fixture(scope="module")
def artifacts(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [Path(shutil.copytree(tiny_artifact, folder / name)) for name in ("one", "two")]


@pytest.fixture(scope="module")
def server(artifacts: list[Path]) -> Iterator[Running]:
    command = process("serve", *artifacts, "--port", "0", "--keep-alive", IDLE, "--max-tokens", 5, "--threads", "1")
    assert command.stdout is not None
    server = Running(command.stdout.readline().strip())
    server.service = psutil.Process(command.pid)
    yield server
    command.send_signal(signal.SIGTERM)
    assert command.wait(60) == 0 and not server.service.is_running()
    command.communicate()


def loaded(server: Running) -> list[str]:
    return [model["id"] for model in server.ask("/v1/models")[2]["data"] if model["loaded"]]


def asked(server: Running, **fields: Any) -> tuple[int, Any]:
    status, _, body = server.ask(COMPLETE, {"prompt": "a", "max_tokens": 3, **fields})
    return status, body


def test_models_are_loaded_on_demand_and_unloaded_after_idling(server: Running) -> None:
    """Sessions keep a model loaded; a model without one ends, and the memory of its process with it."""
    assert [model["id"] for model in server.ask("/v1/models")[2]["data"]] == ["one", "two"] and not loaded(server)
    assert server.ask("/ready")[0] == server.ask("/v1/models/two")[0] == 200 and server.ask("/stats")[0] == 503
    status, body = asked(server, model="three")
    assert status == 404 and body["error"]["message"] == "there is no model 'three' here, but one, two"
    status, body = asked(server, model="one", max_tokens=100, session_id="s")
    assert status == 200 and body["model"] == "one" and body["usage"]["completion_tokens"] == 5, "--max-tokens holds"
    assert loaded(server) == ["one"] and server.ask("/stats")[2]["model"] == "one"
    assert server.ask("/v1/sessions/none?model=one")[0] == 404 and server.ask("/")[0] == 200
    data = json.dumps({"model": "two", "prompt": "a", "max_tokens": 4, "stream": True}).encode()
    request = urllib.request.Request(server.url + COMPLETE, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as stream:
        events = [line for line in stream.read().decode().split("\n\n") if line]
    assert events[-1] == "data: [DONE]" and json.loads(events[0].removeprefix("data: "))["model"] == "two"
    assert loaded(server) == ["one", "two"] and len(server.service.children()) == 2
    wait_until(lambda: loaded(server) == ["one"])
    wait_until(lambda: len(server.service.children()) == 1)
    assert asked(server, model="one", session_id="s", prompt="b")[1]["usage"]["prompt_tokens"] > 5, "it goes on"
    assert asked(server, model="two")[0] == 200


def test_requests_at_once_start_one_process_and_errors_arrive(server: Running) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(asked(server, model="two")[0])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 6
    status, headers, body = server.ask(COMPLETE, {"model": "two", "prompt": "a", "x_y": 1})
    assert status == 200 and headers["x-ignored-fields"] == "x_y" and body["object"] == "text_completion"
    assert asked(server, model="two", temperature=-1)[1]["error"]["param"] == "temperature"
    assert server.ask(COMPLETE, b"{")[2]["error"]["code"] == "invalid_json"
    assert server.ask(COMPLETE, {"prompt": "a", "model": 5})[2]["error"]["param"] == "model"
    assert server.ask("/v1/sessions/none?model=two", method="DELETE")[0] == 404


def test_a_process_that_was_killed_is_replaced(server: Running) -> None:
    assert asked(server, model="two")[0] == 200
    for child in server.service.children():
        if "--name=two" in child.cmdline():
            child.kill()
    wait_until(lambda: "two" not in loaded(server))
    assert asked(server, model="two")[0] == 200


def test_processes_end_with_a_server_that_was_killed(artifacts: list[Path]) -> None:
    command = process("serve", *artifacts, "--port", "0")
    assert command.stdout is not None
    server = Running(command.stdout.readline().strip())
    assert asked(server, model="one")[0] == 200
    (child,) = psutil.Process(command.pid).children()
    port = next(one.laddr.port for one in child.net_connections() if one.status == psutil.CONN_LISTEN)
    assert Running(f"http://127.0.0.1:{port}").ask("/v1/models")[0] == 401, "only the server has its key"
    os.kill(command.pid, signal.SIGKILL)
    command.communicate()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_model_that_cannot_be_loaded_is_named(artifacts: list[Path], tmp_path: Path) -> None:
    broken = Path(shutil.copytree(artifacts[0], tmp_path / "broken"))
    command = process("serve", artifacts[0], broken, "--port", "0")
    assert command.stdout is not None
    server = Running(command.stdout.readline().strip())
    (broken / "decoder.onnx").unlink()
    status, body = asked(server, model="broken")
    assert status == 503 and "broken could not be loaded" in body["error"]["message"]
    command.send_signal(signal.SIGTERM)
    assert "decoder.onnx" in command.communicate()[1]


@pytest.mark.parametrize("option", ["--name", "--adapter"])
def test_options_of_one_model_are_refused(artifacts: list[Path], option: str) -> None:
    assert "--name and --adapter" in failure(2, "serve", *artifacts, option, "x=y")
    assert "two models are named one" in failure(2, "serve", artifacts[0], artifacts[0])
    assert failure(2, "serve", artifacts[0], artifacts[0].parent / "none")
