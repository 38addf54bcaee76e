"""Tests of several models on one server: each has a process of its own while it is used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from kvexport.serve.prompts import LONG_TEXT
from kvexport.serve.settings import SUPERVISED
from tests.support.command_line import ENVIRONMENT, failure, process
from tests.support.http_server import Running, wait_until

COMPLETE = "/v1/completions"
IDLE = 3
JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer secret"}
BAD = ("Fatal Python error", "Traceback", "never retrieved")


class Keyed(Running):
    """A running server with an API key."""

    def ask(self, path: str, body: Any = None, method: str = "", headers: Mapping[str, str] = {}) -> Any:
        return super().ask(path, body, method, {**KEY, **headers})


@pytest.fixture(scope="module")
def artifacts(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [Path(shutil.copytree(tiny_artifact, folder / name)) for name in ("one", "two")]


@pytest.fixture(scope="module")
def server(artifacts: list[Path]) -> Iterator[Running]:
    limits = ("--keep-alive", IDLE, "--max-tokens", 5, "--threads", "1", "--api-key", "secret")
    command = process("serve", *artifacts, "--port", "0", *limits)
    assert command.stdout is not None
    server = Keyed(command.stdout.readline().strip())
    server.service = psutil.Process(command.pid)
    yield server
    command.send_signal(signal.SIGTERM)
    errors = command.communicate(timeout=60)[1]
    assert command.returncode == 0 and not server.service.is_running()
    assert not any(bad in errors for bad in BAD), errors


def loaded(server: Running) -> list[str]:
    return [model["id"] for model in server.ask("/v1/models")[2]["data"] if model["loaded"]]


def asked(server: Running, **fields: Any) -> tuple[int, Any]:
    status, _, body = server.ask(COMPLETE, {"prompt": "a", "max_tokens": 3, **fields})
    return status, body


def connection(server: Running) -> HTTPConnection:
    return HTTPConnection(server.url.removeprefix("http://"), timeout=60)


def child_of(server: Running, name: str) -> psutil.Process | None:
    children = server.service.children()
    return next((child for child in children if f"--name={name}" in child.cmdline()), None)


def test_requests_without_a_use_for_a_body_start_nothing_and_keep_no_body(server: Running) -> None:
    def peak() -> int:
        return int(Path(f"/proc/{server.service.pid}/status").read_text().split("VmHWM:")[1].split()[0])

    before, client = peak(), connection(server)
    requests = [("GET", "/", {}, 200), ("GET", "/stats", {}, 401), ("GET", "/stats", KEY, 503)]
    for method, path, key, status in [*requests, ("DELETE", "/v1/sessions/none", {}, 401)]:
        client.request(method, path, bytes(64 << 20), key)
        answer = client.getresponse()
        assert answer.status == status and (b"<html" in answer.read()) == (path == "/")
    assert peak() - before < 32 << 10 and not server.service.children()


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
    request = urllib.request.Request(server.url + COMPLETE, data, JSON | KEY)
    with urllib.request.urlopen(request, timeout=60) as stream:
        events = [line for line in stream.read().decode().split("\n\n") if line]
    assert events[-1] == "data: [DONE]" and json.loads(events[0].removeprefix("data: "))["model"] == "two"
    assert loaded(server) == ["one", "two"] and len(server.service.children()) == 2
    turn = {"X-Session-Id": "s"}
    assert server.ask(COMPLETE, {"model": "two", "prompt": "a", "temperature": -1}, headers=turn)[0] == 400
    wait_until(lambda: server.ask("/stats?model=two", headers=turn)[0] == 503)
    assert loaded(server) == ["one"], "only a stored session keeps its model loaded"
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
    assert asked(server, model="two", prompt="a" * (LONG_TEXT + 1))[1]["error"]["code"] == "context_length_exceeded"
    assert asked(server, model="two", temperature=-1)[1]["error"]["param"] == "temperature"
    assert server.ask(COMPLETE, b"{")[2]["error"]["code"] == "invalid_json"
    assert server.ask(COMPLETE, {"prompt": "a", "model": 5})[2]["error"]["param"] == "model"
    assert server.ask("/v1/sessions/none?model=two", method="DELETE")[0] == 404


def test_a_process_that_was_killed_is_replaced(server: Running) -> None:
    assert asked(server, model="two")[0] == 200
    child = child_of(server, "two")
    assert child is not None
    child.kill()
    wait_until(lambda: "two" not in loaded(server))
    assert asked(server, model="two")[0] == 200


def test_processes_end_with_a_server_that_was_killed(artifacts: list[Path], tmp_path: Path) -> None:
    command = process("serve", *artifacts, "--port", "0", "--session-folder", tmp_path)
    assert command.stdout is not None
    server = Running(command.stdout.readline().strip())
    for name in ("one", "two"):
        assert asked(server, model=name, session_id="s")[0] == 200 and list((tmp_path / name).iterdir())
    child, other = psutil.Process(command.pid).children()
    port = next(one.laddr.port for one in child.net_connections() if one.status == psutil.CONN_LISTEN)
    assert Running(f"http://127.0.0.1:{port}").ask("/v1/models")[0] == 401, "only the server has its key"
    os.kill(command.pid, signal.SIGKILL)
    command.communicate()
    for one in (child, other):
        wait_until(lambda one=one: not one.is_running() or one.status() == psutil.STATUS_ZOMBIE)


NOISY = """
import os
from kvexport.commands import loading
from kvexport.commands.app import app
load = loading.load_engine
def noisy(*arguments, **options):
    print("from Python")
    os.system("echo from a library")
    return load(*arguments, **options)
