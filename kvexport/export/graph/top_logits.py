"""The ONNX graph top_logits.onnx, which finds the largest logits of every row (one token's logits).

The graph runs on the device that computed the logits, so that whole rows need not be copied to the host.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from kvexport.export.graph.graphs import IR_VERSION
from kvexport.ops.to_onnx import OPSET

# How many of the largest logits are found, unless the vocabulary is smaller. ONNX Runtime's TopK on CUDA divides a row
# among thread blocks only for at most 256 sorted results along the last dimension (docs/concepts/cuda-kernels.md).
COUNT = 256


def top_logits_model(vocabulary: int) -> onnx.ModelProto:
    """Return the ONNX graph that finds the largest logits of every row.

    The input is logits [B, 1, vocabulary] float32. With n the smaller of COUNT and `vocabulary`, the outputs are:
    values [B, 1, n] float32, the n largest logits, descending; ids [B, 1, n] int32, their token ids; mass [B, 1, 1]
    float32, the sum over the row of exp(logit - largest logit); token [B, 1] int64, the lowest id of the largest logit,
    which may be the decoder's next input. If a row has NaN, `token` is the last id of the vocabulary.
    """
    n = min(COUNT, vocabulary)
    nodes = [
        helper.make_node("TopK", ["logits", "n"], ["values", "places"], name="top", axis=-1, largest=1, sorted=1),
        helper.make_node("Cast", ["places"], ["ids"], name="ids", to=TensorProto.INT32),
        helper.make_node("ReduceMax", ["logits", "last"], ["largest"], name="largest", keepdims=1),
        helper.make_node("Sub", ["logits", "largest"], ["below"], name="below"),
        helper.make_node("Exp", ["below"], ["weights"], name="weights"),
        helper.make_node("ReduceSum", ["weights", "last"], ["mass"], name="mass", keepdims=1),
        # Some devices' TopK order equal logits in any way, but greedy decoding takes the lowest id.
        helper.make_node("Equal", ["values", "largest"], ["equal"], name="equal"),
        helper.make_node("Where", ["equal", "places", "end"], ["candidates"], name="candidates"),
        helper.make_node("ReduceMin", ["candidates", "last"], ["token"], name="token", keepdims=0),
    ]
    constants = {"n": [n], "last": [-1], "end": [vocabulary - 1]}
    graph = helper.make_graph(
        nodes,
        "top_logits",
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1, vocabulary])],
        [
            helper.make_tensor_value_info("values", TensorProto.FLOAT, ["batch", 1, n]),
            helper.make_tensor_value_info("ids", TensorProto.INT32, ["batch", 1, n]),
            helper.make_tensor_value_info("mass", TensorProto.FLOAT, ["batch", 1, 1]),
            helper.make_tensor_value_info("token", TensorProto.INT64, ["batch", 1]),
        ],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()],
    )
    return helper.make_model(
        graph, producer_name="kvexport", ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
    )
