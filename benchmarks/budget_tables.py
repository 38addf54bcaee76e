"""Tables of measured budgets of layers and KV heads, of quantized caches with them, and of contexts compressed once."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

from table_parts import BUDGETS, ROOT, load, name_of, shown, table

from kvexport.evaluate.statistics import mean

# Recipes with measured budgets of layers (MODEL-listed) or of KV heads (MODEL-heads).
LISTED = tuple(f"{model}-{of}" for model in ("tiny", "small", "smollm2-135m") for of in ("listed", "heads"))


def listed() -> str:
    """Return the table of `ballot` in measured budgets (recipes *-listed, *-heads) beside the method of the lowest KL.

    The other methods have their own budgets.
    """
    lines = []
    for recipe in LISTED:
        model, _, of = recipe.rpartition("-")
        if not (ROOT / "benchmarks" / "results" / f"sweep-{recipe}.json").exists():
            continue  # not measured yet
        others = load(f"sweep-{model}-base")["groups"]["methods"]["rows"]
        for row in load(f"sweep-{recipe}")["groups"]["listed"]["rows"]:
            if row["label"] != "ballot":
                continue
            for task, score in row["scores"].items():
                beside = {r["label"]: r["scores"][task] for r in others if r["budget"] == row["budget"]}
                best = min(beside, key=lambda label: beside[label]["kl"]["value"])
                less = score["kl"]["value"] / beside[best]["kl"]["value"] - 1
                cells = [name_of(best), shown(beside[best]["kl"]), shown(score["kl"]), f"{less:+.0%}"]
                right = [x["accuracy"] for x in (beside[best], score)]
                cells += ["" if x is None else f"{x['value']:.2f}" for x in right]
                of_what = "heads" if of == "heads" else "layers"
                lines.append((model, task, BUDGETS[row["budget"]], of_what, *cells))
    header = ("model", "task", "budget", "of", "best other", "its KL", "listed", "change", "its recall", "listed's")
    return table(header, *lines)


KINDS = {"prose": "English prose", "german": "German", "french": "French", "python": "Python", "c++": "C++"}
LENGTH = 1024  # tokens that budget_kinds.py reads
MEASURED = "ballot, budgets of heads"


def _triple(values: list[float]) -> str:
    return shown(dict(zip(("value", "low", "high"), values, strict=True)))


def _kinds() -> list[dict[str, Any]]:
    """Return the rows of budget_kinds.py's results, by slots and kind of text."""
    names = [f"budget-kinds-{slots}" for slots in (64, 128, 256)]
    known = [name for name in names if (ROOT / "benchmarks" / "results" / f"{name}.json").exists()]
    return [row for name in known for row in load(name)["rows"]]


def default_quality() -> str:
    """Return the table of KL on held-out texts: published methods, `ballot`, and `ballot` as a build sets it up.

    The lowest KL of a column is in bold.
    """
    columns = [row for row in _kinds() if row["kind"] == "held-out"]
    best = [min(row["kl"], key=lambda method: row["kl"][method][0]) for row in columns]
    names = {MEASURED: "`ballot`, measured budgets (default of `kvexport build`)"}
    lines = []
    for method in columns[0]["kl"]:
        cells = [_triple(row["kl"][method]) for row in columns]
        cells = [f"**{cell}**" if method == top else cell for cell, top in zip(cells, best, strict=True)]
        lines.append((names.get(method, f"`{method}`"), *cells))
    return table(("method", *(f"1/{LENGTH // row['slots']}" for row in columns)), *lines)


def budget_kinds() -> str:
    """Return the table of KL and loss on each kind of text that the calibration of the budgets did not read."""
    lines = []
    for row in _kinds():
        if row["kind"] == "held-out":
            continue
        kl, loss = row["kl"], row["loss"]
        best = min((name for name in kl if not name.startswith("ballot")), key=lambda name: kl[name][0])
        figures = [f"{kl[name][0]:.3f}" for name in (best, "ballot")]
        added = [f"{loss[name][0]:.3f}" for name in (best, "ballot", MEASURED)]
        change = f"{kl[MEASURED][0] / kl[best][0] - 1:+.0%}"
        kind = KINDS.get(row["kind"], row["kind"])
        lines.append((str(row["slots"]), kind, f"`{best}`", *figures, _triple(kl[MEASURED]), change, *added))
    header = ("slots", "kind", "best published", "its KL", "`ballot`", "measured budgets", "change")
    return table((*header, "loss: best published", "`ballot`", "measured"), *lines)


