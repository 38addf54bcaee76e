"""Every rewrite of a traced decoder's ONNX graph, in the order in which the rewrites run.

Most passes are a `Rewrite` (`report.py`): a *pattern*, a *check* and a *rewrite*, tried at every node. If the pattern
matches but the check refuses, the pass reports the reason. Each pass shows the nodes that it looks for, and the nodes
that replace them. A pass that is not certain that a rewrite is exact leaves the nodes as they are. To see how often
each pass applied, where it was refused and why, call `logging.basicConfig(level="DEBUG")` before `kvexport.build`. The
logger is `kvexport.export.passes`.

`GRAPH_CHECKS` lists the checks of finished graphs, with the functions of their operators. The checks change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from kvexport.export.passes.fusions import (
    ADAPTERS,
    BIAS,
    GATE,
    INPUT_HEADS,
    NORM,
    OUTPUT_HEADS,
    PRODUCT,
    RESIDUAL,
    ROTARY,
    SHARED_INPUT,
)
from kvexport.export.passes.in_place import check_in_place
from kvexport.export.passes.last_rows import LAST_ROWS
from kvexport.export.passes.norm_types import NORM_TYPES
from kvexport.export.passes.report import Pass, remove_unused, sort_nodes
from kvexport.export.passes.written_rotary import WRITTEN_ROTARY

DECODER_PASSES: tuple[Pass, ...] = (
    NORM_TYPES,
    # Every matrix product becomes a Linear node, which then takes over the steps after the product.
    PRODUCT,
    BIAS,
    ADAPTERS,
    GATE,
    RESIDUAL,
    OUTPUT_HEADS,
    INPUT_HEADS,
    # LAST_ROWS runs while each Linear node has one product: then it is known which of its inputs have a row for each
    # token.
    LAST_ROWS,
    remove_unused,
    # Linear nodes that read the same input become one, with the norm before it and the rotary embedding of its heads.
    SHARED_INPUT,
    NORM,
    WRITTEN_ROTARY,
    ROTARY,
    sort_nodes,
    remove_unused,
)
# Matrix products of an image encoder stay ONNX Runtime's own operators, because they read a whole image at once.
ENCODER_PASSES: tuple[Pass, ...] = (NORM_TYPES, remove_unused, sort_nodes)
# Checks of a finished graph, which raise KvexportError
GRAPH_CHECKS: tuple[Callable[[onnx.ModelProto], None], ...] = (check_in_place,)
