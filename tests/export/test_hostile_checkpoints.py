"""Hostile checkpoints: links that loop or lead out of the folder, and generation settings of any form."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import UsageError
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.texts import check_generation, copy_texts
from tests.export.test_checkpoint import COMMIT, edit_index, make_sharded, make_single, refusal

SHARD, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"


# Links.


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", ["config.json", GENERATION, "model.safetensors", INDEX, SHARD])
def test_links_in_a_circle_are_refused(tmp_path: Path, name: str, length: int) -> None:
    folder = make_sharded(tmp_path) if name in (INDEX, SHARD) else make_single(tmp_path)
    (folder / name).unlink(missing_ok=True)
    names = [name, *(f"link{i}" for i in range(1, length))]
    for one, following in zip(names, [*names[1:], name], strict=True):
        (folder / one).symlink_to(following)
    assert f"{folder / name} is a link that leads back to itself" in refusal(folder)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, SHARD])
@pytest.mark.parametrize("steps", [1, 2])
def test_weights_behind_a_link_out_of_the_checkpoint_are_refused(tmp_path: Path, name: str, steps: int) -> None:
    """Weights behind a link could be another model's, and would become part of the artifact."""
    folder = (
        make_single(tmp_path / "checkpoint") if name == "model.safetensors" else make_sharded(tmp_path / "checkpoint")
    )
    private = tmp_path / "private" / name
    private.parent.mkdir()
    (folder / name).rename(private)
    if steps == 2:
        (folder / "inside").symlink_to("../private")
    (folder / name).symlink_to(f"inside/{name}" if steps == 2 else f"../private/{name}")
    assert f"{folder / name} is a link out of the checkpoint, to {private}" in refusal(folder)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null", "/proc/self/mem"])
def test_weights_that_are_a_device_are_refused(tmp_path: Path, target: str) -> None:
    folder = make_single(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target)
    assert "is a link out of the checkpoint" in refusal(folder)


