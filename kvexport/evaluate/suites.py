"""The benchmark suites LongBench and RULER, read from a local folder. Nothing is downloaded.

LongBench (arXiv 2308.14508) is read from `DIR/data/*.jsonl`, with `dataset2prompt.json` and `dataset2maxlen.json` of
its repository in `DIR/config` (or `DIR`), so the prompts are those of the paper. RULER (arXiv 2404.06654) is read from
`DIR/TASK/validation.jsonl`, the output of its `prepare.py` with the template `base`. As in RULER, a prompt is the input
in the checkpoint's chat template, if it has one, followed by the beginning of the answer (`answer_prefix`). Chat
templates for LongBench and Chinese word segmentation are not covered.
"""

from __future__ import annotations

import difflib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexport.engine.engine import Engine
from kvexport.errors import UsageError

Metric = Callable[[str, Sequence[str], Sequence[str]], float]


@dataclass(frozen=True)
class Item:
    prompt: str
    max_new_tokens: int
    score: Callable[[str], float]
    # Whether the middle of a prompt that is too long is removed (LongBench); otherwise the prompt is refused
    cut: bool = False
    stops: tuple[str, ...] = ()  # texts that end the generation; they are not part of the answer
    # The beginning of the answer, which follows the prompt in the chat template if the model has one; None if the
    # prompt is used as it is
    prefix: str | None = None


