"""Tests of LoRA adapters at run time: each request has its own, with the tokens of merged weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import kvexport
from kvexport.backends.onnxruntime.operators import VARIABLE
from kvexport.engine.engine import Engine
from kvexport.engine.options import EngineOptions
from kvexport.engine.request import Request
from kvexport.errors import KvexportError, SnapshotError, UsageError
from kvexport.export.build import read_model
from kvexport.export.graph.adapters import put_adapters
from kvexport.export.graph.tracer import trace_decoder
from kvexport.language.chat import ChatTemplate
from kvexport.recipe.fields import Recipe
from kvexport.state.snapshot import Snapshot
from tests.support.adapters import CONFIG, MODULES, adapter, with_adapter
from tests.support.answers import answers as run
from tests.support.answers import stopped
from tests.support.command_line import failure, ok
from tests.support.http_server import TEMPLATE
from tests.support.tiny_model import PROMPTS, RECIPE

COUNT = 40  # tokens of an answer, which goes far beyond the budget of 32 slots


@pytest.fixture(scope="module")
def engine(adapted_artifact: Path, adapters: dict[str, Path]) -> Engine:
    return kvexport.load(adapted_artifact, threads=1, adapters=adapters)


@pytest.fixture(scope="module")
def merged(tiny_checkpoint: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("merged")
    model = {"path": str(with_adapter(folder / "checkpoint", tiny_checkpoint, adapters["two"]))}
    recipe = Recipe.model_validate({**RECIPE, "model": model})
    return kvexport.load(kvexport.build(recipe, folder / "artifact"), threads=1)


def answers(engine: Engine, **options: Any) -> tuple[list[list[int]], NDArray[np.float32]]:
    """Return the answers to all prompts, and the logits of all their tokens."""
    rows = []

    def keep(_: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        rows.append(logits.copy())
        return logits

    answered = engine.generate(PROMPTS, max_new_tokens=COUNT, logits_processor=keep, **options)
    return [completion.token_ids for completion in answered], np.array(rows)


def request(engine: Engine, prompt: list[int], name: str | None, **more: Any) -> Request:
    return Request(prompt, engine.settings(max_new_tokens=COUNT), adapter=name, **more)


def test_an_adapter_answers_as_merged_weights_do(engine: Engine, merged: Engine) -> None:
    (tokens, logits), (expected, of_merged) = answers(engine, adapter="two"), answers(merged)
    assert tokens == expected
    np.testing.assert_allclose(logits, of_merged, rtol=1e-4, atol=1e-4)


def test_every_projection_takes_its_adapters_in_one_node(adapted_artifact: Path) -> None:
    decoder = onnx.load(adapted_artifact / "decoder.onnx", load_external_data=False)
    types = [node.op_type for node in decoder.graph.node]
    # Queries, keys and values; the output; gate and up; down. The logits take no adapters.
    assert (types.count("AdaptedLinear"), types.count("Linear")) == (4 * types.count("VoteAttention"), 1)
    assert not {"MatMul", "Sigmoid", "RMSNormalization", "RotaryEmbedding"} & set(types)


def test_the_functions_answer_as_the_kernels_do(
    engine: Engine, adapted_artifact: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are equal, and logits too until a merge may choose otherwise between two slots of nearly equal cost."""
    monkeypatch.setenv(VARIABLE, "off")
    functions = kvexport.load(adapted_artifact, threads=1, adapters=adapters)
    before = 24 * len(PROMPTS)
    for name in ("two", None):
        (tokens, logits), (expected, of_kernels) = answers(functions, adapter=name), answers(engine, adapter=name)
        assert tokens == expected
        np.testing.assert_allclose(logits[:before], of_kernels[:before], rtol=1e-4, atol=1e-4)


