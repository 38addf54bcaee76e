"""Tests of /v1/responses with OpenAI's own client."""

from typing import Any

import openai
import pytest

from kvexport.engine.engine import Engine
from kvexport.language.tools import check_tools, choose
from kvexport.serve.errors import ApiError
from kvexport.serve.response_store import ResponseStore
from kvexport.serve.responses import ResponsesBody
from tests.support.http_server import Running, prompt


def engine_answer(engine: Engine, server: Running, *messages: tuple[str, str], tokens: int = 40) -> str:
    text = prompt([{"role": role, "content": content} for role, content in messages])
    return str(server.on_engine(lambda: engine.generate(text, max_new_tokens=tokens, top_k=0)[0].text))


def test_a_response_equals_the_engines_own_answer(client: openai.OpenAI, engine: Engine, server: Running) -> None:
    expected = engine_answer(engine, server, ("system", "be brief"), ("user", "anna lamp"))
    answer = client.responses.create(model="tiny", instructions="be brief", input="anna lamp", max_output_tokens=40)
    assert (answer.output_text, answer.status) == (expected, "incomplete")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 40
    parts: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "anna lamp"}]}]
    again = client.responses.create(model="tiny", instructions="be brief", input=parts, max_output_tokens=40)
    assert again.output_text == expected


def test_a_stream_has_the_same_content_in_events(client: openai.OpenAI, engine: Engine, server: Running) -> None:
    expected = engine_answer(engine, server, ("user", "anna lamp"))
    with client.responses.stream(model="tiny", input="anna lamp", max_output_tokens=40) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == expected


def test_a_response_continues_an_earlier_one(client: openai.OpenAI, engine: Engine, server: Running) -> None:
    first = client.responses.create(model="tiny", instructions="be", input="anna lamp", max_output_tokens=10)
    second = client.responses.create(model="tiny", previous_response_id=first.id, input="and bob", max_output_tokens=10)
    turns = [("user", "anna lamp"), ("assistant", first.output_text), ("user", "and bob")]
    assert second.output_text == engine_answer(engine, server, *turns, tokens=10)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    for ask in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(model="tiny", previous_response_id=first.id, input="x"),
        lambda: client.responses.delete(first.id),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            ask()
    hidden = client.responses.create(model="tiny", input="x", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(hidden.id)


def test_calls_and_their_outputs_become_messages_of_the_template(server: Running) -> None:
    body = ResponsesBody.model_validate(
        {
            "input": [
                {"role": "developer", "content": "be"},
                {"type": "message", "role": "user", "content": "hi"},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"at": 1}'},
                {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "seen"},
            ],
            "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}],
            "tool_choice": {"type": "function", "name": "look"},
        }
    )
    conversation, _ = body.to_conversation(server.service)
    calls = [
        {"id": i, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for i, arguments in (("1", {"at": 1}), ("2", {}))
    ]
    assert conversation.messages == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    ]
    assert conversation.tools == [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert choose(check_tools(conversation.tools), conversation.tool_choice) == (conversation.tools, True)


@pytest.mark.parametrize(("body", "param"), [
    ({}, "input"), ({"input": []}, None), ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages.0.content.0"),
    ({"input": "a", "background": True}, "background"), ({"input": "a", "conversation": "c"}, "conversation"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
])  # fmt: skip
def test_unsupported_fields_are_refused_by_name(server: Running, body: Any, param: str | None) -> None:
    status, _, answer = server.ask("/v1/responses", body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_the_memory_of_stored_responses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvexport.serve.response_store._CHARACTERS", 1000)
    store = ResponseStore()
    for i in range(100):
        store.put({"id": str(i)}, [{"role": "user", "content": "a" * 200}])
    assert store._size <= 1000 and len(store._stored) == 4
    assert store.get("99").messages[0]["content"] == "a" * 200
    with pytest.raises(ApiError):
        store.get("95")
    for i in range(96, 100):
        store.remove(str(i))
    assert store._size == 0
