"""Constrained decoding: a JSON schema, a regular expression or a Lark grammar decides which tokens may come next.

llguidance computes the masks of allowed tokens. A grammar comes from a client and is not trusted: its size is bounded,
a separate process compiles it first (`grammar_trial.py`), and a sequence whose grammar takes too long ends with an
error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvexport.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    import llguidance

    from kvexport.language.tokenizer import Tokenizer

Kind = Literal["json_schema", "regex", "lark"]

MOST_CHARACTERS = 256 * 1024
_MOST_GBNF = 16 * 1024  # which llguidance converts in 0.2 s, in Python
# llguidance's own limits allow seconds a token. These limits allow some hundred milliseconds, once, before it gives up.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_COMPILE_SECONDS, _COMPILE_BYTES = 3, 2 << 30
_TRIAL_SECONDS = 30  # by the clock: the process that compiles yields to others
_SLOW, _PATIENCE = 0.02, 1.0  # seconds of a token, and of all tokens of a sequence before that counts
_KEPT = 64
# A new line and its indentation, or some spaces: a model that only ever adds white space would not end otherwise.
_WHITESPACE = r"\n?[ \t]{0,40}"
_INSTALL = "pip install 'kvexport[serve]'"


@dataclass(frozen=True)
class Grammar:
    """The grammar that a model's answer must follow: a JSON schema, a regular expression or a Lark grammar.

    Attributes:
        kind: The language of `source`: "json_schema", "regex" or "lark".
        source: The JSON text of a schema; a regular expression in Rust's syntax (no look-around, no back references),
            which the whole answer must match; or a grammar in llguidance's dialect of Lark.

    Raises:
        UsageError: The kind is unknown, or the source is empty, longer than 256 Ki characters or no text.
    """

    kind: Kind
    source: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or not isinstance(self.source, str):
            raise UsageError(f"the kind of the grammar is {self.kind!r}", f"use one of: {', '.join(get_args(Kind))}")
        if not self.source.strip() or len(self.source) > MOST_CHARACTERS:
            raise UsageError(
                f"the {self.kind} has {len(self.source)} characters",
                f"give one of 1 to {MOST_CHARACTERS} characters",
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, lenient: bool = False) -> Grammar:
        """Return the grammar of the JSON texts that a schema allows.

        Args:
            schema: The JSON schema.
            lenient: Whether keywords that cannot be enforced are ignored. Otherwise they are refused when the grammar
                is compiled.

        Raises:
            UsageError: The schema is no JSON object.
        """
        if not isinstance(schema, Mapping):
            raise UsageError(f"a JSON schema is an object, found {type(schema).__name__}", 'pass {"type": ...}')
        return cls("json_schema", json_text({**schema, "x-guidance": json_options(lenient=lenient)}))

    @classmethod
    def json_object(cls) -> Grammar:
        return cls.json_schema({"type": "object"})


def json_text(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the schema is no JSON: {error}", "pass objects, lists, texts and numbers") from error


def json_options(*, lenient: bool) -> dict[str, Any]:
    """Return llguidance's options for a JSON schema, which go into the schema under the key `x-guidance`."""
    return {"whitespace_pattern": _WHITESPACE, "lenient": lenient}


def gbnf(text: str) -> Grammar:
    if len(text) > _MOST_GBNF:
        raise UsageError(f"the grammar in GBNF has {len(text)} characters", f"give at most {_MOST_GBNF}, or Lark")
    try:
        return Grammar("lark", _import().gbnf_to_lark.gbnf_to_lark(text))
    except Exception as error:  # llguidance raises plain Exception, and what Python raises at the end of a text
        raise UsageError(f"this is no grammar in GBNF: {str(error)[:200]}", "begin with: root ::= ...") from error


