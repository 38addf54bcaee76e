"""Many clients at once, some of which misbehave: the others are not disturbed, and all resources are freed."""

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvexport.artifact.reading import load_manifest
from kvexport.engine.engine import Engine
from kvexport.plan.memory import ServerMemory
from tests.support.command_line import process
from tests.support.http_server import Running, running, wait_until
from tests.support.streams import RawClient

COMPLETE = "/v1/completions"


def test_random_disconnects_leave_nothing_running(server: Running) -> None:
    """After 40 clients disconnect at random moments, nothing runs any more."""
    choose = random.Random(0)
    accepted = server.connections.accepted
    for _ in range(40):
        streams = choose.random() < 0.7
        body = {"prompt": "a" * choose.choice((1, 40, 200)), "max_tokens": 300, "stream": streams}
        client = RawClient(server.url, COMPLETE, body)
        if streams and choose.random() < 0.7:
            client.read_until(b"data:")
        client.close()
    server.wait_for_clients(accepted + 40)
    assert not server.on_engine(lambda: server.service.engine.busy)


def test_a_lane_is_free_a_step_after_its_client_has_gone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    cancelled: list[Any] = []  # cancelled jobs: a second cancellation may come in the next client's steps
    step, cancel = Engine.step, server.service.worker.cancel

    def counted(engine: Engine) -> Any:
        steps.append(len(engine.running()))
        time.sleep(0.005)
        return step(engine)

    def heard(job: Any) -> None:
        if job.open and all(job is not other for other in cancelled):
            cancelled.append(job)
            steps.append(-1)
        cancel(job)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(server.service.worker, "cancel", heard)
    for _ in range(5):
        steps.clear()
        client = RawClient(server.url, COMPLETE, {"prompt": "a", "max_tokens": 400, "stream": True})
        client.read_until(b"data:")
        client.close()
        wait_until(lambda: server.service.worker.pending == 0)
        assert -1 in steps and steps[::-1].index(-1) <= 1


def test_overload_is_refused_and_accepted_requests_are_answered(engine: Engine) -> None:
    with running(engine, queue=4) as server:
        statuses: list[int] = []

        def ask() -> None:
            for _ in range(5):
                statuses.append(server.ask(COMPLETE, {"prompt": "ab", "max_tokens": 20})[0])

        threads = [threading.Thread(target=ask) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert set(statuses) == {200, 503} and len(statuses) == 120
        assert server.service.worker.pending == 0


@pytest.mark.parametrize("drain", [30, 0])
def test_a_signal_drains(tiny_artifact: Path, drain: int) -> None:
    """Running requests are answered within the limit; beyond it clients are told of the end."""
    memory = ("--prefix-memory", "3MB", "--session-memory", "5MB")
    child = process("serve", tiny_artifact, "--port", 0, "--threads", 1, "--drain", drain, *memory)
    assert child.stdout
    url = child.stdout.readline().strip()
    client = RawClient(url, COMPLETE, {"prompt": "a", "max_tokens": 500, "stream": True})
    seen = client.read_until(b"data:")
    child.send_signal(signal.SIGTERM)
    seen += client.read_until(b"[DONE]")
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, "Traceback" in errors) == (0, False), errors
    manifest = load_manifest(tiny_artifact)
    most = ServerMemory(manifest.bytes, manifest.cache.bytes(manifest.limits.max_batch), 3_000_000, 5_000_000)
    assert f"memory: {most}" in errors and "3 MB prefixes, 5 MB sessions" in errors
    if drain:
        assert seen.count(b"data:") > 100 and b'"finish_reason":"length"' in seen
    else:
        assert b"the server is shutting down" in seen or b'"finish_reason":"length"' in seen
    assert not psutil.pid_exists(child.pid)
