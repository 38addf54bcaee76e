"""The places of pinned messages in the prompts that the chat templates of known models make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvexport.errors import UsageError
from kvexport.language.chat import ChatTemplate
from kvexport.language.pins import render_pinned
from tests.language.test_chat import RESULT, SYSTEM, TEMPLATES, TOKENS, TOOL, assistant, user

# Templates that know no system message, or refuse one.
NO_SYSTEM = ("gemma", "macros-and-loops")


def template_of(path: Path) -> ChatTemplate:
    return ChatTemplate({"default": path.read_text()}, TOKENS, str(path))


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in message.items() if name != "cache"} for message in messages]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_span_of_a_pinned_message_is_its_text(path: Path) -> None:
    messages = [{**user("one"), "cache": "pin"}, assistant("two")]
    messages += [{**user("  the key is 41 \n"), "cache": "pin"}, assistant("four")]
    template = template_of(path)
    text, spans = render_pinned(template, messages, None, {})
    assert text == template.render(plain(messages)) == template.render(messages)
    assert [text[first:end] for first, end in spans] == ["one", "the key is 41"]
    assert render_pinned(template, plain(messages), None, {}) == (text, [])


@pytest.mark.parametrize("path", [p for p in TEMPLATES if p.stem not in NO_SYSTEM], ids=lambda path: path.stem)
@pytest.mark.parametrize("by_message", [True, False])
def test_the_front_ends_where_the_first_other_message_begins(path: Path, by_message: bool) -> None:
    messages = [{**SYSTEM, **({"cache": "pin"} if by_message else {})}, user("A question")]
    template = template_of(path)
    text, spans = render_pinned(template, messages, [TOOL], {}, system=not by_message)
    assert text == template.render(plain(messages), [TOOL])
    ((first, end),) = spans
    assert first == 0 and "Be brief." in text[:end] and text[end:].startswith("A question")


def test_tools_in_front_are_pinned_with_the_system_message() -> None:
    template = template_of(next(path for path in TEMPLATES if path.stem == "qwen3"))
    text, ((_, end),) = render_pinned(template, [SYSTEM, user("A question")], [TOOL], {}, system=True)
    assert "get_weather" in text[:end]
    text, ((_, end),) = render_pinned(template, [user("A question")], [TOOL], {}, system=True)
    assert "get_weather" in text[:end] and text[end:].startswith("A question")
    _, spans = render_pinned(template, [user("A question"), {**RESULT, "cache": "pin"}], [TOOL], {})
    assert len(spans) == 1


def test_parts_of_a_content_are_pinned_from_the_first_text_to_the_last() -> None:
    template = ChatTemplate(
        {"default": "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"}, {}, ""
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text, spans = render_pinned(template, [user("zero"), {**user(parts), "cache": "pin"}], None, {})
    assert [text[first:end] for first, end in spans] == ["one][two"]


@pytest.mark.parametrize(
    ("source", "message", "why"),
    [
        ("{{ messages[0].content }}", {"cache": "keep"}, r"messages\.0\.cache: 'keep' is unknown"),
        ("{{ messages[0].content }}", {"content": " "}, r"messages\.0\.cache: the message has no text"),
        ("{{ messages[0].content | upper | length }}", {}, "in another way"),
        ("{{ messages[0].content.startswith('text') }}", {}, "in another way"),
        ("nothing", {}, "in another way"),
    ],
)
def test_what_cannot_be_pinned_is_refused(source: str, message: dict[str, Any], why: str) -> None:
    template = ChatTemplate({"default": source}, {}, "the test")
    with pytest.raises(UsageError, match=why):
        render_pinned(template, [{"role": "user", "content": "text", "cache": "pin", **message}], None, {})
