"""Writer of the tables in docs/ and README.md.

    python benchmarks/tables.py

Tables of methods and recipe fields come from their classes, tables of figures from benchmarks/results. Every table is
written between its marks, `<!-- NAME -->` and `<!-- end -->`. A test checks that the documents hold these tables.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict
from typing import Any

import length_figure
from budget_tables import (
    budget_kinds,
    calibration_cost,
    calibration_texts,
    default_quality,
    head_budgets,
    listed,
    once,
    small_listed,
)
from decoder_tables import decoder_tables
from newer_tables import newer_methods
from table_parts import BUDGETS, ROOT, load, name_of, shown, table

from kvexport.evaluate.statistics import mean
from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.recipe.describe import describe_fields
from kvexport.recipe.fields import Recipe

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KINDS = {"log_ema": "ln of the average exp(logit)", "probability": "sum of probabilities", "none": "none"}
# The figures of a model: task and figure.
FIGURES = {
    "tiny-base": (("text", "kl"), ("multikey", "kl"), ("multikey", "accuracy")),
    "small-base": (
        ("text", "kl"),
        ("duplicates", "kl"),
        ("duplicates", "accuracy"),
        ("associative", "kl"),
        ("associative", "accuracy"),
    ),
    "smollm2-135m-base": (("text", "kl"),),
}
# The method with which other methods are compared sample by sample.
PAIRED = {"smollm2-135m-base": "keepkv"}
# Models whose engines of packed weights were measured beside their peers.
PACKED_MODELS = {"smollm2": "SmolLM2-135M", "M": "28M Llama", "1b": "1.1B Llama", "7b": "7B Llama"}
PACKED_PROCESSORS = {
    "epyc": "AMD EPYC, AVX-512 VNNI",
    "epyc-avx2": "AMD EPYC, kvexport limited to AVX2",
    "xeon-amx": "Intel Xeon, AMX",
    "xeon-avx512vnni": "Intel Xeon, kvexport limited to AVX-512 VNNI",
    "xeon-avx2": "Intel Xeon, kvexport limited to AVX2",
}
# The methods that README.md shows.
SHORT = {"smollm2-135m-base": ("streaming", "snapkv", "h2o", "keepkv", "ballot")}


def methods() -> str:
    """Return the table of all methods, from their classes."""
    header = ("method", "what it does", "score", "read bias", "layer budgets", "source")
    return table(header, *(_method(method()) for method in all_methods().values()))


def _method(method: Method) -> tuple[str, ...]:
    alpha = method.vote_exponent
    bias = {0.0: "0", 1.0: "ln votes"}.get(alpha, f"{alpha:g} ln votes")
    score = "; ".join(_score(s) for s in method.statistics)
    return (
        f"`{method.name}`",
        method.summary,
        score,
        bias,
        method.allocation if method.compresses else "none",
        method.source,
    )


def _score(statistic: Statistic) -> str:
    words = [KINDS[statistic.kind]]
    words += [f"decay {statistic.decay:g}"] if statistic.decay != 1.0 else []
    words += [f"last {statistic.window} queries"] if statistic.window else []
    words += [f"newest times {statistic.recency_weight:g}"] if statistic.recency_weight != 1.0 else []
    return ", ".join(words)


def compared(recipe: str, task: str, figure: str, only: tuple[str, ...] = ()) -> str:
    """Return the table of every method (or of those in `only`) at every measured budget, each column's best in bold."""
    rows = [r for r in load(f"sweep-{recipe}")["groups"]["methods"]["rows"] if not only or r["label"] in only]
    return _by_budget(rows, {(r["label"], r["budget"]): r["scores"][task][figure] for r in rows}, figure)


def differences(recipe: str, task: str, figure: str) -> str:
    """Return the table of every method's figure minus that of the method in `PAIRED`, sample by sample."""
    rows = load(f"sweep-{recipe}")["groups"]["methods"]["rows"]
    every = {(r["label"], r["budget"]): r["scores"][task]["samples"][figure] for r in rows}
    estimates = {}
    for (label, budget), values in every.items():
        base = every.get((PAIRED[recipe], budget))
        if base is not None and label != PAIRED[recipe]:
            estimates[label, budget] = asdict(mean([x - y for x, y in zip(values, base, strict=True)]))
    return _by_budget([r for r in rows if r["label"] != PAIRED[recipe]], estimates, figure)


def _by_budget(rows: list[Any], by_cell: dict[tuple[str, float], Any], figure: str) -> str:
    """Return figures by label and budget as a table, the best of a column in bold."""
    labels = list(dict.fromkeys(r["label"] for r in rows))
    budgets = [b for b in BUDGETS if any((label, b) in by_cell for label in labels)]
    better = max if figure == "accuracy" else min
    # A column that is not complete has no best figure.
    whole = [b for b in budgets if all((label, b) in by_cell for label in labels)]
    best = {b: better(by_cell[label, b]["value"] for label in labels) for b in whole}
    lines = []
    for label in labels:
        estimates = [(by_cell.get((label, b)), best.get(b)) for b in budgets]
        cells = ["" if e is None else f"**{shown(e)}**" if e["value"] == top else shown(e) for e, top in estimates]
        lines.append((name_of(label), *cells))
    return table(("method", *(BUDGETS[b] for b in budgets)), *lines)


