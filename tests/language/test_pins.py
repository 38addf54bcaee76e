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


@pytest.mark.parametrize("by_message", [True, False])
def test_a_system_message_before_the_last_user_message_is_pinned_there(by_message: bool) -> None:
    template = template_of(next(path for path in TEMPLATES if path.stem == "mistral"))
    system = {**SYSTEM, "content": "Be brief.", **({"cache": "pin"} if by_message else {})}
    talk = [system, user("one"), assistant("two"), user("three")]
    text, spans = render_pinned(template, talk, [TOOL], {}, system=not by_message)
    assert [text[first:end] for first, end in spans] == ["<s>[INST] ", "Be brief."]
    assert text[spans[1][1] :].startswith("\n\nthree[/INST]")
    text, spans = render_pinned(template, [plain([system])[0], *talk], None, {}, system=not by_message)
    assert [text[first:end] for first, end in spans][-1] == "Be brief." and text[: spans[-1][0]].endswith("\n\n")
    text, spans = render_pinned(template, talk[:2], [TOOL], {}, system=not by_message)
    assert [text[:end] for _, end in spans] == [text[: text.index("one")]] and "get_weather" in text[: spans[0][1]]


def test_every_pinned_system_message_is_shown_or_refused() -> None:
    shown = "{% set s = messages | selectattr('role', 'equalto', 'system') | list %}"
    shown += "({{ s[0].content }}){% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    first, second = {"role": "system", "content": "zero"}, {"role": "system", "content": "one", "cache": "pin"}
    talk = [first, second, user("two")]
    behind = ChatTemplate({"default": shown + "({{ s[1].content }})"}, {}, "the test")
    for messages, system in ((talk, False), (plain(talk), True)):
        text, spans = render_pinned(behind, messages, None, {}, system=system)
        assert [text[first:end] for first, end in spans] == ["(zero)[", "one"]
    source = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    drops = ChatTemplate({"default": source}, {}, "the test")
    with pytest.raises(UsageError, match="in another way"):
        render_pinned(drops, talk, None, {})
    assert render_pinned(drops, plain(talk), None, {}, system=True) == ("[two]", [(0, 1)])


def test_a_front_ends_before_the_first_image() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {}, "the test")
    system, image = {"role": "system", "content": [{"type": "text", "text": "zero"}]}, {"type": "image"}
    asked = {"type": "text", "text": "one"}
    for content, front in (([image, asked], "[system]zero[user]"), ([asked, image], "[system]zero[user]")):
        text, spans = render_pinned(template, [system, user(content)], None, {}, system=True, image="<image>")
        assert [text[first:end] for first, end in spans] == [front]
    with_image = {**system, "content": [asked, image, asked]}
    with pytest.raises(UsageError, match="behind an image"):
        render_pinned(template, [with_image, user([asked])], None, {}, system=True, image="<image>")


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
