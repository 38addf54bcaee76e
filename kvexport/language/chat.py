"""The checkpoint's chat template, which turns messages into the text that the model was trained to answer.

The template is Jinja, as transformers' `apply_chat_template` takes it. minijinja renders it: the template sees copies
of plain data and no private attributes, and the number of its steps and the length of its text are bounded. An image in
a message becomes the text by which the model marks images. A template that prints None or the number 2.0 gives another
text than in transformers: minijinja prints nothing for None, and 2 for 2.0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvexport.errors import ArtifactError, EnvironmentProblem, UsageError
from kvexport.language import bounded_filters
from kvexport.language.tokenizer import is_panic

Message = Mapping[str, Any]

CONFIG, TEMPLATE, SPECIAL = "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"
_MEND = "correct the messages, or --no-chat for a prompt without the template"
# A conversation of a thousand messages takes some 100,000 steps.
_STEPS = 5_000_000  # 0.15 s, during which no other thread of the process runs
_LONGEST = 1 << 25  # characters: twice the largest body that a server takes
_HERE = "\u2063(here)\u2063"  # stands in a text whose place in the prompt is looked for
PIN_FIELD, PIN = "cache", "pin"  # a message with this field and value is pinned (kvexport/language/pins.py)
# The names under which messages bring the reasoning before an answer. Templates read one of the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class Pin(str):
    """The mark "pin" (never evict) in a message's field `cache`, and where the client's request has the field."""

    where: str

    def __new__(cls, where: str) -> Pin:
        pin = super().__new__(cls, PIN)
        pin.where = where
        return pin


@dataclass(frozen=True)
class ChatTemplate:
    sources: Mapping[str, str]  # templates by name: "default" and perhaps "tool_use", for messages with tools
    tokens: Mapping[str, str]  # special tokens by the names that templates use ("bos_token")
    where: str  # file, for messages

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return a conversation as text that includes the special tokens, so that encoding must add none."""
        source = (self.sources.get("tool_use") if tools else None) or self.sources.get("default")
        if source is None:
            raise UsageError(
                f"{self.where} has the chat templates {', '.join(self.sources)}, none of them the default",
                f"name one of them {TEMPLATE} in the checkpoint, and build again",
            )
        checked = _checked(messages)
        if continue_final_message:
            content = checked[-1].get("content")
            if checked[-1]["role"] != "assistant" or not isinstance(content, str):
                raise UsageError(
                    "continue_final_message needs a last message of the assistant with a text", "add that message"
                )
            checked[-1] = {**checked[-1], "content": content + _HERE}
        values = {
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **self.tokens,
            **variables,
        }
        text = self._text(source, checked, values)
        if continue_final_message:
            text, marker, _ = text.rpartition(_HERE)
            if not marker:
                raise UsageError("the chat template does not show the last message, so it cannot be continued", _MEND)
        return text

    def _text(self, source: str, messages: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        texts, error = [], None
        for variant in _variants(messages):
            if self._takes_parts(source):
                variant = [
                    {**x, "content": [{"type": "text", "text": x["content"]}]}
                    if isinstance(x.get("content"), str)
                    else x
                    for x in variant
                ]
            try:
                text = _render(source, self.where, _plain({"messages": variant, **values}))
            except UsageError as failure:
                error = error or failure
                continue
            if _is_whole(text, messages):
                return text
            texts.append(text)
        if not texts and error is not None:
            raise error
        return texts[0]

    def _takes_parts(self, source: str) -> bool:
        """Return whether a chat template shows only contents that are lists of parts, as vision models' do."""
        known: dict[str, bool] = self.__dict__.setdefault("_parts", {})
        if source not in known:
            shown = []
            for content in (_HERE, [{"type": "text", "text": _HERE}]):
                try:
                    values = {"messages": [{"role": "user", "content": content}], **self.tokens}
                    shown.append(_HERE in _render(source, self.where, values))
                except UsageError:
                    shown.append(False)
            known[source] = shown == [False, True]
        return known[source]


def _variants(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield chat messages as they are, and then in the forms that some chat templates need.

    Some templates know only one system message at the beginning, and some take the arguments of a tool call as JSON
    text.
    """
    merged = _one_system(messages)
    calls = any("tool_calls" in message for message in messages)
    for variant in (messages, *([merged] if merged != messages else [])):
        yield variant
        if calls:
            yield [_with_texts(message) for message in variant]


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = [message for message in messages if message["role"] == "system"]
    texts = [message["content"] for message in system if isinstance(message.get("content"), str)]
    if not system or system == messages[:1] or len(texts) < len(system):
        return messages
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("tool_calls"), list):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(arguments := function.get("arguments"), Mapping):
            call = {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _is_whole(text: str, messages: list[dict[str, Any]]) -> bool:
    """Return whether the text that a chat template rendered has not lost or distorted a part of the messages.

    The text must show every system message. The text must not show the arguments of a tool call as a Python dict,
    because they should be JSON.
    """
    for message in messages:
        content = message.get("content")
        if message["role"] == "system" and isinstance(content, str) and content.strip() not in text:
            return False
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                return False
    return True


def images_of_messages(messages: Sequence[Message]) -> tuple[Sequence[Message], list[Any]]:
    """Replace every image in chat messages by {"type": "image"}; return the messages, and the images in order."""
    images: list[Any] = []
    if not messages or isinstance(messages, str | Mapping):  # no list of messages: `render` refuses it
        return messages, images

    def plain(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != "image":
            return part
        if "image" not in part:
            raise UsageError("a part of a message is an image without an image", '{"type": "image", "image": "FILE"}')
        images.append(part["image"])
        return {"type": "image"}

    contents = [message.get("content") if isinstance(message, Mapping) else None for message in messages]
    copies = [
        {**message, "content": [plain(part) for part in content]} if isinstance(content, list) else message
        for message, content in zip(messages, contents, strict=True)
    ]
    return copies, images


def read_chat_template(folder: Path) -> ChatTemplate | None:
    config = read_json(folder / CONFIG)
    template = config.get("chat_template")
    sources = {}
    if isinstance(template, str):
        sources["default"] = template
    elif isinstance(template, list):
        sources = {str(entry["name"]): str(entry["template"]) for entry in template if isinstance(entry, dict)}
    where = folder / CONFIG
    if (folder / TEMPLATE).is_file():
        where = folder / TEMPLATE
        sources["default"] = _read(where)
    tokens = {**_tokens(read_json(folder / SPECIAL)), **_tokens(config)}
    return ChatTemplate(sources, tokens, str(where)) if sources else None


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return chat messages in the form that chat templates read.

    Keys of value None and the field that pins a message are left out; reasoning stands under the keys that templates
    read.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise UsageError(
            f"a conversation is a list of messages, found {'none' if not messages else type(messages).__name__}",
            'pass [{"role": "user", "content": "..."}]',
        )
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(
                f"message {i} is {str(message)[:80]!r}, expected a mapping with a role",
                'pass {"role": "user", "content": "..."}',
            )
        present = {key: value for key, value in message.items() if value is not None}
        if present.pop(PIN_FIELD, PIN) != PIN:
            raise UsageError(
                f"messages.{i}.{PIN_FIELD}: {str(message[PIN_FIELD])[:80]!r} is unknown",
                f'"{PIN_FIELD}": "{PIN}", or no {PIN_FIELD}',
            )
        reasoning = next((present[key] for key in _REASONING if key in present), None)
        if reasoning is not None:
            present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
        checked.append(present)
    return checked


def _plain(value: Any) -> Any:
    """Return a copy of a value in JSON's types, for a chat template.

    Templates may call public methods of their values, so a value of another type is replaced by the name of its type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


class _Refused(Exception):
    """The error that a chat template causes by calling raise_exception, to refuse the messages."""


def _render(source: str, where: str, variables: dict[str, Any]) -> str:
    try:
        import minijinja
    except ImportError as error:
        raise EnvironmentProblem(
            f"the package 'minijinja', which renders chat templates, cannot be imported: {error}",
            "pip install minijinja",
        ) from error
    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        fuel=_STEPS,
        undefined_behavior="lenient",
        auto_escape_callback=lambda name: False,
        finalizer=_as_python,
        filters={"tojson": _to_json, **bounded_filters.FILTERS},
        tests={"iterable": _is_iterable, "sequence": _is_iterable},
        globals={"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)},
    )
    # {% generation %} marks the text of an assistant, for training. It is rendered as a plain block.
    source = _GENERATION.sub(lambda m: f"{{%{m[1]} {'endwith' if m[2] else 'with'} {m[3]}%}}", source)
    try:
        text = str(environment.render_str(source, "chat", **variables))
        if len(text) > _LONGEST:
            raise ValueError(f"its text is larger than {_LONGEST} characters")
        return text
    except _Refused as error:
        raise UsageError(f"the chat template refuses these messages: {error}", "") from error
    except minijinja.TemplateError as error:
        reason = f"{error.kind}: {error.detail}" if error.detail else error.message
        line = f", line {error.line}" if error.line else ""
        raise UsageError(
            f"the chat template cannot be rendered: {reason} ({where}{line})",
            _MEND,
        ) from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise UsageError(f"the chat template cannot be rendered: {error} ({where})", _MEND) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UsageError(f"the renderer of the chat template failed: {error} ({where})", _MEND) from None


def _refuse(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON text, as transformers' chat template filter `tojson` does: HTML is not escaped."""
    if indent is not None:
        bounded_filters.check_width(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _is_iterable(value: Any) -> bool:
    return isinstance(value, str | Sequence | Mapping)


def _as_python(value: Any) -> Any:
    if value is None:
        return ""
    return str(value) if isinstance(value, bool | float | list | tuple | dict) else value


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON: {error}", "build the artifact again: kvexport build") from error
    if not isinstance(data, dict):
        raise ArtifactError(
            f"{path} holds a JSON {type(data).__name__}, expected an object", "build the artifact again: kvexport build"
        )
    return data


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "build the artifact again: kvexport build") from error
