"""Pinned messages of a conversation: where their texts are in the prompt, and which tokens they have.

The tokens of a message with the field `"cache": "pin"` are never evicted from the KV cache. Chat templates are
programs, so the place of a message's text is found by marks: the conversation is rendered a second time, with marks
around the texts of pinned messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvexport.errors import UsageError
from kvexport.language.chat import PIN_FIELD, ChatTemplate, Message

_MARK = re.compile("\u2063\\(([0-9]+)\\)\u2063")
_SYSTEM = ("system", "developer")
Span = tuple[int, int]


def render_pinned(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    *,
    system: bool = False,
) -> tuple[str, list[Span]]:
    """Return a conversation as text, and the spans (first character, end) of the text that are pinned.

    If one of the first system messages is pinned, the span reaches from the beginning of the text to the text of the
    first other message. So it includes tools, if the template puts them there. With `system` this span is pinned
    whatever the messages say.
    """
    text = template.render(messages, tools, **variables)
    first = next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    pinned = [i for i, message in enumerate(messages) if message.get(PIN_FIELD) is not None]
    front = system or any(i < first for i in pinned)
    pinned = [i for i in pinned if i >= first]
    if not front and not pinned:
        return text, []
    marked = [dict(message) for message in messages]
    for i in {*pinned, *(range(min(first + 1, len(messages))) if front else ())}:
        content = _marked(messages[i].get("content"), f"\u2063({2 * i})\u2063", f"\u2063({2 * i + 1})\u2063")
        if content is not None:
            marked[i]["content"] = content
        elif i in pinned:
            raise UsageError(
                f"messages.{i}.{PIN_FIELD}: the message has no text to pin", f"leave out the field {PIN_FIELD}"
            )
    places, removed = dict[int, int](), 0
    with_marks = template.render(marked, tools, **variables)
    for mark in _MARK.finditer(with_marks):
        places[int(mark[1])] = mark.start() - removed
        removed += len(mark[0])
    if _MARK.sub("", with_marks) != text or not all({2 * i, 2 * i + 1} <= places.keys() for i in pinned):
        raise UsageError(
            "the chat template shows a pinned message in another way than others: its place in the prompt is not known",
            f"leave out the field {PIN_FIELD}, or pin ranges of tokens: Engine.generate(..., pin=[(first, end)])",
        )
    spans = [(places[2 * i], places[2 * i + 1]) for i in pinned]
    if front:
        end = places.get(2 * first, max((at for mark, at in places.items() if mark < 2 * first), default=0))
        spans.append((0, end))
    return text, spans


def _marked(content: Any, before: str, after: str) -> Any:
    """Return a message's content with marks around its text; None if it has no text.

    White space around the text stays outside of the marks, because many templates remove it.
    """
    if isinstance(content, str):
        core = content.strip()
        start = content.find(core)
        return f"{content[:start]}{before}{core}{after}{content[start + len(core) :]}" if core else None
    if not isinstance(content, list | tuple):
        return None
    parts = list(content)
    texts = [i for i, part in enumerate(parts) if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if not texts:
        return None
    for i, ends in ((texts[0], (before, "")), (texts[-1], ("", after))):
        parts[i] = {**parts[i], "text": ends[0] + parts[i]["text"] + ends[1]}
    return parts
