"""Tests of everything that all routes share: access, limits, errors, disconnects, overload, and the end."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import kvexport
from kvexport.commands.serve import keys_of
from kvexport.engine.engine import Engine
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.language.sampling import Sampler
from kvexport.serve.app import create_app
from kvexport.serve.run import listen, run
from kvexport.serve.settings import ServeSettings
from tests.support.command_line import failure
from tests.support.http_server import Running, running, wait_until
from tests.support.streams import RawClient

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "stream": True}  # about 500 tokens
SHORT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def test_health_and_metrics(server: Running) -> None:
    assert server.ask("/health")[0] == server.ask("/ready")[0] == 200
    server.ask(CHAT, SHORT)
    text = server.ask("/metrics")[2]
    values = {
        k: float(v) for k, v in re.findall(r'^(vllm:\w+)\{(?:[^}]*,)?model_name="tiny"\} ([\d.e+-]+)$', text, re.M)
    }
    assert values["vllm:generation_tokens_total"] >= 2
    assert values["vllm:time_to_first_token_seconds_count"] == values["vllm:e2e_request_latency_seconds_count"] >= 1
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in text


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/nothing", "GET", 404), ("/v1/models/x/y", "GET", 404), (CHAT, "GET", 405), ("/health", "POST", 405)],
)
def test_unknown_paths_and_methods_are_json_errors(server: Running, path: str, method: str, status: int) -> None:
    actual, _, body = server.ask(path, b"{}" if method == "POST" else None, method)
    assert (actual, set(body["error"])) == (status, {"message", "type", "param", "code"})


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b'{"messages": [{"x": 1e999}]}'),
        *(b"[" * 100_000, b'{"model": "\\ud800"}'),
    ],
)
def test_a_body_that_is_no_object_is_refused(server: Running, body: bytes) -> None:
    status, _, answer = server.ask(CHAT, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_other_types_and_long_bodies_are_refused(engine: Engine) -> None:
    with running(engine, body=1000) as server:
        assert server.ask(CHAT, SHORT, headers={"Content-Type": "text/plain"})[0] == 415
        assert server.ask(CHAT, b" " * 1001)[0] == 413
        client = RawClient(server.url, CHAT, SHORT)
        assert b"200 OK" in client.read_until(b"\r\n")
        client.close()


def test_without_keys_only_this_machine_s_names_and_pages_are_answered(server: Running) -> None:
    host = server.url.removeprefix("http://")
    for headers in ({"Host": "evil.example"}, {"Host": ""}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        status, _, body = server.ask("/v1/models", headers=headers)
        assert (status, body["error"]["type"]) == (403, "permission_error"), headers
    for headers in ({"Host": "localhost:1"}, {"Host": "[::1]"}, {"Origin": f"http://{host}"}):
        assert server.ask("/v1/models", headers=headers)[0] == 200


def test_keys_and_origins(engine: Engine) -> None:
    with running(engine, api_keys=("first", "second"), origins=("https://page.example",)) as server:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "first"}, {"x-api-key": "firs"}):
            status, received, body = server.ask("/v1/models", headers=headers)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
            assert received["www-authenticate"] == "Bearer"
        assert server.ask("/metrics")[0] == 401
        assert server.ask("/health")[0] == 200
        assert server.ask("/v1/messages", b"{}")[2]["type"] == "error"  # in the format of the requested API
        for headers in ({"Authorization": "Bearer first"}, {"x-api-key": "first"}):
            assert server.ask("/v1/models", headers=headers)[0] == 200
            status, received, _ = server.ask("/v1/models", headers={**headers, "Origin": "https://page.example"})
            assert (status, received["access-control-allow-origin"]) == (200, "https://page.example")
            assert server.ask("/v1/models", headers={**headers, "Host": "any.example"})[0] == 200
        # The key is checked before any other part of the request is used.
        assert server.ask("/v1/models", headers={"Authorization": "Bearer first", "Origin": "http://["})[0] == 403
        assert server.ask("/v1/models", headers={"Authorization": "Bearer f\xfcrst"})[0] == 401


@pytest.mark.parametrize("key", ["", " ", "a b", "schlüssel", "a\n", "\x00"])
def test_a_key_that_no_client_can_send_is_refused(
    tiny_artifact: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="API key 2 of 2"):
        keys_of("127.0.0.1", ["good", key])
    with pytest.raises(UsageError, match="API key 1 of 1"):
        ServeSettings(api_keys=(key,))
    if "\x00" not in key:
        monkeypatch.setenv("KVEXPORT_API_KEY", key)
        with pytest.raises(UsageError, match="API key 1 of 1"):
            keys_of("127.0.0.1", None)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_lane_at_once(server: Running, streams: bool) -> None:
    """When a client disconnects, its answer ends within a step or two, and its lane is free."""
    worker = server.service.worker
    for _ in range(5):
        client = RawClient(server.url, CHAT, {**LONG, "stream": streams})
        if streams:
            client.read_until(b"data:")
        else:
            wait_until(lambda: worker.pending > 0)
        client.close()
        wait_until(lambda: worker.pending == 0)
        assert not server.on_engine(lambda: server.service.engine.busy)


def test_a_full_queue_refuses_requests_and_later_accepts_them_again(engine: Engine) -> None:
    with running(engine, queue=2) as server:
        clients = [RawClient(server.url, CHAT, LONG) for _ in range(engine.max_batch + 2)]
        wait_until(lambda: server.service.worker.pending == len(clients))
        status, headers, body = server.ask(CHAT, SHORT)
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert int(headers["retry-after"]) >= 1
        for client in clients:
            client.close()
        wait_until(lambda: server.service.worker.pending == 0)
        assert server.ask(CHAT, SHORT)[0] == 200


def test_too_many_answers_in_one_request_can_never_fit(engine: Engine) -> None:
    with running(engine, choices=3) as server:
        for path, request in (
            (CHAT, {**SHORT, "n": 4}),
            (CHAT, {**SHORT, "n": 1 << 62}),
            ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ):
            status, _, body = server.ask(path, request)
            assert (status, body["error"]["param"]) == (400, "n")


def test_an_answer_that_takes_too_long_is_ended(engine: Engine) -> None:
    with running(engine, timeout=0.002) as server:  # shorter than the answer takes on any machine
        status, _, body = server.ask(CHAT, {**LONG, "stream": False})
        assert (status, "longer than" in body["error"]["message"]) == (503, True)
        last = server.ask(CHAT, LONG)[2].split("data: ")[-2:]
        assert json.loads(last[0])["error"]["code"] == "overloaded" and last[1] == "[DONE]\n\n"
        wait_until(lambda: server.service.worker.pending == 0)


def test_a_request_that_fails_fails_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails gets status 500 without the place in the code, and a stream ends with the error."""
    choose = Sampler.next

    def fail(sampler: Sampler, logits: Any) -> int:
        if sampler.settings.max_new_tokens == 7:
            raise RuntimeError("/a/path")
        return choose(sampler, logits)

    monkeypatch.setattr(Sampler, "next", fail)
    status, _, body = server.ask(CHAT, {**SHORT, "max_tokens": 7})
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "path" not in json.dumps(body)
    assert '"code":"internal_error"' in server.ask(CHAT, {**SHORT, "max_tokens": 7, "stream": True})[2]
    assert server.ask(CHAT, SHORT)[0] == 200


