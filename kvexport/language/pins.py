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
from kvexport.language.chat import PIN_FIELD, ChatTemplate, Message, Pin, images_of_messages

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
    image: str = "",
) -> tuple[str, list[Span]]:
    """Return a conversation as text, and the spans (first character, end) of the text that are never evicted.

    If a leading system message is pinned, the span reaches from the beginning of the text to the first other message,
    and so includes tools that the template puts there. A pinned system message that the template shows later has a span
    of its own. With `system` all leading system messages are pinned.

    `image` is the marker of images in the text, if there are images. Spans end before the first image.
    """
    text = template.render(messages, tools, **variables)
    first = next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    pinned = [i for i, message in enumerate(messages) if message.get(PIN_FIELD) is not None]
    front = system or any(i < first for i in pinned)
    if not front and not pinned:
        return text, []
    marked = [dict(message) for message in messages]
    for i in {*pinned, *(range(min(first + 1, len(messages))) if front else ())}:
        content = _marked(messages[i].get("content"), f"\u2063({2 * i})\u2063", f"\u2063({2 * i + 1})\u2063")
        if content is not None:
            marked[i]["content"] = content
        elif i in pinned:
            raise UsageError(
                f"{place_of(messages, i)}: the message has no text to pin", f"leave out the field {PIN_FIELD}"
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
    wanted = sorted({*pinned, *(range(first) if system else ())})
    spans = [(places[2 * i], places[2 * i + 1]) for i in wanted if {2 * i, 2 * i + 1} <= places.keys()]
    until = text.find(image) if image and image in text else len(text)
    if front:
        end = min(until, places.get(2 * first, max((at for mark, at in places.items() if mark < 2 * first), default=0)))
        spans = [(0, end), *(span for span in spans if span[1] > end)]
    if any(end > until for _, end in spans):
        raise UsageError("the chat template shows a pinned message behind an image", "leave out the images")
    return text, spans


def refuse_beside_images(messages: Sequence[Message]) -> None:
    """Refuse a conversation with images and a pinned message, because pinned text is found in a text without images."""
    if images_of_messages(messages)[1]:
        for i, message in enumerate(messages):
            if isinstance(message, Mapping) and message.get(PIN_FIELD) is not None:
                raise UsageError(
                    f"{place_of(messages, i)}: a pinned message in a conversation with images is not supported",
                    f"leave out the images, or the field {PIN_FIELD}",
                )


def place_of(messages: Sequence[Message], i: int) -> str:
    """Return the name of the field that pins a message (keeps it in the KV cache), as the client knows the field."""
    field = messages[i].get(PIN_FIELD)
    return field.where if isinstance(field, Pin) else f"messages.{i}.{PIN_FIELD}"


def _marked(content: Any, before: str, after: str) -> Any:
    """Return a message's content with the marks `before` and `after` around its text; None if it has no text.

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
