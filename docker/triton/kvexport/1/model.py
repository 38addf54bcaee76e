"""The model of Triton's python backend: an engine that sends one response for each token (decoupled mode).

A request has `text_input` or `input_ids`, and `settings`, a JSON object with fields of GenerationSettings. New requests
join the running ones, up to the artifact's number of lanes. If a client cancels a request, its lane is free at the next
step.
"""

from __future__ import annotations

import importlib
import json
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import FINISHED, Request
from kvexport.errors import KvexportError, UsageError
from kvexport.language.token import Token


class TritonPythonModel:
    """The class that Triton's python backend looks up and calls: it runs an engine."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the artifact next to model.py into an engine, and start the only thread that calls the engine."""
        self._backend: Any = importlib.import_module("triton_python_backend_utils")  # there is one in Triton alone
        self._engine: Engine = load(Path(args["model_repository"]) / args["model_version"] / "artifact")
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvexport", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Queue requests of Triton for the engine. The engine's thread sends their responses."""
        for request in requests:
            self._arrived.put(request)

    def finalize(self) -> None:
        """Wait for the running requests, then end the engine's thread."""
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        running: list[tuple[Request, Any, int]] = []  # with its sender, and how many tokens went out
        ends = False
        while running or not ends:
            while not ends and not (running and self._arrived.empty()):
                if (triton_request := self._arrived.get()) is None:
                    ends = True
                elif (started := self._begin(triton_request)) is not None:
                    running.append((*started, 0))
            if running:
                self._step(running)

    def _begin(self, triton_request: Any) -> tuple[Request, Any] | None:
        sender = triton_request.get_response_sender()
        try:
            request = Request(*_prompt_and_settings(self._engine, self._inputs(triton_request)))
            self._engine.add(request)
            return request, sender
        except Exception as error:
            self._fail(sender, error)
            return None

    def _inputs(self, triton_request: Any) -> dict[str, Any]:
        tensors = (
            self._backend.get_input_tensor_by_name(triton_request, n) for n in ("text_input", "input_ids", "settings")
        )
        return {tensor.name(): tensor.as_numpy() for tensor in tensors if tensor is not None}

    def _step(self, running: list[tuple[Request, Any, int]]) -> None:
        for request, sender, _ in running:
            if sender.is_cancelled():
                self._engine.cancel(request.id)
        try:
            self._engine.step()
        except Exception as error:
            self._backend.Logger.log_error(f"kvexport: a step failed: {error}")  # its requests have it too
        for i, (request, sender, sent) in enumerate(running):
            for token in request.tokens[sent:]:
                self._send(sender, token)
            running[i] = (request, sender, len(request.tokens))
            if request.error is not None:
                self._fail(sender, request.error)
            elif request.finish_reason == "cancelled":
                sender.send(flags=self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        running[:] = [entry for entry in running if entry[0].state is not FINISHED]

    def _send(self, sender: Any, token: Token) -> None:
        values = {
            "token_id": np.array([token.id], np.int64),
            "text_output": np.array([token.text.encode()], np.object_),
            "finish_reason": np.array([(token.finish_reason or "").encode()], np.object_),
        }
        response = self._backend.InferenceResponse([self._backend.Tensor(n, value) for n, value in values.items()])
        sender.send(response, flags=self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if token.finish_reason else 0)

    def _fail(self, sender: Any, error: Exception) -> None:
        message = str(error) if isinstance(error, KvexportError) else "the server failed"
        if not isinstance(error, KvexportError):
            self._backend.Logger.log_error(f"kvexport: a request failed: {error!r}")
        response = self._backend.InferenceResponse(error=self._backend.TritonError(message))
        sender.send(response, flags=self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _prompt_and_settings(engine: Engine, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the prompt and the generation settings of a Triton request.

    Raises:
        UsageError: A tensor is missing, doubled or invalid.
    """
    if ("text_input" in inputs) == ("input_ids" in inputs):
        raise UsageError("a request has a prompt, as text or as token ids", "text_input or input_ids, one of them")
    try:
        settings = json.loads(inputs["settings"].reshape(-1)[0]) if "settings" in inputs else {}
        prompt = (
            inputs["text_input"].reshape(-1)[0].decode() if "text_input" in inputs else inputs["input_ids"].reshape(-1)
        )
    except (ValueError, IndexError, RecursionError) as error:
        raise UsageError(f"text_input or settings cannot be read: {error}", "UTF-8, and a JSON object") from None
    if not isinstance(settings, dict) or "grammar" in settings:
        raise UsageError("settings is no JSON object, or has a grammar", '{"max_new_tokens": 64}')
    return prompt, engine.settings(**settings)
