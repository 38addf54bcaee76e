"""`kvexport deploy`: an artifact for the platforms that serve models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvexport.commands.options import ArtifactArgument
from kvexport.units import parse_bytes


def deploy_triton(
    artifact: ArtifactArgument,
    out: Annotated[Path, typer.Option(metavar="REPO", help="The model repository; one written before is replaced.")],
    kind: Annotated[str, typer.Option(help="state: one ONNX graph whose cache Triton keeps; python: the engine.")] = (
        "state"
    ),
    name: Annotated[str | None, typer.Option(help="Of the model; that of the artifact's folder.")] = None,
) -> None:
    """Write a model repository for NVIDIA's Triton Inference Server. docs/deploy.md says how clients call it."""
    from kvexport.deploy.triton import write_repository
    from kvexport.terminal import show

    with show(f"writing {out}"):
        model = write_repository(artifact, out, kind, name)
    print(out / model)


def deploy_kubernetes(
    artifact: ArtifactArgument,
    name: Annotated[str | None, typer.Option(help="Of all objects; that of the artifact's folder.")] = None,
    image: Annotated[str, typer.Option(help="With kvexport[serve]; docker/cpu.Dockerfile makes one.")] = "kvexport:cpu",
    claim: Annotated[str | None, typer.Option(help="Of the volume that is the artifact; NAME-artifact.")] = None,
    cpus: Annotated[int, typer.Option(min=1, help="Of the server, and threads of the model.")] = 4,
    lanes: Annotated[int | None, typer.Option(min=1, help="Requests that run at once; limits.max_batch.")] = None,
    drain: Annotated[int, typer.Option(min=0, help="Seconds that running requests get when it ends.")] = 30,
    prefix_memory: Annotated[str, typer.Option(metavar="BYTES", help="As serve's.")] = "1GiB",
    session_memory: Annotated[str, typer.Option(metavar="BYTES", help="As serve's.")] = "1GiB",
    session_disk: Annotated[str, typer.Option(metavar="BYTES", help="As serve's.")] = "16GiB",
) -> None:
    """Print Kubernetes manifests of `kvexport serve`, with the memory that the artifact takes."""
    from kvexport.deploy.kubernetes import Server, manifests

    name = name or artifact.resolve().name
    sizes = [parse_bytes(text) for text in (prefix_memory, session_memory, session_disk)]
    server = Server(image, name, claim or f"{name}-artifact", cpus, lanes, drain, *sizes)
    print(manifests(artifact, server), end="")