def test_a_folder_that_looks_like_the_hubs_links_to_its_own_blobs_alone(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    make_single(snapshot)
    for other in ("models--a--b/elsewhere", "models--other/blobs"):
        (tmp_path / other).mkdir(parents=True)
        (tmp_path / other / "0123").write_bytes((snapshot / "model.safetensors").read_bytes())
        (snapshot / "model.safetensors").unlink()
        (snapshot / "model.safetensors").symlink_to(tmp_path / other / "0123")
        assert "is a link out of the checkpoint" in refusal(snapshot)


def test_the_checkpoint_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(make_sharded(tmp_path / "checkpoint"))
    assert set(read_checkpoint(tmp_path / "link").tensors) == {"embed", "norm", "head", "ids"}


@pytest.mark.parametrize("shard", ["../checkpoint/" + SHARD, "./" + SHARD, "/proc/self/fd/3.safetensors"])
def test_an_index_names_files_beside_it_alone(tmp_path: Path, shard: str) -> None:
    folder = make_sharded(tmp_path / "checkpoint")
    edit_index(folder, lambda index: index["weight_map"].update(embed=shard))
    assert "expected the name of a .safetensors file beside it" in refusal(folder)


# Generation settings.

HUGE = 10**400
REFUSED: dict[str, tuple[str, str]] = {
    "a list": ("[]", "holds a JSON list, expected an object"),
    "no value": ("null", "holds a JSON NoneType"),
    "a number": ("NaN", "holds a JSON float"),
    "deep": ('{"x":' + "[" * 50_000 + "]" * 50_000 + "}", "is not valid JSON"),
    "an endless number": ('{"top_k":' + "9" * 5000 + "}", "is not valid JSON"),
    "a huge temperature": (json.dumps({"do_sample": True, "temperature": HUGE}), "temperature is 1000"),
    "an infinite temperature": ('{"do_sample": true, "temperature": 1e999}', "temperature is inf"),
    "a temperature of NaN": ('{"do_sample": true, "temperature": NaN}', "temperature is nan"),
    "a huge penalty": (json.dumps({"repetition_penalty": HUGE}), "repetition_penalty is 1000"),
    "a huge eos": (json.dumps({"eos_token_id": HUGE}), "eos_token_id is 1000"),
    "an eos that is an object": ('{"eos_token_id": {"a": 1}}', "eos_token_ids is {'a': 1}"),
    "a nested eos": ('{"eos_token_id": [[2]]}', "eos_token_ids is ([2],)"),
    "an eos that is a fraction": ('{"eos_token_id": 2.0}', "eos_token_ids is 2.0"),
    "an eos that is true": ('{"eos_token_id": true}', "eos_token_ids is (True,)"),
    "do_sample that is text": ('{"do_sample": "yes"}', "do_sample is 'yes'"),
    "more tokens at least than at most": (json.dumps({"min_new_tokens": HUGE}), "min_new_tokens is 1000"),
    "nested stop strings": ('{"stop_strings": ["a", ["b"]]}', "stop_strings is ('a', ['b'])"),
    "stop strings that are an object": ('{"stop_strings": {"a": 1}}', "stop_strings is {'a': 1}"),
    "200,000 stop strings": (json.dumps({"stop_strings": ["a"] * 200_000}), "has 200000 stop_strings, at most 64"),
    "a long text": (json.dumps({"temperature": "9" * 1_000_000, "do_sample": True}), "temperature is '9999"),
    "beams that are an object": ('{"num_beams": {"a": []}}', "num_beams = {'a': []}"),
    "nested bans": ('{"bad_words_ids": [[[]]]}', "bad_words_ids = [[[]]]"),
    "a length that is text": ('{"min_length": "x"}', "min_length = 'x'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_generation_settings_without_a_meaning_are_refused(tmp_path: Path, case: str) -> None:
    text, words = REFUSED[case]
    folder = make_single(tmp_path / "checkpoint")
    (folder / GENERATION).write_text(text)
    (tmp_path / "stage").mkdir()
    with pytest.raises(UsageError) as caught:
        check_generation(read_checkpoint(folder), vocabulary=64)
    assert words in caught.value.problem and str(folder / GENERATION) in caught.value.problem
    assert len(caught.value.problem) < 1000 and "\n" not in caught.value.problem


TAKEN: dict[str, dict[str, Any]] = {
    "a huge top_k": {"do_sample": True, "top_k": HUGE},
    "a huge max_new_tokens": {"max_new_tokens": HUGE},
    "huge bounds": {"max_new_tokens": 1 << 63, "min_new_tokens": 1 << 62},
    "a huge second eos": {"eos_token_id": [2, HUGE]},
    "a million eos": {"eos_token_id": list(range(40, 64)) * 50_000},
    "a tiny temperature": {"do_sample": True, "temperature": 1e-320},
    "a large temperature": {"do_sample": True, "temperature": 1e308},
    "a tiny top_p": {"do_sample": True, "top_p": 1e-320},
    "a large penalty": {"repetition_penalty": 1e308},
    "a tiny penalty": {"repetition_penalty": 1e-320},
    "half a character as a stop string": {"stop_strings": ["\ud800"]},
    "a stop string of a megabyte": {"stop_strings": ["a" * 1_000_000]},
    "nested unknown keys": {"unknown": [[[{}]]], "temperature": None},
}


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact, threads=1)


@pytest.mark.parametrize("case", TAKEN)
@pytest.mark.filterwarnings("ignore:(divide by zero|overflow):RuntimeWarning")
def test_a_request_with_extreme_settings_of_the_checkpoint_ends(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The request ends with tokens or with an error of its own; the next request is answered as before."""
    folder = make_single(tmp_path / "checkpoint")
    (folder / GENERATION).write_text(json.dumps(TAKEN[case]))
    (tmp_path / "stage").mkdir()
    copy_texts(read_checkpoint(folder), tmp_path / "stage")
    check_generation(read_checkpoint(folder), vocabulary=64)
    copied = json.loads((tmp_path / "stage" / GENERATION).read_text())
    before = engine.generate("abc", max_new_tokens=5)[0].token_ids
    monkeypatch.setattr(engine, "generation_config", copied)
    request = Request([1, 2, 3], engine.settings(seed=1))
    engine.add(request)
    for _ in range(engine.max_length + 10):
        if not engine.busy:
            break
        engine.step()
    assert not engine.busy
    assert request.tokens or request.error is not None
    assert all(math.isfinite(token.id) and 0 <= token.id < 64 for token in request.tokens)
    monkeypatch.undo()
    assert engine.generate("abc", max_new_tokens=5)[0].token_ids == before
