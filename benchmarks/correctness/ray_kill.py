"""Replicas of `docker/ray_serve.py` that are killed under load: the answers of clients, and the return of sessions.

    python benchmarks/correctness/ray_kill.py ARTIFACT [--replicas 2] [--clients 8] [--kills 3] [--every 20] [--save]

Needs `pip install 'ray[serve]'`. Every client has one conversation after the other. Each is a session of a few turns
that send only new tokens. Half of the clients read streams. At each interval one replica gets SIGKILL. Every answer is
compared with that of an engine in this process that has the same turns. A failed turn is sent again. The sessions are
back after a kill when each session that was open has had a turn answered.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

import kvexport
from benchmarks.common import ROOT, save
from kvexport.engine.engine import Engine
from kvexport.engine.request import Request
from kvexport.state.snapshot import Snapshot

TITLE = "ray::ServeReplica:kvexport:replica"
TURNS, PROMPT, ANSWER = 6, 8, 16
LONGEST = 60.0  # seconds that a client waits


@dataclass
class Turn:
    """A turn of a session."""

    sent: list[int]  # token ids of the prompt
    text: str = ""  # answer
    failed: int = 0  # failed attempts before the answer
    begun: float = 0.0  # its beginning, by time.monotonic()
    answered: float = 0.0  # end of its answer, by time.monotonic()


@dataclass
class Client:
    """A client: its sessions one after the other, each a list of turns."""

    number: int
    streams: bool
    sessions: list[list[Turn]] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)


def talk(client: Client, url: str, vocabulary: int, end: threading.Event) -> None:
    choose = random.Random(client.number)
    with httpx2.Client(timeout=LONGEST) as http:
        while not end.is_set():
            session: list[Turn] = []
            client.sessions.append(session)
            name = f"c{client.number}-{len(client.sessions)}"
            while len(session) < TURNS and not end.is_set():
                turn = Turn([choose.randrange(3, vocabulary) for _ in range(PROMPT)], begun=time.monotonic())
                session.append(turn)
                while not turn.answered and not end.is_set():
                    text, outcome = ask(http, url, name, turn.sent, client.streams)
                    client.answers[outcome] += 1
                    if text is None:
                        turn.failed += 1
                        time.sleep(0.1)
                    else:
                        turn.text, turn.answered = text, time.monotonic()


def ask(http: Any, url: str, session: str, ids: list[int], streams: bool) -> tuple[str | None, str]:
    """Return the text of the answer, None if it failed, and the outcome as the client sees it."""
    body = {"prompt": ids, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": streams}
    headers = {"X-Session-Id": session}
    try:
        if not streams:
            answer = http.post(f"{url}/v1/completions", json=body, headers=headers)
            if answer.status_code == 200:
                return answer.json()["choices"][0]["text"], "200"
            return None, f"{answer.status_code} {_code(answer.text)}"
        text = ""
        with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                return None, f"{answer.status_code} {_code(answer.read().decode())}"
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return text, "200"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return None, f"stream ended by {event['error'].get('code')}"
                    text += "".join(choice["text"] for choice in event["choices"])
        return None, "stream cut off"
    except httpx2.TimeoutException:
        return None, "no answer"
    except httpx2.HTTPError as error:
        return None, f"connection: {type(error).__name__}"


def _code(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "no error of the API"


def replicas(server: psutil.Process) -> list[psutil.Process]:
    """Return the processes of replicas, whose engines may still be loading."""
    times = []
    for process in server.children(recursive=True):
        try:
            if TITLE in " ".join(process.cmdline()):
                times.append(process)
        except psutil.Error:
            continue
    return times


def check(engine: Engine, clients: list[Client]) -> Counter[str]:
    """Compare every answered turn with the engine's own, and count the outcomes.

    `kept` counts answers that did not arrive although the replica had kept their turn.
    """
    counts: Counter[str] = Counter()
    settings = engine.settings(max_new_tokens=ANSWER, do_sample=False, ignore_eos=True)

    def answer(ids: list[int], start: Snapshot | None) -> tuple[str, Snapshot | None]:
        request = Request(ids, settings, start=start, keep=True)
        engine.add(request)
        while engine.busy:
            engine.step()
        return "".join(token.text for token in request.tokens), request.snapshot

    for session in (session for client in clients for session in client.sessions):
        state: Snapshot | None = None
        for turn in session:
            if not turn.answered:
                break
            text, after = answer(turn.sent, state)
            if text == turn.text:
                counts["right"] += 1
            else:
                unheard = answer(turn.sent, state)[1]
                text, after = answer(turn.sent, unheard)
                counts["kept" if turn.failed and text == turn.text else "wrong"] += 1
            state = after
    return counts


def back_after(clients: list[Client], kill: float) -> float:
    """Return the seconds from a kill until the last of the sessions open then had another turn answered."""
    waits = [0.0]
    for session in (session for client in clients for session in client.sessions):
        later = [turn.answered for turn in session if turn.answered > kill]
        if session[0].answered and session[0].answered < kill and later:
            waits.append(min(later) - kill)
    return max(waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    for name, value in (("replicas", 2), ("clients", 8), ("kills", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    engine = kvexport.load(options.artifact, threads=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / "docker" / "ray_serve.py"
        command = [sys.executable, str(script), str(options.artifact), "--port", str(port)]
        command += ["--replicas", str(options.replicas), "--session-folder", folder]
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            url = next(line for line in process.stdout if line.startswith("http")).strip()
            ready = time.monotonic() - start
            figures = under_load(url, psutil.Process(process.pid), engine, options)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
    figures = {"replicas": options.replicas, "clients": options.clients, "seconds_until_ready": ready, **figures}
    print(json.dumps(figures, indent=1))
    if options.save:
        save("ray_kill", figures)


def under_load(url: str, server: psutil.Process, engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Run clients, kill replicas, and return the figures."""
    clients = [Client(number, streams=number % 2 == 0) for number in range(options.clients)]
    end = threading.Event()
    threads = [threading.Thread(target=talk, args=(client, url, engine.vocabulary, end)) for client in clients]
    for thread in threads:
        thread.start()
    kills, replaced = list[float](), list[float]()
    for number in range(options.kills):
        time.sleep(options.every / 2)
        there = replicas(server)
        victim = random.Random(number).choice(there)
        os.kill(victim.pid, signal.SIGKILL)
        kills.append(time.monotonic())
        known = {process.pid for process in there}
        while time.monotonic() < kills[-1] + options.every:
            if len(replaced) <= number and {process.pid for process in replicas(server)} - known:
                replaced.append(time.monotonic() - kills[-1])
            time.sleep(0.2)
    end.set()
    for thread in threads:
        thread.join()
    answers = sum((client.answers for client in clients), Counter[str]())
    return {
        "kills": len(kills),
        "answers": dict(answers),
        "without_an_answer": answers["no answer"],
        "turns": dict(check(engine, clients)),
        "sessions_back_after_seconds": [round(back_after(clients, kill), 2) for kill in kills],
        "process_replaced_after_seconds": [round(seconds, 2) for seconds in replaced],
    }


if __name__ == "__main__":
    main()