def settings(recipe: str) -> str:
    """Return the table of the groups in which one setting changes, at 1/8."""
    groups = {name: g for name, g in load(f"sweep-{recipe}")["groups"].items() if name != "methods"}
    tasks = list(dict.fromkeys(task for task, _ in FIGURES[recipe]))
    rows = []
    for name, group in groups.items():
        for row in group["rows"]:
            if row["budget"] == 0.125:
                scores = row["scores"]
                text = scores.get("text") or scores.get("decoded")
                figures = [scores[t] for t in tasks if t in scores and t != "text"]
                first = (shown(figures[0]["kl"]), shown(figures[0]["accuracy"])) if figures else ("", "")
                rows.append((f"{name}, {group['samples']} samples", name_of(row["label"]), shown(text["kl"]), *first))
    return table(("group", "setting", "text KL", f"{tasks[1]} KL", f"{tasks[1]}, right"), *rows)


def stability(recipe: str) -> str:
    """Return the table of every method, and of the full cache, over 20 training lengths."""
    rows = load(f"stability-{recipe}")["rows"]
    full = next(r for r in rows if r["label"] == "full")["key_norm"][1]
    header = (
        "method",
        "slots",
        "all finite",
        "largest key norm",
        "of the full cache's",
        "loss, first window",
        "loss, last",
    )
    lines = []
    for r in rows:
        norm, losses = r["key_norm"][1], (f"{x:.2f}" for x in r["nll"])
        lines.append(
            (
                name_of(r["label"]),
                str(r["slots"]),
                "yes" if r["finite"] else "NO",
                f"{norm:.2f}",
                f"{norm / full:.3f}",
                *losses,
            )
        )
    return table(header, *lines)


def fields() -> str:
    """Return the table of every key of a recipe."""
    rows = []
    for field in describe_fields(Recipe):
        default = "required" if field.required else f"`{'{}' if field.type == 'object' else json.dumps(field.default)}`"
        allowed = field.constraint or field.type
        shown_allowed = "see [methods](methods.md)" if field.name == "cache.method" else allowed.replace("|", "\\|")
        rows.append((f"`{field.name}`", default, shown_allowed, field.meaning))
    return table(("key", "default", "allowed", "meaning"), *rows)


def recall_layers() -> str:
    """Return the table of the ten layers whose compression costs the answers most."""
    cost = [layer["value"] for layer in load("recall-smollm2")["layers"]["layers"]]
    dearest = sorted(range(len(cost)), key=lambda layer: -cost[layer])[:10]
    return table(("layer", "nats of a token of the answers"), *((str(i), f"{cost[i]:.3f}") for i in dearest))


def recall(length: int, *, known: bool) -> str:
    """Return the table of the answers about texts of `length` tokens, by method and budget."""
    rows = [r for r in load("recall-smollm2")["rows"] if not r["set"] and (r["length"], r["known"]) == (length, known)]
    rows += [r for r in load("recall-smollm2")["rows"] if known and r["method"] == "full" and r["length"] == length]
    budgets = ["all", *(f"1/{divisor}" for divisor in sorted({r["divisor"] for r in rows if r["method"] != "full"}))]
    lines = []
    for task, method in dict.fromkeys((r["task"], r["method"]) for r in sorted(rows, key=_recall_order)):
        of = {
            "all" if method == "full" else f"1/{r['divisor']}": r
            for r in rows
            if (r["task"], r["method"]) == (task, method)
        }
        lines.append((task, f"`{method}`", *(_recalled(of[b]) if b in of else "" for b in budgets)))
    return table(("task", "method", *budgets), *lines)


def _recall_order(r: dict[str, Any]) -> tuple[int, int]:
    tasks, method = ("codes", "turns", "people", "code"), r["method"].split("+")[0]
    methods = ("full", "streaming", "h2o", "snapkv", "keepkv", "keydiff", "ballot")
    return tasks.index(r["task"]), methods.index(method) + ("+" in r["method"]) * len(methods)


def _recalled(r: dict[str, Any]) -> str:
    value, low, high = r["exact"]
    right = round(value * r["questions"])
    return f"{right} of {r['questions']} [{low:.2f}, {high:.2f}], {r['digits']['value']:.2f}"


def recall_differences() -> str:
    """Return the table of differences of unpublished methods to the best published one, question by question.

    The best published method has the most exact answers.
    """
    lines = [
        (
            d["task"],
            str(d["length"]),
            f"1/{d['divisor']}",
            "known" if d["known"] else "unknown",
            f"`{d['method']}`",
            f"`{d['best_published']}`",
            shown(d["exact"]),
            shown(d["digits"]),
        )
        for d in load("recall-smollm2")["differences"]
        if d["method"] != "full" and d["length"] > 1000
    ]
    header = ("task", "tokens", "budget", "question", "method", "best published", "exact", "digits")
    return table(header, *lines)


