"""The server of `kvexport serve` on Ray Serve: its routes behind Ray's HTTP proxy."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvexport.artifact.reading import load_manifest
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.packages import is_there
from kvexport.serve.settings import ServeSettings

NAME = "kvexport"


def run(
    artifact: Path,
    settings: ServeSettings,
    *,
    host: str,
    port: int,
    replicas: int,
    cpus: int,
    lanes: int | None,
    on_ready: Callable[[], None],
) -> None:
    """Serve on the Ray cluster that RAY_ADDRESS names, or on one of this machine, until a signal ends it. Every replica
    loads the artifact, which lies at the same path on every node, and has `cpus` threads and `lanes`. Raises
    EnvironmentProblem where there is no Ray Serve, ArtifactError for a damaged artifact."""
    serve = ray_serve()
    manifest = load_manifest(artifact)
    lanes = lanes or manifest.limits.max_batch
    if lanes > manifest.limits.max_batch:
        most = manifest.limits.max_batch
        raise UsageError(f"--lanes is {lanes}, the artifact was built for {most}", f"--lanes {most} or fewer")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(_application(serve, artifact.resolve(), settings, replicas, cpus, lanes), name=NAME)
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray's own end the process by an abort
        on_ready()
        threading.Event().wait()
    finally:
        serve.delete(NAME)
        importlib.import_module("ray").shutdown()  # before the interpreter ends, at whose end Ray's threads abort


def _application(serve: Any, artifact: Path, settings: ServeSettings, replicas: int, cpus: int, lanes: int) -> Any:
    def app() -> Any:
        """In the replica: neither an engine nor its threads could be sent to one."""
        from kvexport.runtime.engine import load
        from kvexport.serve.app import create_app

        return create_app(load(artifact, threads=cpus, lanes=lanes), settings)

    class Server:
        """Nothing beside the routes."""

    deployment = serve.deployment(
        serve.ingress(app)(Server),
        name=NAME,
        num_replicas=replicas,
        max_ongoing_requests=lanes + settings.queue,  # the server has a queue of its own
        ray_actor_options={"num_cpus": cpus},
        graceful_shutdown_timeout_s=settings.drain,
    )
    return deployment.bind()


def ray_serve() -> Any:
    """The module. Raises EnvironmentProblem where it is not installed."""
    if not is_there("ray.serve"):
        raise EnvironmentProblem("deploy ray needs Ray Serve, which is not installed", "pip install 'ray[serve]'")
    return importlib.import_module("ray.serve")
