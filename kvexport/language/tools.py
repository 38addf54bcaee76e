"""Tools that a model may call: their descriptions, the syntax in which a model writes calls, and a grammar of calls.

A tool is described as OpenAI does: {"type": "function", "function": {"name", "description", "parameters": JSON schema,
"strict"}}. Chat templates get the descriptions unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvexport.errors import UsageError
from kvexport.language.chat import ChatTemplate
from kvexport.language.grammar import Grammar, json_options, json_text
from kvexport.language.tokenizer import Tokenizer
from kvexport.language.tool_calls import CallReader

Tool = Mapping[str, Any]

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True)
class CallForm:
    """The syntax in which a model writes tool calls.

    Attributes:
        name: The name of the form.
        opening: The marker before each call, or before a list of calls.
        closing: The marker behind it.
        key: The JSON key of a call's arguments.
        first: Whether a call may be the whole answer without a marker.
        listed: Whether calls are in a JSON list.
        id_length: The length of the ids that the template accepts.
    """

    name: str
    opening: str
    closing: str
    key: Literal["arguments", "parameters"]
    first: bool = False
    listed: bool = False
    id_length: int = 24

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Return a streaming parser that finds tool calls in one answer.

        The text that it reads must show the special tokens of `opening`.
        """
        keys = ("arguments", "parameters") if self.first else (self.key,)
        return CallReader([_name(tool) for tool in tools], self.opening, self.closing, self.first, keys)

    def shown_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the id of the tool call marker if it is a special token, so that the answer's text shows it."""
        token = tokenizer.token_id(self.opening)
        return (token,) if token is not None and token in tokenizer.special_ids else ()

    def new_id(self) -> str:
        """Return a random id for a new tool call."""
        letters = string.ascii_letters + string.digits
        drawn = "".join(secrets.choice(letters) for _ in range(self.id_length))
        return drawn if self.id_length < 24 else f"call_{drawn}"


# Hermes, Qwen 2.5 and 3, SmolLM; Llama 3.1 to 3.3; Mistral.
HERMES = CallForm("hermes", "<tool_call>", "</tool_call>", "arguments")
LLAMA = CallForm("llama", "<|python_tag|>", "", "parameters", first=True)
MISTRAL = CallForm("mistral", "[TOOL_CALLS]", "", "arguments", listed=True, id_length=9)


def form_of(template: ChatTemplate | None) -> CallForm:
    """Return the syntax of tool calls that a chat template's text reveals.

    Raises:
        UsageError: The template takes no tools, or its form of calls is unknown.
    """
    sources = {} if template is None else template.sources
    source = sources.get("tool_use") or sources.get("default") or ""
    if not re.search(r"\btools\b", source):
        raise UsageError("the model's chat template takes no tools", "ask without tools, or another model")
    for form in (HERMES, MISTRAL):
        if form.opening in source:
            return form
    if LLAMA.opening in source or re.search(r"""["']parameters["'] *:""", source):
        return LLAMA
    raise UsageError(
        f"the model's chat template has a form of calls that is not known; known are {HERMES.opening}, "
        f"{MISTRAL.opening} and {LLAMA.opening}",
        "ask without tools, or another model",
    )


def check_tools(tools: Sequence[Any]) -> list[Tool]:
    """Check the descriptions of tools that a client sent, and return them.

    Raises:
        UsageError: A description is malformed. The message names it.
    """
    if len(tools) > MOST_TOOLS:
        raise UsageError(f"there are {len(tools)} tools", f"give at most {MOST_TOOLS}")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise UsageError(f"tools[{i}] is no function", 'pass {"type": "function", "function": {"name": ...}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"the name of tools[{i}] is {str(name)[:40]!r}", "use 1 to 128 letters, digits, and any of _.:/-"
            )
        if name in seen:
            raise UsageError(f"two tools are named {name!r}", "give each a name of its own")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise UsageError(f"tools[{i}].parameters is a {type(parameters).__name__}", "pass a JSON schema")
        seen.add(name)
    return list(tools)


def choose(tools: Sequence[Tool], choice: Any) -> tuple[list[Tool], bool]:
    """Return the tools that a request's `tool_choice` allows, and whether the model must call one.

    Args:
        tools: All tools.
        choice: "none", "auto" or "required" (None is "auto"), or {"type": "function", "function": {"name": ...}}.

    Raises:
        UsageError: The choice is another value, or names no tool.
    """
    if choice is None or choice == "auto":
        return list(tools), False
    if choice == "none":
        return [], False
    if not tools:
        raise UsageError("tool_choice asks for a call, and there are no tools", "give tools, or no tool_choice")
    if choice == "required":
        return list(tools), True
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    named = [tool for tool in tools if _name(tool) == name]
    if name is None or not named:
        raise UsageError(
            f"tool_choice is {str(choice)[:80]!r}",
            f"use none, auto, required, or name one of: {', '.join(map(_name, tools))}",
        )
    return named, True


def calls_grammar(form: CallForm, tools: Sequence[Tool], tokenizer: Tokenizer, *, parallel: bool = True) -> Grammar:
    """Return the grammar of an answer that consists of calls of the given tools.

    Keywords of a schema that are not supported are ignored, unless the tool is strict.

    Args:
        form: The form of calls.
        tools: The tools. The arguments of a call match the schema of its tool.
        tokenizer: The tokenizer, which decides whether the marker is a special token.
        parallel: Whether the answer may have several calls.
    """
    special = form.shown_ids(tokenizer)
    opening = f"<[{special[0]}]>" if special else _literal(form.opening)
    calls = {
        "hermes": rf'{opening} "\n" call "\n" {_literal(form.closing)}',
        "llama": "call",
        "mistral": "call",
    }[form.name]
    between = {"hermes": r'"\n"', "llama": '"; "', "mistral": '", "'}[form.name]
    several = f"one ({between} one)*" if parallel else "one"
    lines = [
        f'start: {opening} " "? "[" {several} "]"' if form.listed else f"start: {several}",
        f"one: {calls}",
        "call: " + " | ".join(f"call{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = f'{{"name": "{_name(tool)}", "{form.key}": '
        schema = function.get("parameters") or {"type": "object"}
        options = json_options(lenient=not function.get("strict"))
        lines.append(f'call{i}: {_literal(head)} arguments{i} "}}"')
        lines.append(f"arguments{i}: %json {json_text({**schema, 'x-guidance': options})}")
    return Grammar("lark", "\n".join(lines))


def _literal(text: str) -> str:
    """Return a text as a string literal of a Lark grammar."""
    return json.dumps(text)


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])
