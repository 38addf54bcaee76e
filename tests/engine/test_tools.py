"""Tests of tools, formats and log probabilities in Python. The model is random, so grammars set its text."""

import json
from pathlib import Path
from typing import Any

import pytest

import kvexport
from kvexport.errors import UsageError
from tests.support.json_model import json_engine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"enum": ["x", "yy"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> kvexport.Engine:
    return json_engine(tiny_artifact)


def exactly(text: str) -> kvexport.Grammar:
    return kvexport.Grammar("lark", f"start: {json.dumps(text)}")


def test_a_chat_calls_tools(engine: kvexport.Engine) -> None:
    forced = engine.chat(MESSAGES, tools=TOOLS, tool_choice="required", max_new_tokens=300)
    (call, *_) = forced.tool_calls
    assert call.name == "look" and json.loads(call.arguments)["at"] in ("x", "yy") and call.id
    for tools, text, calls in ((TOOLS, "i look", ["look"]), ((), "i look" + CALL, [])):
        own = engine.chat(MESSAGES, tools=tools, grammar=exactly("i look" + CALL), max_new_tokens=300)
        assert (own.text, [one.name for one in own.tool_calls]) == (text, calls)
    with pytest.raises(UsageError, match="tool_choice is"):
        engine.chat(MESSAGES, tools=TOOLS, tool_choice="rm")
    with pytest.raises(UsageError, match="is no function"):
        engine.chat(MESSAGES, tools=[{"name": "look"}])


def test_a_chat_keeps_to_a_format(engine: kvexport.Engine) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    stream = engine.chat(MESSAGES, response_format=form, max_new_tokens=100, stream=True)
    assert json.loads("".join(token.text for token in stream))["at"] in ("x", "yy")
    answer = engine.chat(MESSAGES, engine.settings(max_new_tokens=100), response_format=form)
    assert json.loads(answer.text)["at"] in ("x", "yy")
    with pytest.raises(UsageError, match=r"response_format\.type"):
        engine.chat(MESSAGES, response_format={"type": "xml"})
    with pytest.raises(UsageError, match="a grammar and a response_format"):
        engine.chat(MESSAGES, response_format=form, grammar=exactly("a"))


def test_a_completion_has_the_log_probabilities_of_its_tokens(engine: kvexport.Engine) -> None:
    (answer,) = engine.generate("a", logprobs=2, max_new_tokens=5)
    assert len(answer.logprobs) == len(answer.top_logprobs) == len(answer.token_ids) == 5
    for token, own, top in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
        assert top[0] == (token, own) and len(top) == 2
    assert engine.generate("a", max_new_tokens=5)[0].logprobs == []