def small_listed() -> str:
    """Return the table of methods in quantized caches that have as many bytes as a float16 cache, beside that cache.

    Each line averages over the texts that all of its methods have.
    """
    results = {(r["budget"], r["dtype"], r["method"]): r for r in load("small-listed")["rows"].values()}
    for name, recipe, group, label in (
        ("keepkv", "smollm2-135m-base", "methods", "keepkv"),
        ("ballot", "smollm2-135m-base", "methods", "ballot"),
        ("listed", "smollm2-135m-listed", "listed", "ballot"),
        ("heads", "smollm2-135m-heads", "listed", "ballot"),
    ):
        if not (ROOT / "benchmarks" / "results" / f"sweep-{recipe}.json").exists():
            continue  # not measured yet
        for row in load(f"sweep-{recipe}")["groups"][group]["rows"]:
            if row["label"] == label:
                kl = row["scores"]["text"]["samples"]["kl"]
                results[row["budget"], "float16", name] = {"slots": row["slots"], "kl": kl}
    lines = []
    for budget, dtype in itertools.product((0.05, 0.125, 0.25), ("float16", "int8", "k8v4")):
        cells = [results.get((budget, dtype, name)) for name in ("keepkv", "ballot", "listed", "heads")]
        measured = [cell for cell in cells if cell]
        count = min((len(cell["kl"]) for cell in measured), default=0)
        kl = [shown(asdict(mean(cell["kl"][:count]))) if cell else "" for cell in cells]
        if measured:
            lines.append((BUDGETS[budget], dtype, str(measured[-1]["slots"]), *kl, str(count)))
    return table(
        ("budget", "keys and values", "slots", "`keepkv`", "`ballot`", "... of layers", "... of heads", "texts"), *lines
    )


def head_budgets() -> str:
    """Return the table of KL in simulated budgets of layers and of heads."""
    kl = load("head-budgets")["kl"]["other"]
    variants = list(dict.fromkeys(key.partition(", ")[2] for key in kl))
    slots = sorted({int(key.partition(" ")[0]) for key in kl})
    texts = {key: mean(list(row.values())) for key, row in kl.items()}
    shown = {v: [texts.get(f"{n} slots, {v}") for n in slots] for v in variants}
    lines = [(v, *("" if x is None else f"{x.value:.3g}" for x in row)) for v, row in shown.items()]
    return table(("budgets", *(f"{n} slots" for n in slots)), *lines)


def once(task: str) -> str:
    """Return the table of contexts that are compressed once.

    For texts it shows the KL of the tokens that follow, for passages the exact answers and the right digits.
    """
    rows = [r for r in load("once")["rows"] if r["task"] == task]
    figures = ("kl",) if task == "text" else ("exact", "digits")
    cells = {(r["method"], r["divisor"]): [*(shown(r[x]) for x in figures), str(len(r["each"]))] for r in rows}
    parts = sorted({r["divisor"] for r in rows if r["divisor"] > 1})
    blank, lines = [""] * (len(figures) + 1), []
    for method in dict.fromkeys(r["method"] for r in rows):
        whole = cells.get((method, 1))
        row_cells = [whole or cells.get((method, part), blank) for part in parts]
        lines.append((f"`{method}`", *(cell for part in row_cells for cell in part)))
    counted = "texts" if task == "text" else "passages"
    return table(("method", *(f"1/{part}, {x}" for part in parts for x in (*figures, counted))), *lines)


def calibration_cost() -> str:
    """Return the table of the time and memory that measuring one text takes."""
    names = {"smollm2": "SmolLM2-135M", "1b": "1.1B Llama", "7b": "7B Llama"}
    rows = load("calibration-cost")["rows"].values()
    lines = [
        (
            names[r["shape"]],
            str(r["tokens"]),
            f"{r['seconds']:.0f} s",
            f"{r['ten_texts_minutes']:.0f} min" if r["ten_texts_minutes"] >= 10 else f"{r['ten_texts_minutes']} min",
            f"{r['start_megabytes'] / 1e3:.2f} GB",
            f"{r['peak_megabytes'] / 1e3:.2f} GB",
            f"{r['estimate_megabytes'] / 1e3:.2f} GB",
        )
        for r in rows
    ]
    header = ("model", "tokens of a text", "one text", "ten texts", "memory before", "memory at most", "estimate")
    return table(header, *lines)


def calibration_texts() -> str:
    """Return the table of the KL of budgets that were calibrated on fewer or shorter texts."""
    lines = [
        (
            "no calibration: equal budgets" if r["calibration"] == "equal" else r["calibration"],
            _triple(r["kl"]),
            f"{r['loss'][0]:.3f}",
        )
        for r in load("calibration-texts")["rows"]
    ]
    return table(("calibration", "KL", "added loss"), *lines)
