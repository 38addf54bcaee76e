"""The costs of evictions, measured layer by layer, equal those of the whole model."""

from typing import Any

import numpy as np
import pytest
import torch

from kvexport.calibrate import compressed
from kvexport.calibrate.compressed import compressed_attention
from kvexport.calibrate.head_costs import PROBES, FullAttention, HeadCosts, _fisher_directions, sized
from kvexport.export.build import read_model
from kvexport.export.hooks.attention import IMPLEMENTATION, PassThroughCache, attending
from kvexport.export.model.tensors import ModelShape
from kvexport.methods import all_methods
from kvexport.plan.cache import LayerGeometry
from kvexport.plan.planner import plan_cache
from kvexport.recipe.load import LoadedRecipe, load_recipe
from kvexport.validate.reference import load_model
from tests.support.elsewhere import ELSEWHERE, elsewhere

LENGTH, BUDGETS = 128, (16, 40)
IDS = np.random.default_rng(0).integers(5, 90, LENGTH).tolist()
COUNTED = list(range(60, LENGTH - 1, 3))


@pytest.fixture(scope="module")
def tiny() -> tuple[LoadedRecipe, ModelShape]:
    loaded = load_recipe("tiny-base", ["cache.method=ballot", "cache.budget=32", "limits.max_length=256"])
    return loaded, read_model(loaded.recipe)


class _Storing(FullAttention):
    def attend(self, module: Any, query: Any, key: Any, value: Any, options: Any) -> Any:
        output = super().attend(module, query, key, value, options).requires_grad_(True)
        self.calls: list[Any] = [*getattr(self, "calls", []), (query.detach(), key.detach(), value.detach(), output)]
        return output


def test_layers_one_at_a_time_have_the_costs_of_the_whole_model(tiny: tuple[LoadedRecipe, ModelShape]) -> None:
    loaded, shape = tiny
    model = load_model(shape.checkpoint, loaded.recipe, IMPLEMENTATION).requires_grad_(False)
    full = _Storing(shape.geometry, loaded.recipe.cache.build_method())
    with torch.enable_grad(), attending(full):
        inputs = {"input_ids": torch.tensor([IDS]), "position_ids": torch.arange(LENGTH)[None]}
        logits = model(**inputs, **PassThroughCache().as_arguments(model)).logits[0, COUNTED]
    outputs = [call[-1] for call in full.calls]
    along = _fisher_directions(logits.detach())
    gradients = [torch.autograd.grad((logits * x).sum(), outputs, retain_graph=True) for x in along]
    recipes = [sized(loaded.recipe, LENGTH, slots) for slots in BUDGETS]
    method, chunk = loaded.recipe.cache.build_method(), recipes[0].export.prefill_chunk
    expected = np.zeros((len(shape.geometry), shape.geometry[0].kv_heads, len(BUDGETS)))
    for i, (query, key, value, output) in enumerate(full.calls):
        for p, recipe in enumerate(recipes):
            cache = plan_cache(recipe, shape.geometry).caches[i]
            d = compressed_attention(cache, shape.geometry[i], method, (query, key, value), chunk) - output.detach()
            for gradient in gradients:
                change = (gradient[i] * d).reshape(expected.shape[1], -1, *d.shape[2:]).sum((1, 3))
                expected[i, :, p] += 0.5 * change.square().sum(1).double().numpy() / PROBES / len(COUNTED)
    costs = HeadCosts(loaded.recipe, shape).of_text(IDS, COUNTED, lambda _: BUDGETS)
    assert expected.max() > 0
    np.testing.assert_allclose(costs, expected, rtol=1e-3, atol=1e-4 * expected.max())


def test_a_gpu_measures_the_costs_of_the_cpu(tiny: tuple[LoadedRecipe, ModelShape]) -> None:
    loaded, shape = tiny
    expected = HeadCosts(loaded.recipe, shape).of_text(IDS, COUNTED, lambda _: BUDGETS)
    with elsewhere():
        costs = HeadCosts(loaded.recipe, shape, ELSEWHERE).of_text(IDS, COUNTED, lambda _: BUDGETS)
    np.testing.assert_allclose(costs, expected, rtol=1e-3, atol=1e-4 * expected.max())


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_every_method_compresses_on_a_gpu_as_on_the_cpu(name: str) -> None:
    layer, method = LayerGeometry(4, 2, 8, 8, sliding_window=40, softcap=5.0, scale=0.3), all_methods()[name]()
    recipe = sized(load_recipe("tiny-base", [f"cache.method={name}"]).recipe, LENGTH, 24)
    cache = plan_cache(recipe, [layer]).caches[0]
    rng = torch.Generator().manual_seed(3)
    inputs = [torch.randn(1, h, LENGTH, 8, generator=rng) for h in (4, 2, 2)]
    expected = compressed_attention(cache, layer, method, inputs, 4)
    with elsewhere():
        output = compressed_attention(cache, layer, method, [x.to(ELSEWHERE) for x in inputs], 4).cpu()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_a_device_that_is_not_there_refuses_tensors_of_the_cpu() -> None:
    with elsewhere(), pytest.raises(RuntimeError, match="of the GPU and of the CPU"):
        torch.ones(2, device=ELSEWHERE) + torch.ones(2)


def test_native_operators_compute_the_compressed_attention_of_pytorch(
    tiny: tuple[LoadedRecipe, ModelShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, shape = tiny
    layer, method = shape.geometry[0], loaded.recipe.cache.build_method()
    cache = plan_cache(sized(loaded.recipe, LENGTH, 24), shape.geometry).caches[0]
    if compressed.native_opener(cache, method) is None:
        pytest.skip("the native operators are not built")
    rng = torch.Generator().manual_seed(1)
    heads = (layer.query_heads, layer.kv_heads, layer.kv_heads)
    sizes = (layer.key_size, layer.key_size, layer.value_size)
    inputs = [torch.randn(1, h, LENGTH, s, generator=rng) for h, s in zip(heads, sizes, strict=True)]
    native = compressed_attention(cache, layer, method, inputs, 4)
    monkeypatch.setattr(compressed, "native_opener", lambda *_: None)
    torch.testing.assert_close(native, compressed_attention(cache, layer, method, inputs, 4), rtol=1e-4, atol=1e-5)


def test_a_layer_with_a_window_a_softcap_and_sinks_has_the_output_of_the_operator() -> None:
    """The full attention that costs refer to is that of a cache that evicts nothing."""
    layer = LayerGeometry(4, 2, 8, 8, sliding_window=20, softcap=5.0, scale=0.3, sink_logits=True)
    method = all_methods()["ballot"]()
    rng = torch.Generator().manual_seed(2)
    inputs = [torch.randn(1, h, LENGTH, 8, generator=rng) for h in (4, 2, 2)]
    sinks = torch.randn(4, generator=rng)
    full = FullAttention([layer], method)
    output = full.attend(torch.nn.Identity(), *inputs, {"layer": 0, "s_aux": sinks})
    recipe = sized(load_recipe("tiny-base", ["cache.method=ballot"]).recipe, LENGTH, LENGTH)
    cache = plan_cache(recipe, [layer]).caches[0]
    assert cache.budget == (20, 20)
    torch.testing.assert_close(
        output, compressed_attention(cache, layer, method, inputs, 4, sinks), rtol=1e-4, atol=1e-5
    )