def test_a_failure_of_the_engines_thread_ends_every_request_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(BaseException):
        pass

    with running(engine) as server:
        worker = server.service.worker
        stream = RawClient(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 400, "stream": True})
        stream.read_until(b"data:")

        def step() -> None:
            raise Broken

        monkeypatch.setattr(server.service.engine, "step", step)
        assert b"engine_failed" in stream.read_until(b"engine_failed")
        stream.close()
        wait_until(lambda: worker.failed)
        status, _, error = server.ask("/v1/completions", {"prompt": "a"})
        assert (status, error["error"]["code"]) == (500, "engine_failed")
        assert server.ask("/health")[0] == 500 and server.ask("/ready")[0] == 503
        monkeypatch.undo()
        for request in server.service.engine.running():
            server.service.engine.cancel(request.id)


def test_a_silent_stream_is_kept_alive(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def slow(self: Engine) -> Any:
        time.sleep(0.05)
        return step(self)

    monkeypatch.setattr(Engine, "step", slow)
    with running(engine, keep_alive=0.01) as server:
        assert ": keep-alive\n\n" in server.ask(CHAT, {**SHORT, "stream": True})[2]


def test_clients_that_stall_are_disconnected(engine: Engine) -> None:
    """Requests of clients that stop reading end long before their answers would, and their buffers are bounded."""
    with running(engine, send_buffer=4096, buffer=20, stall=0.5) as server:
        clients = [RawClient(server.url, CHAT, {**LONG, "n": 4}, receive_buffer=1024) for _ in range(8)]
        for client in clients:
            client.read_until(b"data:")
        wait_until(lambda: server.service.worker.pending == 0)
        assert server.ask(CHAT, SHORT)[0] == 200
        for client in clients:
            assert b'"finish_reason":"length"' not in client.read_until(b"[DONE]")
            client.close()


def test_other_machines_need_a_key(tiny_artifact: Path) -> None:
    errors = failure(2, "serve", tiny_artifact, "--host", "0.0.0.0")
    assert "there is no API key" in errors and "--api-key KEY" in errors


def test_an_address_that_is_taken_while_the_model_loads_is_named(tiny_artifact: Path) -> None:
    with listen("127.0.0.1", 0, 30) as ours, listen("127.0.0.1", ours.getsockname()[1], 30) as theirs:
        theirs.listen()  # both were bound, as neither server listened yet
        app = create_app(kvexport.load(tiny_artifact, threads=1), ServeSettings(names=("tiny",)))
        with pytest.raises(EnvironmentProblem, match=r"127\.0\.0\.1:\d+ cannot be listened on: Address already in use"):
            run(app, ours, lambda: pytest.fail("the server says that it is ready"))
        assert app.state.service.worker.draining
