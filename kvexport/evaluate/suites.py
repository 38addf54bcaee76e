"""The benchmark suite RULER (arXiv 2404.06654), read from a local folder. Nothing is downloaded.

RULER is read from `DIR/TASK/validation.jsonl`, the output of its `prepare.py` with the template `base`. As in RULER, a
prompt is the input in the checkpoint's chat template, if it has one, followed by the beginning of the answer
(`answer_prefix`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexport.engine.engine import Engine
from kvexport.errors import UsageError


@dataclass(frozen=True)
class Item:
    prompt: str
    max_new_tokens: int
    score: Callable[[str], float]
    # The beginning of the answer, which follows the prompt in the chat template if the model has one; None if the
    # prompt is used as it is
    prefix: str | None = None


RULER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


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
            Item(row["input"], RULER_TOKENS[kind], _contains(row["outputs"], kind == "qa"), row.get("answer_prefix"))
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
            scores.append(item.score(engine.tokenizer.decode(completion.token_ids[: item.max_new_tokens])))
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
    if len(ids) > room:
        raise UsageError(
            f"a prompt of {len(ids)} tokens leaves no room in {engine.max_length}",
            f"--set limits.max_length={len(ids) + 128}",
        )
    return ids
