"""Tests of docker/triton, the model for Triton's python backend, on a replacement of the backend's own module."""

from __future__ import annotations

import json
import queue
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvexport
from tests.support.paths import ROOT
from tests.support.triton import parsed

FINAL = 1


@dataclass
class Tensor:
    title: str
    value: Any

    def name(self) -> str:
        return self.title

    def as_numpy(self) -> Any:
        return self.value


@dataclass
class Asked:
    """A request that also records its responses, each with its flags."""

    tensors: list[Tensor]
    cancelled: bool = False
    sent: queue.Queue[tuple[Any, int]] = field(default_factory=queue.Queue)

    def get_response_sender(self) -> Asked:
        return self

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.put((response, flags))

    def answer(self) -> list[Any]:
        responses = []
        while True:
            response, flags = self.sent.get(timeout=60)
            responses += [] if response is None else [response]
            if flags == FINAL:
                assert self.sent.empty()
                return responses


BACKEND = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    Tensor=Tensor,
    TritonError=str,
    InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(
        values={tensor.title: tensor.value[0] for tensor in tensors}, error=error
    ),
    Logger=SimpleNamespace(log_error=lambda text: None),
    get_input_tensor_by_name=lambda asked, name: next((t for t in asked.tensors if t.title == name), None),
)


def ids(prompt: list[int], **settings: Any) -> Asked:
    text = Tensor("settings", np.array([json.dumps(settings).encode()], np.object_))
    return Asked([Tensor("input_ids", np.array(prompt, np.int64)), text])


@pytest.fixture(scope="module")
def repository(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("triton") / "models"
    shutil.copytree(ROOT / "docker" / "triton", out)
    shutil.copytree(tiny_artifact, out / "kvexport" / "1" / "artifact")
    return out


@pytest.fixture
def model(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", BACKEND)
    space: dict[str, Any] = {}
    exec((repository / "kvexport" / "1" / "model.py").read_text(), space)
    backend_model = space["TritonPythonModel"]()
    backend_model.initialize({"model_repository": str(repository / "kvexport"), "model_version": "1"})
    yield backend_model
    backend_model.finalize()


def test_the_configuration_names_the_tensors_that_the_model_reads_and_sends() -> None:
    folder = ROOT / "docker" / "triton" / "kvexport"
    config, code = parsed((folder / "config.pbtxt").read_text()), (folder / "1" / "model.py").read_text()
    assert config["model_transaction_policy"] == [{"decoupled": [True]}] and config["backend"] == ["python"]
    tensors = {kind: [tensor["name"][0] for tensor in config[kind]] for kind in ("input", "output")}
    assert tensors == {
        "input": ["text_input", "input_ids", "settings"],
        "output": ["token_id", "text_output", "finish_reason"],
    }
    assert all(tensor["optional"] == [True] for tensor in config["input"])
    assert all(f'"{name}"' in code for names in tensors.values() for name in names)


def test_requests_that_run_at_once_get_a_response_for_every_token(model: Any, tiny_artifact: Path) -> None:
    engine = kvexport.load(tiny_artifact)
    prompts = [list(range(1, 46)), [3, 4], list(range(5, 12)), [9], [8, 8], [7]]
    requests = [ids(prompt, max_new_tokens=20 + i) for i, prompt in enumerate(prompts)]
    model.execute(requests[:4])
    model.execute(requests[4:])
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        expected = engine.generate([prompt], max_new_tokens=20 + i)[0]
        values = [response.values for response in request.answer()]
        assert [value["token_id"] for value in values] == expected.token_ids
        assert b"".join(value["text_output"] for value in values).decode() == expected.text
        assert [value["finish_reason"] for value in values] == [b""] * (19 + i) + [b"length"]
    text = Asked([Tensor("text_input", np.array([b"hello"], np.object_))])
    model.execute([text])
    assert b"".join(r.values["text_output"] for r in text.answer()).decode() == engine.generate("hello")[0].text


def test_a_request_that_cannot_be_answered_gets_its_own_error(model: Any) -> None:
    bad = [
        (ids([]), "the prompt is empty"),
        (ids([99]), "out of range"),
        (ids([1], temperatur=1), "unknown generation setting"),
        (ids([1], grammar="x"), "grammar"),
        (Asked([]), "text_input or input_ids"),
        (Asked([*ids([1]).tensors, Tensor("text_input", np.array([b"a"], np.object_))]), "one of them"),
        (Asked([Tensor("text_input", np.array([b"\xff"], np.object_))]), "cannot be read"),
        (Asked([ids([1]).tensors[0], Tensor("settings", np.array([b"{"], np.object_))]), "cannot be read"),
        (Asked([ids([1]).tensors[0], Tensor("settings", np.array([b"[1]"], np.object_))]), "no JSON object"),
    ]
    good = ids([1, 2], max_new_tokens=2)
    model.execute([*(request for request, _ in bad), good])
    for request, message in bad:
        (response,) = request.answer()
        assert message in response.error
    assert [r.error for r in good.answer()] == [None, None]


def test_a_cancelled_request_ends_and_an_error_of_a_step_ends_those_that_took_part(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ids([1], max_new_tokens=400)
    model.execute([gone])
    gone.sent.get(timeout=60)
    gone.cancelled = True
    assert len(gone.answer()) < 399
    monkeypatch.setattr(model._engine._calls, "decode", lambda *_, **__: 1 // 0)
    failed = ids([1, 2])
    model.execute([failed])
    assert failed.answer()[-1].error == "the server failed"
    monkeypatch.undo()
    again = ids([1, 2], max_new_tokens=3)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", BACKEND)
    model.execute([again])
    assert len(again.answer()) == 3
