"""Load test of a server with OpenAI's API.

Conversations begin at random times, whether or not earlier ones are answered (an open loop). The times of all pieces of
text are recorded. `serve.py` measures all servers with this client; docs/tasks/measure-speed.md names tools for other
uses.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx2

from kvexport.bench.offline import percentiles

SYLLABLES = ("ba", "do", "fen", "gar", "hel", "ki", "lum", "mor", "ne", "pas", "ril", "so", "tam", "ul", "ver", "wi")


@dataclass(frozen=True)
class Workload:
    """Conversations that are sent to a server."""

    conversations: int = 16
    turns: int = 1  # turns of each conversation
    rate: float = 1.0  # mean number of conversations that begin per second, at Poisson times. 0 starts all at once.
    words: int = 100  # words of a user's message
    first_words: int = 0  # words of the first message. 0 means `words`.
    answer: int = 64  # largest number of tokens of an answer
    think: float = 0.0  # seconds from an answer to the next message
    ignore_eos: bool = False  # whether every answer has exactly `answer` tokens, if the server knows the field
    seed: int = 0  # seed of arrivals and messages


@dataclass(frozen=True)
class Conversation:
    """One conversation: its start in seconds after the beginning of the run, and the user's messages."""

    start: float
    messages: tuple[str, ...]


def conversations(workload: Workload) -> list[Conversation]:
    """Return the conversations of a workload, equal for equal seeds.

    No two messages begin alike, so that a server finds no shared prefix.
    """
    drawn, start, result = random.Random(workload.seed), 0.0, []
    for _ in range(workload.conversations):
        if workload.rate > 0:
            start += drawn.expovariate(workload.rate)
        counts = [workload.first_words or workload.words, *[workload.words] * (workload.turns - 1)]
        result.append(Conversation(start, tuple(_text(drawn, count) for count in counts)))
    return result


def _text(drawn: random.Random, count: int) -> str:
    words = ("".join(drawn.choices(SYLLABLES, k=drawn.randint(1, 3))) for _ in range(count))
    return " ".join(words) + "."


@dataclass
class Answer:
    """One request and its answer."""

    conversation: int
    turn: int
    sent: float  # seconds from the beginning of the run to the request
    pieces: list[float] = field(default_factory=list)  # seconds from the request to each piece of text
    end: float = 0.0  # seconds from the beginning of the run to the end of the answer
    text: str = ""
    tokens: int = 0  # tokens of the answer as the server counts them, else the number of pieces
    prompt_tokens: int = 0  # tokens of the prompt as the server counts them
    cached_tokens: int = 0  # tokens of the prompt that the server took from its cache
    error: str = ""  # reason why the answer is missing or incomplete; empty if it is complete

    @property
    def ttft(self) -> float:
        """The seconds to the first piece of the answer."""
        return self.pieces[0]

    @property
    def gaps(self) -> list[float]:
        """The seconds between neighbouring pieces."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """The mean seconds per token after the first; 0 for answers of one token."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Server:
    """A server to measure."""

    url: str  # address of the API, with or without /v1
    model: str | None = None  # name of the model; None takes the first that the server lists
    key: str | None = None  # API key
    limit: float = 600.0  # seconds after which a request fails

    @property
    def base(self) -> str:
        """The address with /v1, to which /chat/completions is added."""
        url = self.url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the server's address is {self.url!r}, expected http://HOST:PORT")
        return url if url.endswith("/v1") else f"{url}/v1"


def drive(server: Server, workload: Workload) -> tuple[str, list[Answer], float]:
    """Send a workload.

    Returns:
        The model's name, one answer per request that was sent, and the seconds of the run.
    """
    return asyncio.run(_drive(server, workload))


async def _drive(server: Server, workload: Workload) -> tuple[str, list[Answer], float]:
    headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(headers=headers, timeout=server.limit, limits=limits, trust_env=False) as client:
        model = server.model or await _first_model(client, server)
        begin = time.perf_counter()
        running = [
            _converse(client, server, model, workload, i, conversation, begin)
            for i, conversation in enumerate(conversations(workload))
        ]
        answers = [answer for answers in await asyncio.gather(*running) for answer in answers]
        return model, answers, time.perf_counter() - begin


async def _first_model(client: httpx2.AsyncClient, server: Server) -> str:
    try:
        response = await client.get(f"{server.base}/models")
        return str(response.raise_for_status().json()["data"][0]["id"])
    except Exception as error:  # errors of the network, the status and the body
        why = str(error) or type(error).__name__
        raise ConnectionError(f"{server.base}/models does not answer with models: {why}") from error


