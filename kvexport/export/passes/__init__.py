"""Every rewrite of a traced decoder's ONNX graph, in the order in which they run.

Most are a `Rewrite` (`report.py`): a *pattern*, a *check* and a *rewrite*, tried at every node. If the pattern matches
and the check refuses, the report has the reason. The docstring of each module shows the nodes that it looks for, and
the nodes that replace them. A pass that is not certain does not change the nodes; the graph computes the same in both
cases. To see how often each pass applied, where it was refused and why, call `logging.basicConfig(level="DEBUG")`
before `kvexport.build`; the logger is `kvexport.export.passes`.

`GRAPH_CHECKS` has the checks that change nothing. They run on every finished graph, with the functions of its
operators.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from kvexport.export.passes.in_place import check_in_place
from kvexport.export.passes.last_rows import LAST_ROWS
from kvexport.export.passes.linear.adapters import ADAPTERS
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
    ADAPTERS,
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
# An encoder's products are ONNX Runtime's own: they read the whole image at once.
ENCODER_PASSES: tuple[Pass, ...] = (NORM_TYPES, remove_unused, sort_nodes)
# Raise KvexportError.
GRAPH_CHECKS: tuple[Callable[[onnx.ModelProto], None], ...] = (check_in_place,)
