"""Tests of chat templates: they give the same text and tokens as in transformers, and errors name the line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.engine.load import load
from kvexport.errors import ArtifactError, UsageError
from kvexport.export.build import build
from kvexport.language.chat import ChatTemplate, read_chat_template
from kvexport.recipe.load import load_recipe
from tests.support import smollm2
from tests.support.command_line import failure, run

TEMPLATES = sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "  Be brief.\n"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a city <now> & "later"',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Städte"},
                "days": {"type": "integer"},
                "unit": {"type": ["string", "null"], "enum": ["K", "°C"]},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "mean": 1.5, "now": True}},
}
RESULT = {"role": "tool", "name": "get_weather", "content": '{"t": 3}', "tool_call_id": "abcdefghi"}
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one": ([user("Hi <b> & \"q\" 'x' {{ no }} {% nor %}")], {}),
    "system": ([SYSTEM, user(" Hi \n")], {}),
    "turns": ([SYSTEM, user("a"), assistant(" b "), user("c"), assistant("d <think>x</think>\n\ny"), user("e")], {}),
    "to be continued": ([user("a"), assistant("b")], {"add_generation_prompt": False}),
    "tools": ([SYSTEM, user("Weather?")], {"tools": [TOOL, TOOL]}),
    "a tool's turn": (
        [user("Weather?"), assistant("", tool_calls=[CALL]), RESULT, assistant("Cold."), user("Sure?")],
        {"tools": [TOOL]},
    ),
    "reasoning": ([user("a"), assistant("b", reasoning="because", name=None), user("c"), assistant("d")], {}),
    "variables": ([user("a")], {"enable_thinking": False, "date_string": "1 May 2026"}),
    "parts": ([user([{"type": "text", "text": "in parts"}])], {}),
    "roles in disorder": ([assistant("first"), assistant("second")], {}),
    "four emojis": ([user("👩‍👩‍👧 naïve 日本語"), assistant("…"), user("\t\x0b\u00a0end\u2028")], {}),
}


def by_transformers(source: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """Return the text that transformers' `apply_chat_template` renders, or None if the template raises."""
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    options = {"add_generation_prompt": True, **options}
    try:
        rendered: str = render_jinja_template(conversations=[present], chat_template=source, **TOKENS, **options)[0][0]
    except Exception:  # jinja2's own errors, and TypeError from sums within a template
        return None
    return rendered


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_public_templates_render_as_transformers_renders_them(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    template, rendered = ChatTemplate({"default": source}, TOKENS, path.name), 0
    for name, (messages, options) in CASES.items():
        expected = by_transformers(source, messages, options)
        if expected is None:
            with pytest.raises(UsageError, match=r"the chat template (refuses|cannot be rendered)"):
                template.render(messages, **options)
        else:
            assert template.render(messages, **options) == expected, name
            rendered += 1
    assert rendered >= 6


def test_there_are_templates_of_fifteen_kinds() -> None:
    assert len(TEMPLATES) >= 15


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(a=0, b=[]) %}{% for x in [1, 2] %}{% set ns.a = ns.a + x %}"
        "{% set ns.b = ns.b + [x] %}{% endfor %}{{ ns.a }} {{ ns.b }}",
        "{{ messages[::-1]|map(attribute='role')|join }} {{ messages[1:]|length }} {{ messages[-1].content[::-1] }}",
        "{{ true }} {{ false ~ '' }} {{ [1, 'a', true, {'k': 'v'}] }} {{ {'k': [1.5]} }} {{ true|string }}",
        "{{ nothing }}|{{ messages[0].nothing }}|{{ nothing is defined }}|{{ 1 if false }}|{{ nothing|default('d') }}",
        "{{ none is iterable }} {{ 'a' is sequence }} {{ {} is sequence }} {{ 1 is iterable }} {{ true is number }}",
        "{{ {'ü': ['<&>', 1.5, none]}|tojson }} {{ [1, 2]|tojson(separators=(',', ':')) }} "
        "{{ {'b': 1, 'a': [2]}|tojson(indent=2, sort_keys=true) }} {{ 'ü'|tojson(ensure_ascii=true) }}",
        "{{ 'a,b,c'.split(',', 1)[1] }} {{ ' a '.strip() }} {{ 'abc'.endswith('c') }} {{ 'aBc'.title() }} "
        "{{ 'abc'.replace('b', '') }} {{ '{} {}'.format(1, 'a') }} {{ 'abc'.find('c') }} {{ '-'.join(['a', 'b']) }}",
        "{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %} {{ {'a': 1}.get('b', 2) }}",
        "{% generation %}{% set inside = 1 %}said{% endgeneration %}{{ inside is defined }}"
        "x {%- generation -%}  y  {%- endgeneration %}\nz",
        "  {% if true %}\n    a\n  {% endif %}\n{# no #}\nb\n\n",
        "{% raw %}{{ raw }}{% endraw %} {{ '<b>'|e }} {{ '<b>' }}",
        "{% macro f(x, y='d') %}[{{ x }}{{ y }}]{% endmacro %}{{ f(1) }}{{ f(2, y='e') }}",
        "{{ strftime_now('%Y') }} {{ range(3)|list }} {{ 7 // 2 }} {{ 2 ** 3 }} {{ 7 % 3 }} {{ 'a' * 3 }}",
    ],
)  # fmt: skip
def test_templates_render_as_in_transformers(source: str) -> None:
    messages = [user("hi"), assistant("yo", n=1.0)]
    expected = by_transformers(source, messages, {})
    assert expected is not None
    assert ChatTemplate({"default": source}, TOKENS, "here").render(messages) == expected


