"""The commands `kvexport deploy ...`, which prepare an artifact for Triton, Kubernetes or Ray Serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvexport.commands.options import ArtifactArgument
from kvexport.commands.serve import keys_of
from kvexport.units import parse_bytes


def deploy_triton(
    artifact: ArtifactArgument,
    out: Annotated[
        Path,
        typer.Option(metavar="REPO", help="The folder of the model repository. An earlier repository is replaced."),
    ],
    kind: Annotated[
        str, typer.Option(help="state: one ONNX graph whose cache Triton keeps. python: kvexport's engine.")
    ] = ("state"),
    name: Annotated[str | None, typer.Option(help="The name of the model. [default: the artifact's folder]")] = None,
) -> None:
    """Write a model repository for NVIDIA's Triton Inference Server.

    `kvexport docs tasks/deploy` explains how to call it.
    """
    from kvexport.deploy.triton import write_repository
    from kvexport.terminal import show

    with show(f"writing {out}"):
        model = write_repository(artifact, out, kind, name)
    print(out / model)


def deploy_kubernetes(
    artifact: ArtifactArgument,
    name: Annotated[str | None, typer.Option(help="The name of all objects. [default: the artifact's folder]")] = None,
    image: Annotated[
        str, typer.Option(help="An image with kvexport[serve], such as that of docker/cpu.Dockerfile.")
    ] = "kvexport:cpu",
    claim: Annotated[
        str | None, typer.Option(help="The claim of the volume that holds the artifact. [default: NAME-artifact]")
    ] = None,
    cpus: Annotated[int, typer.Option(min=1, help="The cores of a server, and the threads of its model.")] = 4,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="The requests that run at once. [default: limits.max_batch]")
    ] = None,
    drain: Annotated[int, typer.Option(min=0, help="The seconds that running requests get when a server ends.")] = 30,
    prefix_memory: Annotated[
        str, typer.Option(metavar="BYTES", help="The memory for prefixes; see kvexport serve.")
    ] = "1GiB",
    session_memory: Annotated[
        str, typer.Option(metavar="BYTES", help="The memory for sessions; see kvexport serve.")
    ] = "1GiB",
    session_disk: Annotated[
        str, typer.Option(metavar="BYTES", help="The disk space for sessions; see kvexport serve.")
    ] = "16GiB",
    replicas: Annotated[
        int, typer.Option(min=1, help="The number of servers. Several servers share the volume of sessions.")
    ] = 1,
) -> None:
    """Print Kubernetes manifests of `kvexport serve`, with the memory that the artifact needs."""
    from kvexport.deploy.kubernetes import Server, manifests

    name = name or artifact.resolve().name
    prefixes, sessions, disk = (parse_bytes(text) for text in (prefix_memory, session_memory, session_disk))
    claim = claim or f"{name}-artifact"
    server = Server(image, name, claim, cpus, lanes, drain, prefixes, sessions, disk, replicas)
    print(manifests(artifact, server), end="")


def deploy_ray(
    artifact: ArtifactArgument,
    replicas: Annotated[
        int, typer.Option(min=1, help="The number of servers, each with its own copy of the model.")
    ] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="The largest number of servers under load. [default: --replicas]")
    ] = None,
    cpus: Annotated[int, typer.Option(min=1, help="The cores of a server, and the threads of its model.")] = 1,
    lanes: Annotated[int | None, typer.Option(min=1, help="The lanes of a server. [default: limits.max_batch]")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; see kvexport serve.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A key of clients; repeatable. See kvexport serve.")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="The model's name in requests; repeatable.")
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="The requests that may wait for a server.")] = 256,
    session_folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of sessions, at the same path on every node.")
    ] = None,
    drain: Annotated[
        float, typer.Option(min=0, help="The seconds that running requests get when a server ends.")
    ] = 30.0,
) -> None:
    """Serve an artifact on Ray Serve with the routes of `kvexport serve`, by several replicas."""
    keys = keys_of(host, api_key)
    from kvexport.packages import require

    require("serve")
    from kvexport.deploy.ray import Cluster, run
    from kvexport.serve.settings import ServeSettings

    settings = ServeSettings(
        names=tuple(name or (artifact.resolve().name,)),
        api_keys=keys,
        queue=queue,
        drain=drain,
        session_folder=None if session_folder is None else str(session_folder.absolute()),
        session_shared=session_folder is not None,
    )
    cluster = Cluster(replicas, max_replicas, cpus, lanes)
    run(artifact, settings, cluster, host, port, lambda: print(f"http://{host}:{port}", flush=True))
