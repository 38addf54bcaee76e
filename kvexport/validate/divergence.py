"""The distance between the engine's next-token distributions and the uncompressed model's."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]


def kl(p_logits: Row, q_logits: Row) -> float:
    """Return KL(softmax(p) || softmax(q)) in nats for the logits p and q; infinite if a logit is not finite."""
    if not (np.isfinite(p_logits).all() and np.isfinite(q_logits).all()):
        return float("inf")
    p, q = (x.astype(np.float64) - x.max() for x in (p_logits, q_logits))
    log_p, log_q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    return max(0.0, float((np.exp(log_p) * (log_p - log_q)).sum()))


def compared_positions(rows: list[dict[int, Row]], budgets: list[int]) -> list[list[int]]:
    """Return the positions beyond the smallest budget, or all if no sequence is longer than that."""
    start = min(budgets)
    past = [[p for p in sorted(of) if p >= start] for of in rows]
    return past if any(past) else [sorted(of) for of in rows]


def untouched_positions(rows: list[dict[int, Row]], budgets: list[int]) -> list[list[int]]:
    return [[p for p in sorted(of) if p < min(budgets)] for of in rows]


def mean_kl_at(positions: list[list[int]], own: list[dict[int, Row]], full: list[dict[int, Row]]) -> tuple[float, int]:
    values = [
        kl(full_rows[p], engine_rows[p])
        for at, engine_rows, full_rows in zip(positions, own, full, strict=True)
        for p in at
    ]
    return float(np.mean(values)) if values else 0.0, len(values)


def loss(logits: Row, token: int) -> float:
    row = logits.astype(np.float64) - logits.max()
    return float(np.log(np.exp(row).sum()) - row[token])


def measure_divergence(
    result: Any,
    tokens: list[NDArray[np.int64]],
    positions_of: list[list[int]],
    own: list[dict[int, Row]],
    full: list[dict[int, Row]],
) -> None:
    """Append each sequence's KL, agreement of the likeliest tokens, and mean losses to `result`."""
    for ids, positions, engine_rows, full_rows in zip(tokens, positions_of, own, full, strict=True):
        known = [p for p in positions if p + 1 < len(ids)]
        losses = [[loss(rows[p], ids[p + 1]) for p in known] for rows in (full_rows, engine_rows)]
        result.losses.append(tuple(map(float, np.mean(losses, 1))) if known else None)
        result.positions.append(positions)
        result.kl.append([kl(full_rows[p], engine_rows[p]) for p in positions])
        result.agrees.append([bool(full_rows[p].argmax() == engine_rows[p].argmax()) for p in positions])
