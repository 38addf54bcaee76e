"""The report of `gpu_check` as text: its parts, and its figures next to their floors."""

from __future__ import annotations

from typing import Any

from kvexport.report import KeyValues, Section, Table, render_text


def text_of(report: dict[str, Any]) -> str:
    """Return a report in the form of check.json as text."""
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
    return f"{report['gpu']['name']}, {report['date']}, commit {report['commit']}\n\n{render_text(sections)}"


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Return a table; rows may lack columns of other rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Table(title, columns, [[row.get(name) for name in columns] for row in rows])
