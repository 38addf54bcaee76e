"""The plan of a recipe equals the runtime's allocations and the build's files, to the byte."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvexport
from kvexport.commands.app import app
from kvexport.errors import UsageError
from kvexport.export.build import build, plan_memory
from kvexport.plan.cache import LayerCache
from kvexport.plan.memory import CUDA_BYTES, MemoryPlan, layer_groups
from kvexport.recipe.load import load_recipe
from kvexport.units import format_bytes, parse_bytes
from tests.support import models, vision


def plan_of(recipe: Path, *overrides: str) -> MemoryPlan:
    loaded = load_recipe(str(recipe), overrides)
    return plan_memory(loaded.recipe, loaded.name)


def cache_bytes(plan: MemoryPlan, budget: int) -> int:
    """Return the bytes of a cache for max_batch sequences with a uniform budget, counted slot by slot."""
    limits, recipe = plan.recipe.limits, plan.recipe
    total = 8 * limits.max_batch
    for layer in plan.geometry:
        capacity = budget + recipe.slack if budget < limits.max_length else budget
        total += limits.max_batch * layer.kv_heads * capacity * (4 * (layer.key_size + layer.value_size) + 4 + 4 + 4)
    return total


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_runtime_allocates_the_bytes_of_the_plan(tiny_recipe: Path, tiny_artifact: Path, lanes: int) -> None:
    backend = kvexport.load(tiny_artifact).new_state(lanes)
    allocated = sum(array.nbytes for array in backend.state.values()) + backend.past_length.nbytes
    assert plan_of(tiny_recipe).cache.bytes(lanes) == allocated


def test_the_plans_weights_are_those_of_the_build_with_tied_ones_once(tiny_recipe: Path, tiny_artifact: Path) -> None:
    plan = plan_of(tiny_recipe)
    hidden, kv, intermediate = 32, 16, 64
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate + 2 * hidden
    assert plan.parameters == 64 * hidden + 2 * layer + hidden
    written = (tiny_artifact / "decoder.weights").stat().st_size
    assert plan.weight_bytes <= written < plan.weight_bytes + 4096 * 4, "alignment may add a little"
    assert plan_of(tiny_recipe, "model.dtype=float16").weight_bytes == plan.weight_bytes // 2


def test_the_image_encoders_weights_are_those_of_the_build(tmp_path: Path) -> None:
    recipe = models.make_recipe(vision.save_checkpoint("smolvlm", tmp_path / "checkpoint"), limits={"max_length": 64})
    plan, artifact = plan_memory(recipe), build(recipe, tmp_path / "artifact")
    written = sum(file.stat().st_size for file in artifact.glob("*.weights"))
    counted = plan.weight_bytes + plan.image_bytes
    assert counted <= written < counted + 64 * 60, "alignment may add a little"
    assert "image encoder" in str(plan.sections()) and plan.server.total > 2 * counted
    texts = plan_memory(recipe.model_copy(update={"export": recipe.export.model_copy(update={"images": False})}))
    assert texts.image_bytes == 0 and texts.weight_bytes == plan.weight_bytes


def test_adapters_are_counted_as_an_engine_loads_them(
    tiny_recipe: Path, adapted_artifact: Path, adapters: dict[str, Path]
) -> None:
    plan = plan_of(tiny_recipe, "adapters.count=2", "adapters.rank=4")
    loaded = kvexport.load(adapted_artifact, threads=1, adapters=adapters).adapters
    assert plan.adapter_bytes * loaded.rows == loaded.nbytes * 9, "the two adapters have ranks 3 and 4"
    assert plan.server.total == plan_of(tiny_recipe).server.total + plan.adapter_bytes
    assert f"{format_bytes(plan.adapter_bytes)} for 2 of rank 4" in str(plan.sections())
    one = plan_of(tiny_recipe, "adapters.count=1", "adapters.rank=8", "adapters.targets=[v_proj]")
    assert one.adapter_bytes == 9 * 2 * (32 + 16) * 4


def test_the_full_cache_is_keys_and_values_of_the_longest_sequence(tiny_recipe: Path) -> None:
    plan = plan_of(tiny_recipe)
    assert plan.full_bytes == 2 * 512 * 2 * (8 + 8) * 4
    assert plan.ratio == pytest.approx(plan.full_bytes / plan.sequence_bytes)
    full = plan_of(tiny_recipe, "cache.method=full")
    assert full.ratio < 1, "votes, scores and positions are added"
    assert full.fit(10**9).largest_budget is None


def test_as_many_sequences_fit_as_do_fit(tiny_recipe: Path) -> None:
    plan = plan_of(tiny_recipe)
    enough = plan.fixed_bytes + 5 * plan.sequence_bytes
    assert plan.fit(enough).sequences == 5
    assert plan.fit(enough - 1).sequences == 4
    assert plan.fit(plan.fixed_bytes - 1).sequences == 0


@pytest.mark.parametrize("backend", ["backend.device=cuda", "backend.name=tensorrt"])
def test_on_a_gpu_activations_and_cuda_are_estimated(tiny_recipe: Path, backend: str) -> None:
    on_cpu, few, more = (
        plan_of(tiny_recipe, *settings, "model.dtype=float16")
        for settings in (["limits.max_batch=1"], [backend, "limits.max_batch=1"], [backend, "limits.max_batch=8"])
    )
    assert on_cpu.arena_bytes == 0 and "not counted" in on_cpu.to_json()["not_counted"]
    each, chunk = (more.arena_bytes - few.arena_bytes) // 7, few.recipe.export.prefill_chunk
    assert few.arena_bytes == CUDA_BYTES + each > CUDA_BYTES + chunk
    enough = few.weight_bytes + few.arena_bytes + 2 * few.sequence_bytes
    assert few.fit(enough).sequences == 2 and few.fit(enough - 1).sequences == 1
    assert "are estimated" in few.to_json()["not_counted"]


@pytest.mark.parametrize("budget", [40, 300, 495, 496, 511])
def test_the_largest_budget_fits_and_one_more_slot_does_not(tiny_recipe: Path, budget: int) -> None:
    plan = plan_of(tiny_recipe, "cache.allocation.kind=cosine")
    room = plan.fixed_bytes + cache_bytes(plan, budget)
    largest = plan.fit(room).largest_budget
    # Without slack the longest budget takes less than slightly smaller ones.
    assert largest == (512 if cache_bytes(plan, 512) <= cache_bytes(plan, budget) else budget)
    assert plan.fit(plan.fixed_bytes + cache_bytes(plan, 40) - 1).largest_budget == 39


def test_no_budget_is_named_that_cannot_hold_the_sinks(tiny_recipe: Path) -> None:
    plan = plan_of(tiny_recipe, "cache.sinks=20", "cache.recent=10")
    assert plan.fit(plan.fixed_bytes + cache_bytes(plan, 31)).largest_budget == 31
    assert plan.fit(plan.fixed_bytes + cache_bytes(plan, 30)).largest_budget is None


def test_a_cache_that_reads_whole_prompts_is_counted_while_it_does_and_afterwards(tiny_recipe: Path) -> None:
    plan = plan_of(tiny_recipe, "cache.merge_prompts=end")
    assert plan.sequence_bytes == plan_of(tiny_recipe, "cache.slack=480").sequence_bytes, "512 slots"
    assert plan.settled_bytes == plan_of(tiny_recipe, "export.prefill_chunk=4").sequence_bytes, "merge_every is 4"
    assert "of it are used afterwards" in str(plan.sections()[0])
    chunks = plan_of(tiny_recipe)
    assert chunks.settled_bytes == chunks.sequence_bytes and "afterwards" not in str(chunks.sections()[0])


def test_layers_that_are_alike_share_a_line(tiny_recipe: Path) -> None:
    uniform, cosine = plan_of(tiny_recipe).cache, plan_of(tiny_recipe, "cache.allocation.kind=cosine").cache
    assert [(label, count) for label, _, count in layer_groups(uniform)] == [("0-1", 2)]
    assert [(label, count) for label, _, count in layer_groups(cosine)] == [("0", 1), ("1", 1)]
    assert all(isinstance(layer, LayerCache) for _, layer, _ in layer_groups(cosine))


@pytest.mark.parametrize(("text", "count"), [
    ("24GB", 24 * 10**9), ("24 gb", 24 * 10**9), ("1.5GiB", 3 * 2**29), ("512MiB", 2**29), ("2KB", 2000), ("7", 7),
    ("7 B", 7), ("1TB", 10**12),
])  # fmt: skip
def test_amounts_of_memory(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "24 gigs", "-1GB", "1e9", "24G", "1" * 400, "٣GB"])
def test_texts_that_are_no_amount_of_memory_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not an amount"):
        parse_bytes(text)


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 999_499, 999_500, 12_345_678, 10**18 + 1])
def test_shown_sizes_read_back_within_their_three_digits(count: int) -> None:
    shown = format_bytes(count)
    assert parse_bytes(shown.replace(" bytes", "")) == pytest.approx(count, rel=5e-3)
    assert len(shown.split()[0].replace(".", "")) <= 4


def test_the_verb_prints_the_plan(tiny_recipe: Path) -> None:
    plan = plan_of(tiny_recipe)
    amount = plan.fixed_bytes + 6 * plan.sequence_bytes
    shown = CliRunner().invoke(app, ["plan", "--recipe", str(tiny_recipe), "--memory", str(amount)])
    assert shown.exit_code == 0, shown.output
    assert "activations" in shown.stdout
    data = json.loads(
        CliRunner().invoke(app, ["plan", "--recipe", str(tiny_recipe), "--memory", str(amount), "--json"]).stdout
    )
    assert data["fit"]["sequences"] == 6
    assert data["cache_bytes_per_sequence"] == sum(layer["bytes"] for layer in data["layers"]) + 8
    assert data["cache_bytes"] == 4 * data["cache_bytes_per_sequence"]
    server = 2 * plan.weight_bytes + plan.batch_bytes + (2 << 30) + (512 << 20)
    assert data["server_bytes"] == server and f"up to {format_bytes(server)}: " in shown.stdout
