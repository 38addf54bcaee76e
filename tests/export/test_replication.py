"""Equal layers are traced once and copied."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, GPT2Config, MistralConfig

from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.export.graph import tracer
from kvexport.export.graph.layers import Layers, find_layers
from kvexport.export.graph.replicate import replicate_layers
from kvexport.export.graph.tracer import trace_decoder
from kvexport.export.model.hf_model import build_fake
from kvexport.export.model.probe import probe_layers
from kvexport.plan.cache import CachePlan
from kvexport.plan.planner import plan_cache
from tests.support import models

# Gemma has two kinds of layers, one with a window and other rotary frequencies. The copy lies between both kinds.
SIZES = {**models.SIZES, "num_hidden_layers": 4}
WINDOWS = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: models.llama(num_hidden_layers=3),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, **WINDOWS),
    "gemma2": lambda: Gemma2Config(**SIZES, **WINDOWS),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=24),
    "gpt2": lambda: GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=512),
}
LIMITS = {"max_length": 512, "max_batch": 2}
# Every layer without a window has a different capacity, all large enough for the sequences of these tests.
CACHE = {
    "method": "h2o",
    "budget": 300,
    "recent": 0.5,
    "merge_every": 8,
    "allocation": {"kind": "cosine", "minimum": 0.5},
}
EXPORT = {"prefill_chunk": 32, "logits": "all"}


def make_plan(model: Any, mode: Any) -> CachePlan:
    recipe = models.make_recipe(Path(), cache=CACHE, export=EXPORT, limits=LIMITS)
    return plan_cache(recipe, probe_layers(model, mode).geometry)


# The graphs.


@dataclass(frozen=True)
class Traces:
    copied: ir.Model  # decoder whose layers were copied
    whole: ir.Model  # decoder that was traced whole
    given: tuple[ir.Model, Layers, CachePlan]  # arguments of replicate_layers
    traced: list[tuple[int, ...]]  # layers of every trace


@cache
def traces(name: str) -> Traces:
    given: list[tuple[ir.Model, Layers, CachePlan]] = []
    traced: list[tuple[int, ...]] = []

    def trace(decoder: Any, mode: Any, plan: Any, traced_layers: Any, real: Any = tracer._trace) -> ir.Model:
        traced.append(tuple(traced_layers))
        return real(decoder, mode, plan, traced_layers)

    def replicate(graph: ir.Model, layers: Layers, plan: CachePlan) -> bool:
        given.append((graph.clone(), layers, plan))
        return replicate_layers(graph, layers, plan)

    def decoder() -> ir.Model:
        model, mode = build_fake(CONFIGS[name](), torch.float32, LIMITS["max_length"])
        return trace_decoder(model, mode, make_plan(model, mode), last_logits=False)

    with mock.patch.object(tracer, "_trace", trace):
        with mock.patch.object(tracer, "replicate_layers", replicate):
            copied = decoder()
        with mock.patch.object(tracer, "find_layers", lambda *_: None):
            whole = decoder()
    return Traces(copied, whole, given[0], traced)


def terms(model: ir.Model) -> dict[str, str]:
    """Return for every output a digest of the whole expression that computes it.

    Inputs, constants and parameters by name are its ends.
    """
    digests: dict[ir.Value | None, str] = {None: ""}

    def digest(*parts: Any) -> str:
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def plain(value: Any) -> Any:
        return (str(value.dtype), list(value.shape), value.tobytes()) if isinstance(value, ir.TensorProtocol) else value

    for value in model.graph.inputs:
        assert value.shape is not None
        digests[value] = digest(value.name, value.dtype, [d for d in value.shape if isinstance(d, int)])
    for value in model.graph.initializers.values():
        digests[value] = (
            digest(value.name, value.shape) if value.const_value is None else digest(plain(value.const_value))
        )
    for node in model.graph:
        attributes = [(name, plain(attribute.value)) for name, attribute in sorted(node.attributes.items())]
        if node.op_type == "Shape" and str(node.inputs[0].name).startswith("past_key_values."):  # type: ignore[union-attr]
            assert dict(attributes) == {"start": 0, "end": 1}
            digests[node.outputs[0]] = digest("batch")  # the batch size, whichever layer's state it is read from
            continue
        for i, output in enumerate(node.outputs):
            digests[output] = digest(node.op_identifier(), attributes, [digests[x] for x in node.inputs], i)
    return {str(value.name): digests[value] for value in model.graph.outputs}


@pytest.mark.parametrize(("name", "layers"), [("llama", [(0, 1), (0, 1, 2)]), ("gemma3", [(0, 1, 3), (0, 1, 2, 3)])])
def test_copies_of_a_layer_equal_a_trace_of_all_layers(name: str, layers: list[tuple[int, ...]]) -> None:
    both = traces(name)
    assert both.traced == layers
    assert list(terms(both.copied)) == list(terms(both.whole)) and terms(both.copied) == terms(both.whole)
    assert len({layer.capacity for layer in both.given[2].caches}) > 1
    assert [v.name for v in both.copied.graph.inputs] == [v.name for v in both.whole.graph.inputs]
    outputs = [v.name for node in both.copied.graph for v in node.outputs]
    assert len(set(outputs)) == len(outputs)


def parameter(model: ir.Model, layer: int, name: str) -> ir.Value:
    return model.graph.initializers[f"model.model.layers.{layer}.{name}"]


def reader(model: ir.Model, layer: int, name: str) -> ir.Node:
    (use,) = parameter(model, layer, name).uses()
    return use.node


def state(model: ir.Model, layer: int, name: str) -> ir.Value:
    return next(v for v in model.graph.inputs if v.name == f"past_key_values.{layer}.{name}")


@pytest.mark.parametrize(
    "find", [lambda m, i: parameter(m, i, "mlp.up_proj.weight"), lambda m, i: state(m, i, "votes")]
)
def test_a_copy_with_the_weights_or_state_of_another_layer_would_be_seen(
    find: Callable[[ir.Model, int], ir.Value],
) -> None:
    wrong = traces("llama").copied.clone()
    find(wrong, 2).replace_all_uses_with(find(wrong, 1))
    right = terms(traces("llama").whole)
    assert terms(wrong)["logits"] != right["logits"] and terms(wrong)["present.1.key"] == right["present.1.key"]


def other_number(model: ir.Model) -> None:
    reader(model, 1, "input_layernorm.weight").attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)


def other_operation(model: ir.Model) -> None:
    reader(model, 1, "input_layernorm.weight").op_type = "LayerNormalization"


def other_constant(model: ir.Model) -> None:
    node = reader(model, 1, "input_layernorm.weight")
    node.replace_input_with(1, ir.Value(name="ones", const_value=ir.tensor(np.ones(64, np.float32))))


def foreign_parameter(model: ir.Model) -> None:
    parameter(model, 1, "mlp.up_proj.weight").replace_all_uses_with(parameter(model, 0, "mlp.up_proj.weight"))


def foreign_state(model: ir.Model) -> None:
    state(model, 1, "votes").replace_all_uses_with(state(model, 0, "votes"))


def second_thread(model: ir.Model) -> None:
    normed = [reader(model, i, "input_layernorm.weight").outputs[0] for i in (0, 1)]
    normed[1].replace_all_uses_with(normed[0])


def swapped_operands(model: ir.Model) -> None:
    node = reader(model, 1, "input_layernorm.weight")
    x, scale = node.inputs
    node.replace_input_with(0, scale)
    node.replace_input_with(1, x)


@pytest.mark.parametrize(
    "change",
    [other_number, other_operation, other_constant, foreign_parameter, foreign_state, second_thread, swapped_operands],
)
def test_layers_whose_graphs_differ_are_not_copied(change: Callable[[ir.Model], None]) -> None:
    graph, layers, plan = traces("llama").given
    changed = graph.clone()
    change(changed)
    assert not replicate_layers(changed, layers, plan)
    assert replicate_layers(graph.clone(), layers, plan)


# The artifact.


def test_every_copy_in_an_artifact_has_its_own_weights_and_state(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["gemma3"]())
    recipe = models.make_recipe(checkpoint, cache=CACHE, export=EXPORT, limits=LIMITS)
    copied = traces("gemma3").copied  # traced before the tracing function is replaced
    with mock.patch.object(tracer, "trace_decoder", lambda *_, **__: copied.clone()):
        engine = load(build(recipe, tmp_path / "artifact"))
    sequences = models.random_ids(1, 50, 60)
    actual = models.given_tokens_logits(engine, sequences, (40, 40))
    expected = models.hugging_face_logits(checkpoint, sequences)
    assert max(np.abs(e).max() for e in expected) > 1.0
    assert max(np.abs(g - e).max() for g, e in zip(actual, expected, strict=True)) <= 1e-4
    merge = onnx.load(tmp_path / "artifact" / "merge.onnx")
    # Windows make two functions of heads that are alike. The layers' different budgets make no more of them.
    names = [function.name for function in merge.functions]
    assert len(merge.graph.node) == 4 and sum(name.startswith("HeadsMergeCache_") for name in names) == 2


# Which layers are equal.


class Plus(torch.nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value


class Times(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class WithThePrevious(torch.nn.Module):
    """A module that adds the input of the layer before, which does not come through the hidden state."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x)
        return x + self.kept[-2] if len(self.kept) > 1 else x


