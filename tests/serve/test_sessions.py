"""Tests of conversations whose state is kept, and of prompts with a known beginning."""

import json
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvexport
from kvexport.engine.engine import Engine
from kvexport.errors import EnvironmentProblem
from kvexport.serve.sessions import Sessions
from kvexport.serve.settings import ServeSettings
from kvexport.state.sessions import SessionStore
from tests.support.answers import answers
from tests.support.artifacts import PYTHON_PATH
from tests.support.http_server import Running, prompt, running, wait_until
from tests.support.streams import RawClient

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ASKED = [{"role": "user", "content": "anna has the lamp"}]


def chat(server: Running, messages: list[Any], session: str = "", **more: Any) -> tuple[str, int, int]:
    """Return the answer, the number of the prompt's tokens, and how many of them were not read again."""
    body = {"messages": messages, "max_tokens": 24, **({"session_id": session} if session else {}), **more}
    status, _, answer = server.ask(CHAT, body)
    assert status == 200, answer
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def turns(server: Running, session: str) -> tuple[list[Any], tuple[str, int, int]]:
    """Run two turns of a conversation, and return its messages up to the second answer, and that answer."""
    first, _, _ = chat(server, ASKED, session)
    messages = [*ASKED, {"role": "assistant", "content": first}, {"role": "user", "content": "who"}]
    return messages, chat(server, messages, session)


def test_a_turn_reads_only_the_new_tokens(engine: Engine, server: Running) -> None:
    messages, (text, tokens, cached) = turns(server, "one")
    before = len(prompt(ASKED)) + 24 - 1  # the last token of the answer is read with the next turn
    assert (tokens, cached) == (len(prompt(messages)), before)

    def alone() -> str:
        generation = engine.settings(max_new_tokens=24, top_k=0)
        first = kvexport.Request(prompt(ASKED), generation, keep=True)
        answers(engine, first)
        second = kvexport.Request(". user who. say ", generation, start=first.snapshot)
        answers(engine, second)
        return "".join(token.text for token in second.tokens)

    assert text == server.on_engine(alone)


def test_the_header_names_the_session_too_and_streams_keep_it(server: Running) -> None:
    body = {"messages": ASKED, "max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}}
    text, cached = ASKED[0]["content"], []
    messages = list(ASKED)
    for _ in range(2):
        answer = server.ask(CHAT, {**body, "messages": messages}, headers={"X-Session-Id": "two"})[2]
        events = [json.loads(part[6:]) for part in answer.split("\n\n") if part.startswith("data: {")]
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])
        cached.append(events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "who"}]
    assert cached[1] == len(prompt(ASKED)) + 23


def test_a_changed_conversation_is_read_again(engine: Engine, server: Running) -> None:
    messages, _ = turns(server, "three")
    changed = [{"role": "user", "content": "bob has a drum"}, *messages[1:]]
    text, _, _ = chat(server, changed, "three")
    expected = server.on_engine(lambda: engine.generate(prompt(changed), max_new_tokens=24, top_k=0)[0].text)
    assert text == expected


def test_a_prompt_that_begins_as_another_did_is_not_read_again(engine: Engine, server: Running) -> None:
    words = "eleven guitars and a compass lay in the boat of carla."
    body = {"prompt": words, "max_tokens": 20}
    cold, warm = (server.ask(COMPLETE, body)[2] for _ in range(2))
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 48  # whole chunks of 16
    text = server.ask("/metrics")[2]
    assert float(text.split('vllm:prefix_cache_hits_total{model_name="tiny"} ')[1].split("\n")[0]) >= 48


def test_completions_continue_a_session(engine: Engine, server: Running) -> None:
    first = server.ask(COMPLETE, {"prompt": "anna lamp", "session_id": "c", "max_tokens": 12})[2]
    second = server.ask(COMPLETE, {"prompt": " bob", "session_id": "c", "max_tokens": 12})[2]
    assert second["usage"]["prompt_tokens"] == 9 + 12 + 4
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 9 + 11
    whole = "anna lamp" + first["choices"][0]["text"] + " bob"
    expected = server.on_engine(lambda: engine.generate(whole, max_new_tokens=12, top_k=0)[0].text)
    assert second["choices"][0]["text"] == expected  # 37 tokens in 48 slots: nothing has merged


