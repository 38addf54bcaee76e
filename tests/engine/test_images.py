"""Requests with images: merges, batches, prefixes, forks, snapshots, chat and the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from kvexport.artifact.manifest import parse_manifest
from kvexport.commands.chat import Chat
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.options import EngineOptions
from kvexport.engine.request import Request
from kvexport.errors import ArtifactError, UsageError
from kvexport.export.build import build
from kvexport.export.rebuild import rebuild
from kvexport.images.rows import RowCache
from tests.export.test_vision import logits_with_images
from tests.support import models, vision
from tests.support.answers import answers, stopped
from tests.support.command_line import run
from tests.support.vision import picture, png

SETTINGS: dict[str, Any] = {
    "cache": {"budget": 32, "merge_every": 4},
    "export": {"logits": "all", "prefill_chunk": 16},
    "limits": {"max_length": 600, "max_batch": 4},
}
ONE, TWO = picture(50, 40, 1), picture(50, 40, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.save_checkpoint("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(build(models.make_recipe(checkpoint, **SETTINGS), tmp_path_factory.mktemp("artifact") / "artifact"))


def test_images_merge_as_the_same_rows_in_an_embedding_do(checkpoint: Path, engine: Engine, tmp_path: Path) -> None:
    """A decoder whose vocabulary has the images' rows as further tokens reads the same prompt past its budget."""
    ids, images = engine.encode_with_images("a<image>bcd<image> efghijklmnopqrstuvwxyz<image>", [ONE, TWO, ONE])
    model = hf.LlavaForConditionalGeneration.from_pretrained(checkpoint)
    size, rows = vision.TEXT["vocab_size"], torch.from_numpy(images.rows)
    twin = hf.LlamaForCausalLM(hf.LlamaConfig(**{**vision.TEXT, "vocab_size": size + len(rows)}))
    state = {f"model.{name}": x for name, x in model.model.language_model.state_dict().items()}
    state["model.embed_tokens.weight"] = torch.cat([state["model.embed_tokens.weight"], rows])
    state["lm_head.weight"] = torch.cat([model.lm_head.weight, torch.zeros_like(rows)])
    twin.load_state_dict(state)
    twin.save_pretrained(tmp_path / "twin")
    texts = load(build(models.make_recipe(tmp_path / "twin", **SETTINGS), tmp_path / "artifact"))
    as_tokens = ids.copy()
    as_tokens[ids == 256] = size + np.arange(len(rows))
    short, short_images = engine.encode_with_images("xyz<image>", [TWO])
    (logits, _) = logits_with_images(engine, [(ids, images), (short, short_images)])
    (expected,) = logits_with_images(texts, [(as_tokens, None)])
    assert len(ids) > 70 > SETTINGS["cache"]["budget"]
    assert np.abs(logits - expected[:, :size]).max() <= 1e-5 * np.abs(expected).max()


def test_answers_do_not_depend_on_the_batch(engine: Engine) -> None:
    prompts, images = ["a<image>b", "<image><image>c", "d", "no place"], [[ONE], [TWO, ONE], [], [TWO]]
    together = engine.generate(prompts, images=images, max_new_tokens=6)
    alone = [engine.generate(p, images=i, max_new_tokens=6)[0] for p, i in zip(prompts, images, strict=True)]
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]
    assert alone[3].token_ids == engine.generate("<image>no place", images=[TWO], max_new_tokens=6)[0].token_ids
    assert alone[0].prompt_tokens == 2 + 16


def test_prefixes_are_those_of_equal_images(engine: Engine) -> None:
    """Two images of one size have the same tokens in a prompt."""
    kept = engine.with_options(EngineOptions(prefix_memory=1 << 24))
    for image, hits in ((ONE, 0), (TWO, 0), (ONE, 32)):
        before = kept.prefixes.hits  # type: ignore[union-attr]
        answer = kept.generate("<image>" + 30 * "a", images=[image], max_new_tokens=4)
        assert kept.prefixes.hits - before == hits  # type: ignore[union-attr]
        assert answer == engine.generate("<image>" + 30 * "a", images=[image], max_new_tokens=4)


def test_forks_and_snapshots_of_prompts_with_images(engine: Engine) -> None:
    ids, images = engine.encode_with_images("a<image>b", [ONE])
    settings = engine.settings(max_new_tokens=6)
    right = engine.generate("a<image>b", images=[ONE], max_new_tokens=6)[0].token_ids
    request = Request(ids, settings, images=images, keep=True)
    fork = request.fork()
    for one in (request, fork):
        engine.add(one)
    while len(request.tokens) < 3:
        engine.step()
    snapshot = stopped(engine, request)
    resumed = Request((), start=snapshot)
    answers(engine, resumed)
    assert [token.id for token in (*request.tokens, *resumed.tokens)] == right
    assert [token.id for token in fork.tokens] == right
    engine.add(unread := Request(ids, settings, images=images, keep=True))
    engine.cancel(unread.id)
    assert unread.snapshot is None