async def _converse(
    client: httpx2.AsyncClient,
    server: Server,
    model: str,
    workload: Workload,
    number: int,
    conversation: Conversation,
    begin: float,
) -> list[Answer]:
    """Send the turns of one conversation in order. The conversation ends with the first turn that fails."""
    await asyncio.sleep(max(0.0, begin + conversation.start - time.perf_counter()))
    messages: list[dict[str, str]] = []
    answers: list[Answer] = []
    for turn, text in enumerate(conversation.messages):
        messages.append({"role": "user", "content": text})
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": workload.answer,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if workload.ignore_eos else {}),
        }
        answer = Answer(number, turn, time.perf_counter() - begin)
        answers.append(answer)
        try:
            await _ask(client, f"{server.base}/chat/completions", body, answer)
        except Exception as error:  # an error of one request is a figure, not the end of the run
            answer.error = answer.error or f"{type(error).__name__}: {error}"[:200]
        answer.end = time.perf_counter() - begin
        answer.error = answer.error or ("" if answer.pieces else "no token came")
        if answer.error:
            break
        messages.append({"role": "assistant", "content": answer.text})
        if workload.think and turn + 1 < len(conversation.messages):
            await asyncio.sleep(workload.think)
    return answers


async def _ask(client: httpx2.AsyncClient, url: str, body: Mapping[str, Any], answer: Answer) -> None:
    start = time.perf_counter()
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            answer.error = f"status {response.status_code}: {text[:200]}"
            return
        async for event in _events(response):
            now = time.perf_counter() - start
            if "error" in event:
                answer.error = str(event["error"])[:200]
                return
            _take(answer, event, now)
    answer.tokens = answer.tokens or len(answer.pieces)


def _take(answer: Answer, event: Mapping[str, Any], now: float) -> None:
    """Add one event of the stream to the answer. An event without text is not timed."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or ""
        if text:
            answer.text += text
            answer.pieces.append(now)
    usage = event.get("usage")
    if usage:
        answer.tokens = int(usage.get("completion_tokens") or 0)
        answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        answer.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


async def _events(response: httpx2.Response) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the JSON objects of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


@dataclass(frozen=True)
class Objective:
    """Bounds of a good request: seconds to the first token, and mean seconds per further token."""

    ttft: float = 1.0
    per_token: float = 0.1

    def holds(self, answer: Answer) -> bool:
        """Return whether a complete answer is within the bounds."""
        return not answer.error and answer.ttft <= self.ttft and answer.per_token <= self.per_token


@dataclass
class Result:
    """A run with the answers of all requests that were sent."""

    url: str
    model: str
    workload: Workload
    objective: Objective
    seconds: float
    answers: Sequence[Answer]

    @property
    def whole(self) -> list[Answer]:
        """The answers without an error."""
        return [answer for answer in self.answers if not answer.error]

    def to_json(self) -> dict[str, Any]:
        """Return the figures of the run, with one row per request under `each`."""
        whole, good = self.whole, sum(map(self.objective.holds, self.answers))
        seconds = max(self.seconds, 1e-9)
        return {
            "url": self.url,
            "model": self.model,
            "workload": asdict(self.workload),
            "objective": asdict(self.objective),
            "seconds": round(self.seconds, 3),
            "requests": len(self.answers),
            "not_sent": self.workload.conversations * self.workload.turns - len(self.answers),
            "failed": len(self.answers) - len(whole),
            "errors": Counter(answer.error for answer in self.answers if answer.error),
            "requests_per_second": round(len(whole) / seconds, 3),
            "output_tokens_per_second": round(sum(answer.tokens for answer in whole) / seconds, 1),
            "prompt_tokens_per_second": round(sum(answer.prompt_tokens for answer in whole) / seconds, 1),
            "good_requests_per_second": round(good / seconds, 3),
            "good_share": round(good / max(len(self.answers), 1), 4),
            "ttft": percentiles([answer.ttft for answer in whole]),
            "inter_token_latency": percentiles([gap for answer in whole for gap in answer.gaps]),
            "per_token": percentiles([answer.per_token for answer in whole if answer.tokens > 1]),
            "end_to_end": percentiles([answer.end - answer.sent for answer in whole]),
            "each": [
                {
                    "conversation": answer.conversation,
                    "turn": answer.turn,
                    "sent": round(answer.sent, 4),
                    "ttft": round(answer.ttft, 5) if answer.pieces else None,
                    "seconds": round(answer.end - answer.sent, 5),
                    "prompt_tokens": answer.prompt_tokens,
                    "cached_tokens": answer.cached_tokens,
                    "tokens": answer.tokens,
                    "error": answer.error,
                }
                for answer in self.answers
            ],
        }
