"""Tests of tools: the tools of a request, the form of calls by the chat template, and calls in a text."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.speed.grammars import SMALL, draw
from kvexport.errors import UsageError
from kvexport.language.chat import ChatTemplate
from kvexport.language.grammar import Grammars
from kvexport.language.text_stream import TextStream
from kvexport.language.tokenizer import Tokenizer
from kvexport.language.tool_calls import Piece
from kvexport.language.tools import (
    DEEPSEEK,
    DEEPSEEK_31,
    FORMS,
    GLM,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    XML,
    CallForm,
    calls_grammar,
    check_tools,
    choose,
    form_of,
)

TEMPLATES = Path(__file__).parent / "chat_templates"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
NOW_SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
STRICT_NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": NOW_SCHEMA}}
TOOLS = [WEATHER, NOW]
READ_FORMS = {form.name: form for form in FORMS if form is not HARMONY}


def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": (TEMPLATES / f"{name}.jinja").read_text()}, {}, name)


@pytest.mark.parametrize(
    ("name", "form"), [("qwen2.5", HERMES), ("qwen3", HERMES), ("llama3.1-tools", LLAMA), ("mistral", MISTRAL)]
)
def test_the_template_determines_the_form_of_calls(name: str, form: CallForm) -> None:
    assert form_of(template(name)) == form


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_template_with_the_signs_of_a_form_has_it(form: CallForm) -> None:
    source = "{% for tool in tools %}{% endfor %}" + " ".join(form.signs)
    assert form_of(ChatTemplate({"default": source}, {}, "x")) == form
    assert form_of(ChatTemplate({"default": "plain", "tool_use": source}, {}, "x")) == form


@pytest.mark.parametrize("name", ["smollm2", "zephyr", "gemma", None])
def test_a_template_without_tools_takes_none(name: str | None) -> None:
    with pytest.raises(UsageError, match="takes no tools"):
        form_of(None if name is None else template(name))


def test_an_unknown_form_of_calls_is_refused() -> None:
    with pytest.raises(UsageError, match="not known"):
        form_of(ChatTemplate({"default": "{% for t in tools %}<fn>{{ t.name }}</fn>{% endfor %}"}, {}, "x"))


def pieces(form: CallForm, text: str, cuts: list[int], tools: list[Any] | None = None) -> list[Piece]:
    """Return the reader's pieces for a text that is cut at these places, with adjacent pieces of one kind joined."""
    reader = form.reader(TOOLS if tools is None else tools)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    separate: list[Piece] = []
    for i, (start, end) in enumerate(pairwise(ends)):
        separate += reader.read(text[start:end], i == len(ends) - 2)
    joined: list[Piece] = []
    for piece in separate:
        assert piece.kind == "call" or piece.text
        if joined and piece.kind == joined[-1].kind != "call":
            joined[-1] = joined[-1]._replace(text=joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


ROME, ARGUMENTS = '{"city": "Rome {\\"}</tool_call>"}', '{"name": "get_weather", "arguments": '
CALL, CALL_NOW = ARGUMENTS + ROME + "}", '{"name": "now", "arguments": {}}'
ROME_CALLED = [Piece("call", name="get_weather"), Piece("arguments", ROME)]
NOW_CALLED = [Piece("call", name="now"), Piece("arguments", "{}")]
OSLO_CALLED = [ROME_CALLED[0], Piece("arguments", '{"city": "Oslo"}')]


def xml(*arguments: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=get_weather>\n{inner}</function>\n</tool_call>"


def glm(*arguments: tuple[str, str]) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    return f"<tool_call>get_weather\n{inner}</tool_call>"


def D(name: str) -> str:
    return "<\uff5ctool\u2581" + name.replace("_", "\u2581") + "\uff5c>"


def deepseek(name: str, arguments: str) -> str:
    return f"{D('call_begin')}function{D('sep')}{name}\n```json\n{arguments}\n```{D('call_end')}"


DEEPSEEK_CALLS = D("calls_begin") + deepseek("get_weather", ROME) + "\n" + deepseek("now", "{}") + D("calls_end")
XML_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
READ = {
    "text alone": (HERMES, "Just <tool text, {a} <tool_", [Piece("text", "Just <tool text, {a} <tool_")]),
    "a call": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", ROME_CALLED),
    "text and two calls": (
        HERMES,
        f"Let me see. \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL_NOW}\n</tool_call>\n",
        [Piece("text", "Let me see."), *ROME_CALLED, *NOW_CALLED],
    ),
    "text behind": (HERMES, f"<tool_call>{CALL_NOW}</tool_call>\n Done. ", [*NOW_CALLED, Piece("text", "Done. ")]),
    "a list": (HERMES, f"<tool_call>[{CALL}, {CALL_NOW}]</tool_call>", [*ROME_CALLED, *NOW_CALLED]),
    "arguments first": (HERMES, f'<tool_call>{{"arguments": {ROME} , "name": "get_weather"}}</tool_call>', ROME_CALLED),
    "arguments as text": (
        HERMES, f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(ROME)}}}</tool_call>', ROME_CALLED,
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "now"}</tool_call>', NOW_CALLED),
    "more keys": (HERMES, f'<tool_call>{{"id": [1, "}}"], {CALL_NOW[1:]}</tool_call>', NOW_CALLED),
    "no closing": (HERMES, f"<tool_call>{CALL}", ROME_CALLED),
    "another tool": (
        HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [Piece("text", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>')],
    ),
    "no JSON": (HERMES, "<tool_call>get_weather(Rome)", [Piece("text", "<tool_call>get_weather(Rome)")]),
    "broken": (HERMES, '<tool_call>{"name": now}', [Piece("text", '<tool_call>{"name": now}')]),
    "cut in the name": (
        HERMES, 'So <tool_call>\n{"name": "get_we', [Piece("text", 'So <tool_call>\n{"name": "get_we')],
    ),
    "cut in the arguments": (
        HERMES, "<tool_call>" + ARGUMENTS + '{"city": "R', [ROME_CALLED[0], Piece("arguments", '{"city": "R')],
    ),
    "cut in the marker": (HERMES, "So <tool_ca", [Piece("text", "So <tool_ca")]),
    "llama": (LLAMA, CALL.replace("arguments", "parameters"), ROME_CALLED),
    "llama, other key": (LLAMA, CALL, ROME_CALLED),
    "llama, tag": (LLAMA, f"<|python_tag|>{CALL}; {CALL_NOW}", [*ROME_CALLED, *NOW_CALLED]),
    "llama, text": (LLAMA, "Hello {you}", [Piece("text", "Hello {you}")]),
    "llama, an object": (LLAMA, '{"a": {"name": 1}}', [Piece("text", '{"a": {"name": 1}}')]),
    "llama, a name alone": (LLAMA, '{"name": "now"}', [Piece("text", '{"name": "now"}')]),
    "llama, text and a tag": (LLAMA, f"Well <|python_tag|>{CALL}", [Piece("text", "Well"), *ROME_CALLED]),
    "llama, code": (LLAMA, "<|python_tag|>print(1)", [Piece("text", "<|python_tag|>print(1)")]),
    "hermes, fenced": (HERMES, f"Sure:\n```json\n{CALL}\n```", [Piece("text", "Sure:"), *ROME_CALLED]),
    "hermes, fenced text": (HERMES, '```json\n{"a": 1}\n```', [Piece("text", '```json\n{"a": 1}\n```')]),
    "hermes, bare": (HERMES, CALL, ROME_CALLED),
    "hermes, bare text": (HERMES, '{"city": "Rome"}', [Piece("text", '{"city": "Rome"}')]),
    "xml": (XML, xml(("city", "Rome {\"}</tool_call>")), ROME_CALLED),
    "xml, two": (XML, f"Let me see.\n{xml(('city', 'Oslo'), ('days', '2'))}\n{XML_NOW}", [
        Piece("text", "Let me see."), ROME_CALLED[0], Piece("arguments", '{"city": "Oslo", "days": 2}'), *NOW_CALLED]),
    "xml, no marker": (XML, xml(("city", "Oslo")).removeprefix("<tool_call>\n"), OSLO_CALLED),
    "xml, lines": (XML, xml(("city", "a\n\n<b>\n")), [ROME_CALLED[0], Piece("arguments", '{"city": "a\\n\\n<b>\\n"}')]),
    "xml, no number": (XML, xml(("city", "x"), ("days", "1e999")), [
        ROME_CALLED[0], Piece("arguments", '{"city": "x", "days": "1e999"}')]),
    "xml, deep": (XML, xml(("city", "x"), ("days", "[" * 300)), [
        ROME_CALLED[0], Piece("arguments", f'{{"city": "x", "days": "{"[" * 300}"}}')]),
    "xml, of no tool": (XML, "<tool_call>\n<function=rm>\n</function>\n</tool_call>", [
        Piece("text", "<tool_call>\n<function=rm>\n</function>\n</tool_call>")]),
    "xml, text": (XML, "if a <function=b: <tool_", [Piece("text", "if a <function=b: <tool_")]),
    "xml, cut": (XML, "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs", [ROME_CALLED[0]]),
    "glm": (GLM, glm(("city", "Oslo"), ("days", "2")), [
        ROME_CALLED[0], Piece("arguments", '{"city": "Oslo", "days": 2}')]),
    "glm, two": (GLM, f"{glm(('city', 'Oslo'))}\n<tool_call>now\n</tool_call>", [*OSLO_CALLED, *NOW_CALLED]),
    "glm, text": (GLM, "Well <tool_call>rm</tool_call>", [Piece("text", "Well <tool_call>rm</tool_call>")]),
    "mistral, arguments": (MISTRAL_ARGS, f"Hm [TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]now[ARGS]{{}}", [
        Piece("text", "Hm"), *ROME_CALLED, *NOW_CALLED]),
    "mistral, an id": (MISTRAL_ARGS, f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{ROME}", ROME_CALLED),
    "mistral, no arguments": (MISTRAL_ARGS, "[TOOL_CALLS] is a marker", [Piece("text", "[TOOL_CALLS] is a marker")]),
    "deepseek": (DEEPSEEK, f"Ok.{DEEPSEEK_CALLS}", [Piece("text", "Ok."), *ROME_CALLED, *NOW_CALLED]),
    "deepseek 3.1": (DEEPSEEK_31, D("calls_begin") + D("call_begin") + "get_weather" + D("sep") + ROME + D("call_end")
                     + D("call_begin") + "now" + D("sep") + "{}" + D("call_end") + D("calls_end"),
                     [*ROME_CALLED, *NOW_CALLED]),
    "kimi": (KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
             f"{ROME}<|tool_call_end|><|tool_calls_section_end|>", ROME_CALLED),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL_NOW}]", [*ROME_CALLED, *NOW_CALLED]),
    "mistral, ids": (MISTRAL, f'[TOOL_CALLS][{CALL_NOW[:-1]}, "id": "abc123def"}}]', NOW_CALLED),
    "mistral, text": (MISTRAL, "A list: [TOOL, [1]", [Piece("text", "A list: [TOOL, [1]")]),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_calls_are_parsed_from_text_in_any_pieces(name: str, data: st.DataObject) -> None:
    form, text, expected = READ[name]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=len(text)))
    assert pieces(form, text, cuts) == expected
    assert pieces(form, text, list(range(len(text)))) == expected


