"""Writer of the tables in docs/ and README.md.

    python benchmarks/tables.py

Tables of methods and recipe fields come from their classes, tables of figures from benchmarks/results. Every table is
written between its marks, `<!-- NAME -->` and `<!-- end -->`. A test checks that the documents hold these tables.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from dataclasses import asdict
from itertools import groupby
from typing import Any

from benchmarks.common import RESULTS, ROOT
from kvexport.evaluate.statistics import mean
from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.recipe.describe import describe_fields
from kvexport.recipe.fields import Recipe

BUDGETS = {0.05: "1/20", 0.125: "1/8", 0.25: "1/4", 0.5: "1/2"}


def load(name: str) -> Any:
    """Return the content of benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(*rows: tuple[str, ...]) -> str:
    """Return a table in Markdown; the first row is the header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def name_of(label: str) -> str:
    """Return a label as Markdown: "keepkv:cache.recent=0.1" as "`keepkv`, `recent: 0.1`"."""
    method, *settings = label.split(":")
    short = (setting.removeprefix("cache.").removeprefix("export.").replace("=", ": ") for setting in settings)
    return ", ".join(f"`{part}`" for part in (method, *short))


def shown(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:.3g} [{estimate['low']:.2g}, {estimate['high']:.2g}]"


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
# Parts of the names of packed weights, as results have them and as the table shows them.
WEIGHTS = {
    "head float": "output head in float32",
    "float inputs": "inputs not rounded",
    "groups of 32": "groups of 32 inputs",
    "groups of 64": "groups of 64 inputs",
    "head of 8": "output head in 8 bits",
    "head of q8_0": "output head in `q8_0`",
    "all": "output head too",
    "zero points": "with zero points",
}
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
    header = ("method", "what it does", "score", "bias of a logit (votes: tokens of a slot)", "layer budgets", "source")
    return table(header, *(_method(method()) for method in all_methods().values()))


def _method(method: Method) -> tuple[str, ...]:
    alpha = method.vote_exponent
    bias = {0.0: "0", 1.0: "ln(votes)"}.get(alpha, f"{alpha:g} ln(votes)")
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
    minus = f" minus that of `{PAIRED[recipe]}`"
    return _by_budget([r for r in rows if r["label"] != PAIRED[recipe]], estimates, figure, minus)


def _by_budget(rows: list[Any], by_cell: dict[tuple[str, float], Any], figure: str, minus: str = "") -> str:
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
    what = "share of right answers" if figure == "accuracy" else "KL from the full cache in nats"
    return table((f"{what}{minus}, by method", *(f"budget {BUDGETS[b]}" for b in budgets)), *lines)


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
    return table(("group", "setting", "KL on text", f"KL on `{tasks[1]}`", f"`{tasks[1]}`, share right"), *rows)


def stability(recipe: str) -> str:
    """Return the table of every method, and of the full cache, over 20 training lengths."""
    rows = load(f"stability-{recipe}")["rows"]
    full = next(r for r in rows if r["label"] == "full")["key_norm"][1]
    header = (
        "method",
        "slots",
        "all values finite",
        "largest key norm",
        "ratio to the full cache's norm",
        "loss in the first window, nats",
        "loss in the last window, nats",
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


def packed_speed() -> str:
    """Return the table of engines of packed weights beside their peers, by processor and instruction set."""
    lines = []
    for processor, model, weights in itertools.product(PACKED_PROCESSORS, PACKED_MODELS, ("int4", "int8", "float16")):
        name = f"quantized-{model}-{weights}-{processor}"
        if not (RESULTS / f"{name}.json").exists():
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
    header = ("processor", "date", "model", "weights", "tokens", "kvexport, full cache", "kvexport, 512 slots")
    peers = ("onnxruntime-genai", "llama.cpp", "full cache / faster peer", "512 slots / faster peer")
    return table((*header, *peers), *lines)


def packed_quality() -> str:
    """Return the table of the KL that rounded weights cost, by side."""
    lines = []
    for name, r in load("quantized_quality")["rows"].items():
        if "kl" in r:
            kl = f"{r['kl']:.3g} ({r['kl_standard_error']:.1g})"
            lines.append((_weights(name), f"{r['weight_bytes'] / 1e6:.0f}", kl, f"{r['agreement']:.3f}"))
    header = ("weights", "MB", "KL from float32 weights, nats (standard error)", "share of equal likeliest tokens")
    return table(header, *lines)


def _weights(name: str) -> str:
    """Return the name of packed weights in a result, such as "int4, head of 8", as Markdown."""
    kind, *parts = name.split(", ")
    return ", ".join([f"`{kind}`", *(WEIGHTS[part] for part in parts)])


# Recipes with measured budgets of layers (MODEL-listed) or of KV heads (MODEL-heads).
LISTED = tuple(f"{model}-{of}" for model in ("tiny", "small", "smollm2-135m") for of in ("listed", "heads"))


def listed() -> str:
    """Return the table of `ballot` in measured budgets (recipes *-listed, *-heads) beside the method of the lowest KL.

    The other methods have their own budgets.
    """
    lines = []
    for recipe in LISTED:
        model, _, of = recipe.rpartition("-")
        if not (RESULTS / f"sweep-{recipe}.json").exists():
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
                of_what = "KV head" if of == "heads" else "layer"
                lines.append((model, task, BUDGETS[row["budget"]], of_what, *cells))
    header = ("model", "task", "budget", "measured for each", "best other method", "KL of the other method")
    ours = ("KL, measured budgets", "change of the KL", "recall of the other method", "recall, measured budgets")
    return table((*header, *ours), *lines)


TEXT_KINDS = {"prose": "English prose", "german": "German", "french": "French", "python": "Python", "c++": "C++"}
LENGTH = 1024  # tokens that budget_kinds.py reads
MEASURED = "ballot, budgets of heads"


def _triple(values: list[float]) -> str:
    return shown(dict(zip(("value", "low", "high"), values, strict=True)))


def _text_kinds() -> list[dict[str, Any]]:
    """Return the rows of budget_kinds.py's results, by slots and kind of text."""
    names = [f"budget-kinds-{slots}" for slots in (64, 128, 256)]
    known = [name for name in names if (RESULTS / f"{name}.json").exists()]
    return [row for name in known for row in load(name)["rows"]]


