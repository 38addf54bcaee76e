"""Random schedules of all events of requests. Each answer must equal the one without other requests."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.engine.engine import Engine
from kvexport.engine.prefixes import Prefixes
from kvexport.engine.request import Request, State
from kvexport.errors import DeadlineError
from kvexport.language.token import Token
from kvexport.state.sessions import SessionStore
from kvexport.state.snapshot import Snapshot
from tests.support.answers import stopped

CHUNK, VOCABULARY = 16, 64  # the chunk and the vocabulary of the tiny artifact
STREAMED = 11  # tokens of a sequence of a stream
Turn = tuple[tuple[int, ...], tuple[tuple[str, Any], ...]]  # a prompt and its settings
CHOICES: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 1},
    {"max_new_tokens": 5},
    {"max_new_tokens": 21},
    {"max_new_tokens": 12, "do_sample": True, "seed": 5},
    {"max_new_tokens": 12, "do_sample": True, "seed": 6, "repetition_penalty": 1.3},
    {"max_new_tokens": 25, "eos_token_ids": (7, 30)},
)


class Alone:
    """The answers to conversations, turn by turn, from an engine that runs nothing else."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._known: dict[tuple[Turn, ...], tuple[list[int], str, Snapshot]] = {}

    def answer(self, turns: tuple[Turn, ...]) -> tuple[list[int], str, Snapshot]:
        if turns not in self._known:
            start = self.answer(turns[:-1])[2] if len(turns) > 1 else None
            ids, settings = turns[-1]
            request = Request(ids, self.engine.settings(**dict(settings)), start=start, keep=True)
            self.engine.add(request)
            while self.engine.busy:
                self.engine.step()
            assert request.snapshot is not None
            text = "".join(token.text for token in request.tokens)
            self._known[turns] = ([token.id for token in request.tokens], text, request.snapshot)
        return self._known[turns]


@dataclass
class Talk:
    """A conversation that a drawn schedule of requests continues turn by turn."""

    turns: tuple[Turn, ...]  # turns so far
    requests: list[Request]  # requests that answered the last turn, one after another
    name: str = ""  # name of its session
    tokens: list[int] = field(default_factory=list)
    text: str = ""

    def check(self, alone: Alone, whole: bool) -> None:
        tokens = [token.id for request in self.requests for token in request.tokens]
        text = "".join(token.text for request in self.requests for token in request.tokens)
        expected, words, _ = alone.answer(self.turns)
        if whole:
            assert (tokens, text) == (expected, words), self.turns
        else:
            assert tokens == expected[: len(tokens)] and words.startswith(text), self.turns


