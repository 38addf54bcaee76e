"""Tests of /v1/completions, /tokenize and /detokenize with OpenAI's own client."""

import math
from typing import Any

import openai
import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.request import Request
from tests.support.http_server import Running


def engine_answer(engine: Engine, server: Running, prompt: Any, **settings: Any) -> str:
    return str(server.on_engine(lambda: engine.generate(prompt, top_k=0, **settings)[0].text))


@pytest.mark.parametrize("prompt", ["anna lamp", [7, 3, 40], ["anna lamp", "bob"], [[7, 3, 40], [9]]])
def test_prompts_of_each_kind_are_continued(
    client: openai.OpenAI, engine: Engine, server: Running, prompt: Any
) -> None:
    several = not isinstance(prompt, str) and not isinstance(prompt[0], int)
    prompts = prompt if several else [prompt]
    expected = [engine_answer(engine, server, one, max_new_tokens=16) for one in prompts]
    answer = client.completions.create(model="tiny", prompt=prompt)
    assert [choice.text for choice in answer.choices] == expected
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(map(len, prompts)), 16 * len(prompts))
    texts = [""] * len(prompts)
    for chunk in client.completions.create(model="tiny", prompt=prompt, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_a_prompt_of_many_answers_is_read_once(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    read, counts = Request.read, []

    def count(request: Request, tokens: int) -> None:
        counts.append(tokens)
        read(request, tokens)

    monkeypatch.setattr(Request, "read", count)
    answer = client.completions.create(model="tiny", prompt="anna lamp", n=3, seed=1, temperature=1.0, max_tokens=8)
    assert len({choice.text for choice in answer.choices}) == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 24)
    assert sum(counts) == 9


def test_logprobs_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="anna lamp", max_tokens=6, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert (
        logprobs is not None
        and logprobs.tokens
        and logprobs.token_logprobs
        and logprobs.top_logprobs
        and logprobs.text_offset
    )
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == list(range(6))
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and max(top, key=top.__getitem__) == token
        assert math.isclose(top[token], logprob) and logprob <= 0
    streamed: list[float] = []
    for chunk in client.completions.create(model="tiny", prompt="anna lamp", max_tokens=6, logprobs=3, stream=True):
        chunk_logprobs = chunk.choices[0].logprobs
        streamed += (chunk_logprobs.token_logprobs if chunk_logprobs else None) or []
    assert streamed == logprobs.token_logprobs


def test_chat_returns_logprobs_too(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    answer = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 and entry.bytes == list(entry.token.encode()) for entry in logprobs.content)
    chunks = client.chat.completions.create(**body, logprobs=True, top_logprobs=2, stream=True)
    streamed = [entry.logprob for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content or []]
    assert streamed == [entry.logprob for entry in logprobs.content]


def test_bias_and_penalties_reach_the_sampler(client: openai.OpenAI, engine: Engine) -> None:
    a = engine.tokenizer.encode("a")[0]
    only = client.completions.create(model="tiny", prompt="bob", logit_bias={str(a): 100}, max_tokens=4)
    assert only.choices[0].text == "aaaa"
    penalised = client.completions.create(
        model="tiny", prompt="bob", logit_bias={str(a): 8}, max_tokens=16, frequency_penalty=2, presence_penalty=2
    )
    assert penalised.choices[0].text != "a" * 16


def test_tokens_and_text(server: Running) -> None:
    status, _, body = server.ask("/tokenize", {"prompt": "abc", "return_token_strs": True})
    assert (status, body) == (200, {"count": 3, "max_model_len": 512, "tokens": [0, 1, 2], "token_strs": list("abc")})
    assert server.ask("/detokenize", {"tokens": [0, 1, 2]})[2] == {"prompt": "abc"}
    messages = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    assert server.ask("/tokenize", messages)[2]["count"] == len("user a. ")
    assert server.ask("/tokenize", {"prompt": "a" * 1000})[2]["count"] == 1000


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/v1/completions", {}, "prompt"), ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"), ("/v1/completions", {"prompt": ["a", ""]}, "prompt"),
    ("/v1/completions", {"prompt": [1, "a"]}, "prompt.1"), ("/v1/completions", {"prompt": [64]}, None),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
    ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"64": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
    ("/v1/completions", {"prompt": "a", "presence_penalty": 3}, "presence_penalty"), ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
    ("/tokenize", {"messages": [], "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
    ("/detokenize", {"tokens": [1 << 40]}, "tokens"), ("/detokenize", {"tokens": "abc"}, "tokens"),
])  # fmt: skip
def test_unsupported_fields_are_refused_by_name(server: Running, path: str, body: Any, param: str | None) -> None:
    status, _, answer = server.ask(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
