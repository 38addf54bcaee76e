"""Tests of what all routes share: who may call them, bounds of bodies and grammars, ignored fields, and the log."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvexport
from kvexport.engine.engine import Engine
from kvexport.language import grammar as grammars
from kvexport.language.chat import ChatTemplate
from kvexport.serve.chat import ChatBody
from kvexport.serve.completions import CompletionBody
from kvexport.serve.errors import ApiError
from kvexport.serve.fields import parse
from tests.support.http_server import Running, running, wait_until
from tests.support.json_model import json_engine

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
PAGE = "https://ui.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ASKED = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def json_server(tiny_artifact: Path) -> Iterator[Running]:
    with running(json_engine(tiny_artifact)) as server:
        yield server


# Web pages of other origins.


@pytest.mark.parametrize("allowed", [PAGE, f"{PAGE}/", PAGE.upper(), "*"])
@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_a_page_of_an_allowed_origin_may_call_every_route(engine: Engine, allowed: str, keys: tuple[str, ...]) -> None:
    with running(engine, origins=(allowed,), api_keys=keys) as server:
        for path in (CHAT, "/v1/models", "/health"):
            status, headers, _ = server.ask(path, method="OPTIONS", headers=PREFLIGHT)
            assert status == 200, "a browser asks without the key"
            assert headers["access-control-allow-origin"] in (PAGE, "*")
            assert "authorization" in headers["access-control-allow-headers"]
        page = {"Origin": PAGE}
        for key in ("secret", "wrong"):
            status, headers, _ = server.ask("/v1/models", headers={**page, "Authorization": f"Bearer {key}"})
            assert status == (401 if keys and key == "wrong" else 200)
            assert headers["access-control-allow-origin"] in (PAGE, "*"), "a page reads an error only with this header"


def test_a_page_of_another_origin_may_not(engine: Engine) -> None:
    with running(engine, origins=(PAGE,), api_keys=("secret",)) as server:
        other = {"Origin": "https://evil.example"}
        assert server.ask(CHAT, method="OPTIONS", headers={**PREFLIGHT, **other})[0] == 400
        status, headers, _ = server.ask("/v1/models", headers={**other, "Authorization": "Bearer secret"})
        assert status == 403 and "access-control-allow-origin" not in headers


# Bounds.


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionBody, {"prompt": ["a", 5] * 60_000}, "prompt.0"),
        (CompletionBody, {"prompt": [["a"]] * 60_000}, "prompt.0.0"),
        (CompletionBody, {"prompt": [-1] * 120_000}, "prompt.0"),
        (CompletionBody, {"prompt": "a", "stop": [1] * 120_000}, "stop.0"),
        (CompletionBody, {"prompt": "a", "stop": ["a"] * 120_000}, "stop"),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(100_000)}}, "logit_bias"),
        (ChatBody, {"messages": [1] * 120_000}, "messages.0"),
        (ChatBody, {**ASKED, "tools": [1] * 120_000}, "tools.0"),
        (ChatBody, {**ASKED, "modalities": [1] * 120_000}, "modalities.0"),
    ],
)
def test_validation_ends_at_the_first_wrong_elements(kind: Any, body: Any, param: str) -> None:
    """A body with 100,000 wrong elements took seconds, in which nothing else ran, and 500 MB."""
    data = json.dumps(body).encode()
    begun = time.thread_time()
    with pytest.raises(ApiError) as caught:
        parse(kind, data)
    assert time.thread_time() - begun < 0.25
    assert caught.value.status == 400 and caught.value.param == param and len(caught.value.message) < 200


DEEP = "[" * 5000 + "]" * 5000
WIDE = "[" + ",".join(["[]"] * 300_000) + "]"


@pytest.mark.parametrize("text", [DEEP, WIDE, "1" * 5000, "{"])
def test_json_within_texts_has_the_same_bounds(server: Running, text: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    bodies = [
        {**ASKED, "structured_outputs": {"json": text}},
        {**ASKED, "messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text}]},
    ]
    # A call that was cut off is accepted back, because the server itself answers such calls.
    for body in bodies[: 1 if text == "{" else 3]:
        begun = time.monotonic()
        status, _, answer = server.ask("/v1/responses" if "input" in body else CHAT, body)
        assert status in (400, 413) and time.monotonic() - begun < 5, answer


def test_arguments_of_all_calls_together_are_bounded(server: Running) -> None:
    text = "[" + ",".join(["[]"] * 100_000) + "]"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    status, _, body = server.ask(CHAT, {**ASKED, "messages": [message] * 3})
    assert (status, body["error"]["code"]) == (413, "body_too_long")


@pytest.mark.parametrize("form", ["text", 5, [], ["json_schema"], {"type": 5}, {"type": ["text"]}, {"schema": {}}])
def test_forms_that_are_no_objects_are_refused(server: Running, form: Any) -> None:
    for path, change in {
        CHAT: {"response_format": form},
        COMPLETE: {"prompt": "a", "response_format": form},
        "/v1/messages": {"output_config": {"format": form}},
        "/v1/responses": {"input": "a", "text": {"format": form}},
    }.items():
        status, _, body = server.ask(path, {**ASKED, **change})
        assert status == 400, (path, body)
    if form != {"schema": {}}:
        inner = {"type": "json_schema", "json_schema": form}
        assert server.ask(CHAT, {**ASKED, "response_format": inner})[0] == 400


def test_slow_grammars_hold_up_no_other_request(json_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither requests without a grammar wait for a grammar that compiles, nor those whose grammar is compiled."""
    known = {**ASKED, "structured_outputs": {"regex": "[ab]{2}"}}
    assert json_server.ask(CHAT, known)[0] == 200
    go_on = threading.Event()
    monkeypatch.setattr(grammars, "_try", lambda *_: "" if go_on.wait(60) else "never")
    with ThreadPoolExecutor(6) as clients:
        slow = [
            clients.submit(json_server.ask, CHAT, {**ASKED, "structured_outputs": {"regex": f"[a-c]{{{i}}}"}})
            for i in range(1, 7)
        ]
        try:
            assert json_server.ask(CHAT, ASKED)[0] == 200
            assert json_server.ask(CHAT, known)[0] == 200
            assert json_server.ask(COMPLETE, {"prompt": "ab " * 60_000, "max_tokens": 2})[0] == 400
            assert not any(one.done() for one in slow)
        finally:
            go_on.set()
        assert [one.result()[0] for one in slow] == [200] * len(slow)


