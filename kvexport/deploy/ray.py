"""Deployment of `kvexport serve` on Ray Serve, with several replicas.

Ray's HTTP proxy hands each request to one of several replicas, each with an engine. Ray's consistent-hash router sends
all requests with the same header X-Session-Id to the same replica.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexport.artifact.reading import load_manifest
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.packages import is_there
from kvexport.serve.settings import ServeSettings

NAME, REPLICA = "kvexport", "replica"
_BY_SESSION = "ray.serve.experimental.consistent_hash_router"


@dataclass(frozen=True)
class Cluster:
    """The number of replicas of a Ray Serve deployment, and the size of each.

    Attributes:
        replicas: Smallest number of replicas.
        most: Largest number of replicas under load; None is `replicas`.
        cpus: CPU cores of a replica, and threads of its engine.
        lanes: Lanes of a replica; None is as many as the artifact was built for.
    """

    replicas: int = 1
    most: int | None = None
    cpus: int = 1
    lanes: int | None = None


def run(
    artifact: Path, settings: ServeSettings, cluster: Cluster, host: str, port: int, on_ready: Callable[[], None]
) -> None:
    """Serve an artifact on the Ray cluster that RAY_ADDRESS names, or on a new local one, until a signal ends it.

    Args:
        artifact: The artifact, at the same path on every node.
        settings: Settings of each replica's server. The folder of sessions is at the same path on every node.
        cluster: Sizes of the deployment.
        host: Address that Ray's HTTP proxy listens on.
        port: Port of the proxy.
        on_ready: Called when the replicas answer.

    Raises:
        EnvironmentProblem: Ray Serve is missing or too old.
        UsageError: The sizes contradict the artifact or one another.
        ArtifactError: The artifact is damaged.
    """
    serve = ray_serve()
    manifest = load_manifest(artifact)
    lanes = cluster.lanes or manifest.limits.max_batch
    if lanes > manifest.limits.max_batch:
        most = manifest.limits.max_batch
        raise UsageError(f"--lanes is {lanes}, the artifact was built for {most}", f"--lanes {most} or fewer")
    if cluster.most is not None and cluster.most < cluster.replicas:
        problem = f"--max-replicas is {cluster.most}, and --replicas {cluster.replicas}"
        raise UsageError(problem, f"--max-replicas {cluster.replicas} or more")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(_application(serve, artifact.resolve(), settings, cluster, lanes), name=NAME)
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray's own end the process by an abort
        on_ready()
        threading.Event().wait()
    finally:
        serve.delete(NAME)
        importlib.import_module("ray").shutdown()  # before the interpreter ends, at whose end Ray's threads abort


class Replica:
    """One Ray Serve replica: the HTTP server of `kvexport serve` with an engine of its own."""

    def __init__(self, artifact: Path, settings: ServeSettings, threads: int, lanes: int) -> None:
        from kvexport.engine.load import load
        from kvexport.serve.app import create_app

        self._app = create_app(load(artifact, threads=threads, lanes=lanes), settings)
        self._began = False

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application that Ray Serve calls with every HTTP request."""
        return self._app

    def check_health(self) -> None:
        """Check for Ray Serve that the engine's thread still runs.

        Raises:
            RuntimeError: The thread has ended. Ray then starts another replica.
        """
        alive = self._app.state.service.worker.alive
        if self._began and not alive:
            raise RuntimeError("the engine's thread has ended")
        self._began = self._began or alive


def _application(serve: Any, artifact: Path, settings: ServeSettings, cluster: Cluster, lanes: int) -> Any:
    """Return Ray Serve's application: replicas behind Ray's consistent-hash router."""
    config = importlib.import_module("ray.serve.config")
    most = cluster.replicas if cluster.most is None else cluster.most
    count: dict[str, Any] = {"num_replicas": cluster.replicas}
    if most > cluster.replicas:
        scaling = config.AutoscalingConfig(
            min_replicas=cluster.replicas, max_replicas=most, target_ongoing_requests=lanes
        )
        count = {"autoscaling_config": scaling}
    return serve.deployment(
        serve.ingress()(Replica),
        name=REPLICA,
        **count,
        max_ongoing_requests=2 * lanes,  # a full replica's requests go to the next one
        max_queued_requests=settings.queue,
        ray_actor_options={"num_cpus": cluster.cpus},
        graceful_shutdown_timeout_s=settings.drain,
        request_router_config=config.RequestRouterConfig(request_router_class=f"{_BY_SESSION}.ConsistentHashRouter"),
    ).bind(artifact, settings, cluster.cpus, lanes)


def ray_serve() -> Any:
    """Import and return the module ray.serve.

    Raises:
        EnvironmentProblem: Ray Serve is not installed, or older than 2.60.
    """
    if not is_there("ray.serve"):
        raise EnvironmentProblem("deploy ray needs Ray Serve, which is not installed", "pip install 'ray[serve]>=2.60'")
    if not is_there(_BY_SESSION):
        raise EnvironmentProblem("deploy ray needs Ray Serve 2.60 or newer", "pip install -U 'ray[serve]>=2.60'")
    return importlib.import_module("ray.serve")