def test_a_session_moves_as_bytes_and_is_deleted(server: Running) -> None:
    messages, (text, _, _) = turns(server, "four")
    with urllib.request.urlopen(f"{server.url}/v1/sessions/four") as answer:
        assert answer.headers["content-type"] == "application/octet-stream"
        data = answer.read()
    assert server.ask("/v1/sessions/five", data, "PUT")[0] == 200
    third = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "and"}]
    assert chat(server, third, "five") == chat(server, third, "four")
    status, _, body = server.ask("/v1/sessions/five", data[:-1] + bytes([data[-1] ^ 1]), "PUT")
    assert (status, body["error"]["code"]) == (400, "invalid_session")
    assert server.ask("/v1/sessions/five", bytes(server.service.session_bytes + 1), "PUT")[0] == 413
    assert server.ask("/v1/sessions/five", method="DELETE")[0] == 200
    for method in ("GET", "DELETE"):
        status, _, body = server.ask("/v1/sessions/five", method=method)
        assert (status, body["error"]["code"]) == (404, "session_not_found")


def test_sessions_outlive_the_server_in_their_folder(engine: Engine, tmp_path: Path) -> None:
    with running(engine, session_folder=str(tmp_path / "kept")) as server:
        messages, (text, _, _) = turns(server, "six")
    assert [path.name for path in (tmp_path / "kept").glob("*.session")] == ["six.session"]
    third = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "and"}]
    with running(engine, session_folder=str(tmp_path / "kept"), prefix_memory=0) as server:
        assert chat(server, third, "six")[2] == len(prompt(messages)) + 23
    damaged = tmp_path / "kept" / "six.session"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with running(engine, session_folder=str(tmp_path / "kept"), prefix_memory=0) as server:
        # A completion does not bring its history, so it is refused. A chat brings its history, so it is read again,
        # with a header that says so.
        status, _, body = server.ask(COMPLETE, {"prompt": "a", "session_id": "six", "max_tokens": 2})
        assert (status, body["error"]["code"]) == (410, "session_lost") and "session six" in body["error"]["message"]
        request = {"messages": third, "session_id": "six", "max_tokens": 2}
        status, headers, body = server.ask(CHAT, request)
        assert (status, headers["x-session-restarted"]) == (200, "damaged")
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert "x-session-restarted" not in server.ask(CHAT, request)[1]


