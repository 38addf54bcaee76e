"""Tools from a checkpoint's chat template to the clients of OpenAI and Anthropic, over `kvexport serve`.

The model calls a tool, the client runs it, and the model answers with the tool's result in its prompt. The model is
random, so the request requires the call, and the answer is any text.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import process
from tests.support.http_server import Running
from tests.support.json_model import make_tool_artifact

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["paris", "rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "forecast", "parameters": PARAMETERS}
QUESTION = "how is the weather"


def weather(city: str, days: int) -> str:
    """Return the result of the tool."""
    assert city in ("paris", "rome") and 1 <= days <= 9
    return f"sun in {city}"


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server in a separate process, started by its command line."""
    artifact = make_tool_artifact(tiny_checkpoint, tmp_path_factory.mktemp("tools"))
    child = process("serve", artifact, "--port", 0, "--threads", 1, "--name", "tiny", "--drain", 0)
    assert child.stdout
    try:
        yield Running(child.stdout.readline().strip())
    finally:
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=60)
    assert (child.returncode, "Traceback" in errors) == (0, False), errors


def prompt_of(server: Running, messages: list[Any]) -> str:
    """Return the prompt that the template makes of a conversation."""
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": messages, "tools": tools, "return_token_strs": True}
    return "".join(server.ask("/tokenize", body)[2]["token_strs"])


@pytest.mark.parametrize("streams", [False, True])
def test_chat_completions_with_openai_s_client(server: Running, streams: bool) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install openai")
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    request: Any = {"model": "tiny", "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 200}
    required: Any = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        if streams:
            with client.chat.completions.stream(**request, **required, messages=messages) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**request, **required, messages=messages).choices[0]
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        result = weather(**json.loads(call.function.arguments))
        function = {"name": call.function.name, "arguments": call.function.arguments}
        tool_call = {"id": call.id, "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
        last = client.chat.completions.create(**{**request, "max_tokens": 5}, messages=messages, tool_choice="auto")
    assert last.choices[0].finish_reason == "length" and last.usage.completion_tokens == 5
    prompt = prompt_of(server, messages)
    assert prompt.startswith("weather <tool_call></tool_call>") and f"tool {result}. say " in prompt
    assert '{"name":"weather","arguments":{' in prompt.replace(" ", "")
    assert last.usage.prompt_tokens == len(prompt)


def test_responses_with_openai_s_client(server: Running) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install openai")
    request: Any = {"model": "tiny", "tools": [{"type": "function", **FUNCTION, "strict": True}]}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(**request, input=QUESTION, tool_choice="required", parallel_tool_calls=False)
        (call,) = first.output
        assert (call.type, call.name, first.status) == ("function_call", "weather", "completed")
        result = weather(**json.loads(call.arguments))
        last = client.responses.create(
            **request,
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": result}],
            max_output_tokens=5,
        )
    assert last.status == "incomplete" and len(last.output_text) == 5
    assert last.usage.input_tokens > first.usage.input_tokens + len(result)


@pytest.mark.parametrize("streams", [False, True])
def test_messages_with_anthropic_s_client(server: Running, streams: bool) -> None:
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"name": "weather", "description": "forecast", "input_schema": PARAMETERS}]
    request: Any = {"model": "tiny", "max_tokens": 200, "tools": tools}
    required: Any = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        if streams:
            with client.messages.stream(**request, **required, messages=messages) as stream:
                first = stream.get_final_message()
        else:
            first = client.messages.create(**request, **required, messages=messages)
        (call,) = first.content
        assert (call.type, call.name, first.stop_reason) == ("tool_use", "weather", "tool_use")
        result = weather(**call.input)
        messages += [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": call.id, "name": "weather", "input": call.input}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]},
        ]
        counted = client.messages.count_tokens(model="tiny", tools=tools, messages=messages)
        last = client.messages.create(**{**request, "max_tokens": 5}, messages=messages)
    assert last.stop_reason == "max_tokens" and last.usage.output_tokens == 5
    # Tokens that the state of an earlier prompt saved are counted separately.
    read = [answer.usage.input_tokens + answer.usage.cache_read_input_tokens for answer in (first, last)]
    assert read[1] == counted.input_tokens > read[0] + len(result)
