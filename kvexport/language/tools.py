"""Tools that a model may call: their descriptions, the syntax in which a model writes calls, and a grammar of calls.

A tool is described as OpenAI does: {"type": "function", "function": {"name", "description", "parameters": JSON schema,
"strict"}}. Chat templates get the descriptions unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvexport.errors import UsageError
from kvexport.language.chat import ChatTemplate
from kvexport.language.grammar import Grammar, json_options, json_text
from kvexport.language.tokenizer import Tokenizer
from kvexport.language.tool_calls import CallParser, CallReader, NamedParser, TaggedParser

Tool = Mapping[str, Any]

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True)
class CallForm:
    name: str
    signs: tuple[str, ...]  # texts that are all in the chat templates of this form
    # Markers before each call, or before a list of calls; first the one that the template writes
    openings: tuple[str, ...]
    closings: tuple[str, ...]  # markers behind a call
    before: str  # what stands before the arguments of the tool NAME, as the template writes it
    after: str  # what stands behind the arguments
    begin: str = ""  # what stands before the first call
    between: str | None = "\n"  # what stands between two calls; None if an answer has one call
    end: str = ""  # what stands behind the last call
    parameter: str = ""  # how arguments in tags are written, with KEY and VALUE; "" for arguments in JSON
    # A regular expression of what stands before the arguments, with NAME; "" for a call that is one JSON object
    head: str = ""
    tail: str = ""  # one of what stands behind arguments in tags
    first: bool = False  # whether a call may be the whole answer without a marker
    inside: tuple[str, ...] = ()  # openings that belong to the call itself
    id_length: int = 24  # length of the ids that the template accepts

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        names = [_name(tool) for tool in tools]
        head = self.head.replace("NAME", f"(?P<name>{_NAME.pattern})")
        if not self.head:
            keys = ("arguments", "parameters") if self.first else ("arguments",)
            parser: Callable[[], CallParser] = lambda: CallParser(keys)  # noqa: E731
        elif not self.parameter:
            parser = lambda: NamedParser(head)  # noqa: E731
        else:
            key, value = "(?P<key>[^<>]{1,256}?)", "(?P<value>.*?)"
            argument = r"\s*".join(map(re.escape, self.parameter.split("\n")))
            argument = argument.replace("KEY", key).replace(r"\s*VALUE\s*", rf"\n?{value}\n?").replace("VALUE", value)
            another = re.escape(self.parameter.partition("KEY")[0])
            argument = rf"\s*{argument.removesuffix(_BLANK)}(?=\s*(?:{another}|{self.tail}))"
            schemas = {_name(tool): _properties(tool) for tool in tools}
            parser = lambda: TaggedParser(head, argument, rf"\s*{self.tail}", schemas)  # noqa: E731
        return CallReader(
            names, self.openings, self.closings, self.first, parser, self.inside, "" if self.head else "{"
        )

    def shown_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of those tool-call markers that are special tokens, so that the answer's text shows them."""
        written = [self.begin, self.before, self.after, self.end, self.parameter, *self.openings, *self.closings]
        return tokenizer.special([*self.openings, *(x for text in written for x in _MARKER.findall(text))])

    def new_id(self) -> str:
        letters = string.ascii_letters + string.digits
        drawn = "".join(secrets.choice(letters) for _ in range(self.id_length))
        return drawn if self.id_length < 24 else f"call_{drawn}"