class Constraint:
    """The progress of one generated sequence through its grammar, for constrained decoding."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ends, self._ended = [i for i in ends if i < vocabulary], False
        self._mask: npt.NDArray[np.bool_] | None = None
        self._seconds, self._masks = 0.0, 0

    @property
    def finished(self) -> bool:
        return self._ended or bool(self._matcher.is_stopped())

    def mask(self) -> npt.NDArray[np.bool_]:
        if self._mask is None:
            start = time.thread_time()
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._seconds += time.thread_time() - start
            self._masks += 1
            self._check()
            self._mask = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)
            self._mask[self._ends] = self._matcher.is_accepting()
        return self._mask

    def accept(self, token: int) -> None:
        self._mask = None
        if token in self._ends and self._matcher.is_accepting():
            self._ended = True
        elif not self._matcher.consume_token(token):
            raise UsageError(
                f"the grammar does not allow the token {token}: {_first_line(self._matcher)}",
                "give a grammar of text that the tokenizer can write",
            )

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(
                f"the grammar cannot be followed any further: {_first_line(self._matcher)}", "give a simpler grammar"
            )
        if self._seconds > _PATIENCE and self._seconds > _SLOW * self._masks:
            raise UsageError(
                f"the grammar takes {self._seconds / self._masks * 1e3:.0f} ms a token, more than {_SLOW * 1e3:.0f}",
                "give a simpler grammar: fewer alternatives, shorter repetitions",
            )


class _Tokens:
    """Adapter that gives llguidance a tokenizer's tokens. llguidance cannot read every decoder of a tokenizer.json.

    llguidance gets one eos token that the model does not have, after the tokenizer's last token. `Constraint` allows a
    request's own eos tokens in its place. Making a llguidance tokenizer for each set of eos tokens would take a second,
    in which no other thread runs.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokens = [*tokenizer.token_bytes, *(b"" for _ in range(size - tokenizer.vocab_size)), b""]
        self.special_token_ids = [*sorted(tokenizer.special_ids), size]
        self.eos_token_id, self.bos_token_id = size, None
        self._encode = tokenizer.encode_within  # the text that a grammar forces is never the beginning of a text

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode(errors="replace"))


class Grammars:
    """A cache of compiled grammars for constrained decoding with one model's tokenizer.

    Several threads may use the cache at once, so a server can compile a grammar while its engine steps.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._lock, self._wrapping = threading.Lock(), threading.Lock()
        self._wrapped: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()

    def start(self, grammar: Grammar, eos_token_ids: Sequence[int]) -> Constraint:
        """Return the state of a compiled grammar at the start of a sequence, which any of the eos tokens may end."""
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)  # without the lock: it takes seconds, and engines start other requests
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return Constraint(matcher.deep_copy(), self.vocabulary, eos_token_ids)

    def has(self, grammar: Grammar) -> bool:
        return grammar in self._compiled

    @property
    def _size(self) -> int:
        return max(self.vocabulary, self.tokenizer.vocab_size if self.tokenizer else 0)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        if self.tokenizer is None:
            raise UsageError("the artifact has no tokenizer.json, so its answers keep to no grammar", "ask for none")
        guidance = _import()
        try:
            if grammar.kind == "json_schema":
                text = guidance.LLMatcher.grammar_from_json_schema(grammar.source)
            elif grammar.kind == "regex":
                text = guidance.LLMatcher.grammar_from_regex(grammar.source)
            else:
                text = guidance.LLMatcher.grammar_from_lark(grammar.source)
        except ValueError as error:
            raise _refused(grammar, str(error)) from error
        if problem := _try(text, self._size):
            raise _refused(grammar, problem)
        limits = guidance.LLParserLimits(**_LIMITS)
        matcher: llguidance.LLMatcher = guidance.LLMatcher(self.wrap(), text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return matcher

    def wrap(self) -> llguidance.LLTokenizer:
        """Return the tokenizer as llguidance takes it. The first call takes a second for 262,144 tokens.

        A server calls `wrap` before it takes requests, because no other thread runs during this second.
        """
        with self._wrapping:
            assert self.tokenizer is not None
            if self._wrapped is None:
                wrapper = _import().TokenizerWrapper(_Tokens(self.tokenizer, self._size))
                self._wrapped = _import().LLTokenizer(wrapper, n_vocab=self._size + 1)
            return self._wrapped


def _try(text: str, size: int) -> str:
    """Compile a grammar in a child process. Return the reason if llguidance refuses the grammar, otherwise ""."""
    request = {
        "path": sys.path,
        "grammar": text,
        "vocabulary": size,
        "limits": _LIMITS,
        "seconds": _COMPILE_SECONDS,
        "bytes": _COMPILE_BYTES,
    }
    program = Path(__file__).with_name("grammar_trial.py")
    try:
        trial = subprocess.run(
            [sys.executable, "-I", str(program)],
            input=json.dumps(request) + "\n",
            capture_output=True,
            text=True,
            timeout=_TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "it takes too long to compile"
    if trial.returncode:
        return "it takes too long, or too much memory, to compile, or is nested too deep"
    return trial.stdout


def _refused(grammar: Grammar, problem: str) -> UsageError:
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    return UsageError(f"the {grammar.kind} cannot be used: {' '.join(lines)[:400]}", "give a simpler or a valid one")


def _first_line(matcher: llguidance.LLMatcher) -> str:
    return next(iter(matcher.get_error().splitlines()), "it has ended")


def _import() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise EnvironmentProblem(
            f"the package 'llguidance', which keeps answers to a grammar, cannot be imported: {error}", _INSTALL
        ) from error
    return llguidance
