"""A method may have state tensors of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import kvexport.methods
from kvexport.backends.onnxruntime.operators import implementations, library, why_function
from kvexport.backends.tensorrt.plugin import refusal
from kvexport.engine.load import load
from kvexport.export.build import build
from kvexport.methods import all_methods
from kvexport.ops.layer_state import merge_cache_functions, vote_attention_functions
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.schema.state import STATE_NAMES
from kvexport.validate.runner import validate_artifact
from tests.support.models import make_recipe
from tests.support.tiny_model import RECIPE

FILE = '''
"""Slots that the latest queries point at are kept."""

from kvexport.methods.base import Method
from kvexport.schema.state import StateTensor


class Pointed(Method):
    """query: the mean of the latest queries of each KV head, halved with every call. calls: how many calls a slot has
    seen since its own."""

    name = "pointed"
    summary = "slots whose keys point along the latest queries are kept"
    source = "-"

    @property
    def extra_state(self):
        return (
            StateTensor("latest_query", ("B", "H", "D"), "float32", "a moving mean of the queries"),
            StateTensor("calls", ("B", "S"), "int32", "calls since the slot's own"),
        )

    def update(self, extra, new):
        import torch

        query, calls = extra
        batch, heads, size = query.shape
        real = new.real[:, None, None, :, None]
        grouped = new.query.float().reshape(batch, heads, -1, new.query.shape[2], size)
        count = new.real.sum(-1).clamp(min=1)[:, None, None] * grouped.shape[2]
        mean = torch.where(real, grouped, 0.0).sum((2, 3)) / count
        any_real = new.real.any(-1)[:, None, None]
        return torch.where(any_real, 0.5 * query + 0.5 * mean, query), torch.where(any_real, calls + 1, calls)

    def keep_score(self, slots, unprotected, count):
        query, calls = slots.extra
        along = (slots.key.float() @ query[..., None])[..., 0]
        return along - 0.01 * calls.float()
'''


@pytest.fixture(scope="module")
def pointed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("methods")
    (folder / "pointed.py").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvexport.methods, "__path__", [*kvexport.methods.__path__, str(folder)])
        all_methods.cache_clear()
        yield "pointed"
    sys.modules.pop("kvexport.methods.pointed", None)
    all_methods.cache_clear()


@pytest.fixture(scope="module")
def artifact(pointed: str, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = {"method": pointed, "budget": 24, "merge_every": 4}
    recipe = make_recipe(tiny_checkpoint, cache=cache, export={"prefill_chunk": 16}, limits=RECIPE["limits"])
    return build(recipe, tmp_path_factory.mktemp("extra") / "artifact")


def test_an_artifact_has_the_extra_state_and_every_step_equals_pytorch(artifact: Path) -> None:
    """Three sequences of different lengths go far beyond the budget."""
    engine = load(artifact)
    layer = engine.manifest.cache.caches[0]
    assert [tensor.name for tensor in layer.state] == [*STATE_NAMES, "latest_query", "calls"]
    slots = layer.slots
    assert layer.bytes() == sum(
        (2 * slots * layer.key_size * 4, 2 * slots * 4, slots * 4, layer.kv_heads * layer.key_size * 4, slots * 4)
    )
    for graph in ("decoder", "merge"):
        model = onnx.load(artifact / f"{graph}.onnx", load_external_data=False)
        inputs, outputs = ({x.name: x for x in values} for values in (model.graph.input, model.graph.output))
        assert {"past_key_values.0.latest_query", "past_key_values.1.calls"} <= inputs.keys(), graph
        assert {"present.0.latest_query", "present.1.calls"} <= outputs.keys(), graph
        assert inputs["past_key_values.0.calls"].type.tensor_type.elem_type == onnx.TensorProto.INT32
    result = validate_artifact(artifact, length=150)
    assert result.passed, result.problem
    assert {"latest_query", "calls"} <= {kind for step in result.steps for kind in step["largest"]}
    assert {step["phase"] for step in result.steps} >= {"prefill", "decode", "merge"}


def test_lanes_are_independent_and_answers_are_repeated(artifact: Path) -> None:
    engine = load(artifact)
    prompts = [[i % 60 for i in range(5, 75)], list(range(30, 50)), [7, 8, 9]]
    together = [c.token_ids for c in engine.generate(prompts, max_new_tokens=40)]
    alone = [engine.generate([prompt], max_new_tokens=40)[0].token_ids for prompt in prompts]
    assert together == alone == [c.token_ids for c in engine.generate(prompts, max_new_tokens=40)]


def test_native_kernels_decline_extra_state_by_name(pointed: str, artifact: Path) -> None:
    method = all_methods()[pointed]()
    why = "the method pointed keeps extra state, latest_query, calls, which no native kernel supports"
    for op in ("VoteAttention", "MergeCache"):
        assert why_function(Path("a-library.so"), op, method) == why
    if library() is not None:
        manifest = load(artifact).manifest
        assert {str(how) for how in implementations(manifest).values()} == {f"function: {why}"}
    merge = onnx.load(artifact / "merge.onnx", load_external_data=False)
    assert "extra state, calls" in str(refusal(None, merge.graph.node[0]))


def test_a_merge_moves_cuts_and_zeroes_tensors_of_slots(pointed: str) -> None:
    method, rng = all_methods()[pointed](), np.random.default_rng(0)
    used, capacity, budget = 14, 16, 9
    position = torch.from_numpy(np.concatenate([rng.permutation(used), [0, 0]]).astype(np.int32))[None, None]
    votes = (torch.arange(capacity) < used).float()[None, None]
    key = torch.from_numpy(rng.normal(size=(1, 1, capacity, 4)).astype(np.float32))
    query, calls = torch.ones(1, 1, 4), position * 10 + 3
    score = torch.zeros(1, 1, 1, capacity)
    attributes = MergeCacheAttributes(method, budget, 1, 2)
    *_, present_votes, _, present_position, present_query, present_calls = merge_cache(
        key, key, votes, score, position, query, calls, attributes=attributes
    )
    held = present_position[0, 0, :budget]
    assert len(set(held.tolist())) == budget
    assert present_calls[0, 0, :budget].tolist() == (held * 10 + 3).tolist()
    assert not present_calls[0, 0, budget:].any() and not present_votes[0, 0, budget:].any()
    assert (present_query == query).all()


def test_its_functions_have_the_tensors_last_with_sink_logits_and_without(pointed: str) -> None:
    method = all_methods()[pointed]()
    attributes = VoteAttentionAttributes(0.5, statistics=method.statistics, method=method)
    for sinks in (False, True):
        function, _ = vote_attention_functions(
            attributes, heads=(2, 1), head_sizes=(4, 4), dtype=torch.float32, sinks=sinks
        )
        assert list(function.input)[-3:] == ["sink_logits", "past_latest_query", "past_calls"]
        assert list(function.output)[-2:] == ["present_latest_query", "present_calls"]
    merge = MergeCacheAttributes(method, 8)
    function, _ = merge_cache_functions([merge], head_sizes=(4, 4), cache_type="float32")
    assert list(function.input) == [*STATE_NAMES, "latest_query", "calls"]