_BLANK = r"\s*"
_MARKER = re.compile(r"<[^<>\s=]+>|\[[A-Z_]+\]")
_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEP = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
_DEEPSEEK = (_CALLS_BEGIN, _CALL_BEGIN), ("```", _CALL_END, _CALLS_END)
# In the order in which a template's text is looked through: those of the longest signs first.
HARMONY = CallForm(
    "harmony", ("<|channel|>", "to=functions"), (), (),
    "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", between=None,
)  # fmt: skip
XML = CallForm(  # Qwen3-Coder, Qwen 3.5
    "xml", ("<function=", "<parameter="), ("<tool_call>", "<function="), ("</tool_call>",),
    "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>",
    parameter="<parameter=KEY>\nVALUE\n</parameter>\n",
    head=r"\s*<function=NAME>", tail="</function>", inside=("<function=",),
)  # fmt: skip
GLM = CallForm(
    "glm", ("<arg_key>", "<tool_call>"), ("<tool_call>",), ("</tool_call>",), "<tool_call>NAME\n", "</tool_call>",
    parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    head=r"\s*NAME\s*(?=<arg_key>|</tool_call>)", tail="</tool_call>",
)  # fmt: skip
MISTRAL_ARGS = CallForm(  # Mistral Small 3.2 and later
    "mistral_args", ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",), (), "[TOOL_CALLS]NAME[ARGS]", "", between="",
    head=r"\s*NAME(?:\[CALL_ID\][^\[{]*)?\[ARGS\]\s*", id_length=9,
)  # fmt: skip
DEEPSEEK = CallForm(  # V3, R1
    "deepseek", (_SEP, "```json"), *_DEEPSEEK, f"{_CALL_BEGIN}function{_SEP}NAME\n```json\n", f"\n```{_CALL_END}",
    begin=_CALLS_BEGIN, end=_CALLS_END, head=rf"\s*(?:function{_SEP})?NAME(?:{_SEP})?\s*(?:```json)?\s*",
)  # fmt: skip
DEEPSEEK_31 = replace(
    DEEPSEEK, name="deepseek_3.1", signs=(_SEP,), before=f"{_CALL_BEGIN}NAME{_SEP}", after=_CALL_END, between=""
)
KIMI = CallForm(
    "kimi", ("<|tool_call_argument_begin|>",), ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>", between="",
    begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>",
    head=r"\s*functions\.NAME:\d+\s*<\|tool_call_argument_begin\|>\s*",
)  # fmt: skip
HERMES = CallForm(  # Hermes, Qwen 2.5 and 3, SmolLM; Qwen2.5-Coder writes a fenced block, or the object alone
    "hermes", ("<tool_call>",), ("<tool_call>", "```json"), ("</tool_call>", "```"),
    '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", first=True,
)  # fmt: skip
MISTRAL = CallForm(
    "mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), (), '{"name": "NAME", "arguments": ', "}",
    begin="[TOOL_CALLS] [", between=", ", end="]", id_length=9,
)  # fmt: skip
LLAMA = CallForm(  # Llama 3.1 to 3.3
    "llama", ("<|python_tag|>",), ("<|python_tag|>",), (), '{"name": "NAME", "parameters": ', "}", between="; ",
    first=True,
)  # fmt: skip
FORMS = (HARMONY, XML, GLM, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_31, KIMI, HERMES, MISTRAL, LLAMA)


def form_of(template: ChatTemplate | None) -> CallForm:
    sources = {} if template is None else template.sources
    source = sources.get("tool_use") or sources.get("default") or ""
    if not re.search(r"\btools\b", source):
        raise UsageError("the model's chat template takes no tools", "ask without tools, or another model")
    for form in FORMS:
        if all(sign in source for sign in form.signs):
            return form
    if re.search(r"""["']parameters["'] *:""", source):
        return LLAMA
    raise UsageError(
        "the model's chat template has a form of calls that is not known; known are those of "
        f"{', '.join(form.name for form in FORMS)}",
        "ask without tools, or another model",
    )


