"""Engines over quantized caches equal PyTorch at every step, with half the bytes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest

from kvexport.artifact.manifest import parse_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.backends.onnxruntime import operators as native
from kvexport.backends.tensorrt.backend import BACKEND as TENSORRT
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import ArtifactError, SnapshotError, UsageError
from kvexport.export.build import build
from kvexport.plan.cache import LayerGeometry
from kvexport.plan.planner import plan_cache
from kvexport.recipe.fields import Recipe
from kvexport.schema.state import SCALES, STATE
from kvexport.state.periodic import SelectedCache
from kvexport.state.snapshot import Snapshot
from kvexport.validate.runner import validate_artifact
from plugins.building import make
from tests.support.answers import stopped
from tests.support.models import make_recipe
from tests.support.tiny_model import PROMPTS, RECIPE, generated

SMALL = {**RECIPE["cache"], "dtype": "int8"}


def recipe_of(checkpoint: Path, **cache: object) -> Recipe:
    return make_recipe(checkpoint, cache={**SMALL, **cache}, export=RECIPE["export"], limits=RECIPE["limits"])


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(recipe_of(tiny_checkpoint), tmp_path_factory.mktemp("int8") / "artifact")


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Engine:
    return load(artifact)


def test_an_artifact_has_int8_keys_and_values_and_their_scales(artifact: Path, engine: Engine) -> None:
    layer = engine.plan.caches[0]
    assert layer.dtype == "int8" and layer.extra == SCALES
    slots = layer.slots
    assert layer.bytes() == slots * (2 * layer.key_size + 2 * 4 + 3 * 4)
    graph = onnx.load(artifact / "decoder.onnx", load_external_data=False).graph
    types = {x.name: x.type.tensor_type.elem_type for x in (*graph.input, *graph.output)}
    assert types["past_key_values.0.key"] == types["present.1.value"] == onnx.TensorProto.INT8
    assert types["past_key_values.0.key_scale"] == types["present.1.value_scale"] == onnx.TensorProto.FLOAT
    path = native.library()
    runs = {how.native for how in native.implementations(engine.manifest).values()}
    assert runs == {path is not None}


def test_every_step_is_pytorchs_and_in_place_the_same_bits(artifact: Path) -> None:
    result = validate_artifact(artifact, length=150)
    assert result.passed, result.problem
    assert result.in_place_identical and result.head_merges


@pytest.mark.skipif(
    not make.is_current("onnxruntime-cuda-host"), reason="not reached: CUDA's binding is not compiled for the host"
)
def test_cuda_kernels_generate_equal_tokens(artifact: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, str(make.host_output("onnxruntime-cuda-host")))
    on_cuda = load(artifact)
    assert native.implementations(on_cuda.manifest)["VoteAttention"].native
    assert generated(on_cuda) == generated(engine)


def test_lanes_are_independent(engine: Engine) -> None:
    together = generated(engine)
    assert together == [engine.generate([prompt], max_new_tokens=40)[0].token_ids for prompt in PROMPTS]


def test_a_request_continues_from_a_snapshot_of_its_bytes(engine: Engine, tiny_artifact: Path) -> None:
    prompt = [3 * i % 60 for i in range(70)]  # beyond the budget of 32 slots

    def tokens(request: Request, count: int | None = None) -> list[int]:
        while engine.busy and (count is None or len(request.tokens) < count):
            engine.step()
        return [token.id for token in request.tokens]

    requests = [Request(prompt, engine.settings(max_new_tokens=40), keep=True) for _ in range(2)]
    engine.add(requests[0])
    expected = tokens(requests[0])
    engine.add(requests[1])
    first = tokens(requests[1], 9)
    data = stopped(engine, requests[1]).to_bytes()
    snapshot = Snapshot.from_bytes(data, engine.manifest)
    assert snapshot.state["past_key_values.0.key"].dtype == np.int8
    rest = Request((), start=snapshot)
    engine.add(rest)
    assert first + tokens(rest) == expected
    with pytest.raises(SnapshotError):  # another artifact's cache has another type
        Snapshot.from_bytes(data, load_manifest(tiny_artifact))


def test_keys_of_8_bits_go_with_values_of_4(tiny_checkpoint: Path, tmp_path: Path) -> None:
    artifact = build(recipe_of(tiny_checkpoint, dtype="k8v4"), tmp_path / "artifact")
    result = validate_artifact(artifact, length=70)
    assert result.passed, result.problem
    assert result.in_place_identical and result.head_merges
    engine = load(artifact)
    layer = engine.plan.caches[0]
    assert layer.slot_bytes() == layer.kv_heads * (layer.key_size + layer.value_size // 2)
    assert layer.bytes() == layer.capacity[0] * (layer.slot_bytes() + layer.kv_heads * (2 * 4 + 3 * 4))
    request = Request([3, 1, 4], engine.settings(max_new_tokens=8), keep=True)
    engine.add(request)
    engine.step()
    state = Snapshot.from_bytes(stopped(engine, request).to_bytes(), engine.manifest).state
    assert state["past_key_values.1.key"].dtype == np.int8 and state["past_key_values.1.value"].dtype == np.uint8


@pytest.mark.parametrize(
    ("cache_type", "sizes", "size"),
    [("int4", (15, 8), "keys of 15"), ("int4", (8, 15), "values of 15"), ("k8v4", (15, 7), "values of 7")],
)
def test_rows_of_an_odd_size_have_no_pairs(
    tiny_checkpoint: Path, cache_type: str, sizes: tuple[int, int], size: str
) -> None:
    with pytest.raises(UsageError, match=f"{cache_type}, .* layer 0 has {size} elements, an odd number") as caught:
        plan_cache(recipe_of(tiny_checkpoint, dtype=cache_type), [LayerGeometry(2, 2, *sizes)])
    assert caught.value.fix == "--set cache.dtype=int8"


def test_a_layer_of_4_bits_takes_half_of_8(tiny_checkpoint: Path) -> None:
    eight, four = (
        plan_cache(recipe_of(tiny_checkpoint, dtype=name), [LayerGeometry(4, 2, 64, 32)]).caches[0]
        for name in ("int8", "int4")
    )
    assert four.slot_bytes() * 2 == eight.slot_bytes() == 2 * (64 + 32)
    assert four.shapes(3)["key"] == (3, four.slots, 32) and four.dtypes()["value"] == np.uint8
    assert four.extra == SCALES


def test_tensorrt_refuses_quantized_caches(tiny_checkpoint: Path) -> None:
    with pytest.raises(
        UsageError, match=r"cache\.dtype is int8, which the backend tensorrt does not support"
    ) as caught:
        TENSORRT.preparation(recipe_of(tiny_checkpoint))
    assert "--set cache.dtype=model" in caught.value.fix


def test_a_manifest_without_the_scales_is_refused(artifact: Path) -> None:
    raw = json.loads((artifact / "manifest.json").read_text())
    raw["cache"][1]["extra"] = []
    with pytest.raises(ArtifactError, match=r"cache\.1\.extra should begin with the scales of a cache in int8"):
        parse_manifest(Path("/artifact"), raw)
    raw["cache"][0] |= {"dtype": "k8v4", "value_size": 7}
    with pytest.raises(ArtifactError, match=r"cache\.0\.value_size should be even, found 7: a byte stores two numbers"):
        parse_manifest(Path("/artifact"), raw)


def test_a_part_of_a_cache_has_its_scales() -> None:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"key": (2, 8, 4), "value": (2, 8, 4)}
    full = {
        f"past_key_values.0.{name}": rng.integers(1, 100, shapes.get(name, (2, 8))).astype(np.float32)
        for name in (*shapes, "votes", "position", *(tensor.name for tensor in SCALES))
    }
    own = {name: np.zeros_like(x) for name, x in full.items()}
    rows = np.array([[1, 4], [0, 7]])
    part = object.__new__(SelectedCache)
    part.plan = cast(Any, SimpleNamespace(caches=[SimpleNamespace(state=(*STATE, *SCALES))]))
    part.copy(0, full, own, rows, 3)
    for scale in SCALES:
        name = scale.past(0)
        assert own[name][:, 3:5].tolist() == np.take_along_axis(full[name], rows, 1).tolist()


def test_a_type_that_is_none_is_a_mistake_of_the_recipe(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="'model', 'int8', 'int4' or 'k8v4'"):
        recipe_of(tiny_checkpoint, dtype="int3")
    with pytest.raises(ValueError, match="fp8 is not supported: int8 with a scale for every row has 7 bits"):
        recipe_of(tiny_checkpoint, dtype="fp8")
