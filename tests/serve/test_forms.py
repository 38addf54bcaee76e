"""Tests of answers that follow a grammar, requested through each API."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvexport.errors import UsageError
from kvexport.language.forms import response_form, structured_form
from kvexport.language.grammar import Grammar
from kvexport.serve.errors import ApiError
from tests.support.http_server import Running, running
from tests.support.json_model import json_engine

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
ASKED = {"messages": [{"role": "user", "content": "a"}], "temperature": 1.0, "max_tokens": 100}


GBNF = 'root ::= ("ab" | "cd")+\n'


@pytest.fixture(scope="module")
def server(tiny_artifact: Path) -> Iterator[Running]:
    with running(json_engine(tiny_artifact)) as server:
        yield server


@pytest.mark.parametrize(("path", "change"), [
    ("/v1/chat/completions", {"response_format": OPENAI}),
    ("/v1/chat/completions", {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
    ("/v1/completions", {"prompt": "a", "response_format": OPENAI}),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
])  # fmt: skip
def test_answers_keep_to_a_schema(server: Running, path: str, change: Any) -> None:
    for seed in range(3):
        status, _, body = server.ask(path, {**ASKED, "seed": seed, **change})
        assert status == 200, body
        if path == "/v1/messages":
            text, done = body["content"][0]["text"], body["stop_reason"] == "end_turn"
        elif path == "/v1/responses":
            text, done = body["output"][0]["content"][0]["text"], body["status"] == "completed"
        else:
            choice = body["choices"][0]
            text, done = choice.get("text") or choice["message"]["content"], choice["finish_reason"] == "stop"
        if done:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert text.lstrip().startswith("{")


@pytest.mark.parametrize(("form", "pattern"), [
    ({"structured_outputs": {"regex": "[a-c]{5}"}}, "[a-c]{5}"),
    ({"structured_outputs": {"choice": ["a.b", "(c)"]}}, r"a\.b|\(c\)"),
    ({"structured_outputs": {"grammar": 'start: "ab" | "cd"'}}, "ab|cd"),
    ({"response_format": {"type": "regex", "pattern": "x+y"}}, "x+y?"),
    ({"response_format": {"type": "grammar", "grammar": 'start: "ef"'}}, "ef"),
    ({"response_format": {"type": "text"}}, r"[\s\S]*"),
    ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
    ({"structured_outputs": {"grammar": GBNF}}, "(ab|cd)*[ac]?"), ({"guided_json": {"const": 7}}, "7"),
    ({"guided_json": '{"const": 7}'}, "7"), ({"guided_regex": "[a-c]{5}"}, "[a-c]{5}"),
    ({"guided_choice": ["a.b", "(c)"]}, r"a\.b|\(c\)"), ({"guided_grammar": 'start: "ab" | "cd"'}, "ab|cd"),
    ({"guided_grammar": GBNF}, "(ab|cd)*[ac]?"), ({"grammar": GBNF}, "(ab|cd)*[ac]?"),
    ({"json_schema": {"const": 7}}, "7"),
])  # fmt: skip
def test_other_forms(server: Running, form: Any, pattern: str) -> None:
    status, _, body = server.ask("/v1/chat/completions", {**ASKED, **form})
    assert status == 200, body
    assert re.fullmatch(pattern, body["choices"][0]["message"]["content"])


@pytest.mark.parametrize("form", [
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}},
    {"response_format": {"type": "regex"}}, {"response_format": {"type": "regex", "pattern": "("}},
    {"response_format": {"type": "regex", "pattern": ""}}, {"response_format": {"type": 5}},
    {"structured_outputs": {"json": "{"}}, {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": ["a", 1]}}, {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"structured_outputs": {"grammar": "start: nothing"}}, {"response_format": {"type": "json_object", "schema": 5}},
    {"guided_json": "{"}, {"guided_choice": []}, {"guided_regex": "a", "grammar": GBNF}, {"grammar": "root ::= ("},
    {"grammar": "root ::= nothing"}, {"json_schema": 5},
])  # fmt: skip
def test_invalid_response_formats_are_refused(server: Running, form: Any) -> None:
    status, _, body = server.ask("/v1/chat/completions", {**ASKED, **form})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_a_choice_allows_each_text_literally() -> None:
    texts = [r"a.b*c+[d]", r"\d{2}|^$", "(x)-y/z~&#?"]
    form = structured_form({"choice": texts})
    assert form is not None and form.kind == "regex"
    assert all(re.fullmatch(form.source, text) for text in texts)
    assert not re.fullmatch(form.source, "aXb*c+[d]")
    assert structured_form({"disable_fallback": False}) is None
    with pytest.raises(UsageError, match="structured_outputs: structural_tag is not supported"):
        structured_form({"structural_tag": "{}"})
    assert structured_form({}) is structured_form(None) is response_form(None) is None
    assert response_form({"type": "json_object"}) == Grammar.json_object()
    with pytest.raises((ApiError, UsageError)):
        response_form({"type": "xml"})
