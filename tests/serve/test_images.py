"""Images in requests: the three APIs, their bounds, files below a folder, sessions and prefixes."""

from __future__ import annotations

import base64
import json
import os
import struct
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.export.build import build
from kvexport.state.snapshot import Snapshot
from tests.support import models, vision
from tests.support.command_line import run
from tests.support.http_server import Running, running
from tests.support.vision import picture, png

SETTINGS: dict[str, Any] = {
    "cache": {"budget": 32, "merge_every": 4},
    "export": {"prefill_chunk": 8},  # an image is longer than a chunk
    "limits": {"max_length": 600, "max_batch": 4},
}
ONE, TWO = png(picture(50, 40, 1)), png(picture(50, 40, 2))
GREEDY = {"max_tokens": 5, "temperature": 0}
LETTERS = dict.fromkeys(range(64, 90), 50.0)  # answers of letters, which are the same tokens when they are sent


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("llava")
    recipe = models.make_recipe(vision.save_checkpoint("llava", folder / "checkpoint"), **SETTINGS)
    return load(build(recipe, folder / "artifact"), threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    beside = tmp_path_factory.mktemp("images")
    folder = beside / "allowed"
    (folder / "inner").mkdir(parents=True)
    for file in (folder / "one.png", folder / "inner" / "two 2.png", beside / "secret.png"):
        file.write_bytes(TWO if "two" in file.name else ONE)
    (folder / "link.png").symlink_to(beside / "secret.png")
    (folder / "links").symlink_to(beside)
    (folder / "text.png").write_text("no image")
    os.mkfifo(folder / "pipe.png")
    return folder


@pytest.fixture(scope="module")
def server(engine: Engine, folder: Path) -> Iterator[Running]:
    with running(engine, image_folder=str(folder)) as server:
        yield server


def data(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def parts(*content: str | bytes, api: str = "chat") -> list[dict[str, Any]]:
    return [_part(x, api) for x in content]


def _part(content: str | bytes, api: str) -> dict[str, Any]:
    if isinstance(content, str) and not content.startswith("<"):
        return {"type": "input_text" if api == "responses" else "text", "text": content}
    url = data(content) if isinstance(content, bytes) else content[1:-1]
    if api == "responses":
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    if api == "chat":
        return {"type": "image_url", "image_url": {"url": url}}
    head, comma, text = url.partition(";base64,")
    if comma:
        return {"type": "image", "source": {"type": "base64", "media_type": head.removeprefix("data:"), "data": text}}
    return {"type": "image", "source": {"type": "url", "url": url}}


def body_of(messages: list[dict[str, Any]], api: str, **more: Any) -> tuple[str, dict[str, Any]]:
    if api == "responses":
        return "/v1/responses", {"input": messages, "max_output_tokens": 5, "temperature": 0, **more}
    return ("/v1/messages" if api == "messages" else "/v1/chat/completions"), {"messages": messages, **GREEDY, **more}


def answer_of(body: dict[str, Any], api: str) -> tuple[str, int]:
    """Return an answer's text and the number of its prompt's tokens."""
    usage = body["usage"]
    if api == "chat":
        return body["choices"][0]["message"]["content"], usage["prompt_tokens"]
    if api == "messages":
        return body["content"][0]["text"], usage["input_tokens"] + usage["cache_read_input_tokens"]
    return body["output"][0]["content"][0]["text"], usage["input_tokens"]


def error_of(body: dict[str, Any], api: str) -> str:
    assert body["error"]["type"] == "invalid_request_error"
    if api == "messages":
        assert body["type"] == "error"
    else:
        assert (body["error"]["param"] or "messages").startswith("messages")
    return str(body["error"]["message"])


def expected(engine: Engine, *messages: Any, **settings: Any) -> tuple[str, int]:
    """Return the engine's own answer to a user's messages and answers in turn, without a server or a prefix."""
    roles = ("user", "assistant")
    content = [[{"type": "text", "text": x} if isinstance(x, str) else {"type": "image", "image": x} for x in message]
               for message in messages]  # fmt: skip
    talk = [{"role": roles[i % 2], "content": one} for i, one in enumerate(content)]
    answer = engine.chat(talk, max_new_tokens=5, do_sample=False, **settings)
    return answer.text, answer.prompt_tokens


APIS = ("chat", "messages", "responses")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("content", [(ONE, "what?"), ("a", ONE, "b", TWO, "c"), (TWO,)])
def test_answers_to_images_are_the_engines(api: str, content: Any, server: Running, engine: Engine) -> None:
    message = {"role": "user", "content": parts(*content, api=api)}
    status, _, body = server.ask(*body_of([message], api))
    assert status == 200 and answer_of(body, api) == expected(engine, content)


@pytest.mark.parametrize("api", APIS)
def test_answers_to_images_are_streamed(api: str, server: Running, engine: Engine) -> None:
    message = {"role": "user", "content": parts(ONE, "what?", api=api)}
    _, _, text = server.ask(*body_of([message], api, stream=True))
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    pieces = {
        "chat": lambda e: e["choices"][0]["delta"].get("content") or "",
        "messages": lambda e: e.get("delta", {}).get("text", ""),
        "responses": lambda e: e["delta"] if e["type"] == "response.output_text.delta" else "",
    }
    assert "".join(map(pieces[api], events)) == expected(engine, (ONE, "what?"))[0]


def test_images_among_tool_results_and_their_count_of_tokens(server: Running, engine: Engine) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": parts(ONE, "seen", api="messages")}
    path, body = body_of([{"role": "user", "content": [result]}], "messages")
    status, _, answer = server.ask(path, body)
    ids, _ = engine.encode_chat_with_images(
        [{"role": "tool", "content": [{"type": "image", "image": ONE}, {"type": "text", "text": "seen"}]}]
    )
    assert status == 200 and answer_of(answer, "messages")[1] == len(ids)
    assert server.ask(f"{path}/count_tokens", body)[2] == {"input_tokens": len(ids)}
    message = {"role": "user", "content": parts(ONE, "seen")}
    assert server.ask("/tokenize", {"messages": [message]})[2]["count"] == len(ids)


def test_the_official_client_sends_images(server: Running, engine: Engine) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        message: Any = {"role": "user", "content": parts(ONE, "what?")}
        answer = client.chat.completions.create(model="tiny", messages=[message], max_tokens=5, temperature=0)
    assert answer.choices[0].message.content == expected(engine, (ONE, "what?"))[0]


def _animation(kind: str) -> bytes:
    frames = [picture(8, 9, seed) for seed in range(3)]
    return png(frames[0], format=kind, save_all=True, append_images=frames[1:])


def _claims(side: int) -> bytes:
    """Return a PNG of one pixel whose header claims that it is larger."""
    data = bytearray(png(Image.new("1", (1, 1))))
    data[16:24] = struct.pack(">II", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def _run_lengths(side: int) -> bytes:
    """Return a BMP of 8 bits with run lengths, whose only row ends at once."""
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 2, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 1080, 0, 0, 1078) + head + bytes(1024) + b"\0\1"


BAD: dict[str, tuple[str, str]] = {
    "http": ("https://example.com/a.png", "not fetched from addresses"),
    "localhost": ("http://127.0.0.1:1/a.png", "not fetched from addresses"),
    "ftp": ("ftp://example.com/a.png", "not fetched from addresses"),
    "path": ("/etc/passwd", "not fetched from addresses"),
    "empty": ("", "not fetched from addresses"),
    "no base64": ("data:image/png,abc", "no image in base64"),
    "no image": ("data:text/plain;base64,YWJj", "no image in base64"),
    "type": ("data:image/tiff;base64,YWJj", "type TIFF"),
    "vector": ("data:image/svg+xml;base64,YWJj", "no image in base64"),
    "characters": ("data:image/png;base64,YW*j", "no base64"),
    "padding": ("data:image/png;base64,YWJ", "no base64"),
    "nothing": ("data:image/png;base64,", "no image in one of the formats"),
    "disguised": (data(png(picture(9, 9), format="JPEG")), "no image in one of the formats PNG"),
    "disguised again": (data(ONE, "webp"), "no image in one of the formats WEBP"),
    "text": (data(b"GIF89a but text", "gif"), "cannot be decoded|no image"),
    "truncated": (data(png(picture(64, 64))[:3000]), "cannot be decoded"),
    "truncated jpeg": (data(png(picture(64, 64), format="JPEG")[:900], "jpeg"), "cannot be decoded"),
    "bomb": (data(_claims(9000)), "9000 x 9000 pixels"),
    "larger bomb": (data(_claims(20_000)), "pixels"),
    "animated gif": (data(_animation("GIF"), "gif"), "animated"),
    "animated png": (data(_animation("PNG")), "animated"),
    "animated webp": (data(_animation("WEBP"), "webp"), "animated"),
    "large webp": (data(png(Image.new("L", (4096, 2049)), format="WEBP", method=0), "webp"), "pixels"),
    "run lengths": (data(_run_lengths(8192), "bmp"), "run lengths"),
    "many scans": (data(png(picture(9, 9), format="JPEG") + 65 * b"\xff\xda", "jpeg"), "scans"),
    "scaled": (data(png(picture(1, 100_000))), "would be scaled"),
    "no file": ("file:none.png", "no file 'none.png'"),
    "link": ("file:link.png", "no file"),
    "linked folder": ("file:links/secret.png", "no file"),
    "parent": ("file:../secret.png", "no file"),
    "inner parent": ("file:inner/../../secret.png", "no file"),
    "escaped parent": ("file:%2e%2e/secret.png", "no file"),
    "absolute": ("file:///etc/passwd", "no file"),
    "root": ("file:/", "no file"),
    "folder": ("file:inner", "no file"),
    "the folder": ("file:", "no file"),
    "pipe": ("file:pipe.png", "no file"),
    "zero": ("file:one.png%00", "no file"),
    "no image file": ("file:text.png", "no image in one of the formats"),
    "host": ("file://host/one.png", "no file"),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", BAD)
def test_images_that_cannot_be_used_are_refused(name: str, api: str, server: Running, folder: Path) -> None:
    url, problem = BAD[name]
    message = {"role": "user", "content": parts("a", f"<{url}>", api=api)}
    status, _, body = server.ask(*body_of([message], api))
    found = error_of(body, api)
    assert status == 400 and any(text in found for text in problem.split("|")), found
    assert str(folder) not in found


def test_refused_files_stay_open_nowhere(server: Running) -> None:
    def ask() -> None:
        for url in ("file:inner", "file:pipe.png", "file:link.png", "file:links/secret.png", "file:text.png"):
            assert server.ask(*body_of([{"role": "user", "content": parts(f"<{url}>")}], "chat"))[0] == 400

    ask()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(8):
        ask()
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 8


@pytest.mark.parametrize("api", APIS)
def test_too_many_images_too_many_bytes_and_too_many_tokens(
    api: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*content: str | bytes) -> str:
        status, _, body = server.ask(*body_of([{"role": "user", "content": parts(*content, api=api)}], api))
        assert status == 400
        return error_of(body, api)

    assert "more than 64 images" in ask(*[ONE] * 65)
    assert "context_length_exceeded" in ask(*[ONE] * 40)
    with monkeypatch.context() as fewer:
        fewer.setattr("kvexport.serve.pictures.MOST_PIXELS", 3000)
        assert "more than 3000 pixels in all" in ask(ONE, TWO)
    monkeypatch.setattr("kvexport.serve.pictures.MOST_BYTES", 1 << 20)
    assert "more than 1 MiB" in ask(bytes(1 << 21))
    assert server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **GREEDY})[0] == 200


@pytest.mark.parametrize("part", [{}, {"image_url": None}, {"image_url": {"url": 5}}, {"source": {"type": "file"}}])
@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
def test_parts_without_an_image_are_refused(kind: str, part: dict[str, Any], server: Running) -> None:
    status, _, body = server.ask(*body_of([{"role": "user", "content": [{"type": kind, **part}]}], "chat"))
    assert status == 400 and "messages.0.content.0: an image has" in error_of(body, "chat")


def test_text_that_holds_the_marker_itself_is_refused_beside_images(server: Running) -> None:
    content = [*parts(ONE), {"type": "text", "text": "what is <image>?"}]
    status, _, body = server.ask(*body_of([{"role": "user", "content": content}], "chat"))
    assert status == 400 and "2 places for images" in error_of(body, "chat")


def test_files_below_the_folder(server: Running, engine: Engine, folder: Path) -> None:
    right = expected(engine, (ONE, TWO))
    for two in ("file:inner/two%202.png", f"file://{folder}/inner/two 2.png"):
        message = {"role": "user", "content": parts("<file:one.png>", f"<{two}>")}
        status, _, body = server.ask(*body_of([message], "chat"))
        assert status == 200 and answer_of(body, "chat") == right


def test_without_a_folder_no_file_is_read(engine: Engine) -> None:
    with running(engine) as server:
        status, _, body = server.ask(*body_of([{"role": "user", "content": parts("<file:one.png>")}], "chat"))
    assert status == 400 and "--image-folder" in error_of(body, "chat")


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_folder_of_images_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = run("serve", str(tmp_path), "--image-folder", str(tmp_path / name))
    assert refused.exit_code == 2 and "--image-folder" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("api", APIS)
def test_a_model_that_reads_only_text_says_so(api: str, tiny_artifact: Path) -> None:
    from tests.support.http_server import engine_of

    with running(engine_of(tiny_artifact)) as server:
        status, _, body = server.ask(*body_of([{"role": "user", "content": parts("a", ONE, api=api)}], api))
    assert status == 400 and "this model reads only text" in error_of(body, api)


def test_prefixes_are_those_of_equal_images(server: Running, engine: Engine) -> None:
    """Two images of one size have the same tokens, and the second one must not get the answer to the first."""
    text = "tell me what is in it"
    for image, hit in ((ONE, False), (TWO, False), (ONE, True), (TWO, True)):
        body = server.ask(*body_of([{"role": "user", "content": parts("long ago", image, text)}], "chat"))[2]
        assert answer_of(body, "chat") == expected(engine, ("long ago", image, text))
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 32 if hit else cached <= 16  # up to the image at most: "[user]long ago"
    assert expected(engine, ("long ago", ONE, text)) != expected(engine, ("long ago", TWO, text))


def _turns(answer: str, first: bytes = ONE) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": parts("see", first, "what is it?")},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": parts("and", TWO, "this?")},
    ]