def default_quality() -> str:
    """Return the table of KL on held-out texts: published methods, `ballot`, and `ballot` as a build sets it up.

    The lowest KL of a column is in bold.
    """
    columns = [row for row in _text_kinds() if row["kind"] == "held-out"]
    best = [min(row["kl"], key=lambda method: row["kl"][method][0]) for row in columns]
    names = {MEASURED: "`ballot`, measured budgets (default of `kvexport build`)"}
    lines = []
    for method in columns[0]["kl"]:
        cells = [_triple(row["kl"][method]) for row in columns]
        cells = [f"**{cell}**" if method == top else cell for cell, top in zip(cells, best, strict=True)]
        lines.append((names.get(method, f"`{method}`"), *cells))
    budgets = (f"budget 1/{LENGTH // row['slots']}" for row in columns)
    return table(("KL from the full cache in nats, by method", *budgets), *lines)


def budget_kinds() -> str:
    """Return the table of KL and loss on each kind of text that the calibration of the budgets did not read."""
    lines = []
    for row in _text_kinds():
        if row["kind"] == "held-out":
            continue
        kl, loss = row["kl"], row["loss"]
        best = min((name for name in kl if not name.startswith("ballot")), key=lambda name: kl[name][0])
        figures = [f"{kl[name][0]:.3f}" for name in (best, "ballot")]
        added = [f"{loss[name][0]:.3f}" for name in (best, "ballot", MEASURED)]
        change = f"{kl[MEASURED][0] / kl[best][0] - 1:+.0%}"
        kind = TEXT_KINDS.get(row["kind"], row["kind"])
        lines.append((str(row["slots"]), kind, f"`{best}`", *figures, _triple(kl[MEASURED]), change, *added))
    header = ("slots", "kind of text", "best published method", "KL of that method", "KL of `ballot`")
    measured = ("KL of `ballot`, measured budgets", "change of the KL")
    added = ("added loss: published", "added loss: `ballot`", "added loss: measured budgets")
    return table((*header, *measured, *added), *lines)


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
    header = (
        "model",
        "tokens of a text",
        "time, one text",
        "time, ten texts",
        "memory before",
        "memory at most",
        "estimate",
    )
    return table(header, *lines)


