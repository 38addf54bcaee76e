"""A server under load: every conversation of a workload is sent when its time comes, whether or not the ones before it
are answered (an open loop), and every piece of its answers is timed as it arrives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvexport.bench.workload import Conversation, Workload, conversations
from kvexport.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    import httpx2


@dataclass
class Answer:
    """One request. Times in seconds: sent and end since the beginning of the run, pieces since it was sent. tokens,
    prompt_tokens, cached_tokens: as the server counts them, where it does. error: why there is no answer, or not the
    whole of it."""

    conversation: int
    turn: int
    sent: float
    pieces: list[float] = field(default_factory=list)
    end: float = 0.0
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of the answer."""
        return self.pieces[0]

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """Seconds of a token behind the first; 0 where there is none."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Server:
    """url: of the API, with or without /v1. model: None takes the first that it lists. limit: seconds of a request."""

    url: str
    model: str | None = None
    key: str | None = None
    limit: float = 600.0

    @property
    def base(self) -> str:
        """Where /chat/completions is."""
        url = self.url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"the server's address is {self.url!r}", "--url http://127.0.0.1:8000")
        return url if url.endswith("/v1") else f"{url}/v1"


def drive(server: Server, workload: Workload) -> tuple[str, list[Answer], float]:
    """The model's name, an answer for each request that was sent, and the seconds of the run. Raises UsageError where
    the server cannot be reached or lists no model."""
    return asyncio.run(_drive(server, workload))


async def _drive(server: Server, workload: Workload) -> tuple[str, list[Answer], float]:
    client_of = _import()
    headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    limits = client_of.Limits(max_connections=None, max_keepalive_connections=None)
    async with client_of.AsyncClient(headers=headers, timeout=server.limit, limits=limits, trust_env=False) as client:
        model = server.model or await _first_model(client, server)
        begin = time.perf_counter()
        told = [
            _converse(client, server, model, workload, i, conversation, begin)
            for i, conversation in enumerate(conversations(workload))
        ]
        answers = [answer for made in await asyncio.gather(*told) for answer in made]
        return model, answers, time.perf_counter() - begin


async def _first_model(client: httpx2.AsyncClient, server: Server) -> str:
    try:
        response = await client.get(f"{server.base}/models")
        return str(response.raise_for_status().json()["data"][0]["id"])
    except Exception as error:  # of the network, the status and the body alike
        why = str(error) or type(error).__name__
        raise UsageError(
            f"{server.base}/models does not answer with models: {why}",
            "start the server, or give --model and --api-key",
        ) from error


async def _converse(
    client: httpx2.AsyncClient,
    server: Server,
    model: str,
    workload: Workload,
    number: int,
    conversation: Conversation,
    begin: float,
) -> list[Answer]:
    """The turns of one conversation, one after the other; it ends with the first that fails."""
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
        except Exception as error:  # whatever ends one request is a figure, not the end of the run
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
            said = (await response.aread()).decode(errors="replace")
            answer.error = f"status {response.status_code}: {said[:200]}"
            return
        async for event in _events(response):
            now = time.perf_counter() - start
            if "error" in event:
                answer.error = str(event["error"])[:200]
                return
            _take(answer, event, now)
    answer.tokens = answer.tokens or len(answer.pieces)


def _take(answer: Answer, event: Mapping[str, Any], now: float) -> None:
    """A chunk of the stream. Pieces without text (a token that completes no character) are tokens none the less, where
    the server sends them."""
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
    """The JSON of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


def _import() -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise EnvironmentProblem(
            f"the package 'httpx2', which speaks to servers, cannot be imported: {error}",
            "pip install 'kvexport[serve]'",
        ) from error
    return httpx2