def test_a_session_goes_on_after_images(engine: Engine, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"prefix_memory": 0, "session_folder": str(tmp_path / "sessions")}
    more: dict[str, Any] = {"session_id": "s", "logit_bias": {str(token): 50 for token in LETTERS}}
    with running(engine, **settings) as server:
        body = server.ask(*body_of(_turns("")[:1], "chat", **more))[2]
        first, seen = answer_of(body, "chat")
        assert first.isalpha()
    with running(engine, **settings) as server:  # another process of the server reads the state from its file
        runs = []
        encode = engine.model.encode_tile  # type: ignore[attr-defined]
        engine.model.encode_tile = lambda pixels: runs.append(pixels) or encode(pixels)  # type: ignore[attr-defined]
        engine.image_rows.__init__()  # type: ignore[misc]
        try:
            _, headers, body = server.ask(*body_of(_turns(first), "chat", **more))
        finally:
            del engine.model.encode_tile  # type: ignore[attr-defined]
        assert len(runs) == 1  # the first image is not encoded again
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= seen and "x-session-restarted" not in headers
        text, tokens = answer_of(body, "chat")
        full = expected(engine, ("see", ONE, "what is it?"), (first,), ("and", TWO, "this?"))
        assert tokens == full[1]
        third = [*_turns(first), {"role": "assistant", "content": text}, {"role": "user", "content": "now?"}]
        body = server.ask(*body_of(third, "chat", **more))[2]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens
        # Another image in the place of the first one begins the conversation again.
        body = server.ask(*body_of(_turns(first, TWO), "chat", **more))[2]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        restarted = expected(engine, ("see", TWO, "what is it?"), (first,), ("and", TWO, "this?"), logit_bias=LETTERS)
        assert answer_of(body, "chat") == restarted
        # So does a conversation that leaves the images out.
        body = server.ask(*body_of([{"role": "user", "content": "see"}], "chat", **more))[2]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def service_snapshot(server: Running, name: str) -> Any:
    with urllib.request.urlopen(f"{server.url}/v1/sessions/{name}", timeout=60) as answer:
        return Snapshot.from_bytes(answer.read(), server.service.engine.manifest)


