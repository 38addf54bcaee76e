"""Which clients work with `kvexport serve`: each one chats, streams, calls a tool and gets a structured answer.

    python benchmarks/correctness/clients.py --python VENV/bin/python [--python VENV2/bin/python] [--node FOLDER]
    python benchmarks/correctness/clients.py --python VENV/bin/python --client "Open WebUI"
    python benchmarks/correctness/clients.py --python VENV/bin/python --model ARTIFACT

The server runs the tests' tiny random model, so a grammar enforces tool calls and structured answers, and the text of a
chat is any text. With `--model` it serves another model, such as a build of Qwen2.5-Coder-1.5B-Instruct, which chooses
its tool calls itself where a client allows that (`tool_choice: auto`). Every client runs in a process of its own: a
Python client with the first interpreter `--python` in whose environment it is installed, and the AI SDK with node, from
the folder whose node_modules has `ai`, `@ai-sdk/openai-compatible` and `zod`. A client that is not installed is left
out. `--client` tries one client alone, and saves its row in a file of its own.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

MODEL, KEY, QUESTION, TOKENS = "tiny", "none", "how is the weather in paris", 1000
CHOICE: Any = os.environ.get("CLIENTS_TOOL_CHOICE", "required")
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["paris", "rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "forecast", "parameters": CITY}}
AI_SDK = """
import { generateText, streamText, Output, tool } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { z } from 'zod';
const provider = createOpenAICompatible({ name: 'kvexport', baseURL: process.argv[2] + '/v1',
  supportsStructuredOutputs: true });
const model = provider('tiny'), prompt = 'how is the weather', maxOutputTokens = 1000;
const city = z.object({ city: z.enum(['paris', 'rome']) }), result = {};
const checks = {
  chat: async () => (await generateText({ model, prompt, maxOutputTokens: 24 })).text.length > 0,
  stream: async () => {
    let parts = 0;
    for await (const part of streamText({ model, prompt, maxOutputTokens: 24 }).textStream) parts += part.length > 0;
    return parts > 1;
  },
  tool: async () => (await generateText({ model, prompt, maxOutputTokens, toolChoice: 'required',
    tools: { weather: tool({ description: 'forecast', inputSchema: city }) } })).toolCalls[0].input.city.length > 0,
  structured: async () => (await generateText({ model, prompt, maxOutputTokens,
    output: Output.object({ schema: city }) })).output.city.length > 0,
};
for (const [name, check] of Object.entries(checks)) {
  try { result[name] = (await check()) ? 'ok' : 'wrong'; } catch (error) { result[name] = String(error).slice(0, 300); }
}
console.log(JSON.stringify(result));
"""


def openai(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of OpenAI's own client by name, for the server at `url`."""
    from openai import OpenAI
    from pydantic import create_model

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    messages: Any = [{"role": "user", "content": QUESTION}]
    complete = client.chat.completions.create

    def stream() -> bool:
        chunks: Any = complete(model=MODEL, messages=messages, max_tokens=24, stream=True)
        return sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 1

    def tool() -> bool:
        tools: Any = [TOOL]
        answer = complete(model=MODEL, messages=messages, max_tokens=TOKENS, tools=tools, tool_choice=CHOICE)
        call: Any = (answer.choices[0].message.tool_calls or [])[0]
        return json.loads(call.function.arguments)["city"] in ("paris", "rome")

    def structured() -> bool:
        form = create_model("place", days=(bool, ...))
        answer = client.chat.completions.parse(model=MODEL, messages=messages, max_tokens=TOKENS, response_format=form)
        return isinstance(answer.choices[0].message.parsed, form)

    chat = complete(model=MODEL, messages=messages, max_tokens=24).choices[0].message
    return {"chat": lambda: bool(chat.content), "stream": stream, "tool": tool, "structured": structured}


