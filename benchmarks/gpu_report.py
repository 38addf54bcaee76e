"""The page of `gpu_check`: its parts, and its figures beside their floors."""

from __future__ import annotations

from typing import Any

from kvexport.report import KeyValues, Plot, Section, Series, Table, render_html


def page(report: dict[str, Any]) -> str:
    """One self-contained HTML page of a report as check.json holds it."""
    parts = report["parts"]
    rows = [[name, part["status"], part["seconds"], part.get("why", "")] for name, part in parts.items()]
    failed = {(i, 1) for i, row in enumerate(rows) if row[1] == "failed"}
    sections: list[Section] = [
        KeyValues("GPU", report["gpu"]),
        Table("Parts", ["part", "status", "seconds", "why"], rows, highlight=failed),
    ]
    for name in ("decode", "prefill", "merge"):
        found = parts.get(name, {}).get("figures", {}).get("rows", [])
        if found:
            sections.append(Table(name.capitalize(), list(found[0]), [list(row.values()) for row in found]))
    decode = parts.get("decode", {}).get("figures", {}).get("rows", [])
    if decode:
        series = [_line(decode, kind) for kind in dict.fromkeys(row["statistic"] for row in decode)]
        note = "Bytes over what a copy of one gigabyte moves per second; the caches in turn are larger than the device's own."
        sections.append(Plot("Decode: share of the copy bandwidth", "bytes of a step", "share", series, x_log=True, note=note))
    engines = parts.get("onnxruntime", {}).get("figures", {})
    if engines:
        note = "Beside the graphs' functions on the CPU; over the largest logit."
        table = [[name, *found.values()] for name, found in engines.items()]
        sections.append(Table("Engines on ONNX Runtime", ["engine", *next(iter(engines.values()))], table, note))
    return render_html("CUDA kernels", f"{report['gpu']['name']}, {report['date']}, commit {report['commit']}", sections)


def _line(rows: list[dict[str, Any]], kind: str) -> Series:
    of_kind = sorted((row["bytes"], row["share of copy"]) for row in rows if row["statistic"] == kind)
    return Series(kind, [x for x, _ in of_kind], [y for _, y in of_kind])