def normalize(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles (the convention of SQuAD)."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def token_f1(predicted: Sequence[str], truth: Sequence[str]) -> float:
    """Return the F1 score (harmonic mean of precision and recall) of two bags of tokens."""
    same = sum((Counter(predicted) & Counter(truth)).values())
    return 2 * same / (len(predicted) + len(truth)) if same else 0.0


def rouge_l(predicted: Sequence[str], truth: Sequence[str]) -> float:
    """Return ROUGE-L: the F1 score of the longest common subsequence of two token sequences (Lin 2004, beta 1)."""
    row = [0] * (len(truth) + 1)
    for token in predicted:
        previous = 0
        for i, other in enumerate(truth, 1):
            previous, row[i] = row[i], previous + 1 if token == other else max(row[i], row[i - 1])
    return 2 * row[-1] / (len(predicted) + len(truth)) if row[-1] else 0.0


def _qa_f1(prediction: str, truths: Sequence[str], _: Sequence[str]) -> float:
    return max(token_f1(normalize(prediction), normalize(truth)) for truth in truths)


def _rouge(prediction: str, truths: Sequence[str], _: Sequence[str]) -> float:
    return max(rouge_l(prediction.split(), truth.split()) for truth in truths)


def _classes(prediction: str, truths: Sequence[str], classes: Sequence[str]) -> float:
    """Score a classification answer: 1 / n if it names n classes with the right one among them, else 0.

    A class whose name is part of the right class's name does not count.
    """
    named = [c for c in classes if c in prediction]

    def one(truth: str) -> float:
        left = [c for c in named if c == truth or c not in truth]
        return 1.0 / len(left) if truth in left else 0.0

    return max(map(one, truths))


def _number(prediction: str, truths: Sequence[str], _: Sequence[str]) -> float:
    numbers = re.findall(r"\d+", prediction)
    expected = {n for truth in truths for n in re.findall(r"\d+", truth)[:1]}
    return sum(n in expected for n in numbers) / len(numbers) if numbers else 0.0


def _code(prediction: str, truths: Sequence[str], _: Sequence[str]) -> float:
    """Score a code completion: the similarity of its first line to the true line, from 0 to 1.

    Lines with a comment or a Markdown fence are skipped.
    """
    lines = [line for line in prediction.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//"))]
    return max(
        difflib.SequenceMatcher(None, lines[0] if lines else "", truth, autojunk=False).ratio() for truth in truths
    )


_GROUPS: dict[Metric, str] = {
    _qa_f1: "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa",
    _rouge: "gov_report qmsum multi_news samsum",
    _classes: "trec",
    _number: "passage_retrieval_en passage_count",
    _code: "lcc repobench-p",
}
LONGBENCH: dict[str, Metric] = {name: metric for metric, names in _GROUPS.items() for name in names.split()}
# Models continue few-shot prompts with another example, so only the first line is the answer.
FIRST_LINE = {"trec", "triviaqa", "samsum"}
RULER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


def read_longbench(folder: Path) -> dict[str, list[Item]]:
    """Return the LongBench items in a folder, by data set ("longbench/hotpotqa").

    Every English data set in `folder/data` (or `folder`) that the paper scores is read.
    """
    config = next((f for f in (folder / "config", folder) if (f / "dataset2prompt.json").is_file()), None)
    if config is None:
        raise UsageError(
            f"{folder} has no config/dataset2prompt.json", "copy the folder `config` of LongBench's repository into it"
        )
    prompts, lengths = (
        json.loads((config / f"dataset2{kind}.json").read_text(encoding="utf-8")) for kind in ("prompt", "maxlen")
    )
    suites: dict[str, list[Item]] = {}
    for path in sorted((folder / "data" if (folder / "data").is_dir() else folder).glob("*.jsonl")):
        name = path.stem.removesuffix("_e")
        if name not in LONGBENCH or name not in prompts:
            continue
        stops = ("\n",) if name in FIRST_LINE else ()
        suites[f"longbench/{path.stem}"] = [
            Item(prompts[name].format(**row), int(lengths[name]), _scorer(LONGBENCH[name], row), True, stops)
            for row in _rows(path)
        ]
    if not suites:
        raise UsageError(
            f"{folder} holds no data set of LongBench", f"data/NAME.jsonl, such as {next(iter(LONGBENCH))}.jsonl"
        )
    return suites


def _scorer(metric: Metric, row: dict[str, Any]) -> Callable[[str], float]:
    truths, classes = list(map(str, row["answers"])), list(map(str, row.get("all_classes") or ()))
    # A few-shot answer may begin with the line break that its prompt lacks, and ends after the next line.
    return lambda prediction: metric(prediction.strip("\n") if metric is not _code else prediction, truths, classes)


def read_ruler(folder: Path) -> dict[str, list[Item]]:
    """Return the RULER items in a folder, by task ("ruler/niah_single_1").

    The score of an item is the share of the expected answers that the generated text contains; for QA it is 1 if the
    text contains any of them, else 0.
    """
    suites: dict[str, list[Item]] = {}
    for path in sorted(folder.glob("*/validation.jsonl")):
        task = path.parent.name
        kind = task.split("_")[0]
        if kind not in RULER_TOKENS:
            continue
        suites[f"ruler/{task}"] = [
            Item(
                row["input"],
                RULER_TOKENS[kind],
                _contains(row["outputs"], kind == "qa"),
                prefix=row.get("answer_prefix"),
            )
            for row in _rows(path)
        ]
    if not suites:
        raise UsageError(f"{folder} holds no task of RULER", "TASK/validation.jsonl, as RULER's prepare.py writes it")
    return suites


def _contains(outputs: Sequence[Any], any_will_do: bool) -> Callable[[str], float]:
    def score(prediction: str) -> float:
        contained = [str(output).lower() in prediction.lower() for output in outputs]
        return float(any(contained)) if any_will_do else sum(contained) / len(contained)

    return score


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UsageError(f"{path}:{number} is no JSON: {error}", "one JSON object a line") from error
    return rows


def run_items(engine: Engine, items: Sequence[Item], batch: int) -> list[float]:
    scores: list[float] = []
    for start in range(0, len(items), batch):
        batch_items = items[start : start + batch]
        new = max(item.max_new_tokens for item in batch_items)
        prompts = [_fit(engine, item, engine.max_length - new) for item in batch_items]
        completions = engine.generate(prompts, max_new_tokens=new, do_sample=False)
        for item, completion in zip(batch_items, completions, strict=True):
            assert engine.tokenizer is not None
            text = engine.tokenizer.decode(completion.token_ids[: item.max_new_tokens])
            for stop in item.stops:
                text = text.lstrip(stop).split(stop)[0]
            scores.append(item.score(text))
    return scores


def _fit(engine: Engine, item: Item, room: int) -> list[int]:
    if engine.tokenizer is None:
        raise UsageError(
            f"{engine.path} has no tokenizer.json, so a prompt cannot be text",
            "put it beside the checkpoint and build again",
        )
    if item.prefix is None or engine.chat_template is None:
        ids = engine.tokenizer.encode(item.prompt + (item.prefix or ""))
    else:
        text = engine.chat_template.render([{"role": "user", "content": item.prompt}])
        ids = engine.tokenizer.encode(text + item.prefix, add_special_tokens=False)
    if len(ids) <= room:
        return ids
    if not item.cut:
        raise UsageError(
            f"a prompt of {len(ids)} tokens leaves no room in {engine.max_length}",
            f"--set limits.max_length={len(ids) + 128}",
        )
    return ids[: room // 2] + ids[len(ids) - (room - room // 2) :]
