"""Tests of /v1/messages with Anthropic's own client."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from kvexport.engine.engine import Engine
from kvexport.serve.messages import CountBody
from tests.support.http_server import Running, prompt

MESSAGES: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "anna lamp"}]}]


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def alone(engine: Engine, server: Running) -> str:
    text = prompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": "anna lamp"}])
    return str(server.on_engine(lambda: engine.generate(text, max_new_tokens=40, top_k=0)[0].text))


def test_a_message_equals_the_engines_own_answer(client: anthropic.Anthropic, alone: str) -> None:
    answer = client.messages.create(model="tiny", max_tokens=40, system="be brief", messages=MESSAGES)
    (block,) = answer.content
    assert block.type == "text" and block.text == alone
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "max_tokens", None)
    read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert (read, answer.usage.output_tokens) == (len("system be brief. user anna lamp. say "), 40)


def test_a_stream_has_the_same_content_in_events(client: anthropic.Anthropic, alone: str) -> None:
    with client.messages.stream(model="tiny", max_tokens=40, system="be brief", messages=MESSAGES) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        message = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_delta") > 20
    (block,) = message.content
    assert block.type == "text" and block.text == alone
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 40)


def test_the_stop_sequence_of_an_answer_is_returned(client: anthropic.Anthropic, alone: str) -> None:
    stop = alone[20:22]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "system": "be brief", "messages": MESSAGES}
    answer = client.messages.create(**body, stop_sequences=[stop, "none"])
    (block,) = answer.content
    assert block.type == "text" and block.text == alone[: alone.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    with client.messages.stream(**body, stop_sequences=[stop]) as stream:
        assert stream.get_final_message().stop_sequence == stop


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", system="be brief", messages=MESSAGES)
    assert counted.input_tokens == len("system be brief. user anna lamp. say ")


def test_errors_have_anthropic_s_form(client: anthropic.Anthropic, server: Running) -> None:
    with pytest.raises(anthropic.BadRequestError, match="context_length_exceeded"):
        client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "a" * 600}])
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        client.messages.create(model="other", max_tokens=1, messages=MESSAGES)
    for change in (
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"tools": [{"type": "web_search_20250305", "name": "w"}]},
        {"tool_choice": {"type": "some"}},
        {"temperature": -1},
    ):
        status, _, body = server.ask("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, **change})
        assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error"), change


def test_a_conversation_with_tools_becomes_messages_of_the_template() -> None:
    body = CountBody.model_validate(
        {
            "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "text", "text": "I look"},
                        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}]},
                        {"type": "text", "text": "and"},
                    ],
                },
            ],
            "tools": [{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "look"},
        }
    )
    conversation = body.conversation()
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    assert conversation.messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call], "content": "I look"},
        {"role": "tool", "tool_call_id": "t1", "content": "seen"},
        {"role": "user", "content": "and"},
    ]
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    assert conversation.tools == [{"type": "function", "function": function}]
    assert conversation.tool_choice == {"type": "function", "function": {"name": "look"}}


def test_thinking_is_refused_for_a_model_without_reasoning(server: Running) -> None:
    fields = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    status, _, body = server.ask("/v1/messages", {**fields, "thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert status == 400 and "thinking: this model does none" in body["error"]["message"]
    assert server.ask("/v1/messages", {**fields, "thinking": {"type": "disabled"}})[0] == 200