def test_arguments_arrive_while_they_are_generated_and_no_marker_is_shown() -> None:
    reader = HERMES.reader(TOOLS)
    assert reader.read("Hm <tool_call>\n", False) == [Piece("text", "Hm")]
    assert reader.read('{"name": "get_wea', False) == []
    assert reader.read('ther", "arguments": {"ci', False) == [ROME_CALLED[0], Piece("arguments", '{"ci')]
    assert reader.read('ty": "', False) == [Piece("arguments", 'ty": "')]
    assert reader.read('x"}}\n</tool_c', False) == [Piece("arguments", 'x"}')]
    assert reader.read("all>", True) == []


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(READ_FORMS)),
    st.lists(st.sampled_from([*'{}[]":,\\ \n', "name", "now", "arguments", "<tool_call>", "</tool_call>", "é",
                              "[TOOL_CALLS]", "<|python_tag|>", CALL_NOW, '{"name": "now"', "<function=now>", "[ARGS]",
                              "</function>", "<arg_key>a</arg_key>", "<arg_value>", "```json", D("calls_begin"),
                              D("sep")]), max_size=20),
    st.lists(st.integers(0, 200), max_size=20),
)  # fmt: skip
def test_any_text_gives_the_same_pieces_however_it_is_cut(form: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    assert pieces(READ_FORMS[form], text, cuts) == pieces(READ_FORMS[form], text, [])


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    inner = tokenizers.Tokenizer.from_file(str(SMALL / "tokenizer.json"))
    inner.add_special_tokens(["[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", D("call_begin"), D("sep")])
    tokenizer = Tokenizer(inner)
    return Grammars(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("form", READ_FORMS)
def test_an_answer_that_must_call_does(grammars: Grammars, form: str, parallel: bool) -> None:
    tokenizer = grammars.tokenizer
    assert tokenizer is not None
    call_form, shown = READ_FORMS[form], READ_FORMS[form].shown_ids(tokenizer)
    specials = {"llama": 1, "mistral": 1, "mistral_args": 2, "deepseek": 2, "deepseek_3.1": 2}
    assert len(shown) == specials.get(form, 0)
    grammar = calls_grammar(call_form, [WEATHER, STRICT_NOW], tokenizer, parallel=parallel)
    counts = set()
    for seed in range(8):
        ids, _, reason = draw(grammars.start(grammar, (2,)), tokenizer, grammars.vocabulary, (2,), seed, do_sample=True)
        assert reason == "stop"
        stream = TextStream(tokenizer, shown_ids=shown)
        text = "".join([*map(stream.push, ids), stream.flush()])
        answer_pieces = pieces(call_form, text, [], [WEATHER, STRICT_NOW])
        assert {piece.kind for piece in answer_pieces} == {"call", "arguments"}
        for call, arguments in zip(answer_pieces[::2], answer_pieces[1::2], strict=True):
            schema = WEATHER["function"]["parameters"] if call.name == "get_weather" else NOW_SCHEMA
            jsonschema.validate(json.loads(arguments.text), schema)
        counts.add(len(answer_pieces) // 2)
    assert (counts == {1}) is not parallel


def test_a_special_marker_is_shown_and_others_are_not(grammars: Grammars) -> None:
    tokenizer = grammars.tokenizer
    shown = MISTRAL.shown_ids(tokenizer)
    ids = [*shown, *tokenizer.encode("a b", add_special_tokens=False), *shown, 2, *tokenizer.encode(" c", False)]
    for kept, expected in ((shown, "[TOOL_CALLS]a b[TOOL_CALLS] c"), ((), "a b c")):
        stream = TextStream(tokenizer, shown_ids=kept)
        assert "".join([*map(stream.push, ids), stream.flush()]) == expected


def test_tool_choice_selects_the_callable_tools() -> None:
    assert choose(TOOLS, None) == choose(TOOLS, "auto") == (TOOLS, False)
    assert choose(TOOLS, "none") == ([], False)
    assert choose(TOOLS, "required") == (TOOLS, True)
    assert choose(TOOLS, {"type": "function", "function": {"name": "now"}}) == ([NOW], True)
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "name": "now"}]}
    assert choose(TOOLS, {"type": "allowed_tools", **allowed}) == ([NOW], True)
    allowed["tools"] = [{"type": "function", "function": {"name": str(tool["function"]["name"])}} for tool in TOOLS]
    assert choose(TOOLS, {"type": "allowed_tools", "allowed_tools": {**allowed, "mode": "auto"}}) == (TOOLS, False)
    for bad in ({"mode": "some"}, {"mode": "auto", "tools": 3}, {"mode": "auto", "tools": []}):
        with pytest.raises(UsageError, match="tool_choice"):
            choose(TOOLS, {"type": "allowed_tools", "allowed_tools": bad})
    for bad in ("any", {"type": "function"}, {"function": {"name": "rm"}}, 3):
        with pytest.raises(UsageError, match="tool_choice is"):
            choose(TOOLS, bad)
    with pytest.raises(UsageError, match="there are no tools"):
        choose([], "required")