def test_a_session_of_completions_goes_on_after_an_image(server: Running) -> None:
    server.ask(*body_of(_turns("")[:1], "chat", session_id="c"))
    status, _, body = server.ask("/v1/completions", {"prompt": "more", "session_id": "c", **GREEDY})
    assert status == 200 and body["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    stored = service_snapshot(server, "c")
    assert len(stored.images) == 1


def test_a_response_continues_one_with_an_image(server: Running, engine: Engine) -> None:
    message = {"role": "user", "content": parts(ONE, "what?", api="responses")}
    first = server.ask(*body_of([message], "responses"))[2]
    second = server.ask(*body_of([{"role": "user", "content": "and?"}], "responses", previous_response_id=first["id"]))
    text = answer_of(first, "responses")[0]
    assert answer_of(second[2], "responses") == expected(engine, (ONE, "what?"), (text,), ("and?",))


def test_batches_change_no_answer(server: Running, engine: Engine) -> None:
    """Eight requests with images on four lanes; those that come later begin first."""
    contents = [("a" * i, ONE if i % 2 else TWO, "b" * (3 * i), *([ONE] if i % 3 else [])) for i in range(8)]
    right = [expected(engine, content) for content in contents]
    found: list[Any] = [None] * len(contents)

    def ask(i: int) -> None:
        message = {"role": "user", "content": parts(*contents[i])}
        body = server.ask(*body_of([message], "chat", priority=-i))[2]
        found[i] = answer_of(body, "chat")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(contents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == right


def test_large_images_hold_up_no_other_stream(server: Running) -> None:
    """No two events of a stream are more than 0.25 s apart while an image of 36 million pixels is read.

    On a machine with other work, the process's own time between two events counts.
    """
    large = png(Image.fromarray(np.random.default_rng(0).integers(0, 255, (1500, 2000, 3), dtype=np.uint8)))
    clear = png(Image.new("RGBA", (6000, 6000), (9, 9, 9, 9)))
    done, statuses = threading.Event(), []
    messages = [{"role": "user", "content": parts(image, "what?")} for image in (large, clear)]
    bodies = [json.dumps(body_of([message], "chat")[1]).encode() for message in messages]

    def look() -> None:
        for body in bodies:
            statuses.append(server.ask("/v1/chat/completions", body)[0])
        done.set()

    threading.Thread(target=look).start()
    gaps = []
    while not done.is_set():
        body = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 500,
                           "temperature": 0, "ignore_eos": True}).encode()  # fmt: skip
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            last, used = time.monotonic(), time.process_time()
            for _ in stream:
                now, then = time.monotonic(), time.process_time()
                gaps.append(min(now - last, then - used))
                last, used = now, then
    assert statuses == [200] * 2
    assert max(gaps) < 0.25