PEERS = ("llamacpp", "genai")
MEANING = {
    "equal": "every logit is within 1e-4 of the largest logit, and the most likely next tokens are equal",
    "refused": "the build stops with a reason, before it reads a weight",
    "no text": "transformers does not run the model on tokens alone",
    "not made": "transformers cannot make the tiny model of this page here",
    "different": "a logit differs by more, without an error",
    "leaked": "the build ends with an exception of torch or transformers, without a reason of kvexport",
}
LONGEST = 200  # characters of a reason
ISAS = ("amx", "avx512vnni")


def decoder_tables() -> dict[str, str]:
    types: dict[str, Any] = load("decoder-types")["types"]
    named = {result: [name for name, x in types.items() if x["result"] == result] for result in MEANING}
    counts = [(result, meaning, str(len(named[result]))) for result, meaning in MEANING.items()]
    counts.append(("all", "", str(len(types))))
    by_initial = groupby(named["equal"], key=lambda name: name[0])
    equal = [(initial, ", ".join(f"`{name}`" for name in names)) for initial, names in by_initial]
    others = [name for result in ("no text", "not made", "different", "leaked") for name in named[result]]
    return {
        "decoder types": table(("result", "meaning", "types"), *counts),
        "decoder types equal": table(("initial", "types"), *equal),
        "decoder types refused": table(
            ("type", "reason"), *(_type_row(name, types[name]) for name in named["refused"])
        ),
        "decoder types of other results": table(("type", "reason"), *(_type_row(name, types[name]) for name in others)),
        "decoders": decoders(),
        "decoders file": decoders_of_a_file("avx512vnni"),
        "decoders file amx": decoders_of_a_file("amx"),
        "richer slots": richer_slots("smollm2-135m"),
        "richer slots budgets": richer_slots("smollm2-135m-budgets"),
        "decoders file avx2": decoders_of_a_file("avx2"),
        "decoders file xeon": decoders_of_a_file("avx512vnni-xeon"),
    }


def decoders() -> str:
    """Return the table of mixtures of experts and hybrids beside llama.cpp and onnxruntime-genai."""
    rows = []
    for isa in ISAS:
        found = load(f"decoders-{isa}")
        for what, r in found.items():
            if not isinstance(r, dict) or "tokens_per_second" not in r:
                continue
            name, _, kind = what.partition(", ")
            speed, goal = r["tokens_per_second"], r.get("goal")
            layers = str(found["layers"][name])
            sides = [f"{speed[side]:g}" if side in speed else "" for side in ("kvexport", *PEERS)]
            ratios = [f"{r[f'over_{peer}']:.2f}" if peer in speed else "" for peer in PEERS]
            rows.append((name, layers, isa, kind, *sides, *ratios, f"{goal:g}" if goal else ""))
    peers = ("llama.cpp", "onnxruntime-genai", "kvexport / llama.cpp", "kvexport / onnxruntime-genai")
    header = (
        "layers of the model",
        "number of layers",
        "instruction set",
        "tokens",
        "kvexport",
        *peers,
        "goal of the ratio",
    )
    return table(header, *rows)


def decoders_of_a_file(isa: str) -> str:
    """Return the table of a GGUF file that people have beside llama.cpp and the other programs that were measured."""
    found = {what: r for what, r in load(f"decoders-file-{isa}").items() if isinstance(r, dict) and "over_slots" in r}
    sides = {"kvexport": "kvexport, full cache", "slots": "kvexport, 512 slots", "llamacpp": "llama.cpp"}
    over = {"over_llamacpp": "full cache / llama.cpp", "over_llamacpp_with_slots": "512 slots / llama.cpp"}
    for side, title in {"node": "llama.cpp, AVX-512", "openvino": "OpenVINO GenAI"}.items():
        if all(f"over_{side}" in r for r in found.values()):
            sides[side], over[f"over_{side}"] = title, f"full cache / {title}"
    rows = []
    for what, r in found.items():
        speed = [f"{r['tokens_per_second'][side]:.1f}" for side in sides]
        rows.append((what, *speed, *(f"{r[key]:.2f}" for key in over)))
    return table(("file, tokens", *sides.values(), *over.values()), *rows)