def check_tools(tools: Sequence[Any]) -> list[Tool]:
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
    """Return the tools that a request's `tool_choice` allows, and whether the model must call one."""
    if choice is None or choice == "auto":
        return list(tools), False
    if choice == "none":
        return [], False
    if not tools:
        raise UsageError("tool_choice asks for a call, and there are no tools", "give tools, or no tool_choice")
    if choice == "required":
        return list(tools), True
    allowed: Any = [choice]
    must = True
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice = choice.get("allowed_tools", choice)  # an object of its own in chat completions, not in responses
        mode, allowed = (choice.get("mode"), choice.get("tools")) if isinstance(choice, Mapping) else (None, None)
        if mode not in ("auto", "required") or not isinstance(allowed, list):
            raise UsageError(
                "tool_choice.allowed_tools has no mode, or no tools", "mode: auto or required; tools: [...]"
            )
        must = mode == "required"
    names = [_chosen(one) for one in allowed]
    if not names or not {*map(_name, tools)}.issuperset(names):
        raise UsageError(
            f"tool_choice is {str(choice)[:80]!r}",
            f"use none, auto, required, or name one of: {', '.join(map(_name, tools))}",
        )
    return [tool for tool in tools if _name(tool) in names], must


def _chosen(choice: Any) -> str | None:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def calls_grammar(form: CallForm, tools: Sequence[Tool], tokenizer: Tokenizer, *, parallel: bool = True) -> Grammar:
    """Return the grammar of an answer that consists of tool calls, as the model's chat template writes them.

    Keywords of a tool's JSON schema that are not supported are ignored, unless the tool is strict. If the model writes
    arguments in tags, the grammar restricts their texts only by `enum` and `maxLength`, and forbids "</" in them.
    """

    def written(text: str) -> str:
        return _terminals(text, tokenizer)

    between = "one" if form.between is None or not parallel else f"one ({written(form.between)} one)*"
    lines = [
        f"start: {written(form.begin)} {between} {written(form.end)}",
        "one: " + " | ".join(f"call{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        before = written(form.before.replace("NAME", _name(tool)))
        lines.append(f"call{i}: {before} arguments{i} {written(form.after)}")
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object"}
        options = json_options(lenient=not function.get("strict"))
        if form.parameter:
            lines += _tagged(f"arguments{i}", schema, form.parameter, written, options)
        else:
            lines.append(f"arguments{i}: %json {json_text({**schema, 'x-guidance': options})}")
    return Grammar("lark", "\n".join(lines))


def _tagged(
    rule: str, schema: Mapping[str, Any], parameter: str, written: Callable[[str], str], options: Mapping[str, Any]
) -> list[str]:
    properties = schema.get("properties")
    required = schema.get("required") or ()
    lines, parts = [], []
    for i, (key, own) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
        own = own if isinstance(own, Mapping) else {}
        before, _, after = parameter.replace("KEY", key).partition("VALUE")
        texts = own.get("enum") if own.get("type") == "string" else None
        value = " | ".join(_literal(x) for x in texts if isinstance(x, str)) if isinstance(texts, list) else ""
        if not value and own.get("type") == "string":
            longest = own.get("maxLength")
            value = f"/[^<]{{0,{longest}}}/" if type(longest) is int and longest >= 0 else r"/[^<]*(<[^\/][^<]*)*/"
        elif not value:
            defined = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            value = f"%json {json_text({**own, **defined, 'x-guidance': options})}"
        lines += [f"{rule}_{i}: {written(before)} {rule}_{i}_value {written(after)}", f"{rule}_{i}_value: {value}"]
        parts.append(f"{rule}_{i}{'' if key in required else '?'}")
    return [f"{rule}: {' '.join(parts) or _literal('')}", *lines]


def _terminals(text: str, tokenizer: Tokenizer) -> str:
    parts = []
    for part in re.split(f"({_MARKER.pattern})", text):
        token = tokenizer.token_id(part)
        if part:
            special = token is not None and token in tokenizer.special_ids
            parts.append(f"<[{token}]>" if special else _literal(part))
    return " ".join(parts)


def _properties(tool: Tool) -> Mapping[str, Any]:
    parameters = tool["function"].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _literal(text: str) -> str:
    return json.dumps(text)


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])
