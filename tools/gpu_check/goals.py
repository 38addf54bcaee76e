"""Comparison of the figures of `gpu_check` with their goals: a row per figure, with None if its part measured none."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def goals(parts: dict[str, Any]) -> list[Row]:
    figures = {name: part.get("figures", {}) for name, part in parts.items()}
    rows = [*_decode(figures.get("decode", {}).get("rows", [])), *_prefill(figures.get("prefill", {}).get("rows", []))]
    rows += _model(figures.get("model", {}))
    rows += _launches(figures.get("launches", {}).get("rows", []))
    rows.append(_goal("Runs of the same bits", figures.get("repeat", {}).get("runs"), least=1000))
    proof = figures.get("conformance", {})
    for dtype, allowed in {"float32": 1e-5, "float16": 2e-3}.items():
        error = proof.get("largest error", {}).get(dtype)
        rows.append(_goal(f"Largest error against the float64 oracle, {dtype}", error, most=allowed))
    return rows


def _goal(figure: str, measured: float | None, least: float | None = None, most: float | None = None) -> Row:
    goal = f"at least {least:g}" if least is not None else f"at most {most:g}" if most is not None else ""
    met = None
    if measured is not None and goal:
        met = (least is None or measured >= least) and (most is None or measured <= most)
    return {"figure": figure, "measured": measured, "goal": goal, "met": met}


def _of(rows: list[Row], worst: Any, value: Any) -> float | None:
    values = [value(row) for row in rows if value(row) is not None]
    return worst(values) if values else None


def _decode(rows: list[Row]) -> list[Row]:
    quantized_caches = [row for row in rows if row["cache"] != "float16"]
    rows = [row for row in rows if row["cache"] == "float16"]
    large = [row for row in rows if row["bytes"] >= 64 << 20]
    small = [row for row in rows if row["bytes"] < 64 << 20]

    def over(peer: str) -> Any:
        return lambda row: row[f"{peer} us"] / row["us"] if row.get(f"{peer} us") else None

    return [
        _goal(
            "Decode, layers of 64 MB and more: share of the copy bandwidth",
            _of(large, min, lambda row: row["share of copy"]),
            least=0.8,
        ),
        _goal(
            "Decode, smaller layers: over bytes / (0.85 bandwidth) + 5 us",
            _of(small, max, lambda row: row["us"] / row["goal us"]),
            most=1,
        ),
        _goal("Decode: PyTorch's flash attention over ours", _of(rows, min, over("torch")), least=1),
        _goal("Decode: FlashInfer over ours", _of(rows, min, over("flashinfer")), least=1),
        _goal(
            "Decode over a quantized cache: share of the copy bandwidth",
            _of(quantized_caches, min, lambda row: row["share of copy"]),
        ),
    ]


def _prefill(rows: list[Row]) -> list[Row]:
    kept = [row for row in rows if row["statistic"] != "none"]
    share = _of(kept, min, lambda row: row.get("share of torch"))
    return [
        _goal("Prefill of 512 against 2048 slots with statistics: share of PyTorch's flash attention", share, least=0.7)
    ]


def _launches(rows: list[Row]) -> list[Row]:
    compared = []
    for model in ("SmolLM2-135M", "Llama-2-7B"):
        early = [row for row in rows if row["model"] == model and row["begin"] == "early"]
        order = _of(early, max, lambda row: row["over in order"])
        compared.append(_goal(f"The attention of a step, {model}: early launches over those in order", order, most=1))
    return compared


def _model(model: Row) -> list[Row]:
    rows = [row for row in model.get("rows", []) if "ms" in row]
    speed = {row["method"]: row["tokens per second"] for row in model.get("methods", []) if "ms" in row}
    merging = _of(
        [*rows, *(row for row in model.get("methods", []) if "ms" in row)], max, lambda row: row["merging over without"]
    )
    compared = [
        _goal(
            "Llama-2-7B's shape: a step over the time of its bytes",
            _of(rows, max, lambda row: row["over the floor"]),
            most=1.2,
        ),
        _goal("A step with merging every 32 over one without", merging, most=1.03),
    ]
    for method in ("keepkv", "ballot"):
        both = speed.get(method), speed.get("h2o")
        compared.append(_goal(f"Throughput: {method} over h2o", both[0] / both[1] if all(both) else None, least=0.97))
    full = [row for row in model.get("largest batch", []) if "ms" in row]
    ours = next((row for row in full if row["cache"] == "keepkv"), None)
    for row in full:
        if ours is not None and row is not ours:
            what = (
                f"Throughput of full batches: keepkv, {ours['slots']} slots, over {row['cache']}, {row['slots']} slots"
            )
            compared.append(_goal(what, ours["tokens per second"] / row["tokens per second"]))
    return compared