def test_a_session_that_was_evicted_is_no_new_session(engine: Engine, tmp_path: Path) -> None:
    """The next completion of a lost session is refused. A deleted session begins again."""
    with running(engine, session_memory=1) as server:
        for name in ("old", "new"):
            assert server.ask(COMPLETE, {"prompt": "ab", "session_id": name, "max_tokens": 2})[0] == 200
        more = {"prompt": "c", "session_id": "old", "max_tokens": 2}
        status, _, body = server.ask(COMPLETE, more)
        assert (status, body["error"]["code"], body["error"]["param"]) == (410, "session_lost", "session_id")
        assert server.ask("/v1/sessions/old")[0] == 410
        assert server.ask(CHAT, {"messages": ASKED, "session_id": "new", "max_tokens": 2})[0] == 200
        answer = server.ask(CHAT, {"messages": ASKED, "session_id": "old", "max_tokens": 2, "stream": True})
        assert answer[1]["x-session-restarted"] == "evicted"
        server.ask("/v1/sessions/new", method="DELETE")
        assert server.ask(COMPLETE, {"prompt": "c", "session_id": "new", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_a_turn_whose_session_is_not_kept_is_not_acknowledged(
    engine: Engine, tmp_path: Path, streams: bool, shared: bool
) -> None:
    """If the folder is full, the turn gets an error, and the session stays as it was: the turn can be sent again."""
    request = {"prompt": "ab", "session_id": "s", "max_tokens": 3, "stream": streams}
    folder = {"session_folder": str(tmp_path), "session_shared": shared}
    with running(engine, **folder) as server:
        assert server.ask(COMPLETE, request)[0] == 200
        before = (tmp_path / "s.session").read_bytes()
    with running(engine, **folder, session_disk=100) as server:
        (tmp_path / "s.session").write_bytes(before)  # a folder without room deletes its files at the start
        status, _, body = server.ask(COMPLETE, request)
        if streams:
            assert '"code":"session_not_kept"' in body and '"usage"' not in body
        else:
            assert (status, body["error"]["code"]) == (507, "session_not_kept")
        assert (tmp_path / "s.session").read_bytes() == before


def test_a_turn_of_a_server_that_was_stopped_overwrites_no_later_turn(engine: Engine, tmp_path: Path) -> None:
    """A turn that ends after another server has continued its session is refused."""
    with running(engine, session_folder=str(tmp_path), session_shared=True) as server:
        body = {"prompt": "ab", "session_id": "s", "max_tokens": 200}
        assert server.ask(COMPLETE, {**body, "max_tokens": 2})[0] == 200
        slow = RawClient(server.url, COMPLETE, {**body, "stream": True})
        slow.read_until(b"data:")
        other = SessionStore(engine.manifest, memory=0, folder=tmp_path, disk=1 << 30, shared=True)
        later = other.get("s")
        assert later is not None
        other.put("s", replace(later, settings=None))
        newest = (tmp_path / "s.session").read_bytes()
        assert b"session_conflict" in slow.read_until(b"[DONE]")
        assert (tmp_path / "s.session").read_bytes() == newest


def test_a_session_that_cannot_be_deleted_is_an_error(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise EnvironmentProblem("the session seven cannot be used: No space left on device")

    monkeypatch.setattr(SessionStore, "delete", full)
    status, headers, error = server.ask("/v1/sessions/seven", method="DELETE")
    assert (status, headers["retry-after"], error["error"]["code"]) == (503, "5", "overloaded")


@pytest.mark.parametrize(("change", "param"), [
    ({"session_id": "../x"}, "session_id"), ({"session_id": ""}, "session_id"),
    ({"session_id": "a" * 65}, "session_id"), ({"session_id": "a", "n": 2}, "n"), ({"session_id": 5}, "session_id"),
    ({"priority": 1 << 40}, "priority"),
])  # fmt: skip
def test_names_that_cannot_be_are_refused(server: Running, change: dict[str, Any], param: str) -> None:
    status, _, body = server.ask(CHAT, {"messages": ASKED, **change})
    assert (status, body["error"]["param"]) == (400, param)
    assert server.ask("/v1/sessions/.hidden")[0] == 400


def history(server: Running, session: str) -> str:
    snapshot = server.service.sessions.store.get(session)
    return "" if snapshot is None else server.service.engine.tokenizer.decode(snapshot.ids.tolist())


@pytest.mark.parametrize("mode", ["memory", "folder", "shared"])
def test_turns_of_one_session_at_once_run_one_after_the_other(engine: Engine, tmp_path: Path, mode: str) -> None:
    """Every turn that was acknowledged is in the state, once, and its answer follows it."""
    folder = {} if mode == "memory" else {"session_folder": str(tmp_path), "session_shared": mode == "shared"}
    words = [f"turn {i} of {chr(97 + i % 26)}." for i in range(32)]
    with running(engine, **folder) as server, ThreadPoolExecutor(16) as clients:

        def ask(word: str) -> Any:
            return server.ask(COMPLETE, {"prompt": word, "session_id": "s", "max_tokens": 2, "stream": word[5] == "7"})

        answers = list(clients.map(ask, words))
        assert [status for status, *_ in answers] == [200] * len(words)
        text = history(server, "s")
        assert [text.count(word) for word in words] == [1] * len(words)
        for word, (_, headers, body) in zip(words, answers, strict=True):
            if headers["content-type"].startswith("application/json"):
                assert word + body["choices"][0]["text"] in text
        wait_until(lambda: not server.service.sessions._lines)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("method", "how"), [("DELETE", "deleted"), ("PUT", "replaced")])
@pytest.mark.parametrize("mode", ["memory", "folder", "shared"])
def test_a_stream_brings_no_session_back_that_was_changed_meanwhile(
    engine: Engine, tmp_path: Path, mode: str, method: str, how: str, first: bool
) -> None:
    folder = {} if mode == "memory" else {"session_folder": str(tmp_path), "session_shared": mode == "shared"}
    with running(engine, **folder) as server:
        for name in ("other",) if first else ("other", "s"):
            assert server.ask(COMPLETE, {"prompt": "ab", "session_id": name, "max_tokens": 2})[0] == 200
        with urllib.request.urlopen(f"{server.url}/v1/sessions/other") as answer:
            other = answer.read()
        slow = RawClient(server.url, COMPLETE, {"prompt": "cd", "session_id": "s", "max_tokens": 300, "stream": True})
        slow.read_until(b"data:")
        status, _, body = server.ask("/v1/sessions/s", other if method == "PUT" else None, method)
        assert status == 200 and (method == "PUT" or body["deleted"])
        end = slow.read_until(b"[DONE]")
        assert b"session_conflict" in end and how.encode() in end
        slow.close()
        if method == "DELETE":
            assert server.ask("/v1/sessions/s")[0] == 404
        assert history(server, "s") == (history(server, "other") if method == "PUT" else "")
        assert server.ask(COMPLETE, {"prompt": "ef", "session_id": "s", "max_tokens": 2})[0] == 200


OTHER_SERVER = """
import sys
from pathlib import Path
from kvexport.artifact.reading import load_manifest
from kvexport.state.sessions import SessionStore

kept = SessionStore(load_manifest(Path(sys.argv[1])), memory=0, folder=Path(sys.argv[2]), disk=1 << 30, shared=True)
print(kept.begin_turn("s"), flush=True)
sys.stdin.readline()
"""


def test_a_turn_and_a_deletion_wait_for_the_turn_of_another_server(
    engine: Engine, tiny_artifact: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", OTHER_SERVER, str(tiny_artifact), str(tmp_path)]
    turn = {"prompt": "ab", "session_id": "s", "max_tokens": 2}
    with (
        running(engine, session_folder=str(tmp_path), session_shared=True) as server,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=PYTHON_PATH) as other,
        ThreadPoolExecutor(2) as clients,
    ):
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "True\n"
        waiting = clients.submit(server.ask, COMPLETE, turn)
        deletion = clients.submit(server.ask, "/v1/sessions/s", None, "DELETE")
        time.sleep(0.3)
        assert not waiting.done() and not deletion.done()
        assert server.ask(COMPLETE, {**turn, "session_id": "t"})[0] == 200
        other.stdin.write("\n")
        other.stdin.flush()
        assert waiting.result(60)[0] == 200 and deletion.result(60)[0] in (200, 404)


def test_turns_that_wait_are_bounded_in_number_and_time(engine: Engine) -> None:
    turn = {"prompt": "ab", "session_id": "s", "max_tokens": 2}
    with running(engine, queue=1, timeout=1.0) as server, ThreadPoolExecutor(2) as clients:
        line = server.service.sessions._lines
        slow = RawClient(server.url, COMPLETE, {**turn, "max_tokens": 400, "stream": True})
        slow.read_until(b"data:")
        held = threading.Thread(target=server.on_engine, args=(lambda: time.sleep(3.0),))
        held.start()
        waiting = clients.submit(server.ask, COMPLETE, turn)
        wait_until(lambda: "s" in line and line["s"].turns == 2)
        status, headers, body = server.ask(COMPLETE, turn)
        assert (status, headers["retry-after"]) == (503, "1") and "wait for earlier ones" in body["error"]["message"]
        assert waiting.result(60)[0] in (200, 503)
        held.join()
        slow.close()
        wait_until(lambda: not line)
        assert server.ask(COMPLETE, {**turn, "session_id": "t"})[0] == 200


def test_a_client_that_goes_away_leaves_the_line(engine: Engine) -> None:
    turn = {"prompt": "ab", "session_id": "s", "max_tokens": 2}
    with running(engine) as server:
        line = server.service.sessions._lines
        slow = RawClient(server.url, COMPLETE, {**turn, "max_tokens": 400, "stream": True})
        slow.read_until(b"data:")
        gone = RawClient(server.url, COMPLETE, turn)
        wait_until(lambda: "s" in line and line["s"].turns == 2)
        gone.close()
        wait_until(lambda: "s" not in line or line["s"].turns == 1)
        slow.close()
        wait_until(lambda: not line)
        assert server.ask(COMPLETE, turn)[0] == 200


def test_a_second_server_of_a_folder_is_refused(engine: Engine, tmp_path: Path) -> None:
    with running(engine, session_folder=str(tmp_path)):
        for shared in (False, True):
            with pytest.raises(EnvironmentProblem, match="another server uses the folder of sessions"):
                Sessions(engine.manifest, ServeSettings(session_folder=str(tmp_path), session_shared=shared))
