"""Experts' CUDA kernels through their C ABI: calls of any form from the arrays of tests/conformance/test_experts.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto

from kvexport.ops.experts import WEIGHTS, ExpertsForm
from kvexport.schema.operators import EXPERTS_ACTIVATIONS
from tests.conformance.cuda_library import Arrays, Caller, Experts, LinearWeight
from tests.conformance.cuda_linear import exact, stored

TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
SCALES = {TensorProto.FLOAT: 0, TensorProto.FLOAT16: 1, TensorProto.UINT8: 16}
BITS = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT8: 8, TensorProto.UINT8: 8}
SIGNED = (TensorProto.INT4, TensorProto.INT8)


@dataclass
class ExpertsCase:
    """A call of Experts.

    Attributes:
        form: The form of the experts.
        tensors: The tensors in float64. A packed weight's are the values that its integers stand for.
        dtype: The dtype of the call.
        packed: The parts of the packed weights, as they are stored.
        offset: Bytes between an aligned address and a tensor.
        changes: Fields of the call that are set last.
    """

    form: ExpertsForm
    tensors: Arrays
    dtype: str
    packed: list[TensorProto] = field(default_factory=list)
    offset: int = 0
    changes: dict[str, Any] = field(default_factory=dict)

    def run(self, caller: Caller) -> np.ndarray:
        """Return the output in float64; it is full of other numbers before the call."""
        memory, kept = caller.memory, []

        def put(x: np.ndarray) -> Any:
            flat = np.ascontiguousarray(x).reshape(-1)
            offset = 0 if flat.dtype == np.int64 else self.offset  # integers of 64 bits are always aligned
            kept.append(memory.bytes(flat.nbytes + offset, 0)[offset:][: flat.nbytes].view(flat.dtype))
            kept[-1][...] = flat
            return kept[-1]

        def place(name: str) -> int | None:
            return memory.address(put(stored(self.tensors[name], self.dtype))) if name in self.tensors else None

        def weight(name: str) -> Any:
            parts = {part.name: part for part in self.packed}
            if name not in parts:
                return LinearWeight(data=place(name))
            whole = parts[name]
            view = LinearWeight(bits=BITS[whole.data_type], is_signed=whole.data_type in SIGNED)
            view.group = self.form.group[WEIGHTS.index(name)]
            for suffix, fields in PARTS.items():
                part = parts.get(name + suffix)
                if part is None:
                    continue
                setattr(view, fields[0], memory.address(put(np.frombuffer(part.raw_data, np.uint8))))
                for kind in fields[1:]:
                    setattr(view, kind, SCALES[part.data_type])
            return view

        t = self.tensors
        tokens, hidden = t["input"].shape
        call = Experts(type=TYPES[self.dtype], weights_type=TYPES[self.dtype], gate=self.form.gate, tokens=tokens)
        call.float_input = self.form.float_input
        call.activation = EXPERTS_ACTIVATIONS.index(self.form.activation)
        call.slope, call.limit, call.up_offset = self.form.slope, self.form.limit, self.form.up_offset
        call.hidden, call.inner, call.experts = hidden, t["down"].shape[2], len(t["down"])
        call.chosen, call.indices = t["indices"].shape[1], memory.address(put(t["indices"]))
        for name in ("input", "weights", "first_bias", "down_bias"):
            setattr(call, name, place(name))
        call.first, call.down = weight("first"), weight("down")
        output = put(stored(np.full(t["input"].shape, 77.0), self.dtype))
        call.output = memory.address(output)
        for name, value in self.changes.items():
            owner, _, member = name.rpartition(".")
            setattr(getattr(call, owner) if owner else call, member, value)
        caller._run("experts", call)
        return exact(memory.get(output)).reshape(t["input"].shape)


# The fields of a weight by the ending of the tensor's name; all but the first take the tensor's type.
PARTS = {
    "": ("data",), "_scale": ("scale", "scale_type"), "_exponent": ("scale", "scale_type"), "_zero": ("zero",),
    "_minimum": ("minimum", "minimum_type"), "_table": ("table",),
}  # fmt: skip
