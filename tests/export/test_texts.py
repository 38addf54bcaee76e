"""Tests of a checkpoint's small files: they are read before they are published, and foreign files are refused."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from kvexport.artifact.reading import load_manifest
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.export.model.checkpoint import TOKENIZER_FILES, read_checkpoint
from kvexport.export.texts import check_generation, copy_texts
from kvexport.language import text_trial
from kvexport.language.chat import read_json
from kvexport.language.settings import GenerationSettings
from tests.support.artifacts import beside
from tests.support.models import make_recipe


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in tiny_checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def copied(checkpoint: Path, folder: Path) -> None:
    folder.mkdir()
    copy_texts(read_checkpoint(checkpoint), folder)
    check_generation(read_checkpoint(checkpoint), vocabulary=64)


def generation(**settings: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "generation_config.json").write_text(json.dumps(settings))


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def template(source: str) -> Callable[[Path], object]:
    return text("chat_template.jinja", source)


def many(normalizer: object, count: int) -> Callable[[Path], object]:
    """Return a change to a tokenizer whose normalizers multiply every text."""

    def change(folder: Path) -> None:
        data = json.loads((folder / "tokenizer.json").read_text())
        data["normalizer"] = {"type": "Sequence", "normalizers": [normalizer] * count}
        (folder / "tokenizer.json").write_text(json.dumps(data))

    return change


DOUBLE = "{% set ns.s = ns.s ~ ns.s %}"
TRIED = "cannot be used for short texts"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "template that doubles a text": (
        template(
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}" + DOUBLE + "{% endfor %}{{ ns.s | length }}"
        ),
        TRIED,
    ),
    "template with a wide method": (template("{{ '{:>10000000000}'.format('a') | length }}"), TRIED),
    "tokenizer that multiplies": (
        many({"type": "Replace", "pattern": {"Regex": "[\\s\\S]"}, "content": "aaaaaaaaaa"}, 12),
        TRIED,
    ),
    "link that loops": (lambda c: (c / "tokenizer_config.json").symlink_to("tokenizer_config.json"), "is no file"),
    "link to a device": (lambda c: (c / "special_tokens_map.json").symlink_to("/dev/zero"), "is no file"),
    "template that is a folder": (lambda c: (c / "chat_template.jinja").mkdir(), "chat_template.jinja is no file"),
    "tokenizer that is cut": (text("tokenizer.json", '{"version": "1.0", "model": {'), "tokenizer.json"),
    "tokenizer of another kind": (text("tokenizer.json", "{}"), "tokenizer.json is not a tokenizer"),
    "tokenizer that is no text": (lambda c: (c / "tokenizer.json").write_bytes(b"\xff\x00"), "tokenizer.json"),
    "chat template in no JSON": (text("tokenizer_config.json", "{"), "tokenizer_config.json is not JSON"),
    "chat template that is no text": (
        lambda c: (c / "chat_template.jinja").write_bytes(b"\xff"),
        "chat_template.jinja cannot be read",
    ),
    "eos that is text": (generation(eos_token_id="</s>"), "eos_token_ids"),
    "eos below 0": (generation(eos_token_id=[3, -1]), "eos_token_ids"),
    "eos beyond the vocabulary": (generation(eos_token_id=64), "eos_token_id is 64, and the vocabulary has 64 tokens"),
    "temperature below 0": (generation(do_sample=True, temperature=-1.0), "temperature"),
    "temperature that is text": (generation(do_sample=True, temperature="hot"), "temperature"),
    "top_p beyond 1": (generation(do_sample=True, top_p=1.5), "top_p"),
    "beams": (generation(num_beams=4), "num_beams"),
}


@pytest.mark.parametrize("case", BAD)
def test_texts_that_an_engine_could_not_use_are_refused(checkpoint: Path, tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    change(checkpoint)
    with pytest.raises(UsageError) as caught:
        copied(checkpoint, tmp_path / "stage")
    assert message in caught.value.problem
    assert str(checkpoint) in caught.value.problem and str(checkpoint) in caught.value.fix
    assert "stage" not in str(caught.value)


def test_the_trial_of_a_tokenizer_is_limited_by_processor_time_and_not_by_the_clock(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_trial, "_SECONDS", 3)
    monkeypatch.syspath_prepend(tmp_path)
    start = tmp_path / "sitecustomize.py"  # what the process runs first
    start.write_text("import time\ntime.sleep(10)\n")  # a machine that gives it no processor
    copied(checkpoint, tmp_path / "stage")
    start.write_text("import threading\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()\n")
    with pytest.raises(UsageError, match="longer than 3 seconds of processor time"):
        copied(checkpoint, tmp_path / "another")


def status(process: Path) -> str:
    with suppress(OSError):  # the process has ended
        return (process / "status").read_text()
    return ""


def test_the_trial_of_a_tokenizer_ends_with_the_process_that_started_it(checkpoint: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("not reached: other systems do not end a process with its parent")
    (checkpoint / "tokenizer.json").unlink()
    os.mkfifo(checkpoint / "tokenizer.json")  # the trial waits for a writer
    started = (
        "import pathlib, sys; from kvexport.language.text_trial import try_texts as t; t(pathlib.Path(sys.argv[1]))"
    )
    parent = subprocess.Popen([sys.executable, "-c", started, str(checkpoint)])
    with (checkpoint / "tokenizer.json").open("w"):  # opens when the trial reads
        trial = next(x for x in Path("/proc").glob("[0-9]*") if f"PPid:\t{parent.pid}\n" in status(x))
        parent.kill()
        parent.wait()
        limit = time.monotonic() + 5
        while "State:\t" in (now := status(trial)) and "State:\tZ" not in now:
            assert time.monotonic() < limit
            time.sleep(0.01)


@pytest.mark.parametrize(
    "settings", [{}, {"eos_token_id": [2, 100]}, {"temperature": 0.0}, {"do_sample": True, "temperature": 0.6}]
)
def test_texts_that_an_engine_can_use_are_taken(checkpoint: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    generation(**settings)(checkpoint)
    copied(checkpoint, tmp_path / "stage")
    assert (tmp_path / "stage" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()


def in_config(checkpoint: Path, **settings: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **settings}))


@pytest.mark.parametrize(("config", "generation_config", "ends"), [
    ({"eos_token_id": 7}, None, (7,)), ({"eos_token_id": [63, 7]}, None, (63, 7)),
    ({"eos_token_id": None, "text_config": {"eos_token_id": 7}}, None, (7,)),
    ({"eos_token_id": 7}, {"eos_token_id": 9}, (9,)), ({"eos_token_id": 7}, {"temperature": 1.0}, ()),
])  # fmt: skip
def test_an_answer_ends_where_transformers_ends_it(
    checkpoint: Path,
    tmp_path: Path,
    config: dict[str, object],
    generation_config: dict[str, object] | None,
    ends: tuple[int, ...],
) -> None:
    file = checkpoint / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation_config is not None:
        file.write_text(json.dumps(generation_config))
    in_config(checkpoint, **config)
    copied(checkpoint, tmp_path / "stage")
    try:
        read = GenerationConfig.from_pretrained(checkpoint)
    except OSError:
        read = GenerationConfig.from_pretrained(checkpoint, config_file_name="config.json", _from_model_config=True)
    of_transformers = read.eos_token_id
    assert (tuple(of_transformers) if isinstance(of_transformers, list) else (of_transformers,)) == (ends or (None,))
    settings = GenerationSettings.from_generation_config(read_json(tmp_path / "stage" / "generation_config.json"))
    assert settings.eos_token_ids == ends


def test_generation_settings_of_config_json_are_refused_by_its_name(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    in_config(checkpoint, num_beams=4)
    with pytest.raises(UsageError, match=r"config\.json cannot be used: .*num_beams") as caught:
        copied(checkpoint, tmp_path / "stage")
    assert "remove it" not in caught.value.fix


@pytest.mark.parametrize("name", [*TOKENIZER_FILES, "config.json", "generation_config.json"])
def test_a_link_out_of_the_checkpoint_is_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((checkpoint / "config.json").read_bytes() if name == "config.json" else b"{}")
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to("../secret")
    with pytest.raises(UsageError, match=f"{name} is a link out of the checkpoint, to {secret}") as caught:
        copied(checkpoint, tmp_path / "stage")
    assert caught.value.fix.endswith(f"{secret} {checkpoint / name}")
    assert not (tmp_path / "stage" / name).exists()


@pytest.mark.parametrize("folder", ["models--org--name/snapshots/0123abcd", "checkpoint/inside"])
def test_links_of_the_hub_and_within_the_checkpoint_are_followed(checkpoint: Path, tmp_path: Path, folder: str) -> None:
    snapshot = tmp_path / folder
    blobs = tmp_path / "models--org--name" / "blobs" if "snapshots" in folder else snapshot / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(checkpoint.glob("*.*"))):
        (blobs / str(i)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"{'../../' if 'snapshots' in folder else ''}blobs/{i}")
    copied(snapshot, tmp_path / "stage")
    assert (tmp_path / "stage" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()


def test_a_checkpoint_that_cannot_be_used_leaves_the_artifact_that_works(checkpoint: Path, tmp_path: Path) -> None:
    def nan(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        save_file({name: tensor * float("nan") for name, tensor in weights.items()}, folder / "model.safetensors")

    target = tmp_path / "out" / "artifact"
    target.parent.mkdir()
    recipe = make_recipe(checkpoint, cache={"method": "full"}, limits={"max_length": 512})
    build(recipe, target)
    before = load_manifest(target)
    for change, message in ((text("tokenizer.json", "{"), "tokenizer.json"), (nan, "infinite or NaN")):
        change(checkpoint)
        with pytest.raises(UsageError, match=message):
            build(recipe, target)
        (checkpoint / "tokenizer.json").unlink(missing_ok=True)
        assert load_manifest(target) == before
        assert beside(target) == ["artifact"]
