"""Products by ONNX Runtime's own operators compute what Linear does, and are of types that its CUDA provider has."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.export.passes.library import inlined, put_products
from kvexport.export.weights.computed import ComputedSpec, component_blocks
from kvexport.export.weights.nbits import NBits, nbits_specs
from kvexport.ops.experts import ExpertsForm
from kvexport.ops.linear import Form
from kvexport.ops.packed import E2M1, PackedFormat, unpack
from kvexport.recipe.fields import Recipe
from tests.conformance import oracle_experts
from tests.ops.test_linear import meaning
from tests.ops.test_linear_packed import FORMATS, STEPS, WITH_TABLES, packed_weight
from tests.support import models
from tests.support.cuda_operators import problems

Array = np.ndarray[Any, Any]
TYPES = {"float16": onnx.TensorProto.FLOAT16, "float32": onnx.TensorProto.FLOAT}
TAKEN = [one for one in FORMATS + WITH_TABLES if one.group % 16 == 0]
ODD = [PackedFormat(4, False, 256, "zero"), PackedFormat(4, True, 16, "zero")]  # rows of zero points that end in a byte
EXPERT_FORMS = [
    ExpertsForm(),
    ExpertsForm("silu", slope=1.702, limit=0.7, up_offset=1.0, bias=1),
    ExpertsForm("relu", 0),
]
EXPERT_PACKINGS = [
    PackedFormat(4, True, 16),
    PackedFormat(4, False, 48, "zero"),
    PackedFormat(8, False, 48, "minimum"),
    PackedFormat(4, False, 16, scale_dtype="uint8", table=E2M1),
]
SIZES = {"float32": 3e-5, "float16": 1e-2}  # the largest error allowed, over the largest output


@dataclass(frozen=True)
class Stored:
    """A packed weight as a checkpoint stores it, in two blocks of rows."""

    packing: PackedFormat
    shape: tuple[int, int]
    stored: dict[str, Array]
    name: str = "weight"

    def blocks(self) -> Iterator[dict[str, Array]]:
        n, k = self.shape
        half = n // 2
        zero = {}
        if "zero" in self.stored:
            zero = {"zero": unpack(self.stored["zero"], self.packing.tensors(n, k)["zero"])}
        rows = {"weight": self.stored["weight"].reshape(n, -1)}
        rows |= {x: self.stored[x].reshape(n, -1) for x in self.stored if x not in ("weight", "zero", "table")}
        for part in (slice(0, half), slice(half, n)):
            yield {name: x[part] for name, x in (rows | zero).items()}

    def order(self) -> Any:
        raise NotImplementedError


def stored_weight(
    rng: np.random.Generator, packing: PackedFormat, n: int, k: int
) -> tuple[Stored, np.ndarray[Any, Any]]:
    tensors, values = packed_weight(rng, packing, "w", n, k, 1 / np.sqrt(k))
    parts = {}
    for tensor, (part, one) in zip(tensors, packing.tensors(n, k).items(), strict=True):
        raw = np.frombuffer(tensor.raw_data, np.uint8)
        parts[part] = raw if one.dtype in ("int4", "uint4") else raw.view(one.dtype).reshape(one.shape)
    return Stored(packing, (n, k), parts), values


def initializers_of(name: str, stored: Stored) -> tuple[list[onnx.TensorProto], PackedFormat]:
    """Return a weight's initializers as the artifact has them before the rewrite, in the layout of MatMulNBits."""
    spec = ComputedSpec(name, NBits(stored), "float32", stored.shape)
    tensors = []
    for part, blocks in component_blocks(spec):
        dtype, shape = spec.components[part]
        data = b"".join(block.tobytes() for block in blocks)
        assert len(data) == spec.components[part].nbytes
        kind = getattr(onnx.TensorProto, {"float16": "FLOAT16", "float32": "FLOAT"}.get(dtype, dtype.upper()))
        tensors.append(
            onnx.TensorProto(
                name=name if part == "weight" else f"{name}_{part}", data_type=kind, dims=shape, raw_data=data
            )
        )
    return tensors, spec.source.packing  # type: ignore[return-value]


def rewritten(form: Form, dtype: str, shapes: dict[str, Any], weights: list[onnx.TensorProto]) -> onnx.ModelProto:
    outputs = [f"output{i}" for i in range(form.count)]
    node = helper.make_node("Linear", form.inputs, outputs, "node", domain="kvexport", **form.attributes)
    value = helper.make_tensor_value_info
    inputs = [value(name, TYPES[dtype], shape) for name, shape in shapes.items() if name in form.inputs]
    return put(helper.make_graph([node], "g", inputs, [value(x, TYPES[dtype], None) for x in outputs], weights))


