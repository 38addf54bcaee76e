"""Past and present state in one buffer."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from kvexport.backends.onnxruntime.model import OnnxRuntimeState
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import KvexportError
from kvexport.export.passes.in_place import check_in_place

STATE = "float[B,4] past_key_values.0.key"
PRESENT = "float[B,4] present.0.key"


def graph(body: str, inputs: str = STATE, outputs: str = PRESENT) -> onnx.ModelProto:
    # The parser's names have no dots. A node is named after its outputs.
    def plain(text: str) -> str:
        return text.replace("past_key_values.0.key", "past_key").replace("present.0.key", "present_key")

    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 23]> g ({plain(inputs)}) => ({plain(outputs)}) {{ {plain(body)} }}'
    )
    dotted = {"past_key": "past_key_values.0.key", "present_key": "present.0.key"}
    for value in [*model.graph.input, *model.graph.output]:
        value.name = dotted.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [dotted.get(name, name) for name in node.input]
        node.output[:] = [dotted.get(name, name) for name in node.output]
        node.name = f"make_{node.output[0]}"
    return model


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact)


@pytest.mark.parametrize("kind", ["decoder", "merge"])
def test_both_graphs_of_an_artifact_are_safe(engine: Engine, kind: str) -> None:
    model = onnx.load(engine.path / getattr(engine.manifest.graphs, kind), load_external_data=False)
    names = {value.name for value in model.graph.input}
    assert {"past_key_values.0.key", "past_key_values.1.votes"} <= names
    check_in_place(model)


def test_a_late_reader_makes_a_built_graph_unsafe(engine: Engine) -> None:
    # One node more than the accepted decoder: it reads a past key after the layer has written the present one.
    model = onnx.load(engine.path / "decoder.onnx", load_external_data=False)
    model.graph.node.append(helper.make_node("Identity", ["past_key_values.1.key"], ["late"], name="late_reader"))
    with pytest.raises(
        KvexportError, match=r"Identity late_reader may read past_key_values\.1\.key after present\.1\.key"
    ):
        check_in_place(model)


SAFE = {
    "the writer takes rows, and others read what it wrote": (
        "present.0.key = ScatterND (past_key_values.0.key, index, rows) logits = Neg (present.0.key)",
        f"{STATE}, int64[N,1] index, float[N,4] rows",
        f"{PRESENT}, float[B,4] logits",
    ),
    "another reader runs before the writer, by its data": (
        "doubled = Add (past_key_values.0.key, past_key_values.0.key) present.0.key = Identity (doubled)",
        STATE,
        PRESENT,
    ),
    "through several nodes": (
        "a = Neg (past_key_values.0.key) b = Abs (a) present.0.key = Add (past_key_values.0.key, b)",
        STATE,
        PRESENT,
    ),
    "a shape does not change": (
        "present.0.key = Identity (past_key_values.0.key) shape = Shape (past_key_values.0.key)",
        STATE,
        f"{PRESENT}, int64[2] shape",
    ),
    "a state that is passed through is written over itself": (
        "present.0.key = Identity (past_key_values.0.key) logits = Neg (past_key_values.0.key)",
        STATE,
        f"{PRESENT}, float[B,4] logits",
    ),
    "a state without a present is only read": ("logits = Neg (past_key_values.0.key)", STATE, "float[B,4] logits"),
}


@pytest.mark.parametrize("name", SAFE)
def test_safe_graphs(name: str) -> None:
    check_in_place(graph(*SAFE[name]))


UNSAFE = {
    "a node reads past after the writer": (
        "present.0.key = ScatterND (past_key_values.0.key, index, rows) logits = Neg (past_key_values.0.key)",
        f"{STATE}, int64[N,1] index, float[N,4] rows",
        f"{PRESENT}, float[B,4] logits",
        r"Neg make_logits may read past_key_values\.0\.key after present\.0\.key",
    ),
    # The order in the file is not the order of execution.
    "a node reads past before the writer in the file alone": (
        "logits = Neg (past_key_values.0.key) present.0.key = ScatterND (past_key_values.0.key, index, rows)",
        f"{STATE}, int64[N,1] index, float[N,4] rows",
        f"{PRESENT}, float[B,4] logits",
        "Neg make_logits may read",
    ),
    "the writer gathers rows out of what it overwrites": (
        "present.0.key = Gather (past_key_values.0.key, index)",
        f"{STATE}, int64[B] index",
        PRESENT,
        r"Gather make_present\.0\.key may read past_key_values\.0\.key",
    ),
    "a scatter's rows come out of what it overwrites": (
        "present.0.key = ScatterND (past_key_values.0.key, index, past_key_values.0.key)",
        f"{STATE}, int64[B,1] index",
        PRESENT,
        "ScatterND",
    ),
    # A view is the same buffer under another name, whenever the view was created.
    "a view of past is read after the writer": (
        "view = Unsqueeze (past_key_values.0.key, axes) sum = ReduceSum <keepdims = 0> (view) "
        "present.0.key = Add (past_key_values.0.key, sum) logits = Neg (view)",
        f"{STATE}, int64[1] axes",
        f"{PRESENT}, float[1,B,4] logits",
        r"Neg make_logits may read past_key_values\.0\.key",
    ),
    "the writer broadcasts out of what it overwrites": (
        "present.0.key = MatMul (past_key_values.0.key, w)",
        f"{STATE}, float[4,4] w",
        PRESENT,
        "MatMul",
    ),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_graphs(name: str) -> None:
    body, inputs, outputs, problem = UNSAFE[name]
    with pytest.raises(KvexportError, match=problem):
        check_in_place(graph(body, inputs, outputs))


def test_a_reader_inside_a_function_counts() -> None:
    # Every operator of an artifact is a function.
    function = helper.make_function(
        "kvexport",
        "Rotate",
        ["x", "index"],
        ["y"],
        [helper.make_node("Gather", ["x", "index"], ["y"], name="inner")],
        [helper.make_opsetid("", 23)],
    )
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Rotate", ["past_key_values.0.key", "index"], ["present.0.key"], domain="kvexport")],
            "g",
            [
                helper.make_tensor_value_info("past_key_values.0.key", TensorProto.FLOAT, ["B", 4]),
                helper.make_tensor_value_info("index", TensorProto.INT64, ["B"]),
            ],
            [helper.make_tensor_value_info("present.0.key", TensorProto.FLOAT, ["B", 4])],
        ),
        functions=[function],
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)],
    )
    with pytest.raises(KvexportError, match="Gather"):
        check_in_place(model)


class Separate:
    def __init__(self, engine: Engine, lanes: int) -> None:
        backend = engine.new_state(lanes)
        self.sessions = engine.model
        self.state = {name: array.copy() for name, array in backend.state.items()}
        self.length = backend.past_length.copy()

    def run(self, session: Any, feed: dict[str, Any]) -> dict[str, Any]:
        names = [output.name for output in session.get_outputs()]
        kept = {name: array.copy() for name, array in feed.items()}
        outputs = dict(zip(names, session.run(names, feed), strict=True))
        assert all(np.array_equal(feed[name], array) for name, array in kept.items())
        return outputs

    def decode(self, input_ids: Any, query_length: Any) -> Any:
        feed = {"input_ids": input_ids, "query_length": query_length, "past_length": self.length, **self.state}
        outputs = self.run(self.sessions.decoder, feed)
        self.length = outputs["present_length"]
        self.state = {name: outputs[name.replace("past_key_values", "present")] for name in self.state}
        return outputs["logits"]

    def merge(self, first: int, last: int) -> None:
        session: Any = self.sessions.merge
        names = {i.name for i in session.get_inputs()}
        outputs = self.run(session, {n: a[first:last] for n, a in self.state.items() if n in names})
        for name, array in outputs.items():
            self.state[name.replace("present", "past_key_values")][first:last] = array


def test_one_buffer_or_two_the_same_bits_over_a_hundred_steps_with_merges(engine: Engine) -> None:
    lanes = 3
    shared: OnnxRuntimeState = engine.new_state(lanes)
    apart = Separate(engine, lanes)
    layer = engine.plan.caches[0]
    rng = np.random.default_rng(0)
    merges, used = 0, np.zeros(lanes, dtype=np.int64)
    for step in range(100):
        # Sometimes a chunk of a prompt, otherwise one token. Sequences have different lengths, and some lanes are idle.
        width = 16 if step % 17 == 0 else 1
        counts = rng.integers(0, width + 1, lanes) if width > 1 else rng.integers(0, 4, lanes).clip(0, 1)
        for lane in np.flatnonzero(used + counts > layer.capacity[0]).tolist():
            for backend in (shared, apart):
                backend.merge(lane, lane + 1)
            used[lane] = layer.budget[0]
            merges += 1
        if step % 10 == 9:
            for backend in (shared, apart):
                backend.merge(0, lanes)
            used = np.minimum(used, layer.budget[0])
            merges += 1
        used += counts
        ids = rng.integers(0, engine.vocabulary, (lanes, width))
        one, two = (backend.decode(ids, counts[:, None]) for backend in (shared, apart))
        assert one.tobytes() == two.tobytes(), step
        assert shared.past_length.tobytes() == apart.length.tobytes()
        for name, array in shared.state.items():
            assert array.tobytes() == apart.state[name].tobytes(), (step, name)
    assert merges > 10
    assert (shared.past_length > layer.capacity[0]).all()
