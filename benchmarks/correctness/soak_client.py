"""Clients of `soak.py`: conversations on servers that are killed, stopped and cut off.

A client knows the states that its session may have. After an acknowledged turn there is one: the state after it. An
attempt that ended without an answer adds a state, since it may have been kept or not, or may be kept later. An answer
that fits none of the states is wrong: an acknowledged turn was lost, or two states were confused.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvexport.engine.engine import Engine
from kvexport.engine.request import Request
from kvexport.state.snapshot import Snapshot

TURNS, PROMPT, ANSWER = 8, 6, 8
SECONDS = 6.0  # a client waits this long for the next byte
VOCABULARY = 64
_MOST = 32  # the most states that a session may have


@dataclass(frozen=True)
class State:
    """A state that a session may have: the snapshot, None for a new session, and the answer that led to it."""

    snapshot: Snapshot | None = None
    text: str = ""

    @property
    def tokens(self) -> int:
        """The tokens of prompt and answers so far."""
        return 0 if self.snapshot is None else len(self.snapshot.ids)


class Reference:
    """An engine in this process that gives the state after a turn. Several threads may use it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, threading.Lock()

    def after(self, state: State, ids: Sequence[int]) -> State:
        """Return the state after one more turn."""
        settings = self._engine.settings(max_new_tokens=ANSWER, do_sample=False, ignore_eos=True)
        request = Request(list(ids), settings, start=state.snapshot, keep=True)
        with self._lock:
            self._engine.add(request)
            while self._engine.busy:
                self._engine.step()
        return State(request.snapshot, "".join(token.text for token in request.tokens))


@dataclass
class Session:
    """A conversation. `states` may be its state, `late` holds prompts whose attempts got no answer."""

    name: str
    states: list[State] = field(default_factory=lambda: [State()])
    late: list[list[int]] = field(default_factory=list)
    acknowledged: int = 0


class Client(threading.Thread):
    """A client that has one conversation after another until `stop` is set."""

    def __init__(
        self,
        number: int,
        urls: Sequence[str],
        reference: Reference,
        stop: threading.Event,
        counts: Counter[str],
        lock: threading.Lock,
    ) -> None:
        super().__init__(daemon=True)
        self._number, self._urls, self._reference, self._stop_set = number, urls, reference, stop
        self._counts, self._lock, self._random = counts, lock, random.Random(number)
        self.sessions: list[Session] = []
        self.problems: list[str] = []

    def run(self) -> None:
        """Hold conversations of several turns with the servers until the stop event is set, and record what fails."""
        while not self._stop_set.is_set():
            session = Session(f"c{self._number}-{len(self.sessions)}")
            self.sessions.append(session)
            for _ in range(TURNS):
                if self._stop_set.is_set() or not self.turn(session, self._stop_set):
                    break

    def turn(self, session: Session, stop: threading.Event | None = None) -> bool:
        """Send one turn until it is acknowledged, and return whether the conversation can go on."""
        ids = [self._random.randrange(VOCABULARY) for _ in range(PROMPT)]
        while stop is None or not stop.is_set():
            status, text, tokens = self._send(session, ids)
            self._count(status)
            if status == "200":
                return self._acknowledged(session, ids, text, tokens)
            if status == "410":
                if session.acknowledged:
                    self._problem(session, "an acknowledged state is gone, and the client was told")
                    self._count("acknowledged turns lost, said")
                return False
            if status == "no answer":
                session.late.append(ids)
                session.states += [self._reference.after(state, ids) for state in session.states[: _MOST - 1]]
                del session.states[_MOST:]  # states with the most kept attempts, the least likely
            (stop or self._stop_set).wait(0.2 + self._random.random() * 0.3)
        return False

    def _acknowledged(self, session: Session, ids: list[int], text: str, tokens: int) -> bool:
        known = list(session.states)
        for _ in range(3):  # unanswered attempts may have been kept meanwhile
            for state in known:
                after = self._reference.after(state, ids)
                if state.tokens + len(ids) == tokens and after.text == text:
                    session.states, session.acknowledged = [after], session.acknowledged + 1
                    return True
            known = [self._reference.after(state, late) for state in known for late in session.late[-4:]][:64]
        shorter = all(tokens < state.tokens + len(ids) for state in session.states)
        self._count("acknowledged turns lost, not said" if shorter else "wrong answers")
        self._problem(
            session, f"answered after {tokens} tokens, expected {[s.tokens + PROMPT for s in session.states]}"
        )
        return False

    def _send(self, session: Session, ids: list[int]) -> tuple[str, str, int]:
        """Send a turn to any server."""
        streams = self._random.random() < 0.5
        address = urlsplit(self._random.choice(self._urls))
        body = {"prompt": ids, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "session_id": session.name}
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=SECONDS)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                return str(answer.status), "", 0
            return _stream(data) if streams else _whole(data)
        except ConnectionRefusedError:
            return "refused", "", 0
        except (OSError, http.client.HTTPException, ValueError):  # ValueError: a body that was cut
            return "no answer", "", 0
        finally:
            connection.close()

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1

    def _problem(self, session: Session, text: str) -> None:
        self.problems.append(f"{session.name} after {session.acknowledged} turns: {text}")


def _whole(data: bytes) -> tuple[str, str, int]:
    body = json.loads(data)
    return "200", body["choices"][0]["text"], body["usage"]["prompt_tokens"]


def _stream(data: bytes) -> tuple[str, str, int]:
    """Return the outcome of a stream, which counts as answered if it has token counts, its end, and no error."""
    text, tokens, status = "", 0, "no answer"
    for line in data.decode().splitlines():
        if line == "data: [DONE]":
            return status, text, tokens
        if line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                codes = {"session_not_kept": "507", "session_conflict": "409", "session_lost": "410"}
                status = codes.get(event["error"].get("code"), "503")
            elif event.get("usage") and not event["choices"]:
                status, tokens = "200", event["usage"]["prompt_tokens"]
            for choice in event.get("choices", []):
                text += choice["text"]
    return "no answer", text, tokens
