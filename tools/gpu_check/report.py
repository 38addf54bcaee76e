"""The HTML page of `gpu_check`: its parts, and its figures next to their floors."""

from __future__ import annotations

from typing import Any

from kvexport.report.page import render_html
from kvexport.report.sections import KeyValues, Plot, Section, Series, Table


def page(report: dict[str, Any]) -> str:
    """Return one self-contained HTML page of a report in the form of check.json."""
    parts = report["parts"]
    rows = [[name, part["status"], part["seconds"], part.get("why", "")] for name, part in parts.items()]
    failed = {(i, 1) for i, row in enumerate(rows) if row[1] == "failed"}
    goals = report["goals"]
    missed = {(i, 3) for i, row in enumerate(goals) if row["met"] is False}
    sections: list[Section] = [
        KeyValues("GPU", report["gpu"]),
        Table("Goals", list(goals[0]), [list(row.values()) for row in goals], bad=missed),
        Table("Parts", ["part", "status", "seconds", "why"], rows, bad=failed),
    ]
    names = ("decode", "launches", "prefill", "merge")
    tables = [(name.capitalize(), name, "rows") for name in names]
    tables += [("A step of Llama-2-7B's shape", "model", "rows"), ("The same, by method", "model", "methods")]
    tables += [("With as many sequences as fit", part, "largest batch") for part in ("model", "transformers")]
    for title, part, kind in tables:
        if measured := parts.get(part, {}).get("figures", {}).get(kind, []):
            sections.append(_table(title, measured))
    decode = parts.get("decode", {}).get("figures", {}).get("rows", [])
    if decode:
        kinds = dict.fromkeys((row["cache"], row["statistic"]) for row in decode)
        series = [_line(decode, *kind) for kind in kinds]
        note = "Bytes over the bytes that a copy of one gigabyte moves per second; "
        note += "the caches in turn are larger than the device's own."
        sections.append(
            Plot("Decode: share of the copy bandwidth", "bytes of a step", "share", series, x_log=True, note=note)
        )
    steps = [row for row in parts.get("model", {}).get("figures", {}).get("rows", []) if "ms" in row]
    if steps:
        series = [_steps(steps, batch) for batch in dict.fromkeys(row["batch"] for row in steps)]
        note = "Bytes of the weights and of the batch's keys and values, "
        note += "over the bytes that a copy of one gigabyte moves per second."
        sections.append(
            Plot(
                "A step of Llama-2-7B's shape, over the time of its bytes",
                "budget",
                "ratio",
                series,
                x_log=True,
                note=note,
            )
        )
    engines = parts.get("onnxruntime", {}).get("figures", {})
    if engines:
        note = "Beside the graphs' functions on the CPU; over the largest logit."
        table = [[name, *figures.values()] for name, figures in engines.items()]
        sections.append(Table("Engines on ONNX Runtime", ["engine", *next(iter(engines.values()))], table, note))
    plans = parts.get("tensorrt", {}).get("figures", {})
    if plans:
        names = [name for name in next(iter(plans.values())) if name != "operators"]
        rows = [[name, *(figures[column] for column in names)] for name, figures in plans.items()]
        sections.append(Table("Engines on TensorRT", ["engine", *names], rows, "Compared with PyTorch at every step."))
    return render_html(
        "CUDA kernels", f"{report['gpu']['name']}, {report['date']}, commit {report['commit']}", sections
    )


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Return a table; rows may lack columns of other rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Table(title, columns, [[row.get(name) for name in columns] for row in rows])


def _line(rows: list[dict[str, Any]], cache: str, kind: str) -> Series:
    chosen = [row for row in rows if row["cache"] == cache and row["statistic"] == kind]
    of_kind = sorted((row["bytes"], row["share of copy"]) for row in chosen)
    return Series(f"{cache}, {kind}", [x for x, _ in of_kind], [y for _, y in of_kind])


def _steps(rows: list[dict[str, Any]], batch: int) -> Series:
    of_batch = sorted((row["budget"], row["over the floor"]) for row in rows if row["batch"] == batch)
    return Series(f"batch {batch}", [x for x, _ in of_batch], [y for _, y in of_batch])