# Fields.


def test_fields_that_the_server_does_not_know_are_named(server: Running) -> None:
    unknown = {"n_predict": 3, "mirostat": 2, "a\r\nb: c": 1}
    for path, body in {CHAT: ASKED, COMPLETE: {"prompt": "a", "max_tokens": 2}}.items():
        for stream in (False, True):
            status, headers, _ = server.ask(path, {**body, **unknown, "stream": stream})
            assert (status, headers["x-ignored-fields"]) == (200, "n_predict, mirostat, a??b:?c")
        assert "x-ignored-fields" not in server.ask(path, {**body, "top_p": 0.5})[1]


def test_fields_within_others_that_nothing_reads_are_named(json_server: Running) -> None:
    """A field that changes the answer elsewhere is honoured, refused or named, however deep it stands."""
    for path, body, ignored in (
        (CHAT, {"stream": True, "stream_options": {"include_usage": True, "x": 1}}, "stream_options.x"),
        (CHAT, {"reasoning_effort": "low", "chat_template_kwargs": {"tools_x": 1, "say": 1}},
         "reasoning_effort, chat_template_kwargs.tools_x"),
        ("/v1/messages", {"output_config": {"effort": "low", "x": 1}}, "output_config.x, output_config.effort"),
        ("/v1/messages", {"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "low", "summary": "auto"},
                           "text": {"verbosity": "low"}}, "text.verbosity, reasoning.summary, reasoning.effort"),
    ):  # fmt: skip
        status, headers, answer = json_server.ask(path, {**ASKED, **body})
        names = headers["x-ignored-fields"].removeprefix("messages, max_tokens, ")
        assert (status, names) == (200, ignored), answer
    template = json_server.service.engine.chat_template
    json_server.service.engine.chat_template = ChatTemplate({"default": "{{ reasoning_effort }} a"}, {}, "the test")
    try:
        for path, field, wrong in (
            (CHAT, "reasoning_effort", "reasoning_effort"),
            ("/v1/responses", "reasoning", "reasoning.effort"),
            ("/v1/messages", "output_config", "output_config.effort"),
        ):
            base = {"input": "a"} if path == "/v1/responses" else ASKED
            lengths = []
            for level in ("low", "medium"):
                status, headers, answer = json_server.ask(
                    path, {**base, field: level if path == CHAT else {"effort": level}}
                )
                assert status == 200 and "x-ignored-fields" not in headers, answer
                usage = answer["usage"]
                lengths.append(
                    usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
                )
            assert lengths[1] - lengths[0] == len("medium") - len("low"), "the template reads it"
            status, _, answer = json_server.ask(path, {**base, field: "huge" if path == CHAT else {"effort": "huge"}})
            assert status == 400 and answer["error"]["message"].startswith(wrong), answer
    finally:
        json_server.service.engine.chat_template = template


