"""Tests of tool calls in the requests and answers of each API."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from kvexport.language.tokenizer import Tokenizer
from tests.support.http_server import Running, running
from tests.support.json_model import json_engine

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["at", "n"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "look", "description": "d", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
MESSAGES: list[Any] = [{"role": "user", "content": "a"}]
ASKED: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "max_tokens": 200}


@pytest.fixture(scope="module")
def server(tiny_artifact: Path) -> Iterator[Running]:
    with running(json_engine(tiny_artifact)) as server:
        yield server


def only_answer(server: Running, text: str) -> dict[str, Any]:
    """Return the setting that makes the model write a text: a grammar that allows nothing else."""
    assert isinstance(server.service.engine.tokenizer, Tokenizer)
    return {"structured_outputs": {"choice": [text]}}


CALLS = 'i look<tool_call>\n{"name": "look", "arguments": {"at": "x", "n": 1}}\n</tool_call>\n' + (
    '<tool_call>\n{"name": "look", "arguments": {"at": "yy", "n": 2}}\n</tool_call>'
)


ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}


@pytest.mark.parametrize("choice", [
    "required", {"type": "function", "function": {"name": "look"}}, {"type": "allowed_tools", "allowed_tools": ALLOWED},
])  # fmt: skip
def test_a_required_call_is_generated(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(2):
        request: Any = {**ASKED, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": seed}
        answer = client.chat.completions.create(**request, parallel_tool_calls=False)
        (choice_made,) = answer.choices
        assert choice_made.finish_reason == "tool_calls" and choice_made.message.content is None
        assert choice_made.message.tool_calls is not None
        (call,) = choice_made.message.tool_calls
        assert call.type == "function" and call.function.name == "look" and call.id
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
        with client.chat.completions.stream(**request, parallel_tool_calls=False) as stream:
            last = stream.get_final_completion().choices[0]
        assert last.finish_reason == "tool_calls" and last.message.tool_calls is not None
        assert last.message.tool_calls[0].function.arguments == call.function.arguments


def test_tool_calls_are_parsed_from_the_answer(client: openai.OpenAI, server: Running) -> None:
    request: Any = {**ASKED, "messages": MESSAGES, "tools": TOOLS}
    answer = client.chat.completions.create(**request, extra_body=only_answer(server, CALLS))
    first_choice = answer.choices[0]
    assert (first_choice.message.content, first_choice.finish_reason) == ("i look", "tool_calls")
    assert first_choice.message.tool_calls is not None
    arguments = [json.loads(c.function.arguments) for c in first_choice.message.tool_calls if c.type == "function"]
    assert arguments == [{"at": "x", "n": 1}, {"at": "yy", "n": 2}]
    seen: dict[int, str] = {}
    text = ""
    for chunk in client.chat.completions.create(**request, extra_body=only_answer(server, CALLS), stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            assert (call.index in seen) != bool(call.id), "only the beginning of a call has an id"
            seen[call.index] = seen.get(call.index, "") + (call.function.arguments or "")
    assert text == "i look" and [json.loads(seen[i]) for i in range(2)] == arguments


def test_without_tools_or_with_none_a_call_is_text(client: openai.OpenAI, server: Running) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        request: Any = {**ASKED, "messages": MESSAGES, **more}
        answer = client.chat.completions.create(**request, extra_body=only_answer(server, CALLS))
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALLS, "stop")


def test_a_conversation_continues_with_a_tools_result(client: openai.OpenAI, server: Running) -> None:
    request: Any = {**ASKED, "tools": TOOLS}
    first = (
        client.chat.completions.create(**request, messages=MESSAGES, extra_body=only_answer(server, CALLS))
        .choices[0]
        .message
    )
    calls = first.tool_calls
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "seen"}
    again = client.chat.completions.create(**request, messages=[*MESSAGES, first.model_dump(), result], seed=1)
    body = {"messages": [*MESSAGES, first.model_dump(), result], "tools": TOOLS}
    counted = server.ask("/tokenize", {**body, "return_token_strs": True})[2]
    assert '"arguments":{"at":"x","n":1}' in "".join(counted["token_strs"]).replace(" ", "")
    assert again.usage is not None and again.usage.prompt_tokens == counted["count"]


def test_anthropic_s_client_gets_blocks(server: Running) -> None:
    tools: Any = [{"name": "look", "description": "d", "input_schema": PARAMETERS}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        request: Any = {"model": "tiny", "max_tokens": 200, "messages": MESSAGES, "tools": tools, "tool_choice": choice}
        answer = client.messages.create(**request)
        (block,) = answer.content
        assert block.type == "tool_use" and block.name == "look" and answer.stop_reason == "tool_use"
        jsonschema.validate(block.input, PARAMETERS)
        with client.messages.stream(**request) as stream:
            last = stream.get_final_message()
        assert [b.model_dump(exclude={"id"}) for b in last.content] == [
            b.model_dump(exclude={"id"}) for b in answer.content
        ]
        assert last.stop_reason == "tool_use"


def test_responses_have_items_for_calls(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **FUNCTION, "strict": True}]
    request: Any = {"model": "tiny", "input": "a", "tools": tools, "tool_choice": "required", "temperature": 0.0}
    answer = client.responses.create(**request, parallel_tool_calls=False)
    (item,) = answer.output
    assert item.type == "function_call" and item.name == "look" and answer.status == "completed"
    jsonschema.validate(json.loads(item.arguments), PARAMETERS)
    with client.responses.stream(**request, parallel_tool_calls=False) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == item.arguments
    second = client.responses.create(
        model="tiny",
        previous_response_id=answer.id,
        input=[{"type": "function_call_output", "call_id": item.call_id, "output": "seen"}],
        max_output_tokens=3,
    )
    assert second.status == "incomplete"


@pytest.mark.parametrize("change", [
    {"tools": [{}]}, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tools": TOOLS * 2},
    {"tools": TOOLS, "tool_choice": "some"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, {"tool_choice": "required"},
    {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
])  # fmt: skip
def test_invalid_tools_are_refused(server: Running, change: Any) -> None:
    status, _, body = server.ask("/v1/chat/completions", {**ASKED, "messages": MESSAGES, **change})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
