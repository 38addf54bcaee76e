"""Pinned messages over HTTP: they stay in the cache, also over the turns of a session, and their number is told."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.serve import prompts
from kvexport.state.sessions import pins_after
from tests.support import vision
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


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine of a model that reads images, with room for pins."""
    folder = tmp_path_factory.mktemp("seeing")
    cache = {"budget": 48, "merge_every": 4, "pinned": ROOM}
    limits = {"max_length": 600, "max_batch": 4}
    checkpoint = vision.save_checkpoint("llava", folder / "checkpoint")
    recipe = make_recipe(checkpoint, cache=cache, export={"prefill_chunk": 8}, limits=limits)
    return load(build(recipe, folder / "artifact"), threads=1)


def image(api: str = CHAT) -> dict[str, Any]:
    """Return a part of a message with an image, in the form of an API."""
    data = base64.b64encode(vision.png(vision.picture(50, 40))).decode()
    if api == MESSAGES:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    url = f"data:image/png;base64,{data}"
    return {"type": "input_image", "image_url": url} if api == RESPONSES else _url(url)


def _url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def pinned(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "cache": "pin"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


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

    with running(engine, pins_system=False, prefix_memory=0) as server:

        def turn(session: str, messages: list[dict[str, Any]]) -> tuple[int, int, str]:
            status, _, body = server.ask(CHAT, {"messages": messages, "max_tokens": 6, "session_id": session})
            assert status == 200, body
            usage = body["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return usage["kv_cache"]["pinned_tokens"], cached, body["choices"][0]["message"]["content"]

        count, _, text = turn("a", talk)
        assert count == len("system code 41. user ")
        talk += [{"role": "assistant", "content": text}, pinned(user("ab"))]
        more, cached, _ = turn("a", talk)
        assert more == count + 2 and cached > len(FILLER)
        # A turn that takes back a pin, or pins what was read before, has the conversation read again.
        fewer, cached, text = turn("a", [SYSTEM, *talk[1:]])
        assert fewer == 2 and cached == 0
        assert turn("b", [SYSTEM, *talk[1:]])[2] == text


class Talk:
    def __init__(self, **fields: Any) -> None:
        self.messages: list[dict[str, Any]] = [SYSTEM]
        self.fields = {"max_tokens": 6, "session_id": "s", **fields}

    def ask(self, server: Running, content: Any) -> tuple[int, int]:
        """Send a turn, and return the number of pinned tokens and of tokens that the server did not read again."""
        self.messages.append(user(content))
        status, _, body = server.ask(CHAT, {"messages": self.messages, **self.fields})
        assert status == 200, body
        if self.fields.get("stream"):
            events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
            text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
            usage = events[-1]["usage"]
        else:
            text, usage = body["choices"][0]["message"]["content"], body["usage"]
        self.messages.append({"role": "assistant", "content": text})
        return usage["kv_cache"]["pinned_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_session_keeps_its_system_prompt_pinned_when_the_server_starts_again(
    engine: Engine, tmp_path: Path, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = list[Any]()

    def recorded(*given: Any) -> Any:
        added.append(pins_after(*given))
        return added[-1]

    monkeypatch.setattr(prompts, "pins_after", recorded)
    front = len("system code 41. user ")
    more = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    talk = Talk(**more)
    for turn in range(3):
        with running(engine, session_folder=str(tmp_path)) as server:
            before = sum(len(message["content"]) for message in talk.messages)
            count, cached = talk.ask(server, FILLER)
            assert count == front and (cached >= before if turn else cached == 0)
    assert added == [(), ()]  # the turns after the first one pin nothing new, and continue the state of the session


def test_a_session_keeps_its_system_prompt_pinned_beside_images(seeing: Engine, tmp_path: Path) -> None:
    front = len("[system]code 41[user]")
    # Answers of letters are the same tokens when they are sent.
    talk = Talk(logit_bias={str(token): 50 for token in range(64, 90)})
    turns: list[Any] = [FILLER, [image(), {"type": "text", "text": "what?"}], [_text("and"), image()], "now?"]
    for turn, content in enumerate(turns):
        with running(seeing, session_folder=str(tmp_path), prefix_memory=0) as server:
            count, cached = talk.ask(server, content)
            assert count == front and (cached > len(FILLER) if turn else cached == 0)
    first = Talk(session_id="first")
    with running(seeing) as server:
        assert first.ask(server, [image(), _text("what?")])[0] == front
        assert first.ask(server, "more")[0] == front
    with running(seeing, pins_system=False) as server:
        assert Talk().ask(server, [image(), _text("what?")])[0] == 0


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_a_marked_message_beside_images_is_refused_before_they_are_read(seeing: Engine) -> None:
    broken = _url("data:image/png;base64,AAAA")
    talk = [SYSTEM, pinned(user("key 7")), user([broken])]
    with running(seeing) as server:
        for session in (None, "s"):
            status, _, body = server.ask(CHAT, {"messages": talk, "session_id": session})
            assert (status, body["error"]["param"]) == (400, "messages.1.cache")
            assert "leave out the images" in body["error"]["message"]
        said = [pinned(user("key 7")), user([image(MESSAGES)])]
        status, _, body = server.ask(MESSAGES, {"system": "a", "messages": said, "max_tokens": 2})
        assert status == 400 and body["error"]["message"].startswith("messages.0.cache: a pinned message")
        items = [pinned(user("key 7")), user([image(RESPONSES)])]
        status, _, body = server.ask(RESPONSES, {"instructions": "a", "input": items})
        assert (status, body["error"]["param"]) == (400, "input.0.cache")
        status, _, body = server.ask(RESPONSES, {"input": items[:1], "max_output_tokens": 2})
        assert status == 200
        status, _, body = server.ask(RESPONSES, {"input": items[1:], "previous_response_id": body["id"]})
        assert (status, body["error"]["param"]) == (400, "previous_response_id")
    with pytest.raises(UsageError, match=r"messages\.1\.cache: a pinned message"):
        seeing.chat([SYSTEM, pinned(user("key 7")), user([{"type": "image", "image": "no file"}])])


def test_errors_name_the_field_of_each_route(server: Running) -> None:
    kept, empty = {"cache": "keep"}, {"cache": "pin"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "b"}
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"system": [{**_text("a"), **kept}], "messages": [user("b")]}, "system.0.cache"),
        ({"system": [_text("a"), {**_text("b"), **kept}], "messages": [user("b")]}, "system.1.cache"),
        ({"system": "a", "messages": [{**user("b"), **kept}]}, "messages.0.cache"),
        ({"system": "a", "messages": [user("b"), {**user(" "), **empty}]}, "messages.1.cache"),
        ({"system": "a", "messages": [user([result, {**result, **kept}])]}, "messages.0.content.1.cache"),
        ({"system": "a", "messages": [user([result, {**_text(" "), **empty}])]}, "messages.0.content.1.cache"),
    ]
    for body, where in bodies:
        status, _, answer = server.ask(MESSAGES, {**body, "max_tokens": 2})
        assert status == 400 and answer["error"]["message"].startswith(f"{where}: "), answer
    output = {"type": "function_call_output", "call_id": "a", "output": "b"}
    items: list[dict[str, Any]] = [{**user("b"), **kept}, {**user(" "), **empty}]
    items += [{**output, **kept}, {**output, "output": "", **empty}]
    for item in items:
        status, _, answer = server.ask(RESPONSES, {"instructions": "a", "input": [user("c"), item]})
        assert (status, answer["error"]["param"]) == (400, "input.1.cache"), answer


def test_more_than_the_room_is_a_400_that_names_room_and_command(server: Running) -> None:
    status, _, body = server.ask(CHAT, {"messages": [pinned(user(FILLER))], "max_tokens": 2})
    message = body["error"]["message"]
    assert status == 400 and f"the artifact has room for {ROOM} (cache.pinned)" in message
    assert f"--set cache.pinned={len(FILLER.strip())}" in message
    status, _, body = server.ask(CHAT, {"messages": [{**user("a"), "cache": "keep"}], "max_tokens": 2})
    assert (status, body["error"]["param"]) == (400, "messages.0.cache")
    status, _, body = server.ask(CHAT, {"messages": [pinned(user(" "))], "max_tokens": 2})
    assert (status, body["error"]["param"]) == (400, "messages.0.cache")
