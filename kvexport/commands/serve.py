"""The command `kvexport serve`: a model behind the HTTP APIs of OpenAI and Anthropic."""

from __future__ import annotations

import ipaddress
import logging
import os
from enum import Enum
from pathlib import Path
from typing import Annotated

from kvexport.commands.options import (
    BackendOption,
    BudgetOption,
    CalibrateOption,
    DeviceOption,
    MaxLengthOption,
    SetOption,
    SourceArgument,
    adapters_of,
    backend_option,
    in_panel,
)
from kvexport.errors import UsageError
from kvexport.serve.settings import KEY_VARIABLE, check_keys
from kvexport.units import parse_bytes


class LogLevel(str, Enum):
    """The lowest level of the messages that `kvexport serve` logs."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


# Functions that make the command-line options of three groups of the help text.
server_option, request_option, session_option = (
    in_panel(name) for name in ("Server", "Requests", "Sessions and prefixes")
)


def serve(
    source: SourceArgument,
    budget: BudgetOption = None,
    max_length: MaxLengthOption = None,
    calibrate: CalibrateOption = None,
    overrides: SetOption = None,
    host: Annotated[
        str,
        server_option(help="Listen on this address. An address that other machines reach needs a key."),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        server_option(min=0, max=65535, help="Listen on this port; 0 takes any free port."),
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        server_option(
            metavar="KEY",
            help=f"Require one of these keys from clients. This option is repeatable; {KEY_VARIABLE} adds a key.",
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        server_option(
            metavar="NAME",
            help="Answer requests that name this model. This option is repeatable; '*' accepts any name.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        server_option(
            metavar="NAME=FOLDER",
            help="Load a LoRA adapter in PEFT's format, and answer requests that name it. This option is repeatable.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        server_option(
            metavar="NAME", help="Accept this host name on a server without keys. This option is repeatable."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        server_option(
            metavar="URL", help="Let web pages of this origin call the server; '*' is any. This option is repeatable."
        ),
    ] = None,
    log_level: Annotated[
        LogLevel,
        server_option(help="Write messages of this level and above to stderr; info has a line for each request."),
    ] = LogLevel.WARNING,
    drain: Annotated[
        float,
        server_option(min=0, help="Give running requests this many seconds when the server ends."),
    ] = 30.0,
    lanes: Annotated[
        int | None,
        request_option(min=1, help="Run up to this many requests at once. [default: the artifact's limits.max_batch]"),
    ] = None,
    queue: Annotated[int, request_option(min=0, help="Let at most this many requests wait for a lane.")] = 256,
    latency_budget: Annotated[
        float,
        request_option(
            min=0, metavar="SECONDS", help="Limit the time that several prompts in one call may hold up other requests."
        ),
    ] = 0.1,
    reasoning: Annotated[
        bool,
        request_option(help="Separate <think> ... </think> from the answer."),
    ] = True,
    pin_system: Annotated[
        bool,
        request_option(help="Pin system prompts and tools, if the artifact has room for them (cache.pinned)."),
    ] = True,
    max_tokens: Annotated[int | None, request_option(min=1, help="Limit every answer to this many tokens.")] = None,
    image_folder: Annotated[
        Path | None,
        request_option(
            exists=True,
            file_okay=False,
            resolve_path=True,
            metavar="DIR",
            help="Read images from files below this folder, which requests name as file:PATH.",
        ),
    ] = None,
    timeout: Annotated[float, request_option(min=1, help="End a request after this many seconds.")] = 1800.0,
    prefix_memory: Annotated[
        str,
        session_option(
            metavar="BYTES",
            help="Keep the states of prompt prefixes in this much memory; 0 keeps none. On the CPU alone.",
        ),
    ] = "1GiB",
    session_memory: Annotated[
        str,
        session_option(metavar="BYTES", help="Keep the states of sessions in this much memory."),
    ] = "1GiB",
    session_folder: Annotated[
        Path | None,
        session_option(metavar="DIR", help="Write every turn of a session to this folder before it is answered."),
    ] = None,
    session_disk: Annotated[
        str, session_option(metavar="BYTES", help="Limit the session folder to this size.")
    ] = "16GiB",
    session_shared: Annotated[
        bool,
        session_option(
            "--session-shared", help="Share the session folder with other servers, which have this option too."
        ),
    ] = False,
    threads: Annotated[
        int | None,
        backend_option(min=0, help="Run the model on this many threads in place of the recipe's."),
    ] = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
) -> None:
    """Serve a model or an artifact over HTTP: OpenAI's and Anthropic's routes under /v1.

    The server first prints on stderr how much memory it may take, and prints its address on stdout when it is ready.
    After SIGTERM or an interrupt, the server finishes the running requests first. `kvexport docs tasks/serve` describes
    routes, limits, metrics and security.

    Example: kvexport serve Qwen/Qwen3-0.6B --budget 1024
    """
    keys = keys_of(host, api_key)
    _log(log_level)
    from kvexport.packages import require

    require("serve")
    from kvexport.models import is_model, load
    from kvexport.serve.app import create_app
    from kvexport.serve.run import listen, run
    from kvexport.serve.settings import ServeSettings
    from kvexport.terminal import say, show

    adapters = adapters_of(adapter or ())
    settings = ServeSettings(
        names=tuple(name or [source if is_model(source) else Path(source).resolve().name]),
        api_keys=keys,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        reasoning=reasoning,
        pins_system=pin_system,
        queue=queue,
        max_tokens=max_tokens,
        image_folder=None if image_folder is None else str(image_folder),
        latency_budget=latency_budget,
        prefix_memory=parse_bytes(prefix_memory),
        session_memory=parse_bytes(session_memory),
        session_folder=None if session_folder is None else str(session_folder),
        session_disk=parse_bytes(session_disk),
        session_shared=session_shared,
        timeout=timeout,
        drain=drain,
    )
    listener = listen(host, port, settings.stall)  # reports a port in use before a model is loaded
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"

    def ready() -> None:
        print(url, flush=True)
        say(f"ready: OpenAI's API at {url}/v1, Anthropic's at {url}")

    engine = load(
        source,
        budget=budget,
        max_length=max_length,
        overrides=overrides or (),
        calibrate=calibrate,
        backend=backend,
        device=device,
        threads=threads,
        lanes=lanes,
        adapters=adapters,
        progress=show,
    )
    app = create_app(engine, settings)
    say(f"memory: {app.state.service.memory}")
    run(app, listener, ready)


def _log(level: LogLevel) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("kvexport")
    logger.setLevel(level.value.upper())
    logger.addHandler(handler)
    logger.propagate = False


def keys_of(host: str, api_key: list[str] | None) -> tuple[str, ...]:
    """Return the API keys of a server, from the command line and from the environment variable."""
    keys = tuple(api_key or ())
    if KEY_VARIABLE in os.environ:
        keys = (*keys, os.environ[KEY_VARIABLE])
    check_keys(keys)
    if not keys and not _is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines in, and there is no API key",
            f"--api-key KEY, or {KEY_VARIABLE}=KEY in the environment",
        )
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
