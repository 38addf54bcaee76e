"""Random HTTP requests to a server."""

import copy
import json
import logging
import random
from collections import Counter
from typing import Any

MESSAGES: list[Any] = [{"role": "system", "content": "be"}, {"role": "user", "content": "anna lamp"}]
TOOL = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
BLOCKS: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
SAMPLING: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2, "seed": 3, "stop": ["a", "b"],
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"3": 5},
    "max_tokens": 3, "ignore_eos": True, "min_tokens": 1, "stop_token_ids": [5], "priority": 1, "stream": False,
    "stream_options": {"include_usage": True}, "user": "me",
}  # fmt: skip
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **SAMPLING}),
    ("/v1/chat/completions", {"messages": BLOCKS, "tools": [{"type": "function", "function": TOOL}], "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "structured_outputs": {"regex": "[a-c]+"}, "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["ab", "c"], "logprobs": 2, "echo": False, **SAMPLING}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "session_id": "s"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "session_id": "t", "stream": True}),
    ("/v1/responses", {"input": "hi", "instructions": "be", "max_output_tokens": 3, "store": True, "metadata": {}}),
    ("/v1/responses", {"input": BLOCKS, "tools": [{"type": "function", **TOOL}], "tool_choice": "none"}),
    ("/v1/messages", {"model": "tiny", "messages": BLOCKS, "max_tokens": 3, "system": "be", "stop_sequences": ["a"]}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES[1:], "system": [{"type": "text", "text": "be"}]}),
    ("/tokenize", {"prompt": "abc", "add_special_tokens": True}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.5, 1e-300, 1e308, "", "a", "\x00",
    "é" * 50, "a" * 3000, "../x", "\ud800", [], {}, [[]], [{}], [None], {"": None}, [1, "a"], {"type": "text"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, {"role": "user"}, "auto", "required",
    {"type": "function", "function": {"name": "look"}}, [0] * 600, "user", "tool", float("nan"), float("inf"),
]  # fmt: skip


def mutated(random: random.Random) -> tuple[str, bytes]:
    """Return a path and a body: one of BODIES with one to three changes."""
    path, body = random.choice(BODIES)
    data: Any = copy.deepcopy(body)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = _changed(random, data)
    text = json.dumps(data).replace("Infinity", random.choice(("Infinity", "1e999"))).encode()
    kind = random.random()
    if kind < 0.04:
        text = text[: random.randrange(len(text) + 1)]
    elif kind < 0.08 and text:
        place = random.randrange(len(text))
        text = text[:place] + random.randbytes(3) + text[place + 1 :]
    elif kind < 0.09:
        text = b"[" * random.choice((10, 1000, 50000)) + text
    return (random.choice(BODIES)[0] if kind > 0.97 else path), text


def _changed(random: random.Random, data: Any) -> Any:
    if isinstance(data, dict) and data and random.random() < 0.9:
        key = random.choice(list(data))
        kind = random.random()
        if kind < 0.08:
            return {k: v for k, v in data.items() if k != key}
        if kind < 0.12:
            return {**data, random.choice(("extra", "tools", "n", "stream", "logprobs", "", key + "x")): _value(random)}
        return {**data, key: _changed(random, data[key]) if random.random() < 0.7 else _value(random, data[key])}
    if isinstance(data, list) and data and random.random() < 0.9:
        i = random.randrange(len(data))
        if random.random() < 0.2:
            return data * random.choice((0, 2, 5))
        return [*data[:i], _changed(random, data[i]), *data[i + 1 :]]
    return _value(random, data)


def _value(random: random.Random, like: Any = None) -> Any:
    """Return a random value, mostly of the type of `like`: the server refuses most others at once."""
    alike = [value for value in VALUES if type(value) is type(like)] if random.random() < 0.75 else []
    return copy.deepcopy(random.choice(alike or VALUES))


def mutations(server: Any, count: int, seed: int) -> Counter[str]:
    for path, body in BODIES:
        status, _, answer = server.ask(path, body)
        assert status == 200, (path, body, answer)
    generator, seen = random.Random(seed), Counter[str]()
    for i in range(count):
        path, body = mutated(generator)
        try:
            status, _, answer = server.ask(path, body)
        except OSError as error:
            raise AssertionError((i, path, body[:2000])) from error
        assert status < 500 or status in (501, 503), (i, status, path, body[:2000], answer)
        if status >= 400:
            message = answer["error"]["message"] if isinstance(answer, dict) else ""
            assert message and "Traceback" not in message, (i, status, path, body[:2000], answer)
        seen[str(status)] += 1
    return seen


class Errors(logging.Handler):
    """A log handler that keeps every record of level ERROR as text."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))
