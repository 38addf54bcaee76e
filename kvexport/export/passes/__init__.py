"""Every rewrite of a traced decoder's ONNX graph, in the order in which the rewrites run.

Most passes are a function that is tried at every node (`rewrite.py`). Each pass shows the nodes that it looks for, and
the nodes that replace them. A pass that is not certain that a rewrite is exact leaves the nodes as they are. To see how
often each pass applied, call `logging.basicConfig(level="DEBUG")` before `kvexport.build`. The logger is
`kvexport.export.passes`.

`GRAPH_CHECKS` lists the checks of finished graphs, with the functions of their operators. The checks change nothing.
"""

from collections.abc import Callable

import onnx

from kvexport.export.passes.fusions import (
    add_adapters,
    add_bias,
    add_gate,
    add_norm,
    add_residual,
    add_rotary,
    join_products,
    make_linear,
    read_heads,
    split_output,
)
from kvexport.export.passes.in_place import check_in_place
from kvexport.export.passes.last_rows import pick_last_rows
from kvexport.export.passes.norm_types import cast_norm_rows
from kvexport.export.passes.rewrite import Pass, remove_unused, sort_nodes
from kvexport.export.passes.written_rotary import recognize_rotary

DECODER_PASSES: tuple[Pass, ...] = (
    cast_norm_rows,
    # Every matrix product becomes a Linear node, which then takes over the steps after the product.
    make_linear,
    add_bias,
    add_adapters,
    add_gate,
    add_residual,
    split_output,
    read_heads,
    # It runs while each Linear node has one product: then it is known which of its inputs have a row for each token.
    pick_last_rows,
    remove_unused,
    # Linear nodes that read the same input become one, with the norm before it and the rotary embedding of its heads.
    join_products,
    add_norm,
    recognize_rotary,
    add_rotary,
    sort_nodes,
    remove_unused,
)
# Matrix products of an image encoder stay ONNX Runtime's own operators, because they read a whole image at once.
ENCODER_PASSES: tuple[Pass, ...] = (cast_norm_rows, remove_unused, sort_nodes)
# Checks of a finished graph, which raise KvexportError
GRAPH_CHECKS: tuple[Callable[[onnx.ModelProto], None], ...] = (check_in_place,)