def put(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=11))
    functions = put_products(model)
    proto = ir.to_proto(model)
    proto.functions.extend(functions)
    return inlined(proto)


def run(model: onnx.ModelProto, feed: dict[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[Array] = session.run(None, feed)
    return outputs


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("packing", TAKEN + ODD, ids=str)
def test_every_packed_weight_is_multiplied_with_its_values(packing: PackedFormat, dtype: str) -> None:
    rng, n, k = np.random.default_rng(0), 38, 768 if packing.has_supers else packing.group * 3
    stored, values = stored_weight(rng, packing, n, k)
    weights, taken = initializers_of("weight0", stored)
    form = Form(packed=(taken.kind,), group=(taken.group,))
    model = rewritten(form, dtype, {"input": ["B", "T", k]}, weights)
    assert not list(problems(model))
    ops = [node.op_type for node in model.graph.node]
    assert "MatMulNBits" in ops and "DequantizeLinear" not in ops and "Linear" not in ops
    for rows in (1, 5):
        x = rng.standard_normal((2, rows, k)).astype(dtype)
        (actual,) = run(model, {"input": x})
        exact = x.astype(np.float64) @ values.astype(np.float64).T
        assert actual.dtype == np.dtype(dtype)
        assert np.abs(actual - exact).max() <= SIZES[dtype] * np.abs(exact).max()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("steps", STEPS, ids=lambda form: form.overload)
@pytest.mark.parametrize("floats", [0, 1, 3], ids=["all packed", "one is not", "none"])
def test_products_take_every_step(steps: Form, dtype: str, floats: int) -> None:
    rng, n, k = np.random.default_rng(1), 32, 128
    names = [*(f"weight{i}" for i in range(steps.count)), *["gate"] * steps.gate]
    packings = [PackedFormat(4, False, 32, "minimum"), PackedFormat(8, True, 16), PackedFormat(4, True, 64, "zero")]
    weights, values, packed, group = [], {}, [], []
    for i, (name, packing) in enumerate(zip(names, packings, strict=False)):
        stored, values[name] = stored_weight(rng, packing, n, k)
        if i >= len(names) - floats:
            values[name] = values[name].astype(dtype)
            weights.append(numpy_helper.from_array(values[name], name))
            packed, group = [*packed, 0], [*group, 0]
            continue
        tensors, taken = initializers_of(name, stored)
        weights += tensors
        packed.append(taken.kind)
        group.append(taken.group)
    form = replace(steps, packed=tuple(packed), group=tuple(group)) if any(packed) else steps
    for batch, tokens in [(1, 1), (2, 3)]:
        data = [batch, form.input_heads, tokens, k // 2] if form.input_heads else [batch, tokens, k]
        angles = [batch, tokens, n // 4]
        shapes = {"input": data, "norm": [k], "residual": [batch, tokens, n], "cosine": angles, "sine": angles}
        shapes |= {f"bias{i}": [n] for i in range(form.count)}
        shapes = {name: shape for name, shape in shapes.items() if name in form.inputs}
        model = rewritten(form, dtype, shapes, weights)
        assert not list(problems(model)) and not model.functions
        feed = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        terms = {name: torch.from_numpy(x.astype(np.float64)) for name, x in (feed | values).items()}
        for actual, exact in zip(run(model, feed), meaning(form, terms.pop("input"), **terms), strict=True):
            assert np.abs(actual - exact.numpy()).max() <= SIZES[dtype] * float(exact.abs().max())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", EXPERT_FORMS, ids=lambda form: form.overload)
@pytest.mark.parametrize("packing", [None, *EXPERT_PACKINGS], ids=str)
def test_experts_pick_the_packed_weights_of_one(packing: PackedFormat | None, form: ExpertsForm, dtype: str) -> None:
    rng, count, hidden, inner = np.random.default_rng(2), 5, 96, 48
    sizes = {"first": (inner * (1 + form.gate), hidden), "down": (hidden, inner)}
    weights, values, packed, group = [], {}, [], []
    for name, (n, k) in sizes.items():
        if packing is None:
            values[name] = (rng.standard_normal((count, n, k)) / np.sqrt(k)).astype(dtype)
            weights.append(numpy_helper.from_array(values[name], name))
            continue
        stored, dense = stored_weight(rng, packing, count * n, k)
        tensors, taken = initializers_of(name, stored)
        for tensor in tensors:
            tensor.dims[:] = [count, n, *tensor.dims[1:]]
        weights, values[name] = [*weights, *tensors], dense.reshape(count, n, k)
        packed.append(taken.kind)
        group.append(taken.group)
    form = replace(form, packed=tuple(packed), group=tuple(group))
    feed = {"input": rng.standard_normal((9, hidden)).astype(dtype)}
    feed["indices"] = np.array([rng.permutation(count)[:2] for _ in range(9)])
    feed["weights"] = rng.random((9, 2)).astype(dtype)
    if form.bias:
        feed |= {f"{x}_bias": (rng.standard_normal((count, n)) / 4).astype(dtype) for x, (n, _) in sizes.items()}
    node = helper.make_node("Experts", form.inputs, ["output"], "node", domain="kvexport", **form.attributes)
    value = helper.make_tensor_value_info
    kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in feed.items()}
    inputs = [value(name, kinds[name], [*x.shape]) for name, x in feed.items()]
    graph = helper.make_graph([node], "g", inputs, [value("output", kinds["input"], None)], weights)
    proto = put(graph)
    assert not list(problems(proto)) and "Experts" not in {x.op_type for x in proto.graph.node}
    (actual,) = run(proto, feed)
    wide = {name: x if x.dtype == np.int64 else x.astype(np.float64) for name, x in (feed | values).items()}
    exact = oracle_experts.experts(replace(form, packed=(), group=()).attributes, wide, None)
    assert np.abs(actual - exact).max() <= SIZES[dtype] * np.abs(exact).max()


WEIGHTS: list[dict[str, Any]] = [
    {},
    {"bits": 4, "group": 32, "symmetric": False},
    {"bits": 4, "group": 32, "head": "same"},
    {"bits": 8, "group": 64},
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_an_artifact_for_cuda_computes_what_that_for_the_cpu_does(weights: dict[str, Any], tmp_path: Path) -> None:
    """A build for CUDA has only nodes that the CUDA provider has a kernel for, and its graphs run on the CPU too."""
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", models.llama())
    fields = models.make_recipe(checkpoint, limits={"max_length": 128}).model_dump() | {"weights": weights}
    engines = []
    for device in ("cpu", "cuda"):
        recipe = Recipe.model_validate(fields | {"backend": {"name": "onnxruntime", "device": device}})
        path = build(recipe, tmp_path / device)
        engines.append(kvexport.load(path, device="cpu", float_input=True))
    artifact = tmp_path / "cuda"
    for _, graph in load_manifest(artifact).graphs.files():
        assert not list(problems(onnx.load(artifact / graph, load_external_data=False)))
    ids = np.random.default_rng(0).integers(0, 100, (2, 16))
    states = [engine.new_state(2) for engine in engines]
    for tokens in (ids, ids[:, :1], ids[:, :1]):
        lengths = np.full((2, 1), tokens.shape[1])
        expected, actual = (state.decode(tokens, lengths) for state in states)
        np.testing.assert_allclose(actual, expected, atol=2e-4)
    if weights:
        with pytest.raises(UsageError, match="packed weights in the layout of the CPU's kernels") as refused:
            kvexport.load(tmp_path / "cpu", device="cuda")
        assert "backend.device=cuda" in refused.value.fix


def test_packed_experts_whose_groups_no_block_divides_become_floats() -> None:
    stored, values = stored_weight(np.random.default_rng(0), PackedFormat(8, True, 24), 4, 48)
    (spec,) = nbits_specs([ComputedSpec("experts", stored, "float32", (2, 2, 48))])
    assert isinstance(spec, ComputedSpec) and spec.source.packing is None
    np.testing.assert_array_equal(np.concatenate([block["weight"] for block in spec.source.blocks()]), values)


def test_groups_that_no_block_divides_are_refused(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", models.llama())
    fields = models.make_recipe(checkpoint, limits={"max_length": 128}).model_dump()
    fields |= {"weights": {"bits": 4, "group": 40}}
    recipe = Recipe.model_validate(fields | {"backend": {"name": "onnxruntime", "device": "cuda"}})
    with pytest.raises(UsageError, match="takes only groups of multiples of 16 inputs") as refused:
        build(recipe, tmp_path / "artifact")
    assert "--set weights.group=32" in refused.value.fix
