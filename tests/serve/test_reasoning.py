"""Tests of reasoning in each API, where it is separate from the answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from kvexport.language.chat import ChatTemplate
from kvexport.language.grammar import Grammar
from tests.support.http_server import Running, running
from tests.support.json_model import TEMPLATE, json_engine

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": MESSAGES}
SAID = "<think>\ni look\n</think>\n\nthe lamp"
FORM: dict[str, Any] = {"structured_outputs": {"choice": [SAID]}}
OPENED = TEMPLATE + "{% if opened %}<think>\n{% endif %}"
# A template with </think> supports reasoning.
KNOWS = "{# </think> #}" + OPENED


@pytest.fixture(scope="module")
def server(tiny_artifact: Path) -> Iterator[Running]:
    engine = json_engine(tiny_artifact)
    engine.chat_template = ChatTemplate({"default": KNOWS}, {}, "the test")
    with running(engine) as server:
        yield server


def test_chat_completions(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, extra_body=FORM)
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("the lamp", "i look")
    assert answer.usage.completion_tokens_details.reasoning_tokens == SAID.index("\n\nthe")
    text = reasoning = ""
    last: Any = None
    for last in client.chat.completions.create(
        **ASKED, extra_body=FORM, stream=True, stream_options={"include_usage": True}
    ):
        for choice in last.choices:
            delta: Any = choice.delta
            more = getattr(delta, "reasoning_content", None) or ""
            assert not (more and text), "reasoning comes first"
            reasoning, text = reasoning + more, text + (delta.content or "")
    assert (text, reasoning) == ("the lamp", "i look")
    assert last.usage.completion_tokens_details.reasoning_tokens == SAID.index("\n\nthe")


def test_a_prompt_that_ends_within_reasoning(client: openai.OpenAI) -> None:
    opened = {"chat_template_kwargs": {"opened": True}}
    plain: Any = client.chat.completions.create(**ASKED, temperature=0)
    assert plain.choices[0].message.content and not hasattr(plain.choices[0].message, "reasoning_content")
    answer: Any = client.chat.completions.create(**ASKED, temperature=0, extra_body=opened)
    message = answer.choices[0].message
    assert message.content == "" and message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens
    # A grammar applies to the answer, and holds from its first token on.
    formed: Any = client.chat.completions.create(
        **ASKED, extra_body={**opened, "structured_outputs": {"choice": ["x"]}}
    )
    assert formed.choices[0].message.content == "x"


def test_responses_have_an_item_of_reasoning(client: openai.OpenAI, server: Running, monkeypatch: Any) -> None:
    fix_answer(server, monkeypatch)
    body: dict[str, Any] = {"model": "tiny", "input": "a", "max_output_tokens": 100}
    answer = client.responses.create(**body)
    first, second = answer.output
    assert first.type == "reasoning" and first.content is not None and first.content[0].text == "i look"
    assert second.type == "message" and answer.output_text == "the lamp"
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(**body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message"]
    thought: Any = final.output[0]
    assert final.output_text == "the lamp" and thought.content[0].text == "i look"
    followed = client.responses.create(**body, previous_response_id=answer.id)
    assert followed.output_text == "the lamp"


def test_messages_have_a_block_of_thinking(server: Running, monkeypatch: Any) -> None:
    fix_answer(server, monkeypatch)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        body: Any = {"model": "tiny", "max_tokens": 100, "messages": MESSAGES}
        answer: Any = client.messages.create(**body)
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert (answer.content[0].thinking, answer.content[1].text) == ("i look", "the lamp")
        with client.messages.stream(**body) as stream:
            text = "".join(stream.text_stream)
            final: Any = stream.get_final_message()
        assert text == "the lamp"
        assert (final.content[0].thinking, final.content[1].text) == ("i look", "the lamp")


def fix_answer(server: Running, monkeypatch: Any) -> None:
    """Make every answer equal to SAID. The tested API has no setting for it."""
    service = server.service
    follow = service.follow

    async def formed(*arguments: Any, form: Any = None, **more: Any) -> Any:
        return await follow(*arguments, form=Grammar("lark", f"start: {json.dumps(SAID)}"), **more)

    monkeypatch.setattr(service, "follow", formed)


def test_a_server_may_leave_reasoning_in_the_text(tiny_artifact: Path) -> None:
    engine = json_engine(tiny_artifact)
    engine.chat_template = ChatTemplate({"default": KNOWS}, {}, "the test")
    with running(engine, reasoning=False) as server:
        status, _, answer = server.ask("/v1/chat/completions", {**ASKED, **FORM})
    message = answer["choices"][0]["message"]
    assert status == 200 and message["content"] == SAID and "reasoning_content" not in message
    assert "completion_tokens_details" not in answer["usage"]