def test_stop_tokens_end_an_answer_and_are_no_part_of_its_text(engine: Engine, server: Running) -> None:
    free = server.on_engine(lambda: engine.generate([5, 6, 7], max_new_tokens=20, top_k=0)[0])
    nth, stop = next((i, t) for i, t in enumerate(free.token_ids) if i >= 4 and t not in free.token_ids[:i])
    before = server.on_engine(lambda: engine.generate([5, 6, 7], max_new_tokens=nth, top_k=0)[0].text)
    request = {"prompt": [5, 6, 7], "max_tokens": 20}
    for more in ({}, {"ignore_eos": True}, {"ignore_eos": False}):
        _, _, body = server.ask(COMPLETE, {**request, "stop_token_ids": [stop], **more})
        choice = body["choices"][0]
        assert (choice["finish_reason"], choice["text"]) == ("stop", before), more
        assert body["usage"]["completion_tokens"] == nth + 1
    body = server.ask(COMPLETE, {**request, "stop_token_ids": [stop], "min_tokens": nth + 2})[2]
    assert body["usage"]["completion_tokens"] > nth + 1


def test_logprobs_have_the_bytes_of_parts_of_characters_and_all_tokens(server: Running) -> None:
    from kvexport.language.token import Token
    from kvexport.serve.answers import TokenTexts

    class Parts:
        token_bytes = (b"\xf0\x9f", b"\x98\x80", b" a", b"a", b"a", b"\xf0\x9f")

    texts = TokenTexts(Parts())  # type: ignore[arg-type]
    top = tuple((i, -float(i)) for i in range(6))
    tokens = [Token(0, i, "", None, -1.0, top) for i in (0, 1, 2)]
    content = texts.chat(tokens)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "\U0001f600 a"
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd\ufffd", " a"]
    (first, *_) = texts.completion(tokens, 0)["top_logprobs"]
    keys = ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80", " a", "a", "token_id:4", "token_id:5"]
    assert first == dict(zip(keys, (value for _, value in top), strict=True))
    answer = server.ask(COMPLETE, {"prompt": [5, 6], "max_tokens": 3, "logprobs": 20})[2]
    assert [len(entry) for entry in answer["choices"][0]["logprobs"]["top_logprobs"]] == [20] * 3


# Descriptions and the log.


def test_the_server_describes_itself(server: Running) -> None:
    assert server.ask("/version")[2] == {"version": kvexport.__version__}


def test_every_request_is_a_line_of_the_log_without_its_content(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    log = logging.getLogger("kvexport.serve.requests")
    monkeypatch.setattr(log, "info", lambda text, *values: lines.append(text % values))
    # A line is written after its answer is sent: an earlier test's may still be to come.
    server.ask("/first")
    wait_until(lambda: any("/first" in line for line in lines))
    lines.clear()
    server.ask(CHAT, {**ASKED, "messages": [{"role": "user", "content": "secret words"}]})
    server.ask("/nothing%0Ahere")
    server.ask(CHAT, {**ASKED, "stream": True})
    wait_until(lambda: len(lines) == 3)
    assert [line.split()[:3] for line in lines] == [
        ["POST", CHAT, "200"],
        ["GET", "/nothing\\nhere", "404"],
        ["POST", CHAT, "200"],
    ]
    assert not any("secret" in line or "\n" in line for line in lines)
