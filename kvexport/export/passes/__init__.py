"""Every rewrite of a traced decoder, in the order in which they run.

Most are a `Rewrite` (`report.py`): *pattern, check, rewrite* at every node, with the reason wherever a pattern stood
and the check said no. Each module shows at its head what it looks for and what becomes of it. A pass that cannot be
sure leaves the nodes as they are; the graph means the same either way. How often each pass applied, where it was
refused and why: `logging.basicConfig(level="DEBUG")` before `kvexport.build`, logger `kvexport.export.passes`.

What changes nothing but is proved of every graph stands in `GRAPH_CHECKS`; it runs on the finished graph, with the
functions of its operators.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from kvexport.export.passes.in_place import check_in_place
from kvexport.export.passes.last_rows import LAST_ROWS
from kvexport.export.passes.linear.bias import BIAS
from kvexport.export.passes.linear.gate import GATE
from kvexport.export.passes.linear.heads import INPUT_HEADS, OUTPUT_HEADS
from kvexport.export.passes.linear.norm import NORM
from kvexport.export.passes.linear.product import PRODUCT
from kvexport.export.passes.linear.residual import RESIDUAL
from kvexport.export.passes.linear.rotary import ROTARY
from kvexport.export.passes.linear.shared_input import SHARED_INPUT
from kvexport.export.passes.linear.written_rotary import WRITTEN_ROTARY
from kvexport.export.passes.norm_types import NORM_TYPES
from kvexport.export.passes.order import remove_unused, sort_nodes
from kvexport.export.passes.report import Pass

DECODER_PASSES: tuple[Pass, ...] = (
    NORM_TYPES,
    # Every product becomes a Linear, with what follows it.
    PRODUCT,
    BIAS,
    GATE,
    RESIDUAL,
    OUTPUT_HEADS,
    INPUT_HEADS,
    # While a Linear has one product: of such it is known which of its inputs are rows.
    LAST_ROWS,
    remove_unused,
    # Linears of one input become one, with the norm before them and the rotary embedding of their heads.
    SHARED_INPUT,
    NORM,
    WRITTEN_ROTARY,
    ROTARY,
    sort_nodes,
    remove_unused,
)
# Raise KvexportError.
GRAPH_CHECKS: tuple[Callable[[onnx.ModelProto], None], ...] = (check_in_place,)
