"""If the wall clock jumps, no deadline fires early or late, no session is lost, and durations stay right."""

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.request import Request
from kvexport.errors import EnvironmentProblem
from kvexport.state.sessions import SessionStore
from tests.support.http_server import Running, running

COMPLETE = "/v1/completions"
YEARS = 10 * 365 * 86_400


@pytest.fixture(params=["back", "forward", "to and fro"])
def jumps(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """A wall clock of which each reading is ten years from the reading before."""
    now = time.time()
    offsets: Iterator[int] = itertools.count() if request.param == "forward" else itertools.count(0, -1)
    if request.param == "to and fro":
        offsets = itertools.cycle((1, -1))
    monkeypatch.setattr(time, "time", lambda: now + YEARS * (next(offsets) % 5 - 2))
    monkeypatch.setattr(time, "time_ns", lambda: int((now + YEARS * (next(offsets) % 5 - 2)) * 1e9))
    yield


def ask(server: Running, session: str, **more: object) -> int:
    body = {"prompt": "ab", "session_id": session, "max_tokens": 8, **more}
    return server.ask(COMPLETE, body)[0]


@pytest.mark.usefixtures("jumps")
@pytest.mark.parametrize("shared", [True, False])
def test_requests_and_sessions_do_not_notice_a_clock_that_jumps(engine: Engine, tmp_path: Path, shared: bool) -> None:
    folder = {"session_folder": str(tmp_path), "session_shared": shared, "timeout": 30.0}
    for _ in range(2):  # the second server finds the first one's files
        with running(engine, **folder) as server:
            for name in ("one", "two", "one", "two"):
                assert ask(server, name) == 200
            assert "[DONE]" in server.ask(COMPLETE, {"prompt": "ab", "max_tokens": 40, "stream": True})[2]
        for i, path in enumerate(tmp_path.glob("*.session")):  # dates from before 1970 and after 2100
            os.utime(path, (-(1 << 30), 1 << 33) if i else (1 << 33, -(1 << 30)))


@pytest.mark.usefixtures("jumps")
def test_a_deadline_comes_when_it_should(engine: Engine) -> None:
    """A request that gets no token ends after its timeout, by a clock that does not jump."""
    with running(engine, timeout=0.2) as server:
        busy = threading.Thread(target=server.on_engine, args=(lambda: time.sleep(1.0),))
        busy.start()
        begun = time.monotonic()
        status, _, body = server.ask(COMPLETE, {"prompt": "ab", "max_tokens": 8})
        seconds = time.monotonic() - begun
        busy.join()
        assert status == 503 and "took longer than 0.2 seconds" in body["error"]["message"]
        assert 0.2 <= seconds < 5
        assert ask(server, "after") == 200


def test_a_file_that_is_taken_for_an_old_one_after_a_jump_is_an_error_that_the_client_gets(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn is not acknowledged if a server that starts after a jump removes the file during the write."""
    request = Request([1, 2, 3], engine.settings(max_new_tokens=4), keep=True)
    engine.add(request)
    while engine.busy:
        engine.step()
    assert request.snapshot is not None
    store = SessionStore(engine.manifest, memory=1 << 30, folder=tmp_path, disk=1 << 30, shared=True)
    store.put("a", request.snapshot)
    before, real = (tmp_path / "a.session").read_bytes(), os.fsync

    def jump(number: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        with monkeypatch.context() as patch:
            later = time.time() + YEARS
            patch.setattr(time, "time", lambda: later)
            SessionStore(engine.manifest, memory=0, folder=tmp_path, disk=1 << 30, shared=True)

    monkeypatch.setattr(os, "fsync", jump)
    with pytest.raises(EnvironmentProblem, match="the session a is not kept"):
        store.put("a", request.snapshot)
    assert (tmp_path / "a.session").read_bytes() == before
    store.put("a", request.snapshot)
