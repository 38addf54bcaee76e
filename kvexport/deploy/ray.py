"""The server of `kvexport serve` on Ray Serve: routers behind Ray's HTTP proxy, and replicas, each with an engine."""

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
_BY_KEY = "ray.serve.experimental.consistent_hash_router"


@dataclass(frozen=True)
class Cluster:
    """replicas: at least. most: as many as there may be under load; None = no more. cpus: of a replica, and threads of
    its engine. lanes: of a replica, None = as many as the artifact was built for."""

    replicas: int = 1
    most: int | None = None
    cpus: int = 1
    lanes: int | None = None


def run(
    artifact: Path, settings: ServeSettings, cluster: Cluster, host: str, port: int, on_ready: Callable[[], None]
) -> None:
    """Serve on the Ray cluster that RAY_ADDRESS names, or on one of this machine, until a signal ends it. Every replica
    loads the artifact, which lies at the same path on every node, as does the folder of sessions. Raises
    EnvironmentProblem where there is no Ray Serve, UsageError for a cluster that cannot be, ArtifactError for a damaged
    artifact."""
    serve = ray_serve()
    manifest = load_manifest(artifact)
    lanes = cluster.lanes or manifest.limits.max_batch
    if lanes > manifest.limits.max_batch:
        most = manifest.limits.max_batch
        raise UsageError(f"--lanes is {lanes}, the artifact was built for {most}", f"--lanes {most} or fewer")
    if cluster.most is not None and cluster.most < cluster.replicas:
        said = f"--max-replicas is {cluster.most}, and --replicas {cluster.replicas}"
        raise UsageError(said, f"--max-replicas {cluster.replicas} or more")
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


def _application(serve: Any, artifact: Path, settings: ServeSettings, cluster: Cluster, lanes: int) -> Any:
    from kvexport.deploy.replicas import Replica

    config = importlib.import_module("ray.serve.config")
    most = cluster.replicas if cluster.most is None else cluster.most
    count: dict[str, Any] = {"num_replicas": cluster.replicas}
    if most > cluster.replicas:
        scaling = config.AutoscalingConfig(
            min_replicas=cluster.replicas, max_replicas=most, target_ongoing_requests=lanes
        )
        count = {"autoscaling_config": scaling}
    replicas = serve.deployment(
        Replica,
        name=REPLICA,
        **count,
        max_ongoing_requests=2 * lanes,  # those of a replica that is full go to the next one
        max_queued_requests=settings.queue,
        ray_actor_options={"num_cpus": cluster.cpus},
        graceful_shutdown_timeout_s=settings.drain,
        request_router_config=config.RequestRouterConfig(request_router_class=f"{_BY_KEY}.ConsistentHashRouter"),
    ).bind(artifact, settings, cluster.cpus, lanes)

    def router() -> Any:
        """In the router's process."""
        return _router(artifact, settings)

    class Routers:
        """Nothing beside the routes."""

        def __init__(self, _: Any) -> None:
            """The argument lets Ray know of the replicas."""

    routers = serve.deployment(
        serve.ingress(router)(Routers),
        name=NAME,
        num_replicas=min(2, most),
        max_ongoing_requests=most * (2 * lanes + settings.queue),
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.drain,
    )
    return routers.bind(replicas)


def _router(artifact: Path, settings: ServeSettings) -> Any:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Mount

    from kvexport.deploy.replicas import Router
    from kvexport.serve.guard import Guard
    from kvexport.serve.service import session_bytes

    handle = ray_serve().get_deployment_handle(REPLICA, app_name=NAME).options(stream=True, method_name="answer")
    manifest = load_manifest(artifact, verify=False)
    full = importlib.import_module("ray.serve.exceptions").BackPressureError
    router = Router(
        lambda key, *request: handle.options(session_id=key).remote(*request), settings, session_bytes(manifest), full
    )
    return Starlette(routes=[Mount("/", router)], middleware=[Middleware(Guard, settings=settings)])


def ray_serve() -> Any:
    """The module. Raises EnvironmentProblem where it is not installed, or too old."""
    if not is_there("ray.serve"):
        raise EnvironmentProblem("deploy ray needs Ray Serve, which is not installed", "pip install 'ray[serve]>=2.60'")
    if not is_there(_BY_KEY):
        raise EnvironmentProblem("deploy ray needs Ray Serve 2.60 or newer", "pip install -U 'ray[serve]>=2.60'")
    return importlib.import_module("ray.serve")