def recall_text() -> str:
    """Return the table of KL of text with whole layers and without."""
    rows = load("recall-smollm2")["text"]["rows"]
    named = {0.25: "1/4", 0.333: "1/3"}
    lines = {r["method"]: [f"`{r['method']}`"] for r in rows}
    for r in sorted(rows, key=lambda r: r["budget"]):
        lines[r["method"]].append(f"{shown(r['kl'])}, {r['slots']}")
    header = ("method", *(named[round(b, 3)] for b in sorted({r["budget"] for r in rows})))
    return table(header, *map(tuple, lines.values()))


def packed_speed() -> str:
    """Return the table of engines of packed weights beside their peers, by processor and instruction set."""
    lines = []
    for processor, model, weights in itertools.product(PACKED_PROCESSORS, PACKED_MODELS, ("int4", "int8", "float16")):
        name = f"quantized-{model}-{weights}-{processor}"
        if not (ROOT / "benchmarks" / "results" / f"{name}.json").exists():
            continue
        results = load(name)
        for tokens, result in results.items():
            if not tokens.startswith(("decode ", "prefill ")):
                continue
            speed = {side: f"{value:g}" for side, value in result["tokens_per_second"].items()}
            llamacpp = ", ".join(speed[side] for side in ("llamacpp", "llamacpp-bf16") if side in speed)
            ratios = (f"{result[f'{side}_to_faster_peer']:.2f}" for side in ("full", "keepkv"))
            sides = (speed["full"], speed["keepkv"], speed.get("genai", ""), llamacpp)
            titles = (PACKED_PROCESSORS[processor], results["date"][:10], PACKED_MODELS[model], weights, tokens)
            lines.append((*titles, *sides, *ratios))
    header = ("processor", "date", "model", "weights", "tokens", "full cache", "512 slots", "genai", "llama.cpp")
    return table((*header, "full / faster peer", "512 slots / faster peer"), *lines)


def packed_quality() -> str:
    """Return the table of the KL that rounded weights cost, by side."""
    lines = []
    for name, r in load("quantized_quality")["rows"].items():
        if "kl" in r:
            kl = f"{r['kl']:.3g} ({r['kl_standard_error']:.1g})"
            lines.append((f"`{name}`", f"{r['weight_bytes'] / 1e6:.0f}", kl, f"{r['agreement']:.3f}"))
    return table(("weights", "MB", "KL, nats (standard error)", "same likeliest token"), *lines)


def quantized_cache() -> str:
    """Return the table of the KL that few bits for keys and values cost, with merging and without."""
    lines = []
    for what, (value, low, high, count) in load("quantized-cache")["kl"].items():
        method, slots, form = what.split(" | ")
        interval = f" [{low:.2g}, {high:.2g}]" if count > 2 else ""
        lines.append((f"`{method}`", slots, form, f"{value:.3g}{interval}", str(count)))
    return table(("method", "slots", "keys and values", "KL, nats", "texts"), *lines)


def tables() -> dict[str, str]:
    """Return every table by its mark."""
    texts = {"methods": methods(), "fields of a recipe": fields()}
    texts |= {"recall layers": recall_layers(), "recall differences": recall_differences()}
    for question in ("unknown", "known"):
        texts[f"recall {question}"] = recall(2000, known=question == "known")
    texts |= {"listed": listed(), "packed speed": packed_speed(), "packed quality": packed_quality()}
    texts |= {"quantized cache": quantized_cache()}
    texts |= {"default quality": default_quality(), "budget kinds": budget_kinds()}
    texts |= {f"newer {part}": newer_methods(part) for part in ("streamed", "once")}
    texts |= {"calibration cost": calibration_cost(), "calibration texts": calibration_texts()}
    texts |= {"small listed": small_listed(), "head budgets": head_budgets(), **decoder_tables()}
    texts |= {f"once {task}": once(task) for task in ("text", "codes")}
    if load("recall-smollm2").get("text"):  # `recall_real.py text` was run
        texts["recall text"] = recall_text()
    for recipe, figures in FIGURES.items():
        texts |= {f"{recipe} {task} {figure}": compared(recipe, task, figure) for task, figure in figures}
        if recipe in PAIRED:
            for task, figure in figures:
                texts[f"{recipe} {task} {figure} difference"] = differences(recipe, task, figure)
                texts[f"{recipe} {task} {figure} short"] = compared(recipe, task, figure, SHORT[recipe])
        else:
            texts |= {f"{recipe} settings": settings(recipe), f"{recipe} stability": stability(recipe)}
    return texts


def written(text: str, current: dict[str, str]) -> str:
    """Return a document with its tables replaced by the current ones."""
    return re.sub(
        r"<!-- ([\w -]+) -->\n.*?<!-- end -->",
        lambda m: f"<!-- {m[1]} -->\n{current[m[1]]}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    texts = tables()
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        path.write_text(written(text, texts), encoding="utf-8")
    length_figure.FILE.write_text(length_figure.figure(), encoding="utf-8")


if __name__ == "__main__":
    main()