@pytest.mark.parametrize(
    ("prompt", "images", "problem"),
    [
        ("<image><image>", [ONE], r"2 places for images .* 1 images"),
        ([1, 256, 2], [ONE], r"1 tokens for images, whose images have 16 rows"),
        (["a", "b"], [ONE], "images are not given for each of 2 prompts"),
        (["a", "b"], [[ONE]], "images are not given for each of 2 prompts"),
        ("a", ["missing.png"], "cannot be read"),
        ("a", [b"GIF89a"], "cannot be decoded|no image"),
    ],
)
def test_images_that_do_not_fit_a_prompt_are_refused(prompt: Any, images: Any, problem: str, engine: Engine) -> None:
    with pytest.raises(UsageError, match=problem):
        engine.generate(prompt, images=images, max_new_tokens=1)
    assert not engine.pending()


def test_a_prompt_may_have_no_image(engine: Engine) -> None:
    ids, images = engine.encode_with_images("abc", [])
    assert images is None and ids.tolist() == engine.encode("abc").tolist()


def test_a_backend_without_image_encoders_takes_no_artifact_that_reads_images(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reads images, and tensorrt runs no image encoder") as refusal:
        rebuild(engine.path, tmp_path / "out", ["backend.name=tensorrt"])
    assert "--set export.images=false" in refusal.value.fix and not (tmp_path / "out").exists()


def test_chat_and_command_line(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(png(ONE))
    parts = [{"type": "image", "image": str(file)}, {"type": "text", "text": "what?"}]
    answer = engine.chat([{"role": "user", "content": parts}], max_new_tokens=5)
    assert (
        answer.token_ids == engine.generate("[user]<image>what?[answer]", images=[ONE], max_new_tokens=5)[0].token_ids
    )
    printed = run("generate", str(engine.path), "what?", "--image", str(file), "--max-new-tokens", "5", "--json")
    assert f'"prompt_tokens": {answer.prompt_tokens}' in printed.stdout
    refused = run("generate", str(engine.path), "what?", "--image", str(tmp_path / "none.png"))
    assert refused.exit_code and "cannot be read" in refused.stderr and "Traceback" not in refused.stderr


def test_a_conversation_in_the_terminal_has_images(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = dict.fromkeys(range(64, 90), 50.0)  # an answer of letters is the same tokens in the next turn
    talk = Chat(engine, engine.settings(max_new_tokens=5, logit_bias=letters))
    file, kept = tmp_path / "one.png", tmp_path / "kept"
    file.write_bytes(png(ONE))
    with pytest.raises(UsageError, match="cannot be read"):
        talk.command(f"/image {tmp_path}/none.png")
    assert talk.command(f"/image {file}") and "40 x 50 pixels" in capsys.readouterr().out
    file.unlink()  # the conversation has the image itself
    talk.answer("what?")
    seen = talk.snapshot
    assert seen is not None and len(seen.images) == 1 and talk.command(f"/save {kept}") and talk.command("/reset")
    assert talk.command(f"/load {kept}") and talk.messages[0]["content"][0]["image"] == png(ONE)
    talk.answer("and?")
    assert talk.last is not None and talk.last.cached_tokens == seen.length
    assert talk.command("/reset")
    talk.answer("what?")
    assert isinstance(talk.messages[0]["content"], str)


def test_equal_images_are_encoded_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, runs = RowCache(), []
    monkeypatch.setattr(engine, "image_rows", cache)
    monkeypatch.setattr(engine, "_encode_tile", lambda tile: runs.append(1) or np.zeros((16, 32), np.float32))
    for image, count in ((ONE, 1), (ONE, 1), (TWO, 2), (ONE, 2)):
        engine.encode_with_images("a", [image])
        assert len(runs) == count
    monkeypatch.setattr("kvexport.images.rows.KEPT_ROWS", 16 * 32 * 4)
    engine.encode_with_images("a", [picture(50, 40, 3)])
    engine.encode_with_images("a", [ONE])
    assert len(runs) == 4 and len(cache._rows) == 1


@pytest.mark.parametrize(("changes", "problem"), [
    ({"images": None}, "images"), ({"cut": "anyres"}, "canvases"), ({"height": 0}, "height"),
    ({"token_text": 3}, "token_text"), ({"cut": "x"}, "cut"),
])  # fmt: skip
def test_a_manifest_with_other_images_is_refused(changes: Any, problem: str, engine: Engine) -> None:
    raw = json.loads((engine.path / "manifest.json").read_text())
    images = None if "images" in changes else {**raw["images"], **changes}
    with pytest.raises(ArtifactError, match=problem):
        parse_manifest(engine.path, {**raw, "images": images})
