"""`kvexport serve` on Ray Serve, with several replicas (docs/tasks/deploy.md).

    pip install 'kvexport[serve]' 'ray[serve]>=2.60'
    python docker/ray_serve.py ARTIFACT --replicas 2 --cpus 4 --session-folder sessions

It runs on the cluster that RAY_ADDRESS names, or on a new one on this machine, until SIGINT or SIGTERM ends it. Every
node needs kvexport, and the artifact at the same path. Ray's HTTP proxy hands each request to one replica, and its
consistent-hash router sends all requests with the same header X-Session-Id to the same one.
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from kvexport.artifact.reading import load_manifest
from kvexport.commands.serve import keys_of
from kvexport.serve.settings import ServeSettings

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


class Replica:
    """One replica: the HTTP server of `kvexport serve` with an engine of its own."""

    def __init__(self, artifact: Path, settings: ServeSettings, threads: int, lanes: int) -> None:
        from kvexport.engine.load import load
        from kvexport.serve.app import create_app

        self._app = create_app(load(artifact, threads=threads, lanes=lanes), settings)
        self._began = False

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application that Ray Serve calls with every HTTP request."""
        return self._app

    def check_health(self) -> None:
        """Raise RuntimeError if the engine's thread has ended; Ray then starts another replica."""
        alive = self._app.state.service.worker.alive
        if self._began and not alive:
            raise RuntimeError("the engine's thread has ended")
        self._began = self._began or alive


def application(options: argparse.Namespace) -> Any:
    """Return Ray Serve's application: replicas behind Ray's consistent-hash router."""
    artifact = options.artifact.resolve()
    lanes = options.lanes or load_manifest(artifact).limits.max_batch
    folder = options.session_folder
    settings = ServeSettings(
        names=tuple(options.name or (artifact.name,)),
        api_keys=keys_of(options.host, options.api_key),
        session_folder=None if folder is None else str(folder.absolute()),
        session_shared=folder is not None,
    )
    count: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas > options.replicas:
        scaling = AutoscalingConfig(
            min_replicas=options.replicas, max_replicas=options.max_replicas, target_ongoing_requests=lanes
        )
        count = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="replica",
        **count,
        max_ongoing_requests=2 * lanes,  # a full replica's requests go to the next one
        max_queued_requests=settings.queue,
        ray_actor_options={"num_cpus": options.cpus},
        graceful_shutdown_timeout_s=settings.drain,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    return deployment.bind(artifact, settings, options.cpus, lanes)


def main(words: Sequence[str] | None = None) -> None:
    """Serve an artifact until a signal ends this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=0, help="the most replicas under load")
    parser.add_argument("--cpus", type=int, default=1, help="the cores of a replica, and the threads of its model")
    parser.add_argument("--lanes", type=int, help="the lanes of a replica; else those of the artifact")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", action="append", help="a key of clients; also KVEXPORT_API_KEY")
    parser.add_argument("--name", action="append", help="the model's name in requests")
    parser.add_argument("--session-folder", type=Path, help="a folder that all nodes share, at the same path")
    options = parser.parse_args(words)
    built = application(options)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    serve.start(http_options={"host": options.host, "port": options.port})
    try:
        serve.run(built, name="kvexport")
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray's own end the process by an abort
        print(f"http://{options.host}:{options.port}", flush=True)
        threading.Event().wait()
    finally:
        serve.delete("kvexport")
        ray.shutdown()  # before the interpreter ends, at whose end Ray's threads abort


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `finally` runs
    with suppress(KeyboardInterrupt):
        main()
