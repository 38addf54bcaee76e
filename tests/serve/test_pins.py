"""Pinned messages over HTTP: they stay in the cache, also over the turns of a session, and their number is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvexport.engine.engine import Engine
from kvexport.export.build import build
from tests.support.http_server import Running, engine_of, running
from tests.support.models import make_recipe

ROOM = 24
FILLER = "x y z " * 12
SYSTEM = {"role": "system", "content": "code 41"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    cache = {"method": "keepkv", "budget": 32, "merge_every": 4, "pinned": ROOM}
    limits = {"max_length": 512, "max_batch": 4}
    recipe = make_recipe(tiny_checkpoint, cache=cache, export={"prefill_chunk": 16}, limits=limits)
    return engine_of(build(recipe, tmp_path_factory.mktemp("pins") / "artifact"))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with running(engine, pins_system=False) as server:
        yield server


def pinned(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "cache": "pin"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def kept(server: Running, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Return how many tokens the answer to a request says are pinned, and its text."""
    status, _, answer = server.ask(path, body)
    assert status == 200, answer
    text = answer["choices"][0]["message"]["content"] if path == CHAT else str(answer.get("content"))
    return answer["usage"]["kv_cache"]["pinned_tokens"], text


def test_every_chat_route_pins_messages_and_tells_how_many_tokens(engine: Engine, server: Running) -> None:
    front = len("system code 41. user ")
    messages = [pinned(SYSTEM), user(FILLER), user("end")]
    count, text = kept(server, CHAT, {"messages": messages, "max_tokens": 8})
    assert count == front
    expected = server.on_engine(lambda: engine.chat(messages, max_new_tokens=8, top_k=0))
    assert text == expected.text
    assert kept(server, CHAT, {"messages": [SYSTEM, *messages[1:]], "max_tokens": 8})[0] == 0
    assert kept(server, CHAT, {"messages": [user(FILLER), pinned(user("key 7")), user("a")], "max_tokens": 2})[0] == 5
    assert kept(server, CHAT, {"messages": messages, "max_tokens": 2, "n": 2})[0] == front

    said = {"max_tokens": 2, "messages": [user(FILLER)]}
    assert kept(server, MESSAGES, {**said, "system": [{"type": "text", "text": "code 41", "cache": "pin"}]})[0] == front
    # Anthropic's own field keeps its meaning, which here is none.
    ephemeral = {"type": "text", "text": "code 41", "cache_control": {"type": "ephemeral"}}
    assert kept(server, MESSAGES, {**said, "system": [ephemeral]})[0] == 0
    result = {"type": "tool_result", "tool_use_id": "a", "content": "key 7", "cache": "pin"}
    assert kept(server, MESSAGES, {**said, "messages": [user("b"), {"role": "user", "content": [result]}]})[0] == 5
    assert kept(server, MESSAGES, {**said, "messages": [pinned(user("key 7")), user("b")]})[0] == 5

    output = {"type": "function_call_output", "call_id": "a", "output": "key 7", "cache": "pin"}
    items = [user(FILLER), pinned(user("key 7")), output]
    assert kept(server, RESPONSES, {"input": items, "max_output_tokens": 2})[0] == 10


def test_the_system_prompt_is_pinned_by_default_if_it_fits(engine: Engine) -> None:
    front, long = len("system code 41. user "), {"role": "system", "content": FILLER}
    with running(engine) as server:
        assert kept(server, CHAT, {"messages": [SYSTEM, user(FILLER)], "max_tokens": 2})[0] == front
        assert kept(server, CHAT, {"messages": [long, user(FILLER)], "max_tokens": 2})[0] == 0
        # A message that is marked goes before a system prompt that is not.
        assert kept(server, CHAT, {"messages": [SYSTEM, pinned(user("key 7"))], "max_tokens": 2})[0] == 5
        assert (
            kept(server, CHAT, {"messages": [SYSTEM, pinned(user("ab")), user("c")], "max_tokens": 2})[0] == front + 2
        )


def test_the_turns_of_a_session_keep_pins_and_add_their_own(engine: Engine) -> None:
    talk = [pinned(SYSTEM), user(FILLER)]

    def turn(session: str, messages: list[dict[str, Any]]) -> tuple[int, int, str]:
        status, _, body = server.ask(CHAT, {"messages": messages, "max_tokens": 6, "session_id": session})
        assert status == 200, body
        usage = body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["kv_cache"]["pinned_tokens"], cached, body["choices"][0]["message"]["content"]

    with running(engine, pins_system=False, prefix_memory=0) as server:
        count, _, text = turn("a", talk)
        assert count == len("system code 41. user ")
        talk += [{"role": "assistant", "content": text}, pinned(user("ab"))]
        more, cached, _ = turn("a", talk)
        assert more == count + 2 and cached > len(FILLER)
        # A turn that takes back a pin, or pins what was read before, has the conversation read again.
        fewer, cached, text = turn("a", [SYSTEM, *talk[1:]])
        assert fewer == 2 and cached == 0
        assert turn("b", [SYSTEM, *talk[1:]])[2] == text


def test_more_than_the_room_is_a_400_that_names_room_and_command(server: Running) -> None:
    status, _, body = server.ask(CHAT, {"messages": [pinned(user(FILLER))], "max_tokens": 2})
    message = body["error"]["message"]
    assert status == 400 and f"the artifact has room for {ROOM} (cache.pinned)" in message
    assert f"--set cache.pinned={len(FILLER.strip())}" in message
    status, _, body = server.ask(CHAT, {"messages": [{**user("a"), "cache": "keep"}], "max_tokens": 2})
    assert (status, body["error"]["param"]) == (400, "messages.0.cache")
    status, _, body = server.ask(CHAT, {"messages": [pinned(user(" "))], "max_tokens": 2})
    assert (status, body["error"]["param"]) == (400, "messages.0.cache")