def set_attribute(module: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda layers: setattr(layers.get_submodule(module), name, value)


def each(make: Callable[[int], torch.nn.Module]) -> Callable[[Any], None]:
    """Return a change that replaces the activation of every layer by a different module."""

    def change(layers: Any) -> None:
        for i, layer in enumerate(layers):
            layer.mlp.act_fn = make(i)

    return change


def share(layers: Any) -> None:
    layers[2].mlp = layers[1].mlp


def enlarge(layers: Any) -> None:
    with layers[2].mlp.gate_proj.weight.fake_mode:
        for name, size in (("gate_proj", (80, 64)), ("up_proj", (80, 64)), ("down_proj", (64, 80))):
            setattr(layers[2].mlp, name, torch.nn.Linear(size[1], size[0], bias=False))


def remember(layers: Any) -> None:
    kept: list[torch.Tensor] = []
    each(lambda _: WithThePrevious(kept))(layers)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gemma3", (0, 0, 0, 3)), ("gemma2", (0, 0, 0, 3)), ("mistral", (0, 0, 0, 0)), ("gpt2", (0, 0, 0))],
)
def test_which_layers_of_a_family_do_the_same(name: str, expected: tuple[int, ...]) -> None:
    layers = find_layers(*build_fake(CONFIGS[name](), torch.float32, LIMITS["max_length"]))
    assert layers is not None and layers.first == expected


