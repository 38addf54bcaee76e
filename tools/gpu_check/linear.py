"""Time of Linear: the part `linear` of `gpu_check`.

The matrices are those of a layer of Llama-2-7B, packed and in float16, with the fused operations around them. Their
times stand next to the time that their bytes take and to PyTorch's products in float16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from kvexport.ops.linear import Form
from kvexport.ops.packed import PackedFormat
from tests.conformance.cuda_linear import Case, Weight
from tools.gpu_check.parts import bandwidth
from tools.gpu_check.target import Figures, Row, Target

# Outputs of each product, inputs, and the form: queries, keys and values; the output; gate and up; down.
MATRICES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "query, key, value": (
        (4096, 4096, 4096),
        4096,
        {"norm": 1, "epsilon": 1e-5, "output_heads": (32, 32, 32), "bias": (0, 0, 0), "rotated": (1, 1, 0)},
    ),
    "output": ((4096,), 4096, {"residual": 1}),
    "gate and up": ((11008,), 4096, {"norm": 1, "epsilon": 1e-5, "gate": 1}),
    "down": ((4096,), 11008, {"residual": 1}),
}
WEIGHTS = {
    "int4": PackedFormat(4, True, 32),
    "int8": PackedFormat(8, True, 32),
    "float16": None,
}
ROWS = (1, 8, 32, 512)
COLD = 3e8  # bytes of copies: enough that none is still in a cache of the device when its turn comes again


def linear(target: Target) -> Figures:
    """Measure the microseconds of each matrix for each number of rows."""
    figures: Figures = {"bytes per second": bandwidth(target)["bytes per second"]}
    cases = [(rows, name, kind) for rows in ROWS for name in MATRICES for kind in WEIGHTS]
    if target.small:
        cases = [*cases[:3], cases[-6]]
    return target.rows(cases, figures, lambda case: row_of(target, *case, figures))


def row_of(target: Target, rows: int, name: str, kind: str, figures: Figures) -> Row:
    """Return the row of one matrix."""
    sizes, inputs, steps = MATRICES[name]
    if target.small:
        rows, sizes, inputs = min(rows, 33), tuple(64 for _ in sizes), 128
        steps = steps | ({"output_heads": (2, 2, 2)} if "output_heads" in steps else {})
    one = call_of(rows, sizes, inputs, steps, WEIGHTS[kind])
    nbytes = sum(x.nbytes for weight in one.weights.values() for x in weight.parts.values())
    copies = target.scaled(max(2, int(COLD / nbytes)), 2)
    caller, calls = target.caller, []
    for _ in range(copies):
        call, _outputs = one.call(caller)
        calls.append(enqueuer(target, call))
    ours = statistics.median(target.seconds(calls))
    floor = nbytes / figures["bytes per second"]
    products = 2 * rows * inputs * sum(weight.values.shape[0] for weight in one.weights.values())
    row: Row = {"matrix": name, "weights": kind, "rows": rows, "bytes": nbytes, "us": ours * 1e6}
    row |= {"share of bandwidth": floor / ours, "TFLOPs": products / ours / 1e12, "torch us": None}
    if not target.on_host:
        row["torch us"] = statistics.median(target.seconds(products_by_torch(rows, sizes, inputs, one, copies))) * 1e6
    return row


def call_of(
    rows: int, sizes: tuple[int, ...], inputs: int, steps: dict[str, Any], packing: PackedFormat | None
) -> Case:
    """Return a call over random bytes, on whose values the time does not depend."""
    form, rng = Form(**steps), np.random.default_rng(0)
    if packing:
        count = form.weights
        form = Form(**steps, packed=(1,) * count, group=(packing.group,) * count)

    def normal(*shape: int) -> np.ndarray:
        return np.resize(rng.normal(size=1 << 12).astype(np.float16), shape)

    def weight(outputs: int) -> Weight:
        shape = (outputs, inputs)
        stands_for = np.broadcast_to(np.zeros(1), shape)
        if packing is None:
            return Weight({"weight": normal(*shape)}, stands_for)
        held = np.resize(rng.integers(0, 256, 1 << 16, np.uint8), outputs * inputs * packing.bits // 8)
        return Weight({"weight": held, "scale": normal(outputs, inputs // packing.group)}, stands_for, packing)

    weights = {f"weight{i}": weight(size) for i, size in enumerate(sizes)} | (
        {"gate": weight(sizes[0])} if form.gate else {}
    )
    feeds = {"input": normal(1, rows, inputs), "norm": normal(inputs), "residual": normal(1, rows, sizes[0])}
    planes = sizes[0] // max(1, form.output_heads[0]) // 2
    feeds |= {name: normal(1, rows, planes) for name in ("cosine", "sine")}
    return Case(form, "float16", {name: x for name, x in feeds.items() if name in form.inputs}, weights)


def enqueuer(target: Target, call: Any) -> Callable[[], None]:
    """Return a function that enqueues the kernels of this call of Linear."""
    return lambda: target.caller.prepared("linear", call)()


def products_by_torch(rows: int, sizes: tuple[int, ...], inputs: int, one: Case, copies: int) -> list[Any]:
    """Return the same products in float16 by PyTorch, without the operations around them.

    The number of copies of the weights makes their bytes equal to those of the packed call.
    """
    import torch

    outputs = sum(weight.values.shape[0] for weight in one.weights.values())
    x = torch.zeros(rows, inputs, dtype=torch.float16, device="cuda")
    weights = [
        torch.zeros(outputs, inputs, dtype=torch.float16, device="cuda")
        for _ in range(max(2, min(copies, int(COLD / (2 * outputs * inputs)))))
    ]
    return [lambda weight=weight: torch.nn.functional.linear(x, weight) for weight in weights]


PARTS = {"linear": linear}