def many_sessions(name: str) -> str:
    """Return the table of many_sessions.py."""
    caches = {
        "kvexport": ("kvexport", "{slots} slots, 8 bits"),
        "int4": ("kvexport", "{slots} slots, 4 bits"),
        "openvino": ("OpenVINO GenAI", "whole text, 8 bits"),
        "evicting": ("OpenVINO GenAI", "{slots} tokens, evicting"),
        "llamacpp": ("llama.cpp", "whole text, `q8_0`"),
    }
    rows = []
    for what, sides in load(f"many-sessions-{name}").items():
        if " sessions of " not in what:
            continue
        for side, r in sides.items():
            program, cache = caches[side]
            speeds = [f"{r[f'{kind}_tokens_per_second']:.1f}" for kind in ("prompt", "decoded")]
            rows.append((what, program, cache.format(slots=r["slots"]), *speeds, f"{r['peak_MB']:,}"))
    columns = ("sessions", "program", "KV cache", "prompts, tokens/s", "decode, tokens/s", "peak memory, MB")
    return table(columns, *rows)


def richer_slots(name: str) -> str:
    """Return the table of richer slots and of peers' eviction rules beside `ballot`, lowest KL first."""
    rows = []
    for measured in load(f"richer-slots-{name}").values():
        if not isinstance(measured, dict) or "ballot" not in measured:
            continue
        for label, row in sorted(measured.items(), key=lambda x: float(x[1]["kl"][0])):
            less = row.get("less ballot")
            change = f"{less[0]:+.4f} [{less[1]:.4f}, {less[2]:.4f}]" if less else ""
            kinds = [f"{row[kind][0]:.3f}" for kind in ("manual", "code", "german")]
            rows.append((label, str(row["slots"]), f"{row['kl'][0]:.4f}", change, *kinds))
    columns = ("rule", "slots", "KL, nats", "KL minus that of `ballot`", "KL: manual", "code", "German")
    return table(columns, *rows)


def _type_row(name: str, result: dict[str, Any]) -> tuple[str, str]:
    reason = result["reason"].replace("|", "\\|").replace("<", "&lt;")
    return f"`{name}`", reason if len(reason) <= LONGEST else f"{reason[:LONGEST]} ..."


# SmolLM2-135M has 30 layers of 3 KV heads of 64; the cache is float32, with 512 slots and a slack of one chunk.
FIGURE = ROOT / "docs" / "_static" / "length.svg"
HEADS, ROW, SLOTS, CHUNK = 30 * 3, 2 * 64 * 4, 512, 128
SLOT = ROW + 3 * 4  # bytes of keys and values, and of votes, one score and the position
BLUE, ORANGE = "#0072b2", "#d55e00"  # of Okabe and Ito, which colour-blind readers can tell apart
STYLE: Any = {
    "svg.fonttype": "none",  # text that can be selected and searched
    "svg.hashsalt": "kvexport",  # equal input gives equal ids
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e8ec",
    "legend.frameon": False,
}


