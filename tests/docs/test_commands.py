"""Commands and Python on the pages work: marked blocks run on the tiny model, the others are parsed.

A block below `<!-- test: run -->` runs in a folder that holds the artifact `tiny`. A block may need what an earlier
block of its page built. All other commands are compared with the options of the program, the files and the targets of
the Makefile.
"""

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvexport.commands.app import app
from kvexport.paths import PACKAGE
from tests.docs.pages import PAGES, Block, blocks
from tests.support.command_line import ok
from tests.support.paths import ROOT

PROGRAM: Any = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SHELLS = ("console", "bash", "sh")


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a block as words, without prompts, variables, comments and the commands after a pipe."""
    for line in block.text.replace("\\\n", " ").splitlines():
        line = re.sub(r"^(?:\w+)?\$ ", "", line.strip())
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        ends = [i for i, word in enumerate(words) if word in ("|", "&&", "&", ">")]
        yield words[: ends[0]] if ends else words


def problem(words: list[str]) -> str:
    """Return why a command cannot work, or "" if it may."""
    match words:
        case ["kvexport", *arguments]:
            return usage_error(PROGRAM, "kvexport", arguments)
        case ["make", *arguments]:
            unknown = [word for word in arguments if "=" not in word and word not in TARGETS]
            return f"make has no target {unknown[0]}" if unknown else ""
        case [("python" | "pytest"), *arguments]:
            files = [word for word in arguments if re.fullmatch(r"(benchmarks|plugins|tests|tools)/[\w/.-]+", word)]
            missing = [name for name in files if not (ROOT / name).exists()]
            return f"there is no file {missing[0]}" if missing else ""
    return ""


def usage_error(command: Any, name: str, arguments: list[str]) -> str:
    """Return the program's error about its arguments, or "", without running the command."""
    context = command.make_context(name, [], resilient_parsing=True)
    context.resilient_parsing = False  # otherwise unknown options would be accepted
    try:
        values, rest, _ = command.make_parser(context).parse_args(list(arguments))
    except Exception as error:  # click's own errors, whose module is private
        return f"{name}: {error}"
    if subcommands := getattr(command, "commands", None):
        if not rest:
            return ""
        known = subcommands.get(rest[0])
        return usage_error(known, f"{name} {rest[0]}", rest[1:]) if known else f"{name} has no command {rest[0]}"
    missing = [p.name for p in command.params if p.required and values.get(p.name) in (None, ())]
    return f"{name}: missing {missing[0]}" if missing else f"{name}: too many arguments: {rest}" if rest else ""


SHOWN = [(page, block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("page", "block"),
    [pair for pair in SHOWN if pair[1].language in SHELLS],
    ids=lambda part: str(part.relative_to(ROOT)) if isinstance(part, Path) else str(part.line),
)
def test_commands_have_the_options_and_files_that_they_name(page: Path, block: Block) -> None:
    for words in commands(block):
        assert not problem(words), f"{page.name}:{block.line}: {problem(words)}"


@pytest.mark.parametrize(
    ("page", "block"),
    [pair for pair in SHOWN if pair[1].language == "python"],
    ids=lambda part: str(part.relative_to(ROOT)) if isinstance(part, Path) else str(part.line),
)
def test_python_is_python(page: Path, block: Block) -> None:
    compile(block.text, f"{page.name}:{block.line}", "exec")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "tiny"
    ok("build", "--recipe", "tiny-keepkv", "--out", path)
    return path


@pytest.mark.parametrize(
    "page", list(dict.fromkeys(page for page, block in SHOWN if block.run)), ids=lambda path: path.name
)
def test_marked_blocks_run(page: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    for block in (block for shown, block in SHOWN if shown == page and block.run):
        if block.language == "python":
            exec(compile(block.text, f"{page.name}:{block.line}", "exec"), {})
            continue
        for program, *arguments in commands(block):
            assert program == "kvexport", f"{page.name}:{block.line} runs {program}"
            ok(*arguments)


@pytest.mark.parametrize(("line", "message"), [
    ("kvexport build --recipe tiny-keepkv --out tiny", ""), ("kvexport build --recipes tiny-keepkv", "--recipes"),
    ("kvexport recipes shw tiny", "has no command shw"), ("kvexport recipes show tiny-keepkv --resolved", ""),
    ("KEY=1 make gpu-check GPU_CHECK='--parts decode'", ""), ("make everything", "no target everything"),
    ("python benchmarks/no_such.py", "no file benchmarks/no_such.py"),
])  # fmt: skip
def test_a_command_that_cannot_work_is_detected(line: str, message: str) -> None:
    (words,) = commands(Block(1, 3, "console", f"$ {line}", False))
    assert message in problem(words) if message else not problem(words)


def test_messages_of_the_page_on_troubleshooting_are_the_programs() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    known = "\n".join(text for text in texts if isinstance(text, str))
    page = (ROOT / "docs" / "tasks" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ((?:`[^`|]+`(?:, )?)+) \|", page, re.MULTILINE)
    parts = [part.strip(" ") for cell in cells for code in re.findall("`(.+?)`", cell) for part in code.split("...")]
    assert len(parts) > 20 and [part for part in parts if part not in known] == []