def test_the_line_of_an_error_is_named() -> None:
    template = ChatTemplate({"default": "a\nb\n{{ messages[0].none.such }}"}, {}, "FILE")
    with pytest.raises(UsageError, match=r"\(FILE, line 3\)") as caught:
        template.render([user("x")])
    assert "--no-chat" in caught.value.fix
    with pytest.raises(UsageError, match="line 2"):
        ChatTemplate({"default": "a\n{% if %}"}, {}, "FILE").render([user("x")])
    with pytest.raises(UsageError, match="refuses these messages: roles must alternate"):
        ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"}, {}, "F").render([user("x")])


def test_a_template_that_does_not_end_is_ended() -> None:
    rounds = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UsageError, match="fuel"):
        ChatTemplate({"default": rounds}, {}, "F").render([user("x")])


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.__class__ }}", "{{ raise_exception.__globals__ }}",
     "{{ messages.__reduce__() }}", "{{ messages[0]['__init__'] }}", "{{ file.unlink() }}", "{{ file.parent }}"],
)  # fmt: skip
def test_python_is_out_of_a_templates_reach(source: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    try:
        text = ChatTemplate({"default": source}, {}, "F").render([user("x")], file=tmp_path / "file")
    except UsageError:
        text = ""
    assert text == "" and (tmp_path / "file").exists()


def test_a_template_changes_only_its_own_copies() -> None:
    messages, tools = [user("x")], [{"a": [1]}]
    source = "{{ messages[0].pop('role') }}{{ messages.append(1) }}{{ tools[0].a.append(2) }}{{ tools }}"
    assert ChatTemplate({"default": source}, {}, "F").render(messages, tools) == "user[{'a': [1, 2]}]"
    assert (messages, tools) == ([user("x")], [{"a": [1]}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [([], "found none"), ("hello", "found str"), ({"role": "user"}, "found dict"), ([{"content": "a"}], "message 0"),
     ([user("a"), "b"], "message 1"), ([{"role": 3}], "message 0")],
)  # fmt: skip
def test_invalid_conversations_are_named(messages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        ChatTemplate({"default": "x"}, {}, "F").render(messages)
    assert '"role": "user"' in caught.value.fix


def test_templates_and_tokens_are_read_from_all_files_of_checkpoints(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    bos = {"content": "<s>", "lstrip": False}
    config: dict[str, Any] = {"bos_token": bos, "eos_token": "</s>", "pad_token": None, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_template(tmp_path) is None
    listed = [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": listed}))
    template = read_chat_template(tmp_path)
    assert template is not None and template.tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (template.render([user("x")]), template.render([user("x")], [TOOL])) == ("D<s>", "T")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "old", "cls_token": "[CLS]"}')
    (tmp_path / "chat_template.jinja").write_text("J{{ bos_token }}{{ cls_token }}")
    template = read_chat_template(tmp_path)
    assert template is not None and template.render([user("x")]) == "J<s>[CLS]"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ArtifactError, match="is not JSON"):
        read_chat_template(tmp_path)
    only = ChatTemplate({"rag": "R"}, {}, "F")
    with pytest.raises(UsageError, match="rag, none of them the default"):
        only.render([user("x")])


@pytest.fixture(scope="module")
def chat_artifact(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny artifact, whose tokens are characters, with a template in its tokenizer's configuration."""
    out = tmp_path_factory.mktemp("chat") / "artifact"
    shutil.copytree(tiny_artifact, out)
    template = (
        "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    (out / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write_manifest(out, load_manifest(tiny_artifact).to_json())
    return out


def test_an_engine_answers_a_conversation(tiny_artifact: Path, chat_artifact: Path) -> None:
    engine = load(chat_artifact)
    messages = [{"role": "system", "content": "x"}, user("Hello"), assistant("yes"), user("then")]
    expected = engine.generate("sxuHelloayesuthena", max_new_tokens=8)[0]
    assert engine.chat(messages, max_new_tokens=8) == expected
    assert (
        engine.encode_chat(messages, add_generation_prompt=False).tolist()
        == engine.encode("sxuHelloayesuthen").tolist()
    )
    with pytest.raises(UsageError, match="has no chat template"):
        load(tiny_artifact).chat(messages)


def test_generate_sends_a_plain_prompt_as_a_message_with_a_note(chat_artifact: Path, tmp_path: Path) -> None:
    def ids(*arguments: object, **options: Any) -> tuple[list[int], str]:
        result = run("generate", chat_artifact, "--json", "--max-new-tokens", 6, *arguments, **options)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["token_ids"], result.stderr

    engine = load(chat_artifact)
    plain, put, system = (
        engine.generate(text, max_new_tokens=6)[0].token_ids for text in ("Hello", "uHelloa", "sbeuHelloa")
    )
    assert len({tuple(plain), tuple(put), tuple(system)}) == 3
    chatting, stderr = ids("Hello")
    assert chatting == put and "chat template" in stderr and "--no-chat" in stderr
    for arguments, expected in (
        (["Hello", "--no-chat"], plain), (["Hello", "--chat"], put), (["Hello", "--system", "be"], system)
    ):  # fmt: skip
        ids_given, stderr = ids(*arguments)
        assert ids_given == expected and "chat template" not in stderr
    (tmp_path / "prompt").write_text("Hello")
    assert ids("--prompt-file", tmp_path / "prompt")[0] == ids("-", input="Hello")[0] == plain
    assert ids("--prompt-file", tmp_path / "prompt", "--chat")[0] == ids("-", "--chat", input="Hello")[0] == put
    for wrong in (
        ["--token-ids", "1", "--chat"],
        ["--token-ids", "1", "--system", "x"],
        ["a", "--no-chat", "--system", "x"],
    ):
        assert "leave out" in failure(2, "generate", chat_artifact, *wrong)


def test_chat_without_a_template_is_refused(tiny_artifact: Path) -> None:
    assert "has no chat template" in failure(2, "generate", tiny_artifact, "abc", "--chat")
    assert "chat template" not in run("generate", tiny_artifact, "abc", "--max-new-tokens", 1).stderr


# The real model.


@pytest.fixture(scope="module")
def real_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    smollm2.checkpoint()
    recipe = load_recipe("smollm2-135m-keepkv", ["limits.max_length=2048", "limits.max_batch=2"]).recipe
    return build(recipe, tmp_path_factory.mktemp("smollm2") / "artifact")


def test_smollm2_knows_the_capital_of_france(real_artifact: Path) -> None:
    """SmolLM2 knows the capital of France, on the command line and with transformers' own ids of the prompt."""
    result = run("generate", real_artifact, "What is the capital of France?")
    assert result.stdout == "The capital of France is Paris.\n"
    assert "chat template" in result.stderr


def test_smollm2_gets_the_ids_that_transformers_gives_it(real_artifact: Path) -> None:
    from transformers import AutoTokenizer

    reference, engine = AutoTokenizer.from_pretrained(smollm2.checkpoint()), load(real_artifact)
    for messages, options in CASES.values():
        if all(isinstance(message["content"], str) for message in messages):
            expected = reference.apply_chat_template(messages, **{"add_generation_prompt": True, **options})[
                "input_ids"
            ]
            assert engine.encode_chat(messages, **options).tolist() == expected


def test_smollm2_answers_as_transformers_does_while_its_cache_holds_everything(real_artifact: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    engine = load(real_artifact)
    messages = [SYSTEM, user("List three fruits, and say why you like them.")]
    ids = engine.encode_chat(messages)
    model = AutoModelForCausalLM.from_pretrained(smollm2.checkpoint())
    expected = model.generate(torch.tensor(ids[None]), max_new_tokens=32, do_sample=False)[0, len(ids) :].tolist()
    assert engine.chat(messages, max_new_tokens=32).token_ids == expected


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a\n\nb' | indent }}", "a\n\n    b"),
        ("{{ 'a\nb' | indent(2, true) }}", "  a\n  b"),
        ("{{ '%s-%03d' | format('a', 7) }}", "a-007"),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}", "[[1, 2], [3, 0]]"),
        ("{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3]]"),
        ("{{ [1, 2, 3] | slice(2, 0) | list }}", "[[1, 2], [3, 0]]"),
    ],
)
def test_filters_with_a_count_are_those_of_jinja(source: str, text: str) -> None:
    import jinja2

    template = jinja2.Environment().from_string(source)
    assert template.render() == text
    assert ChatTemplate({"default": source}, {}, "here").render([{"role": "user", "content": "a"}]) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%10000000000s' | format('a') }}",
        "{{ '%*d' | format(10000000000, 1) }}",
        "{{ 'a' | indent(10000000000) }}",
        "{{ [1] | slice(10000000000) | list }}",
        "{{ [1] | batch(10000000000, 0) | list }}",
        "{{ [1] | tojson(indent=10000000000) }}",
        "{{ 'a' * 10000000000 }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_asks_for_too_much_is_an_error_of_its_request(source: str) -> None:
    with pytest.raises(UsageError, match="the chat template cannot be rendered"):
        ChatTemplate({"default": source}, {}, "here").render([{"role": "user", "content": "a"}])


def test_a_text_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvexport.language.chat._LONGEST", 100)
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {}, "here")
    assert len(template.render([{"role": "user", "content": "a" * 100}])) == 100
    with pytest.raises(UsageError, match="larger than 100 characters"):
        template.render([{"role": "user", "content": "a" * 101}])


def rendered(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
    return ChatTemplate({"default": source}, {}, "x").render(messages, **more)


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}|{% endfor %}"
)
TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ 'call ' + c.function.arguments }}"
    "{% endfor %}{% endfor %}"
)
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FIRST_SYSTEM = (
    "{{ messages[0].content }}{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)


def test_a_template_over_parts_gets_parts() -> None:
    assert rendered(PARTS, [SYSTEM, user("Hi")]) == "system:  Be brief.\n|user:Hi|"
    assert rendered(PARTS, [user([{"type": "text", "text": "Hi"}])]) == "user:Hi|"
    assert rendered(TURNS, [user("Hi")]) == "[user]Hi[end][assistant]"


def test_a_template_that_concatenates_arguments_gets_a_text() -> None:
    messages = [user("a"), assistant("", tool_calls=[CALL])]
    arguments = '{"city": "Z\u00fcrich", "days": 2, "mean": 1.5, "now": true}'
    assert rendered(CALLS, messages) == f"acall {arguments}"
    printed = CALLS.replace("{{ 'call ' + c.function.arguments }}", "call {{ c.function.arguments }}")
    assert rendered(printed, messages) == f"acall {arguments}"
    as_json = printed.replace("arguments }}", "arguments | tojson }}")
    assert rendered(as_json, messages) == f"acall {arguments}"


@pytest.mark.parametrize("source", [ONE_SYSTEM, FIRST_SYSTEM], ids=["refused", "dropped"])
def test_two_system_messages_become_one_where_the_template_knows_one(source: str) -> None:
    first, second = ({"role": "system", "content": text} for text in ("Be brief.", "Be kind."))
    for messages in ([first, second, user("Hi")], [first, user("Hi"), second]):
        assert rendered(source, messages).endswith("Be brief.\n\nBe kind.[user]Hi")
    assert rendered(TURNS, [first, second]) == "[system]Be brief.[end][system]Be kind.[end][assistant]"


def test_the_last_message_is_continued() -> None:
    messages = [user("Hi"), assistant("Well, I ")]
    assert rendered(TURNS, messages, continue_final_message=True) == "[user]Hi[end][assistant]Well, I "
    assert rendered(PARTS, messages, continue_final_message=True) == "user:Hi|assistant:Well, I "
    assert rendered(TURNS, messages).endswith("Well, I[end][assistant]")
    with pytest.raises(UsageError, match="needs a last message of the assistant"):
        rendered(TURNS, [user("Hi")], continue_final_message=True)
    with pytest.raises(UsageError, match="does not show the last message"):
        rendered("{{ messages[0].content }}", messages, continue_final_message=True)