def test_a_gpu_runs_adapters_by_products_of_onnx_runtime(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A decoder for CUDA has no operator of kvexport for products, with or without adapters."""
    sections = {"adapters": {"count": 2, "rank": 4}, "backend": {"device": "cuda"}}
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(tiny_checkpoint)}, **sections})
    decoder = onnx.load(kvexport.build(recipe, tmp_path / "artifact") / "decoder.onnx", load_external_data=False)
    types = [node.op_type for node in decoder.graph.node]
    assert not {"Linear", "AdaptedLinear"} & {*types}
    assert any(name.startswith("adapters.") for node in decoder.graph.node for name in node.input)


def test_without_an_adapter_the_model_answers_as_it_was_built(engine: Engine, tiny_artifact: Path) -> None:
    (tokens, logits), (expected, plain) = answers(engine), answers(kvexport.load(tiny_artifact, threads=1))
    assert tokens == expected
    np.testing.assert_allclose(logits, plain, rtol=1e-4, atol=1e-4)


def test_a_batch_of_several_adapters_gives_each_sequence_its_own_tokens(engine: Engine) -> None:
    names = [None, "one", "two", "one"]
    alone = [run(engine, request(engine, PROMPTS[0], name))[0] for name in names]
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert run(engine, *(request(engine, PROMPTS[0], name) for name in names)) == alone


def test_a_request_that_moves_to_another_lane_takes_its_adapter_along(engine: Engine) -> None:
    expected = run(engine, request(engine, PROMPTS[0], "two"))[0]
    short, long = request(engine, [3], None), request(engine, PROMPTS[0], "two")
    short.settings = engine.settings(max_new_tokens=4)
    assert run(engine, short, long)[1] == expected
    assert long.lane == 0  # where the short request was


def test_the_commands_answer_with_the_adapter_that_the_option_names(
    engine: Engine, adapted_artifact: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    option = f"--adapter=two={adapters['two']}"
    ids, expected = "--token-ids=" + ",".join(map(str, PROMPTS[0])), run(engine, request(engine, PROMPTS[0], "two"))[0]
    printed = ok("generate", adapted_artifact, ids, option, "--max-new-tokens", COUNT, "--greedy", "--json")
    assert json.loads(printed)["token_ids"] == expected
    template = ChatTemplate({"default": TEMPLATE}, {}, "the test")
    monkeypatch.setattr("kvexport.engine.engine.read_chat_template", lambda _: template)
    settings = ("--temperature", 0, "--max-new-tokens", 8)
    said = [ok("chat", adapted_artifact, *settings, *more, input="anna\nbob\n") for more in ((), (option,))]
    assert len(said[0].splitlines()) == len(said[1].splitlines()) == 2 and said[0] != said[1]
    assert "--adapter is 'two', expected a name and a folder" in failure(2, "chat", adapted_artifact, "--adapter=two")


def test_a_fork_has_the_adapter_of_its_prompt(engine: Engine) -> None:
    first = request(engine, PROMPTS[0], "two")
    assert len({tuple(tokens) for tokens in run(engine, first, first.fork())}) == 1


def test_a_prefix_is_shared_within_one_adapter_alone(engine: Engine) -> None:
    caching = engine.with_options(EngineOptions(prefix_memory=1 << 20))
    expected = [run(engine, request(engine, PROMPTS[0], name))[0] for name in ("one", "two", None)]
    cached = []
    for _ in range(2):
        for name, tokens in zip(("one", "two", None), expected, strict=True):
            one = request(caching, PROMPTS[0], name)
            assert run(caching, one)[0] == tokens
            cached.append(one.cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32]


def test_a_snapshot_continues_with_its_adapter(engine: Engine) -> None:
    expected = run(engine, request(engine, PROMPTS[0], "two"))[0]
    half = request(engine, PROMPTS[0], "two", keep=True)
    engine.add(half)
    for _ in range(12):
        engine.step()
    saved = stopped(engine, half)
    read = Snapshot.from_bytes(saved.to_bytes(), engine.manifest)
    assert read.adapter == engine.adapters.by_name["two"].digest
    begun = [token.id for token in half.tokens]
    assert begun + run(engine, Request((), start=read))[0] == expected


def test_a_snapshot_of_another_adapter_is_refused(engine: Engine, adapted_artifact: Path) -> None:
    keeping = request(engine, PROMPTS[0], "two", keep=True)
    run(engine, keeping)
    for name in ("one", None):
        with pytest.raises(SnapshotError, match="the snapshot is of the adapter two, the request is for"):
            engine.add(request(engine, [3], name, start=keeping.snapshot))
    without = kvexport.load(adapted_artifact, threads=1)
    with pytest.raises(SnapshotError, match="the adapter of other files"):
        without.add(request(without, [3], None, start=keeping.snapshot))
    plain = request(engine, PROMPTS[0], None, keep=True)
    run(engine, plain)
    with pytest.raises(SnapshotError, match="of the model without an adapter, the request is for one"):
        engine.add(request(engine, [3], "one", start=plain.snapshot))


def test_an_unknown_name_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"there is no adapter 'three' here, but 'one', 'two'"):
        engine.generate([3], adapter="three")


def of_another_size(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"base_model.model.{MODULES[0]}.lora_A.weight"] = torch.zeros(3, 5)
    save_file(tensors, folder / "adapter_model.safetensors")


def of_more_layers(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {name.replace("layers.0.", "layers.7."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def of_the_head(folder: Path) -> None:
    tensors = {f"base_model.model.lm_head.lora_{factor}.weight": torch.zeros(3, 3) for factor in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")


def infinite(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"base_model.model.{MODULES[0]}.lora_B.weight"][0] = float("inf")
    save_file(tensors, folder / "adapter_model.safetensors")


def as_dora(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "use_dora": True}))


@pytest.mark.parametrize(("damage", "words"), [
    (of_another_size, r"has matrices \[3, 5\] and .*, which has 32 inputs and 32 outputs in the artifact"),
    (of_more_layers, "changes 'model.layers.7.self_attn.q_proj', and the artifact takes adapters of down_proj, "),
    (of_the_head, "changes 'lm_head'"), (infinite, "infinite or NaN"),
    (as_dora, "use_dora True; only adapters with use_dora False"),
])  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, tiny_checkpoint: Path, adapted_artifact: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = adapter(tmp_path / "adapter", tiny_checkpoint)
    damage(folder)
    with pytest.raises(UsageError, match=words) as raised:
        kvexport.load(adapted_artifact, threads=1, adapters={"bad": folder})
    assert raised.value.fix


def test_more_adapters_and_ranks_than_the_recipe_allows_are_refused(
    tmp_path: Path, tiny_checkpoint: Path, tiny_artifact: Path, adapted_artifact: Path, adapters: dict[str, Path]
) -> None:
    large = adapter(tmp_path / "large", tiny_checkpoint, rank=5)
    cases: list[tuple[Path, dict[str, Path], str]] = [
        (tiny_artifact, adapters, "the artifact takes no adapters, and 2 were given"),
        (adapted_artifact, {**adapters, "three": large}, "the artifact takes 2 adapters, and 3 were given"),
        (adapted_artifact, {"large": large}, "has rank 5, and the artifact takes ranks up to 4"),
        (adapted_artifact, {"none": tmp_path}, "is no folder with adapter_config.json"),
    ]
    for path, settings, words in cases:
        with pytest.raises(UsageError, match=words):
            kvexport.load(path, threads=1, adapters=settings)


def test_an_adapter_of_another_base_model_is_named(
    tmp_path: Path, tiny_checkpoint: Path, adapted_artifact: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An adapter whose shapes do not fit is refused; one whose shapes fit is used, with a note."""

    def load(name: str, *, wide: bool = False, **config: Any) -> str:
        folder = adapter(tmp_path / name, tiny_checkpoint, **config)
        if wide:
            tensors = load_file(folder / "adapter_model.safetensors")
            tensors = {key: torch.cat([x, x], 1) if ".lora_A." in key else x for key, x in tensors.items()}
            save_file(tensors, folder / "adapter_model.safetensors")
        kvexport.load(adapted_artifact, threads=1, adapters={name: folder})
        return capfd.readouterr().err

    with pytest.raises(UsageError, match=r"wide, trained on meta/Other-1B, has matrices \[3, 64\]"):
        load("wide", wide=True, base_model_name_or_path="meta/Other-1B")
    assert "trained on meta/Other-1B, is applied to" in load("other", base_model_name_or_path="meta/Other-1B")
    assert load("same", base_model_name_or_path=f"org/{tiny_checkpoint.name}") == load("none") == ""


@pytest.mark.parametrize(("sections", "words"), [
    ({"adapters": {"count": 1, "targets": ["q_proj", "query"]}}, "names 'query'; the projections of this model"),
    ({"backend": {"name": "tensorrt"}}, "but tensorrt runs no adapters"),
    ({"cache": {"periodic": {"slots": 128}}}, "cache.periodic.slots is set, which runs without adapters"),
])  # fmt: skip
def test_a_recipe_that_cannot_take_adapters_is_refused(
    tiny_checkpoint: Path, sections: dict[str, Any], words: str
) -> None:
    recipe = {**RECIPE, "model": {"path": str(tiny_checkpoint)}, "adapters": {"count": 1}, **sections}
    with pytest.raises((KvexportError, ValueError), match=words):
        put_adapters_of(Recipe.model_validate(recipe))


def put_adapters_of(recipe: Recipe) -> None:
    """Read a recipe's model, trace it and add its adapters, without writing an artifact."""
    shape = read_model(recipe)
    decoder = trace_decoder(shape.model, shape.mode, shape.plan, last_logits=True)
    put_adapters(decoder.graph, recipe.adapters.targets)


def test_a_manifest_that_contradicts_its_recipe_is_refused(tiny_artifact: Path) -> None:
    from kvexport.artifact.manifest import parse_manifest
    from kvexport.errors import ArtifactError

    manifest = json.loads((tiny_artifact / "manifest.json").read_text())
    with pytest.raises(ArtifactError, match="adapters has 1 projections, unlike its recipe"):
        parse_manifest(tiny_artifact, {**manifest, "adapters": {"model.layers.0.mlp.up_proj": [32, 64]}})