@pytest.mark.parametrize(("tools", "named"), [
    ([3], r"tools\[0\] is no function"), ([NOW, {"type": "retrieval"}], r"tools\[1\] is no function"),
    ([{"type": "function", "function": {}}], r"name of tools\[0\] is 'None'"),
    ([{"type": "function", "function": {"name": 'a"b'}}], r"name of tools\[0\]"),
    ([{"type": "function", "function": {"name": "a", "parameters": []}}], "parameters is a list"),
    ([NOW, NOW], "two tools are named 'now'"), ([NOW] * 129, "129 tools"),
])  # fmt: skip
def test_invalid_tools_are_named(tools: list[Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_tools(tools)
    assert check_tools(TOOLS) == TOOLS


def test_a_strict_tool_is_kept_to_and_others_as_far_as_can_be(grammars: Grammars) -> None:
    tokenizer = grammars.tokenizer
    assert tokenizer is not None
    odd = {"name": "odd", "parameters": {"type": "object", "minProperties": 1, "not": {}}}
    grammars.start(calls_grammar(HERMES, [{"function": odd}], tokenizer), (2,))
    with pytest.raises(UsageError, match="not"):
        grammars.start(calls_grammar(HERMES, [{"function": {**odd, "strict": True}}], tokenizer), (2,))


def test_ids_are_as_the_template_takes_them() -> None:
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()
    assert HERMES.new_id().startswith("call_")
    assert len({HERMES.new_id() for _ in range(50)}) == 50


def test_a_long_call_is_read_in_time_that_grows_with_it_alone() -> None:
    reader = HERMES.reader(TOOLS)
    count = len(reader.read("<tool_call>" + ARGUMENTS + '{"city": "', False))
    for _ in range(20_000):
        count += len(reader.read("abcdefgh", False))
    assert count == 20_002
    assert np.isfinite(count)
