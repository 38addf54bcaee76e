"""`kvexport serve`: an artifact behind the HTTP APIs that clients already speak."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated

import typer

from kvexport.commands.options import ArtifactArgument, BackendOption
from kvexport.errors import UsageError
from kvexport.serve.settings import check_keys
from kvexport.units import parse_bytes

KEY_VARIABLE = "KVEXPORT_API_KEY"


def serve(
    artifact: ArtifactArgument,
    host: Annotated[str, typer.Option(help="The address to listen on; others than this machine's need a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help=f"Clients need one of these; repeatable. Or {KEY_VARIABLE}.")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of the model in requests; repeatable; '*' = any.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name of a server without keys; repeatable.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A web page's origin that may call it; repeatable.")
    ] = None,
    lanes: Annotated[int | None, typer.Option(min=1, help="Requests that run at once; limits.max_batch.")] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for a lane.")] = 256,
    latency_budget: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="That several prompts in one call may hold up others.")
    ] = 0.1,
    prefix_memory: Annotated[
        str, typer.Option(metavar="BYTES", help="For the states of what prompts begin with; 0 = off.")
    ] = "1GiB",
    session_memory: Annotated[str, typer.Option(metavar="BYTES", help="For the states of sessions.")] = "1GiB",
    session_folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where sessions go that no memory is left for, and at the end.")
    ] = None,
    session_disk: Annotated[str, typer.Option(metavar="BYTES", help="Of that folder, at most.")] = "16GiB",
    session_shared: Annotated[
        bool, typer.Option("--session-shared", help="Other servers use that folder too: every turn is written at once.")
    ] = False,
    preempt: Annotated[bool, typer.Option("--preempt", help="A better priority takes the lane of a worse.")] = False,
    reasoning: Annotated[bool, typer.Option(help="Tell <think> ... </think> apart from answers.")] = True,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one answer.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one request may take.")] = 1800.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that running requests get when it ends.")] = 30.0,
    threads: Annotated[int | None, typer.Option(min=0, help="Of the model, in place of the recipe's.")] = None,
    backend: BackendOption = None,
) -> None:
    """Serve an artifact over HTTP: /v1/chat/completions and others, and a page to chat at /.

    When it is ready it prints its address on stdout. SIGTERM and an interrupt let running requests end.
    docs/tasks/serve.md has the routes, limits, metrics and what is done for security.
    """
    keys = keys_of(host, api_key)
    from kvexport.packages import require

    require("serve")
    from kvexport.engine.load import load
    from kvexport.serve.app import create_app
    from kvexport.serve.run import listen, run
    from kvexport.serve.settings import ServeSettings
    from kvexport.terminal import show

    settings = ServeSettings(
        names=tuple(name or (artifact.resolve().name,)),
        api_keys=keys,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        preempts=preempt,
        reasoning=reasoning,
        queue=queue,
        max_tokens=max_tokens,
        latency_budget=latency_budget,
        prefix_memory=parse_bytes(prefix_memory),
        session_memory=parse_bytes(session_memory),
        session_folder=None if session_folder is None else str(session_folder),
        session_disk=parse_bytes(session_disk),
        session_shared=session_shared,
        timeout=timeout,
        drain=drain,
    )
    listener = listen(host, port, settings.stall)  # before the model is loaded: that takes longer
    with show(f"loading {artifact}"):
        app = create_app(load(artifact, backend=backend, threads=threads, lanes=lanes), settings)
    shown = f"[{host}]" if ":" in host else host
    run(app, listener, lambda: print(f"http://{shown}:{listener.getsockname()[1]}", flush=True))


def keys_of(host: str, api_key: list[str] | None) -> tuple[str, ...]:
    """Return the keys of a server: those of the command line, and the one of the environment.

    Raises:
        UsageError: A key is empty or cannot be sent in a header, or there is no key and other machines reach `host`.
    """
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
