"""Decoders with recurrent states equal transformers: convolutions, the gated delta rule and Mamba-2."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from transformers import FalconMambaConfig, Mamba2Config, MambaConfig, RwkvConfig, xLSTMConfig

from kvexport.backends.onnxruntime.operators import library
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.options import EngineOptions
from kvexport.engine.request import Request
from kvexport.errors import SnapshotError, UsageError
from kvexport.export.build import build, read_model
from kvexport.export.hooks.recurrence import FUNCTIONS
from kvexport.language.settings import GenerationSettings
from kvexport.ops.linear_attention import (
    DOMAIN,
    OPERATOR,
    OUTPUTS,
    UpdateRule,
    linear_attention,
    linear_attention_functions,
)
from kvexport.recipe.fields import Recipe
from kvexport.state.snapshot import Snapshot
from kvexport.validate.runner import validate_artifact
from tests.support import models
from tests.support.answers import answers, stopped
from tests.support.hybrids import CONFIGS


def recipe_of(checkpoint: Path, budget: float | int = 1.0, method: str = "full", **sections: Any) -> Recipe:
    cache = {"method": method, "budget": budget, "sinks": 4, "recent": 4, "merge_every": 4}
    export = {"logits": "all", "prefill_chunk": 32}
    return models.make_recipe(checkpoint, cache=cache, export=export, limits={"max_length": 160}, **sections)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    """An engine of Qwen3.5 (gated delta rule and attention) whose cache keeps every token, and its checkpoint."""
    folder = tmp_path_factory.mktemp("hybrid")
    checkpoint = models.save_checkpoint(folder / "checkpoint", CONFIGS["qwen3_5_text"]())
    return load(build(recipe_of(checkpoint), folder / "artifact")), checkpoint


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba", "falcon_h1", "jamba"])
def test_logits_are_transformers_in_ragged_batches(name: str, tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS[name]())
    engine = load(build(recipe_of(checkpoint), tmp_path / "artifact"))
    models.assert_logits_of_transformers(engine, checkpoint, 1e-4)


def test_a_lane_that_is_saved_and_restored_in_the_middle_goes_on(hybrid: tuple[Engine, Path]) -> None:
    engine, checkpoint = hybrid
    (ids,) = models.random_ids(1, 70)
    (right,) = models.hugging_face_logits(checkpoint, [ids])
    lanes = engine.lanes(2)
    lanes.append([ids[:30], ids[:0]], prefill=True)
    saved = lanes.save(0)
    lanes.append([models.random_ids(2, 9)[0], models.random_ids(3, 20)[0]], prefill=True)  # both read other tokens
    lanes.restore(1, saved)
    rows = [lanes.append([ids[:0], ids[30:50]], prefill=True)[1, :20].copy()]
    rows += [lanes.append([ids[:0], ids[i : i + 1]], prefill=False)[1, :1].copy() for i in range(50, 70)]
    assert np.abs(np.concatenate(rows) - right[30:]).max() <= 1e-4 * np.abs(right).max()


def test_an_idle_lane_keeps_its_state_bit_by_bit(hybrid: tuple[Engine, Path]) -> None:
    lanes = hybrid[0].lanes(2)
    first, second = models.random_ids(4, 20, 25)
    lanes.append([first, second], prefill=True)
    before = lanes.read(0)
    lanes.append([first[:0], second[:7]], prefill=True)
    after = lanes.read(0)
    assert any("recurrent_state" in name for name in before) and any("conv_state" in name for name in before)
    assert all(np.array_equal(array, after[name]) for name, array in before.items())


def test_drafts_are_refused_by_name(hybrid: tuple[Engine, Path]) -> None:
    with pytest.raises(UsageError, match="layer 0 has a recurrent state, from which no token can be removed"):
        read_model(recipe_of(hybrid[1], speculate={"draft": "ngram"}))


def test_sessions_forks_and_prefixes_keep_the_states(hybrid: tuple[Engine, Path]) -> None:
    """Noise on the logits keeps answers out of loops."""
    plain, settings = hybrid[0], GenerationSettings(do_sample=False, max_new_tokens=24)
    noise = np.random.default_rng(0).gumbel(size=(2, 160, models.SIZES["vocab_size"])).astype(np.float32)
    processors = [[lambda ids, logits, rows=rows: logits + rows[len(ids)]] for rows in noise]
    (prompt,) = models.random_ids(5, 70)
    request, other = (Request(prompt, settings, processors=p) for p in processors)
    right, another = answers(plain, request)[0], answers(plain, other)[0]
    assert right != another

    first = Request(prompt, settings, processors=processors[0])
    fork = first.fork()
    fork.processors = processors[1]
    assert answers(plain.with_options(EngineOptions(lanes=1)), first, fork) == [right, another]

    cached = plain.with_options(EngineOptions(prefix_memory=1 << 24))
    answers(cached, Request(np.append(prompt[:50], 1), settings))
    later = Request(prompt, settings, processors=processors[0])
    assert answers(cached, later) == [right]
    assert later.cached_tokens == 32

    half = Request(prompt, settings, processors=processors[0], keep=True)
    plain.add(half)
    while len(half.tokens) < 10:
        plain.step()
    snapshot = Snapshot.from_bytes(stopped(plain, half).to_bytes(), plain.manifest)
    fresh = plain.with_options(EngineOptions())
    rest = answers(fresh, Request((), start=snapshot, processors=processors[0]))[0]
    assert [token.id for token in half.tokens] + rest == right


@pytest.mark.parametrize("name", ["recurrent_state", "conv_state"])
def test_states_of_another_size_are_refused_by_name(hybrid: tuple[Engine, Path], name: str) -> None:
    engine = hybrid[0]
    request = Request([1, 2, 3], GenerationSettings(max_new_tokens=9), keep=True)
    engine.add(request)
    engine.step()
    snapshot = stopped(engine, request)
    tensor = f"past_key_values.layer.2.{name}"
    state = {**snapshot.state, tensor: snapshot.state[tensor][..., 1:].copy()}
    with pytest.raises(SnapshotError, match=rf"{tensor} is float32 \[.*\], the artifact has float32 \["):
        Snapshot.from_bytes(replace(snapshot, state=state).to_bytes(), engine.manifest)
    lost = {key: array for key, array in snapshot.state.items() if key != tensor}
    with pytest.raises(SnapshotError, match=f"{tensor}' is missing"):
        Snapshot.from_bytes(replace(snapshot, state=lost).to_bytes(), engine.manifest)


def test_periodic_decoding_of_a_recurrent_state_is_refused_by_name(hybrid: tuple[Engine, Path]) -> None:
    model, limits = {"path": str(hybrid[1]), "dtype": "float32"}, {"max_length": 160}
    cache = {"method": "full", "periodic": {"slots": 120}}
    fields = {"model": model, "limits": limits, "export": {"prefill_chunk": 32}, "cache": cache}
    recipe = Recipe.model_validate(fields)
    with pytest.raises(UsageError, match=r"cache.periodic.slots is 120.*layer 0 has a recurrent state"):
        read_model(recipe)


STATE_ALONE: dict[str, Any] = {
    "mamba": lambda: MambaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2),
    "falcon_mamba": lambda: FalconMambaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2),
    "mamba2": lambda: Mamba2Config(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16, n_groups=2,
        chunk_size=16,
    ),
    "rwkv": lambda: RwkvConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, rescale_every=1),
    "xlstm": lambda: xLSTMConfig(vocab_size=100, hidden_size=128, num_hidden_layers=2, num_heads=2, chunk_size=16),
}  # fmt: skip


@pytest.mark.parametrize("name", STATE_ALONE)
def test_decoders_without_attention_are_transformers_and_have_no_cache(name: str, tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", STATE_ALONE[name]())
    artifact = build(recipe_of(checkpoint), tmp_path / "artifact")
    engine = load(artifact)
    assert not engine.plan.caches and len(engine.plan.states) == 2
    # transformers halves RWKV's hidden states, so the epsilon of a norm behind counts more than in an artifact.
    models.assert_logits_of_transformers(engine, checkpoint, 1e-4 if name == "rwkv" else 1e-5)
    result = validate_artifact(artifact, length=48, batch=2)
    assert result.passed, result.problems
    with pytest.raises(UsageError, match="is ballot, but no layer of the model attends"):
        read_model(recipe_of(checkpoint, 32, "ballot"))


def test_another_recurrence_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", STATE_ALONE["mamba"]())
    monkeypatch.delitem(FUNCTIONS, "mamba_selective_scan")
    with pytest.raises(UsageError, match="computes its recurrent state in code of its own"):
        read_model(recipe_of(checkpoint))


RULES = ("linear", "gated", "delta", "gated_delta")
# The kernels; the ONNX function over ONNX Runtime's kernel; only functions.
KINDS = ("native", "onnxruntime", "function")


def _numbers(rule: str, sizes: dict[str, int], by_channel: bool, generator: torch.Generator) -> dict[str, Any]:
    """Return random inputs of LinearAttention whose sequences have different lengths, the last one none."""
    batch, tokens, heads, key_heads = (sizes[name] for name in ("batch", "tokens", "heads", "key_heads"))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(0, tokens + 1, (batch, 1), generator=generator)
    lengths[0], lengths[-1] = tokens, 0
    return {
        "query": random(batch, tokens, key_heads * sizes["key"]),
        "key": random(batch, tokens, key_heads * sizes["key"]) * sizes["key"] ** -0.5,
        "value": random(batch, tokens, heads * sizes["value"]),
        "past_state": random(batch, heads, sizes["key"], sizes["value"]),
        "query_length": lengths,
        "decay": -random(batch, tokens, heads * (sizes["key"] if by_channel else 1)).abs() if "gated" in rule else None,
        "beta": torch.sigmoid(random(batch, tokens, heads)) if "delta" in rule else None,
    }


def _session(rule: UpdateRule, sizes: dict[str, int], inputs: dict[str, Any], kind: str) -> Any:
    functions = linear_attention_functions(rule)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if kind == "native":
        options.register_custom_ops_library(str(library()))
    if kind == "function":  # a domain for which ONNX Runtime has no kernel
        functions[1].domain = "another.domain"
        functions[0].opset_import[1].domain = "another.domain"
        next(node for node in functions[0].node if node.op_type == OPERATOR).domain = "another.domain"
    node = helper.make_node(
        OPERATOR, [name if x is not None else "" for name, x in inputs.items()], list(OUTPUTS), domain=DOMAIN,
        heads=sizes["heads"], key_heads=sizes["key_heads"], update_rule=rule, scale=0.4,
    )  # fmt: skip
    feed = {name: x.numpy() for name, x in inputs.items() if x is not None}
    info = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in feed.items()
    ]
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in OUTPUTS]
    versions = [helper.make_opsetid("", 23), *(helper.make_opsetid(x.domain, 1) for x in functions)]
    graph = helper.make_graph([node], "graph", info, results)
    model = helper.make_model(graph, opset_imports=versions, ir_version=11, functions=functions)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_every_implementation_equals_the_definition(rule: UpdateRule, by_channel: bool, kind: str) -> None:
    if kind == "native" and library() is None:
        pytest.skip("the native operators are not built")
    generator = torch.Generator().manual_seed(RULES.index(rule))
    for key, value, heads, key_heads, tokens in (
        (8, 6, 3, 3, 9),
        (16, 70, 4, 2, 1),
        (5, 128, 2, 1, 40),
        (24, 64, 2, 2, 1),
    ):
        sizes = {"batch": 3, "tokens": tokens, "heads": heads, "key_heads": key_heads, "key": key, "value": value}
        inputs = _numbers(rule, sizes, by_channel, generator)
        right = linear_attention(**inputs, heads=heads, key_heads=key_heads, update_rule=rule, scale=0.4)
        feed = {name: x.numpy() for name, x in inputs.items() if x is not None}
        outputs = _session(rule, sizes, inputs, kind).run(None, feed)
        for array, expected in zip(outputs, right, strict=True):
            assert np.abs(array - expected.numpy()).max() <= 1e-5 * max(1.0, float(expected.abs().max()))
        assert np.array_equal(outputs[1][-1], inputs["past_state"][-1].numpy()), "a sequence without tokens changed"


@pytest.mark.skipif(library() is None, reason="the native operators are not built")
def test_the_kernel_writes_the_state_over_itself() -> None:
    sizes = {"batch": 2, "tokens": 5, "heads": 2, "key_heads": 1, "key": 8, "value": 20}
    for tokens in (1, 5):
        inputs = _numbers("gated_delta", {**sizes, "tokens": tokens}, False, torch.Generator().manual_seed(tokens))
        session = _session("gated_delta", sizes | {"tokens": tokens}, inputs, "native")
        feed = {name: x.numpy().copy() for name, x in inputs.items()}
        right = session.run(None, feed)[1]
        binding, state = session.io_binding(), feed["past_state"]
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("output")
        binding.bind_output("present_state", "cpu", 0, np.float32, state.shape, state.ctypes.data)
        session.run_with_iobinding(binding)
        assert np.array_equal(state, right)


@pytest.mark.skipif(library() is None, reason="the native operators are not built")
@pytest.mark.parametrize(("changes", "problem"), [
    ({"key_heads": 2}, "3 heads are no multiple of 2 key heads"),
    ({"update_rule": "other"}, "the update rule 'other' is unknown"),
    ({"update_rule": "gated"}, "beta has no use with the rule gated"),
])  # fmt: skip
def test_a_malformed_node_is_refused(changes: dict[str, Any], problem: str) -> None:
    sizes = {"batch": 1, "tokens": 2, "heads": 3, "key_heads": 3, "key": 4, "value": 4}
    inputs = _numbers("gated_delta", sizes, False, torch.Generator())
    make_node = helper.make_node
    with mock.patch.object(helper, "make_node", lambda *args, **fields: make_node(*args, **{**fields, **changes})):  # noqa: SIM117
        with pytest.raises(Exception, match=problem):
            _session("gated_delta", sizes, inputs, "native")
