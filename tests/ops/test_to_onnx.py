"""What `to_onnx` saves of torch.onnx's work changes nothing in its graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.export import Dim

from kvexport.ops import to_onnx


class Promotes(nn.Module):
    """Operations whose operands differ in type, and whose results are not of their operands' type."""

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        mixed = x * n + n / 3
        return mixed, n * 1.5, (x.float() - n).half() > n, torch.where(n > 1, x, 2.0), x.sum(dim=-1) / x.shape[0]


def graph() -> bytes:
    arguments = torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, 3, dtype=torch.int32)
    batch = Dim("batch")
    model = to_onnx.to_onnx(Promotes(), arguments, ({0: batch}, {0: batch}), {})
    return ir.to_proto(model).graph.SerializeToString(deterministic=True)


class HoldsNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 0.5, 0.25])


def test_a_module_with_numbers_of_its_own_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are detached in place, for which a program would be decomposed, a second trace."""
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda *_: pytest.fail("decomposed"))
    model = to_onnx.to_onnx(HoldsNumbers(), (torch.zeros(2, 3),), ({0: Dim("batch")},), {})
    (numbers,) = (x for x in model.graph.initializers.values() if x.shape == (3,))
    assert numbers.const_value.numpy().tolist() == [1.0, 0.5, 0.25]
    assert "Mul" in [node.op_type for node in model.graph]


def test_the_activation_of_apertus_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.activations import XIELUActivation

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda *_: pytest.fail("decomposed"))
    activation = XIELUActivation(dtype=torch.float32)
    ir_model = to_onnx.to_onnx(activation, (torch.zeros(2, 3),), ({0: Dim("batch")},), {})
    x = np.linspace(-3, 3, 6, dtype=np.float32).reshape(2, 3)
    (found,) = ReferenceEvaluator(ir.to_proto(ir_model)).run(None, {ir_model.graph.inputs[0].name: x})
    np.testing.assert_allclose(found, activation(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def nothing_saved() -> Iterator[None]:
    yield


def test_saved_work_changes_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.onnx._internal.fx.passes import type_promotion

    computed = []
    original = torch.fx.Interpreter.run_node
    monkeypatch.setattr(
        torch.fx.Interpreter, "run_node", lambda self, node: computed.append(node.op) or original(self, node)
    )
    saved = graph()
    few = computed.count("call_function")
    untouched = type_promotion._TypePromotionInterpreter.run_node
    for name in ("_values_kept", "_sources_unread"):
        monkeypatch.setattr(to_onnx, name, nothing_saved)
    computed.clear()
    assert graph() == saved
    assert few < computed.count("call_function")
    assert type_promotion._TypePromotionInterpreter.run_node is untouched
