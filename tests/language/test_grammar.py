"""Tests of answers that follow a grammar, and of hostile grammars that must not harm the process."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from benchmarks.speed.grammars import SMALL, draw, random_schema
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import EnvironmentProblem, KvexportError, UsageError
from kvexport.language import grammar as module
from kvexport.language.grammar import Constraint, Grammar, Grammars
from kvexport.language.sampling import Sampler
from kvexport.language.settings import GenerationSettings
from kvexport.language.tokenizer import Tokenizer
from tests.language.test_top_logits import top_of
from tests.support.answers import answers
from tests.support.tokenizers import FAMILIES, tokenizer_of

EOS = (2,)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(SMALL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size + 3)  # logits longer than the vocabulary


@pytest.mark.parametrize("seed", range(20))
def test_answers_under_a_schema_are_valid(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    schema = random_schema(np.random.default_rng(seed))
    for i in range(5):
        constraint = grammars.start(Grammar.json_schema(schema), EOS)
        options = {"do_sample": bool(i % 2), "top_k": 0, "repetition_penalty": 1.1 if i > 2 else 1.0}
        _, text, reason = draw(constraint, tokenizer, grammars.vocabulary, EOS, 100 * seed + i, **options)
        assert reason == "stop"
        jsonschema.validate(json.loads(text), schema)


def test_a_regular_expression_holds_for_the_whole_answer(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        constraint = grammars.start(Grammar("regex", "(yes|no), [a-z]{3,9}!?"), EOS)
        text = draw(constraint, tokenizer, grammars.vocabulary, EOS, seed)[1]
        assert re.fullmatch("(yes|no), [a-z]{3,9}!?", text)


def test_a_lark_grammar_holds(grammars: Grammars, tokenizer: Tokenizer) -> None:
    source = 'start: term (("+" | "*") term)+\nterm: /[1-9][0-9]?/ | "(" start ")"'
    for seed in range(5):
        constraint = grammars.start(Grammar("lark", source), EOS)
        ids, text, _ = draw(constraint, tokenizer, grammars.vocabulary, EOS, seed, logit_bias={2: 50.0})
        assert eval(text) > -1
        assert ids[-1] == 2
        assert 2 not in ids[:-1]


def test_any_object(grammars: Grammars, tokenizer: Tokenizer) -> None:
    close = {i: 4.0 for i in range(4096) if '"' in tokenizer.decode([i]) or "}" in tokenizer.decode([i])}
    constraint = grammars.start(Grammar.json_object(), EOS)
    assert isinstance(json.loads(draw(constraint, tokenizer, grammars.vocabulary, EOS, 1, logit_bias=close)[1]), dict)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_of(request.param)


TEAM: dict[str, Any] = {
    "type": "object",
    "properties": {"team": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["team", "n"],
    "additionalProperties": False,
}


def test_a_tokenizer_of_every_family_can_write_what_a_grammar_forces(family: Tokenizer) -> None:
    grammars = Grammars(family, family.vocab_size)
    anchor = family.encode("x")
    for seed in range(10):
        for grammar, check in (
            (Grammar.json_schema(TEAM), lambda text: jsonschema.validate(json.loads(text), TEAM)),
            (Grammar("regex", "yes|no"), lambda text: {"yes", "no"}.__contains__(text) or pytest.fail(text)),
        ):
            ids, _, reason = draw(grammars.start(grammar, EOS), family, family.vocab_size, EOS, seed)
            assert reason == "stop"
            check(family.decode([*anchor, *ids]).removeprefix(family.decode(anchor)))


def test_a_text_within_another_gets_no_space_before_it(family: Tokenizer) -> None:
    anchor = family.encode("x")
    for text in ("no", " no", '{"team": "', "\n\n  x", "\u00e9\u4e2d\U0001f600"):
        within = family.encode_within(text)
        assert b"".join(family.token_bytes[i] for i in within) == text.encode()
        assert family.decode([*anchor, *within]) == family.decode(anchor) + text


def test_an_eos_is_allowed_exactly_where_the_answer_may_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    row = np.zeros(grammars.vocabulary, dtype=np.float32)
    row[2] = 10.0
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    sampler = Sampler(
        GenerationSettings(eos_token_ids=EOS), [1], row.size, grammars.start(Grammar("regex", "(aa)*b?"), EOS)
    )
    assert sampler.next(row) == 2
    assert sampler.finish_reason == "stop"
    constraint = grammars.start(Grammar("regex", "aab?"), EOS)
    sampler = Sampler(GenerationSettings(eos_token_ids=EOS), [1], row.size, constraint)
    forced = row.copy()
    forced[a] = 5.0
    assert [sampler.next(forced), sampler.next(forced), sampler.next(forced)] == [a, a, 2]
    # An answer that nothing can follow ends without an eos.
    sampler = Sampler(GenerationSettings(), [1], row.size, grammars.start(Grammar("regex", "a"), EOS))
    assert [sampler.next(row), sampler.finish_reason] == [a, "stop"]


def test_no_token_beyond_the_tokenizer_is_allowed(grammars: Grammars) -> None:
    mask = grammars.start(Grammar("regex", "(.|\n)*"), EOS).mask()
    assert mask.shape == (4099,)
    assert mask[2]
    assert mask.sum() > 3000
    assert not mask[-3:].any()
    assert not mask[[0, 1, 3]].any()  # other special tokens


@pytest.mark.parametrize("count", [1, 64, 1000])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 0, "top_p": 0.5, "seed": 0}])
def test_the_largest_logits_settle_the_same_tokens(grammars: Grammars, options: Any, count: int) -> None:
    settings, grammar = GenerationSettings(**options), Grammar("regex", "([a-z]{1,9} ){4,9}")
    row, narrow = (Sampler(settings, [1], grammars.vocabulary, grammars.start(grammar, EOS)) for _ in range(2))
    random, settled = np.random.default_rng(0), 0
    while row.finish_reason is None:
        logits = (random.standard_normal(grammars.vocabulary) * 4).astype(np.float32)
        token = narrow.next_of(top_of(logits, count))
        settled += token is not None
        assert (narrow.next(logits) if token is None else token) == row.next(logits)
    assert narrow.finish_reason == "stop"
    assert settled >= (0 if count == 1 else 4)


def test_a_sequence_continues_from_its_state(grammars: Grammars) -> None:
    grammar, sampling = Grammar("regex", "[a-f]{30}"), GenerationSettings(do_sample=True, seed=1)
    rows = np.random.default_rng(0).standard_normal((60, grammars.vocabulary)).astype(np.float32)
    whole = Sampler(sampling, [1], grammars.vocabulary, grammars.start(grammar, EOS))
    for row in rows[:5]:
        whole.next(row)
    restored = Sampler(sampling, [1], grammars.vocabulary, grammars.start(grammar, EOS))
    restored.restore(whole.state())
    for row in rows[5:]:
        if whole.finish_reason is None:
            assert restored.next(row) == whole.next(row)
    assert restored.finish_reason == whole.finish_reason == "stop"
    other = Sampler(sampling, [1], grammars.vocabulary, grammars.start(Grammar("regex", "[0-9]+"), EOS))
    with pytest.raises(KvexportError, match="does not allow the token"):
        other.restore(whole.state())


def test_a_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("regex", "once")
    first = grammars.start(grammar, EOS)
    monkeypatch.setattr(module, "_try", lambda text: pytest.fail("compiled again"))
    monkeypatch.setattr(module, "_Tokens", lambda *_: pytest.fail("the tokenizer is wrapped again"))
    second = grammars.start(grammar, [*EOS, 5, grammars.vocabulary])
    first.accept(int(np.flatnonzero(first.mask())[0]))
    assert second.mask().sum() == grammars.start(grammar, EOS).mask().sum()


def test_any_token_may_end_a_text_where_the_grammar_may_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    (stop,) = tokenizer.encode("b", add_special_tokens=False)
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    constraint = grammars.start(Grammar("regex", "[ab]a*"), [stop, 2])
    assert not constraint.mask()[[stop, 2]].any() and constraint.mask()[letter]
    constraint.accept(letter)
    assert constraint.mask()[[stop, 2, letter]].all() and not constraint.finished
    constraint.accept(stop)
    assert constraint.finished


def chain(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"type": "string"}}}


HOSTILE = {
    "an overflow of the stack": (lambda: Grammar.json_schema(chain(4000)), "nested too deep"),
    "another": (
        lambda: Grammar("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "a"'),
        "nested too deep",
    ),
    "hours of compiling": (lambda: Grammar.json_schema({"type": "integer", "multipleOf": 16777213}), "too long, or"),
    "nested": (lambda: Grammar("lark", "start: " + "(" * 9000 + '"a"' + ")" * 9000), "nested"),
    "nested JSON": (lambda: Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "recursion limit"),
    "nested Python": (lambda: Grammar.json_schema(nested(100_000)), "no JSON"),
    "doubling": (
        lambda: Grammar("lark", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(30)) + 'R30: "a"'),
        "too big",
    ),
    "long": (lambda: Grammar("regex", "a" * 300_000), "300000 characters"),
    "empty": (lambda: Grammar("regex", "  "), "2 characters"),
    "no regex": (lambda: Grammar("regex", "(a"), "unclosed group"),
    "look-around": (lambda: Grammar("regex", "(?=a)b"), "look-around"),
    "no rule": (lambda: Grammar("lark", "start: other"), "unknown name"),
    "no type": (lambda: Grammar.json_schema({"type": "objekt"}), "objekt"),
    "not covered": (lambda: Grammar.json_schema({"uniqueItems": True, "contains": {}}), "uniqueItems"),
    "unsatisfiable": (lambda: Grammar.json_schema({"enum": []}), "Unsatisfiable"),
    "elsewhere": (lambda: Grammar.json_schema({"$ref": "http://127.0.0.1:1/s.json"}), "does not fetch"),
    "no schema": (lambda: Grammar.json_schema([1]), "found list"),  # type: ignore[arg-type]
    "no number": (lambda: Grammar.json_schema({"const": float("nan")}), "no JSON"),
    "no kind": (lambda: Grammar("bnf", "a"), "kind of the grammar is 'bnf'"),  # type: ignore[arg-type]
}  # fmt: skip


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_cannot_be_used_is_refused_and_ends_nothing_else(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, named = HOSTILE[name]
    monkeypatch.setattr(module, "_COMPILE_SECONDS", 1)
    with pytest.raises(UsageError) as caught:
        grammars.start(make(), EOS)
    assert named in caught.value.problem
    assert caught.value.fix
    assert len(str(caught.value)) < 700


def test_keywords_that_cannot_be_kept_to_are_ignored_on_request(grammars: Grammars) -> None:
    grammars.start(Grammar.json_schema({"type": "array", "uniqueItems": True}, lenient=True), EOS)


def test_a_grammar_that_takes_long_ends_its_sequence(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    constraint = grammars.start(Grammar("regex", "[a-z]{9}"), EOS)
    constraint.mask()  # fast enough
    monkeypatch.setattr(module, "_SLOW", 0.0)
    slow = Sampler(GenerationSettings(), [1], grammars.vocabulary, grammars.start(Grammar("regex", "[a-z]{9}"), EOS))
    with pytest.raises(UsageError, match="ms a token"):
        slow.next(np.zeros(grammars.vocabulary, dtype=np.float32))


def test_a_grammar_that_grows_too_large_is_an_error_of_its_sequence(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.start(Grammar("regex", r"(\p{L}{1,200}|\d{1,200}x){1,200}"), EOS)
    with pytest.raises(UsageError, match=r"cannot be followed|ms a token"):
        draw(constraint, tokenizer, grammars.vocabulary, EOS, 0)


def test_grammars_require_llguidance_and_a_tokenizer(
    tokenizer: Tokenizer, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        Grammars(None, 10).start(Grammar("regex", "a"), EOS)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EnvironmentProblem, match=r"kvexport\[serve\]"):
        Grammars(tokenizer, 4096).start(Grammar("regex", "a"), EOS)


def test_an_engine_keeps_each_answer_to_its_own_form(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    plain = engine.generate(["abc"], max_new_tokens=12)[0].token_ids
    requests = [
        Request("abc", engine.settings(max_new_tokens=12)),
        Request("abc", engine.settings(grammar=Grammar("regex", "(ab|ba){5}"))),
        Request("abc", engine.settings(grammar=Grammar("regex", "x+"), max_new_tokens=7)),
    ]
    answers(engine, *requests)
    texts = ["".join(token.text for token in request.tokens) for request in requests]
    assert [token.id for token in requests[0].tokens] == plain
    assert re.fullmatch("(ab|ba){5}", texts[1])
    assert texts[2] == "x" * 7
    assert [request.finish_reason for request in requests[1:]] == ["stop", "length"]
    with pytest.raises(UsageError, match="unclosed group"):
        engine.add(Request("abc", engine.settings(grammar=Grammar("regex", "(x"))))
    assert not engine.busy


def test_a_constraint_names_the_token_that_it_refuses(grammars: Grammars) -> None:
    constraint: Constraint = grammars.start(Grammar("regex", "a"), EOS)
    with pytest.raises(KvexportError, match="does not allow the token 2"):
        constraint.accept(2)