loading.load_engine = noisy
app()
"""


@pytest.mark.parametrize("ends", ["signal", "pipe"])
def test_the_process_of_a_model_prints_only_its_address_and_ends_without_an_error(
    artifacts: list[Path], ends: str
) -> None:
    environment = {**ENVIRONMENT, SUPERVISED: "1"}
    command = process("serve", artifacts[0], "--port", "0", code=NOISY, stdin=PIPE, env=environment)
    assert command.stdout is not None and command.stdin is not None and command.stderr is not None
    assert command.stdout.readline().startswith("http://127.0.0.1:") and command.stdout.read() == ""
    command.terminate() if ends == "signal" else command.stdin.close()
    errors = command.stderr.read()
    assert command.wait(60) == 0 and "from Python" in errors and "from a library" in errors
    assert not any(bad in errors for bad in BAD), errors


SLOW = """
import sys
from kvexport.commands.app import app
serve = sys.modules["kvexport.commands.serve"]
command, slow = serve._command, [sys.executable, "-c", "import time; time.sleep(1000)", "--name=two"]
serve._command = lambda context, source, name: slow if name == "two" else command(context, source, name)
app()
"""


def test_a_server_ends_while_a_model_loads(artifacts: list[Path]) -> None:
    command = process("serve", *artifacts, "--port", "0", code=SLOW)
    assert command.stdout is not None
    server = Running(command.stdout.readline().strip())
    server.service = psutil.Process(command.pid)

    def loads_without_a_client() -> bool:
        # A request that arrives while an ended process is still being noticed gets that process's 503 and starts none.
        if child_of(server, "two") is None:
            client = connection(server)
            client.request("POST", COMPLETE, json.dumps({"prompt": "a", "model": "two"}), JSON)
            time.sleep(0.2)
            client.close()
        return child_of(server, "two") is not None

    for ends in (False, True):
        wait_until(loads_without_a_client)
        assert asked(server, model="one")[0] == 200 and loaded(server) == ["one"], "another model answers meanwhile"
        child = child_of(server, "two")
        assert child is not None
        (command if ends else child).terminate()
        child.wait(60)
    errors = command.communicate(timeout=60)[1]
    assert command.returncode == 0 and not any(bad in errors for bad in BAD), errors


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
