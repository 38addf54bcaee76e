"""The steps of torch.export, torch.onnx and onnxscript that `to_onnx` skips would change nothing in its graphs."""

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
    """A module of operations whose operands differ in type, and whose results have other types than the operands."""

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        mixed = x * n + n / 3
        return mixed, n * 1.5, (x.float() - n).half() > n, torch.where(n > 1, x, 2.0), x.sum(dim=-1) / x.shape[0]


def graph() -> bytes:
    arguments = torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, 3, dtype=torch.int32)
    batch = Dim("batch")
    return meaning(to_onnx.to_onnx(Promotes(), arguments, ({0: batch}, {0: batch}), {}))


def meaning(model: ir.Model) -> bytes:
    """Return the graph without metadata, with its values numbered in the order of their appearance."""
    proto = ir.to_proto(model).graph
    numbers: dict[str, str] = {"": ""}

    def number(name: str) -> str:
        return numbers.setdefault(name, str(len(numbers)))

    del proto.value_info[:], proto.metadata_props[:]
    for value in (*proto.input, *proto.initializer, *proto.output):
        value.name = number(value.name)
        del value.metadata_props[:]
    for node in proto.node:
        del node.metadata_props[:]
        node.name = node.doc_string = ""
        node.input[:], node.output[:] = list(map(number, node.input)), list(map(number, node.output))
    return proto.SerializeToString(deterministic=True)


class HoldsNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 0.5, 0.25])


def test_a_module_with_numbers_of_its_own_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are detached in place: PyTorch would decompose the program for this, which needs a second trace."""
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
    (actual,) = ReferenceEvaluator(ir.to_proto(ir_model)).run(None, {ir_model.graph.inputs[0].name: x})
    np.testing.assert_allclose(actual, activation(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def nothing_saved() -> Iterator[None]:
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


def test_skipped_steps_change_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry
    from torch.onnx._internal.fx.passes import type_promotion

    def attributes() -> list[object]:
        interpreter = type_promotion._TypePromotionInterpreter
        return [interpreter.run_node, vars(ONNXRegistry)["from_torchlib"]]

    computed: list[str] = []
    original = torch.fx.Interpreter.run_node
    monkeypatch.setattr(
        torch.fx.Interpreter, "run_node", lambda self, node: computed.append(node.op) or original(self, node)
    )
    before = attributes()
    saved = graph()
    few = computed.count("call_function")
    monkeypatch.setattr(to_onnx, "steps_skipped", nothing_saved)
    computed.clear()
    assert graph() == saved
    assert few < computed.count("call_function")
    assert attributes() == before


class Broadcasts(nn.Module):
    """A module of operands that are not contiguous, lack dimensions or repeat, and of results of other types."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        turned = x.transpose(0, 1) + y.transpose(0, 1)
        column = torch.where(x[:, :1] > y, x, y[:, 1:2].expand(-1, 3))
        return turned.reshape(-1), column, (x[:, :1] * 2.5).clamp(min=y[:, :1]), x[..., None] & y[:, None].int() > 1


def test_rules_that_begin_with_another_operator_would_not_have_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimized() -> bytes:
        model = to_onnx.to_onnx(Broadcasts(), (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)), ({}, {}), {})
        to_onnx.optimize(model)
        return meaning(model)

    few = optimized()
    monkeypatch.setattr(to_onnx, "mismatches_skipped", nothing_saved)
    assert optimized() == few