class Schedule:
    """A random schedule over several engines, between which sequences move. Some prompts have the same beginning."""

    def __init__(self, engines: Sequence[Engine], alone: Alone, folder: Path, seed: int) -> None:
        self.rng, self.alone, self.engines = np.random.default_rng(seed), alone, engines
        for engine in self.engines:
            engine.prefixes = Prefixes(CHUNK, int(self.rng.integers(0, 20)) * 30_000)
            budget = (None, 1e-4)[self.rng.integers(2)]
            engine.options = replace(engine.options, latency_budget=budget)
        self.store = SessionStore(self.engines[0].manifest, memory=150_000, folder=folder, disk=1 << 30)
        self.running: list[tuple[Engine, Talk]] = []
        self.parked: list[tuple[Snapshot, Talk]] = []
        self.idle: list[Talk] = []
        self.streams: list[tuple[Iterator[Token], list[list[int]], list[list[int]]]] = []
        self.happened: Counter[str] = Counter()

    def run(self, steps: int) -> Counter[str]:
        """Run the schedule to its end, and return how often each event happened."""
        events = {self.join: 0.25, self.fork: 0.1, self.cancel: 0.06, self.stop: 0.12, self.resume: 0.12}
        events |= {self.turn: 0.15, self.expire: 0.02, self.stream: 0.03, self.read: 0.5}
        for _ in range(steps):
            for event, chance in events.items():
                if self.rng.random() < chance:
                    event()
            self.step()
        while self.running or self.parked:
            if self.parked:
                self.resume()
            self.step()
        while self.streams:
            self.read()
        for engine in self.engines:
            assert engine.step() == [] and not engine.busy
            assert engine._scheduler.running() == [] and engine._requests == {} and engine._forks._parents == []
            assert engine.prefixes is not None and engine.prefixes.nbytes <= engine.prefixes.limit
        return self.happened

    def step(self) -> None:
        for engine in self.engines:
            engine.step()
        for engine, talk in [*self.running]:
            request = talk.requests[-1]
            if request.state is State.FINISHED:
                self.running.remove((engine, talk))
                assert request.finish_reason in ("stop", "length"), request.error
                talk.check(self.alone, whole=True)
                self.happened["answered"] += 1
                if request.snapshot is not None:
                    self.store.put(talk.name, request.snapshot)
                    self.idle.append(talk)

    def join(self) -> None:
        n = int(self.rng.integers(1, 60))
        ids = [3 * i % 50 for i in range(int(self.rng.integers(50)))] + self.rng.integers(0, VOCABULARY, n).tolist()
        self._add(Talk(((tuple(ids), self._settings()),), []), None)

    def fork(self) -> None:
        if not self.running:
            return
        engine, talk = self._one(self.running)
        parent = talk.requests[-1]
        if len(talk.requests) == 1 and len(parent.prompt):
            settings = self._settings()
            child = Talk((*talk.turns[:-1], (talk.turns[-1][0], settings)), [])
            child.requests.append(parent.fork(engine.settings(**dict(settings))))
            self._start(engine, child)
            self.happened["fork"] += 1

    def cancel(self) -> None:
        if self.running:
            engine, talk = self._one(self.running)
            assert engine.cancel(talk.requests[-1].id)
            self.running.remove((engine, talk))
            talk.check(self.alone, whole=False)
            self.happened["cancel"] += 1

    def stop(self) -> None:
        if kept := [(engine, talk) for engine, talk in self.running if talk.requests[-1].keep]:
            engine, talk = self._one(kept)
            snapshot = stopped(engine, talk.requests[-1])
            self.running.remove((engine, talk))
            if self.rng.random() < 0.5:
                snapshot = Snapshot.from_bytes(snapshot.to_bytes(), engine.manifest)
            self.parked.append((snapshot, talk))
            self.happened["stop"] += 1

    def resume(self) -> None:
        if self.parked:
            snapshot, talk = self.parked.pop(int(self.rng.integers(len(self.parked))))
            talk.requests.append(Request((), start=snapshot, keep=bool(talk.name)))
            self._start(self._one(self.engines), talk)
            self.happened["resume"] += 1

    def turn(self) -> None:
        """Add the next turn of a session, sometimes as two different continuations of it."""
        if self.idle:
            talk = self.idle.pop(int(self.rng.integers(len(self.idle))))
            start = self.store.get(talk.name)
            for _ in range(int(self.rng.integers(1, 3))):
                if len(start.ids) < 350:
                    ids = self.rng.integers(0, VOCABULARY, int(self.rng.integers(1, 30))).tolist()
                    self._add(Talk((*talk.turns, (tuple(ids), self._settings())), []), start)
                    self.happened["turn"] += 1

    def expire(self) -> None:
        engine = self._one(self.engines)
        late = Request([1, 2, 3], deadline=time.monotonic())
        engine.add(late)
        assert late in engine.step() and isinstance(late.error, DeadlineError)
        self.happened["expire"] += 1

    def stream(self) -> None:
        prompts = [self.rng.integers(0, VOCABULARY, n).tolist() for n in self.rng.integers(1, 60, 2)]
        stream = self._one(self.engines).stream(prompts, max_new_tokens=STREAMED)
        self.streams.append((stream, prompts, [[], []]))
        self.happened["stream"] += 1

    def read(self) -> None:
        """Read the next token of a stream, which runs its engine until there is one."""
        if self.streams:
            at = int(self.rng.integers(len(self.streams)))
            stream, prompts, tokens = self.streams[at]
            token = next(stream, None)
            if token is not None:
                tokens[token.sequence].append(token.id)
            else:
                del self.streams[at]
                settings = (("max_new_tokens", STREAMED),)
                assert tokens == [self.alone.answer(((tuple(ids), settings),))[0] for ids in prompts]

    def _add(self, talk: Talk, start: Snapshot | None) -> None:
        engine = self._one(self.engines)
        if self.rng.random() < 0.6:
            talk.name = f"talk{self.happened['join']}"
        self.happened["join"] += 1
        ids, settings = talk.turns[-1]
        request = Request(ids, engine.settings(**dict(settings)), start=start, keep=bool(talk.name))
        request.priority = int(self.rng.integers(-1, 2))
        talk.requests.append(request)
        self._start(engine, talk)

    def _start(self, engine: Engine, talk: Talk) -> None:
        engine.add(talk.requests[-1])
        self.running.append((engine, talk))

    def _settings(self) -> tuple[tuple[str, Any], ...]:
        return tuple(CHOICES[self.rng.integers(len(CHOICES))].items())

    def _one(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]
