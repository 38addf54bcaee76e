"""Faults that public reports and attacks named, each with the tests that hold its right value: how many tests fail.

    python benchmarks/correctness/reports.py [--out FILE] [--row TEXT]

`REPORTS` has a row for each fault that users of other runtimes reported, and `FAMILIES` the families of tokenizers that
a grammar has to follow. Every row names tests of `tests/`. All of them run, and a row counts the tests that ran and
those that failed. With `--row` only the rows whose name has one of the texts run, and FILE keeps its other rows. The
rows of GGUF take the packages xllamacpp and sentencepiece.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.common import ROOT, save
from tests.support.tokenizers import FAMILIES

# The fault, and its tests: a file, a function, and the parameters of those of its cases that count (none: all).
Tests = tuple[tuple[str, str, str], ...]
CHAT, GRAMMAR, TOOLS = "language/test_chat.py", "language/test_grammar.py", "language/test_tools.py"
GGUF, ADDED, SHARED = "export/test_gguf_tokenizers.py", "export/test_added_tokens.py", "serve/test_requests.py"
READ, FORCED = "test_calls_are_parsed_from_text_in_any_pieces", "test_an_answer_that_must_call_does"
REPORTS: dict[str, Tests] = {
    "an end token of config.json alone is ignored": (
        ("export/test_texts.py", "test_an_answer_ends_where_transformers_ends_it", ""),
    ),
    "tokens of tokenizer_config.json alone are split": ((ADDED, "test_ids_are_those_of_transformers", ""),),
    "tokens of added_tokens.json alone are split": ((ADDED, "test_older_files_are_read", ""),),
    "GGUF: an answer runs on behind <|im_end|>": ((GGUF, "test_an_answer_ends_where_llama_cpp_ends_it", ""),),
    "GGUF: add_space_prefix is ignored": ((GGUF, "test_ids_of_sentencepiece_files_are_those_of_llama_cpp", ""),),
    "GGUF: no BOS for llama-bpe": ((GGUF, "test_ids_of_byte_level_files_are_those_of_llama_cpp", ""),),
    "GGUF: words that no merge makes are split": (
        (GGUF, "test_a_first_token_and_whole_words_depend_on_the_splitting_rule", ""),
    ),
    "GGUF: an old or untyped rotary factor is dropped": (
        (GGUF, "test_rotary_positions_are_scaled_as_in_llama_cpp", ""),
    ),
    "GGUF: the template for tools is dropped": ((GGUF, "test_a_template_for_tools_is_kept", ""),),
    "GGUF: a model in several files is not read": (
        ("export/test_gguf.py", "test_a_model_in_several_files_is_read_by_any_of_them", ""),
    ),
    "PiSSA and OLoRA adapters are merged wrongly": (
        ("export/test_adapter.py", "test_an_adapter_that_does_not_fit_is_refused", ""),
    ),
    "an infinite number in a session ends all requests": (
        ("state/test_snapshot.py", "test_a_snapshot_of_infinite_numbers_is_refused", ""),
    ),
    "calls of Qwen3-Coder and Qwen 3.5 stay text": ((TOOLS, READ, "xml"), (TOOLS, FORCED, "xml")),
    "calls of GLM stay text": ((TOOLS, READ, "glm"), (TOOLS, FORCED, "glm")),
    "calls of Mistral with [ARGS] stay text": ((TOOLS, READ, "mistral, a"),),
    "calls of Llama 3 behind <|python_tag|> stay text": ((TOOLS, READ, "llama"),),
    "calls of DeepSeek stay text": ((TOOLS, READ, "deepseek"),),
    "calls of Hermes stay text": ((TOOLS, READ, "a call"), (TOOLS, READ, "text and two calls")),
    "fenced calls of Qwen2.5-Coder stay text": ((TOOLS, READ, "hermes, fenced"), (TOOLS, READ, "hermes, bare")),
    "channels of gpt-oss are text": (("language/test_harmony.py", "test_channels_are_told_apart", ""),),
    "a required call is JSON instead of the template's form": ((TOOLS, FORCED, ""),),
    "templates over parts drop the user's words": ((CHAT, "test_a_template_over_parts_gets_parts", ""),),
    "templates that concatenate arguments fail": (
        (CHAT, "test_a_template_that_concatenates_arguments_gets_a_text", ""),
    ),
    "a second system message is an error": (
        (CHAT, "test_two_system_messages_become_one_where_the_template_knows_one", ""),
    ),
    "a call that the server cut is refused": (
        ("serve/test_chat.py", "test_a_cut_call_of_the_server_is_accepted_back", ""),
    ),
    "a last message of the assistant is not continued": (
        (CHAT, "test_the_last_message_is_continued", ""),
        ("serve/test_chat.py", "test_an_answer_continues_the_last_message", ""),
    ),
    "json_object drops its schema; guided_*, grammar and json_schema are ignored": (
        ("serve/test_forms.py", "test_other_forms", ""),
    ),
    "reasoning_effort is ignored": (("serve/test_chat.py", "test_reasoning_effort_reaches_the_template", ""),),
    "unknown fields are ignored without a word": (
        (SHARED, "test_fields_that_the_server_does_not_know_are_named", ""),
        (SHARED, "test_fields_within_others_that_nothing_reads_are_named", ""),
    ),
    "ignore_eos hides stop_token_ids": ((SHARED, "test_stop_tokens_end_an_answer_and_are_no_part_of_its_text", ""),),
    "logprobs lose bytes, spaces and entries": (
        (SHARED, "test_logprobs_have_the_bytes_of_parts_of_characters_and_all_tokens", ""),
        ("language/test_text.py", "test_the_bytes_of_tokens_joined_are_the_text", ""),
    ),
    "a browser's preflight request gets 401": ((SHARED, "test_a_page_of_an_allowed_origin_may_call_every_route", ""),),
}
FOLLOWED = "test_a_tokenizer_of_every_family_can_write_what_a_grammar_forces"
WITHIN = "test_a_text_within_another_gets_no_space_before_it"
ROWS: dict[str, Tests] = {
    **REPORTS,
    **{
        f"grammars with a tokenizer of the family {name}": (
            (GRAMMAR, FOLLOWED, f"{name}]"),
            (GRAMMAR, WITHIN, f"{name}]"),
        )
        for name in FAMILIES
    },
}


def counted(cases: dict[str, bool], chosen: Iterable[str] = ROWS) -> dict[str, dict[str, int]]:
    """Return how many tests of each row ran and failed.

    Args:
        cases: Whether a test failed, by its name: FILE::FUNCTION[PARAMETERS].
        chosen: The rows.
    """
    rows: dict[str, dict[str, int]] = {}
    for row in chosen:
        own = {case for case in cases for test in ROWS[row] if _is_of(case, *test)}
        rows[row] = {"tests": len(own), "failures": sum(cases[case] for case in own)}
    return rows


def _is_of(case: str, file: str, function: str, parameters: str) -> bool:
    name, _, rest = case.removeprefix(f"tests/{file}::").partition("[")
    return case.startswith(f"tests/{file}::") and name == function and rest.startswith(parameters)


def run(chosen: Iterable[str]) -> dict[str, bool]:
    """Run the tests of rows, and return whether each of their cases failed."""
    names = sorted({f"tests/{file}::{function}" for row in chosen for file, function, _ in ROWS[row]})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", f"--junitxml={report}", *names]
        subprocess.run(command, cwd=ROOT, check=False)
        cases, skipped = {}, Counter[str]()
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.attrib['file']}::{case.attrib['name']}"
            if case.find("skipped") is None:
                cases[name] = case.find("failure") is not None or case.find("error") is not None
            else:
                skipped[name] += 1
    for name in skipped:
        print(f"not reached: {name}", file=sys.stderr)
    return cases


def main() -> None:
    """Run, print the table, and exit with 1 if a test of a row failed, or none ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the file to write with the table as JSON")
    parser.add_argument("--row", action="append", metavar="TEXT", help="run only rows with this text; repeatable")
    arguments = parser.parse_args()
    chosen = [row for row in ROWS if not arguments.row or any(text in row for text in arguments.row)]
    rows = counted(run(chosen), chosen)
    for row, numbers in rows.items():
        print(f"{row:80} {json.dumps(numbers)}")
    if arguments.out:
        kept = json.loads(arguments.out.read_text())["rows"] if arguments.row and arguments.out.exists() else {}
        save(arguments.out, {"rows": {row: (kept | rows)[row] for row in ROWS if row in kept | rows}})
    sys.exit(any(row["failures"] or not row["tests"] for row in rows.values()))


if __name__ == "__main__":
    main()