def length_figure() -> str:
    """Return the figure of README.md: time per token and memory of the cache by text length, beside the full cache."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    results = load("quantized-smollm2-int4-epyc")
    speed = {int(key.split()[1]): row["tokens_per_second"] for key, row in results.items() if key.startswith("decode ")}
    lengths = sorted(speed)
    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 3), layout="constrained")
        figure.set_facecolor("white")
        time, memory = figure.subplots(1, 2)
        for name, side, colour, most in (
            ("full cache", "full", ORANGE, lengths[-1]),
            ("512 slots", "keepkv", BLUE, SLOTS + CHUNK),
        ):
            time.plot(lengths, [1000 / speed[n][side] for n in lengths], color=colour, marker="o", label=name)
            grid = sorted({0, SLOTS + CHUNK, *lengths})
            memory.plot(grid, [HEADS * SLOT * min(n, most) / 1e6 for n in grid], color=colour, label=name)
        time.set_title("Milliseconds per token")
        memory.set_title("Megabytes of the cache of one sequence")
        for axes in (time, memory):
            axes.set_xlabel("tokens of text")
            axes.set_xlim(0)
            axes.set_ylim(0)
            axes.legend()
        machine = f"{results['machine']['cores']} cores, {results['machine']['cpu']}, {results['date']}"
        figure.supxlabel(f"SmolLM2-135M with 4-bit weights, KeepKV with 512 slots; {machine}", size=8, color="#6b7280")
        text = io.StringIO()
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(
            text, metadata={"Date": None, "Title": "Time per token and memory of the cache by text length"}
        )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def setting_name(setting: str) -> str:
    """Return a setting of ruler.py, such as default:cache.dtype=int8/512, in words."""
    label, _, slots = setting.partition("/")
    method, _, dtype = label.partition(":cache.dtype=")
    words = "full cache" if method == "full" else "default" if method == "default" else f"`{method}`"
    return ", ".join(filter(None, [words, slots and f"{int(slots):,} slots", dtype or "float32"]))


def ruler(name: str) -> str:
    """Return the table of RULER's scores of a model, with the mean's interval, by setting."""
    result = load(f"ruler-{name}")
    tasks = [key for key in result["rows"][0] if key not in ("setting", "bytes", "mean")]
    lines = []
    for row in sorted(result["rows"], key=lambda row: -row["mean"][0]):
        shown_name = setting_name(row["setting"])
        value, low, high = row["mean"]
        scores = [f"{row[task][0]:.2f}" for task in tasks]
        lines.append((shown_name, f"{row['bytes'] / 1e6:.1f}", f"{value:.2f} [{low:.2f}, {high:.2f}]", *scores))
    return table(("cache", "MB", "mean of six tasks", *(f"`{task}`" for task in tasks)), *lines)


def vision_merge() -> str:
    """Return the KL to the full cache of questions about images and texts, by prompt, budget and method."""
    rows = {(row["prompt"], row["parts"], row["method"]): row for row in load("vision-merge")["rows"]}
    methods_of, lines = ("ballot", "keepkv", "h2o"), []
    for prompt, parts in sorted({key[:2] for key in rows if key[2] != "full"}):
        cells = [rows.get((prompt, parts, method)) for method in methods_of]
        full, ballot = rows[prompt, 1, "full"], rows[prompt, parts, "ballot"]
        kl = [f"{cell['image kl'][0]:.2f}, {cell['text kl'][0]:.3f}" if cell else "" for cell in cells]
        right = f"{full['image right'][0]:.2f}, {ballot['image right'][0]:.2f}"
        lines.append((prompt, f"1/{parts}, {ballot['slots']} slots", *kl, right))
    return table(
        (
            "prompt",
            "budget",
            *(f"KL of `{x}`: image, text" for x in methods_of),
            "right about the image: full, `ballot`",
        ),
        *lines,
    )


def tables() -> dict[str, str]:
    texts = {"methods": methods(), "fields of a recipe": fields()}
    texts |= {"listed": listed(), "packed speed": packed_speed(), "packed quality": packed_quality()}
    texts |= {"default quality": default_quality(), "budget kinds": budget_kinds()}
    texts |= {"calibration cost": calibration_cost(), "ruler qwen": ruler("qwen2.5-coder-1.5b")}
    texts |= {"ruler qwen 4096": ruler("qwen2.5-coder-1.5b-4096")}
    texts |= {"vision merge": vision_merge(), "many sessions": many_sessions("qwen2.5-coder-1.5b")}
    texts |= decoder_tables()
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
    FIGURE.write_text(length_figure(), encoding="utf-8")


if __name__ == "__main__":
    main()
