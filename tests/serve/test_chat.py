"""Tests of /v1/models and /v1/chat/completions with OpenAI's own client."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from kvexport.engine.engine import Engine
from kvexport.serve.conversation import effort, template_messages
from kvexport.serve.errors import ApiError
from tests.support.http_server import Running, prompt

MESSAGES: list[Any] = [{"role": "user", "content": "anna lamp"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture(scope="module")
def alone(engine: Engine, server: Running) -> str:
    return engine_answer(engine, server, MESSAGES)


def engine_answer(engine: Engine, server: Running, messages: list[Any], **settings: Any) -> str:
    """Return the answer of the engine itself, called in the worker's thread."""
    fields = {"max_new_tokens": 40, "top_k": 0, **settings}
    return str(server.on_engine(lambda: engine.generate(prompt(messages), **fields)[0].text))


def test_models_are_listed_under_their_name(client: openai.OpenAI, engine: Engine) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == engine.max_length
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here, but tiny"):
        client.models.retrieve("gpt")


def test_an_answer_equals_the_engines_own_answer(client: openai.OpenAI, alone: str) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=40)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", alone, "length")
    read = len("user anna lamp. say yes. say ")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (read, 40)
    assert answer.usage.total_tokens == read + 40
    assert (answer.object, answer.model) == ("chat.completion", "tiny")


def test_a_stream_has_the_same_content_in_pieces(client: openai.OpenAI, alone: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 40
    assert all(chunk.usage is None for chunk in pieces)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == alone
    assert [chunk.choices[0].finish_reason for chunk in pieces][-2:] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(pieces) > 20  # not all at once


def test_concurrent_answers_equal_solo_answers(client: openai.OpenAI, engine: Engine, server: Running) -> None:
    """Simultaneous answers, more than there are lanes, equal the answers without others, streamed and whole.

    They end before the first merge. Which prompts are read in one call depends on when they arrive. It changes the
    rounding of sums, which can decide a merge.
    """
    conversations: list[Any] = [[{"role": "user", "content": "nine lamps"[:n]}] for n in range(1, 11)]
    expected = [engine_answer(engine, server, messages, max_new_tokens=8) for messages in conversations]

    def ask(i: int) -> str:
        if i % 2:
            answer = client.chat.completions.create(model="tiny", messages=conversations[i], max_tokens=8)
            return answer.choices[0].message.content or ""
        stream = client.chat.completions.create(model="tiny", messages=conversations[i], max_tokens=8, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, range(10))) == expected


def test_settings_reach_the_sampler(client: openai.OpenAI, engine: Engine, server: Running) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=12,
        n=3,
        seed=5,
        temperature=1.5,
        top_p=0.9,
        extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
    )
    settings = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    settings |= {"repetition_penalty": 1.2, "max_new_tokens": 12}
    expected = [engine_answer(engine, server, MESSAGES, seed=5 + i, **settings) for i in range(3)]
    assert [choice.message.content for choice in answer.choices] == expected
    assert len(set(expected)) == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 36


def test_an_answer_stops_before_a_stop_string(client: openai.OpenAI, alone: str) -> None:
    stop = alone[20:22]
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=40, stop=[stop])
    assert answer.choices[0].message.content == alone[: alone.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_continues_to_the_longest_length_that_fits(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a" * 480}])
    assert answer.usage is not None and answer.usage.total_tokens == engine.max_length
    assert answer.choices[0].finish_reason == "length"


def test_a_prompt_that_does_not_fit_is_refused_as_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a" * 600}])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("change", "param"), [
    ({"messages": []}, "messages"), ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
    ({"temperature": -1}, "temperature"), ({"temperature": "1"}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"), ({"n": 1000}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"stop": [1]}, "stop.0"),
    ({"functions": [{}]}, "functions"), ({"modalities": ["audio"]}, "modalities"),
])  # fmt: skip
def test_unsupported_fields_are_refused_by_name(server: Running, change: dict[str, Any], param: str) -> None:
    status, _, body = server.ask("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, **change})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert body["error"]["param"] == param


def test_unknown_fields_are_ignored(client: openai.OpenAI) -> None:
    client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, extra_body={"whatever": 1}, user="me")


CONVERSATION = [{"role": "user", "content": "anna lamp"}, {"role": "assistant", "content": "yes and "}]


@pytest.mark.parametrize(("path", "change", "prefix"), [
    ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": False}, False),
    ("/v1/chat/completions", {"continue_final_message": True}, False), ("/v1/chat/completions", {}, True),
    ("/v1/messages", {}, False),
])  # fmt: skip
def test_an_answer_continues_the_last_message(
    server: Running, engine: Engine, path: str, change: dict[str, Any], prefix: bool
) -> None:
    messages = [CONVERSATION[0], {**CONVERSATION[1], **({"prefix": True} if prefix else {})}]
    text = engine.chat_template.render(CONVERSATION, continue_final_message=True)
    assert text.rstrip().endswith("yes and")
    ids = engine.tokenizer.encode(text, False)
    alone = server.on_engine(lambda: engine.generate([ids], max_new_tokens=6)[0].text)
    status, _, body = server.ask(path, {"messages": messages, "max_tokens": 6, "temperature": 0, **change})
    assert status == 200, body
    content = body["content"][0]["text"] if path == "/v1/messages" else body["choices"][0]["message"]["content"]
    assert content == alone


def test_a_message_is_not_continued_and_followed_at_once(server: Running) -> None:
    both = {"messages": CONVERSATION, "continue_final_message": True, "add_generation_prompt": True}
    status, _, body = server.ask("/v1/chat/completions", both)
    assert (status, body["error"]["param"]) == (400, "continue_final_message")


def test_a_cut_call_of_the_server_is_accepted_back() -> None:
    def arguments(text: str) -> Any:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        return template_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])[0]["tool_calls"][0][
            "function"
        ]["arguments"]

    assert arguments('{"city": "Par') == {"city": "Par"}
    assert arguments('{"a": 1, "b": [2, ') == {"a": 1, "b": [2]}
    assert arguments("") == {}
    with pytest.raises(ApiError, match="not JSON"):
        arguments("{city: Paris}")


def test_reasoning_effort_reaches_the_template(server: Running) -> None:
    assert effort(None, "x") == {}
    assert effort("xhigh", "x") == effort("high", "x") == {"reasoning_effort": "high"}
    assert effort("minimal", "x") == {"reasoning_effort": "low"}
    assert effort("none", "x") == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    ask = {"messages": CONVERSATION[:1], "max_tokens": 2}
    assert server.ask("/v1/chat/completions", {**ask, "reasoning_effort": "low"})[0] == 200
    assert server.ask("/v1/chat/completions", {**ask, "reasoning_effort": "huge"})[0] == 400