def anthropic(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of Anthropic's own client by name, for the server at `url`."""
    from anthropic import Anthropic

    create: Any = Anthropic(base_url=url, api_key=KEY).messages
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    form = {"type": "json_schema", "schema": CITY}

    def stream() -> bool:
        with create.stream(**asked, max_tokens=24) as events:
            return sum(1 for _ in events.text_stream) > 1

    def tool() -> bool:
        tools = [{"name": "weather", "description": "forecast", "input_schema": CITY}]
        choice = {"type": "auto" if CHOICE == "auto" else "any"}
        answer = create.create(**asked, max_tokens=TOKENS, tools=tools, tool_choice=choice)
        return next(block for block in answer.content if block.type == "tool_use").input["city"] in ("paris", "rome")

    def structured() -> bool:
        answer = create.create(**asked, max_tokens=TOKENS, extra_body={"output_config": {"format": form}})
        return json.loads(answer.content[0].text)["city"] in ("paris", "rome")

    chat = create.create(**asked, max_tokens=24).content[0]
    return {"chat": lambda: bool(chat.text), "stream": stream, "tool": tool, "structured": structured}


def langchain(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of LangChain's class ChatOpenAI by name, for the server at `url`."""
    from langchain_openai import ChatOpenAI
    from pydantic import create_model

    form = create_model("place", days=(bool, ...))
    options: Any = {"base_url": f"{url}/v1", "api_key": KEY, "model": MODEL}
    short, long = ChatOpenAI(**options, max_tokens=24), ChatOpenAI(**options, max_tokens=TOKENS)
    return {
        "chat": lambda: bool(short.invoke(QUESTION).content),
        "stream": lambda: sum(bool(chunk.content) for chunk in short.stream(QUESTION)) > 1,
        "tool": lambda: bool(long.bind_tools([TOOL], tool_choice=CHOICE).invoke(QUESTION).tool_calls[0]["args"]),
        "structured": lambda: isinstance(
            long.with_structured_output(form, method="json_schema").invoke(QUESTION), form
        ),
    }


def llama_index(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of LlamaIndex's class OpenAILike by name, for the server at `url`."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    options: Any = {"api_base": f"{url}/v1", "api_key": KEY, "model": MODEL, "context_window": 8192}
    options |= {"is_chat_model": True, "is_function_calling_model": True}
    short, long = OpenAILike(**options, max_tokens=24), OpenAILike(**options, max_tokens=TOKENS)

    def weather(days: int) -> str:
        """Return the weather of the next days."""
        return str(days)

    def tool() -> bool:
        response = long.chat_with_tools([FunctionTool.from_defaults(weather)], QUESTION, tool_required=CHOICE != "auto")
        return bool(long.get_tool_calls_from_response(response))

    messages = [ChatMessage(role="user", content=QUESTION)]
    return {
        "chat": lambda: bool(short.chat(messages).message.content),
        "stream": lambda: sum(bool(chunk.delta) for chunk in short.stream_chat(messages)) > 1,
        "tool": tool,
    }


def litellm(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of litellm's function `completion` by name, for the server at `url`."""
    import litellm as client
    from pydantic import create_model

    form = create_model("place", days=(bool, ...))
    options: Any = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY}
    options |= {"messages": [{"role": "user", "content": QUESTION}]}
    complete: Any = client.completion

    def tool() -> bool:
        answer = complete(**options, max_tokens=TOKENS, tools=[TOOL], tool_choice=CHOICE)
        return "city" in json.loads(answer.choices[0].message.tool_calls[0].function.arguments)

    def structured() -> bool:
        answer = complete(**options, max_tokens=TOKENS, response_format=form)
        return bool(form.model_validate_json(answer.choices[0].message.content))

    return {
        "chat": lambda: bool(complete(**options, max_tokens=24).choices[0].message.content),
        "stream": lambda: (
            sum(bool(x.choices[0].delta.content) for x in complete(**options, max_tokens=24, stream=True)) > 1
        ),
        "tool": tool,
        "structured": structured,
    }


def instructor(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of instructor, which reads pydantic models from tool calls or from a JSON schema."""
    import instructor as package
    from openai import OpenAI
    from pydantic import create_model

    # The model is random: only a schema without other properties makes it end its object.
    form = create_model("place", __config__={"extra": "forbid"}, days=(bool, ...))

    def by(mode: Any) -> bool:
        client = package.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=mode)
        messages: Any = [{"role": "user", "content": QUESTION}]
        return isinstance(client.create(model=MODEL, messages=messages, max_tokens=TOKENS, response_model=form), form)

    return {"tool": lambda: by(package.Mode.TOOLS), "structured": lambda: by(package.Mode.JSON_SCHEMA)}


def pydantic_ai(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of pydantic-ai's class Agent by name, for the server at `url`."""
    from pydantic import create_model
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    form = create_model("place", days=(bool, ...))
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))

    def agent(tokens: int, output: Any = str) -> Any:
        return Agent(model, output_type=output, model_settings={"max_tokens": tokens})

    def stream() -> bool:
        result = agent(24).run_stream_sync(QUESTION)
        return sum(1 for _ in result.stream_text(delta=True, debounce_by=None)) > 1

    return {
        "chat": lambda: bool(agent(24).run_sync(QUESTION).output),
        "stream": stream,
        "tool": lambda: isinstance(agent(TOKENS, ToolOutput(form)).run_sync(QUESTION).output, form),
        "structured": lambda: isinstance(agent(TOKENS, NativeOutput(form)).run_sync(QUESTION).output, form),
    }


def lm_eval(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of lm-eval's API models, which generate. The server refuses the logprobs of their prompts."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(base_url=f"{url}/v1/completions", model=MODEL, tokenizer_backend=None)
    form: Any = {"until": ["zzz"], "max_gen_toks": 24}
    instance: Any = Instance(request_type="generate_until", doc={}, arguments=(QUESTION, form), idx=0)
    return {"chat": lambda: bool(model.generate_until([instance])[0])}


def aider(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of aider's command, which asks one question and prints the answer with its tokens.

    A random model seldom ends an answer, and aider reports an answer without an end as an error: a stop text ends it.
    """
    options = ["--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--openai-api-key", KEY]
    options += ["--message", QUESTION, "--chat-mode", "ask", "--map-tokens", "0", "--no-git", "--yes-always"]
    options += ["--no-pretty", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"]

    def ask(stream: str) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            settings = Path(folder, "settings.yml")
            settings.write_text(json.dumps([{"name": f"openai/{MODEL}", "extra_params": {"stop": ["jjj"]}}]))
            command = [sys.executable, "-m", "aider", *options, "--model-settings-file", str(settings), stream]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        if not re.search(r"Tokens: .* received", done.stdout):
            raise RuntimeError((done.stderr or done.stdout)[-300:])
        return True

    return {"chat": lambda: ask("--no-stream"), "stream": lambda: ask("--stream")}


def guidellm(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of guidellm's benchmark, which sends streamed requests and counts those that succeed."""

    def stream() -> bool:
        with tempfile.TemporaryDirectory() as folder:
            prompts = Path(folder, "prompts.jsonl")
            prompts.write_text("".join(json.dumps({"prompt": QUESTION}) + "\n" for _ in range(4)))
            report = Path(folder, "report.json")
            command = [sys.executable, "-m", "guidellm", "run", "--profile", "kind=synchronous", "--disable-console"]
            command += ["--backend", f"kind=openai_http,target={url},model={MODEL}"]
            command += ["--constraint", "kind=max_requests,count=2", "--data", f"kind=json_file,path={prompts}"]
            command += ["--output", f"kind=json,path={report}"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
            if not report.exists():
                raise RuntimeError((done.stderr or done.stdout)[-300:])
            requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
        return len(requests["successful"]) >= 2 and not requests["errored"]

    return {"stream": stream}


def open_webui(url: str) -> dict[str, Callable[[], bool]]:
    """Return the checks of Open WebUI, which passes chats from its own API on to the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without a login; with embeddings by an API, for which the program loads no model when it starts.
    settings = {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "ENABLE_OLLAMA_API": "false"}
    settings |= {"WEBUI_AUTH": "False", "RAG_EMBEDDING_ENGINE": "openai", "OFFLINE_MODE": "true"}
    # Where Python is told to write no bytecode, every start would compile a thousand modules again.
    settings |= {"PYTHONDONTWRITEBYTECODE": ""}
    folder = tempfile.TemporaryDirectory()
    program = Path(sys.executable).with_name("open-webui")
    child = subprocess.Popen(
        [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, **settings, "DATA_DIR": folder.name, "WEBUI_SECRET_KEY": "secret"},
        cwd=folder.name,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def end() -> None:
        child.terminate()
        child.wait(60)
        folder.cleanup()

    atexit.register(end)

    def call(path: str, body: Any = None, token: str = "") -> bytes:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())

    def sign_in() -> str:
        end = time.monotonic() + 1200
        while child.poll() is None and time.monotonic() < end:
            with contextlib.suppress(ConnectionError, urllib.error.URLError):
                call("/health")
                break
            time.sleep(1)
        return str(json.loads(call("/api/v1/auths/signin", {"email": "", "password": ""}))["token"])

    token = sign_in()
    names = [one["id"] for one in json.loads(call("/api/models", token=token))["data"]]
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24}

    def chat(*, stream: bool) -> bytes:
        assert MODEL in names, names
        return call("/api/chat/completions", {**body, "stream": stream}, token)

    return {
        "chat": lambda: bool(json.loads(chat(stream=False))["choices"][0]["message"]["content"]),
        "stream": lambda: chat(stream=True).count(b'"content"') > 2,
    }


# The package of each Python client, its module, and its checks.
CLIENTS: dict[str, tuple[str, str, Callable[[str], dict[str, Callable[[], bool]]]]] = {
    "OpenAI": ("openai", "openai", openai),
    "Anthropic": ("anthropic", "anthropic", anthropic),
    "LangChain": ("langchain-openai", "langchain_openai", langchain),
    "LlamaIndex": ("llama-index-llms-openai-like", "llama_index.llms.openai_like", llama_index),
    "litellm": ("litellm", "litellm", litellm),
    "instructor": ("instructor", "instructor", instructor),
    "pydantic-ai": ("pydantic-ai-slim", "pydantic_ai", pydantic_ai),
    "lm-eval": ("lm_eval", "lm_eval", lm_eval),
    "guidellm": ("guidellm", "guidellm", guidellm),
    "aider": ("aider-chat", "aider", aider),
    "Open WebUI": ("open-webui", "open_webui", open_webui),
}


def outcome(check: Callable[[], bool]) -> str:
    """Return "ok", or why a check fails."""
    try:
        return "ok" if check() else "wrong"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def run_client(name: str, url: str) -> None:
    """Print the version and the outcomes of one client as JSON; nothing if the client is not installed."""
    package, module, checks = CLIENTS[name]
    try:
        installed = util.find_spec(module) is not None
    except ModuleNotFoundError:
        installed = False
    if installed:
        outcomes = {check: outcome(run) for check, run in checks(url).items()}
        print(json.dumps({"package": package, "version": metadata.version(package), **outcomes}))


def row_of(python: str, name: str, url: str) -> dict[str, str]:
    """Return the version and the outcomes of a client in an interpreter's environment; none if it is not installed."""
    command = [python, __file__, "--client", name, "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.stdout:
        row: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return row
    return {"chat": done.stderr[-300:]} if done.returncode else {}


def run_ai_sdk(folder: Path, url: str) -> dict[str, str]:
    """Return the version and the outcomes of Vercel's AI SDK, from a folder with its node_modules."""
    script = folder / "clients.mjs"
    script.write_text(AI_SDK)
    done = subprocess.run(["node", script.name, url], cwd=folder, capture_output=True, text=True, timeout=120)
    version = json.loads((folder / "node_modules" / "ai" / "package.json").read_text())["version"]
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"chat": done.stderr[-300:]}
    return {"package": "ai", "version": version, **outcomes}


def serve(folder: Path, artifact: Path | None) -> subprocess.Popen[str]:
    """Start a server of an artifact, or of the tests' tiny model with a tokenizer and a chat template for tools."""
    if artifact is not None:
        command = [sys.executable, "-m", "kvexport", "serve", str(artifact), "--port", "0", "--name", MODEL]
        os.environ["CLIENTS_TOOL_CHOICE"] = "auto"  # the clients inherit it
        return subprocess.Popen([*command, "--drain", "0"], stdout=subprocess.PIPE, text=True)
    import kvexport
    from kvexport.recipe.fields import Recipe
    from tests.support.json_model import TEMPLATE, json_tokenizer
    from tests.support.tiny_model import RECIPE, make_checkpoint

    checkpoint = make_checkpoint(folder / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    json_tokenizer().save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    sections = {**RECIPE, "model": {"path": str(checkpoint)}, "limits": {"max_length": 16384, "max_batch": 4}}
    artifact = kvexport.build(Recipe.model_validate(sections), folder / "artifact")
    command = [sys.executable, "-m", "kvexport", "serve", str(artifact), "--port", "0", "--name", MODEL]
    return subprocess.Popen([*command, "--threads", "1", "--drain", "0"], stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append")
    parser.add_argument("--node", type=Path)
    parser.add_argument("--client", choices=CLIENTS)
    parser.add_argument("--model", type=Path, metavar="ARTIFACT")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.url:
        run_client(options.client, options.url)
        return
    from benchmarks.common import save

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        server = serve(Path(folder), options.model)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            for name in [options.client] if options.client else CLIENTS:
                for python in options.python or [sys.executable]:
                    if row := row_of(python, name, url):
                        results[name] = row
                        break
            if options.node:
                results["AI SDK"] = run_ai_sdk(options.node, url)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    print(json.dumps(results, indent=1))
    parts = ["clients", options.model and options.model.name.lower(), options.client and options.client.lower()]
    print(save("-".join(part.replace(" ", "-") for part in parts if part), results))


if __name__ == "__main__":
    main()