def changed_llama(change: Callable[[Any], None]) -> tuple[Any, Any]:
    model, mode = build_fake(models.llama(num_hidden_layers=4), torch.float32, LIMITS["max_length"])
    change(model.model.layers)
    return model, mode


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda layers: None, (0, 0, 0, 0)),
        (set_attribute("2.self_attn", "scaling", 0.5), (0, 0, 2, 0)),
        (set_attribute("1.input_layernorm", "variance_epsilon", 1e-3), (0, 1, 0, 0)),
        (set_attribute("3.mlp", "act_fn", torch.nn.ReLU()), (0, 0, 0, 3)),
        (set_attribute("0", "input_layernorm", torch.nn.Identity()), (0, 1, 1, 1)),
        (enlarge, (0, 0, 2, 0)),
        (each(lambda i: Plus(torch.tensor(1.0 + i % 2))), (0, 1, 0, 1)),
        (each(lambda i: Times(1.0 + 0.1 * i)), (0, 1, 2, 3)),
        (share, None),
        (remember, None),
    ],
    ids=[
        "nothing",
        "scale",
        "epsilon",
        "module",
        "less",
        "shape",
        "buffers",
        "index",
        "shared parameters",
        "beside the hidden state",
    ],
)
def test_layers_that_differ_are_not_copied(change: Callable[[Any], None], expected: tuple[int, ...] | None) -> None:
    layers = find_layers(*changed_llama(change))
    assert (layers and layers.first) == expected


# If layers differ, all of them are traced.


class Asked:
    """A replacement of tracer._trace that records the layers of every requested trace. The first one raises `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.error, self.layers = error, []
        monkeypatch.setattr(tracer, "_trace", self.trace)

    def trace(self, decoder: Any, mode: Any, plan: Any, traced_layers: Any) -> Any:
        self.layers.append(tuple(traced_layers))
        if self.error and len(self.layers) == 1:
            raise self.error
        return self.layers[-1]


@pytest.mark.parametrize(
    "change", [each(lambda i: Times(1.0 + 0.1 * i)), remember], ids=["index", "beside the hidden state"]
)
def test_unusual_layers_are_all_traced(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Asked(monkeypatch)
    model, mode = changed_llama(change)
    trace_decoder(model, mode, make_plan(model, mode), last_logits=True)
    assert recorder.layers == [(0, 1, 2, 3)]


@pytest.mark.parametrize("error", [None, UsageError("it cannot be traced")], ids=["graphs differ", "error"])
def test_all_layers_are_traced_if_they_cannot_be_copied(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Asked(monkeypatch, error)
    monkeypatch.setattr(tracer, "replicate_layers", lambda *_: False)
    model, mode = changed_llama(lambda layers: None)
    modules = list(model.model.layers)
    result: Any = trace_decoder(model, mode, make_plan(model, mode), last_logits=True)
    assert recorder.layers == [(0, 1), (0, 1, 2, 3)] and result == (0, 1, 2, 3)
    # The model is complete again, and its layers have their own forward method.
    assert list(model.model.layers) == modules and not any("forward" in vars(module) for module in modules)
