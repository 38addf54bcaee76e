"""Other engines as servers with OpenAI's API, so that `benchmarks/speed/serve.py` measures all of them with one client.

    python benchmarks/speed/serve_peers.py NAME MODEL [--lanes 8] [--context 8192] [--threads 2]

NAME is llamacpp (MODEL: a GGUF file; llama.cpp's own server, which the wheel `xllamacpp` carries), genai (a folder of
onnxruntime-genai's builder; its `Engine`) or transformers (a checkpoint; its continuous batching). The script prints
the address when it is ready, and ends with its standard input. The last two have no small HTTP server of their own. The
server of this script only passes on their tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

Deliver = Callable[[int | None], None]  # takes a token, or None after the last one


def llamacpp(model: str, lanes: int, context: int, threads: int) -> str:
    """Start llama.cpp's server and return its address. The cache has 16 bits, llama.cpp's default."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = lanes * context
    parameters.n_parallel = lanes
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.port = 0
    parameters.use_jinja = True
    parameters.warmup = True
    keep.append(xllamacpp.Server(parameters))
    return str(keep[-1].listening_address)


keep: list[Any] = []


class Genai:
    """The engine of onnxruntime-genai, in a thread of its own."""

    def __init__(self, model: str, lanes: int, context: int, threads: int) -> None:
        self.model, self.lanes, self.context = model, lanes, context
        self.new: list[tuple[list[int], int, Deliver]] = []
        self.running: dict[int, tuple[Any, Deliver]] = {}
        self.wake = threading.Condition()
        threading.Thread(target=self.loop, daemon=True).start()

    def add(self, ids: list[int], count: int, deliver: Deliver) -> None:
        """Add a prompt that is to be answered by exactly `count` tokens."""
        with self.wake:
            self.new.append((ids, count, deliver))
            self.wake.notify()

    def loop(self) -> None:
        """Start new requests, run the engine and deliver tokens. The engine belongs to the thread that made it."""
        import numpy as np
        import onnxruntime_genai as og

        engine = og.Engine(og.Model(self.model))
        events = engine.create_event_buffer(4 * self.lanes)
        while True:
            with self.wake:
                while not self.new and not self.running:
                    self.wake.wait()
                new, self.new = self.new, []
            for ids, count, deliver in new:
                options = og.RequestOptions()
                options.set_max_session_tokens(self.context)
                request = engine.create_request(options=options)
                turn = og.TurnOptions(request)
                turn.set_max_generated_tokens(count)
                turn.set_min_generated_tokens(count)
                turn.set_do_sample(False)
                number = request.begin_turn(np.array(ids, np.int32), turn)
                self.running[number if number not in self.running else id(request)] = (request, deliver)
            for event in engine.run(events) or ():
                key = next(k for k, (request, _) in self.running.items() if request is event.request)
                request, deliver = self.running[key]
                flags = int(event.flags.value if hasattr(event.flags, "value") else event.flags)
                if flags & int(og.EngineEventFlags.TOKEN.value):
                    deliver(int(event.token))
                if flags & int(og.EngineEventFlags.TURN_FINISHED.value) or flags & int(
                    og.EngineEventFlags.FAILED.value
                ):
                    deliver(None)
                    del self.running[key]
                    request.close()


class Transformers:
    """The continuous batching of transformers."""

    def __init__(self, model: str, lanes: int, context: int, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(threads)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        config = ContinuousBatchingConfig(max_memory_percent=0.5, num_blocks=lanes * context // 256, block_size=256)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=64)
        self.manager = loaded.eval().init_continuous_batching(generation, continuous_batching_config=config)
        self.manager.start()
        self.sent = 0

    def add(self, ids: list[int], count: int, deliver: Deliver) -> None:
        """Add a prompt, as `Genai.add` does, from within an event loop."""
        self.sent += 1
        seen = 0

        def on_result(result: Any) -> None:
            nonlocal seen
            for token in result.generated_tokens[seen:]:
                deliver(int(token))
            seen = len(result.generated_tokens)
            if result.is_finished():
                deliver(None)

        name = f"r{self.sent}"
        self.manager.register_result_handler(name, on_result)
        self.manager.add_request(ids, request_id=name, max_new_tokens=count, streaming=True)


def serve(peer: Genai | Transformers, tokenizer_folder: Path) -> None:
    """Serve the peer's tokens as chunks of chat completions."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    from kvexport.language.chat import read_chat_template
    from kvexport.language.text_stream import TextStream
    from kvexport.language.tokenizer import Tokenizer

    tokenizer, template = Tokenizer.from_folder(tokenizer_folder), read_chat_template(tokenizer_folder)
    assert template is not None

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "peer"}]})

    async def chat(request: Request) -> StreamingResponse:
        body = await request.json()
        ids = tokenizer.encode(template.render(body["messages"]), add_special_tokens=False)
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        peer.add(ids, body["max_tokens"], lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token))

        async def stream() -> AsyncIterator[str]:
            text, count = TextStream(tokenizer, context_ids=ids), 0
            while (token := await tokens.get()) is not None:
                count += 1
                yield event({"choices": [{"delta": {"content": text.push(token) or "\u200b"}}]})
            usage = {"prompt_tokens": len(ids), "completion_tokens": count}
            yield event({"choices": [], "usage": usage}) + "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=lambda: (sys.stdin.read(), setattr(server, "should_exit", True)), daemon=True).start()
    server.run(sockets=[listener])


def event(data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["llamacpp", "genai", "transformers"])
    parser.add_argument("model")
    parser.add_argument("--tokenizer", type=Path, help="the checkpoint, if MODEL has no chat template")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sizes = options.lanes, options.context, options.threads
    if options.name == "llamacpp":
        print(llamacpp(options.model, *sizes), flush=True)
        sys.stdin.read()
        return
    peer = Genai(options.model, *sizes) if options.name == "genai" else Transformers(options.model, *sizes)
    serve(peer, options.tokenizer or Path(options.model))


if __name__ == "__main__":
    main()
